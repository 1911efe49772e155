# SPDX-License-Identifier: Apache-2.0
"""Samplers: events and claims.  How draws behave is among the laws."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from mutation import kills
from small_mechanisms import mechanism_with

from dpjax import sampling, schedules, strategies
from dpjax.accounting import events
from dpjax.types import Draw

LINEAR = schedules.CURRICULA["linear-down"](epochs=20, steps_per_epoch=100)


def epsilon(sampler, multiplier, steps, method="rdp", delta=1e-5, **options):
    facts = {"noise_multiplier": multiplier, "steps": steps, **options}
    return mechanism_with(sampling=sampler, **facts).epsilon(delta, method)


def test_poisson_is_amplified():
    found = epsilon(sampling.poisson(60_000, 600), 1.0, 2000, "pld")
    assert found == pytest.approx(2.5839, rel=0.005)


@pytest.mark.parametrize(("multiplier", "want"), [(1.0, 28.3735)])
@pytest.mark.parametrize(
    "sampler",
    [sampling.shuffled(60_000, 600), sampling.curriculum(np.arange(60_000), 600, public=True)],
    ids=["shuffled", "public order"],
)
def test_shuffled_and_fixed_orders_are_one_gaussian_an_epoch(sampler, multiplier, want):
    assert epsilon(sampler, multiplier, 2000, "pld") == pytest.approx(want, rel=0.005)


@kills("accounting/events.py", "np.minimum.reduceat", "np.maximum.reduceat")
@pytest.mark.promotes
def test_an_epoch_is_counted_by_its_worst_step():
    within = epsilon(sampling.shuffled(1000, 10), lambda t: 4.0 - 3.0 * (t % 100 == 50), 200)
    constant = epsilon(sampling.shuffled(1000, 10), 1.0, 200)
    assert within == pytest.approx(constant)
    linear = epsilon(sampling.shuffled(60_000, 600), LINEAR, 2000, "pld")
    assert linear == pytest.approx(10.5353, rel=0.005)


@kills(
    "sampling/independent.py",
    "neighbours=Neighbours.REPLACE_ONE",
    "neighbours=Neighbours.ADD_OR_REMOVE",
)
@pytest.mark.parametrize(
    ("sampler", "multiplier", "steps", "want"),
    [
        (sampling.fixed(10_000, 100), 2.0, 1000, 3.576),
        (sampling.fixed(10_000, 100), 1.0, 1000, 20.99),
    ],
)
def test_fixed_batches_are_accounted_for_replace_one(sampler, multiplier, steps, want):
    assert epsilon(sampler, multiplier, steps) == pytest.approx(want, rel=0.002)
    with pytest.raises(ValueError, match="replace-one"):
        epsilon(sampler, multiplier, steps, neighbours="add-or-remove")


@pytest.mark.parametrize("name", ["shuffled", "fixed"])
def test_no_sampler_claims_more_neighbours_than_are_proved(name):
    """Cut points shift when an example joins, so shuffled batches have no add-or-remove."""
    with pytest.raises(ValueError, match=f"{name} batches are proved for"):
        epsilon(getattr(sampling, name)(100, 10), 1.0, 10, neighbours="add-or-remove")


@kills("sampling/epochs.py", 'event = "none"', 'event = "poisson"')
def test_an_order_made_from_private_data_is_not_private():
    scores = jax.random.normal(jax.random.key(0), (100,))
    sampler = sampling.curriculum(np.argsort(scores), 10)
    assert epsilon(sampler, 5.0, 10) == np.inf
    assert "not private" in sampler.claim


def bins(rates, steps_per_row=400):
    places = np.arange(60_000) // 12_000
    return sampling.scored(places, rates, steps_per_row=steps_per_row, batch_size=600)


OPENED = np.tri(5)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rates", "method", "expected"),
    [
        (0.01 * OPENED, "pld", 1.4938),  # growing batches cost what no curriculum costs
        (0.05 * OPENED / np.arange(1, 6)[:, None], "pld", 4.6323),
        (0.05 * OPENED / np.arange(1, 6)[:, None], "rdp", 5.0575),
        (0.01 * OPENED[:, 4:], "pld", 0.6514),  # none but the hardest: in the last row alone
    ],
)
def test_the_largest_rate_of_any_bin_is_counted(rates, method, expected):
    places = np.arange(60_000) // 12_000 if rates.shape[1] == 5 else np.zeros(60_000, int)
    sampler = sampling.scored(places, rates, steps_per_row=400, batch_size=600)
    assert epsilon(sampler, 1.38, 2000, method) == pytest.approx(expected, rel=2e-3)


@pytest.mark.slow
def test_a_bin_is_drawn_at_its_own_rate_of_the_step():
    rates = np.array([[0.2, 0.0], [0.1, 1.0]])
    sampler = sampling.scored(np.arange(1000) % 2, rates, steps_per_row=3, batch_size=10)
    draws = [sampler.draw(jax.random.key(0), step) for step in range(60)]
    counts = np.array([np.bincount(sampling.on_host(d) % 2, minlength=2) for d in draws])
    assert not counts[:3, 1].any()
    assert (counts[3:, 1] == 500).all()
    assert 60 < counts[:3, 0].mean() < 140  # of 100, with a deviation of 5
    assert abs(counts[3:, 0].mean() - 50) < 4  # 4 of its deviations


@pytest.mark.thorough
def test_one_bin_at_one_rate_is_poisson_sampling():
    one = sampling.scored(np.zeros(100, int), [[0.1]], steps_per_row=1, batch_size=10)
    other = sampling.poisson(100, 10)
    for step in range(3):
        a, b = (s.draw(jax.random.key(1), step) for s in (one, other))
        np.testing.assert_array_equal(a.indices, b.indices)
    multipliers = np.array([1.0, 2.0, 1.0])
    assert one.event(multipliers) == other.event(multipliers)


@kills(
    "accounting/events.py",
    "random_allocation(multipliers, cycle)",
    "random_allocation(multipliers, 1)",
)
def test_random_allocation_counts_its_epochs_and_the_steps_of_the_last():
    sampler = sampling.random_allocation(100, 4)
    assert (sampler.batch_size, str(sampler.neighbours)) == (25.0, "add-or-remove")
    whole, cut = events.random_allocation([2.0] * 4, 4), events.random_allocation([2.0], 4)
    assert sampler.event(np.full(8, 2.0)) == events.random_allocation([2.0] * 8, 4)
    assert str(sampler.event(np.full(5, 2.0))) == str(events.compose(whole, cut))
    with pytest.raises(ValueError, match="random_allocation"):
        mechanism_with(sampling=sampler, steps=8, noise=strategies.white(8))


def test_full_batches_are_plain_gaussians():
    full, poisson = sampling.full(1279), sampling.poisson(1279, 1279)
    found = epsilon(full, 35.0, 2000, "pld", delta=1 / (1.1 * 1279))
    assert found == pytest.approx(4.3959, rel=0.002)
    assert epsilon(poisson, 35.0, 2000) == epsilon(full, 35.0, 2000)


@kills("sampling/independent.py", "math.floor(rate * WORDS) - 1", "math.floor(rate * WORDS)")
def test_the_rate_that_runs_is_never_above_the_rate_that_is_accounted(monkeypatch):
    """2^32 / 3 is 1431655765 and a third: that many words mean yes, and not one more."""
    words = [0, 1431655764, 1431655765]
    monkeypatch.setattr(jax.random, "bits", lambda *_: jnp.array(words, jnp.uint32))
    draw = sampling.poisson(3, 1).draw(jax.random.key(0), 0)
    assert sampling.on_host(draw).tolist() == [0, 1]


@kills("sampling/independent.py", "jnp.asarray(table > 0)", "jnp.asarray(table >= 0)", slow=True)
def test_no_bin_is_drawn_above_the_rate_that_is_accounted(monkeypatch):
    """As above; and at rate 0 not even a word of 0 means yes."""
    words = [0, 1431655764, 1431655765, 0]
    monkeypatch.setattr(jax.random, "bits", lambda *_: jnp.array(words, jnp.uint32))
    sampler = sampling.scored([0, 0, 0, 1], [[1 / 3, 0.0]], steps_per_row=1, batch_size=1)
    draw = sampler.draw(jax.random.key(0), 0)
    assert sampling.on_host(draw).tolist() == [0, 1]


def test_samplers_whose_steps_share_a_draw_say_so():
    """A run keeps generator and rows then, or an example could be in two batches of an epoch."""
    alone = [sampling.poisson(40, 10), sampling.fixed(40, 10), sampling.full(40), bins([[0.1] * 5])]
    shared = [
        sampling.shuffled(40, 10),
        sampling.curriculum(np.arange(40), 10, public=True),
        sampling.cyclic_poisson(40, 10, cycle=2),
        sampling.balls_in_bins(40, 10),
        sampling.random_allocation(40, 4),
    ]
    found = [each.name for each in (*alone, *shared) if not each.independent]
    assert found == [each.name for each in shared]


@pytest.mark.parametrize(
    ("name", "most"), [("poisson", 2**44), ("shuffled", 2**44), ("fixed", 2**44), ("full", 2**31)]
)
def test_more_examples_than_an_index_can_name_are_refused(name, most):
    with pytest.raises(ValueError, match="a whole number, at least 1 and at most"):
        sampling.by_name(name, most + (name != "full"), 256)
    if name != "full":  # which would fill the memory
        for examples, shape in ((most, (2,)), (2**31, (2,)), (2**31 - 1, ())):
            draw = jax.eval_shape(sampling.by_name(name, examples, 256).draw, jax.random.key(0), 0)
            assert draw.indices.shape[1:] == shape
            assert draw.indices.dtype == (jnp.uint32 if shape else jnp.int32)


@pytest.mark.parametrize("name", ["poisson", "shuffled", "fixed"])
def test_no_array_of_a_draw_is_larger_than_the_batch_needs(name):
    """Of the smallest and the largest data sets that are not drawn example by example."""
    for examples in (2**16 + 1, 2**44):
        draw = sampling.by_name(name, examples, 256).draw
        for size in sizes(jax.make_jaxpr(draw)(jax.random.key(0), 0).jaxpr):
            assert size <= (50_000 if examples == 2**16 + 1 else 48 * 2**14)


def test_no_array_of_random_allocation_is_larger_than_batches_and_root_need():
    draw = sampling.random_allocation(10**9, 10**9 // 4096).draw
    assert max(sizes(jax.make_jaxpr(draw)(jax.random.key(0), 0).jaxpr)) < 1_500_000


def sizes(jaxpr):
    """Of all arrays in a traced program."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


def test_a_draw_of_pairs_of_words_is_read_from_a_stream_alone():
    draw = Draw(jnp.zeros((5, 2), jnp.uint32), jnp.arange(5) < 3)
    with pytest.raises(ValueError, match=r"Use a data\.Stream"):
        sampling.fold(draw, 2, lambda rows, mask, total: total, jnp.zeros(()))


@pytest.mark.parametrize("number", [float, np.int8, jnp.float32])
@pytest.mark.parametrize("name", ["poisson", "shuffled", "fixed", "full"])
def test_whole_sizes_are_the_same_however_they_are_written(name, number):
    """What stands on a card are numbers of Python's."""
    sampler, plain = (sampling.by_name(name, of(100), of(10)) for of in (number, int))
    assert type(sampler.examples) is int
    assert type(sampler.batch_size) in (int, float)
    assert (sampler.batch_size, sampler.capacity) == (plain.batch_size, plain.capacity)
    multipliers = np.full(25, 2.0)
    assert sampler.event(multipliers) == plain.event(multipliers)


def folded(size):
    draw = sampling.full(5).draw(jax.random.key(0), 0)
    return sampling.fold(draw, size, lambda rows, mask, total: total, jnp.zeros(()))


def test_a_rate_for_a_batch_size_is_noticed(caplog):
    sampling.poisson(60_000, 0.004)
    assert "give the examples that it draws: 240" in caplog.text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sampling.poisson(100, 101), "at most the number of examples"),
        (lambda: sampling.poisson(100, 0), "above 0"),
        (lambda: sampling.poisson(0, 1), "at least 1"),
        (lambda: sampling.poisson(100, 1e-8), "out of bounds"),
        (lambda: sampling.shuffled(100, 2.5), r"whole number.*Round a quotient"),
        (lambda: sampling.random_allocation(2**31, 58), "at most 2147483647"),
        (lambda: sampling.random_allocation(40, 41), "at least 1 and at most 40"),
        (lambda: sampling.cyclic_poisson(100, 20, cycle=6), "cycle of at most 5"),
        (lambda: sampling.curriculum([0.3, 0.1], 1), "np.argsort"),
        (lambda: bins([0.1, 0.2]), r"expected rates \[rows, bins\]"),
        (lambda: bins([[0.1] * 4]), "np.digitize"),
        (lambda: sampling.by_name("scored", 10, 1), "curriculum and scored need more than sizes"),
        (lambda: bins([[0.1] * 5], steps_per_row=0), "at least 1"),
        (lambda: folded(0), "at least 1"),
    ],
)
def test_errors_teach(call, message):
    with pytest.raises((TypeError, ValueError, OverflowError), match=message):
        call()


EVERY = {
    "poisson": sampling.poisson(40, 10),
    "full": sampling.full(40),
    "fixed": sampling.fixed(40, 10),
    "shuffled": sampling.shuffled(40, 10),
    "balls_in_bins": sampling.balls_in_bins(40, 10),
    "random_allocation": sampling.random_allocation(40, 4),
    "cyclic_poisson": sampling.cyclic_poisson(40, 10, cycle=2),
    "curriculum": sampling.curriculum(np.arange(40), 10, public=True),
    "scored": sampling.scored(
        np.arange(40) % 2, [[0.5, 0.1], [0, 1]], steps_per_row=3, batch_size=10
    ),
    "persons": sampling.persons(np.arange(80) % 40, 10, most_rows=2),
}


@pytest.mark.parametrize("name", EVERY)
def test_a_sampler_states_its_event_and_its_facts(name):
    """A new one has a file, a row here and these laws."""
    sampler = EVERY[name]
    assert (sampler.name, len(sampler.claim) > 20) == (name, True)
    sizes = {"examples": sampler.examples, "batch_size": sampler.batch_size}
    card = {**sampler.facts, **sizes, "name": name, "neighbours": sampler.neighbours.value}
    again = sampling.from_facts(json.loads(json.dumps(card)))
    assert again.event(np.full(8, 2.0)) == sampler.event(np.full(8, 2.0))
    assert (again.facts, again.random_bins) == (sampler.facts, sampler.random_bins)
    if sampler.participation is not None:
        assert again.participation(8) == sampler.participation(8)
    with pytest.raises(ValueError, match="a privacy card cannot draw"):
        again.draw(jax.random.key(0), 0)
    draw = jax.jit(sampler.draw)(jax.random.key(0), 3)
    size = int(draw.size)
    shape = (sampler.capacity, sampler.most_rows)[: draw.mask.ndim]
    assert draw.indices.shape == draw.mask.shape == shape
    assert draw.units.tolist() == [True] * size + [False] * (sampler.capacity - size)
    assert sampler.padded or size == sampler.capacity
    assert len(np.unique(sampling.on_host(draw), axis=0)) == size
