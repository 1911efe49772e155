# SPDX-License-Identifier: Apache-2.0
"""Three audits of a run, as lines beside its claims; `audited_run` computes them."""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags, logging

from dpjax import auditing
from dpjax._files import replace
from dpjax.accounting.rounding import downwards, upwards
from dpjax.cli import compilation_cache
from dpjax.cli.audit import audited_run
from dpjax.cli.flag_checks import require_matplotlib, writable_folder
from dpjax.mechanism.card import strict
from dpjax.reports import style
from dpjax.reports.figure_output import png
from dpjax.reports.figures import PRIVATE

# A step is audited so exactly that a confidence of 95 % would refute 1 of 20 sound mechanisms.
OF_A_STEP, OF_A_RUN = 0.999, 0.95


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
            f"{self.audit:<40}{downwards(self.bound, '.3f'):>9}{upwards(self.claimed, '.3f'):>9}"
            f"{self.confidence:>8.1%}  {self.measured}"
        )


ASSUMED = "a bound only if train and test rows are of one distribution"
HEAD = f"{'audit':<40}{'epsilon >':>9}{'claimed':>9}{'':>8}  measured"


def line_of_step(step: auditing.Separation, delta: float, name: str) -> Line:
    """The audit of a step: what it allows to tell of a row that is drawn."""
    middle = float(np.median(step.measured))
    words = f"mu {middle:.4f}, claimed {upwards(step.claimed, '.4f')}"
    bounds = step.epsilon(delta), step.claimed_epsilon(delta)
    refutes = step.refutes or bounds[0] > bounds[1]
    return Line(name, words, *bounds, step.confidence, refutes)


def audit_run(given: flags.FlagValues, folder: pathlib.Path, out: pathlib.Path) -> list[Line]:
    """Audits the run in a folder, and writes figures and plot into another."""
    run = audited_run.rebuild(folder, given.data_dir)
    # Before the audits, which take minutes.
    writable_folder(out, out)
    count = audited_run.number_of_canaries(run, given.canaries)
    if run.unseen:
        print(f"{folder}:{run.unseen}", flush=True)
    delta, claimed = run.run.delta, run.run.epsilon
    correlated = run.planned.mechanism.noise is not None
    name = "first step of correlated noise" if correlated else "one step in which the row is drawn"
    step = line_of_step(audited_run.step(run, given.pairs, OF_A_STEP), delta, name)
    guessed = audited_run.canaries(run, count, given.steps, OF_A_RUN)
    words = (
        f"{guessed.right} of {guessed.guesses} guesses right, {guessed.canaries} canaries, "
        f"{guessed.steps} steps"
    )
    refutes = guessed.epsilon > guessed.claimed
    bounds = guessed.epsilon, guessed.claimed, guessed.confidence
    second = Line("canaries in a second run", words, *bounds, refutes)
    found, scores = audited_run.membership(run, OF_A_RUN)
    words = (
        f"AUC {found.auc:.3f}, {found.true_positives:.1%} of members and "
        f"{found.false_positives:.1%} of others; {ASSUMED}"
    )
    bounds = found.epsilon, claimed, found.confidence
    # Never a verdict: no coin decided which rows are for the test, and a test part of another
    # year has other losses under a sound model too.
    third = Line("losses of the released model", words, *bounds, refutes=False)
    lines = [step, second, third]
    audits = [line._asdict() for line in lines]
    facts = {"run": str(folder), "delta": delta, "publish": PRIVATE, "audits": audits}
    replace(out / "audit.json", json.dumps(strict(facts), indent=2) + "\n")
    replace(out / "audit.png", draw(lines, found, scores, delta))
    return lines


def draw(
    lines: Sequence[Line],
    found: auditing.Membership,
    scores: tuple[np.ndarray, np.ndarray],
    delta: float,
) -> bytes:
    """Bounds beside claims, and the curve of the loss thresholds beside what its claim allows."""
    with style.style():
        figure = style.canvas(7.6, 3.1)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for place, line in enumerate(reversed(lines)):
            ends = [line.bound, line.claimed]
            left.plot(ends, [place, place], color=style.PALETTE["rule"], linewidth=4)
            left.plot([line.bound], [place], color=style.PALETTE["clay"], **style.DOTS)
            left.plot([line.claimed], [place], color=style.PALETTE["blue"], **style.DOTS)
        left.set_yticks(range(len(lines)), [line.audit for line in reversed(lines)])
        left.set_xlim(left=0)
        left.set_ylim(-0.5, len(lines) - 0.5)
        left.set_xlabel("epsilon: lower bound (clay) and claim (blue)")
        members, others = (np.sort(each) for each in scores)
        at = np.unique(np.concatenate(scores))
        true, false = (1 - np.searchsorted(x, at) / len(x) for x in (members, others))
        right.plot(false, true, color=style.PALETTE["clay"])
        most = np.exp(min(lines[-1].claimed, 50)) * np.linspace(0, 1, 200) + delta
        right.plot(np.linspace(0, 1, 200), np.minimum(most, 1), color=style.PALETTE["blue"])
        right.plot(found.false_positives, found.true_positives, color="black", **style.DOTS)
        right.set_title(ASSUMED.replace(" train", "\ntrain"), fontsize="small")
        right.set_xlabel("others guessed to be members")
        right.set_ylabel("members guessed")
        return png(figure, PRIVATE)


def conclude(lines: Sequence[Line], seconds: float) -> None:
    """Prints the verdict; ends the process with status 1 if an audit refutes its claim.

    Only audits in which the program itself decides who takes part refute.
    """
    print(f"{seconds:.0f} s on {jax.devices()[0].device_kind}")
    if broken := [line.audit for line in lines if line.refutes]:
        sys.exit(f"A LOWER BOUND EXCEEDS ITS CLAIM: {'; '.join(broken)}")
    if open_ := [line.audit for line in lines if line.bound > line.claimed]:
        print(
            f"Above the claim, and no verdict: {'; '.join(open_)}. Usually the test rows are of "
            "another distribution than the train rows. If they are of one, the claim is false."
        )
    print("No audit refutes its claim, which proves nothing.")


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
        lines = audit_run(given, folder, out)
    except ValueError as error:  # such as scores of a run that diverged
        raise app.UsageError(f"{folder}: {error}") from error
    print("\n".join(map(str, (HEAD, *lines))))
    print(f"Wrote {out / 'audit.json'} and {out / 'audit.png'}.")
    print(f"The bounds and what was measured are {PRIVATE}. The claims may be published.")
    conclude(lines, time.time() - started)
