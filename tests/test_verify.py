# SPDX-License-Identifier: Apache-2.0
"""`dpjax.verify` reads the whole card: what it confirms, and what it does not let pass."""

import base64
import copy
import json
import math
import re
import subprocess
import sys
from collections import Counter

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills
from small_mechanisms import mechanism_with

import dpjax
from dpjax import clipping, reports, sampling, strategies, verify
from dpjax.accounting.loss_distributions import rounded
from dpjax.accounting.rounding import upwards
from dpjax.mechanism import Spent
from dpjax.mechanism.correlated import is_amplified
from dpjax.verify import cards, events, gaussian
from dpjax.verify.fields import BOUNDS

DELTA = 1e-5
SCORED = sampling.scored(np.arange(1000) % 2, [[0.1, 0.2]], steps_per_row=40, batch_size=100)


def mechanism(**options):
    return mechanism_with(1000, 20, **{"noise_multiplier": 1.2, "steps": 40, **options})


@pytest.fixture(scope="module")
def honest():
    """The card of a mechanism with an earlier run; without PLD, which takes a second each time."""
    before = [mechanism(steps=1).spent(np.full(1, 1.2))]
    card = reports.card(mechanism(before=before), DELTA, methods=["rdp", "gdp"])
    return json.loads(json.dumps(card))


def verdicts(card):
    """Whether a card supports a release, and the verdicts in words."""
    try:
        found = list(verify.findings(card))
    except verify.Unreadable as reason:
        return False, [str(reason)]
    return all(sound for sound, _ in found), [line for _, line in found]


def changed(card, path, value):
    """A copy of the card with another value at a path; None removes the field."""
    inner = card = copy.deepcopy(card)
    *above, last = path
    for name in above:
        inner = inner[name]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return card


@kills("verify/events.py", "min(multiplier, 1e7)", "multiplier", slow=True)
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": sampling.full(500), "noise_multiplier": 8.0},
        {"sampling": sampling.shuffled(1000, 100), "noise_multiplier": 4.0},
        {"sampling": sampling.fixed(1000, 20), "noise_multiplier": 3.0},
        {"noise_multiplier": dpjax.schedules.table([2.0, 1.5, 1.2, 1.0], steps_per_epoch=10)},
        {"noise_multiplier": optax.linear_schedule(8.0, 4.0, 100), "steps": 100},
        {"preparation": [8.0, 8.0]},
        {"adaptive": clipping.Quantile()},
        {"unit": "client"},
        {"neighbours": "replace-one"},
        {"sampling": sampling.poisson(90_000, 20)},
        {"sampling": SCORED},
        {"sampling": sampling.shuffled(90_000, 100), "noise_multiplier": 4.0},
        {"sampling": sampling.full(500), "noise_multiplier": 0.001},
        {
            "sampling": sampling.full(500),
            "neighbours": "replace-one",
            "before": [Spent(sampling=sampling.fixed(1000, 10), runs=((4.0, 5),))],
        },
        {"sampling": sampling.fixed(1000, 20), "noise_multiplier": 1e9},
        {"clipping": clipping.per_group([0.0, 1.0], groups=2)},
        {"before": [mechanism().spent(mechanism().multipliers)]},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_every_claim_of_an_honest_card_holds(options):
    card = json.loads(json.dumps(reports.card(mechanism(**options), DELTA)))
    good, lines = verdicts(card)
    assert good, lines
    claimed = set(card["epsilon"]) & set(BOUNDS)
    assert claimed
    said = re.compile(r" by (rdp|pld), the best accountant here: holds$")
    assert sum(bool(said.search(line)) for line in lines) == len(claimed)


@kills("verify/cards.py", 'if "pld" not in exact and', "if False and", slow=True)
@pytest.mark.parametrize(("batch", "steps"), [(500, 400), (200, 3000)])
def test_a_claim_between_whole_orders_holds_at_large_rates(batch, steps):
    """Fractional orders of dp-accounting's RDP are loose there."""
    made = mechanism(sampling=sampling.poisson(1000, batch), noise_multiplier=3.0, steps=steps)
    good, lines = verdicts(json.loads(json.dumps(reports.card(made, DELTA, methods=["rdp"]))))
    assert good, lines


@pytest.mark.slow
@kills("verify/cards.py", "leaves(event_of(card, halve=False))", '"x"', slow=True)
def test_levels_of_earlier_runs_are_rounded_as_in_dpjax():
    """It rounds the steps of all runs together, and `verify` the steps of each run."""
    before = [
        Spent(
            sampling=sampling.poisson(1000, batch),
            runs=tuple((float(z), 1) for z in np.linspace(4.0, 0.8, 400)),
        )
        for batch in (10, 15, 20, 30)
    ]
    card = reports.card(mechanism(before=before), DELTA, methods=["pld"])
    good, lines = verdicts(json.loads(json.dumps(card)))
    assert good, lines


@kills("verify/epsilon.py", "if 2 * one > 1e-4 * POINTS:", "if False:", slow=True)
def test_noise_whose_losses_fill_the_memory_is_told():
    card = json.loads(json.dumps(reports.card(mechanism(noise_multiplier=0.001), DELTA)))
    with pytest.raises(verify.Unreadable, match=r"noise multiplier 0\.001 hides nearly nothing"):
        verify.epsilon.recompute(card, "pld")


@kills("verify/events.py", "found[float(q.max()), ", "found[float(q.min()), ", slow=True)
@kills("verify/events.py", "float(z.min())] +=", "float(z.max())] +=", slow=True)
def test_rounding_to_levels_makes_no_step_cheaper():
    """By dpjax.accounting too, whose rounding is another program."""
    pairs = Counter({(q, z): 3 for q in np.linspace(0.1, 0.2, 12) for z in np.linspace(1, 2, 30)})
    pairs[1.0, 7.77] = pairs[0.3, math.inf] = 2
    found = events.at_levels(pairs)
    assert len(found) <= 64 + 2
    assert found.total() == pairs.total()
    assert found[1.0, 7.77] == found[0.3, math.inf] == 2
    whole = Counter(dict.fromkeys([(1.0, 7.77), (0.3, math.inf)], 2))
    assert found == Counter(rounded(pairs - whole)) + whole
    cost = [sum(n * (q / z) ** 2 for (q, z), n in each.items()) for each in (pairs, found)]
    assert cost[0] < cost[1] < 1.3 * cost[0]
    assert events.at_levels(few := Counter({(0.1, 1.0): 5})) == few


@kills(
    "verify/epsilon.py",
    "PLDAccountant(relation, grid(event, exchange))",
    "PLDAccountant(relation)",
    slow=True,
)
@pytest.mark.parametrize("neighbours", ["add-or-remove", "replace-one"])
def test_the_grid_of_losses_is_as_fine_as_in_dpjax(neighbours):
    batches = sampling.poisson(10**6, 250)
    plan = {"sampling": batches, "noise_multiplier": 50.0, "neighbours": neighbours}
    card = json.loads(
        json.dumps(reports.card(mechanism(**plan, steps=30_000), 1e-9, methods=["pld"]))
    )
    assert verdicts(card)[0], verdicts(card)


CHANGES = [
    (["epsilon", "rdp", "value"], 0.5, "DOES NOT HOLD"),
    (["epsilon", "rdp", "value"], "inf", "promises nothing"),
    (["epsilon", "rdp", "value"], "nan", "DOES NOT HOLD"),
    (["epsilon", "gdp", "proven"], True, "marks epsilon by gdp as proven"),
    (["epsilon", "rdp", "proven"], False, "marks epsilon by rdp as an estimate"),
    (["epsilon", "best"], {"value": 1.0, "proven": True}, "a method that is not known"),
    (["epsilon"], {}, "claims epsilon by nothing"),
    (["delta"], 1e-3, "IS OF OTHER FACTS"),
    (["delta"], 0.5, "promises nothing: delta=0.5"),
    (["delta"], 0, "at delta=0"),
    (["steps"], 41, "counts 41 steps at delta=1e-05, and its mechanism plans 40"),
    (["steps"], 20, "IS OF OTHER FACTS"),
    (["steps"], "many", "counts 'many' steps"),
    (["steps"], True, "counts True steps"),
    (["delta"], "1e-5", "at delta='1e-5'"),
    (["seed_published"], 7, "not for release: the seed of the run is known or small (7)"),
    (["seed_published"], True, "not for release: the seed"),
    (
        ["mechanism", "before", 0, "seeded"],
        True,
        "not for release: the seed of the run or of an ea",
    ),
    (["mechanism", "before", 0, "seeded"], 0, "not for release: the seed of the run or of an ea"),
    (["mechanism", "before", 0, "seeded"], None, "seeded is missing"),
    (["mechanism", "before", 0, "multiplier_and_steps"], [[1.2, 0]], "not whole, or below 1"),
    (["mechanism", "before", 0, "multiplier_and_steps"], [[1.2, True]], "not whole, or below 1"),
    (["mechanism", "before", 0, "preparation"], ["8.0"], "is negative, or no number"),
    (["not_private"], "The rule's bound is infinite", "not for release: the card says"),
    (["remark"], "sound", "remark is unknown"),
    (["claim"], None, "claim is missing"),
    (["claim"], "pure 0-DP", "'pure 0-DP', which is not what is proved for poisson batches"),
    (["mechanism"], 3, "the mechanism of the card does not have the fields"),
    (["mechanism", "format"], 1, "is of format 1"),
    (["mechanism", "format"], "x", "is of format 'x'"),
    (["mechanism", "note"], 1, "note is unknown"),
    (["mechanism", "before"], [{}], "an earlier run on the card does not have"),
    (["mechanism", "sampling", "name"], "shuffled", "proved for zero-out and replace-one"),
    (["mechanism", "sampling", "name"], "own", "a sampler that is not known here"),
    (["mechanism", "sampling", "batch_size"], 2000, "batch size is not between"),
    (["mechanism", "before", 0, "sampling", "batch_size"], True, "batch size is not between"),
    (["mechanism", "multiplier_and_steps"], [[1.8, 40]], "IS OF OTHER FACTS"),
    (["mechanism", "multiplier_and_steps"], [[-1.2, 40]], "multiplier is negative"),
    (["mechanism", "multipliers_by_group"], [1.0], "are worth 1 together"),
    (["mechanism", "clipping", "bounds"], ["inf"], "DOES NOT HOLD"),
    (["mechanism", "clipping", "bounds"], [], "not one of 0 or more for each of its 1 groups"),
    (["mechanism", "clipping", "bounds"], [1, 1], "not one of 0 or more for each of its 1 groups"),
    (["mechanism", "clipping"], {"groups": [], "bounds": []}, "0 groups, which are one or more"),
    (["mechanism", "clipping", "bounds"], ["nan"], "not one of 0 or more"),
    (["mechanism", "clipping", "bounds"], [-1.0], "not one of 0 or more"),
    (["mechanism", "clipping", "bounds"], [True], "not one of 0 or more"),
    (["mechanism", "unit"], "client", "adds what one example costs to what one client costs"),
    (["mechanism", "unit"], "household", "expected 'example' or 'client'"),
    (["mechanism", "sampling", "examples"], 10**400, "cannot be accounted (OverflowError"),
    (["mechanism", "projections"], 30, "nothing is recomputed"),
]


@kills("verify/cards.py", "elif claimed > largest * loose:", "elif False:")
@kills("verify/cards.py", "        if math.isinf(claimed):", "        if False:", slow=True)
@kills(
    "verify/cards.py", 'if card["seed_published"] is not None or earlier:', "if earlier:", slow=True
)
@kills("verify/cards.py", "is not None or earlier:", "is not None:", slow=True)
@kills("verify/cards.py", '    if card["not_private"] is not None:', "    if False:", slow=True)
@kills("verify/fields.py", 'if claim["proven"] is not (name in BOUNDS):', "if False:", slow=True)
@kills("verify/fields.py", "    if given != expected:", "    if False:", slow=True)
@kills(
    "verify/fields.py",
    'mechanism["neighbours"] not in PROVED[sampling["name"]]:',
    "False:",
    slow=True,
)
@kills("verify/fields.py", "number(bound) >= 0 for bound", "True for bound", slow=True)
@kills("verify/fields.py", "type(value) is int", "isinstance(value, int)", slow=True)
@kills("verify/fields.py", "whole(steps) >= 1 for _,", "whole(steps) >= 0 for _,", slow=True)
@kills("verify/cards.py", '["seeded"] is not False', '["seeded"]', slow=True)
@kills("verify/fields.py", 'len(bounds) != len(rule["groups"]) or', "", slow=True)
@kills("verify/fields.py", "sound = bounds and all(", "sound = all(", slow=True)
@kills(
    "verify/cards.py", "    except Exception as error:", "    except KeyError as error:", slow=True
)
@kills("verify/fields.py", "if len(groups) != len(bounds) or not same:", "if False:", slow=True)
@pytest.mark.parametrize(
    ("path", "value", "expected"),
    CHANGES,
    ids=[f"{'.'.join(map(str, c[0]))}={str(c[1])[:40]}" for c in CHANGES],
)
def test_no_changed_card_passes(path, value, expected, honest):
    card = changed(honest, path, value)
    good, lines = verdicts(card)
    assert any(expected in line for line in lines), lines
    assert not good


OWN_FACTS = {
    "public": sampling.curriculum(np.arange(1000), 100, public=True),
    "private": sampling.curriculum(np.arange(1000), 100),
    "scored": SCORED,
    "cyclic": sampling.cyclic_poisson(1000, 20, cycle=5),
}
SHUFFLED = sampling.shuffled(1000, 100)
ROOT = strategies.square_root(steps=40)
INVERSE = strategies.banded_inverse_square_root(steps=40, bands=4)
BANDED = strategies.toeplitz(40, [1.0, 0.5])
NO_ROWS = base64.b64encode(np.zeros(820, "<f4")).decode()
CONTRADICTIONS = [
    ({"adaptive": clipping.Quantile()}, ["adaptive", "count_multiplier"], 0.0, "cost less than"),
    ({"adaptive": clipping.Quantile()}, ["adaptive", "count_multiplier"], 1.2, "cost less than"),
    ({"adaptive": clipping.Quantile()}, ["adaptive", "note"], 1, "note is unknown"),
    ({"adaptive": clipping.Quantile()}, ["adaptive", "target"], None, "target is missing"),
    ({"adaptive": clipping.Quantile()}, ["adaptive", "target"], 3, "a target from 0 to 1"),
    ({"adaptive": clipping.Quantile()}, ["adaptive", "rate"], -0.2, "a finite rate above 0"),
    ({"adaptive": clipping.Quantile()}, ["adaptive", "geometric"], [], "or false for geometric"),
    ({"sampling": OWN_FACTS["scored"]}, ["sampling", "rates"], [[-0.2, 40]], "rates of scores"),
    ({"sampling": OWN_FACTS["scored"]}, ["sampling", "rates"], [[0.2, -1]], "rates of scores"),
    ({"sampling": OWN_FACTS["scored"]}, ["sampling", "rates"], [], "rates of scores"),
    ({"sampling": OWN_FACTS["cyclic"]}, ["sampling", "cycle"], 51, "from 1 to 50"),
    ({"sampling": OWN_FACTS["cyclic"]}, ["sampling", "cycle"], -3, "from 1 to 50"),
    ({"sampling": OWN_FACTS["cyclic"]}, ["sampling", "cycle"], 2.5, "from 1 to 50"),
    (
        {"sampling": sampling.full(1000), "noise": INVERSE},
        ["noise", "values"],
        [],
        "without an inv",
    ),
    ({"sampling": sampling.full(1000), "noise": BANDED}, ["noise", "values"], [0.0], "inverse"),
    ({"sampling": sampling.full(1000), "noise": INVERSE}, ["noise", "sensitivity"], "9", "of nan"),
    ({"sampling": SHUFFLED, "noise": ROOT}, ["sampling", "cycle"], 40, "cycle is unknown"),
    ({"sampling": OWN_FACTS["cyclic"]}, ["sampling", "cycle"], None, "cycle is missing"),
    ({"sampling": SHUFFLED, "noise": INVERSE}, ["noise", "normalized"], True, "is unknown"),
    ({"sampling": SHUFFLED, "noise": ROOT}, ["noise", "normalized"], "false", "true or false"),
    ({"sampling": SHUFFLED, "noise": ROOT}, ["noise", "kind"], "own", "of kind 'own', unknown"),
    ({"sampling": OWN_FACTS["private"]}, ["sampling", "public"], True, "is not what is proved"),
    ({"sampling": OWN_FACTS["public"]}, ["sampling", "public"], False, "is not what is proved"),
    ({"sampling": OWN_FACTS["public"]}, ["sampling", "public"], "false", "true or false"),
    ({"sampling": sampling.fixed(1000, 2)}, ["sampling", "batch_size"], 1.999, "no whole number"),
    ({"sampling": SHUFFLED}, ["sampling", "batch_size"], 99.5, "no whole number"),
    ({"sampling": OWN_FACTS["public"]}, ["sampling", "batch_size"], 50.5, "no whole number"),
    ({}, ["multiplier_and_steps"], [[1.2, 60], [1.2, -20]], "number of steps is not whole, or bel"),
    ({}, ["multiplier_and_steps"], [[1.2, 40.5]], "number of steps is not whole"),
]


@kills("verify/correlated.py", "require_inverse(values[:1])", "pass", slow=True)
@kills("verify/correlated.py", "require_inverse(np.diag(matrix))", "pass", slow=True)
@kills("verify/fields.py", "    require_drawn(sampling)\n", "", case="cycle=51")
@kills(
    "verify/fields.py",
    'require_fields(adaptive, ADAPTIVE, "the adapted bound on the card")',
    "pass",
    case="note=1",
    slow=True,
)
@kills(
    "verify/fields.py",
    'require_fields(sampling, SAMPLING[sampling["name"]], "the sampling on the card")',
    "pass",
    case="cycle=40",
    slow=True,
)
@kills(
    "verify/fields.py",
    'require_fields(noise, NOISE[noise["kind"]], "the correlated noise on the card")',
    "pass",
    case="normalized=True",
    slow=True,
)
@kills(
    "verify/fields.py", 'require_flag("normalized", noise)', "", case="normalized=false", slow=True
)
@kills("verify/fields.py", '[known[sampling["public"]]]', "known", case="public=True", slow=True)
@kills("verify/fields.py", 'require_flag("public", sampling)', "", case="public=false", slow=True)
@kills("verify/fields.py", '("fixed", "shuffled", "curriculum") else', "() else", slow=True)
@kills("verify/fields.py", "moved = 0 <= target <= 1 and", "moved =", case="target=3", slow=True)
@kills(
    "verify/fields.py",
    "not (both < count or both == count == 0):",
    "False:",
    case="count_multiplier=0.0",
)
@kills(
    "verify/fields.py",
    "whole(steps) >= 1 for rate,",
    "True for rate,",
    case="rates=[[0.2, -1]]",
    slow=True,
)
@pytest.mark.parametrize(
    ("options", "path", "value", "expected"),
    CONTRADICTIONS,
    ids=[f"{c[1][-1]}={c[2]}" for c in CONTRADICTIONS],
)
def test_facts_that_no_mechanism_has_are_refused(options, path, value, expected):
    made = reports.card(mechanism(**options), DELTA, methods=["rdp"])
    card = changed(json.loads(json.dumps(made)), ["mechanism", *path], value)
    with pytest.raises(verify.Unreadable, match=expected):
        list(verify.findings(card))


@kills("verify/cards.py", "rounding=ROUND_CEILING", 'rounding="ROUND_HALF_EVEN"', slow=True)
def test_no_verdict_prints_less_than_is_claimed(honest):
    for value in (0.30703772616587044, 2.1, 9.99961, 1e-5, 0.0, 1234.5, 5e-324, np.inf):
        assert cards.upwards(value) == upwards(value)
    claimed = honest["epsilon"]["rdp"]["value"]
    rdp, gdp = verdicts(changed(honest, ["epsilon", "gdp", "value"], 1.5e160))[1]
    shown = [float(rdp.partition(word)[2].split()[0]) for word in ("claims epsilon", "recomputed")]
    assert min(shown) >= claimed
    assert f"epsilon {upwards(claimed)} for one example at delta=1e-05; recomputed" in rdp
    assert gdp.endswith("estimates epsilon 1.5e+160: not checked, and no bound")


FIXED = {"sampling": sampling.fixed(1000, 20)}
BARE = mechanism(**FIXED, noise_multiplier=0.0)
WITHOUT_NOISE = {
    "poisson": ({"noise_multiplier": 0.0}, "The noise multiplier is 0 at some step."),
    "fixed": ({**FIXED, "noise_multiplier": 0.0}, "The noise multiplier is 0 at some step."),
    "schedule": ({**FIXED, "noise_multiplier": lambda step: step * 1.0}, "multiplier is 0 at some"),
    "query": ({**FIXED, "preparation": [0.0]}, "A query before the first step had no noise."),
    "before": ({**FIXED, "before": [BARE.spent(BARE.multipliers)]}, "An earlier run"),
    "order": ({"sampling": sampling.curriculum(np.arange(1000), 100)}, "the order comes from the"),
    "tiny": ({**FIXED, "noise_multiplier": 1e-160}, ""),
}


@kills(
    "verify/events.py",
    "    if min(noise, default=math.inf) <= BARE:",
    "    if False:",
    case="fixed",
)
@kills(
    "verify/events.py",
    "in (*each, *map(float,",
    "in (*each[:0], *map(float,",
    case="schedule",
    slow=True,
)
@kills("verify/events.py", '*map(float, spent["preparation"]))]', ")]", case="query", slow=True)
@pytest.mark.parametrize("name", WITHOUT_NOISE)
def test_a_run_without_noise_promises_nothing(name):
    options, why = WITHOUT_NOISE[name]
    card = json.loads(json.dumps(reports.card(mechanism(**options), DELTA)))
    good, lines = verdicts(card)
    said = "\n".join(lines)
    assert not good
    assert "holds" not in said
    assert said.count("promises nothing") == len(set(card["epsilon"]) & set(BOUNDS))
    assert not why or (f"not for release: the card says '{why}" in said or why in said)
    smaller = changed(card, ["epsilon", "rdp", "value"], 1.0)
    assert "DOES NOT HOLD" in "\n".join(verdicts(smaller)[1])


# By 80 digits: bisection of Phi(mu / 2 - e / mu) - exp(e) Phi(-mu / 2 - e / mu).
EXACT = [
    (0.01 * 2**0.5, 1e-30, 0.1538552277),
    (1.0, 1e-5, 4.3771780957),
    (20**0.5 / 5, 1e-15, 7.2450003),
]


@kills("verify/gaussian.py", "erfcx((x + signal) / 2**0.5)", "erfcx(x + signal)", slow=True)
@kills("verify/gaussian.py", "        return multiplier**-2\n", "        return 1 / multiplier\n")
@kills("verify/epsilon.py", "    return exchange * math.sqrt(", "    return math.sqrt(", slow=True)
@kills("verify/gaussian.py", "return count * precision(part)", "return precision(part)", slow=True)
@pytest.mark.parametrize(("moved", "delta", "expected"), EXACT)
def test_gaussians_without_sampling_have_a_closed_form(moved, delta, expected):
    """Claims at any delta are compared with it, from both sides."""
    assert gaussian.epsilon(moved, delta) == pytest.approx(expected, rel=1e-7)
    z, options = 20**0.5 / moved, {"sampling": sampling.full(1000), "steps": 20}
    for neighbours, noise in (("zero-out", z), ("replace-one", 2 * z)):
        made = mechanism(noise_multiplier=noise, neighbours=neighbours, **options)
        card = json.loads(json.dumps(reports.card(made, delta)))
        good, lines = verdicts(card)
        assert good, lines
        assert card["epsilon"]["pld"]["value"] == pytest.approx(expected, rel=1e-7)
        less = changed(card, ["epsilon", "pld", "value"], 0.99 * expected)
        assert "DOES NOT HOLD" in verdicts(less)[1][1]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {"noise_multiplier": 5.0, "steps": 10},
        {"noise_multiplier": 50.0, "steps": 2000},
        {"sampling": sampling.fixed(1000, 10), "noise_multiplier": 50.0, "steps": 2000},
    ],
    ids=["short", "long", "fixed"],
)
@pytest.mark.parametrize("delta", [1e-12, 1e-15])
def test_orders_are_fine_enough_for_a_small_delta(options, delta):
    made = reports.card(mechanism(**options), delta, methods=["rdp"])
    card = json.loads(json.dumps(made))
    good, lines = verdicts(card)
    assert good, lines
    value = 0.1 * card["epsilon"]["rdp"]["value"]  # below what distributions prove, too
    (said,) = verdicts(changed(card, ["epsilon", "rdp", "value"], value))[1]
    small = said.endswith("cannot be confirmed at so small a delta")
    assert small if delta < 1e-12 else said.endswith("DOES NOT HOLD")


@kills(
    "verify/epsilon.py",
    'spare = card["delta"] - error',
    'spare = card["delta"]',
    case="50000",
    slow=True,
)
@kills(
    "verify/epsilon.py", "epsilon = min(epsilon, whole)", "pass", case="99999.9999999", slow=True
)
@kills(
    "verify/epsilon.py",
    'if card["delta"] < ROUGH * error and exchange == 1:',
    "if False:",
    case="50000",
    slow=True,
)
@pytest.mark.slow
@pytest.mark.parametrize("size", [50_000, 99_999.9999999])
def test_a_distribution_confirms_no_more_than_floats_resolve(size):
    """Its Fourier transforms once claimed 1.111 where 1.123 is a proved lower bound."""
    plan = {"sampling": sampling.poisson(100_000, size), "noise_multiplier": 667.4572751181494}
    made = mechanism(**plan, steps=43_224)
    for delta in (1e-14, 1e-10):
        card = json.loads(json.dumps(reports.card(made, delta, methods=["pld"])))
        assert verdicts(card)[0], verdicts(card)
        less = 0.98 * card["epsilon"]["pld"]["value"]
        (said,) = verdicts(changed(card, ["epsilon", "pld", "value"], less))[1]
        assert said.endswith("cannot be confirmed at so small a delta")


def test_multipliers_of_groups_are_what_the_steps_are_counted_with():
    partition = clipping.by_leaf({"w": jnp.zeros(2), "b": jnp.zeros(1)})
    rule = clipping.grouped(1.0, partition)
    card = reports.card(mechanism(clipping=rule, noise_multiplier=(2.0, 3.0)), DELTA)
    assert verdicts(json.loads(json.dumps(card)))[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not readable as JSON"),
        ("[" * 200_000, "not readable as JSON"),
        ("[1, 2]", "holds a list; expected a JSON object"),
        ("{}", "mechanism is missing"),
        (None, "there is no file"),
    ],
    ids=["cut", "deep", "list", "empty", "none"],
)
def test_a_file_that_is_no_card_is_answered_in_one_sentence(text, expected, tmp_path, capsys):
    path = tmp_path / "privacy.json"
    if text is not None:
        path.write_text(text)
    for given in (path, tmp_path):
        assert verify.main([str(given)]) == 1
        out, err = capsys.readouterr()
        assert expected in err
        assert not out


def test_a_path_that_is_not_there_is_named(tmp_path, capsys):
    assert verify.main([str(tmp_path / "nothing")]) == 1
    assert f"there is no file or folder {tmp_path / 'nothing'}" in capsys.readouterr().err


@kills("verify/cards.py", 'run.get("mechanism") != card.get("mechanism")', "False", slow=True)
@kills("verify/cards.py", "seeded and card", "False and card", slow=True)
@kills("verify/cards.py", "or any(named)", "", slow=True)
@kills("verify/cards.py", 'card.get("steps", 0) < steps', "False", slow=True)
def test_the_card_of_another_run_is_not_accepted(tmp_path, capsys, honest):
    (tmp_path / "privacy.json").write_text(json.dumps(honest))
    alone = "no run.json lies beside the card"
    assert verify.main([str(tmp_path)]) == 0
    assert alone in capsys.readouterr().out
    (tmp_path / "run.json").write_text(json.dumps({"mechanism": honest["mechanism"]}))
    assert verify.main([str(tmp_path / "privacy.json")]) == 0
    said = capsys.readouterr().out
    assert (said.count(": holds"), alone in said) == (1, False)
    (tmp_path / "run.json").write_text(json.dumps({"mechanism": mechanism(steps=41).facts}))
    assert verify.main([str(tmp_path)]) == 1
    assert "describes another mechanism; run.json" in capsys.readouterr().err
    facts = {"mechanism": honest["mechanism"], "small seed": True}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    (tmp_path / "furthest").write_text(f"{honest['steps'] + 1} 0\n")
    assert verify.main([str(tmp_path)]) == 1
    assert "hides the seed and counts fewer than" in capsys.readouterr().err
    (tmp_path / "furthest").unlink()
    for seed, status in ((5_000_000_000, 1), (0, 1), (None, 0)):
        facts = {"mechanism": honest["mechanism"], "small seed": False, "--seed": seed}
        (tmp_path / "run.json").write_text(json.dumps(facts))
        assert verify.main([str(tmp_path)]) == status
        assert ("hides the seed" in capsys.readouterr().err) == status
    (tmp_path / "furthest").write_text("abc")
    assert verify.main([str(tmp_path)]) == 1
    assert "furthest, are no numbers" in capsys.readouterr().err


@kills(
    "verify/epsilon.py",
    "max(float(classic), float(np.min(published)))",
    "float(classic)",
    slow=True,
)
@pytest.mark.parametrize("multiplier", [2.0, 8.0, 100.0])
def test_small_claims_of_every_method_hold(multiplier):
    """The classic conversion has no orders above 63, so its claims do not fall below about 0.19."""
    planned = mechanism(sampling=sampling.poisson(60_000, 256), noise_multiplier=multiplier)
    card = json.loads(json.dumps(reports.card(planned, 1e-5)))
    assert all(good for good, _ in verify.findings(card))


def test_the_command_says_how_it_is_used(capsys):
    assert verify.main([]) == 2
    assert verify.main(["--help"]) == 0
    assert capsys.readouterr().out.count("usage: dpjax verify RUN") == 2


def test_it_imports_nothing_else_of_dpjax():
    program = (
        "import sys, dpjax.verify\n"
        "print({m.split('.')[1] for m in sys.modules if m.startswith('dpjax.')})\n"
        "print([m for m in sys.modules if m in ('jax', 'optax')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "{'verify'}\n[]\n", done.stderr


CORRELATED = {
    "square root": strategies.square_root(steps=40),
    "two bands": strategies.toeplitz(40, [1.0, -0.5]),
    "rising": strategies.toeplitz(40, [1.0, 1.2]),
    "normalized": strategies.toeplitz(40, [1.0, 0.5, 0.2], normalized=True),
    "inverse": strategies.banded_inverse_square_root(steps=40, bands=4),
    "buffered": strategies.buffered(steps=40, buffers=2),
    "tree": strategies.tree(steps=40),
}
BATCHES = {
    "cyclic": sampling.cyclic_poisson(1000, 20, cycle=5),
    "bins": sampling.balls_in_bins(1000, 100),
    "shuffled": sampling.shuffled(1000, 100),
    "full": sampling.full(1000),
    "curriculum": sampling.curriculum(np.arange(1000), 100, public=True),
}


@kills("verify/correlated.py", "rows = own + ", "rows = own + 0 * ", case="tree", slow=True)
@kills("verify/correlated.py", "np.all(falling == column)", "True", case="rising", slow=True)
@kills("sampling/epochs.py", "strategies.apart(1, -(-steps // epoch))", "strategies.cycles(epoch)")
@kills("sampling/uniform.py", "strategies.apart(1),", "strategies.once(),", slow=True)
@kills("sampling/epochs.py", "strategies.cycles(epoch),", "strategies.once(),", slow=True)
@kills("verify/fields.py", "    require_hidden(spent)\n", "", slow=True)
@pytest.mark.parametrize("name", CORRELATED)
def test_correlated_noise_is_recomputed_with_its_strategy(name):
    """The sensitivity on the card is the one that this file finds by its own arithmetic."""
    for batches in BATCHES.values():
        made = mechanism(sampling=batches, noise=CORRELATED[name])
        card = json.loads(json.dumps(reports.card(made, DELTA, methods=["rdp"])))
        assert verdicts(card)[0], verdicts(card)
        noise = card["mechanism"]["noise"]
        found = verify.sensitivity(noise, card["mechanism"]["sampling"])
        assert found == pytest.approx(noise["sensitivity"], rel=1e-6)
        sound, words = verdicts(changed(card, ["mechanism", "noise", "sensitivity"], 0.9 * found))
        assert not sound
        assert "one example moves" in words[0]


@kills("verify/correlated.py", "own + 2 * np.sum", "own + np.sum", case="square root", slow=True)
@kills("verify/correlated.py", "norms[apart:]", "norms[:1]", case="normalized")
@kills("verify/correlated.py", "- 1 - apart]", "- 1]", case="buffered", slow=True)
@pytest.mark.parametrize("name", CORRELATED)
def test_the_diagonals_say_as_much_as_the_whole_matrix(name):
    made = mechanism(sampling=BATCHES["bins"], noise=CORRELATED[name])
    noise = json.loads(json.dumps(made.facts["noise"]))
    correlated = verify.correlated
    matrix = correlated.strategy(noise)
    gram = np.abs(matrix.T @ matrix)
    distances = range(correlated.bands(noise))
    for row, apart in zip(correlated.diagonals(noise, distances), distances, strict=True):
        assert row[: 40 - apart] == pytest.approx(np.diagonal(gram, apart), abs=1e-9)
        assert not row[40 - apart :].any()
    patterns = [np.arange(start, 40, 2) for start in range(2)]
    even = max(gram[np.ix_(each, each)].sum() for each in patterns)
    assert correlated.largest(noise, 40, 2, even=True) == pytest.approx(even)
    if name in ("normalized", "dense"):  # for others a smaller sum is known, or an exact one
        own = gram.diagonal()
        rows = own + np.sort(gram - np.diag(own))[:, -3:].sum(axis=1)
        most = min(np.sort(rows)[-4:].sum(), np.sort(np.sqrt(own))[-4:].sum() ** 2)
        assert correlated.largest(noise, 4, 1, even=False) == pytest.approx(most)


@kills("verify/correlated.py", "range(0, bands(noise), apart)", "range(0, steps, apart)")
@pytest.mark.parametrize(
    "batches",
    [
        pytest.param(sampling.balls_in_bins(1000, 100), id="bins"),
        pytest.param(sampling.cyclic_poisson(1000, 20, cycle=4), id="cyclic"),
        pytest.param(sampling.shuffled(1000, 100), id="shuffled"),
    ],
)
def test_banded_noise_of_many_steps_is_recomputed(batches):
    """Bands take memory for steps x bands, so no length of a run is too long for them."""
    noise = strategies.banded(5000, 16)
    made = mechanism(sampling=batches, noise=noise, steps=5000, noise_multiplier=40.0)
    card = json.loads(json.dumps(reports.card(made, DELTA, methods=["rdp"])))
    assert verdicts(card)[0], verdicts(card)
    noise, path = card["mechanism"]["noise"], ["mechanism", "noise", "sensitivity"]
    assert noise["normalized"]
    least = verify.sensitivity(noise, card["mechanism"]["sampling"])
    assert 1 < least <= noise["sensitivity"]
    assert verdicts(changed(card, path, least))[0]
    sound, words = verdicts(changed(card, path, 0.999 * least))
    assert not sound
    assert "one example moves" in words[0]


@kills("verify/correlated.py", 'bands(noise) <= sampling["cycle"]', "True", slow=True)
@kills("verify/events.py", "[steps * rate for rate", "[rate for rate", slow=True)
@kills(
    "verify/events.py",
    "        return dp.ComposedDpEvent([*queries, *map(gaussian, each[:1])])",
    "        pass",
    slow=True,
)
def test_correlated_noise_is_not_cheaper_than_its_events():
    """Amplified only by cycles that are at least as long as there are bands."""
    batches, bands = BATCHES["cyclic"], strategies.square_root(steps=40, bands=5)
    card = reports.card(mechanism(sampling=batches, noise=bands), DELTA, methods=["rdp", "pld"])
    card = json.loads(json.dumps(card))
    assert verdicts(card)[0], verdicts(card)
    longer = [*card["mechanism"]["noise"]["values"], 0.1]
    assert not verdicts(changed(card, ["mechanism", "noise", "values"], longer))[0]
    # Not amplified, the same claim is too small.
    wide = mechanism(sampling=batches, noise=strategies.square_root(steps=40))
    whole = json.loads(json.dumps(reports.card(wide, DELTA, methods=["rdp"])))
    assert verdicts(whole)[0], verdicts(whole)
    words = whole["claim"]
    assert "what is proved for cyclic" in verdicts(changed(card, ["claim"], words))[1][0]
    unknown = words.partition(";")[0] + "; one Gaussian for the run, in a batch that is unknown"
    assert "what is proved for cyclic" in verdicts(changed(whole, ["claim"], unknown))[1][0]
    amplified = card["epsilon"]["rdp"]["value"]
    assert not verdicts(changed(whole, ["epsilon", "rdp", "value"], amplified))[0]
    facts = {"name": "poisson", "examples": 1000, "batch_size": 20}
    poisson = changed(card, ["mechanism", "sampling"], facts)
    assert "no sensitivity" in verdicts(poisson)[1][0]


@kills(
    "verify/correlated.py", "    return steps\n", "    return steps + 1\n", case="tree", slow=True
)
@kills(
    "verify/correlated.py", 'and len(noise["values"]) == 1)', "and False)", case="one", slow=True
)
@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(strategies.banded_inverse_square_root(16, 1), id="one"),
        pytest.param(strategies.tree(4), id="tree"),
        pytest.param(strategies.buffered(1, 1), id="buffered"),
        pytest.param(strategies.banded(4, 4, strategies.cycles(4)), id="banded"),
        pytest.param(strategies.square_root(5), id="beyond"),
    ],
)
def test_bands_are_counted_as_the_mechanism_counts_them(noise):
    batches = sampling.cyclic_poisson(1000, 20, cycle=4)
    made = mechanism(sampling=batches, noise=noise, steps=noise.steps)
    good, lines = verdicts(json.loads(json.dumps(reports.card(made, DELTA, methods=["rdp"]))))
    assert good, lines
    facts = made.facts["noise"], made.facts["sampling"]
    assert verify.correlated.is_amplified(*facts) is is_amplified(noise, batches)
