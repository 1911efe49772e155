# SPDX-License-Identifier: Apache-2.0
"""Noise is released once: the seals of a process and of a folder, and the identity of a program."""

import concurrent.futures
import contextlib
import dataclasses
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dpjax.noise.seals import remembered, seal
from jax.experimental import hijax
from mutation import kills

import dpjax
from dpjax import checks, clipping, ledger, noise, sampling, strategies, types
from dpjax._jaxpr import _hash, fingerprint
from dpjax.noise import seals

DATA = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
RULE = clipping.flat(1.0)
TREE = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)}


def squared(w, x):
    return jnp.sum((w - x) ** 2)


def absolute(w, x):
    return jnp.sum(jnp.abs(w - x))


def make(loss=squared, rate=0.1, data=DATA, multiplier=5.0, clip=RULE, **options):
    mechanism = dpjax.Mechanism(
        sampling=sampling.full(40), clipping=clip, noise_multiplier=multiplier, steps=6
    )
    return dpjax.dpsgd(loss, optax.sgd(rate), mechanism, data, **options)


LARGE = {"a": jnp.ones(2**14 + 1), "b": jnp.zeros(2**14 + 1)}
OTHERS = {
    "bit": TREE | {"b": TREE["b"].at[3].set(np.nextafter(np.float32(1), 2))},
    "sign of zero": TREE | {"a": TREE["a"].at[0, 0].set(-0.0)},
    "order of rows": TREE | {"a": TREE["a"][::-1]},
    "order of leaves": {"a": TREE["b"], "b": TREE["a"]},
    "order of large leaves": {"a": LARGE["b"], "b": LARGE["a"]},
    "not a number": TREE | {"b": jnp.full(4, jnp.nan)},
}


@kills("_checksums.py", "words ^ (where * jnp.uint32(_STRIDE))", "words", case="order of rows")
@kills(
    "_checksums.py",
    "totals = [a * jnp.uint32(_STRIDE) + b for",
    "totals = [a + b for",
    case="order of large leaves",
)
@pytest.mark.parametrize("other", OTHERS)
def test_a_seal_differs_where_a_bit_does(other):
    tree = LARGE if "large" in other else TREE
    assert np.any(np.asarray(seal(tree)) != np.asarray(seal(OTHERS[other])))
    assert np.all(np.asarray(jax.jit(seal)(tree)) == np.asarray(seal(tree)))


def test_seals_of_many_trees_differ():
    trees = jnp.asarray(np.eye(300, dtype=np.float32))
    found = np.asarray(jax.vmap(seal)(trees)).view(np.uint64)
    assert len(np.unique(found)) == 300


# --- a process --------------------------------------------------------------------------------

# What a second run of one state may differ in: each would meet the noise of the first run.
AGAIN = {
    "loss": {"loss": absolute},
    "data": {"data": DATA + 1},
    "multiplier": {"multiplier": 6.0},
    "bound": {"clip": clipping.flat(0.5)},
}


@pytest.mark.sample(1)
@kills(
    "training/assembly.py",
    "require_one_release(key, first, sealed, name)",
    "pass",
    case="loss",
    slow=True,
)
@kills(
    "training/step.py",
    "seal((mean, bound_scale), in_parts)",
    "seal((total, lost), in_parts)",
    case="multiplier",
    slow=True,
)
@kills(
    "noise/seals.py",
    "(now != 0) & (before != now)",
    "(now != 0) & False",
    case="data",
    slow=True,
)
@pytest.mark.parametrize("change", AGAIN)
def test_one_state_in_two_runs_is_refused(change):
    first, second = make(), make(**AGAIN[change])
    state = first.init(noise.secret_key(), jnp.zeros(3))
    first.step(state)
    with pytest.raises(ledger.Refused, match="step 0 of this key ran before"):
        second.step(state)


def solvable(strategy, sampling_, **options):
    """A run whose noise is scaled by more than its multiplier."""
    mechanism = dpjax.Mechanism(
        sampling=sampling_,
        clipping=options.pop("clip", RULE),
        noise_multiplier=options.pop("multiplier", 1.0),
        steps=8,
        noise=strategy,
    )
    return dpjax.dpsgd(lambda w, x: squared(w["a"] + w["b"], x), optax.sgd(1.0), mechanism, DATA)


def halves(*groups):
    partition = types.Partition(names=("three", "four"), assign=lambda _: groups)
    return {"clip": clipping.per_group((3.0, 4.0), partition), "multiplier": (1.0, 1.0)}


CYCLES = sampling.cyclic_poisson(40, 10, cycle=4)
SOLVABLE = {
    "strategy": [
        (strategies.banded(8, 4, strategies.cycles(4), momentum=momentum), CYCLES)
        for momentum in (0.0, 0.9)
    ],
    "partition": [(None, sampling.full(40), halves(*groups)) for groups in ((0, 1), (1, 0))],
}


@pytest.mark.slow
@kills(
    "training/step.py",
    "seal((mean, bound_scale), in_parts)",
    "seal((total, lost, recipe.mechanism.deviations_on_mean(state.step)), in_parts)",
    slow=True,
)
@pytest.mark.parametrize("change", SOLVABLE)
def test_one_noise_at_two_scales_is_refused(change):
    """All groups and steps have equal deviations, and a leaf has the same noise at two scales."""
    (strategy, drawn, *more), other = SOLVABLE[change]
    first = solvable(strategy, drawn, **dict(*more))
    second = solvable(*other[:2], **dict(*other[2:]))
    assert first.mechanism.deviations_on_mean(0) == second.mechanism.deviations_on_mean(0)
    state = first.init(noise.secret_key(), {"a": jnp.zeros(3), "b": jnp.zeros(3)})
    first.step(state)
    with pytest.raises(ledger.Refused, match="step 0 of this key"):
        second.step(state)


def test_memory_of_another_step_is_refused():
    """The difference of both releases would be the noise of an earlier step."""
    algorithm = solvable(strategies.square_root(8, bands=2), sampling.full(40))
    before = algorithm.init(noise.secret_key(), {"a": jnp.zeros(3), "b": jnp.zeros(3)})
    state, _ = algorithm.step(before)
    algorithm.step(state)
    with pytest.raises(ledger.Refused, match="step 1 of this key"):
        algorithm.step(state._replace(memory=before.memory))


def test_edited_parameters_are_refused_in_the_middle_of_a_dispatch():
    algorithm = make()
    start = algorithm.init(noise.secret_key(), jnp.zeros(3))
    algorithm.run(dpjax.trees.copy(start), 4)
    state, _ = algorithm.step(start)
    with pytest.raises(ledger.Refused, match="step 1 of this key ran before"):
        algorithm.step(state._replace(params=state.params + 1))


def test_a_replay_is_free_and_so_is_another_rate_behind_the_same_noise():
    algorithm, faster = make(), make(rate=0.2)
    state = algorithm.init(noise.secret_key(), jnp.zeros(3))
    (one, _), (two, _) = algorithm.step(state), algorithm.run(dpjax.trees.copy(state), 3)
    np.testing.assert_array_equal(algorithm.run(one, 2)[0].params, two.params)
    # The rate acts on what the first step released, so only the second step is another one.
    moved, _ = faster.step(state)
    with pytest.raises(ledger.Refused, match="step 1 of this key"):
        faster.step(moved)


def test_seeds_compare_settings_freely(caplog):
    with caplog.at_level("WARNING"):
        state = make().init(jax.random.key(42), jnp.zeros(3))
    assert "a seed below 2^32" in caplog.text
    make().step(state)
    make(absolute).step(state)


LINKS = pytest.mark.parametrize(
    "make_link",
    [lambda key: noise.gaussian(1.0, RULE, key=key), lambda key: make().mechanism.privatize(key)],
    ids=["gaussian", "privatize"],
)


@kills("noise/link.py", "    trees.warn_of_seed(key, name)\n", "", case="privatize", slow=True)
@LINKS
def test_links_warn_of_a_small_seed(make_link, caplog):
    with caplog.at_level("WARNING"):
        make_link(noise.secret_key())
        assert "a seed below 2^32" not in caplog.text
        make_link(jax.random.key(42))
    assert "a seed below 2^32" in caplog.text


@kills(
    "noise/link.py",
    "        seal_outside_jit(state.key, state.step, noisy, name)\n",
    "",
    case="gaussian",
    slow=True,
)
@kills(
    "mechanism/link.py",
    "        seal_outside_jit(state.key, state.step, (mean, scale), name)\n",
    "",
    case="privatize",
    slow=True,
)
@LINKS
def test_two_links_of_one_key_are_refused(make_link):
    key, params = noise.secret_key(), jnp.zeros(3)
    generator, critic = make_link(key), make_link(key)
    one, other = (clipping.trusted_sum(jnp.full(3, x), RULE) for x in (1.0, 0.5))
    generator.update(one, generator.init(params))
    critic.update(one, critic.init(params))
    with pytest.raises(ledger.Refused, match="step 0 of this key"):
        critic.update(other, critic.init(params))


def test_a_run_and_a_link_share_no_key():
    key, algorithm = noise.secret_key(), make()
    algorithm.step(algorithm.init(key, jnp.zeros(3)))
    link = algorithm.mechanism.privatize(key)
    with pytest.raises(ledger.Refused, match="step 0 of this key"):
        link.update(jnp.ones(3), link.init(jnp.zeros(3)))


# --- a folder ---------------------------------------------------------------------------------


def died(folder, algorithm, *, after, key=None):
    """Runs until an evaluation of a step fails, as a script with a mistake does."""
    seen = {}

    def evaluate(state):
        seen[state.ledger.steps] = np.asarray(state.params).copy()
        if state.ledger.steps == after:
            raise InterruptedError
        return {}

    state = algorithm.init(noise.secret_key() if key is None else key, jnp.zeros(3))
    options = {"evaluate": evaluate, "evaluate_every": 1, "directory": folder, "progress": False}
    if after is None:
        return dpjax.fit(algorithm, state, **options)
    with pytest.raises(InterruptedError):
        dpjax.fit(algorithm, state, **options)
    return seen


def forgotten(monkeypatch):
    """A new process remembers nothing."""
    monkeypatch.setattr("dpjax.noise.seals._seen", {})


PROGRAMS = {
    "rate": {"rate": 0.01},
    "loss": {"loss": absolute},
    "weights": {"weights": lambda step, params, x: jnp.float32(0.5)},
    "constant": {"loss": lambda w, x: jnp.sum((w - x - jnp.asarray(DATA)[0]) ** 2)},
}


@pytest.mark.sample(1)
@kills(
    "training/assembly.py",
    '"program": self._program(self._at_home(state)),',
    '"program": None,',
    case="rate",
    slow=True,
)
@kills(
    "training/recipe.py",
    "            weigh and weigh(",
    "            () and weigh(",
    case="weights",
    slow=True,
)
@kills(
    "training/recipe.py",
    "            jax.value_and_grad(bound_to(recipe, shared).loss)(state.params, example),\n",
    "",
    case="loss",
    slow=True,
)
@kills(
    "training/recipe.py",
    "            recipe.optimizer.update(mean, state.optimizer, state.params, **extra),\n",
    "",
    case="rate",
    slow=True,
)
@kills(
    "training/run_identity.py",
    "not names and comparable",
    "not names and not changed",
    case="rate",
    slow=True,
)
@pytest.mark.parametrize("change", PROGRAMS)
def test_released_steps_belong_to_one_program(tmp_path, change, monkeypatch):
    """Also where the layout changed with it, and so the traced step."""
    died(tmp_path, make(), after=2)
    for layout in ({}, {"microbatch_size": 8, "engine": "vmap"}):
        forgotten(monkeypatch)
        with pytest.raises(ledger.Refused, match=r"program\.functions: ") as refusal:
            died(tmp_path, make(**layout, **PROGRAMS[change]), after=None)
        assert "program.step" not in str(refusal.value)
    state, _ = died(tmp_path, make(), after=None)
    assert state.ledger.steps == 6


@kills(
    "training/run_identity.py",
    "    if not names and not changed:\n        names = differ\n",
    "",
    slow=True,
)
def test_a_changed_step_of_the_same_functions_is_refused_too(tmp_path, monkeypatch):
    """As of another clipping of one description, or of an algorithm that traces no functions."""

    def changed(algorithm):
        def identity(state):
            known = algorithm.identity(state)
            return {**known, "program": {**known["program"], "step": ["another"]}}

        return dataclasses.replace(algorithm, identity=identity)

    died(tmp_path, make(), after=2)
    forgotten(monkeypatch)
    with pytest.raises(ledger.Refused, match=r"program\.step: "):
        died(tmp_path, changed(make()), after=None)


def rows(data):
    return dpjax.data.Stream(list(data))


@pytest.mark.slow
@kills(
    "training/runner.py",
    "seals.require_one_release(self.state.key, 0, folder.seals(), where)",
    "pass",
    slow=True,
)
@kills(
    "training/runner.py",
    "seals.remembered(self.state.key, self.done)",
    "np.zeros(self.done, np.uint64)",
    slow=True,
)
def test_a_row_of_a_stream_that_changed_is_refused(tmp_path, monkeypatch):
    """The fingerprint of a stream reads 16 rows; the seals know all rows that were read."""
    died(tmp_path, make(data=rows(DATA)), after=2)
    changed = DATA.copy()
    changed[8] = 0
    forgotten(monkeypatch)
    with pytest.raises(ledger.Refused, match="step 0 of this key ran before"):
        died(tmp_path, make(data=rows(changed)), after=None)
    forgotten(monkeypatch)
    assert died(tmp_path, make(data=rows(DATA)), after=None)[0].ledger.steps == 6


@kills(
    "noise/seals.py", "& (now != 0) & (before != now)", "& (first > 0) & (before != now)", slow=True
)
def test_a_folder_and_its_process_agree(tmp_path, monkeypatch):
    """Another process ran steps there whose noise met other sums in this one."""
    key = noise.secret_key()
    died(tmp_path, make(), after=2, key=key)
    forgotten(monkeypatch)
    algorithm = make(loss=absolute)
    algorithm.step(algorithm.init(key, jnp.zeros(3)))
    with pytest.raises(ledger.Refused, match=r"^fit\(.*: step 0 of this key ran before"):
        died(tmp_path, make(), after=None, key=key)


@kills("noise/seals.py", "np.where(now == 0, before, now)", "now", slow=True)
def test_steps_before_the_folder_stay_known(tmp_path, monkeypatch):
    """A state that ran in another process enters a folder, and is run on there."""
    key, algorithm = noise.secret_key(), make()
    first = algorithm.init(key, jnp.zeros(3))
    state, _ = algorithm.step(first)
    known = remembered(key, 1)
    forgotten(monkeypatch)
    dpjax.fit(algorithm, state, steps=1, directory=tmp_path, progress=False)
    assert not remembered(key, 1)[0]
    algorithm.step(first)
    dpjax.fit(algorithm, state, steps=1, directory=tmp_path, progress=False)
    assert remembered(key, 1) == known


@kills("training/run_folder.py", "np.uint64)[: self._mark.furthest]", "np.uint64)", slow=True)
def test_steps_that_were_not_released_may_run_otherwise(tmp_path, monkeypatch):
    """A run may die between two evaluations: the last steps ran, and no one saw them."""
    died(tmp_path, make(), after=2)
    with (tmp_path / "seals").open("r+b") as file:
        file.seek(2 * 8)
        file.write(bytes(range(8, 19)))  # step 2 with another sum, and half of step 3
    forgotten(monkeypatch)
    assert died(tmp_path, make(), after=None)[0].ledger.steps == 6
    assert len((tmp_path / "seals").read_bytes()) == 6 * 8


@kills(
    "training/run_folder.py",
    "self._sealed = 0 ",
    "self._sealed = 2 * (self.path / 'seals').exists() ",
    slow=True,
)
def test_seals_of_a_key_that_is_lost_bind_no_other_key(tmp_path, monkeypatch):
    died(tmp_path, make(), after=2)
    shutil.rmtree(tmp_path / "checkpoints")
    for name in ("metrics.jsonl", "furthest"):
        (tmp_path / name).unlink()
    forgotten(monkeypatch)
    died(tmp_path, make(), after=3)
    forgotten(monkeypatch)
    assert died(tmp_path, make(), after=None)[0].ledger.steps == 6


@kills("training/run_folder.py", "if left := [name for", "if False and [name for", slow=True)
def test_a_folder_whose_run_is_unknown_is_refused(tmp_path):
    died(tmp_path, make(), after=2)
    (tmp_path / "run.json").unlink()
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ledger.Refused, match=r"furthest, seals, checkpoints and no run\.json"):
        died(tmp_path, make(), after=None)


# --- programs ---------------------------------------------------------------------------------


def traced(function, *shapes):
    return fingerprint(jax.make_jaxpr(function)(*shapes))


def placed(x):
    return jax.lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def scaled(by):
    return lambda x: jnp.sum(jnp.tanh(x) * by)


# Its name before JAX 0.11 comes second.
HiPrim = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive


class Shift(HiPrim):
    """As JAX 0.12 writes operations: the number stands in the parameters of an object."""

    def __init__(self, kind, by):
        self.in_avals, self.out_aval, self.params = (kind,), kind, {"by": by}
        super().__init__()

    def expand(self, x):
        return x


@dataclasses.dataclass(frozen=True)
class Gain:
    by: float

    def __call__(self, x):
        return self.by * np.asarray(x)


def shifted(by):
    return lambda x: Shift(jax.typeof(x), by)(x)


def hosted(function):
    return lambda x: jax.pure_callback(function, x, x, vmap_method="sequential")


def searched(side):
    return lambda x: jnp.searchsorted(jnp.arange(3.0), x, side=side)


# Its text leaves numbers out.
LONG = np.sin(np.arange(5000.0)) * (np.arange(5000) == 2500)


SAME = {
    "parameters of an object": (shifted((1, scaled(1.0))), shifted((1, scaled(2.0)))),
    "what a callback holds": (hosted(Gain(1.0)), hosted(Gain(2.0))),
    "closure made again": (scaled(2.0), scaled(2.0)),
    "name of a function": (jax.jit(lambda x: x + 1), jax.jit(lambda y: y + 1)),
    "place of an array": (
        lambda x: jnp.sin(x) - x,
        lambda x: placed(jnp.sin(placed(x))) - placed(x),
    ),
    "array of equal numbers": (scaled(jnp.ones(3)), scaled(jnp.ones(3))),
}


@kills("noise/seals.py", "with _lock:", "if True:", slow=True)
def test_of_two_threads_with_one_key_one_releases(monkeypatch):
    """Each waits for the other between the look at the table and the entry, if it can."""
    key, both, found = noise.secret_key(), threading.Barrier(2), seals.remembered

    def late(*given):
        before = found(*given)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return before

    def released(number):
        try:
            seals.require_one_release(key, 0, np.array([number], np.uint64), "a thread")
        except checks.Refused:
            return 0
        return number

    monkeypatch.setattr(seals, "remembered", late)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        each = list(pool.map(released, [3, 5]))
    assert sorted(each) in ([0, 3], [0, 5])
    assert found(key, 1) == max(each)


DIFFERENT = {
    "parameters of an object": (shifted(1), shifted(2)),
    "program in an object": (
        shifted(jax.make_jaxpr(jnp.sin)(1.0)),
        shifted(jax.make_jaxpr(jnp.cos)(1.0)),
    ),
    "traced function in an object": (
        shifted(jax.jit(jnp.sin).trace(1.0)),
        shifted(jax.jit(jnp.cos).trace(1.0)),
    ),
    "array in an object": (shifted({"by": LONG}), shifted({"by": 2 * LONG})),
    "side of a search": (searched("left"), searched("right")),
    "number": (scaled(2.0), scaled(3.0)),
    "number in a jitted function": (jax.jit(scaled(2.0)), jax.jit(scaled(3.0))),
    "array": (scaled(jnp.ones(3)), scaled(jnp.zeros(3))),
    "primitive": (jnp.sin, jnp.cos),
    "widths of a pad": (
        lambda x: jax.lax.pad(x, 0.0, [(1, 11, 0)]),
        lambda x: jax.lax.pad(x, 0.0, [(11, 1, 0)]),
    ),
    "axis": (lambda x: jnp.flip(x, 0), lambda x: jnp.roll(x, 1, 0)),
    "operands": (lambda x: x - 2 * x, lambda x: 2 * x - x),
    "branch": (
        lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.lax.cond(x[0] > 0, jnp.cos, jnp.sin, x),
    ),
}


@kills(
    "_jaxpr.py",
    'if equation.primitive.name == "sharding_constraint":',
    "if False:",
    case="place of an array",
    slow=True,
)
@pytest.mark.parametrize("name", SAME)
def test_equal_programs_have_one_hash(name):
    one, other = SAME[name]
    assert traced(one, jnp.ones(3)) == traced(other, jnp.ones(3))


@kills("_jaxpr.py", "_hash(np.asarray(v.val), write)", "pass", case="number in a jitted function")
@kills(
    "_jaxpr.py",
    "if all(each is not None for each in held):",
    "if False:",
    case="parameters of an object",
)
@kills(
    "_jaxpr.py",
    "case Mapping():",
    "case Mapping() if False:",
    case="array in an object",
    slow=True,
)
@kills(
    "_jaxpr.py", "_hash(part.jaxpr, write)", "pass", case="traced function in an object", slow=True
)
@kills("_jaxpr.py", "for constant in part.consts:", "for constant in ():", case="array", slow=True)
@kills(
    "_jaxpr.py",
    "for v in (*equation.invars, *equation.outvars):",
    "for v in equation.outvars:",
    case="operands",
    slow=True,
)
@kills("_jaxpr.py", 'write(b",")', "pass", case="widths of a pad", slow=True)
@pytest.mark.parametrize("name", DIFFERENT)
def test_other_programs_have_another_hash(name):
    one, other = DIFFERENT[name]
    assert traced(one, jnp.ones(3)) != traced(other, jnp.ones(3))


@kills("_jaxpr.py", "_hash(sorted(map(repr, part)), write)", "_hash(list(map(repr, part)), write)")
def test_a_set_has_one_hash_in_any_order():
    """Axes of a mesh are a set, and each process orders a set of names in its own way."""
    written = [[], []]
    for order, out in zip(([0, 8], [8, 0]), written, strict=True):
        _hash(frozenset(order), out.append)
    assert list(frozenset([0, 8])) != list(frozenset([8, 0]))
    assert written[0] == written[1]
