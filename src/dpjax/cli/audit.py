# SPDX-License-Identifier: Apache-2.0
"""Audits of a run that `dpjax train` left in a folder, as lines beside its claims."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging

import dpjax
from dpjax import auditing, metrics, training
from dpjax._display import duration
from dpjax._files import replace, strict
from dpjax._rounding import downwards, three_digits, upwards
from dpjax.cli import compilation_cache
from dpjax.cli.flag_checks import require_matplotlib
from dpjax.cli.flag_sets.train import FLAGS
from dpjax.cli.report import page, style
from dpjax.cli.report.figures import PRIVATE
from dpjax.cli.report.load_run import SavedRun, read
from dpjax.cli.train import inputs
from dpjax.cli.train.command import Planned, plan
from dpjax.cli.train.evaluation import first_parameters, held
from dpjax.cli.train.run_files import MOMENTS
from dpjax.training import released_params

# A step is audited so exactly that a confidence of 95 % would refute 1 of 20 sound mechanisms.
OF_A_STEP, OF_A_RUN = 0.999, 0.95
ASSUMED = "a bound only if train and test rows are of one distribution"
HEAD = f"{'audit':<40}{'epsilon >':>9}{'claimed':>9}{'':>8}  measured"

ATTACKS = ("canaries", "loss", "lira")
_MOST = 10_000  # rows whose losses are compared
_KNOWN = 2_000  # rows whose gradients the attacker subtracts
_ATTACKED = 1_000  # members, and as many others, that lira scores


class Line(NamedTuple):
    """One audit: what it measured, and its lower bound beside the claim."""

    audit: str
    measured: str
    bound: float
    claimed: float
    confidence: float
    refutes: bool

    def __str__(self) -> str:
        return (
            f"{self.audit:<40}{three_digits(self.bound, downwards):>9}"
            f"{three_digits(self.claimed):>9}{self.confidence:>8.1%}  {self.measured}"
        )


class Attack(NamedTuple):
    """An attack on the released model: scores of members and of other rows, and their classes."""

    name: str
    found: auditing.Membership
    scores: tuple[np.ndarray, np.ndarray]
    labels: tuple[np.ndarray, np.ndarray]

    def line(self, run: SavedRun) -> Line:
        """Never a verdict: no coin decided which rows are for the test."""
        # Rows of another year have other losses under a sound model too.
        found = self.found
        rates = ", ".join(self.rates(run))
        words = f"AUROC {found.auroc.value:.3f}; members found {rates}; {ASSUMED}"
        bounds = found.epsilon, run.epsilon, found.confidence
        return Line(self.name, words, *bounds, refutes=False)

    def rates(self, run: SavedRun) -> list[str]:
        """The rates of true positives, each beside the most that the claim allows."""
        most = dict((run.card or {})["true_positive_rates"])
        return [
            f"{share} of at most {upwards(100 * most[at], '.1f')}% at {at:.1%}"
            for at, share in self.found.true_positives.items()
        ]

    def by_class(self) -> dict[str, str]:
        """The AUROC of each class."""
        (ins, outs), (of_ins, of_outs) = self.scores, self.labels
        parts = {c: (ins[of_ins == c], outs[of_outs == c]) for c in np.unique(of_ins).tolist()}
        kinds = {c: np.repeat([1, 0], [*map(len, part)]) for c, part in parts.items()}
        areas = {c: metrics.auroc(np.concatenate(parts[c]), kinds[c]) for c in parts}
        return {str(c): f"{area:.3f}" for c, area in areas.items()}


class Rebuilt(NamedTuple):
    """A run, built again from its folder, with parameters before and after its training."""

    run: SavedRun
    planned: Planned
    dataset: dpjax.data.Dataset
    first: Any
    released: Any


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Audits the run that the command line names."""
    if len(argv) != 2:
        raise app.UsageError("expected the folder of one run: dpjax audit runs/demo")
    require_matplotlib()
    logging.set_verbosity(logging.ERROR)  # nothing is released, so public seeds need no warning
    if unknown := set(given.attacks) - set(ATTACKS):
        raise app.UsageError(f"--attacks={','.join(unknown)}: expected {', '.join(ATTACKS)}.")
    started, folder = time.time(), pathlib.Path(argv[1])
    compilation_cache.switch_on()
    out = folder if given.out is None else pathlib.Path(given.out)
    try:
        out.mkdir(parents=True, exist_ok=True)  # before the audits, which take minutes
        rebuilt = rebuild(folder, given.data_dir)
        require_test_rows(given, rebuilt.dataset)
        lines = audit_run(given, rebuilt, out)
    except (OSError, ValueError) as error:
        raise app.UsageError(f"{folder}: {error}") from error
    print("\n".join(map(str, (HEAD, *lines))))
    print(f"Wrote {out / 'audit.json'} and {out / 'audit.html'}.")
    print(f"The bounds and what was measured are {PRIVATE}. The claims may be published.")
    conclude(lines, time.time() - started)


def rebuild(folder: pathlib.Path, data_dir: str | None = None) -> Rebuilt:
    """Reads a run's folder and builds the run again; no folder records ``data_dir``."""
    run = read(folder, arrays=False)
    if run.card is None or "flags" not in (run.config or {}):
        raise app.UsageError(f"{folder}: expected the folder of a finished `dpjax train`.")
    given = flags_of(run)
    given["data_dir"].value = data_dir
    planned = plan(given)
    # Canaries have labels, and samplers of persons draw no single row.
    if planned.dataset.classes is None or planned.dataset.owners is not None:
        raise app.UsageError(f"{folder}: expected a classifier whose unit is one example.")
    if json.loads(json.dumps(planned.mechanism.facts)) != run.mechanism:
        raise app.UsageError(f"{folder}: expected the mechanism of run.json. Restore its data.")
    dataset, moments = inputs.with_features(given, planned.dataset), None
    if planned.normalization is not None:  # read, because a second query would spend privacy
        moments = inputs.read_moments(folder / MOMENTS, planned.normalization)
    dataset = inputs.with_scale(given, dataset, moments)
    first = first_parameters(planned.model, dataset, planned.earlier)
    return Rebuilt(run, planned, dataset, first, released_params(folder, first))


def require_test_rows(given: flags.FlagValues, dataset: dpjax.data.Dataset) -> None:
    """Refuses attacks on membership in a run whose every row was trained on."""
    needed = [name for name in given.attacks if name != "canaries"]
    if needed and not len(dataset.test[1]):
        raise app.UsageError(
            f"--attacks={','.join(needed)}: the run has no test rows to compare training rows "
            "with. Give --attacks=canaries."
        )


def flags_of(run: SavedRun) -> flags.FlagValues:
    """The flags of the run, by value: a command line would need quotes around lists in options."""
    given = copy.deepcopy(FLAGS)
    given(["train"])
    for name, value in (run.config or {})["flags"].items():
        if name in given:
            given[name].value = value
    # No file says which flags were given, and so decided the number of steps.
    given["steps"].value = sum(steps for _, steps in run.mechanism["multiplier_and_steps"])
    given["steps"].present = 1
    return given


def audit_run(given: flags.FlagValues, rebuilt: Rebuilt, out: pathlib.Path) -> list[Line]:
    """Audits a run, and writes numbers and page into a folder."""
    run, correlated = rebuilt.run, rebuilt.planned.mechanism.noise is not None
    name = "first step of correlated noise" if correlated else "one step in which the row is drawn"
    lines = [line_of_step(audit_step(rebuilt, given.pairs, OF_A_STEP), run.delta, name)]
    attacks = []
    if "canaries" in given.attacks:
        lines.append(audit_canaries(rebuilt, given.canaries, given.steps, OF_A_RUN))
    if "loss" in given.attacks:
        attacks.append(attack_losses(rebuilt, OF_A_RUN))
    if "lira" in given.attacks:
        attacks += attack_shadows(rebuilt, given.shadows, OF_A_RUN)
    lines += [attack.line(run) for attack in attacks]
    facts = {"run": str(run.path), "delta": run.delta, "publish": PRIVATE}
    facts["audits"] = [line._asdict() for line in lines]
    facts["attacks"] = {
        a.name: {**a.found._asdict(), "rates": a.rates(run), "by_class": a.by_class()}
        for a in attacks
    }
    replace(out / "audit.json", json.dumps(strict(facts), indent=2) + "\n")
    replace(
        out / "audit.html", page.page(f"Audit of {run.path.name}", written(lines, attacks, run))
    )
    return lines


def audit_step(rebuilt: Rebuilt, pairs: int, confidence: float) -> auditing.Separation:
    """The white-box audit of the first step, with the row whose clipped gradient is longest."""
    dataset, planned = rebuilt.dataset, rebuilt.planned
    some = np.linspace(0, dataset.examples - 1, min(512, dataset.examples)).astype(int)
    rows = jax.tree.map(jnp.asarray, dataset.rows(some))
    if planned.per_step is not None:
        rows = (*rows, jnp.zeros(len(some), jnp.int32))
    mechanism = planned.mechanism
    clipped = dpjax.clipped_grad(planned.of_example, mechanism.clipping)(rebuilt.first, rows)
    # A dropped row has factor 0 and a norm that is not finite: it moves nothing.
    reach = np.linalg.norm(np.nan_to_num(np.asarray(clipped.factors * clipped.norms)), axis=1)

    def build(sampler: Any) -> Any:
        drawn = dataclasses.replace(mechanism, sampling=sampler)
        # This optimizer shows the mean as it is.
        return planned.algorithm(drawn, dataset.train, optimizer=optax.sgd(1.0))

    canary = int(some[np.argmax(reach)])
    options = {"pairs": pairs, "confidence": confidence}
    return auditing.audit_algorithm(build, mechanism.sampling, rebuilt.first, canary, **options)


def line_of_step(step: auditing.Separation, delta: float, name: str) -> Line:
    """The audit of a step: what it allows to tell of a row that is drawn."""
    bound, claimed = step.epsilon(delta), step.claimed_epsilon(delta)
    words = f"mu {np.median(step.measured):.4f}, claimed {upwards(step.claimed, '.4f')}"
    return Line(name, words, bound, claimed, step.confidence, step.refutes or bound > claimed)


def audit_canaries(rebuilt: Rebuilt, count: int | None, steps: int, confidence: float) -> Line:
    """Trains once more, on data in which some rows are canaries that join by fair coins."""
    planned, size, delta = rebuilt.planned, rebuilt.dataset.examples, rebuilt.run.delta
    count = min(1000, size // 4) if count is None else count
    if not 10 <= count < size:
        raise app.UsageError(f"--canaries={count}: expected 10 or more, below the {size} rows.")
    draw = np.random.default_rng(0)
    places, (x, y) = with_canaries(rebuilt.dataset.train, count, rebuilt.dataset.classes or 1, draw)
    members = draw.random(count) < 0.5
    others = draw.permutation(np.setdiff1d(np.arange(size), places))[:_KNOWN]
    # All of its steps, although few run: correlated noise is designed for the whole run.
    sampler = auditing.without(planned.mechanism.sampling, places[~members])
    mechanism = dataclasses.replace(planned.mechanism, sampling=sampler, preparation=(), before=())
    steps = min(steps, mechanism.steps)
    recording = auditing.recording(planned.optimizer)
    algorithm = planned.algorithm(mechanism, (x, y), optimizer=recording)
    scores, _ = auditing.score_canaries(
        algorithm,
        algorithm.init(rebuilt.first, jax.random.key(0)),
        steps,
        planned.of_example,
        (jnp.asarray(x[places]), jnp.asarray(y[places])),
        (jnp.asarray(x[others]), jnp.asarray(y[others])),
        per_step=planned.per_step,
    )
    right, guesses = auditing.guess_members(scores, members, count // 5)
    curve, assumed = curve_of(mechanism, steps)
    options = {"canaries": count, "delta": delta, "confidence": confidence, "curve": curve}
    bound = auditing.epsilon_lower_bound(right, guesses, **options)
    claimed = mechanism.epsilon_of(mechanism.multipliers[:steps], delta, planned.method)
    words = f"{right} of {guesses} guesses right, {count} canaries, {steps} steps; {assumed}"
    return Line("canaries in a second run", words, bound, claimed, confidence, bound > claimed)


def curve_of(mechanism: dpjax.Mechanism, steps: int) -> tuple[Any, str]:
    """The trade-off curve that canaries refute, and its name: the run's own, where it is known."""
    event = mechanism.event_of(mechanism.multipliers[:steps])
    replaced = mechanism.relation is dpjax.types.Neighbours.REPLACE_ONE
    if replaced or mechanism.clipping.projections is not None:
        return "any", "any curve"
    return event, "its own curve"


def with_canaries(
    rows: Any, count: int, classes: int, draw: np.random.Generator
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """The places of canaries among rows, and the rows with them."""
    x, y = map(np.array, rows)
    places = draw.choice(len(x), count, replace=False)
    # White noise with a random label: its gradient is nearly orthogonal to all others. Of whole
    # numbers, such as tokens, each entry comes from another canary's row.
    if np.issubdtype(x.dtype, np.integer):
        x[places] = draw.permuted(x[places], axis=0)
    else:
        image, old = draw.normal(size=(count, *x.shape[1:])), x[places].reshape(count, -1)
        lengths = np.linalg.norm(old, axis=1) / np.linalg.norm(image.reshape(count, -1), axis=1)
        x[places] = image * lengths.reshape(-1, *[1] * (x.ndim - 1))
    y[places] = draw.integers(0, classes, count)
    return places, (x, y)


def attack_losses(rebuilt: Rebuilt, confidence: float) -> Attack:
    """Guesses training rows from the losses of the released parameters."""
    dataset = rebuilt.dataset
    # They order rows as losses do, without ties of losses that are rounded to 0.
    odds = jax.jit(partial(log_odds, rebuilt.planned.model))
    some = np.linspace(0, dataset.examples - 1, min(_MOST, dataset.examples)).astype(int)
    parts = dataset.rows(some), jax.tree.map(lambda x: x[:_MOST], dataset.test)
    told = tuple(np.asarray(odds(rebuilt.released, rows)) for rows in parts)
    return attack_of("losses of the released model", rebuilt, told, parts, confidence)


def attack_shadows(rebuilt: Rebuilt, count: int, confidence: float) -> Iterator[Attack]:
    """Likelihood ratios, from models that the run's own algorithm trains on halves of the rows."""
    planned, dataset, draw = rebuilt.planned, rebuilt.dataset, np.random.default_rng(0)
    size = min(_ATTACKED, dataset.examples // 2, len(dataset.test[0]))
    places = draw.permutation(dataset.examples)[:size]
    others = draw.permutation(len(dataset.test[0]))[:size]
    parts = dataset.rows(places), jax.tree.map(lambda x: np.asarray(x)[others], dataset.test)
    both = jax.tree.map(lambda a, b: np.concatenate([a, b]), *parts)
    odds = jax.jit(partial(log_odds, planned.model))
    joined = np.zeros((count, 2 * size), bool)
    told = np.zeros(joined.shape)
    mechanism = dataclasses.replace(planned.mechanism, preparation=(), before=())
    # Children of a key: with a seed of its own the run would share its noise with a shadow model.
    began, keys = time.time(), jax.random.split(jax.random.key(0), count)
    for number in range(count):
        # Pairs of models share the attacked rows out, so that each row is in half of all models.
        half = (
            draw.permutation(2 * size)[:size]
            if number % 2 == 0
            else np.flatnonzero(~joined[number - 1])
        )
        joined[number, half] = True
        rows = jax.tree.map(np.array, dataset.train)
        for whole, attacked in zip(rows, both, strict=True):
            whole[places] = attacked[half]
        algorithm = planned.algorithm(mechanism, rows)
        state = algorithm.init(rebuilt.first, keys[number])
        state, _ = dpjax.fit(algorithm, state, evaluate_every=mechanism.steps, progress=False)
        told[number] = odds(held(training.averaged(state.optimizer)), both)
        left = (time.time() - began) / (number + 1) * (count - number - 1)
        print(f"shadow model {number + 1} of {count}, {duration(left)} left", file=sys.stderr)
    target = np.asarray(odds(rebuilt.released, both))
    for name, online in (("LiRA, online", True), ("LiRA, offline", False)):
        scores = auditing.lira(target, told, joined, online=online)
        pair = scores[:size], scores[size:]
        yield attack_of(f"{name}, {count} shadow models", rebuilt, pair, parts, confidence)


def attack_of(name: str, rebuilt: Rebuilt, scores: Any, rows: Any, confidence: float) -> Attack:
    """An attack from its scores, and the rows of members and others."""
    found = auditing.audit_membership(*scores, delta=rebuilt.run.delta, confidence=confidence)
    return Attack(name, found, scores, (np.asarray(rows[0][1]), np.asarray(rows[1][1])))


def log_odds(model: Any, params: Any, rows: Any) -> jax.Array:
    """How much likelier the model holds the label of each row than all others, in logarithms."""

    def one(row: Any) -> jax.Array:
        x, y = row
        logits = model.apply({"params": params}, x)
        rest = jnp.where(jnp.arange(logits.size) == y, -jnp.inf, logits)
        return logits[y] - jax.nn.logsumexp(rest)

    return jax.lax.map(one, rows, batch_size=500)


def written(lines: Sequence[Line], attacks: Sequence[Attack], run: SavedRun) -> Iterator[str]:
    """The parts of the page: bounds beside claims, and the curve of each attack."""
    yield f'<h1>Audit of {escape(run.path.name)}</h1>\n<p class="badge private">{PRIVATE}</p>'
    bounds = {
        line.audit: f"epsilon above {three_digits(line.bound, downwards)}, claimed "
        f"{three_digits(line.claimed)}; {line.measured}"
        for line in lines
    }
    yield page.section(
        "<h3>Lower bounds</h3><p>Each beside what is claimed.</p>", page.table(bounds)
    )
    if attacks:
        note = (
            "<h3>Attacks on the released model</h3><p>Members found, by the share of other rows "
            "that are taken for members. Grey: guessing. Blue: the most that the claim allows.</p>"
        )
        yield page.section(note, drawn(attacks, run), tag="figure")
    for attack in attacks:
        note = f"<h3>{escape(attack.name)}</h3><p>AUROC of each class.</p>"
        yield page.section(note, page.table(attack.by_class()))


def drawn(attacks: Sequence[Attack], run: SavedRun) -> str:
    """Curves of true and false positives on logarithmic axes, as SVG."""
    with style.style():
        figure = style.canvas(style.WIDTH, 3.6)
        axes = style.panel(figure, "others taken for members", "members found")
        rates = np.geomspace(1e-4, 1, 200)
        axes.plot(rates, rates, color=style.PALETTE["muted"], linewidth=0.8)
        most = np.exp(min(run.epsilon, 50)) * rates + run.delta
        axes.plot(rates, np.minimum(most, 1), color=style.PALETTE["blue"], linewidth=0.8)
        for attack, color in zip(attacks, style.SERIES[1:], strict=False):
            members, others = (np.sort(x) for x in attack.scores)
            at = np.unique(np.concatenate(attack.scores))
            true, false = (1 - np.searchsorted(x, at) / len(x) for x in (members, others))
            axes.plot(false, true, color=style.PALETTE[color], label=attack.name)
        axes.set(xscale="log", yscale="log", xlim=(5e-4, 1), ylim=(5e-4, 1.1))
        style.legend(axes)
        return style.svg(figure, "attacks", "Members found by the rate of false positives.")


def conclude(lines: Sequence[Line], seconds: float) -> None:
    """Prints the verdict; ends the process with status 1 if an audit refutes its claim."""
    print(f"{seconds:.0f} s on {jax.devices()[0].device_kind}")
    if broken := [line.audit for line in lines if line.refutes]:
        sys.exit(f"A LOWER BOUND EXCEEDS ITS CLAIM: {'; '.join(broken)}")
    if above := [line.audit for line in lines if line.bound > line.claimed]:
        print(f"Above the claim, and no verdict: {'; '.join(above)}. It is {ASSUMED}.")
    print("No audit contradicts its claim. An audit can refute a claim, never prove one.")
