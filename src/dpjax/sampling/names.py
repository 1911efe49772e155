# SPDX-License-Identifier: Apache-2.0
"""Samplers by their names: a privacy card has the name and the facts of a sampler, not its draw."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dpjax.sampling.cycles import balls_in_bins, cyclic_poisson
from dpjax.sampling.epochs import curriculum, shuffled
from dpjax.sampling.scored import scored
from dpjax.sampling.sizes import checked_count
from dpjax.sampling.uniform import fixed, full, poisson
from dpjax.types import Draw, Key, Sampler

_BY_SIZE = {
    "poisson": poisson,
    "fixed": fixed,
    "shuffled": shuffled,
    "balls_in_bins": balls_in_bins,
}


def by_name(name: str, examples: int, batch_size: float, **facts: Any) -> Sampler:
    """Builds a sampler from what a privacy card says of it.

    A card has neither the order of a `curriculum` nor the bins of `scored`. From a card, these two
    cost what the run cost, and refuse to draw.

    Args:
      name: The name of the function in `dpjax.sampling`.
      examples: The number of examples in the data set.
      batch_size: The expected number of examples a step.
      facts: `Sampler.facts`: ``cycle`` of `cyclic_poisson`, ``public`` of `curriculum`, ``rates``
        of `scored`.

    Example:
      >>> by_name("fixed", 100, 10).claim
      'uniform batches of a fixed size; proved for replace-one neighbours (RDP)'
    """
    match name, facts:
        case "full", _ if not facts:
            return full(examples)
        case "cyclic_poisson", {"cycle": cycle}:
            return cyclic_poisson(examples, batch_size, cycle=cycle)
        case "curriculum", {"public": public}:
            size = checked_count("by_name", "batch_size", batch_size)
            found = curriculum(np.arange(examples), size, public=public)
            return dataclasses.replace(found, draw=_not_on_a_card)
        case "scored", {"rates": [[_, steps], *_] as rows} if all(n == steps for _, n in rows):
            # One bin with the largest rate of each row: the event counts no other rate.
            bins, rates = np.zeros(examples, int), [[rate] for rate, _ in rows]
            found = scored(bins, rates, steps_per_row=steps, batch_size=batch_size)
            return dataclasses.replace(found, draw=_not_on_a_card)
    if name not in _BY_SIZE or facts:
        raise ValueError(
            f"sampling.by_name({name!r}, {facts}): expected one of full, {', '.join(_BY_SIZE)}, "
            "cyclic_poisson with its cycle, curriculum with public=, or scored with its rates. "
            "Usually the sampler is one of your own, or the facts of its card were left out. To "
            "count an earlier run (training.earlier, a card) with your own sampler, describe what "
            "it spent: Mechanism(before=(dpjax.mechanism.Spent(sampling=that sampler, "
            "runs=((multiplier, steps), ...)),))."
        )
    return _BY_SIZE[name](examples, batch_size)


def _not_on_a_card(key: Key, step: Any) -> Draw:
    del key, step
    raise ValueError(
        "sampling.by_name: this sampler was built from a privacy card, to be accounted; it cannot "
        "draw. A card has neither the order of a curriculum nor the bins of scores. Usually the "
        "sampler of an earlier run was given to a new one: build that with sampling.curriculum or "
        "sampling.scored."
    )
