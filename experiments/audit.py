# SPDX-License-Identifier: Apache-2.0
"""Audits a small run of every algorithm that ships: lower bounds on epsilon beside the claims.

claim     no audit measures more than is claimed; one step shows nearly all of its claim
verdict   so it is, for 27 algorithms
time      13 minutes for all algorithms
hardware  two CPU cores shared with other work
command   python -m experiments.audit --algorithms=all --out experiments/results

Data are artificial, so figures may be published. The exit status is 1 if a lower bound exceeds its
claim. An audit without a finding proves nothing. `dpjax audit RUN` audits a run of `dpjax train`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import time

import jax
from absl import app, flags, logging

from dpjax.cli.audit import HEAD, OF_A_RUN, Line, conclude, line_of_step
from dpjax.mechanism.card import strict
from experiments import audited_algorithms
from experiments.common import runs

_ALGORITHMS = flags.DEFINE_string(
    "algorithms", "all", "Audit the algorithms that have this in their name; all for every one."
)


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
        kept[name] = {"step": strict(step._asdict()), "run": strict(run._asdict())}
        print(f"{step}\n{run}", flush=True)
    if not lines:
        known = ", ".join(one.name for one in audited_algorithms.ALGORITHMS)
        raise app.UsageError(f"--algorithms={names}: expected all, or a part of: {known}.")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        facts = {
            "command": "python -m experiments.audit --algorithms=all --out experiments/results",
            "date": time.strftime("%Y-%m-%d"),
            "device": f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}",
            **{name: importlib.metadata.version(name) for name in ("jax", "optax")},
            "seconds": round(time.time() - started),
            "delta": audited_algorithms.DELTA,
            "rows": kept,
        }
        (out / "audits.json").write_text(json.dumps(facts, indent=2) + "\n")
    return lines


def main(argv: list[str]) -> None:
    runs.only_flags(argv)
    logging.set_verbosity(logging.ERROR)  # nothing is released, so public seeds need no warning
    started, out = time.time(), None if runs.OUT.value is None else pathlib.Path(runs.OUT.value)
    lines = audit_algorithms(_ALGORITHMS.value, out)
    print("Artificial data: these figures may be published.")
    conclude(lines, time.time() - started)


if __name__ == "__main__":
    app.run(main)
