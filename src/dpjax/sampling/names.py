# SPDX-License-Identifier: Apache-2.0
"""Samplers by their names: a privacy card has the name and the sizes of a sampler, not its draw."""

from __future__ import annotations

from dpjax.sampling.cycles import balls_in_bins, cyclic_poisson
from dpjax.sampling.epochs import shuffled
from dpjax.sampling.uniform import fixed, full, poisson
from dpjax.types import Sampler


def by_name(name: str, examples: int, batch_size: float, cycle: int | None = None) -> Sampler:
    """Builds a sampler by its name; all but `curriculum` and `scored` follow from their sizes.

    Example:
      >>> by_name("fixed", 100, 10).claim
      'uniform batches of a fixed size; proved for replace-one neighbours (RDP)'
    """
    if name == "full":
        return full(examples)
    if name == "cyclic_poisson" and cycle is not None:
        return cyclic_poisson(examples, batch_size, cycle=cycle)
    by_size = {
        "poisson": poisson,
        "fixed": fixed,
        "shuffled": shuffled,
        "balls_in_bins": balls_in_bins,
    }
    if name not in by_size:
        raise ValueError(
            f"sampling.by_name({name!r}): expected one of full, {', '.join(by_size)}, or "
            "cyclic_poisson with its cycle. A curriculum or scores cannot be restored from their "
            "name: build the sampler with sampling.curriculum or sampling.scored. To count an "
            "earlier run (training.earlier, a card), describe what it spent: "
            "Mechanism(before=(dpjax.mechanism.Spent(sampling=that sampler, "
            "runs=((multiplier, steps), ...)),))."
        )
    return by_size[name](examples, batch_size)
