# SPDX-License-Identifier: Apache-2.0
"""`dpjax.verify` reads the whole card: what it confirms, and what it does not let pass."""

import copy
import json
import math
import pathlib
import re
import subprocess
import sys
from collections import Counter

import dp_accounting as dp
import jax.numpy as jnp
import numpy as np
import pytest
from mutation import kills
from scipy import stats
from small_mechanisms import mechanism_with

from dpjax import _versions, clipping, ledger, reports, sampling, strategies, trees, verify
from dpjax._rounding import three_digits, upwards
from dpjax.accounting import _loss_distributions
from dpjax.accounting._event_parts import split
from dpjax.mechanism import Spent
from dpjax.verify import _epsilon, _matrices, advisories, cards, facts, steps
from dpjax.verify.facts import BOUNDS

DELTA = 1e-5
SCORED = sampling.scored(np.arange(1000) % 2, [[0.1, 0.2]], steps_per_row=40, batch_size=100)


def mechanism(**options):
    return mechanism_with(1000, 20, **{"noise_multiplier": 1.2, "steps": 40, **options})


def card_of(delta=DELTA, methods=None, **options):
    """What a parser makes of the card of a mechanism."""
    card = json.loads(json.dumps(reports.card(mechanism(**options), delta, methods=methods)))
    return card if methods is None else without_attacks(card)


def without_attacks(card):
    """A card that limits no attack: what RDP says of them is confirmed by a distribution alone."""
    return changed(card, ["true_positive_rates"], [[0.1, 1.0]])


@pytest.fixture(scope="module")
def honest():
    """The card of a mechanism with an earlier run; without PLD, which takes a second each time."""
    return card_of(methods=["rdp", "gdp"], before=[mechanism(steps=1).spent(np.full(1, 1.2))])


def verdicts(card):
    """Whether a card supports a release, and the verdicts in words."""
    try:
        found = list(verify.findings(card))
    except verify.Unreadable as reason:
        return False, [str(reason)]
    return all(sound for sound, _ in found), [line for _, line in found]


def changed(card, path, value):
    """A copy of the card with another value at a path; ... removes the field."""
    inner = card = copy.deepcopy(card)
    *above, last = path
    for name in above:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return card


HONEST = {
    "poisson": {},
    "full": {"sampling": sampling.full(500), "noise_multiplier": 8.0},
    "shuffled": {"sampling": sampling.shuffled(1000, 100), "noise_multiplier": 4.0},
    "fixed": {"sampling": sampling.fixed(1000, 20), "noise_multiplier": 3.0},
    "scored": {"sampling": SCORED},
    "schedule": {"noise_multiplier": lambda step: 2.0 - step / 80},
    "queries": {"preparation": [8.0, 8.0]},
    "adapted": {"adaptive": clipping.Quantile()},
    "replaced": {"neighbours": "replace-one"},
    "loud": {"noise_multiplier": 0.001},
    "groups": {
        "clipping": clipping.per_group([0.0, 1.0], groups=2),
        "noise_multiplier": (2.0, 3),
        "unit": "client",
    },
    "before": {
        "sampling": sampling.full(500),
        "neighbours": "replace-one",
        "before": [Spent(sampling=sampling.fixed(1000, 10), runs=((4.0, 5),))],
    },
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", HONEST)
def test_every_claim_of_an_honest_card_holds(name):
    card = card_of(**HONEST[name])
    good, lines = verdicts(card)
    assert good, lines
    claimed = set(card["epsilon"]) & set(BOUNDS)
    assert claimed
    said = re.compile(r" by (rdp|pld), the best accountant here: holds$")
    assert sum(bool(said.search(line)) for line in lines) == len(claimed)
    assert ("attacks" in lines[-1]) == (card["true_positive_rates"][0][1] < 1)


MU = 3.0  # at which the curve is flat at a tenth, and steep at a thousandth


def test_attacks_on_a_gaussian_reach_its_trade_off_curve():
    """Phi(Phi^-1(rate) + mu): Dong, Roth and Su (2022), and a card that says less is found out."""
    card = card_of(sampling=FULL, noise_multiplier=1 / MU, steps=1)
    rates = card["true_positive_rates"]
    assert [rate for rate, _ in rates] == [0.001, 0.01, 0.1]
    for place, (wrong, right) in enumerate(rates):
        exact = stats.norm.cdf(stats.norm.ppf(wrong) + MU)
        assert exact <= right <= (1 + 1e-6) * exact
        assert _epsilon.most_true_positives(
            _epsilon.deltas_of_gaussian(MU), wrong
        ) == pytest.approx(exact, rel=1e-3)
        sound, lines = verdicts(changed(card, ["true_positive_rates", place, 1], 0.99 * right))
        assert not sound
        assert lines[-1].endswith(": DOES NOT HOLD")
    assert "0.1 %, 1 %, 10 % false positives claim at most 46.5 %" in verdicts(card)[1][-1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "methods"),
    [("poisson", None), ("poisson", ["rdp"]), ("replaced", None), ("allocation", None)],
)
def test_attacks_on_samples_are_recomputed(name, methods):
    """By another grid of losses, and for epochs from below."""
    allocated = {"sampling": sampling.random_allocation(1000, 100), "noise_multiplier": 1.0}
    options = {**HONEST, "allocation": allocated}[name]
    card = json.loads(json.dumps(reports.card(mechanism(**options), DELTA, methods=methods)))
    sound, lines = verdicts(card)
    assert sound, lines
    wrong, right = card["true_positive_rates"][1]
    less = changed(card, ["true_positive_rates", 1], [wrong, 0.95 * right])
    assert verdicts(less)[0] == (methods is not None), "RDP claims far more than can be learned"


@kills("verify/_epsilon.py", "- K) * math.log1p(-rate)", ") * math.log1p(-rate)")
def test_the_formula_of_sampled_gaussians_is_that_of_the_accounting_library():
    """At whole orders; between them it is above, by little."""
    accountant = dp.rdp.RdpAccountant(_epsilon.ORDERS.tolist())
    accountant.compose(dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(1.2)))
    ratio = _epsilon.poisson_divergences(0.02, 1.2) / accountant.rdp
    whole = np.isin(_epsilon.ORDERS, _epsilon.WHOLE)
    np.testing.assert_allclose(ratio[whole], 1, rtol=1e-6)
    assert np.all(ratio >= 1 - 1e-6)
    ran = Counter({steps.Step(1.2, 0.02): 40})
    assert _epsilon.rounding_error(ran) == _loss_distributions.error(split(mechanism().event))


def levelled(sampler, multipliers, steps, methods=("rdp",)):
    """The card of a schedule, after some of its steps."""
    plan = mechanism(
        sampling=sampler, noise_multiplier=lambda t: multipliers[t], steps=len(multipliers)
    )
    book = ledger.admit(ledger.empty(), plan, steps=steps)
    card = json.loads(json.dumps(reports.card(plan, DELTA, ledger=book, methods=methods)))
    return plan, without_attacks(card)


@kills("verify/steps.py", 'step.multiplier, side="right") - 1', "step.multiplier)", slow=True)
@kills(
    "verify/steps.py", "np.searchsorted(rates, step.rate)", "np.searchsorted(rates, step.rate) - 1"
)
def test_schedules_are_rounded_to_the_levels_of_the_card_and_cost_no_less():
    """Levels of the plan, whatever of it ran: as in dpjax.accounting, which is another program."""
    opened = sampling.scored(
        np.zeros(1000, int), np.arange(1, 7)[:, None] / 50, steps_per_row=100, batch_size=20
    )
    plan, card = levelled(opened, jnp.linspace(3.0, 1.0, 600), 300)
    assert card["levels"] == {"levels": 240, "smallest": 1.0}
    assert verdicts(card)[0], verdicts(card)
    whole, ran = split(plan.event).sampled, split(plan.event_of(plan.multipliers[:300])).sampled
    rounded = {(s.rate, s.multiplier): n for s, n in steps.steps_of(facts.card_of(card)).items()}
    assert rounded == pytest.approx(_loss_distributions.rounded(ran, plan=whole))
    assert "names no levels" in verdicts(changed(card, ["levels"], None))[1][0]


@pytest.mark.slow  # a distribution for each of 256 levels takes ten seconds
def test_thousands_of_multipliers_are_verified():
    _, card = levelled(
        sampling.poisson(60_000, 256), jnp.linspace(1.5, 0.7, 20_000), 20_000, ("pld",)
    )
    assert verdicts(card)[0], verdicts(card)
    less = changed(card, ["epsilon", "pld", "value"], 0.99 * card["epsilon"]["pld"]["value"])
    assert not verdicts(less)[0]


CHANGES = [
    # Claims that do not follow from the facts, and facts that do not explain the claims.
    (["epsilon", "rdp", "value"], 0.3, "DOES NOT HOLD"),
    (["epsilon", "rdp", "value"], "inf", "promises nothing"),
    (["epsilon"], {}, "claims no epsilon by rdp or pld"),
    (["delta"], 0.5, "promises nothing: delta=0.5"),
    (["steps"], 20, "IS OF OTHER FACTS"),
    (["not_private"], "The rule's bound is infinite", "not for release: the card says"),
    (["mechanism", "sampling", "rates"], [[0.03, 1]], "DOES NOT HOLD"),
    (["mechanism", "sampling", "event"], "none", "DOES NOT HOLD"),
    (["mechanism", "clipping", "bounds"], ["inf"], "DOES NOT HOLD"),
    (["mechanism", "sampling", "neighbours"], "zero-out", "proved for zero-out alone"),
    (["mechanism", "projections"], 30, "nothing is recomputed"),
    (["steps"], 41, "the card.steps is 41; expected at most the planned 40"),
    # Values that no such field has.
    (["epsilon", "rdp", "value"], math.nan, "epsilon.rdp.value is nan; expected a number from 0"),
    (["epsilon", "gdp", "proven"], True, "epsilon.gdp.proven is True; expected one of False"),
    (["delta"], 0, "the card.delta is 0; expected a number above 0, at most 1"),
    (["steps"], True, "the card.steps is True; expected a whole number"),
    (["mechanism", "before", 0, "randomness"], ..., "randomness is missing"),
    (["mechanism", "multiplier_and_steps"], [[1.2, 10**18]], "from 1, at most 100,000,000"),
    (["remark"], "sound", "the card is not of format 5: remark is unknown"),
    (["format"], 6, "the card is of format 6; expected 4 or 5"),
    (["risk"], ..., "risk is missing"),
    (["mechanism", "format"], 1, "the card.mechanism.format is 1; expected one of 4"),
    (["mechanism", "sampling", "rates"], [[1.5, 1]], "is 1.5; expected a number from 0, at most 1"),
    (["mechanism", "sampling", "rates"], [], "the card cannot be accounted"),
    (
        ["mechanism", "sampling", "event"],
        "own",
        "expected one of 'poisson', 'subset', 'allocation', 'none'",
    ),
]


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    CHANGES,
    ids=[f"{'.'.join(map(str, c[0]))}={str(c[1])[:40]}" for c in CHANGES],
)
def test_no_changed_card_passes(path, value, expected, honest):
    good, lines = verdicts(changed(honest, path, value))
    assert any(expected in line for line in lines), lines
    assert not good


SHUFFLED = sampling.shuffled(1000, 100)
FULL = sampling.full(1000)
ROOT = strategies.square_root(steps=40)
CONTRADICTIONS = [
    (
        {"sampling": FULL, "noise": strategies.toeplitz(40, [1.0, 0.5])},
        ["noise", "values"],
        [0.0],
        "without an inverse",
    ),
    ({"sampling": SHUFFLED, "noise": ROOT}, ["noise", "kind"], "own", "kind is 'own'"),
    ({"sampling": SHUFFLED, "noise": ROOT}, ["noise", "steps"], 39, "correlated over 39 steps"),
    ({"sampling": SHUFFLED, "noise": ROOT}, ["sampling", "place"], None, "no sensitivity is known"),
]


@pytest.mark.parametrize(
    ("options", "path", "value", "expected"),
    CONTRADICTIONS,
    ids=[f"{c[1][-1]}={str(c[2])[:20]}" for c in CONTRADICTIONS],
)
def test_strategies_that_no_mechanism_has_are_refused(options, path, value, expected):
    card = changed(card_of(methods=["rdp"], **options), ["mechanism", *path], value)
    good, lines = verdicts(card)
    assert not good
    assert expected in lines[0]


@kills("verify/cards.py", "rounding=ROUND_CEILING", 'rounding="ROUND_HALF_EVEN"', slow=True)
def test_no_verdict_prints_less_than_is_claimed(honest):
    for value in (0.30703772616587044, 2.1, 9.99961, 1e-5, 0.0, 1234.5, 5e-324, np.inf):
        assert cards.upwards(value) == three_digits(value)
        assert cards.upwards(value, ".3g") == upwards(value, ".3g")
    claimed = honest["epsilon"]["rdp"]["value"]
    rdp, gdp = verdicts(honest)[1]
    assert cards.percent([0.07, 0.12345, 1.0]) == "7 %, 12.4 %, 100 %"
    assert f"epsilon {three_digits(claimed)} for one example at delta=1e-05; recomputed" in rdp
    assert gdp.endswith(": not checked, and no bound")


def test_a_supplied_key_limits_what_holds(honest):
    said = "epsilon holds against those who do not know the key, for one run per key"
    for path in (["randomness"], ["mechanism", "before", 0, "randomness"]):
        good, lines = verdicts(changed(honest, path, "supplied"))
        assert good
        assert said in lines[-1]
    assert not any(said in line for line in verdicts(honest)[1])


FIXED = {"sampling": sampling.fixed(1000, 20)}
BARE = mechanism(**FIXED, noise_multiplier=0.0)
WITHOUT_NOISE = {
    "poisson": ({"noise_multiplier": 0.0}, "The noise multiplier is 0 at some step."),
    "schedule": ({**FIXED, "noise_multiplier": lambda step: step * 1.0}, "multiplier is 0 at some"),
    "query": ({**FIXED, "preparation": [0.0]}, "A query before the first step had no noise."),
    "before": ({**FIXED, "before": [BARE.spent(BARE.multipliers)]}, "An earlier run"),
    "order": ({"sampling": sampling.curriculum(np.arange(1000), 100)}, "the order comes from the"),
}


@kills("verify/steps.py", "0 in used or", "0 in used[:0] or", case="schedule")
@pytest.mark.parametrize("name", WITHOUT_NOISE)
def test_a_run_without_noise_promises_nothing(name):
    options, why = WITHOUT_NOISE[name]
    card = card_of(**options)
    good, lines = verdicts(card)
    said = "\n".join(lines)
    assert not good
    assert "holds" not in said
    assert said.count("promises nothing") == len(set(card["epsilon"]) & set(BOUNDS))
    assert f"not for release: the card says '{why}" in said or why in said
    smaller = changed(card, ["epsilon", "rdp", "value"], 1.0)
    assert "DOES NOT HOLD" in "\n".join(verdicts(smaller)[1])


# By 80 digits: bisection of Phi(mu / 2 - e / mu) - exp(e) Phi(-mu / 2 - e / mu).
EXACT = [(1.0, 1e-5, 4.3771780957), (20**0.5 / 5, 1e-15, 7.2450003)]


@kills("verify/_epsilon.py", "signal = bounds_moved * math.sqrt(", "signal = math.sqrt(", slow=True)
@pytest.mark.parametrize(("moved", "delta", "expected"), EXACT)
def test_gaussians_without_sampling_have_a_closed_form(moved, delta, expected):
    """Claims at any delta are compared with it, from both sides."""
    assert _epsilon.of_gaussian(moved, delta) == pytest.approx(expected, rel=1e-7)
    z, options = 20**0.5 / moved, {"sampling": FULL, "steps": 20}
    for neighbours, noise in (("zero-out", z), ("replace-one", 2 * z)):
        card = card_of(delta, noise_multiplier=noise, neighbours=neighbours, **options)
        good, lines = verdicts(card)
        assert good, lines
        assert card["epsilon"]["pld"]["value"] == pytest.approx(expected, rel=1e-7)
        less = changed(card, ["epsilon", "pld", "value"], 0.99 * expected)
        assert not verdicts(less)[0]


@kills("verify/cards.py", "sound = most >= reached", "sound = True or reached")
def test_the_risk_that_noise_was_chosen_for_is_recomputed():
    chosen = mechanism(sampling=FULL, steps=4).calibrate(
        true_positive_rate=0.05, false_positive_rate=0.01
    )
    card = json.loads(json.dumps(reports.card(chosen, DELTA)))
    sound, lines = verdicts(card)
    assert sound
    assert lines[-1].startswith("risk         of at most 5 % true positives at 1 % false ones; rec")
    less = changed(card, ["risk", "true_positive_rate"], 0.049)
    assert verdicts(less)[1][-1].endswith(": DOES NOT HOLD")
    assert not verdicts(less)[0]


def test_a_card_of_format_4_is_read_too(honest):
    old = {name: honest[name] for name in honest if name not in facts.SINCE_FORMAT_5}
    assert verdicts(old) == verdicts(honest)
    assert (
        "of format 1; expected 4 or 5" in verdicts(changed(old, ["mechanism", "format"], 1))[1][0]
    )


# Files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "holds a list; expected a JSON object"),
        ("{}", "mechanism is missing"),
        (None, "no such file"),
    ],
    ids=["cut", "list", "empty", "none"],
)
def test_a_file_that_is_no_card_is_answered_in_one_sentence(content, expected, tmp_path, capsys):
    path = tmp_path / "privacy.json"
    if content is not None:
        path.write_text(content)
    for given in (path, tmp_path):
        assert verify.main([str(given)]) == 1
        out, err = capsys.readouterr()
        assert expected in err
        assert not out


@kills("verify/cards.py", "key=operator.itemgetter(1)", "key=operator.itemgetter(1), reverse=True")
@kills("verify/cards.py", "return max(statuses)", "return statuses[-1]")
def test_each_run_in_a_folder_is_verified_and_its_headline_comes_first(tmp_path, capsys, honest):
    rdp = honest["epsilon"]["rdp"]
    loose = {**rdp, "value": 1.004 * rdp["value"]}
    wrong = {**honest, "epsilon": {"rdp": {**rdp, "value": 0.5 * rdp["value"]}}}
    honest = {**honest, "epsilon": {"rdp-classic": loose, "rdp": rdp}}
    for name, card in (("a", wrong), ("b", honest)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "privacy.json").write_text(json.dumps(card))
    assert verify.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    second = lines.index(f"{tmp_path / 'b'}:")
    assert lines[0] == f"{tmp_path / 'a'}:"
    assert lines[1].endswith("DOES NOT HOLD")
    assert [line.split()[0] for line in lines[second + 1 : second + 3]] == ["rdp", "rdp-classic"]
    assert verify.main([str(tmp_path / "b")]) == 0


def test_the_card_of_another_run_is_not_accepted(tmp_path, capsys, honest):
    (tmp_path / "privacy.json").write_text(json.dumps(honest))
    alone = "no run.json lies beside the card"
    assert verify.main([str(tmp_path)]) == 0
    assert alone in capsys.readouterr().out
    for facts_of_run, status, said in (
        ({"mechanism": honest["mechanism"], "randomness": "fresh"}, 0, ""),
        ({"mechanism": mechanism(steps=41).facts}, 1, "another mechanism than run.json"),
        (
            {"mechanism": honest["mechanism"], "randomness": "supplied"},
            1,
            "that the key was supplied",
        ),
    ):
        (tmp_path / "run.json").write_text(json.dumps(facts_of_run))
        assert verify.main([str(tmp_path)]) == status
        out, err = capsys.readouterr()
        assert said in err
        assert alone not in out


def test_the_command_says_how_it_is_used(capsys):
    assert verify.main([]) == 2
    assert verify.main(["--help"]) == 0
    assert capsys.readouterr().out.count("usage: dpjax verify RUN") == 2


@kills("verify/cards.py", "same = digest(file) == claimed", "same = True")
def test_parameters_are_those_of_the_card(tmp_path, capsys, honest, monkeypatch):
    """By a reader of its own: narrow, whole and cut leaves, in any order of names."""
    monkeypatch.setattr("flax.serialization.MAX_CHUNK_SIZE", 64)
    params = {"b": jnp.ones((), jnp.bfloat16), "a": {"w": jnp.arange(40.0).reshape(8, 5)}}
    card = {**honest, "parameters": trees.digest(params)}
    near, other = tmp_path / "params.msgpack", tmp_path / "other.msgpack"
    path = tmp_path / "privacy.json"
    path.write_text(json.dumps(card))
    assert not list(cards.parameters(card, path)), "without parameters"
    near.write_bytes(trees.serialized(params))
    other.write_bytes(trees.serialized({**params, "b": jnp.zeros((), jnp.bfloat16)}))
    ((same, said),) = cards.parameters(card, path)
    assert (same, said[12:]) == (True, " of params.msgpack have the SHA-256 of the card: holds")
    assert list(cards.parameters(card, path, [str(near)])) == [(same, said)]
    ((same, said),) = cards.parameters(card, path, [str(other)])
    assert (same, said[-15:]) == (False, ": DOES NOT HOLD")
    assert not list(cards.parameters(honest, path)), "a card without a digest"
    assert not next(cards.parameters(honest, path, [str(near)]))[0]
    assert verify.main([f"--params={path}", str(path)]) == 1
    assert "privacy.json holds no parameters of a run" in capsys.readouterr().err


# Advisories --------------------------------------------------------------------------------

ROOT_FOLDER = pathlib.Path(__file__).parent.parent
# Written by the commit before the one that gave each run bins of its own.
AFFECTED = ROOT_FOLDER / "tests" / "old_cards" / "random_allocation.json"
UNAFFECTED = ROOT_FOLDER / "experiments" / "results" / "cards" / "mnist_linear_at_epsilon_1.json"


@kills("verify/cards.py", "yield from advisories_on(card)", "pass")
def test_an_old_card_with_shared_bins_is_affected_and_one_of_poisson_batches_is_not(capsys):
    assert verify.main([str(AFFECTED)]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("advisory")]
    assert re.search(r"DPJAX-2026-1: runs .*: AFFECTED\. If no other run .*\.$", line)
    assert not any("DOES NOT HOLD" in line for line in lines)
    assert verify.main([str(UNAFFECTED)]) == 0
    assert "advisory" not in capsys.readouterr().out


def is_affected(card):
    return any(advisories.advisories_on(facts.card_of(card)))


def test_an_advisory_lists_versions_or_digests_of_sources(monkeypatch, honest):
    old = json.loads(AFFECTED.read_text())
    assert is_affected(old)
    assert not is_affected({**old, "randomness": "supplied"}), "one run for a key"
    assert not is_affected({**facts.SINCE_FORMAT_5, **old, "sources": _versions.sources()})
    correlated = {"sampling": BATCHES["bins"], "noise": CORRELATED["square root"]}
    for options, expected in ((correlated, True), ({"sampling": BATCHES["bins"]}, False)):
        assert is_affected({**card_of(methods=["rdp"], **options), "sources": None}) is expected
    (advisory,) = advisories.ADVISORIES
    assert f"| `{advisory.name}` |" in (ROOT_FOLDER / "SECURITY.md").read_text()
    for listed, expected in (
        ({"versions": (honest["versions"]["dpjax"],)}, True),
        ({"sources": (honest["sources"],)}, True),
        ({"versions": ("0.0.1",), "sources": (None, "0" * 64)}, False),
    ):
        row = advisory._replace(**{"versions": (), "sources": (), "concerns": bool} | listed)
        monkeypatch.setattr(advisories, "ADVISORIES", (row,))
        assert is_affected(honest) is expected


def test_it_imports_nothing_else_of_dpjax():
    program = (
        "import sys, dpjax.verify\n"
        "print({m.split('.')[1] for m in sys.modules if m.startswith('dpjax.')})\n"
        "print([m for m in sys.modules if m in ('jax', 'optax')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "{'verify'}\n[]\n", done.stderr


# Correlated noise --------------------------------------------------------------------------

CORRELATED = {
    "square root": strategies.square_root(steps=40),
    "rising": strategies.toeplitz(40, [1.0, 1.2]),
    "normalized": strategies.toeplitz(40, [1.0, 0.5, 0.2], normalized=True),
    "inverse": strategies.banded_inverse_square_root(steps=40, bands=4),
    "buffered": strategies.buffered(steps=40, buffers=2),
    "tree": strategies.tree(steps=40),
}
BATCHES = {
    "cyclic": sampling.cyclic_poisson(1000, 20, cycle=5),
    "bins": sampling.balls_in_bins(1000, 100),
    "shuffled": SHUFFLED,
    "full": FULL,
    "curriculum": sampling.curriculum(np.arange(1000), 100, public=True),
}


def parsed(card):
    """The strategy and the sampling on a card, as `verify` reads them."""
    plan = facts.card_of(card).mechanism
    return plan.noise, plan.sampling


@pytest.mark.parametrize("name", CORRELATED)
def test_correlated_noise_is_recomputed_with_its_strategy(name):
    """The sensitivity on the card is the one that this file finds by its own arithmetic."""
    for batches in BATCHES.values():
        card = card_of(methods=["rdp"], sampling=batches, noise=CORRELATED[name])
        assert verdicts(card)[0], verdicts(card)
        found = _matrices.sensitivity(*parsed(card))
        assert found == pytest.approx(card["mechanism"]["noise"]["sensitivity"], rel=1e-6)
        sound, words = verdicts(changed(card, ["mechanism", "noise", "sensitivity"], 0.9 * found))
        assert not sound
        assert "one example moves" in words[0]


NORMALIZED = strategies.toeplitz(5000, [1.0, 0.5], normalized=True)


@pytest.mark.parametrize("noise", [strategies.square_root(5000, 16), strategies.tree(5000)])
def test_noise_of_many_steps_is_recomputed(noise):
    """Without its matrix: by columns that fall, or by the nodes of a tree."""
    options = {"noise": noise, "steps": 5000, "noise_multiplier": 40.0}
    card = card_of(methods=["rdp"], sampling=SHUFFLED, **options)
    assert verdicts(card)[0], verdicts(card)
    path, least = ["mechanism", "noise", "sensitivity"], _matrices.sensitivity(*parsed(card))
    assert 1 < least <= card["mechanism"]["noise"]["sensitivity"]
    assert not verdicts(changed(card, path, 0.999 * least))[0]
    meet = changed(card, ["mechanism", "noise"], {**NORMALIZED.facts, "sensitivity": 9.0})
    assert "too many to compute" in verdicts(meet)[1][0]


@kills("verify/_matrices.py", "bands(noise) <= sampling.cycle", "True", slow=True)
@kills("verify/steps.py", "return Counter(map(Step, multipliers[:1].tolist()))", "pass", slow=True)
def test_correlated_noise_is_not_cheaper_than_its_events():
    """Amplified only by cycles that are at least as long as there are bands."""
    batches, bands = BATCHES["cyclic"], strategies.square_root(steps=40, bands=5)
    card = card_of(methods=["rdp", "pld"], sampling=batches, noise=bands)
    assert verdicts(card)[0], verdicts(card)
    longer = [*card["mechanism"]["noise"]["values"], 0.1]
    assert not verdicts(changed(card, ["mechanism", "noise", "values"], longer))[0]
    # Not amplified, the same claim is too small.
    whole = card_of(methods=["rdp"], sampling=batches, noise=strategies.square_root(steps=40))
    assert verdicts(whole)[0], verdicts(whole)
    amplified = card["epsilon"]["rdp"]["value"]
    assert not verdicts(changed(whole, ["epsilon", "rdp", "value"], amplified))[0]
    poisson = changed(
        card, ["mechanism", "sampling"], card_of(methods=["rdp"])["mechanism"]["sampling"]
    )
    assert "no sensitivity" in verdicts(poisson)[1][0]


KILLS = {
    "test_attacks_on_a_gaussian_reach_its_trade_off_curve": [
        kills("verify/_epsilon.py", "steep.min(), flat.min()", "steep.min()"),
        kills("verify/_epsilon.py", "steep.min(), flat.min()", "flat.min()", slow=True),
        kills("verify/cards.py", "sound = rates_hold(card, deltas)", "sound = True"),
    ],
    "test_no_changed_card_passes": [
        kills("verify/cards.py", "if claimed > largest * (1 + LOOSE):", "if False:"),
        kills("verify/facts.py", "    if unlike:\n", "    if False:\n", slow=True),
        kills("verify/facts.py", "not least <= given <= most", "given < least", slow=True),
    ],
    "test_correlated_noise_is_recomputed_with_its_strategy": [
        kills("verify/_matrices.py", "np.all(falling == column)", "True", case="rising", slow=True),
        kills(
            "sampling/events.py",
            "strategies.apart(1, number_of_cycles)",
            "strategies.cycles(cycle)",
        ),
        kills(
            "sampling/events.py",
            "return strategies.cycles(cycle)",
            "return strategies.once()",
            slow=True,
        ),
    ],
}
