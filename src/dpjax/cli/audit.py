# SPDX-License-Identifier: Apache-2.0
"""Three audits of a run that `dpjax train` left in a folder, as lines beside its claims."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging

import dpjax
from dpjax import auditing, losses
from dpjax._files import replace
from dpjax.accounting.rounding import downwards, three_digits, upwards
from dpjax.cli import compilation_cache
from dpjax.cli.flag_checks import require_matplotlib
from dpjax.cli.flag_sets.train import FLAGS
from dpjax.cli.train import inputs
from dpjax.cli.train.command import Planned, plan
from dpjax.cli.train.evaluation import first_parameters
from dpjax.cli.train.run_files import MOMENTS
from dpjax.mechanism.card import strict
from dpjax.reports import style
from dpjax.reports.figures import PRIVATE
from dpjax.reports.load_run import SavedRun, read
from dpjax.training import released_params

# A step is audited so exactly that a confidence of 95 % would refute 1 of 20 sound mechanisms.
OF_A_STEP, OF_A_RUN = 0.999, 0.95
ASSUMED = "a bound only if train and test rows are of one distribution"
HEAD = f"{'audit':<40}{'epsilon >':>9}{'claimed':>9}{'':>8}  measured"

_MOST = 10_000  # rows whose losses are compared
_KNOWN = 2_000  # rows whose gradients the attacker subtracts


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
    started, folder = time.time(), pathlib.Path(argv[1])
    compilation_cache.switch_on()
    out = folder if given.out is None else pathlib.Path(given.out)
    try:
        out.mkdir(parents=True, exist_ok=True)  # before the audits, which take minutes
        lines = audit_run(given, rebuild(folder, given.data_dir), out)
    except (OSError, ValueError) as error:
        raise app.UsageError(f"{folder}: {error}") from error
    print("\n".join(map(str, (HEAD, *lines))))
    print(f"Wrote {out / 'audit.json'} and {out / 'audit.png'}.")
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
    """Audits a run, and writes numbers and plot into a folder."""
    delta, correlated = rebuilt.run.delta, rebuilt.planned.mechanism.noise is not None
    name = "first step of correlated noise" if correlated else "one step in which the row is drawn"
    step = line_of_step(audit_step(rebuilt, given.pairs, OF_A_STEP), delta, name)
    canaries = audit_canaries(rebuilt, given.canaries, given.steps, OF_A_RUN)
    guesses, scores = audit_losses(rebuilt, OF_A_RUN)
    words = (
        f"AUC {guesses.auc:.3f}, {guesses.true_positives:.1%} of members and "
        f"{guesses.false_positives:.1%} of others; {ASSUMED}"
    )
    bounds = guesses.epsilon, rebuilt.run.epsilon, guesses.confidence
    # Never a verdict: no coin decided which rows are for the test, and rows of another year have
    # other losses under a sound model too.
    lines = [step, canaries, Line("losses of the released model", words, *bounds, refutes=False)]
    audits = [line._asdict() for line in lines]
    facts = {"run": str(rebuilt.run.path), "delta": delta, "publish": PRIVATE, "audits": audits}
    replace(out / "audit.json", json.dumps(strict(facts), indent=2) + "\n")
    replace(out / "audit.png", draw(lines, guesses, scores, delta))
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
    options = {"canaries": count, "delta": delta, "confidence": confidence}
    bound = auditing.epsilon_lower_bound(right, guesses, **options)
    claimed = mechanism.epsilon_of(mechanism.multipliers[:steps], delta, planned.method)
    words = f"{right} of {guesses} guesses right, {count} canaries, {steps} steps"
    return Line("canaries in a second run", words, bound, claimed, confidence, bound > claimed)


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


def audit_losses(
    rebuilt: Rebuilt, confidence: float
) -> tuple[auditing.Membership, tuple[np.ndarray, np.ndarray]]:
    """Guesses training rows from the losses of the released parameters; and these scores."""
    dataset, loss = rebuilt.dataset, losses.of(rebuilt.planned.model, losses.cross_entropy)

    @jax.jit
    def scores(rows: Any) -> jax.Array:
        return jax.lax.map(lambda row: -loss(rebuilt.released, row), rows, batch_size=500)

    some = np.linspace(0, dataset.examples - 1, min(_MOST, dataset.examples)).astype(int)
    members = np.asarray(scores(jax.tree.map(jnp.asarray, dataset.rows(some))))
    others = np.asarray(scores(jax.tree.map(lambda x: jnp.asarray(x[:_MOST]), dataset.test)))
    delta = rebuilt.run.delta
    audit = auditing.audit_membership(members, others, delta=delta, confidence=confidence)
    return audit, (members, others)


def draw(
    lines: Sequence[Line], guesses: Any, scores: tuple[np.ndarray, np.ndarray], delta: float
) -> bytes:
    """Bounds beside claims, and the curve of the loss thresholds beside what its claim allows."""
    bound, claim = style.PALETTE["clay"], style.PALETTE["blue"]
    with style.style():
        figure = style.canvas(7.6, 3.1)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for place, line in enumerate(reversed(lines)):
            left.hlines(place, line.bound, line.claimed, style.PALETTE["rule"], linewidth=4)
            left.plot([line.bound], [place], color=bound, **style.DOTS)
            left.plot([line.claimed], [place], color=claim, **style.DOTS)
        left.set_yticks(range(len(lines)), [line.audit for line in reversed(lines)])
        left.set(xlim=(0, None), ylim=(-0.5, len(lines) - 0.5))
        left.set_xlabel("epsilon: lower bound (clay) and claim (blue)")
        members, others = (np.sort(losses) for losses in scores)
        at = np.unique(np.concatenate(scores))
        true, false = (1 - np.searchsorted(x, at) / len(x) for x in (members, others))
        right.plot(false, true, color=bound)
        most = np.exp(min(lines[-1].claimed, 50)) * np.linspace(0, 1, 200) + delta
        right.plot(np.linspace(0, 1, 200), np.minimum(most, 1), color=claim)
        right.plot(guesses.false_positives, guesses.true_positives, color="black", **style.DOTS)
        right.set_title(ASSUMED.replace(" train", "\ntrain"), fontsize="small")
        right.set(xlabel="others guessed to be members", ylabel="members guessed")
        return style.png(figure, PRIVATE)


def conclude(lines: Sequence[Line], seconds: float) -> None:
    """Prints the verdict; ends the process with status 1 if an audit refutes its claim."""
    print(f"{seconds:.0f} s on {jax.devices()[0].device_kind}")
    if broken := [line.audit for line in lines if line.refutes]:
        sys.exit(f"A LOWER BOUND EXCEEDS ITS CLAIM: {'; '.join(broken)}")
    if above := [line.audit for line in lines if line.bound > line.claimed]:
        print(f"Above the claim, and no verdict: {'; '.join(above)}. It is {ASSUMED}.")
    print("No audit contradicts its claim. An audit can refute a claim, never prove one.")
