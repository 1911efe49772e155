# SPDX-License-Identifier: Apache-2.0
"""Audits a run: lower bounds on what an attacker can tell, beside the epsilon that it claims.

  result    the demo claims epsilon 3 and shows 0.87 to canaries, 0 to losses, and 0.665 of 0.671 in
            one step; a step of 27 algorithms shows 97 % of its claim (adapted 92 %, jl 80 %;
            banded noise 89 % and buffered 59 %, because a step is a part of what they hide)
  time      56 s for the demo, 698 s for all algorithms, on two CPU cores shared with other work
  command   python experiments/audit.py RUN [--out FOLDER]
            python experiments/audit.py --algorithms=all --out experiments/results

A RUN is a folder that `dpjax train` wrote.  Three audits: how far one row moves the first step
(white box); which canaries took part in a second training with the run's settings; and which rows
the released model was trained on, by their losses.  `audit.json` and `audit.png` are computed from
private data without noise and must not be published.  `--algorithms` audits small runs of every
algorithm instead; its figures are of artificial data.  The exit status is 1 if a lower bound
exceeds its claim.  An audit without a finding proves nothing.  Data are read from DPJAX_DATA_DIR.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags, logging
from common import audited_algorithms, audited_run

from dpjax import auditing
from dpjax.accounting.rounding import upwards
from dpjax.reports import style
from dpjax.reports.figure_output import png
from dpjax.reports.figures import PRIVATE

_ALGORITHMS = flags.DEFINE_string(
    "algorithms", None, "Audit the algorithms that have this in their name; all for every one."
)
_CANARIES = flags.DEFINE_integer("canaries", None, "Number of canaries; by default up to 1,000.")
_STEPS = flags.DEFINE_integer("steps", 200, "Most steps of the second training.", 1)
_PAIRS = flags.DEFINE_integer("pairs", 200, "Pairs of steps that measure the noise.", 1)
_OUT = flags.DEFINE_string("out", None, "Folder of the results; by default that of the run.")

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
            f"{self.audit:<40}{downwards(self.bound):>9}{upwards(self.claimed, '.3f'):>9}"
            f"{self.confidence:>8.1%}  {self.measured}"
        )


HEAD = f"{'audit':<40}{'epsilon >':>9}{'claimed':>9}{'':>8}  measured"


def downwards(value: float) -> str:
    """A lower bound in three digits after the point, none above what it is."""
    return f"{math.floor(value * 1000) / 1000:.3f}" if math.isfinite(value) else "inf"


def line_of_step(step: auditing.Separation, delta: float, name: str) -> Line:
    """The audit of a step: what it allows to tell of a row that is drawn."""
    middle = float(np.median(step.measured))
    words = f"mu {middle:.4f}, claimed {upwards(step.claimed, '.4f')}"
    bounds = step.epsilon(delta), step.claimed_epsilon(delta)
    refutes = step.refutes or bounds[0] > bounds[1]
    return Line(name, words, *bounds, step.confidence, refutes)


def audit_run(folder: pathlib.Path, out: pathlib.Path) -> list[Line]:
    """Audits the run in a folder, and writes figures and plot into another."""
    run = audited_run.rebuild(folder)
    delta, claimed = run.run.delta, min(run.run.epsilons.values())
    step = line_of_step(
        audited_run.step(run, _PAIRS.value, OF_A_STEP), delta, "one step, white box"
    )
    guessed = audited_run.canaries(run, _CANARIES.value, _STEPS.value, OF_A_RUN)
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
        f"{found.false_positives:.1%} of others"
    )
    bounds = found.epsilon, claimed, found.confidence
    third = Line("losses of the released model", words, *bounds, found.epsilon > claimed)
    lines = [step, second, third]
    facts = {"run": str(folder), "delta": delta, "publish": PRIVATE, "audits": rows(lines)}
    out.mkdir(parents=True, exist_ok=True)
    keep_private(out / "audit.json", (json.dumps(facts, indent=2) + "\n").encode())
    keep_private(out / "audit.png", draw(lines, found, scores, delta))
    return lines


def audit_algorithms(names: str, out: pathlib.Path | None) -> list[Line]:
    """Audits every algorithm whose name contains a text, and writes the figures if asked to."""
    lines, kept, started = [], {}, time.time()
    print(HEAD, flush=True)
    for name, found in audited_algorithms.audits("" if names == "all" else names):
        step = line_of_step(found.step, audited_algorithms.DELTA, f"{name}: step")
        words = f"{found.right} of {found.guesses} guesses right"
        bounds = found.run, found.claimed, OF_A_RUN
        run = Line(f"{name}: run", words, *bounds, found.run > found.claimed)
        lines += [step, run]
        kept[name] = {"step": rows([step])[0], "run": rows([run])[0]}
        print(f"{step}\n{run}", flush=True)
    if not lines:
        known = ", ".join(one.name for one in audited_algorithms.ALGORITHMS)
        raise app.UsageError(f"--algorithms={names}: expected all, or a part of: {known}.")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        facts = {
            "command": "python experiments/audit.py --algorithms=all --out experiments/results",
            "date": time.strftime("%Y-%m-%d"),
            "device": f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}",
            **{name: importlib.metadata.version(name) for name in ("jax", "optax")},
            "seconds": round(time.time() - started),
            "delta": audited_algorithms.DELTA,
            "rows": kept,
        }
        (out / "audits.json").write_text(json.dumps(facts, indent=2) + "\n")
    return lines


def rows(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Lines for JSON, which has no infinity."""
    said = [line._asdict() for line in lines]
    return [
        {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in row.items()}
        for row in said
    ]


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
            left.plot(*([line.bound], [place]), color=style.PALETTE["clay"], **style.DOTS)
            left.plot(*([line.claimed], [place]), color=style.PALETTE["blue"], **style.DOTS)
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
        right.set_xlabel("others guessed to be members")
        right.set_ylabel("members guessed")
        return png(figure, PRIVATE)


def keep_private(path: pathlib.Path, content: bytes) -> None:
    """Writes a file that its owner alone can read."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_bytes(content)


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # nothing is released, so public seeds need no warning
    started, out = time.time(), None if _OUT.value is None else pathlib.Path(_OUT.value)
    if (len(argv) == 2) == (_ALGORITHMS.value is not None) or len(argv) > 2:
        raise app.UsageError("expected one run, audit.py runs/demo, or --algorithms=all.")
    if _ALGORITHMS.value is not None:
        lines = audit_algorithms(_ALGORITHMS.value, out)
        print("Artificial data: these figures may be published.")
    else:
        folder = pathlib.Path(argv[1])
        out = out or folder
        lines = audit_run(folder, out)
        print("\n".join(map(str, (HEAD, *lines))))
        print(f"Wrote {out / 'audit.json'} and {out / 'audit.png'}.")
        print(f"The bounds and what was measured are {PRIVATE}. The claims may be published.")
    print(f"{time.time() - started:.0f} s on {jax.devices()[0].device_kind}")
    if broken := [line.audit for line in lines if line.refutes]:
        sys.exit(f"A LOWER BOUND EXCEEDS ITS CLAIM: {'; '.join(broken)}")
    print("No lower bound exceeds its claim, which proves nothing.")


if __name__ == "__main__":
    app.run(main)
