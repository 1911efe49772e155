# SPDX-License-Identifier: Apache-2.0
"""Participation: the sets of steps in which one example may take part.

A sampler promises one, and the sensitivity of a strategy is computed for it. At each of its steps
an example contributes any gradient within the clipping bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpjax import checks


@dataclass(frozen=True, kw_only=True)
class Participation:
    """The steps of one example: how far apart, how many at most, and whether evenly spaced.

    Attributes:
      separation: Any two steps of one example differ by at least this many; 1 allows all.
      most: How many steps one example has at most in the run; None: as many as fit.
      even: Whether any two neighbouring steps differ by exactly ``separation``. Such fixed cycles
        are a subset of what ``even=False`` allows, so a sensitivity for the latter holds too.

    Example:
      >>> Participation(separation=100, most=10).within(steps=1_000)
      10
    """

    separation: int = 1
    most: int | None = None
    even: bool = False

    def __post_init__(self) -> None:
        call = "strategies.Participation"
        object.__setattr__(self, "separation", checks.whole(call, "separation", self.separation))
        object.__setattr__(self, "most", checks.whole_or_none(call, "most", self.most))

    def within(self, steps: int) -> int:
        """The largest number of steps that one example can have in a run of ``steps`` steps."""
        fitting = -(-steps // self.separation)
        return fitting if self.most is None else min(self.most, fitting)

    @classmethod
    def or_once(cls, call: str, given: Participation | None) -> Participation:
        """The participation that was given to a strategy; by default `once`."""
        if given is None:
            return once()
        hint = "Write dpjax.strategies.apart(100)."
        return checks.instance(call, "participation", given, cls, hint)


def once() -> Participation:
    """One example takes part in one step: a run of a single epoch, in any order.

    Example:
      >>> once()
      Participation(separation=1, most=1, even=False)
    """
    return Participation(most=1)


def apart(separation: int, most: int | None = None) -> Participation:
    """Any two steps of one example are at least ``separation`` apart; it has ``most`` at most.

    Example:
      >>> apart(100, most=10).within(steps=250)
      3
    """
    return Participation(separation=separation, most=most)


def cycles(separation: int, most: int | None = None) -> Participation:
    """One example takes part in every ``separation``-th step: ``most`` epochs in one fixed order.

    Example:
      >>> cycles(100, most=10).within(steps=1_000)
      10
    """
    return Participation(separation=separation, most=most, even=True)
