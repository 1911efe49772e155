# SPDX-License-Identifier: Apache-2.0
"""Noise is released once: the seals of a process and of a folder, and the identity of a program."""

import concurrent.futures
import contextlib
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills

import dpjax
from dpjax import checks, clipping, ledger, noise, sampling, strategies, types
from dpjax.noise import seals
from dpjax.noise.seals import remembered, seal

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
    state = first.init(jnp.zeros(3))
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
    state = first.init({"a": jnp.zeros(3), "b": jnp.zeros(3)})
    first.step(state)
    with pytest.raises(ledger.Refused, match="step 0 of this key"):
        second.step(state)


def test_memory_of_another_step_is_refused():
    """The difference of both releases would be the noise of an earlier step."""
    algorithm = solvable(strategies.square_root(8, bands=2), sampling.full(40))
    before = algorithm.init({"a": jnp.zeros(3), "b": jnp.zeros(3)})
    state, _ = algorithm.step(before)
    algorithm.step(state)
    with pytest.raises(ledger.Refused, match="step 1 of this key"):
        algorithm.step(state._replace(memory=before.memory))


def test_edited_parameters_are_refused_in_the_middle_of_a_dispatch():
    algorithm = make()
    start = algorithm.init(jnp.zeros(3))
    algorithm.run(dpjax.trees.copy(start), 4)
    state, _ = algorithm.step(start)
    with pytest.raises(ledger.Refused, match="step 1 of this key ran before"):
        algorithm.step(state._replace(params=state.params + 1))


def test_a_replay_is_free_and_so_is_another_rate_behind_the_same_noise():
    algorithm, faster = make(), make(rate=0.2)
    state = algorithm.init(jnp.zeros(3))
    (one, _), (two, _) = algorithm.step(state), algorithm.run(dpjax.trees.copy(state), 3)
    np.testing.assert_array_equal(algorithm.run(one, 2)[0].params, two.params)
    # The rate acts on what the first step released, so only the second step is another one.
    moved, _ = faster.step(state)
    with pytest.raises(ledger.Refused, match="step 1 of this key"):
        faster.step(moved)


def test_seeds_compare_settings_freely(caplog):
    with caplog.at_level("WARNING"):
        state = make().init(jnp.zeros(3), jax.random.key(42))
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
    algorithm.step(algorithm.init(jnp.zeros(3), key))
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

    state = algorithm.init(jnp.zeros(3))
    options = {"evaluate": evaluate, "evaluate_every": 1, "directory": folder, "progress": False}
    if after is None:
        return dpjax.fit(algorithm, state, **options)
    with pytest.raises(InterruptedError):
        dpjax.fit(algorithm, state, **options)
    return seen


def forgotten(monkeypatch):
    """A new process remembers nothing."""
    monkeypatch.setattr("dpjax.noise.seals._seen", {})


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
    algorithm.step(algorithm.init(jnp.zeros(3), key))
    with pytest.raises(ledger.Refused, match=r"^fit\(.*: step 0 of this key ran before"):
        died(tmp_path, make(), after=None, key=key)


@kills("noise/seals.py", "np.where(now == 0, before, now)", "now", slow=True)
def test_steps_before_the_folder_stay_known(tmp_path, monkeypatch):
    """A state that ran in another process enters a folder, and is run on there."""
    key, algorithm = noise.secret_key(), make()
    first = algorithm.init(jnp.zeros(3), key)
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
