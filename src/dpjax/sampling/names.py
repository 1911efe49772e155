# SPDX-License-Identifier: Apache-2.0
"""Samplers by their names: a privacy card has the name and the facts of a sampler, not its draw.

A new sampler has one file, which states its draw, its event and its facts, and one row here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpjax.sampling.cycles import balls_in_bins, cyclic_poisson
from dpjax.sampling.epochs import curriculum, shuffled
from dpjax.sampling.scored import scored
from dpjax.sampling.sizes import checked_count
from dpjax.sampling.uniform import fixed, full, poisson
from dpjax.types import Draw, Key, Sampler


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
    if name not in _SAMPLERS:
        raise ValueError(
            f"sampling.by_name({name!r}): expected one of {', '.join(_SAMPLERS)}. Count a run with "
            "a sampler of your own by before=[mechanism.Spent(sampling=that sampler, ...)]."
        )
    return _SAMPLERS[name](examples, batch_size, **facts)


def _full(examples: int, batch_size: float) -> Sampler:
    del batch_size
    return full(examples)


def _curriculum(examples: int, batch_size: float, *, public: bool) -> Sampler:
    size = checked_count("by_name", "batch_size", batch_size)
    return dataclasses.replace(
        curriculum(np.arange(examples), size, public=public), draw=_not_on_a_card
    )


def _scored(examples: int, batch_size: float, *, rates: Sequence[tuple[float, int]]) -> Sampler:
    # One bin with the largest rate of each row: the event counts no other rate.
    bins, steps = np.zeros(examples, int), rates[0][1]
    table = [[rate] for rate, _ in rates]
    sampler = scored(bins, table, steps_per_row=steps, batch_size=batch_size)
    return dataclasses.replace(sampler, draw=_not_on_a_card)


def _not_on_a_card(key: Key, step: Any) -> Draw:
    del key, step
    raise ValueError(
        "sampling.by_name: a sampler from a privacy card is for accounting alone; a card has no "
        "order and no bins to draw from."
    )


_SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "poisson": poisson,
    "full": _full,
    "fixed": fixed,
    "shuffled": shuffled,
    "curriculum": _curriculum,
    "cyclic_poisson": cyclic_poisson,
    "balls_in_bins": balls_in_bins,
    "scored": _scored,
}
"""From the name on a card to a function ``(examples, batch_size, **facts) -> Sampler``."""
