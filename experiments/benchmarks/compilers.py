# SPDX-License-Identifier: Apache-2.0
"""Compilers of devices that are not there, in a Python of their own, and files of their plans.

A plan takes minutes, so a file of plans is written after each one and continued later.  Each plan
has a process: a compiler keeps the memory that it took, and an abort of one ends that plan alone.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import reporting
import workers

ROOT = pathlib.Path(__file__).parent.parent.parent
COMPILERS = ROOT / ".venv-compilers" / "bin" / "python"
# The compiler of a TPU looks for the host of a TPU unless these are set.
SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "JAX_PLATFORMS": "cpu",
}
ADVICE = """\
compilers of accelerators need an environment of their own. For TPUs:
  python -m venv .venv-compilers && .venv-compilers/bin/pip install . 'jax[tpu]'
for GPUs: . 'jax[cuda12]' in the last command; elsewhere: --compiler_python=PATH."""

Plan = dict[str, Any]


def answer(
    worker: str, task: Plan, on_host: bool, python: str, seconds: float | None = None, **more: str
) -> Plan:
    """What a worker's compiler plans for a task, or why there is no plan.

    Args:
      worker: The file of the worker.
      task: The plan that the worker makes.
      on_host: Whether this Python compiles, for the CPU, and not the one that has the compilers.
      python: The Python that has the compilers.
      seconds: Gives the plan up after this time.
      more: Further environment variables of the worker.
    """
    chosen = sys.executable if on_host else python
    if not pathlib.Path(chosen).exists():
        return {"refused": f"there is no {chosen}"}
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    process = workers.Worker(chosen, worker, **{**SETTINGS, "PYTHONPATH": path, **more})
    found = process.ask(task, seconds)
    process.close()
    return found


def kept(out: str | None) -> Plan:
    """The report in a file; empty without one."""
    path = pathlib.Path(out) if out else None
    return json.loads(path.read_text()) if path and path.exists() else {}


def continued(
    report: Plan,
    tasks: Mapping[str, Plan],
    names: list[str] | None,
    out: str | None,
    plan: Callable[[Plan], Plan],
    show: Callable[[str, Plan], None],
) -> None:
    """Adds the plans that a report lacks, and writes and shows each.

    Args:
      report: Its ``"plans"`` are continued.
      tasks: All tasks, by name.
      names: The chosen names, or how they begin; None for all.
      out: The file of the report.
      plan: From a task to its plan.
      show: Prints a plan with its name.
    """
    plans, refused = report["plans"], False
    for name in reporting.chosen("plans", list(tasks), names):
        found = plans.get(name) or plan(tasks[name])
        show(name, found)
        if "refused" in found:
            refused = True
        elif name not in plans:
            plans[name] = found
            reporting.keep(report, out)
    if refused:
        print(ADVICE)
    # In the order of the tasks, however often the file was continued.
    report["plans"] = {name: plans[name] for name in tasks if name in plans}
    reporting.keep(report, out)
