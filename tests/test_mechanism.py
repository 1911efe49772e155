# SPDX-License-Identifier: Apache-2.0
"""The mechanism: one description, run and accounted."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutation import kills
from small_mechanisms import mechanism_with

import dpjax
from dpjax import clipping, sampling, schedules
from dpjax._files import strict
from dpjax.mechanism import Risk, Spent


def make(examples=60_000, batch=600, **facts):
    return mechanism_with(examples, batch, **{"steps": 2000, **facts})


@pytest.mark.parametrize(("name", "want"), [("piecewise-down", 1.6398), ("linear-up", 1.3994)])
def test_a_noise_curriculum_costs_what_the_paper_printed(name, want):
    mechanism = make(noise_multiplier=schedules.CURRICULA[name]())
    assert mechanism.epsilon(1e-5) == pytest.approx(want, abs=0.001)


def ran_with(mechanism, step):
    """The noise that a step really gets, relative to the sensitivity."""
    link, zeros = mechanism.privatize(), jnp.zeros(40_000)
    state = link.init(zeros)._replace(step=jnp.int32(step))
    total = clipping.trusted_sum(zeros, mechanism.clipping)
    noisy = jax.jit(lambda state: link.update(total, state)[0])(state)
    return float(np.std(noisy)) * mechanism.batch_size / mechanism.clipping.sensitivity


@kills(
    "schedules.py",
    "return np.frombuffer(self.table, np.float32)",
    "return values(self.schedule, len(self.table) // 4)",
)
@kills(
    "schedules.py",
    "return answers[jnp.where((step >= 0) & (step < self.values.size), step, -1)]",
    "return self.schedule(step)",
    slow=True,
)
@pytest.mark.promotes
def test_a_schedule_is_evaluated_once():
    """It may close over what changes; claimed, written down and run is what it said first."""
    known = {"multiplier": 4.0}
    mechanism = make(noise_multiplier=lambda step: known["multiplier"] + 0 * step, steps=10)
    stated = mechanism.epsilon(1e-5)
    known["multiplier"] = 0.5
    assert mechanism.epsilon(1e-5) == stated
    assert mechanism.scaled(2.0).multipliers.tolist() == 10 * [8.0]
    assert ran_with(mechanism, 3) == pytest.approx(4.0, rel=0.02)
    shorter = dataclasses.replace(mechanism, steps=4)
    assert shorter.multipliers.tolist() == 4 * [4.0]
    longer = dataclasses.replace(mechanism.scaled(2.0), steps=11)
    assert longer.multipliers.tolist() == 11 * [1.0], "a longer plan evaluates the schedule again"


@pytest.mark.thorough
@kills(
    "noise/multiplier.py",
    "jnp.asarray(noise_multiplier(step), jnp.float32)",
    "noise_multiplier(step)",
    case="float16",
    slow=True,
)
@pytest.mark.parametrize("narrow", [jnp.float16, jnp.bfloat16])
def test_a_narrow_schedule_rounds_no_noise_away(narrow):
    def schedule(step):
        return jnp.where(step < 5, narrow(2), narrow(1))

    rule = clipping.flat(1e-8)
    mechanism = make(noise_multiplier=schedule, clipping=rule, steps=6)
    assert ran_with(mechanism, 0) == pytest.approx(2.0, rel=0.02)
    link, zeros = dpjax.noise.gaussian(schedule, rule), jnp.zeros(40_000)
    noisy, _ = link.update(clipping.trusted_sum(zeros, rule), link.init(zeros))
    assert np.std(noisy) == pytest.approx(2e-8, rel=0.02)


def test_group_multipliers_are_joined_before_sampling():
    """k groups share one sample: the joint multiplier is amplified, not each group's."""
    noise = (1.1 * math.sqrt(8),) * 8
    options = {"clipping": clipping.grouped(1.0, 8), "steps": 14_063}
    mechanism = make(60_000, 256, noise_multiplier=noise, **options)
    assert mechanism.epsilon(1e-5) == pytest.approx(2.5967, rel=0.002)
    rule = clipping.grouped(1.0, 2)
    small = make(1000, 20, clipping=rule, noise_multiplier=(2.0, 1.5), steps=100)
    assert small.epsilon(1e-5, "pld") == pytest.approx(0.9354, rel=0.005)


def test_heterogeneous_noise_is_not_averaged():
    schedule = lambda t: jnp.where(t < 50, 2.0, 1.0)  # noqa: E731
    mechanism = make(1000, 20, noise_multiplier=schedule, steps=100)
    assert mechanism.epsilon(1e-5, "pld") == pytest.approx(1.1698, rel=0.005)
    assert mechanism.epsilon(1e-5) == pytest.approx(1.6291, rel=0.002)


@pytest.mark.thorough
def test_calibration():
    base = make(60_000, 256, steps=14_063)
    calibrated = base.calibrate(2.0, 1e-5, "rdp")
    assert calibrated.noise_multiplier == pytest.approx(1.2953, abs=0.001)
    assert calibrated.epsilon(1e-5) <= 2.0
    linear = make(noise_multiplier=schedules.CURRICULA["linear-down"]()).calibrate(2.0, 1e-5)
    assert linear.multipliers[0] / 5 == pytest.approx(0.7639, abs=0.002)
    assert linear.multipliers[-1] * 5 == pytest.approx(linear.multipliers[0], rel=1e-6)


@pytest.mark.thorough
def test_a_calibrated_mechanism_remembers_what_it_was_calibrated_for():
    base = make(1000, 20, steps=50)
    tight = base.calibrate(2.0, 1e-6)
    assert tight.target == (2.0, 1e-6, "pld")
    assert 1.99 < tight.epsilon() == tight.epsilon(1e-6, "pld") <= 2.0
    assert tight.delta(tight.epsilon()) == pytest.approx(1e-6, rel=1e-3)
    assert np.all(tight.multipliers < base.calibrate(2.0, 1e-6, "rdp").multipliers)
    assert tight == dataclasses.replace(tight, target=None), "it changes neither run nor cost"
    assert tight.scaled(2.0).target is None, "the noise is another"
    with pytest.raises(TypeError, match="delta is missing"):
        base.epsilon()


def test_noise_is_calibrated_to_a_risk_in_place_of_an_epsilon():
    base = make(1000, sampling=sampling.full(1000), steps=4)
    chosen = base.calibrate(true_positive_rate=0.05, false_positive_rate=0.01)
    assert chosen.target == chosen.risk == Risk(0.05, 0.01)
    assert chosen.noise_multiplier == pytest.approx(2 * 1.46736, rel=2e-4)
    assert chosen.epsilon(1e-5) == chosen.epsilon(1e-5, "pld"), "its method is that of the risk"
    assert base.risk is None is chosen.scaled(2.0).risk
    with pytest.raises(TypeError, match="delta is missing"):
        chosen.epsilon()
    both = {"true_positive_rate": 0.05, "false_positive_rate": 0.01}
    for wrong in ({}, {"epsilon": 1.0}, {"true_positive_rate": 0.05}, {"delta": 1e-5, **both}):
        with pytest.raises(TypeError, match="expected epsilon and delta, or true_positive_rate"):
            base.calibrate(**wrong)


def test_the_tightest_method_is_proven():
    schedule = schedules.CURRICULA["linear-down"]()
    for options, method in (
        ({}, "pld"),
        ({"noise_multiplier": schedule}, "pld"),
        ({"sampling": sampling.fixed(1000, 20)}, "rdp"),
        ({"sampling": sampling.full(1000)}, "pld"),
        ({"neighbours": "replace-one"}, "pld"),
        ({"noise_multiplier": 0.0}, "rdp"),
    ):
        mechanism = make(**options)
        assert dpjax.accounting.tightest(mechanism.event, mechanism.relation) == method, options


@kills("mechanism/link.py", "step < mechanism.steps, 1", "step <= mechanism.steps, 1", slow=True)
def test_a_step_past_the_plan_releases_nothing():
    mechanism, zeros = make(steps=2), jnp.zeros(3)
    link, total = mechanism.privatize(), clipping.trusted_sum(zeros, mechanism.clipping)
    update = jax.jit(lambda state: link.update(total, state))
    state = link.init(zeros)
    for _ in range(2):
        out, state = update(state)
        assert np.all(np.isfinite(out))
    assert np.all(np.isnan(update(state)[0]))
    with pytest.raises(ValueError, match="step 3 of 2 planned"):
        link.update(total, state)


def test_runs_without_noise_or_bound_are_reported_as_not_private():
    assert make(noise_multiplier=0.0).epsilon(1e-5) == math.inf
    unbounded = make(clipping=clipping.flat(math.inf), noise_multiplier=0.0)
    assert unbounded.epsilon(1e-5) == math.inf
    assert make(steps=0).epsilon(1e-5) == 0.0


@pytest.mark.parametrize("sampler", [sampling.fixed(100, 10), sampling.poisson(100, 10)])
def test_nothing_but_noise_costs_nothing(sampler):
    drowned = make(sampling=sampler, noise_multiplier=math.inf, steps=3)
    assert drowned.epsilon(1e-5) == 0.0
    assert drowned.spent(drowned.multipliers).runs == ((math.inf, 3),)


def test_replace_one_is_asked_for_and_doubled():
    full = make(sampling=sampling.full(100), noise_multiplier=2.0, steps=1)
    assert full.epsilon(1e-5) == pytest.approx(2.166, rel=0.002)
    replaced = dataclasses.replace(full, neighbours="replace-one")
    assert replaced.epsilon(1e-5, "pld") == pytest.approx(4.377, rel=0.005)
    assert replaced.epsilon(1e-5) == pytest.approx(4.7285, rel=0.002)
    sampled = make(neighbours="replace-one")
    assert sampled.epsilon(1e-5) == sampled.epsilon(1e-5, "pld")  # RDP has no answer
    with pytest.raises(ValueError, match="pld"):
        sampled.epsilon(1e-5, "rdp")


TEACHES = [
    ({"steps": 1.5}, "expected a whole number"),
    ({"noise_multiplier": -1.0}, "standard deviation divided by the sensitivity"),
    ({"noise_multiplier": lambda t: 1.0 - t}, "negative or NaN at step 2"),
    ({"noise_multiplier": (1.0, 2.0)}, "2 multipliers"),
    ({"clipping": clipping.flat(math.inf)}, "no finite noise"),
    ({"neighbours": "someone"}, "someone"),
    ({"unit": "client", "preparation": (5.0,)}, "one client may have many"),
]


@pytest.mark.parametrize(("changes", "message"), TEACHES)
@pytest.mark.promotes
def test_errors_teach(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(**changes)


@pytest.mark.parametrize("changes", [{"sampling": 0.1}, {"clipping": 1.0}])
def test_what_is_no_sampler_or_rule_is_refused(changes):
    with pytest.raises(TypeError, match=r"expected a .* Such as"):
        make(**changes)


@pytest.mark.parametrize("given", [jnp.float32(2.0), np.array(2.0), np.float64(2.0)])
def test_a_multiplier_is_a_number_wherever_it_comes_from(given):
    multiplier = make(noise_multiplier=given).noise_multiplier
    assert (type(multiplier), multiplier) == (float, 2.0)
    groups = make(noise_multiplier=jnp.array([2.0, 4.0]), clipping=clipping.grouped(1.0, 2))
    assert groups.noise_multiplier == (2.0, 4.0)


def test_zero_noise_cannot_be_calibrated():
    with pytest.raises(ValueError, match="no factor makes that private"):
        make(noise_multiplier=0.0).calibrate(1.0, 1e-5)


@kills("mechanism/description.py", "accounting.compose(self.prepared, steps)", "steps")
def test_preparation_is_paid_for_before_the_first_step():
    """Two Gaussian queries on all the data, as their joint Gaussian, and not amplified."""
    bare, prepared = make(), make(preparation=[8, 8.0])
    assert prepared.preparation == (8.0, 8.0)
    alone = make(steps=0, preparation=(8.0 / math.sqrt(2),))
    assert make(steps=0, preparation=(8.0, 8.0)).epsilon(1e-5) == pytest.approx(alone.epsilon(1e-5))
    assert prepared.epsilon_of(np.zeros(0), 1e-5) == pytest.approx(0.6948, abs=1e-3)
    assert prepared.epsilon(1e-5) > bare.epsilon(1e-5)
    assert bare.event == bare.sampling.event(bare.multipliers)
    assert make(preparation=(0.0,)).epsilon(1e-5) == math.inf
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="noise multiplier of a query"):
            make(preparation=(wrong,))


def test_calibration_leaves_room_for_the_preparation():
    prepared = make(60_000, 256, preparation=(8.0, 8.0))
    calibrated = prepared.calibrate(2.0, 1e-5, "rdp")
    assert calibrated.preparation == (8.0, 8.0)
    assert 1.99 < calibrated.epsilon(1e-5) <= 2.0
    with pytest.raises(ValueError, match="not reachable"):
        prepared.calibrate(0.5, 1e-5, "rdp")  # the preparation alone costs more
    fits = dpjax.ledger.affordable(calibrated, dpjax.ledger.Budget(epsilon=0.5, delta=1e-5))
    assert fits == 0


def spent(steps=40, multiplier=1.5, **options):
    return Spent(sampling=sampling.poisson(100, 20), runs=((multiplier, steps),), **options)


@pytest.mark.parametrize("runs", [((100, 1.1),), ((1.1, -3),), ((math.nan, 3),)])
def test_runs_are_pairs_of_a_multiplier_and_steps(runs):
    with pytest.raises(ValueError, match=r"pairs \(noise multiplier, steps\)"):
        Spent(sampling=sampling.poisson(100, 20), runs=runs)


@pytest.mark.parametrize("runs", [[[1.5, 40.0], [2.0, 0]], np.array([[1.5, 40]])])
def test_what_was_spent_is_the_same_however_it_is_written(runs):
    plain = spent(preparation=(8.0,))
    same = dataclasses.replace(plain, runs=runs, preparation=np.array([8.0]))
    assert same == plain
    one, other = (make(before=[each]) for each in (same, plain))
    assert one.accounted == other.accounted
    assert hash(one.before) == hash(other.before), "a budget looks mechanisms up"


@kills("mechanism/description.py", "*(spent.event for spent in self.before), *", "*", slow=True)
@kills("mechanism/spent.py", "compose(*queries, steps)", "compose(*queries)", slow=True)
def test_what_was_spent_before_is_paid_for():
    def mechanism(steps, **facts):
        return make(100, 20, noise_multiplier=1.5, steps=steps, **facts)

    for method in ("rdp", "pld"):
        whole = mechanism(100).epsilon(1e-5, method)
        parts = mechanism(60, before=[spent()]).epsilon(1e-5, method)
        assert parts == pytest.approx(whole, rel=1e-3)
    queries = mechanism(60, before=[spent(preparation=(9.0,))]).epsilon(1e-5)
    assert queries == mechanism(100, preparation=(9.0,)).epsilon(1e-5) > parts


def test_what_was_spent_is_cut_at_the_steps_that_ran():
    curriculum = mechanism_with(
        100, 20, noise_multiplier=lambda step: jnp.where(step < 5, 2.0, 1.0), steps=12
    )
    facts = json.loads(json.dumps(curriculum.facts))
    cuts = {12: ((2.0, 5), (1.0, 7)), 8: ((2.0, 5), (1.0, 3)), 3: ((2.0, 3),), 0: ()}
    for steps, runs in cuts.items():
        (found,) = Spent.of_run(facts, steps)
        assert found.runs == runs
    assert found.event == dpjax.accounting.compose()


def test_a_relation_that_does_not_hold_for_what_was_spent_is_refused():
    before = Spent(sampling=sampling.fixed(100, 20), runs=((1.0, 5),))
    with pytest.raises(ValueError, match="fixed batches are proved for 'replace-one'"):
        make(100, 20, before=[before])
    assert make(100, 20, before=[before], neighbours="replace-one").before == (before,)


ORDER, BINS = np.arange(100)[::-1], np.arange(100) % 2
RATES = [[0.1, 0.2], [0.4, 0.3]]
UNDRAWN = {
    "private": sampling.curriculum(ORDER, 20),
    "public": sampling.curriculum(ORDER, 20, public=True),
    "scored": sampling.scored(BINS, RATES, steps_per_row=4, batch_size=20),
}


@pytest.mark.parametrize("name", UNDRAWN)
def test_an_order_or_bins_are_counted_from_a_description_and_not_drawn(name):
    planned = make(sampling=UNDRAWN[name], steps=12)
    (found,) = Spent.of_run(json.loads(json.dumps(planned.facts)), 7)
    assert found.event == planned.spent(planned.multipliers[:7]).event
    assert found.sampling.facts == UNDRAWN[name].facts
    later = make(before=[found], neighbours="zero-out")
    assert later.prepared == found.event
    assert later.facts["before"][0]["sampling"] == planned.facts["sampling"]
    with pytest.raises(ValueError, match="a privacy card cannot draw"):
        found.sampling.draw(jax.random.key(0), 0)


ALIKE = {  # what costs the same, and does not do the same
    "gamma": [{"clipping": clipping.automatic(1.0, g)} for g in (0.01, 0.1)],
    "split between groups": [
        {"clipping": clipping.grouped(1.0, 2), "noise_multiplier": z}
        for z in ((1.0, 2.0), (2.0, 1.0))
    ],
    "bins": [
        {"sampling": sampling.scored(b, [[0.1, 0.1]], steps_per_row=1, batch_size=2)}
        for b in (np.arange(10) % 2, np.arange(10) // 5)
    ],
    "order": [{"sampling": sampling.curriculum(np.arange(10)[::d], 2)} for d in (1, -1)],
    "whose order": [
        {"sampling": sampling.curriculum(np.arange(10), 2, public=p)} for p in (True, False)
    ],
}


@kills("mechanism/description.py", "self.sampling.fingerprint", "None", slow=True)
@pytest.mark.parametrize("name", ALIKE)
def test_mechanisms_that_run_differently_have_different_identities(name):
    """So that a run does not continue in another's folder."""
    small = {"sampling": sampling.poisson(10, 2), "steps": 3}
    one, other = (make(**{**small, **settings}).identity for settings in ALIKE[name])
    assert one != other
    assert json.loads(json.dumps([one, other])) == [one, other]


def test_a_delta_that_protects_no_record_is_noticed(caplog):
    make().epsilon(1e-5)
    assert not caplog.text
    for act in (make().epsilon, lambda delta: make().calibrate(1.0, delta, "rdp")):
        caplog.clear()
        act(1e-3)
        assert "publishing one whole record" in caplog.text


def test_infinity_is_written_as_a_word():
    assert strict({"epsilon": (1.0, math.inf)}) == {"epsilon": [1.0, "inf"]}
