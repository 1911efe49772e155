# SPDX-License-Identifier: Apache-2.0
"""Optax chains: the noise link accepts the clipped sum of its own rule, and nothing else."""

import copy
import pickle
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills

import dpjax
from dpjax import clipping, noise, sampling, strategies, testing, trees
from dpjax.types import Draw, Partition

RULE = clipping.flat(1.0)
MECHANISM = dpjax.Mechanism(sampling=sampling.full(4), clipping=RULE, noise_multiplier=1.0, steps=3)
PARAMS = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}
GRADIENTS = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), PARAMS)


KINDS = ["in memory", "streamed"]


def clip(rule=RULE):
    return dpjax.clip_and_sum(rule)


def noised(rule=RULE, seed=0):
    return noise.gaussian(1.0, rule, key=jax.random.key(seed))


def privatized():
    return MECHANISM.privatize(jax.random.key(0))


def plain_sum():
    return optax.stateless(lambda g, p: jax.tree.map(lambda x: x.sum(axis=0), g))


def mean():
    return optax.stateless(lambda g, p: jax.tree.map(lambda x: x / 4, g))


def halves(*groups):
    return clipping.per_group((0.5, 0.5), groups=Partition(("one", "two"), lambda tree: groups))


WRONG = {
    "equal bounds of other groups": ([clip(halves(0, 1)), noised(halves(1, 0))], "one rule"),
    "another bound": ([clip(clipping.flat(10.0)), noised()], "expected one rule"),
    "other groups": ([clip(clipping.grouped(total=1.0, groups=2)), noised()], "expected one rule"),
    "scale between": ([clip(), optax.scale(10.0), noised()], "stands between"),
    "mean between": ([clip(), mean(), noised()], "stands between"),
    "Adam between": ([clip(), optax.scale_by_adam(), noised()], "stands between"),
    "sign between": ([clip(), optax.scale_by_sign(), noised()], "stands between"),
    "momentum between": ([clip(), optax.trace(0.9), noised()], "stands between"),
    "weight decay between": ([clip(), optax.add_decayed_weights(0.1), noised()], "stands between"),
    "apply_every between": ([clip(), optax.apply_every(2), noised()], "stands between"),
    "no clipping": ([plain_sum(), noised()], "no clip_and_sum"),
    "noise first": ([noised(), clip()], "no clip_and_sum"),
    "noise twice": ([clip(), noised(), noised(seed=1)], "stands between"),
    "masked noise": (
        [clip(), optax.masked(noised(), {"a": True, "b": False})],
        "1 of the 2 leaves",
    ),
    "one leaf scaled": (
        [clip(), optax.masked(optax.scale(10.0), {"a": True, "b": False}), noised()],
        "1 of the 2 leaves",
    ),
    "masked clipping": ([optax.masked(clip(), {"a": True, "b": False}), noised()], "are masked"),
    "MultiSteps between": ([clip(), optax.MultiSteps(noised(), 2)], "stands between"),
    "MultiSteps around": (
        [optax.MultiSteps(optax.chain(clip(), noised()), 2)],
        "optax.MultiSteps stands around",
    ),
    "scale before privatize": ([clip(), optax.scale(10.0), privatized()], "stands between"),
    "no clipping before privatize": ([plain_sum(), privatized()], "no clip_and_sum"),
    "noise at some steps": (
        [clip(), optax.conditionally_transform(noised(), lambda step: step > 0)],
        "in another trace",
    ),
    "privatize at some steps": (
        [clip(), optax.conditionally_transform(privatized(), lambda step: step > 0)],
        "in another trace",
    ),
}


def updated(links, jitted):
    chain = optax.chain(*links)
    update = jax.jit(chain.update) if jitted else chain.update
    _, state = update(GRADIENTS, chain.init(PARAMS), PARAMS)
    return update(GRADIENTS, state, PARAMS)


@pytest.mark.sample(2)
@kills(
    "_marks.py",
    "if what != wanted:",
    "if what[1:] != wanted[1:]:",
    case="False-another bound",
    slow=True,
)
@kills(
    "_marks.py",
    "if what != wanted:",
    "if what[:-1] != wanted[:-1]:",
    case="True-equal bounds of other groups",
    slow=True,
)
@kills(
    "_marks.py",
    "one = len(found) == len(leaves) and",
    "one = bool(found) and",
    case="False-one leaf scaled",
    slow=True,
)
@kills(
    "_marks.py",
    "return one and found[0].leaves == len(leaves)",
    "return one",
    case="False-masked noise",
    slow=True,
)
@kills(
    "_marks.py",
    "if found[0].trace != get_opaque_trace_state():",
    "if False:",
    case="False-privatize at some steps",
    slow=True,
)
@kills(
    "mechanism/link.py",
    "own = params is None or not mechanism.noise_multiplier",
    "own = True",
    case="False-scale before privatize",
    slow=True,
)
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("jitted", [False, True])
def test_wrong_chains_are_refused(name, jitted):
    links, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        updated(links, jitted)


RIGHT = {
    "rule written twice": [clip(clipping.flat(1.0)), noised(clipping.flat(1.0))],
    "identity between": [clip(), optax.identity(), noised()],
    "frozen behind the noise": [
        clip(),
        noised(),
        optax.multi_transform(
            {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, {"a": "train", "b": "freeze"}
        ),
    ],
    "one link": [
        dpjax.Mechanism(
            sampling=sampling.full(4), clipping=RULE, noise_multiplier=1.0, steps=3
        ).private(jax.random.key(0)),
        optax.adam(0.1),
    ],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("jitted", [False, True])
def test_right_chains_run(name, jitted):
    updates, _ = updated(RIGHT[name], jitted)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(updates))


def test_the_private_link_is_the_chain_of_its_parts():
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(100, 10), clipping=RULE, noise_multiplier=1.5, steps=3
    )
    whole = mechanism.private(jax.random.key(0))
    parts = optax.chain(
        clip(), noise.gaussian(1.5, RULE, key=jax.random.key(0)), optax.scale(1 / 10)
    )
    mask = jnp.array([1, 1, 0, 1])
    one, _ = whole.update(GRADIENTS, whole.init(PARAMS), PARAMS, mask=mask)
    other, _ = parts.update(GRADIENTS, parts.init(PARAMS), PARAMS, mask=mask)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, other)
    adapted = dpjax.Mechanism(
        sampling=sampling.full(4),
        clipping=RULE,
        noise_multiplier=0.1,
        steps=3,
        adaptive=clipping.Quantile(),
    )
    with pytest.raises(ValueError, match="Use dpjax"):
        adapted.private(jax.random.key(0))


def one_device(function):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


@kills("sampling/draws.py", "marks[:] = marks_of(total)", "marks[:] = [None]", slow=True)
def test_a_sum_over_microbatches_is_checked_like_one_batch():
    """If every round clips what it adds; a mean, or a sum without clipping, is not accepted."""
    clipped, batch = dpjax.clipped_grad(lambda w, x: w @ x, RULE), jnp.ones((6, 5))
    link = MECHANISM.privatize(noise.secret_key())

    def released(add):
        @jax.jit
        def step(params, state):
            draw = Draw(jnp.arange(6), jnp.int32(6))
            total = sampling.fold(draw, 4, lambda *args: add(params, *args), jnp.zeros(5))
            return link.update(total, state, params)[0]

        return step(jnp.zeros(5), link.init(jnp.zeros(5)))

    def honest(params, rows, mask, total):
        return clipped(params, batch[rows], mask, start=total).value

    assert jnp.all(jnp.isfinite(released(honest)))
    for wrong in (lambda *args: honest(*args) / 2, lambda p, rows, m, t: t + batch[rows].sum(0)):
        with pytest.raises(ValueError, match="is not the clipped sum"):
            released(wrong)


@kills(
    "_marks.py", "if not all(entry is None or _may_begin", "if False and all(_may_begin", slow=True
)
@kills("_marks.py", "return not entry.noised and entry.rule", "return entry.rule", slow=True)
def test_a_total_that_was_not_reset_is_no_clipped_sum_after_a_fold():
    """Examples of an earlier step would move this release too, and be counted once."""
    clipped, batch, w = dpjax.clipped_grad(lambda w, x: w @ x, RULE), jnp.ones((6, 5)), jnp.zeros(5)
    link, draw = MECHANISM.privatize(jax.random.key(0)), Draw(jnp.arange(6), jnp.int32(6))

    def add(rows, mask, total):
        return clipped(w, batch[rows], mask, start=total).value

    def folded(first):
        return sampling.fold(draw, 4, add, first)

    link.update(folded(folded(jnp.zeros(5))), link.init(w), w)
    before = folded(jnp.zeros(5))
    _, state = link.update(before, link.init(w), w)
    for first in (before, 100 * jnp.ones(5)):
        with pytest.raises(ValueError, match="is not the clipped sum"):
            link.update(folded(first), state, w)


@pytest.mark.sample(1)
@kills("noise/one_run.py", "if not trees.traced(state.step) or", "if", slow=True)
@pytest.mark.parametrize("link", [noised(), privatized()], ids=["gaussian", "privatize"])
def test_a_state_that_is_a_constant_is_refused(link):
    clipped_grad = dpjax.clipped_grad(lambda w, x: jnp.sum(w * x), RULE)
    w, state = jnp.zeros(3), link.init(jnp.zeros(3))

    def noisy(state, x):
        return link.update(clipped_grad(w, x), state)[0]

    batches = jnp.arange(24.0).reshape(2, 4, 3)
    for run in (
        jax.jit(lambda x: noisy(state, x)),
        lambda x: jax.lax.map(partial(noisy, state), x),
        lambda x: one_device(partial(noisy, state))(x[0]),
    ):
        with pytest.raises(ValueError, match="comes from outside of it, as a constant"):
            run(batches)
    jax.eval_shape(noisy, state, batches[0])
    jax.eval_shape(lambda x: noisy(link.init(w), x), batches[0])


def with_state(run):
    """``run(state, batches)``, where the state of the link is an argument of a jitted function."""
    clipped = dpjax.clipped_grad(lambda w, x: jnp.sum(w * x), RULE)
    link = noised()

    def noisy(state, x):
        return link.update(clipped(jnp.zeros(3), x), state)

    batches = jnp.stack([jnp.zeros((2, 3)), jnp.full((2, 3), 0.1)])
    return jax.jit(partial(run, noisy))(link.init(jnp.zeros(3)), batches)


SHARED = {
    "map": lambda noisy, s, xs: jax.lax.map(lambda x: noisy(s, x)[0], xs),
    "scan": lambda noisy, s, xs: jax.lax.scan(lambda c, x: (c, noisy(s, x)[0]), 0, xs),
    "fori_loop": lambda noisy, s, xs: jax.lax.fori_loop(
        0, 2, lambda i, w: w + noisy(s, xs[i])[0], jnp.zeros(3)
    ),
    "while_loop": lambda noisy, s, xs: jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + noisy(s, xs[c[0]])[0]), (0, jnp.zeros(3))
    ),
    "jit": lambda noisy, s, xs: jax.jit(lambda x: noisy(s, x)[0])(xs[1]),
    "devices": lambda noisy, s, xs: one_device(lambda x: noisy(s, x)[0])(xs[1]),
    "vmap": lambda noisy, s, xs: jax.vmap(lambda x: noisy(s, x)[0])(xs),
}


@kills("noise/one_run.py", "or not set(inner) <= set(around)", "", case="map", slow=True)
@pytest.mark.parametrize("name", SHARED)
def test_rounds_that_share_the_noise_of_one_state_are_refused(name):
    """The difference of two rounds would be that of their sums, 0.2 in each entry."""
    message = "has one key" if name == "vmap" else "comes from outside"
    with pytest.raises(ValueError, match=message):
        with_state(SHARED[name])


OWN = {
    "scan": lambda noisy, s, xs: jax.lax.scan(lambda c, x: noisy(c, x)[::-1], s, xs)[1],
    "fori_loop": lambda noisy, s, xs: jax.lax.fori_loop(
        0, 2, lambda i, c: noisy(c[1], xs[i]), (jnp.zeros(3), s)
    )[0],
    "while_loop": lambda noisy, s, xs: jax.lax.while_loop(
        lambda c: c[1].step < 2, lambda c: noisy(c[1], xs[c[1].step]), (jnp.zeros(3), s)
    )[0],
    "jit": lambda noisy, s, xs: jax.jit(noisy)(s, xs[1])[0],
    "remat": lambda noisy, s, xs: jax.checkpoint(noisy)(s, xs[1])[0],
    "cond": lambda noisy, s, xs: jax.lax.cond(s.step < 1, noisy, noisy, s, xs[1])[0],
    "derivative": lambda noisy, s, xs: jax.jvp(lambda x: noisy(s, x)[0], (xs[1],), (xs[0],))[0],
    "seeds": lambda noisy, s, xs: jax.vmap(
        lambda key: jax.lax.scan(lambda c, x: noisy(c, x)[::-1], s._replace(key=key), xs)[1]
    )(jax.random.split(s.key)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OWN)
def test_a_state_in_the_arguments_or_the_carry_runs(name):
    assert np.all(np.isfinite(with_state(OWN[name])))


@kills(
    "_marks.py",
    "_require_rule(updates.by, rule, updates.value, name)",
    "pass",
    case="jitted",
    slow=True,
)
@kills(
    "_marks.py",
    "updates = updates.value if isinstance(updates, ClippedSum) else updates",
    "if isinstance(updates, ClippedSum):\n        return updates.value",
    case="jitted",
    slow=True,
)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
def test_a_clipped_sum_says_by_which_rule(jitted):
    clipped_grad = dpjax.clipped_grad(lambda w, x: jnp.sum(w * x), clipping.flat(10.0))
    run = jax.jit(clipped_grad) if jitted else clipped_grad
    clipped, link = run(jnp.zeros(3), jnp.ones((4, 3))), noised()
    with pytest.raises(ValueError, match="clipped by flat to the bounds"):
        link.update(clipped, link.init(jnp.zeros(3)))
    same = noised(clipping.flat(10.0))
    with pytest.raises(ValueError, match="give the ClippedSum itself"):
        same.update(clipped._replace(value=2 * clipped.value), same.init(jnp.zeros(3)))
    again = jax.tree.unflatten(jax.tree.structure(clipped), jax.tree.leaves(clipped))
    same.update(again, same.init(jnp.zeros(3)))
    assert repr(clipped).startswith("ClippedSum(value=")


@kills("_marks.py", " and not found[0].noised", "", slow=True)
@kills("_marks.py", "same = one[1:] == other[1:]", "same = True", slow=True)
@kills("gradients/clipped_grad.py", "if found != expected:", "if False:", slow=True)
@kills("_marks.py", "same = trees.traced(leaves) or not any", "same = True or any", slow=True)
@kills(
    "_marks.py",
    "rule.name, rule.bounds, rule.projections,",
    "rule.name, rule.bounds, 0,",
    slow=True,
)
def test_clipped_sums_are_known_in_a_loop_of_ones_own():
    clipped_grad = dpjax.clipped_grad(lambda w, x: jnp.sum(w * x), RULE)
    link, data = noised(), jnp.ones((4, 3))
    clipped = jax.jit(clipped_grad)(jnp.zeros(3), data)
    # Its leaves left a jitted function, so the `ClippedSum` itself is what says what it is.
    noisy, _ = link.update(clipped, link.init(jnp.zeros(3)))
    inside = jax.jit(lambda x: link.update(clipped_grad(jnp.zeros(3), x).value, link.init(0))[0])
    np.testing.assert_allclose(inside(data), noisy, rtol=1e-6)
    with pytest.raises(ValueError, match="give the ClippedSum itself"):
        link.update(clipped.value, link.init(jnp.zeros(3)))
    # The parts of a sum are added outside of jit too, until it has its noise.
    part = clipped_grad(jnp.zeros(3), data[:2], start=jnp.zeros(3)).value
    total = clipped_grad(jnp.zeros(3), data[2:], start=part).value
    np.testing.assert_allclose(link.update(total, link.init(0))[0], noisy, rtol=1e-6)
    other = dpjax.clipped_grad(lambda w, x: jnp.sum(w * x), clipping.flat(0.5))
    for start in (total, clipped.value, 2 * part, other(jnp.zeros(3), data).value):
        with pytest.raises(ValueError, match="Usually a total was not reset after a step"):
            clipped_grad(jnp.zeros(3), data, start=start)
    estimated = dpjax.clipped_grad(lambda w, x: jnp.sum(w * x), clipping.jl(1.0, projections=5))
    found = estimated(jnp.zeros(3), data, key=jax.random.key(0))
    for sum_ in (found, found.value):
        with pytest.raises(
            ValueError, match=r"\(5 and None random projections\); expected one rule"
        ):
            link.update(sum_, link.init(0))
    with pytest.raises(ValueError, match="no clipped sum of this rule"):
        clipped_grad(jnp.zeros(3), data, start=found.value)
    for narrow in (jnp.bfloat16, jnp.float16, jnp.int32):
        with pytest.raises(TypeError, match="expected float32 or wider"):
            jax.jit(clipped_grad)(jnp.zeros(3), data, start=jnp.zeros(3, narrow))
    with pytest.raises(ValueError, match="would move the sum by several bounds"):
        clipped_grad(jnp.zeros(3), data, start=jnp.zeros((4, 3)))
    trusted = clipping.trusted_sum(clipped.value, RULE)
    np.testing.assert_array_equal(link.update(trusted, link.init(0))[0], noisy)


def found_by(jitted=True, scale=1.0, **options):
    def loss(p, x):
        return jnp.sum(p["a"] * x) + jnp.sum(p["b"] * jnp.outer(x[:2], x[1:]))

    clipped_grad = dpjax.clipped_grad(loss, RULE, **options)
    run = jax.jit(clipped_grad) if jitted else clipped_grad
    return run(PARAMS, scale * jnp.linspace(-1, 2, 18).reshape(6, 3))


def doubled(tree):
    return jax.tree.map(lambda x: 2 * x, tree)


def with_momentum(found, _):
    return jax.tree.map(lambda a, b: 0.9 * a + b, found, found_by(scale=2.0))


def with_one_leaf_doubled(found, _):
    def maybe(path, x):
        return 2 * x if "'a'" in jax.tree_util.keystr(path) else x

    return jax.tree_util.tree_map_with_path(maybe, found)


def written_into(found, _):
    found.value["a"] = 2 * found.value["a"]
    return found


CHANGED = {
    "scale": optax.scale(1e4),
    "schedule": optax.scale_by_schedule(lambda step: 1e4),
    "clip": optax.clip(0.1),
    "centralize": optax.centralize(),
    "double": optax.stateless(lambda found, _: doubled(found)),
    "momentum": optax.stateless(with_momentum),
    "one leaf": optax.stateless(with_one_leaf_doubled),
    "written into": optax.stateless(written_into),
}


@kills(
    "_marks.py",
    "else _unchanged(updates, name)",
    "else updates.value",
    case="outside-jitted-momentum",
)
@kills(
    "_marks.py",
    "same = all(map(_found, jax.tree.leaves(found.value)))",
    "same = True",
    case="outside-eager-written into",
    slow=True,
)
@kills("_marks.py", "jnp.where(same, x, jnp.nan)", "x", case="inside-jitted-scale", slow=True)
@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.sample(1)
def test_a_clipped_sum_that_was_changed_is_refused(name, jitted, inside):
    for link in (noised(), privatized()):
        chain = optax.chain(CHANGED[name], link)
        run = jax.jit(chain.update) if inside else chain.update
        if inside and name != "written into":
            noisy, _ = run(found_by(jitted), chain.init(PARAMS), PARAMS)
            assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(noisy))
        elif not inside:
            with pytest.raises(ValueError, match="not the one that clipped_grad returned"):
                run(found_by(jitted), chain.init(PARAMS), PARAMS)


@kills("_marks.py", "if known else (None, None)", "", slow=True)
def test_a_sum_that_was_written_into_stays_unknown_in_a_copy():
    link, found = noised(), written_into(found_by(jitted=False), None)
    with pytest.raises(ValueError, match="give the ClippedSum itself"):
        link.update(jax.tree.map(jnp.copy, found), link.init(PARAMS))


COPIED = {
    "itself": lambda found: found,
    "NumPy": lambda found: jax.tree.map(np.asarray, found),
    "on the host": jax.device_get,
    "placed": lambda found: jax.device_put(found, jax.devices()[-1]),
    "copied": lambda found: jax.tree.map(jnp.copy, found),
    "jitted": jax.jit(lambda found: found),
    "a row of two": lambda found: jax.tree.map(
        lambda x: x[1], jax.tree.map(lambda x: jnp.stack([x, x]), found)
    ),
}


@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.sample(2)
def test_a_copy_of_a_clipped_sum_is_one(name, jitted):
    link, found = noised(), found_by(jitted)
    state, noisy = link.init(PARAMS), []
    for update in (link.update, jax.jit(link.update)):
        noisy += [update(each, state, PARAMS)[0] for each in (found, COPIED[name](found))]
    for other in noisy[1:]:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), noisy[0], other)


OPTIONS = {
    "vmap": {"engine": "vmap"},
    "scan": {"engine": "scan"},
    "ghost": {"engine": "ghost"},
    "microbatches": {"microbatch_size": 2},
    "devices": {"microbatch_size": 1, "devices": 2},
}


@kills("_marks.py", "    def __reduce__(self) -> Any:", "    def _reduce(self) -> Any:", slow=True)
@pytest.mark.parametrize("jitted", [False, True])
def test_copies_outside_of_jax_are_accepted(jitted):
    found = found_by(jitted)
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        noised().update(other, noised().init(PARAMS), PARAMS)


def test_sums_that_are_equal_up_to_rounding_compare_leaf_by_leaf():
    one, other = (found_by(engine=engine) for engine in ("vmap", "ghost"))
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, one, other)
    with pytest.raises(AssertionError):
        jax.tree.map(close, one, found_by(scale=2.0))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.sample(1)
def test_programs_return_the_bits_of_their_checksum(name):
    """Were a sum computed again for the checksum, its last bits could differ."""
    link, found = noised(), found_by(**OPTIONS[name])
    link.update(found, link.init(PARAMS))
    seeds = jax.vmap(lambda scale: found_by(False, scale, **OPTIONS[name]))(jnp.array([0.5, 2.0]))
    for i in range(2):
        link = noised()
        link.update(jax.tree.map(lambda x, i=i: x[i], seeds), link.init(PARAMS))


def test_what_is_not_returned_is_not_checked():
    """Inside one program marks know the sum, so a step computes no checksum."""
    clipped_grad = dpjax.clipped_grad(lambda w, x: jnp.sum(w * x), RULE)
    link = noised()

    def step(state, x):
        return link.update(clipped_grad(jnp.zeros(3), x), state)[0]

    state, x = link.init(jnp.zeros(3)), jnp.ones((4, 3))
    assert "checksum" not in str(jax.make_jaxpr(step)(state, x))
    assert "checksum" in str(jax.make_jaxpr(partial(clipped_grad, jnp.zeros(3)))(x))


@kills("_marks.py", "lambda _: _marks.pop(name, None)", "None", slow=True)
def test_marks_end_with_their_arrays():
    from dpjax import _marks

    before = len(_marks._marks)
    total = dpjax.clipping.trusted_sum(jnp.ones(3), RULE)
    assert len(_marks._marks) == before + 1
    del total
    assert len(_marks._marks) == before


def test_without_noise_nothing_is_promised_and_nothing_refused():
    link = noise.gaussian(0.0, RULE, key=jax.random.key(0))
    found, _ = link.update(jnp.full(3, 2.0), link.init(jnp.zeros(3)))
    np.testing.assert_array_equal(found, 2.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["gaussian", "correlated"])
@kills(
    "noise/link.py",
    "updates = require_clipped_sum(",
    "updates = updates if silent else require_clipped_sum(",
    case="correlated",
    slow=True,
)
def test_without_noise_a_clipped_sum_is_still_its_value(kind):
    key, params, batch = jax.random.key(0), jnp.zeros(2), jnp.ones((3, 2))
    clipped = dpjax.clipped_grad(lambda w, x: jnp.vdot(w, x), RULE)(params, batch)
    link = noise.gaussian(0.0, RULE, key=key)
    if kind == "correlated":
        link = noise.correlated(strategies.square_root(3), 0.0, RULE, key=key)
    found, _ = link.update(clipped, link.init(params), params)
    np.testing.assert_array_equal(optax.apply_updates(params, found), clipped.value)


@kills("_marks.py", "jnp.where(empty, x, jnp.nan)", "x")
def test_a_traced_sum_without_a_mark_releases_nothing():
    link, params = noised(), jnp.zeros(3)
    update = jax.jit(lambda total: link.update(total, link.init(params))[0])
    assert np.all(np.isfinite(update(params)))
    assert np.all(np.isnan(update(jnp.array([0.0, 1.0, 0.0]))))


@kills("noise/one_run.py", "if total_batched and not several:", "if False:", slow=True)
def test_one_key_for_a_batch_of_sums_is_refused():
    link, sums = noised(), jnp.ones((3, 5))
    state = link.init(jnp.zeros(5))

    def one(total, state):
        return link.update(clipping.trusted_sum(total, RULE), state)[0]

    with pytest.raises(ValueError, match="one key; expected a key for each"):
        jax.vmap(one, (0, None))(sums, state)
    states = jax.vmap(lambda key: noise.GaussianState(key, jnp.int32(0)))(
        jax.random.split(jax.random.key(1), 3)
    )
    noisy = jax.vmap(one)(sums, states)
    assert len(np.unique(np.asarray(noisy))) == 15


def several(link, states, sums):
    """The releases of links that `jax.vmap` maps over states and sums."""

    def one(state, total):
        return link.update(clipping.trusted_sum(total, RULE), state)[0]

    return jax.vmap(one)(states, sums)


SECRET = noise.gaussian(1.0, RULE, key=noise.secret_key())
TWO = jnp.zeros((2, 3)).at[1, 0].set(0.5)
STATES = {
    "stacked": lambda s: jax.tree.map(lambda x: jnp.stack([x, x]), s),
    "broadcast": lambda s: jax.tree.map(lambda x: jnp.broadcast_to(x, (2, *x.shape)), s),
    "other steps": lambda s: jax.vmap(lambda step: s._replace(step=step))(jnp.arange(2)),
}


@kills("noise/one_run.py", "if several and words.shape[-1] != 2:", "if False:", slow=True)
def test_an_ensemble_has_keys_of_threefry():
    """JAX draws for all keys of rbg from the first: others of two ensembles would share noise."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    with pytest.raises(ValueError, match="states with keys of rbg; expected keys of threefry2x32"):
        jax.vmap(lambda key: noise.gaussian(1.0, RULE, key=key).init(jnp.zeros(3)))(keys)


@pytest.mark.sample(1)
@kills("noise/one_run.py", "jnp.arange(len(rows))[:, None]", "0 * rows", slow=True)
@kills("noise/one_run.py", "total = _nan_if(shared, total)", "pass", case="stacked", slow=True)
@pytest.mark.parametrize("name", STATES)
def test_states_of_one_key_release_nothing_together(name):
    """The difference of the two releases would be that of the sums."""
    states = STATES[name](SECRET.init(jnp.zeros(3)))
    run = partial(several, SECRET, states)
    with pytest.raises(ValueError, match=r"some have equal keys.*stacked or broadcast"):
        run(TWO)
    assert np.all(np.isnan(jax.jit(partial(several, SECRET))(states, TWO)))
    # One sum for all states has nothing to compare.
    assert np.all(np.isfinite(jax.vmap(lambda s: SECRET.update(TWO[0], s)[0])(states)))


@pytest.mark.slow
@kills(
    "noise/one_run.py",
    "return _in_one_run(words, total), batched[1]",
    "return total, batched[1]",
    slow=True,
)
def test_a_map_around_a_map_needs_keys_of_its_own():
    keys = jax.random.split(noise.secret_key(), 4).reshape(2, 2)
    states = jax.vmap(jax.vmap(lambda key: noise.GaussianState(key, jnp.int32(0))))(keys)
    sums, run = jnp.stack([TWO, 2 * TWO]), partial(several, SECRET)
    first = jax.tree.map(lambda x: x[0], states)
    with pytest.raises(ValueError, match="has one key"):
        jax.vmap(run, (None, 0))(first, sums)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), first)
    assert np.all(np.isnan(jax.jit(jax.vmap(run))(stacked, sums)))
    assert len(np.unique(np.asarray(jax.vmap(run)(states, sums)))) == 12


LINKS = {
    "gaussian": lambda key: noise.gaussian(1.0, RULE, key=key),
    "correlated": lambda key: noise.correlated(strategies.square_root(3), 1.0, RULE, key=key),
    "privatize": MECHANISM.privatize,
    "private": MECHANISM.private,
}


@kills(
    "noise/one_run.py", "[x for x in jax.tree.leaves(params) if trees.traced(x)]", "[]", slow=True
)
@kills(
    "noise/one_run.py", "set(_programs(step)) - set(_programs(key))", "_programs(step)", slow=True
)
@kills("noise/one_run.py", '("scan", "fori_loop", "while_body")', '("fori_loop",)', slow=True)
@pytest.mark.parametrize("name", LINKS)
def test_several_runs_begin_with_several_keys(name):
    link, keys = LINKS[name](noise.secret_key()), jax.random.split(noise.secret_key(), 2)
    with pytest.raises(ValueError, match="has one key"):
        jax.vmap(link.init)(TWO)
    jax.vmap(lambda key, w: LINKS[name](key).init(w))(keys, TWO)
    for repeat in (
        jax.lax.map,
        lambda init, ws: jax.lax.map(jax.jit(init), ws),
        lambda init, ws: jax.lax.fori_loop(0, 2, lambda i, _: init(ws[i]), link.init(ws[0])),
        lambda init, ws: jax.lax.while_loop(lambda _: False, lambda _: init(ws[0]), init(ws[0])),
    ):
        with pytest.raises(ValueError, match="init runs in the body of a loop"):
            repeat(link.init, TWO)
    jax.lax.map(lambda each: LINKS[name](each[0]).init(each[1]), (keys, TWO))
    jax.jit(link.init)(TWO[0])


@kills("noise/link.py", "with jax.ensure_compile_time_eval():", "if True:", slow=True)
def test_a_key_that_the_body_of_a_loop_draws_is_one_for_all_rounds():
    with pytest.raises(ValueError, match="is a constant there"):
        jax.lax.map(lambda w: LINKS["private"](noise.secret_key()).init(w), TWO)
    state = jax.jit(lambda w: noise.gaussian(1.0, RULE, key=noise.secret_key()).init(w))(TWO[0])
    assert np.any(trees.on_host(state.key))


TWO_SHARDS = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from dpjax import clipping, noise

rule, key = clipping.flat(1.0), noise.secret_key()
link = noise.gaussian(1.0, rule, key=key)
one, sums = link.init(jnp.zeros(3)), jnp.zeros((2, 3)).at[1, 0].set(0.5)
two = jax.tree.map(lambda x: jnp.stack([x, x]), one)
own = jax.vmap(lambda key: noise.GaussianState(key, jnp.int32(0)))(jax.random.split(key))
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

def noisy(total, state):
    return link.update(clipping.trusted_sum(total, rule), state)[0]

def added(total, state):
    return noisy(jax.lax.psum(total, "d"), state)

def rows(total, state):
    return noisy(total[0], jax.tree.map(lambda x: x[0] if x.ndim else x, state))[None]

for check in (True, False):
    def shards(run, states, out=P("d")):
        specs = {"in_specs": (P("d"), states), "out_specs": out, "check_vma": check}
        return jax.shard_map(run, mesh=mesh, **specs)
    def place(total):
        return rows(total, jax.tree.map(lambda x: x[None], link.init(total[0])))
    for jit in (jax.jit, lambda run: run):
        assert np.all(np.isnan(jit(shards(rows, P("d")))(sums, two)))
        assert np.all(np.isnan(jit(shards(lambda x, _: place(x), P()))(sums, 0)))
        assert np.all(np.isfinite(jit(shards(rows, P("d")))(sums, own)))
        assert np.all(np.isfinite(jit(shards(added, P(), P("d")))(sums, one)))
    equal = jax.jit(shards(lambda x, s: added(x[0], s), P(), P()))(sums, one)
    assert equal.shape == (3,) and np.all(np.isfinite(equal))
    alone = jax.jit(shards(lambda x, s: noisy(x[0], s)[None], P()))(sums, one)
    assert np.all(np.isnan(alone))
assert np.all(np.isnan(jax.pmap(noisy)(sums, two)))
assert np.all(np.isnan(jax.pmap(noisy, in_axes=(0, None))(sums, one)))
assert np.all(np.isfinite(jax.pmap(noisy)(sums, own)))
assert np.all(np.isfinite(jax.pmap(added, axis_name="d", in_axes=(0, None))(sums, one)))
"""


@pytest.mark.slow
@kills("noise/one_run.py", "_on_all_shards(words, total))", "total)", slow=True)
@kills("noise/one_run.py", "one_key & ~one_sum", "one_key & ~one_key", slow=True)
@kills("noise/one_run.py", "rows[:, :-2], rows[:, -2:]", "rows[:, :-2], rows[:, :-2]", slow=True)
def test_shards_of_one_key_release_nothing_together():
    """Replicas that hold one sum may share a key; parts of a batch may not."""
    subprocess.run([sys.executable, "-c", TWO_SHARDS], check=True, timeout=240)


@kills("noise/link.py", "jnp.copy(key)", "key", slow=True)
@pytest.mark.parametrize("name", LINKS)
def test_a_step_may_donate_the_state(name):
    key = noise.secret_key()
    link = LINKS[name](key)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x.copy(), s), donate_argnums=0)
    for _ in range(2):
        step(link.init(jnp.zeros(3)))
    assert MECHANISM.sampling.draw(key, 0).size == 4


GUARDS = {
    "apply_if_finite": lambda link: optax.apply_if_finite(link, 3),
    "conditionally_mask": lambda link: optax.conditionally_mask(link, lambda step: step < 1),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_around_the_noise_is_told_where_to_go(name):
    chain = GUARDS[name](MECHANISM.private(jax.random.key(0)))
    with pytest.raises(ValueError, match="put it behind the noise"):
        jax.jit(chain.update)(GRADIENTS, chain.init(PARAMS), PARAMS)


def test_a_link_that_is_built_inside_of_jit_needs_its_multiplier_before():
    make = optax.inject_hyperparams(noise.gaussian)
    for multiplier in (1.0, lambda step: 1.0):
        link = make(noise_multiplier=multiplier, rule=RULE, key=jax.random.key(0))
        state = link.init(PARAMS)
        with pytest.raises(TypeError, match="give a schedule of the step to the link itself"):
            jax.jit(link.update)(PARAMS, state, PARAMS)


@kills("noise/one_run.py", "jnp.where(wrong, jnp.nan, x)", "x", case="private", slow=True)
@pytest.mark.parametrize("name", ["gaussian", "private"])
def test_a_state_that_was_reset_by_zeros_releases_nothing(name):
    mechanism = dpjax.Mechanism(
        sampling=sampling.full(4), clipping=RULE, noise_multiplier=1.0, steps=3
    )
    key = noise.secret_key()
    link = optax.chain(clip(), noise.gaussian(1.0, RULE, key=key))
    link = link if name == "gaussian" else mechanism.private(key)
    chain = optax.chain(link, optax.sgd(0.1, momentum=0.9))
    reset = jax.tree.map(jnp.zeros_like, chain.init(PARAMS))
    with pytest.raises(ValueError, match="Reset the momentum alone"):
        chain.update(GRADIENTS, reset, PARAMS)
    updates, _ = jax.jit(chain.update)(GRADIENTS, reset, PARAMS)
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(updates))


# --- the whole chain, measured -----------------------------------------------------------------

OPTIMIZERS = [
    "adabelief",
    "adadelta",
    "adagrad",
    "adafactor",
    "adam",
    "adamax",
    "adamaxw",
    "adamw",
    "adan",
    "amsgrad",
    "fromage",
    "lamb",
    "lars",
    "lion",
    "nadam",
    "nadamw",
    "novograd",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
    "sign_sgd",
    "sm3",
    "yogi",
]


def optimizer_named(name):
    make = getattr(optax, name)
    return make() if name == "adafactor" else make(learning_rate=0.1)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_behind_the_noise_is_as_private_as_its_multiplier(name):
    mechanism = dpjax.Mechanism(
        sampling=sampling.full(2), clipping=RULE, noise_multiplier=1.3, steps=5
    )
    chain = optax.chain(mechanism.private(jax.random.key(0)), optimizer_named(name))
    testing.assert_private(chain, {"a": jnp.ones(3), "b": jnp.ones((2, 2))}, steps=2)


@kills(
    "testing.py", "accounting.effective_multiplier(given", "np.max(given", case="groups", slow=True
)
@kills("testing.py", "given(jnp.int32(step))", "given(jnp.int32(0))", case="schedule", slow=True)
@pytest.mark.parametrize("name", ["groups", "schedule", "secret"])
def test_multipliers_of_all_kinds_are_measured(name):
    rule, multiplier, key = RULE, 1.3, jax.random.key(0)
    if name == "groups":
        rule, multiplier = clipping.per_group((0.5, 2.0), groups=2), (1.0, 3.0)
    if name == "schedule":
        multiplier = dpjax.schedules.table([1.0, 2.0, 3.0])
    if name == "secret":
        key = noise.secret_key()
    chain = optax.chain(clip(rule), noise.gaussian(multiplier, rule, key=key))
    testing.assert_private(chain, PARAMS)
    with pytest.raises(ValueError, match=r"assert_private\(steps=0\): expected a whole number"):
        testing.assert_private(chain, PARAMS, steps=0)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_chains_break_the_law(name):
    links, _ = WRONG[name]
    with pytest.raises(testing.LawBroken, match="refuses to run"):
        testing.assert_private(optax.chain(*links), PARAMS)


@kills("testing.py", "if len(found) != len(batches):", "if False:", case="bare", slow=True)
@kills(
    "testing.py",
    "if not least - tolerance <= ratio <= drawn + tolerance:",
    "if False:",
    case="trusted",
    slow=True,
)
@pytest.mark.parametrize("name", ["bare", "trusted"])
def test_what_the_links_cannot_see_is_measured(name):
    """A user may vouch for a sum that the rule does not bound."""
    tenfold = optax.stateless(
        lambda s, _: clipping.trusted_sum(jax.tree.map(lambda x: 10 * x, s), RULE)
    )
    links = {"bare": [clip()], "trusted": [clip(), tenfold, noised()]}[name]
    message = {"bare": "0 times in 3 steps", "trusted": "moves the release by 10 times"}[name]
    with pytest.raises(testing.LawBroken, match=message):
        testing.assert_private(optax.chain(*links), PARAMS)


BEFORE = {
    "scale": (optax.scale(10.0), None),
    "elementwise clipping": (optax.clip(1.0), None),
    "weight decay": (optax.add_decayed_weights(0.1), None),
    "ones for NaN": (
        optax.stateless(lambda g, _: jax.tree.map(partial(jnp.nan_to_num, nan=1.0), g)),
        None,
    ),
    "global norm": (optax.clip_by_global_norm(1.0), "sees several examples"),
    "normalize": (optax.contrib.normalize(), "sees several examples"),
    "a guard": (optax.apply_if_finite(optax.identity(), 5), "an example of NaN .*several examples"),
    "momentum": (optax.trace(0.9), "step 1.*expected 0.*earlier batches"),
    "Adam": (optax.scale_by_adam(), "step 1.*expected 0.*earlier batches"),
    "lengths": (optax.scale_by_rms(), "step 1.*expected 0.*earlier batches"),
    "sums of squares": (optax.scale_by_rss(), "step 1.*expected 0.*earlier batches"),
    "deviations": (optax.scale_by_stddev(), "step 1.*expected 0.*earlier batches"),
    "Adam without momentum": (optax.scale_by_adam(b1=0), "step 1.*expected 0.*earlier batches"),
    "other parameters": (optax.lookahead(optax.sgd(0.1), 2, 0.5), "refuses to run"),
}


@pytest.mark.sample(2)
@kills(
    "testing.py",
    "others = _others(params, 3)",
    "others = jax.tree.map(jnp.zeros_like, _others(params, 3))",
    case="global norm",
    slow=True,
)
@kills(
    "testing.py",
    "for name, example in examples.items()",
    "for name, example in [*examples.items()][:1]",
    case="a guard",
    slow=True,
)
@kills(
    "testing.py",
    "jnp.where(drawn, jnp.asarray(c)[None], 0)",
    "jnp.asarray(c)[None] * drawn",
    case="ones for NaN",
    slow=True,
)
@kills(
    "testing.py",
    "jnp.roll(jnp.concatenate(rows), step,",
    "jnp.roll(jnp.concatenate(rows), 0,",
    case="lengths",
    slow=True,
)
@pytest.mark.parametrize("name", BEFORE)
def test_a_link_before_the_clipping_is_measured_too(name):
    """Clipping bounds a row of what it receives, whichever examples made that row."""
    link, message = BEFORE[name]
    chain = optax.chain(link, MECHANISM.private(jax.random.key(0)))
    if message is None:
        testing.assert_private(chain, PARAMS)
    else:
        with pytest.raises(testing.LawBroken, match=message):
            testing.assert_private(chain, PARAMS)


def leaking(chain, leak):
    """A function around a chain that lets gradients pass beside the noise."""

    def update(gradients, state, params=None):
        updates, state = chain.update(gradients, state, params)
        return jax.tree.map(leak, updates, gradients), state

    return optax.GradientTransformation(chain.init, update)


def lengths(g):
    return jnp.linalg.norm(g.reshape(len(g), -1), axis=1)


def bare_sum(u, g):
    return u + jnp.tensordot(1 / jnp.maximum(1, lengths(g)), g, 1)


LEAKS = {
    "the gradients": lambda u, g: u + 1e-9 * g.mean(axis=0),
    "their length": lambda u, g: u * jnp.linalg.norm(g),
    "the clipped sum": bare_sum,
    "signs": lambda u, g: u + jnp.sign(g).mean(axis=0),
    "how many are clipped": lambda u, g: u * jnp.mean(lengths(g) > 1),
    "whether one is clipped": lambda u, g: u * jnp.any(lengths(g) > 1),
    "whether one is long": lambda u, g: u * jnp.any(lengths(g) > 1e3),
    "how many are drawn": lambda u, g: u / jnp.sum(lengths(g) != 0),
    "whether one is NaN": lambda u, g: u * jnp.isfinite(lengths(g)).all(),
    "nothing": lambda u, g: u * len(g),
}


@pytest.mark.sample(4)
@kills("testing.py", "if not _equal(updates, again):", "if False:", case="the gradients", slow=True)
@kills("noise/measured.py", "next(instead, own)", "own", case="nothing", slow=True)
@kills("testing.py", "([1e6,", "([1.0,", case="whether one is long", slow=True)
@kills("testing.py", "1e-6, jnp.nan", "1.0, jnp.nan", case="whether one is clipped", slow=True)
@kills("testing.py", "1e-6, jnp.nan", "1e-6, 1.0", case="whether one is NaN", slow=True)
@pytest.mark.parametrize("name", LEAKS)
def test_gradients_beside_the_noise_are_found(name):
    chain = leaking(MECHANISM.private(jax.random.key(0)), LEAKS[name])
    if name == "nothing":
        testing.assert_private(chain, PARAMS)
    else:
        with pytest.raises(testing.LawBroken, match="beside the noise"):
            testing.assert_private(chain, PARAMS)


# --- partitions and sums ----------------------------------------------------------------------


def by_rank():
    return Partition(
        ("vectors", "matrices"),
        lambda tree: tuple(0 if leaf.ndim == 1 else 1 for leaf in jax.tree.leaves(tree)),
    )


@pytest.mark.slow
@kills(
    "clipping/application.py",
    "rule.partition.assign(trees.one_row(gradients))",
    "rule.partition.assign(gradients)",
    case="vmap",
    slow=True,
)
@pytest.mark.parametrize("engine", ["ghost", "vmap", "scan"])
def test_a_partition_never_sees_the_batch_axis(engine):
    rule = clipping.per_group((0.01, 1.0), groups=by_rank())
    params = {"bias": jnp.zeros(20), "kernel": jnp.zeros((5, 4))}

    def loss(p, x):
        return jnp.sum(p["bias"] * x) + jnp.sum(p["kernel"] * x[:4])

    found = dpjax.clipped_grad(loss, rule, engine)(params, jnp.full((1, 20), 100.0)).value
    assert float(jnp.linalg.norm(found["bias"])) == pytest.approx(0.01, rel=1e-5)
    assert float(jnp.linalg.norm(found["kernel"])) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.sample(1)
@kills(
    "training/step.py",
    "lost=lost,\n",
    "lost=None,\n",
    case="in memory",
    slow=True,
)
@kills("training/step.py", "data, held, end_block)", "data, held)", case="in memory", slow=True)
@kills("training/streaming.py", "sums = its.settle(sums)", "pass", case="streamed", slow=True)
@kills("noise/link.py", "else lost + scaled", "else scaled", case="in memory", slow=True)
@kills(
    "gradients/batching.py",
    "= examples <= layout",
    "= True or layout",
    case="in memory",
    slow=True,
)
@pytest.mark.parametrize("kind", [lambda x: x, lambda x: dpjax.data.Stream(list(x))], ids=KINDS)
def test_what_a_long_sum_rounds_away_meets_the_noise(kind):
    """Beside 2^25, one more example is a quarter of a last bit; it must still move the noise."""
    rows, count, large = 64, 4096, 2.0**25
    data = np.zeros((rows, count), np.float32)
    data[0] = large

    def mean(data):
        mechanism = dpjax.Mechanism(
            sampling=sampling.full(rows),
            clipping=clipping.flat(2.0**32),
            noise_multiplier=2.0**-29,
            steps=1,
        )
        run = dpjax.dpsgd(
            lambda w, x: -jnp.sum(w * x), optax.sgd(rows), mechanism, kind(data), microbatch_size=1
        )
        state, _ = run.step(run.init(jax.random.key(0), jnp.zeros(count)))
        return np.mean(np.asarray(state.params, np.float64) - large)

    without = mean(data)
    data[60] = 1  # not in the block of the first row
    # Noise of deviation 8 lets the mean of many roundings see what one rounding cannot.
    assert mean(data) - without == pytest.approx(1, abs=0.1)


def test_trees_of_rows_have_the_shapes_of_parameters():
    shapes = trees.one_row(GRADIENTS)
    assert jax.tree.map(lambda s: s.shape, shapes) == jax.tree.map(jnp.shape, PARAMS)
