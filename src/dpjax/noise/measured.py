# SPDX-License-Identifier: Apache-2.0
"""A hook that measures chains: it records what meets the noise of a link, and can exchange it.

`dpjax.testing` alone sets it, to compare what a chain releases with and without an example. Nothing
is sealed meanwhile, since one noise meets two sums on purpose. So no code that releases a result
may set it: two such releases would tell a sum without noise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from dpjax import trees
from dpjax.types import NoiseMultiplier, PyTree


class Measurement(NamedTuple):
    """What the noise of one step of a link meets."""

    total: PyTree
    deviations: list[Any]
    """The standard deviation of the noise on the sum, for each of its leaves."""
    noise_multiplier: NoiseMultiplier
    """The multiplier that is accounted, as the link received it."""
    below: Any = None
    """The count that an adapted bound follows."""
    strategy: Any = None
    """How the noise is correlated over the steps; None for white noise."""


# The steps so far, and what meets the noise of the next steps instead; None while nothing is
# measured. A context variable: another thread may train at the same time.
_measured: ContextVar[tuple[list[Measurement], Iterator[Measurement]] | None] = ContextVar(
    "dpjax_measured", default=None
)


@contextlib.contextmanager
def measured(instead: Sequence[Measurement] = ()) -> Iterator[list[Measurement]]:
    """Collects what meets the noise of links, instead of sealing what they release.

    Args:
      instead: What meets the noise of the first steps, in the place of the links' own sums.
    """
    found: list[Measurement] = []
    token = _measured.set((found, iter(instead)))
    try:
        yield found
    finally:
        _measured.reset(token)


def is_measured() -> bool:
    """Whether links are measured now."""
    return _measured.get() is not None


def unless_measured(key: Any, step: Any, own: Measurement) -> Measurement:
    """What meets the noise of a link: its own sum, or what `measured` exchanges it for."""
    collecting = _measured.get()
    if collecting is None or trees.traced((key, step, *own[:-1])):
        return own
    found, instead = collecting
    found.append(own)
    return next(instead, own)
