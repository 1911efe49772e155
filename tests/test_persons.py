# SPDX-License-Identifier: Apache-2.0
"""A person as the unit: draws, one gradient a person, and epsilon by enumeration."""

import collections
import functools
import itertools
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills
from scipy import stats

import dpjax
from dpjax import (
    accounting,
    auditing,
    clipping,
    data,
    federated,
    losses,
    reports,
    sampling,
    testing,
    verify,
)

# Persons with fewer rows than the cap of 2, as many, and more; their rows are not side by side.
OWNERS = np.array([5, -3, 8, 5, 8, 8, 1, 8, 1, 5, 8])
PEOPLE = {number: np.flatnonzero(number == OWNERS) for number in np.unique(OWNERS)}
SAMPLER = sampling.persons(OWNERS, batch_size=2, most_rows=2)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(len(OWNERS), 4)).astype(np.float32), np.arange(len(OWNERS)) % 3
X[PEOPLE[-3]] *= 0.1  # below the bound, else clipping would hide its scale
KEY, PARAMS, RULE = jax.random.key(3), jnp.full((4, 3), 0.1), clipping.flat(0.5)


def mechanism(sampler=SAMPLER, multiplier=1.0, steps=3, unit="patient", rule=RULE):
    return dpjax.Mechanism(
        sampling=sampler, clipping=rule, noise_multiplier=multiplier, steps=steps, unit=unit
    )


@functools.cache
def draws(count=6000):
    """The drawn rows of each person at every step, ``[steps, persons]`` of sorted tuples."""
    found = jax.jit(jax.vmap(lambda step: SAMPLER.draw(KEY, step)))(jnp.arange(count))
    return np.asarray(found.indices), np.asarray(found.mask)


def test_people_have_coins_and_their_rows_are_uniform_subsets():
    indices, mask = draws()
    assert indices.shape == mask.shape == (6000, 4, 2)
    assert len({str(pair) for pair in indices[:20, 0]}) > 3
    assert np.all(mask[..., 0] >= mask[..., 1]), "drawn rows come first"
    assert np.all(mask[:, :-1, 0] >= mask[:, 1:, 0]), "drawn persons come first"
    assert np.all(OWNERS[indices[..., 0]] == OWNERS[indices[..., 1]]), "padding is of the person"
    rows = collections.Counter()
    together = np.zeros((len(PEOPLE), len(PEOPLE)))
    for step in range(6000):
        here = indices[step][mask[step, :, 0]]
        found = [tuple(sorted(set(pair))) for pair in here.tolist()]
        rows.update(found)
        drawn = np.isin(list(PEOPLE), OWNERS[here[:, 0]])
        together += np.outer(drawn, drawn)
    for number, own in PEOPLE.items():
        expected = list(itertools.combinations(own.tolist(), min(2, len(own))))
        counts = np.array([rows.pop(subset) for subset in expected])
        assert abs(counts.sum() - 3000) < 5 * math.sqrt(1500), f"the rate of {number}"
        if len(counts) > 1:
            assert stats.chisquare(counts).pvalue > 1e-4
    assert not rows, "nothing else is drawn"
    np.testing.assert_allclose(together[~np.eye(4, dtype=bool)], 1500, atol=5 * 34)


def row_loss(w, row):
    return losses.cross_entropy(row[0] @ w, row[1])


def loss_at(w, row):
    return losses.cross_entropy(row[0] @ w * (1 + row[2]), row[1])


def by_definition(step, key=KEY):
    """The sum over persons of the clipped gradient of the mean over their drawn rows."""
    draw, total = SAMPLER.draw(key, step), jnp.zeros_like(PARAMS)
    for rows, mask in zip(np.asarray(draw.indices), np.asarray(draw.mask), strict=True):
        drawn = rows[mask]
        each = [jax.grad(row_loss)(PARAMS, (X[row], Y[row])) for row in drawn]
        mean = sum(each) / max(1, len(each))
        total = total + mean * min(1.0, RULE.bounds[0] / max(1e-9, float(jnp.linalg.norm(mean))))
    return total


def moved(rows=(X, Y), loss=row_loss, **options):
    """By how much the first step of a run without noise moves the sum."""
    optimizer = optax.sgd(SAMPLER.batch_size)
    algorithm = dpjax.dpsgd(loss, optimizer, mechanism(multiplier=0.0), rows, **options)
    state, info = algorithm.run(algorithm.init(PARAMS, KEY), 1)
    assert int(info.examples[0]) == int(SAMPLER.draw(KEY, 0).size)
    return PARAMS - state.params


def test_a_step_clips_one_gradient_a_person():
    expected = by_definition(0)
    for rows in ((X, Y), data.Stream(list(zip(X, Y, strict=True)))):
        np.testing.assert_allclose(moved(rows, microbatch_size=3), expected, atol=2e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["ghost", pytest.param("vmap", marks=pytest.mark.slow)])
def test_engines_frozen_weights_and_steps_agree(engine):
    expected = by_definition(0)
    np.testing.assert_allclose(moved(engine=engine), expected, atol=2e-6)
    frozen = lambda w, row, base: row_loss(w + base, row)  # noqa: E731
    base = jnp.zeros_like(PARAMS)
    found = moved(loss=frozen, frozen=base, engine=engine, microbatch_size=1)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    found = moved(loss=loss_at, per_step=lambda step: 0.0 * step, engine=engine)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    half = moved(weights=lambda step, w, person: 0.5 * jnp.any(person[1]), engine=engine)
    np.testing.assert_allclose(half, expected / 2, atol=2e-6)


@pytest.mark.thorough
def test_a_loop_of_ones_own_gives_the_same_sum():
    (rows, mask), draw = SAMPLER.batch((X, Y), KEY, 0), SAMPLER.draw(KEY, 0)
    clipped = dpjax.clipped_grad(losses.of_person(row_loss), RULE)
    found = clipped(PARAMS, (rows, mask), mask=draw.units)
    np.testing.assert_allclose(found.value, by_definition(0), atol=2e-6)
    # A person with one infinite row is dropped as a whole, and no other person is.
    worse = jnp.asarray(rows[0]).at[0, 0].set(jnp.inf)
    dropped = clipped(PARAMS, ((worse, rows[1]), jnp.ones_like(mask)))
    assert np.flatnonzero(~np.isfinite(dropped.norms[:, 0])).tolist() == [0]
    assert bool(jnp.all(jnp.isfinite(dropped.value)))


@pytest.mark.thorough
def test_with_all_rows_it_is_fedsgd_of_clients():
    every, clients = sampling.persons(OWNERS, 2, most_rows=5), np.searchsorted([*PEOPLE], OWNERS)
    one = dpjax.dpsgd(row_loss, optax.sgd(0.5), mechanism(every), (X, Y))
    plan = mechanism(sampling.poisson(4, 2), unit="client")
    groups = federated.Clients.split((X, Y), clients, 4)
    other = federated.fedsgd(row_loss, optax.sgd(0.5), plan, groups)
    found = [a.run(a.init(PARAMS, KEY), 3)[0].params for a in (one, other)]
    np.testing.assert_allclose(*found, atol=1e-5)


@pytest.mark.thorough
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, caplog):
    rows = X.copy()
    rows[PEOPLE[8]] = np.nan

    def fit(steps, folder):
        algorithm = dpjax.dpsgd(row_loss, optax.sgd(0.1), mechanism(steps=4), (rows, Y))
        state = algorithm.init(PARAMS, KEY)
        folder = tmp_path / folder
        return dpjax.fit(algorithm, state, steps=steps, directory=folder, progress=False)[0].params

    whole = fit(4, "one")
    assert "of 4 patients up to step 1 had no finite gradient" in caplog.text
    fit(2, "two")
    np.testing.assert_array_equal(fit(4, "two"), whole)


DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
from dpjax import data, meshes
from test_persons import X, Y, by_definition, moved

mesh = meshes.parse("data:2")
for rows in ((X, Y), data.Stream(list(zip(X, Y, strict=True)))):
    found = moved(rows, mesh=mesh, microbatch_size=1)
    np.testing.assert_allclose(found, by_definition(0), atol=2e-6)
"""


@pytest.mark.slow
def test_two_devices_give_the_sum_of_one():
    command = [sys.executable, "-c", DEVICES]
    folders = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": folders, "JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


HEAVY = sampling.persons(np.repeat(np.arange(9), [30, 1, 1, 1, 1, 1, 1, 1, 1]), 8.9, most_rows=10)
ROWS = np.where(np.arange(38) < 30, 100, 0).astype(np.float32)[:, None]


def person_gradients(rows, mask):
    loss = losses.of_person(lambda w, row: jnp.sum(w * row))
    return jax.vmap(jax.grad(loss), (None, 0))(jnp.zeros(1), (rows, mask))


FLAT = {
    "rows and mask": lambda rows, mask: (rows.reshape(-1, 1), mask.reshape(-1)),
    "a mask of two axes": lambda rows, mask: (rows.reshape(-1, 1), mask.reshape(-1, 1)),
    "rows under the mask of persons": lambda rows, mask: (rows.reshape(-1, 1), mask),
    "drawn rows": lambda rows, mask: (rows[mask], True),
    "drawn rows and ones": lambda rows, mask: (rows[mask], np.ones(int(mask.sum()), bool)),
    "no mask": lambda rows, mask: (rows.reshape(-1, 1), None),
    "persons under a flat mask": lambda rows, mask: (rows[:, 0], mask[:, 0]),
}


@kills("mechanism/link.py", "sampler.most_rows is not None", "False", case="rows and mask-False")
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", FLAT)
def test_a_flattened_person_is_refused(name, jitted):
    """The law: a person moves the sum by one bound, not by one for each of its rows."""
    link = mechanism(HEAVY, 0.0, rule=clipping.flat(1.0)).private()
    rows, mask = HEAVY.batch(ROWS, KEY, 0)
    state, gradients = link.init(jnp.zeros(1)), person_gradients(rows, mask)
    run = jax.jit if jitted else lambda f: f
    update = lambda g, mask: run(lambda g: link.update(g, state, mask=mask))(g)  # noqa: E731
    moved, _ = update(gradients, mask)
    assert float(moved[0]) * HEAVY.batch_size == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"expected one gradient a person.*losses\.of_person"):
        update(*FLAT[name](rows, mask))


@kills("mechanism/link.py", "jnp.any(jnp.asarray(mask), axis=1)", "jnp.ones(gradients, bool)")
def test_the_link_of_persons_masks_padding():
    link = mechanism(HEAVY, 0.0, rule=clipping.flat(1.0)).private()
    gradients, state = jnp.ones((4, 1)), link.init(jnp.zeros(1))
    mask = np.zeros((4, 10), bool)
    mask[0, :3] = mask[2, 0] = True
    mean, _ = jax.jit(lambda mask: link.update(gradients, state, mask=mask))(mask)
    assert float(mean[0]) * HEAVY.batch_size == pytest.approx(2.0)
    testing.assert_private(
        mechanism(HEAVY, rule=clipping.flat(1.0)).private(), jnp.zeros(3), most_rows=10
    )


def test_the_refusal_of_a_mask_of_persons_names_the_loss_of_a_person():
    rows, mask = SAMPLER.batch((X, Y), KEY, 0)
    for loss in (lambda w, row: jnp.sum(w) * jnp.sum(row[0]), row_loss):
        with pytest.raises(ValueError, match=r"mask has shape \(4, 2\).*losses\.of_person\(loss\)"):
            dpjax.clipped_grad(loss, RULE)(PARAMS, rows, mask=mask)


# Epsilon by enumeration ----------------------------------------------------------------

RATE, CAP, BOUND = 0.5, 2, 1.0
# Rows of each person, which are their gradients: below, at and above the cap.
TABLE = {"none": [0.0, 0.0], "below": [3.0], "at": [-0.5, 1.1], "above": [2.0, 2.0, -4.0, 2.0]}
WORST = {"none": [0.0], "above": [7.0, 7.0, 7.0]}  # alone it moves the sum, by the whole bound


def moves(rows):
    """Of a drawn person: each clipped mean over a subset of rows, with its probability."""
    subsets = list(itertools.combinations(rows, min(CAP, len(rows))))
    return [(np.clip(np.mean(s), -BOUND, BOUND), RATE / len(subsets)) for s in subsets]


def mixture(people):
    """The values of the sum before the noise, and their probabilities."""
    values, odds = np.zeros(1), np.ones(1)
    for rows in people.values():
        steps = [(0.0, 1 - RATE), *moves(rows)]
        values = np.concatenate([values + v for v, _ in steps])
        odds = np.concatenate([odds * p for _, p in steps])
    return values, odds


GRID = np.linspace(-14.0, 14.0, 2801)


def density(people, multiplier):
    values, odds = mixture(people)
    return odds @ stats.norm.pdf(GRID[None], values[:, None], multiplier * BOUND)


def lost(one, other, epsilon, multiplier, steps):
    """Delta at epsilon for two data sets, by quadrature over the sums of one or two steps."""
    f, g = (density(people, multiplier) for people in (one, other))
    if steps == 2:
        f, g = np.outer(f, f), np.outer(g, g)
    cell = (GRID[1] - GRID[0]) ** steps
    return cell * np.sum(np.maximum(0, f - math.exp(epsilon) * g))


def neighbours():
    """Pairs of tables that differ by one person, below, at or above the cap; the last is worst."""
    for table in (TABLE, WORST):
        for person in set(table) - {"none"}:
            yield table, {k: v for k, v in table.items() if k != person}


@functools.cache
def planned(steps):
    owners = np.repeat(np.arange(len(TABLE)), [len(rows) for rows in TABLE.values()])
    sampler = sampling.persons(owners, RATE * len(TABLE), CAP)
    return mechanism(sampler, 1.2, steps, rule=clipping.flat(BOUND))


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.thorough)])
@kills(
    "sampling/persons.py", "        of_people,\n", "        poisson(rows, batch_size),\n", slow=True
)
def test_statement_card_and_verify_hold_for_every_neighbour(steps):
    plan, delta = planned(steps), 0.05
    card = json.loads(json.dumps(reports.card(plan, delta)))
    claimed = {name: c["value"] for name, c in card["epsilon"].items() if c["proven"]}
    assert card["mechanism"]["unit"] == "patient"
    assert "rows" not in card["mechanism"]["sampling"], "their number is private"
    words = dpjax.statement(plan, delta)
    for line in ("one patient added or", f"persons: 2 of 4 patients a step (rate {RATE})"):
        assert line in words
    stated = float(words.split("epsilon")[1].split()[0])
    found = list(verify.findings(card))
    assert all("for one patient" in line for _, line in found if "claims" in line)
    assert [sound for sound, line in found if "claims" in line] == [True] * len(claimed)
    epsilons = (claimed["pld"], stated, plan.epsilon(delta, "pld"))
    assert claimed["pld"] == pytest.approx(epsilons[2])
    pairs = list(neighbours())
    for epsilon in (*claimed.values(), stated):
        for pair in pairs:
            for one, other in (pair, pair[::-1]):
                assert lost(one, other, epsilon, 1.2, steps) <= delta * (1 + 1e-5)
    worst = lost(*pairs[-1], claimed["pld"], 1.2, steps)
    assert worst == pytest.approx(delta, rel=0.01), "and it is no more than needed"


def counting(limit):
    """Counts the steps whose noisy mean exceeds a limit, in place of an optimizer."""

    def update(mean, count, params=None):
        return jax.tree.map(jnp.zeros_like, mean), count + (mean > limit).astype(jnp.int32)

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


@kills("training/step.py", "examples = examples, mask", "examples = examples, mask & False")
@pytest.mark.thorough
def test_steps_that_run_lose_what_was_enumerated():
    """Monte Carlo: how often the sums of real runs fall where a data set is the likelier one."""
    steps, epsilon, limit, masses = 20_000, 0.4, 0.5, []
    for table in (WORST, {"none": WORST["none"]}):
        rows = np.concatenate([np.array(rows, np.float32) for rows in table.values()])
        owners = np.repeat(np.arange(len(table)), [len(rows) for rows in table.values()])
        size = RATE * len(table)
        sampler = sampling.persons(owners, size, CAP)
        plan = mechanism(sampler, 1.2, steps, rule=clipping.flat(BOUND))
        algorithm = dpjax.dpsgd(lambda w, x: w * x, counting(limit / size), plan, rows)
        state, _ = algorithm.run(algorithm.init(jnp.zeros(()), KEY), steps)
        masses.append(int(state.optimizer) / steps)
        values, odds = mixture(table)
        expected = odds @ stats.norm.sf((limit - values) / 1.2)
        assert masses[-1] == pytest.approx(expected, abs=5 * math.sqrt(expected / steps))
    spent = planned(1).delta(epsilon, "pld")
    assert masses[0] - math.exp(epsilon) * masses[1] < spent + 4 * math.sqrt(1 / steps)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 3, 5])  # rows of the person: below, at and above the cap
def test_rows_with_group_accounting_hold_for_every_person(count):
    cap, rate, multiplier, delta = 3, 0.4, 2.0, 0.02
    event = accounting.subsampled_gaussian(multiplier, rate, 1)
    epsilon = accounting.epsilon_for_users(event, delta, cap)
    kept = min(cap, count)
    drawn = np.array(list(itertools.product([0, 1], repeat=kept)))
    odds = np.prod(np.where(drawn, rate, 1 - rate), axis=1)
    f = odds @ stats.norm.pdf(GRID[None], drawn.sum(axis=1)[:, None], multiplier)
    g, cell = stats.norm.pdf(GRID, 0, multiplier), GRID[1] - GRID[0]
    for one, other in ((f, g), (g, f)):
        here = cell * np.sum(np.maximum(0, one - math.exp(epsilon) * other))
        assert here <= delta * (1 + 1e-5)
    joins = cell * np.sum(np.maximum(0, f - math.exp(epsilon) * g))
    assert (joins == pytest.approx(delta, rel=0.01)) == (kept == cap)


@pytest.mark.slow
def test_the_accountant_says_which_way_needs_less_noise():
    plan = {"steps": 200, "epsilon": 1.0, "delta": 1e-4}
    both = accounting.persons_or_rows(2000, 200, 5, **plan)
    event = accounting.subsampled_gaussian(both.rows, 0.1, 200)
    assert 0.998 < accounting.epsilon_for_users(event, 1e-4, 5) <= 1
    event = accounting.subsampled_gaussian(both.persons, 0.1, 200)
    assert 0.998 < accounting.epsilon(event, 1e-4, "pld") <= 1
    assert (both.ratio, both.less) == (pytest.approx(5 * both.persons / both.rows), "rows")
    one = accounting.persons_or_rows(2000, 200, 1, **plan, bound_ratio=0.5)
    assert (one.ratio, one.less) == (pytest.approx(0.5, rel=2e-3), "persons")


# What it refuses ------------------------------------------------------------------------


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"int64\[3, 2\]; expected one integer a row.*two people"):
        sampling.persons(np.ones((3, 2), int), 1)
    with pytest.raises(ValueError, match=r"float64\[2\]"):
        sampling.persons(np.ones(2), 1)
    with pytest.raises(ValueError, match="persons draws persons"):
        mechanism(unit="example")
    with pytest.raises(ValueError, match="'patient', and poisson draws rows"):
        dpjax.dpsgd(row_loss, optax.sgd(0.1), mechanism(sampling.poisson(11, 2)), (X, Y))
    with pytest.raises(ValueError, match="expected one word"):
        mechanism(unit="one patient")
    with pytest.raises(ValueError, match="without: persons draws persons"):
        auditing.without(SAMPLER, [0])
    with pytest.raises(ValueError, match="hold 4 examples, the mechanism's sampler 11"):
        dpjax.dpsgd(row_loss, optax.sgd(0.1), mechanism(), (X[:4], Y[:4]))
    card = reports.card(mechanism(), 0.1, methods=["rdp"])
    card["mechanism"]["unit"] = "\x1b[2J"
    with pytest.raises(verify.Unreadable, match="one word"):
        list(verify.findings(card))
    assert mechanism(unit="").unit == "person"


KILLS = {
    "test_people_have_coins_and_their_rows_are_uniform_subsets": [
        kills("sampling/persons.py", "0, last + 1)", "0, last)"),
        kills(
            "sampling/persons.py", "starts[people.indices][:, None]", "starts[:, None]", slow=True
        ),
        kills("sampling/persons.py", "poisson(len(counts),", "poisson(rows,", slow=True),
        kills("sampling/persons.py", "Purpose.ROWS, step", "Purpose.ROWS, 0", slow=True),
    ],
    "test_a_step_clips_one_gradient_a_person": [
        kills("losses/people.py", "jnp.maximum(1, jnp.sum(mask))", "mask.size"),
        kills("losses/people.py", "jnp.where(mask, values, 0)", "values", slow=True),
        kills("training/_streaming.py", "mask[i : i + size]", "mask[:0]", slow=True),
    ],
}
