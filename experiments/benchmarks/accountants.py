# SPDX-License-Identifier: Apache-2.0
"""One accountant, in a process of its own, so that it can be stopped when it takes too long.

  command   python -m experiments.benchmarks.accountants LIBRARY METHOD

Started by `accounting`, which asks in lines of JSON: ``{"prepare": true}``, so that imports are
not timed, and then tasks.  A task has runs (pairs of a noise multiplier and a number of
steps), a sampling rate and a delta, and wants the epsilon; with a ``target`` it has steps
instead of runs, and wants the noise multiplier.

Each library is used as its own documentation says: its default orders, grid and tolerances.
Nothing of a library is imported at the top of this file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from experiments.benchmarks import workers

Task = dict[str, Any]


def with_dpjax(method: str) -> Callable[[Task], float]:
    from dpjax import accounting

    def answer(task: Task) -> float:
        rate, delta = task["sampling_rate"], task["delta"]
        if "target" in task:

            def event(noise_multiplier: float) -> Any:
                return accounting.subsampled_gaussian(noise_multiplier, rate, task["steps"])

            return accounting.calibrate(event, task["target"], delta, method)
        runs = [accounting.subsampled_gaussian(z, rate, steps) for z, steps in task["runs"]]
        return accounting.epsilon(accounting.compose(*runs), delta, method)

    return answer


def with_dp_accounting(method: str) -> Callable[[Task], float]:
    import dp_accounting
    from dp_accounting import pld, rdp

    accountant = {"rdp": rdp.RdpAccountant, "pld": pld.PLDAccountant}[method]

    def run(noise_multiplier: float, rate: float, steps: int) -> Any:
        step = dp_accounting.GaussianDpEvent(noise_multiplier)
        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(rate, step), steps
        )

    def answer(task: Task) -> float:
        rate, delta = task["sampling_rate"], task["delta"]
        if "target" in task:
            return dp_accounting.calibrate_dp_mechanism(
                accountant, lambda z: run(z, rate, task["steps"]), task["target"], delta
            )
        runs = [run(z, rate, steps) for z, steps in task["runs"]]
        return accountant().compose(dp_accounting.ComposedDpEvent(runs)).get_epsilon(delta)

    return answer


def with_opacus(method: str) -> Callable[[Task], float]:
    from opacus import accountants
    from opacus.accountants.utils import get_noise_multiplier

    def answer(task: Task) -> float:
        rate, delta = task["sampling_rate"], task["delta"]
        if "target" in task:
            return get_noise_multiplier(
                target_epsilon=task["target"],
                target_delta=delta,
                sample_rate=rate,
                steps=task["steps"],
                accountant=method,
            )
        accountant = accountants.create_accountant(method)
        accountant.history = [(z, rate, steps) for z, steps in task["runs"]]
        return accountant.get_epsilon(delta)

    return answer


LIBRARIES = {"dpjax": with_dpjax, "dp-accounting": with_dp_accounting, "opacus": with_opacus}


def main() -> None:
    _, library, method = sys.argv
    ready: list[Callable[[Task], float]] = []

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        if "prepare" in question:
            ready.append(LIBRARIES[library](method))
            return {}
        started = time.perf_counter()
        answer = ready[0](question)
        return {"seconds": time.perf_counter() - started, "answer": float(answer)}

    workers.serve(handle)


if __name__ == "__main__":
    main()
