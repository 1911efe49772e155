# SPDX-License-Identifier: Apache-2.0
"""Optax chains: a noise link takes the clipped sum of its own rule, and nothing else can."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills
from small_mechanisms import mechanism_with

from dpjax import (
    clip_and_sum,
    clipped_grad,
    clipping,
    noise,
    sampling,
    strategies,
    testing,
    trees,
)
from dpjax.types import ClippedSum, Partition, State, Sum

RULE = clipping.flat(1.0)
FULL = mechanism_with(sampling=sampling.full(4), clipping=RULE, steps=3)
PARAMS = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}
GRADIENTS = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), PARAMS)
REFUSED = (AttributeError, TypeError, ValueError)


def clip(rule=RULE):
    return clip_and_sum(rule)


def noised(rule=RULE):
    return noise.gaussian(1.0, rule)


def plain_sum():
    return optax.stateless(lambda g, p: jax.tree.map(lambda x: x.sum(axis=0), g))


def halves(*groups):
    return clipping.per_group((0.5, 0.5), groups=Partition(("one", "two"), lambda tree: groups))


def mean():
    return optax.stateless(lambda g, p: jax.tree.map(lambda x: x / 4, g))


HALF = {"a": True, "b": False}
NOISED = {"gaussian": noised, "privatize": FULL.privatize}
WRONG = {
    "equal bounds of other groups": [clip(halves(0, 1)), noised(halves(1, 0))],
    "another bound": [clip(clipping.flat(10.0)), noised()],
    "other groups": [clip(clipping.grouped(total=1.0, groups=2)), noised()],
    "scale between": [clip(), optax.scale(10.0), noised()],
    "mean between": [clip(), mean(), noised()],
    "Adam between": [clip(), optax.scale_by_adam(), noised()],
    "sign between": [clip(), optax.scale_by_sign(), noised()],
    "momentum between": [clip(), optax.trace(0.9), noised()],
    "weight decay between": [clip(), optax.add_decayed_weights(0.1), noised()],
    "apply_every between": [clip(), optax.apply_every(2), noised()],
    "no clipping": [plain_sum(), noised()],
    "noise first": [noised(), clip()],
    "noise twice": [clip(), noised(), noised()],
    "masked noise": [clip(), optax.masked(noised(), HALF)],
    "one leaf scaled": [clip(), optax.masked(optax.scale(10.0), HALF), noised()],
    "masked clipping": [optax.masked(clip(), HALF), noised()],
    "MultiSteps between": [clip(), optax.MultiSteps(noised(), 2)],
    "MultiSteps around": [optax.MultiSteps(optax.chain(clip(), noised()), 2)],
    "scale before privatize": [clip(), optax.scale(10.0), FULL.privatize()],
    "no clipping before privatize": [plain_sum(), FULL.privatize()],
    **{
        f"{name} at some steps": [
            clip(),
            optax.conditionally_transform(link(), lambda step: step > 0),
        ]
        for name, link in NOISED.items()
    },
}


def updated(links, run):
    chain = optax.chain(*links)
    return run(chain.update)(GRADIENTS, chain.init(PARAMS), PARAMS)


@kills("noise/link.py", "if updates.rule != limits:", "if False:", case="another bound")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_chains_are_refused(name):
    """In a trace, and when they run: then the law says so too."""
    with pytest.raises(REFUSED):
        updated(WRONG[name], lambda update: partial(jax.eval_shape, update))
    with pytest.raises(testing.LawBroken, match="refuses to run"):
        testing.assert_private(optax.chain(*WRONG[name]), PARAMS)


FROZEN = {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}
RIGHT = {
    "rule written twice": [clip(clipping.flat(1.0)), noised(clipping.flat(1.0))],
    "identity between": [clip(), optax.identity(), noised()],
    "frozen behind": [
        clip(),
        noised(),
        optax.multi_transform(FROZEN, {"a": "train", "b": "freeze"}),
    ],
    "named": [optax.named_chain(("clip", clip()), ("noise", noised()))],
    "MultiSteps behind": [clip(), noised(), optax.MultiSteps(optax.adam(0.1), 2)],
    "schedule-free": [FULL.private(), optax.contrib.schedule_free_sgd(0.1)],
    "correlated": [clip(), noise.correlated(strategies.square_root(3), 1.0, RULE)],
    "hyperparameters": [
        optax.inject_hyperparams(
            lambda rate: optax.chain(clip(), noised(), optax.sgd(rate)), static_args=()
        )(rate=0.1)
    ],
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.sample(4)
def test_right_chains_run(name):
    updates, _ = updated(RIGHT[name], jax.jit)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(updates))


def test_the_private_link_is_the_chain_of_its_parts():
    mechanism = mechanism_with(100, 10, clipping=RULE, noise_multiplier=1.5, steps=3)
    whole, key = mechanism.private(jax.random.key(0)), jax.random.key(0)
    parts = optax.chain(clip(), noise.gaussian(1.5, RULE, key), optax.scale(1 / 10))
    mask = jnp.array([1, 1, 0, 1])
    one, _ = whole.update(GRADIENTS, whole.init(PARAMS), PARAMS, mask=mask)
    other, _ = parts.update(GRADIENTS, parts.init(PARAMS), PARAMS, mask=mask)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), one, other)
    adapted = mechanism_with(adaptive=clipping.Quantile(count_multiplier=3.0)).private()
    with pytest.raises(ValueError, match=r"Use dpjax\.dpsgd"):
        adapted.update(GRADIENTS, adapted.init(PARAMS), PARAMS, mask=mask)


NEXT = "the noise comes next, before any other link"
BETWEEN = {
    "scale": optax.scale(10.0),
    "Adam": optax.scale_by_adam(),
    "momentum": optax.trace(0.9),
    "weight decay": optax.add_decayed_weights(0.1),
    "mean": mean(),
    "ema": optax.ema(0.9),
    "lion": optax.scale_by_lion(),
    "apply_every": optax.apply_every(2),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BETWEEN)
def test_the_error_of_a_link_between_says_that_noise_comes_next(name):
    chain, params = optax.chain(clip(), BETWEEN[name], noised()), PARAMS["a"]
    with pytest.raises(TypeError, match=f"a clipped sum has no arithmetic: {NEXT}"):
        chain.update(GRADIENTS["a"], chain.init(params), params)


RULES = {
    "bounds": (clipping.flat(5.0), "is clipped to 5, the noise is for 1;"),
    "a fraction": (clipping.flat(0.1), "is clipped to 0.1, the noise is for 1;"),
    "estimated norms": (
        clipping.jl(1.0, projections=5),
        "to 1 with projections=5, the noise is for 1 with projections=None;",
    ),
    "groups": (
        halves(0, 1),
        r"to 0.5 and 0.5 in groups \(0, 1\), the noise is for 1 in groups \(0, 0\);",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_the_error_of_another_rule_says_what_differs(name):
    rule, message = RULES[name]
    link = noised()
    with pytest.raises(ValueError, match=message):
        link.update(clipping.trusted_sum(PARAMS, rule), link.init(PARAMS))


def test_nothing_can_compute_with_a_sum():
    found = clipping.trusted_sum(jnp.ones(3), RULE)
    for act in (
        lambda: jnp.asarray(found),
        lambda: jax.jit(lambda x: x)(found),
    ):
        with pytest.raises(REFUSED):
            act()
    ones = jnp.ones(3)
    for refused in (
        lambda: 2 * found,
        lambda: found - ones,
        lambda: ones + found,
        lambda: np.ones(3) / found,
        lambda: jax.jit(lambda x: x @ found)(ones),
        lambda: found**2,
        lambda: 2**found,
        lambda: -found,
        lambda: abs(found),
        lambda: found[0],
        lambda: found > 0,
        lambda: list(found),
    ):
        with pytest.raises(TypeError, match=f"no arithmetic: {NEXT}"):
            refused()
    with pytest.raises(AttributeError, match="no shape: the noise comes next"):
        found.shape  # noqa: B018
    assert getattr(found, "dtype", None) is None, "optax.inject_hyperparams asks"
    assert repr(found) == "<a clipped sum: the noise comes next, before any other link>"
    assert jax.tree.leaves(found) == [found]


# The record of `clipped_grad` -----------------------------------------------------------


def loss(w, x):
    return jnp.sum(w * x)


CLIPPED, W = clipped_grad(loss, RULE), jnp.zeros(3)
DATA = jnp.asarray(np.random.default_rng(0).normal(size=(12, 3)), jnp.float32)


@pytest.mark.thorough
@pytest.mark.parametrize("jitted", [False, True])
def test_a_record_says_by_which_rule_and_is_no_sum_itself(jitted):
    other = clipped_grad(loss, clipping.flat(10.0))
    link, run = noised(), jax.jit if jitted else lambda f: f
    record = run(CLIPPED)(W, DATA)
    assert isinstance(record, ClippedSum)
    assert isinstance(record.sum, Sum)
    link.update(record.sum, link.init(W))
    for wrong, error in ((record, "not a ClippedSum"), (record.value, "expected a clipped sum")):
        with pytest.raises(TypeError, match=error):
            link.update(wrong, link.init(W))
    with pytest.raises(ValueError, match="expected one rule for both"):
        link.update(run(other)(W, DATA).sum, link.init(W))
    estimated = clipped_grad(loss, clipping.jl(1.0, projections=5))
    with pytest.raises(ValueError, match="projections=5"):
        link.update(estimated(W, DATA, key=jax.random.key(0)).sum, link.init(W))
    with pytest.raises(ValueError, match="no rule clipped"):
        _ = record._replace(rule=None).sum


def in_a_scan(link, state):
    add = lambda total, rows: (CLIPPED(W, rows, start=total).total, None)  # noqa: E731
    total, _ = jax.lax.scan(add, clipping.empty_sum(RULE, W), DATA.reshape(3, 4, 3))
    return link.update(total.sum, state, W)[0]


def in_a_fold(link, state):
    draw = sampling.full(12).draw(jax.random.key(0), 0)
    add = lambda rows, mask, total: CLIPPED(W, DATA[rows], mask, start=total).total  # noqa: E731
    total = sampling.fold(draw, 5, add, clipping.empty_sum(RULE, W))
    return link.update(total.sum, state, W)[0]


@pytest.mark.thorough
@pytest.mark.parametrize("loop", [in_a_scan, in_a_fold])
def test_microbatches_are_added_to_one_sum(loop):
    """Inside `jit`: the commonest loop of one's own."""
    link = noise.gaussian(1.0, RULE, jax.random.key(0))
    whole, _ = link.update(CLIPPED(W, DATA).sum, link.init(W))
    np.testing.assert_allclose(jax.jit(partial(loop, link))(link.init(W)), whole, rtol=1e-5)


@pytest.mark.thorough
@kills("gradients/clipped_grad.py", "start.rule != rule.limits(params)", "False")
def test_a_sum_is_continued_by_its_own_rule_alone():
    total, narrow = CLIPPED(W, DATA[:7]), clipped_grad(loss, clipping.flat(0.5))
    np.testing.assert_allclose(
        CLIPPED(W, DATA[7:], start=total).value, CLIPPED(W, DATA).value, rtol=1e-5
    )
    for clipped, start in ((narrow, total), (CLIPPED, total.value), (CLIPPED, total.sum)):
        with pytest.raises(ValueError, match="expected a ClippedSum of this rule"):
            clipped(W, DATA, start=start)


@pytest.mark.thorough
def test_records_are_trees_that_keep_their_rule():
    record = CLIPPED(W, DATA)
    for copied in (jax.device_get(record), jax.tree.map(jnp.copy, record)):
        np.testing.assert_array_equal(noise_of(copied.sum), noise_of(record.sum))
    rows = jax.vmap(CLIPPED, (None, 0))(W, DATA.reshape(2, 6, 3))
    np.testing.assert_array_equal(jax.tree.map(lambda x: x[1], rows).sum.value, rows.value[1])


def noise_of(found):
    link = noise.gaussian(1.0, RULE, jax.random.key(0))
    return link.update(found, link.init(W))[0]


# Keys ------------------------------------------------------------------------------------

LINKS = {
    "gaussian": partial(noise.gaussian, 1.0, RULE),
    "correlated": partial(noise.correlated, strategies.square_root(3), 1.0, RULE),
    "privatize": FULL.privatize,
}
ONES = clipping.trusted_sum(jnp.ones(3), RULE)


def words(state):
    return tuple(np.asarray(jax.random.key_data(state.key)).tolist())


@kills("processes.py", "os.urandom(8)", "bytes(range(8))", case="gaussian")
@kills("noise/state.py", "jnp.where(unset, jnp.nan, x)", "x", case="gaussian")
@pytest.mark.parametrize("name", LINKS)
def test_a_key_is_drawn_where_a_run_begins(name):
    link = LINKS[name]()
    one, other = link.init(W), link.init(W)
    assert words(one) != words(other)
    assert np.all(link.update(ONES, one)[0] != link.update(ONES, other)[0])
    # A traced `init` gives the unset key, with which nothing is released.
    shapes = jax.eval_shape(link.init, W)
    unset = jax.jit(link.init)(W)
    assert jax.tree.map(jnp.shape, unset) == jax.tree.map(jnp.shape, shapes)
    assert not any(words(unset))
    for state in (unset, jax.tree.map(jnp.zeros_like, one)):
        with pytest.raises(ValueError, match=r"dpjax\.noise\.renew\(state\)"):
            link.update(ONES, state)
    step = jax.jit(lambda state: link.update(ONES, state)[0])
    assert np.all(np.isnan(step(unset)))
    fresh, again = noise.renew(unset), noise.renew(unset)
    assert np.all(np.isfinite(step(fresh)))
    assert np.all(step(fresh) != step(again))


@pytest.mark.parametrize("name", LINKS)
def test_a_supplied_key_repeats(name):
    """Every ``init`` starts the noise of the key, in `jit` and in an ensemble too."""
    link, key = LINKS[name](key=jax.random.key(0)), jax.random.key(0)
    want, _ = link.update(ONES, link.init(W))
    np.testing.assert_allclose(link.update(ONES, jax.jit(link.init)(W))[0], want, rtol=1e-6)
    keys = jax.random.split(key, 3)
    states = jax.vmap(lambda key: LINKS[name](key=key).init(W))(keys)
    outs = jax.vmap(lambda state: link.update(ONES, state)[0])(states)
    alone = LINKS[name](key=keys[1])
    np.testing.assert_allclose(outs[1], alone.update(ONES, alone.init(W))[0], rtol=1e-5)
    assert len(np.unique(outs)) == 9
    # A step that donates the state leaves the caller's key.
    jax.jit(lambda s: jax.tree.map(jnp.copy, s), donate_argnums=0)(link.init(W))
    assert not jax.random.key_data(key).is_deleted()


def test_renew_sets_keys_wherever_they_stand():
    chain = optax.chain(FULL.private(), optax.adam(0.1))
    states = {"one": jax.jit(chain.init)(PARAMS), "many": jax.vmap(LINKS["gaussian"]().init)(DATA)}
    fresh = noise.renew(states)
    assert jax.tree.structure(fresh) == jax.tree.structure(states)
    found = trees.nodes(fresh, noise.GaussianState)
    assert found[0].key.shape == (12,) or found[1].key.shape == (12,)
    data = np.concatenate([np.ravel(jax.random.key_data(state.key)) for state in found])
    assert len(np.unique(data)) == data.size
    for state in (fresh["one"], noise.renew(fresh["one"])):
        assert np.all(np.isfinite(chain.update(GRADIENTS, state, PARAMS)[0]["a"]))


def test_renew_gives_a_run_other_noise_and_the_same_draws():
    nothing = dict.fromkeys(State._fields)
    state = State(**{**nothing, "key": jax.random.key(1), "noise_key": jax.random.key(2)})
    fresh = noise.renew(state)
    assert fresh.key == state.key
    assert fresh.noise_key != state.noise_key
    unset = jax.random.key(0)  # a key of zeros
    assert noise.renew(state._replace(key=unset)).key != unset


@kills("noise/state.py", "if not any(map(_has_noise_key, nodes)):", "if False:")
def test_renew_raises_where_it_finds_no_noise_state():
    dropout = {"rngs": {"key": jax.random.key(0), "count": jnp.zeros(())}}
    for state in (optax.adam(0.1).init(PARAMS), PARAMS, dropout, {"key": 1, "step": 2}):
        with pytest.raises(ValueError, match=r"noise\.renew: expected a tree with the state of"):
            noise.renew(state)


@pytest.mark.thorough
def test_flax_optimizers_carry_the_link():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(FULL.private(), optax.sgd(0.1)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        graph, params = nnx.split(model)
        one = lambda p, x: jnp.sum(nnx.merge(graph, p)(x) ** 2)  # noqa: E731
        optimizer.update(model, jax.vmap(jax.grad(one), (None, 0))(params, x))

    before = np.asarray(model.kernel[...])
    step(model, optimizer, DATA[:4])
    assert np.all(np.isfinite(model.kernel[...]))
    assert np.any(model.kernel[...] != before)

    for chain in (FULL.private(), optax.chain(clip(), LINKS["correlated"](), optax.adam(0.1))):

        @nnx.jit
        def make(chain=chain):
            model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
            return model, nnx.Optimizer(model, chain, wrt=nnx.Param)

        model, optimizer = make()
        step(model, optimizer, DATA[:4])
        assert np.all(np.isnan(model.kernel[...])), "a traced init gives the unset key"
        model, optimizer = make()
        unset = nnx.state(optimizer)
        fresh = noise.renew(unset)
        assert jax.tree.structure(fresh) == jax.tree.structure(unset)
        nnx.update(optimizer, fresh)
        step(model, optimizer, DATA[:4])
        assert np.all(np.isfinite(model.kernel[...]))


# Masks -----------------------------------------------------------------------------------


@kills("mechanism/link.py", "mask is None or full", "full", case="poisson")
@pytest.mark.parametrize("name", ["poisson", "full"])
def test_private_takes_no_padding_for_examples(name):
    sampler = sampling.by_name(name, 100, 20)
    link, gradients = mechanism_with(sampling=sampler).private(), jnp.ones((100, 3))
    state = link.init(W)
    if name == "full":
        link.update(gradients, state)
        return
    for rows, mask in ((100, None), (100, True), (7, None)):
        with pytest.raises(ValueError, match="draws are padded"):
            link.update(gradients[:rows], state, mask=mask)
    link.update(gradients[:7], state, mask=True)
    link.update(gradients, state, mask=np.arange(100) < 7)


CHAIN = mechanism_with(200, 20, noise_multiplier=0.0, clipping=clipping.flat(100.0))


@pytest.mark.thorough
def test_a_chain_draws_masks_and_steps():
    """README's loop: the rows of the draw count, and few shapes are compiled."""
    data = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    optimizer, key = optax.chain(CHAIN.private(), optax.sgd(1.0)), jax.random.key(0)
    gradients = jax.vmap(jax.grad(loss), (None, 0))
    w, state, shapes = W, optimizer.init(W), set()
    for step in range(5):
        rows, mask = CHAIN.sampling.batch(data, key, step, multiple=16)
        shapes.add(len(rows))
        drawn = sampling.on_host(CHAIN.sampling.draw(key, step))
        np.testing.assert_array_equal(rows[mask], data[drawn])
        updates, state = optimizer.update(gradients(w, rows), state, w, mask=mask)
        np.testing.assert_allclose(updates, -data[drawn].sum(axis=0) / 20, rtol=1e-4, atol=1e-6)
    assert all(size % 16 == 0 for size in shapes)
    assert len(shapes) <= 2
    everyone, mask = sampling.full(5).batch(data, key, 0)
    assert (len(everyone), mask.all()) == (5, True), "never more rows than places"


@pytest.mark.parametrize("name", ["poisson", "balls_in_bins"])
def test_a_forgotten_mask_moves_no_example_by_more_than_its_bound(name):
    """`clipped_grad` does not know the sampler: padding of coins names every other example once."""
    draw = sampling.by_name(name, 40, 8).draw(jax.random.key(0), 3)
    assert sorted(draw.indices.tolist()) == [*range(40)]
    data = jnp.ones((40, 2))
    for row in (0, int(draw.indices[0])):
        sums = [CLIPPED(W[:2], d[draw.indices]).value for d in (data, data.at[row].set(0))]
        assert float(jnp.linalg.norm(sums[0] - sums[1])) <= 1 + 1e-5


# The whole chain, measured -----------------------------------------------------------------


QUICK = ["adafactor", "adamw", "lamb", "sm3"]
OTHERS = (
    "adabelief adadelta adagrad adam adamax adamaxw adan amsgrad fromage lars lion nadam nadamw "
    "novograd radam rmsprop rprop sgd sign_sgd yogi"
)
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS.split()]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_any_optimizer_behind_the_noise_is_as_private_as_its_multiplier(name):
    optimizer = getattr(optax, name)
    made = optimizer() if name == "adafactor" else optimizer(learning_rate=0.1)
    testing.assert_private(optax.chain(FULL.private(), made), PARAMS, steps=2)
