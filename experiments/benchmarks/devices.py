# SPDX-License-Identifier: Apache-2.0
"""Time, memory and agreement of a private step on the device that JAX finds, beside its plan.

  result    none yet: no accelerator was here
  hardware  one GPU or TPU of the machine; on a CPU it runs too, and shows that it runs
  command   make bench BENCH=devices ARGS="--out experiments/results/devices.json"
  figures   the printed table; plans come from experiments/results/plans.json

Each workload (`workloads`) is compiled as a plain step, a plain step with noise, dpjax's engines
and jax_privacy, if it is installed. The steps take turns in random order. "away" is the largest
difference between the clipped sum on the device and on the CPU of the machine, in bounds, and
"norms" that of a norm, relative to it: a matrix unit that rounds shows here. A step that fails,
such as for lack of memory, says so in its row, and the others are measured.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import compilers
import jax
import plans
import reporting
import steps
from absl import flags
from common import markdown
from contestants import Contestant, Refused, compiled
from plans_cases import BOUND, gradient_of
from workloads import WORKLOADS, problem

import dpjax
from dpjax import clipping

# What JAX calls the devices that have plans.
PLANNED = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "NVIDIA H100": "h100"}


def planned(plan_report: dict[str, Any], kind: str, model: str, step: str) -> dict[str, Any]:
    """The plan of a step for this kind of device; empty if there is none."""
    # "TPU v5 lite" begins as "TPU v5" does, so the longest name decides.
    names = sorted((name for name in PLANNED if kind.startswith(name)), key=len)
    return plan_report.get("plans", {}).get(
        f"{PLANNED[names[-1]] if names else kind}: {model}: {step}", {}
    )


def agreement(loss: Any, params: Any, batch: Any) -> dict[str, float]:
    """How far the clipped sum on the default device is from that on the CPU."""

    def found(device: Any) -> Any:
        clipped = jax.jit(dpjax.clipped_grad(loss, clipping.flat(BOUND)))
        with jax.default_device(device):
            result = clipped(*jax.device_put((params, batch), device))
        return jax.device_get((result.value, result.norms))

    (value, norms), (want, lengths) = found(jax.devices()[0]), found(jax.devices("cpu")[0])
    apart = jax.tree.map(lambda a, b: float(abs(a - b).max()), value, want)
    return {
        "away": max(jax.tree.leaves(apart)) / BOUND,
        "norms": float((abs(norms - lengths) / lengths).max()),
    }


def measure(
    name: str, chosen: list[str], batch_size: int, rounds: int, seconds: float
) -> dict[str, Any]:
    """The steps of one workload, in turns."""
    loss, params, batch = problem(WORKLOADS[name]._replace(batch_size=batch_size))
    there = [s for s in chosen if s != "jax_privacy" or importlib.util.find_spec(s)]
    makes = {
        step: functools.partial(
            refusing, compiled, *gradient_of(step, loss, batch_size), params, batch
        )
        for step in there
    }
    contestants, figures = steps.start(makes)
    steps.take_turns(contestants, figures, rounds, seconds)
    _close(contestants)
    for step in contestants:
        figures[step]["median_ms"] = statistics.median(figures[step]["rounds_ms"])
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "batch_size": batch_size,
        "steps": figures,
        # Of the process up to here, all steps together.
        "peak_bytes": stats.get("peak_bytes_in_use"),
        **agreement(loss, params, batch),
    }


def refusing(make: Callable[..., Contestant], *arguments: Any) -> Contestant:
    """A contestant whose first step may fail without the others, such as for lack of memory."""
    made = make(*arguments)

    def run(count: int) -> float:
        try:
            return made.run(count)
        except jax.errors.JaxRuntimeError as error:
            raise Refused(str(error).splitlines()[0][:100]) from error

    return made._replace(run=run)


def _close(contestants: dict[str, Contestant]) -> None:
    for name, contestant in contestants.items():
        if not contestant.sound():
            raise RuntimeError(f"devices: {name} ran into NaN or infinity; its times are void.")
        contestant.close()


def table(report: dict[str, Any], plan_report: dict[str, Any]) -> str:
    """Measurements beside plans, as a table in Markdown."""
    rows = []
    for model, found in report["models"].items():
        plain = found["steps"]["plain"].get("median_ms", math.nan)
        for step, figure in found["steps"].items():
            if "refused" in figure:
                rows.append(f"| {model} | {step} | {figure['refused']} | | | | |")
                continue
            plan = planned(plan_report, report["kind"], model, step)
            expected = plan.get("expected_ms", plan.get("roofline_ms"))
            held = figure["planned_bytes"]
            cells = [
                f"{figure['median_ms']:.3f} ({figure['median_ms'] / plain:.2f})",
                "-" if expected is None else f"{expected:.3f}",
                "-" if held is None else f"{held / 2**20:,.1f}",
                *(f"{found[key]:.1e}" if step == "auto" else "" for key in ("away", "norms")),
            ]
            rows.append(markdown.line(model, step, *cells))
    head = "| model | step | measured ms | planned ms | temporaries, MiB | away | norms |"
    return markdown.table(head, rows)


def main(asked: Any) -> None:
    # A first step is no first step if its program is cached.
    jax.config.update("jax_enable_compilation_cache", False)
    path = compilers.ROOT / "experiments" / "results" / "plans.json"
    plan_report = json.loads(path.read_text()) if path.exists() else {}
    report = reporting.begin(("jax", "jaxlib", "optax"), smoke=asked.smoke)
    report |= {"kind": jax.devices()[0].device_kind, "models": {}}
    for name in asked.workloads or (["W4"] if asked.smoke else list(WORKLOADS)):
        size = 8 if asked.smoke else WORKLOADS[name].batch_size
        rounds = 2 if asked.smoke else asked.rounds
        chosen = reporting.chosen("steps", list(plans.STEPS), asked.steps, always=("plain",))
        report["models"][name] = measure(name, chosen, size, rounds, asked.seconds)
        reporting.keep(report, asked.out)
    print(table(report, plan_report))


if __name__ == "__main__":
    flags.DEFINE_list("workloads", None, "Which; by default all, in a smoke run W4.")
    flags.DEFINE_list("steps", None, "Which; by default all, plain always.")
    flags.DEFINE_float("seconds", 30.0, "After so long a step rests.", lower_bound=0.1)
    reporting.run(main, smoke="A batch of 8, two rounds", rounds=10)
