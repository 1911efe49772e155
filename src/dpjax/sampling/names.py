# SPDX-License-Identifier: Apache-2.0
"""Samplers by their names, for flags: samplers built only from sizes, or a cycle."""

from __future__ import annotations

from typing import Any

from dpjax import checks
from dpjax.sampling.allocation import random_allocation
from dpjax.sampling.cycles import balls_in_bins, cyclic_poisson
from dpjax.sampling.epochs import shuffled
from dpjax.sampling.independent import fixed, full, poisson
from dpjax.types import Sampler

_BY_SIZE = {
    "poisson": poisson,
    "full": lambda examples, batch_size: full(examples),
    "fixed": fixed,
    "shuffled": shuffled,
    "random_allocation": lambda examples, size: random_allocation(examples, int(examples // size)),
    "balls_in_bins": balls_in_bins,
    "cyclic_poisson": cyclic_poisson,
}


def by_name(name: str, examples: int, batch_size: float, **options: Any) -> Sampler:
    """Builds the sampler of this name; ``options`` is the ``cycle`` of `cyclic_poisson`.

    `random_allocation` has ``examples // batch_size`` batches, so theirs is at least that size.

    Example:
      >>> by_name("fixed", 100, 10).claim
      'uniform batches of a fixed size; proved for replace-one neighbours (RDP)'
    """
    hint = "A curriculum and scored need more than sizes: call them."
    checks.one_of("sampling.by_name", "name", name, _BY_SIZE, hint)
    return _BY_SIZE[name](examples, batch_size, **options)
