# SPDX-License-Identifier: Apache-2.0
"""Correlated noise: what runs is what is accounted, from the link to the card."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills
from small_mechanisms import mechanism_with

from dpjax import (
    accounting,
    clip_and_sum,
    clipping,
    ledger,
    noise,
    reports,
    sampling,
    strategies,
    testing,
    training,
    trees,
    verify,
)
from dpjax.accounting._event_parts import split
from dpjax.accounting._rdp_accountant import total
from dpjax.accounting._rdp_divergence import ORDERS
from dpjax.accounting.events import correlated_samples
from dpjax.mechanism import Spent, correlated
from dpjax.sampling.cycles import parts_of
from dpjax.types import Purpose

RULE = clipping.flat(2.0)
ZEROS = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
STRATEGIES = {
    "square root": strategies.square_root(steps=6),
    "two bands": strategies.toeplitz(6, [1.0, 0.5]),
    "inverse": strategies.banded_inverse_square_root(steps=6, bands=3),
    "tree": strategies.tree(steps=6),
}


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def run(link, steps, jit=True):
    """What a link releases for sums of zero, ``[steps, coordinates]``."""
    update = lambda state: link.update(clipping.trusted_sum(ZEROS, RULE), state)  # noqa: E731
    update = jax.jit(update) if jit else update
    state, rows = link.init(ZEROS), []
    for _ in range(steps):
        noisy, state = update(state)
        rows.append(flat(noisy))
    return np.stack(rows)


def mechanism(steps=6, **options):
    """A run with the first strategy, in which every example is in every third step."""
    options = {"noise": STRATEGIES["square root"], "clipping": RULE, **options}
    batches = options.pop("sampling", None) or sampling.balls_in_bins(12, 4)
    return mechanism_with(12, 4, sampling=batches, steps=steps, **options)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STRATEGIES)
@kills("noise/link.py", "return [x * scale for", "return [x for", slow=True)
def test_the_link_adds_rows_of_the_inverse(name):
    """The numbers of white noise of the same key, mixed by C^-1 and scaled by its sensitivity."""
    strategy, key = STRATEGIES[name], jax.random.key(7)
    seen = run(noise.correlated(strategy, 1.5, RULE, key=key, participation=strategies.apart(3)), 6)
    white = run(noise.gaussian(1.5, RULE, key=key), 6)
    scale = strategies.sensitivity(strategy, strategies.apart(3))
    np.testing.assert_allclose(seen, scale * strategy.inverse() @ white, rtol=1e-5, atol=1e-5)


@kills("sampling/events.py", "return strategies.cycles(", "return strategies.once() or (")
def test_one_example_moves_the_run_by_at_most_one_over_the_multiplier():
    """For every participation that the sampler allows, at every sign, in the metric of the noise.

    The released rows are Gaussian with covariance (z s)^2 (C^T C)^-1, so the distance of two
    neighbouring runs is |C u| / (z s) with u the clipped gradients of the example.
    """
    for strategy in STRATEGIES.values():
        planned = mechanism(noise=strategy, noise_multiplier=1.5)
        factor = planned.deviations_on_mean(0)[0] * planned.batch_size * strategy.inverse()
        metric = np.linalg.inv(factor)
        for first, signs in itertools.product(range(3), itertools.product((-1, 1), repeat=2)):
            u = np.zeros(6)
            u[first::3] = np.array(signs) * RULE.sensitivity
            assert np.linalg.norm(metric @ u) <= (1 + 1e-6) / 1.5


@kills(
    "mechanism/description.py",
    "return [deviation * self.strategy_sensitivity",
    "return [deviation",
    slow=True,
)
def test_dpsgd_runs_the_noise_of_its_mechanism():
    strategy, key = STRATEGIES["inverse"], jax.random.key(3)
    planned = mechanism(noise=strategy, noise_multiplier=0.5)
    # A loss without gradient: the parameters move by the noise alone.
    algorithm = training.dpsgd(
        lambda p, x: 0.0 * (jnp.sum(p["w"]) + jnp.sum(p["b"])) * x,
        optax.sgd(1.0),
        planned,
        jnp.ones(12),
    )
    state, seen = algorithm.init(ZEROS, key), []
    for _ in range(6):
        state, _ = algorithm.step(state)
        seen.append(flat(state.params))
    white = run(noise.gaussian(0.5, RULE, key=key), 6)
    scale = strategies.sensitivity(strategy, strategies.cycles(3)) / 4
    expected = -scale * np.cumsum(strategy.inverse() @ white, axis=0)
    np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-5)


def quadratic(p, x):
    return jnp.sum((p["w"] - x) ** 2) + jnp.sum(p["b"] ** 2)


def small_run(**options):
    return training.dpsgd(quadratic, optax.sgd(0.1, 0.9), mechanism(**options), jnp.arange(12.0))


@pytest.mark.parametrize("name", ["inverse"])
def test_privatize_and_the_link_release_the_same(name):
    planned, key = mechanism(noise=STRATEGIES[name]), jax.random.key(11)
    seen = run(planned.privatize(key), 6)
    scale = strategies.sensitivity(STRATEGIES[name], strategies.cycles(3))
    link = noise.correlated(
        STRATEGIES[name], 1.0, RULE, key=key, participation=strategies.cycles(3)
    )
    np.testing.assert_allclose(seen * 4, run(link, 6), rtol=1e-6, atol=1e-6)
    assert planned.strategy_sensitivity == scale


SHORT = {
    "square root": strategies.square_root(6),
    "bands": strategies.toeplitz(6, [1.0, -0.5, 0.25]),
    "inverse": strategies.banded_inverse_square_root(6, 3),
    "buffered": strategies.buffered(6, 1),
    "tree": strategies.tree(6),
    "one step": strategies.tree(1),
}


class TestEvents:
    """What a run costs, by its sampler and its bands."""

    def test_without_amplification_a_run_is_one_gaussian(self):
        known = sampling.curriculum(np.arange(12), 4, public=True)
        planned = mechanism(noise_multiplier=1.3, sampling=known)
        assert planned.event == accounting.gaussian(1.3)
        assert planned.event_of(planned.multipliers[:1]) == accounting.gaussian(1.3)
        assert planned.epsilon_of(planned.multipliers[:0], 1e-3) == 0

    @kills("mechanism/correlated.py", 'strategy.bands <= sampler.facts["cycle"]', "True")
    @kills("sampling/cycles.py", "rates=[[rate, 1]]", "rates=[[rate / 2, 1]]", slow=True)
    def test_bands_beyond_the_cycle_are_not_amplified(self):
        batches = sampling.cyclic_poisson(1000, 10, cycle=4)
        amplified = strategies.square_root(steps=20, bands=4)
        planned = mechanism(20, sampling=batches, noise=amplified)
        want = accounting.subsampled_gaussian(1.0, 0.04, 5)
        assert planned.event == correlated_samples(want)
        assert split(planned.event) == split(want)
        assert planned.strategy_sensitivity == strategies.sensitivity(amplified, strategies.once())
        wide = strategies.square_root(steps=20, bands=5)
        planned = mechanism(20, sampling=batches, noise=wide)
        assert planned.event == accounting.gaussian(1.0)
        assert planned.strategy_sensitivity == strategies.sensitivity(wide, strategies.cycles(4))

    @pytest.mark.parametrize("name", SHORT)
    def test_a_run_costs_no_less_than_all_sets_of_steps_of_an_example(self, name):
        """The divergence at order 2 of the mixture over all coins, for gradients of any signs."""
        strategy, rate, order = SHORT[name], 0.3, ORDERS == 2
        steps, whole = strategy.steps, strategy.matrix()
        for cycle in range(1, steps + 2):
            batches = sampling.cyclic_poisson(100, 100 * rate / cycle, cycle=cycle)
            event = correlated.correlated_event(strategy, batches, np.ones(steps))
            counted = total(split(event), "add-or-remove")[order]
            moves = whole / correlated.sensitivity_of(strategy, batches)
            meets = False
            for first in range(min(cycle, steps)):
                columns = moves[:, first::cycle]
                taken = np.array(list(itertools.product((0, 1), repeat=columns.shape[1])))
                chance = np.prod(np.where(taken, rate, 1 - rate), axis=1)
                for signs in itertools.product((1, -1), repeat=columns.shape[1]):
                    sums = taken * signs @ columns.T
                    mixed = np.log(chance @ np.exp(sums @ sums.T) @ chance)
                    assert mixed <= counted * (1 + 1e-9)
                meets |= np.any((columns != 0).sum(axis=1) > 1)
            assert correlated.is_amplified(strategy, batches) == (not meets)

    def test_a_prefix_of_an_amplified_run_costs_the_cycles_that_it_began(self):
        batches = sampling.cyclic_poisson(1000, 10, cycle=4)
        planned = mechanism(20, sampling=batches, noise=strategies.square_root(20, bands=4))
        for steps, cycles in ((1, 1), (4, 1), (5, 2), (20, 5)):
            want = accounting.subsampled_gaussian(1.0, 0.04, cycles)
            assert split(planned.event_of(planned.multipliers[:steps])) == split(want)

    @kills("mechanism/correlated.py", "strategy.bands == 1 or len", "True or len", slow=True)
    def test_records_of_one_user_share_rows_of_banded_noise(self):
        """Given all coins, they move the run by no more than is counted, and almost by that."""
        batches, steps, records = sampling.cyclic_poisson(1000, 100, cycle=2), 8, 3
        banded = strategies.toeplitz(steps, [1.0, 0.9])
        planned = mechanism(steps, sampling=batches, noise=banded)
        event = accounting.for_groups(planned.event, records)
        assert event == accounting.for_groups(accounting.gaussian(1.0, 4), records)
        # Two records in one part and the third in the other, or all in one.
        moves = np.abs(banded.matrix()) / planned.strategy_sensitivity
        parts = [moves[:, first::2].sum(axis=1) for first in (0, 1)]
        longest = max(np.linalg.norm(n * parts[0] + (records - n) * parts[1]) for n in range(4))
        assert 1 / event.noise_multiplier >= longest * (1 - 1e-9)
        assert 1 / event.noise_multiplier == pytest.approx(longest, rel=0.05)
        # An earlier run of one part of the plan, and what is composed from it, is marked as well.
        twice = mechanism(steps, sampling=batches, noise=banded, before=[planned.spent(np.ones(8))])
        both = accounting.for_groups(twice.event, records)
        assert both == accounting.for_groups(accounting.gaussian(1.0, 8), records)

    @kills("mechanism/correlated.py", "np.min(multipliers)", "np.max(multipliers)", slow=True)
    def test_an_earlier_run_costs_by_its_least_multiplier(self):
        runs, batches = ((2.0, 1), (1.0, 5)), sampling.balls_in_bins(12, 4)
        spent = Spent(sampling=batches, runs=runs, noise=STRATEGIES["tree"])
        assert spent.event.noise_multiplier == 1.0

    def test_fewer_steps_than_a_strategy_has_cost_as_much_as_all(self):
        """They are the first ones of its run."""
        whole, part = (mechanism(steps, noise=STRATEGIES["tree"]) for steps in (6, 4))
        assert part.epsilon(1e-3, "rdp") == whole.epsilon(1e-3, "rdp")
        card = json.loads(json.dumps(reports.card(part, 1e-3, methods=["rdp"])))
        assert all(good for good, _ in verify.findings(card))

    def test_steps_beyond_a_strategy_are_refused(self):
        """One Gaussian for the steps of three runs would cost as much as one run."""
        planned = mechanism()
        with pytest.raises(ValueError, match="18 steps; the strategy has 6"):
            planned.event_of(np.tile(planned.multipliers, 3))
        runs = [planned.spent(planned.multipliers)] * 3
        thrice = accounting.compose(*(each.event for each in runs))
        cost = accounting.epsilon(thrice, 1e-3)
        assert cost == mechanism(before=runs[1:]).epsilon(1e-3) > 1.4 * planned.epsilon(1e-3)

    @pytest.mark.thorough
    @kills("mechanism/card.py", '"projections", "noise", ', '"projections", ', slow=True)
    def test_a_ledger_knows_the_strategy(self):
        state = small_run().step(small_run().init(ZEROS, jax.random.key(2)))[0]
        other = small_run(noise=STRATEGIES["tree"])
        with pytest.raises(ledger.Refused, match="another mechanism"):
            other.step(state._replace(memory=strategies.tree(6).start(ZEROS)))


class TestSamplers:
    """Who can be in which steps."""

    @staticmethod
    def drawn(sampler, steps, key):
        """Whether each example is in each step, ``[steps, examples]``."""
        draw = jax.jit(sampler.draw)
        rows = np.zeros((steps, sampler.examples), bool)
        for step in range(steps):
            rows[step, sampling.on_host(draw(key, step))] = True
        return rows

    @kills(
        "sampling/cycles.py",
        "here = parts == step % cycle",
        "here = parts >= 0",
        slow=True,
    )
    def test_cyclic_poisson_leaves_a_cycle_between_participations(self):
        sampler = sampling.cyclic_poisson(600, 60, cycle=5)
        rows = self.drawn(sampler, 200, jax.random.key(0))
        for example in rows.T:
            taken = np.flatnonzero(example)
            assert len(set(taken % 5)) <= 1
        # In its turn an example is drawn at rate 5 * 60 / 600, whichever part it is in.
        assert rows.sum() / (600 * 200 / 5) == pytest.approx(0.5, abs=5 * (0.25 / 24_000) ** 0.5)
        lag = [np.mean(rows[5:, i] & rows[:-5, i]) for i in range(600)]
        assert np.mean(lag) * 5 == pytest.approx(0.25, abs=0.02), "draws are independent"

    def test_balls_in_bins_return_after_an_epoch(self):
        sampler = sampling.balls_in_bins(600, 60)
        rows = self.drawn(sampler, 30, jax.random.key(1))
        assert (rows.reshape(3, 10, 600).sum(axis=1) == 1).all(), "once an epoch"
        assert (rows[:10] == rows[10:20]).all(), "in the same place"
        assert sampler.event(np.full(30, 1.0)) == accounting.gaussian(1.0, 3)

    @kills("sampling/cycles.py", "(examples,), jnp.uint32) % parts", "(1,), jnp.uint32) % parts")
    def test_parts_are_independent_of_other_examples(self):
        """Every pair of parts of two examples is equally likely."""
        keys = jax.vmap(jax.random.key)(np.arange(1600))

        def parts_of_run(key):
            return parts_of(trees.step_key(key, Purpose.PARTS, 0), 8, 4)

        parts = jax.jit(jax.vmap(parts_of_run))(keys)
        parts = np.broadcast_to(parts, (1600, 8))
        counts = np.bincount(parts[:, 0] * 4 + parts[:, 1], minlength=16)
        assert ((counts - 100) ** 2 / 100).sum() < 45, "chi-square of 15 degrees: 1e-4"
        rows = self.drawn(sampling.balls_in_bins(8, 2), 4, jax.random.key(0))
        assert (rows.argmax(axis=0) == parts[0]).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sampling": sampling.poisson(12, 4)}, "sampling.cyclic_poisson"),
        ({"noise": strategies.tree(steps=5)}, "strategy has 5"),
        ({"noise_multiplier": lambda step: 1.0 + step}, "is a schedule"),
        ({"adaptive": clipping.Quantile()}, "fixed bounds"),
        ({"clipping": clipping.jl(1.0, 10)}, "exact norms"),
    ],
)
def test_a_strategy_is_refused_where_it_is_not_proved(options, match):
    with pytest.raises(ValueError, match=match):
        mechanism(**options)


def test_groups_have_noise_of_their_own_bounds():
    rule = clipping.per_group([1.0, 3.0], clipping.by_leaf(ZEROS))
    planned = mechanism(clipping=rule, noise_multiplier=(2.0, 0.5))
    scale = planned.strategy_sensitivity / 4
    np.testing.assert_allclose(planned.deviations_on_mean(0), [2.0 * scale, 1.5 * scale])
    assert planned.event.noise_multiplier == (2.0**-2 + 0.5**-2) ** -0.5


class TestDescription:
    """Statement, card and what later runs read from them."""

    def test_a_card_restores_what_was_spent(self):
        batches = sampling.cyclic_poisson(1000, 10, cycle=4)
        planned = mechanism(20, sampling=batches, noise=strategies.square_root(20, bands=4))
        (spent,) = Spent.of_run(json.loads(json.dumps(planned.facts)), 20)
        assert isinstance(spent, Spent)
        assert spent.event == planned.event
        assert spent.noise == planned.noise
        later = mechanism_with(1000, 10, before=[spent], steps=3)
        assert later.prepared == planned.event
        assert json.loads(json.dumps(later.facts)) == later.facts

    @kills(
        "mechanism/description.py",
        "        return correlated_claim(self.noise, self.sampling)",
        "        return self.sampling.claim",
        case="cyclic-wide",
    )
    @pytest.mark.parametrize(
        ("batches", "noise", "words"),
        [
            (sampling.cyclic_poisson(1000, 100, cycle=4), 4, "one amplified step a cycle"),
            (sampling.cyclic_poisson(1000, 100, cycle=4), 5, "one Gaussian for the run"),
            (sampling.balls_in_bins(1000, 100), 1, "for the run, in a batch that is unknown"),
        ],
        ids=["cyclic", "cyclic-wide", "bins"],
    )
    def test_statement_and_card_say_what_is_counted(self, batches, noise, words):
        """One Gaussian is called one, and amplification is named where it is counted."""
        strategy = strategies.square_root(20, bands=noise)
        planned = mechanism(20, sampling=batches, noise=strategy, noise_multiplier=3.0)
        assert ("one amplified step" in planned.claim) == bool(split(planned.event).sampled)
        assert words in planned.claim
        assert planned.claim in reports.statement(planned, 1e-5)
        card = json.loads(json.dumps(reports.card(planned, 1e-5, methods=["rdp"])))
        assert card["claim"] == planned.claim
        assert all(good for good, _ in verify.findings(card))


@pytest.mark.thorough
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.sample(1)
def test_a_users_chain_is_measured_over_the_run(name, monkeypatch):
    def chain(*links):
        link = noise.correlated(STRATEGIES[name], 1.3, RULE)
        return optax.chain(*links, clip_and_sum(RULE), link, optax.adam(0.1))

    testing.assert_private(chain(), ZEROS)
    with pytest.raises(testing.LawBroken, match="at step 1"):
        testing.assert_private(chain(optax.trace(0.9)), ZEROS)
    true = strategies.sensitivity
    monkeypatch.setattr(strategies, "sensitivity", lambda *more: 0.9 * true(*more))
    with pytest.raises(testing.LawBroken, match=r"moves the release by 1\.1"):
        testing.assert_private(chain(), ZEROS)
