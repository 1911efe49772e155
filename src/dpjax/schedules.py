# SPDX-License-Identifier: Apache-2.0
"""Noise schedules: the noise multiplier at each step, as Optax schedules.

Every schedule here is a table of values, one an epoch, that a step indexes. The table gives all
steps of an epoch one float32 value, compiled or not, and keeps accounting cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from dpjax import checks

__all__ = ["CURRICULA", "SHAPES", "curriculum", "table", "values"]


def table(multipliers: ArrayLike, steps_per_epoch: int = 1) -> optax.Schedule:
    """A schedule that indexes a table: ``F(step) = multipliers[step // steps_per_epoch]``.

    Steps after the last epoch have the last value, steps below 0 the first one. The schedule gives
    a float32 scalar, and may be traced, jitted and vmapped.

    Args:
      multipliers: ``[epochs]``, zero or more each.
      steps_per_epoch: How many steps share a value.

    Example:
      >>> schedule = table([3.0, 2.0, 1.0], steps_per_epoch=10)
      >>> [float(schedule(step)) for step in (0, 9, 10, 29, 1000)]
      [3.0, 3.0, 2.0, 1.0, 1.0]
    """
    entries = np.asarray(multipliers, np.float32)
    if entries.ndim != 1 or not entries.size or not np.all(entries >= 0):
        raise ValueError(
            f"schedules.table(multipliers={multipliers}): expected a non-empty list of numbers, "
            "none negative."
        )
    hint = "It is round(examples / batch_size), or 1 for a value a step."
    # A step is an int32, so it cannot be divided by a larger number.
    most = 2**31 - 1
    divisor = checks.whole("schedules.table", "steps_per_epoch", steps_per_epoch, hint, most=most)

    def schedule(step: ArrayLike) -> Float[Array, "..."]:
        epoch = jnp.asarray(step) // divisor
        # A step may be given as a float, which cannot index.
        index = jnp.clip(epoch, 0, entries.size - 1).astype(jnp.int32)
        return jnp.asarray(entries)[index]

    return schedule


def first_steps(runs: Iterable[tuple[Any, int]], steps: int) -> list[tuple[float, int]]:
    """The first steps of a plan, as pairs of a noise multiplier and a number of steps."""
    taken = []
    for multiplier, planned in runs:
        if steps > 0:
            taken.append((float(multiplier), min(steps, planned)))
        steps -= planned
    return taken


@dataclass(frozen=True)
class Planned:
    """A schedule as the table of its values at every planned step.

    A second evaluation could differ: compiled, in another dtype, or by what it closes over.
    """

    # Not compared: the table is what is accounted and run. A callable object may have no hash.
    schedule: optax.Schedule = field(compare=False)
    table: bytes
    """Float32."""

    @classmethod
    def of(cls, schedule: optax.Schedule, steps: int) -> Planned:
        """A schedule at this many steps; a plan that grows evaluates the function again, at all."""
        if isinstance(schedule, Planned):
            if steps <= schedule.values.size:
                return cls(schedule.schedule, schedule.values[:steps].tobytes())
            schedule = schedule.schedule
        return cls(schedule, values(schedule, steps).tobytes())

    def __repr__(self) -> str:
        ends = [f"{value:.4g}" for value in (*self.values[:1], *self.values[-1:])]
        return f"<schedule from {' to '.join(ends)}>"

    @property
    def values(self) -> Float[np.ndarray, " steps"]:
        """The value at each planned step."""
        return np.frombuffer(self.table, np.float32)

    def __call__(self, step: ArrayLike) -> Float[Array, "..."]:
        """The value at a step or at several steps; NaN beyond the plan."""
        step = jnp.asarray(step)
        # Steps outside the plan read the appended last entry.
        answers = jnp.asarray(np.append(self.values, np.float32(np.nan)))
        return answers[jnp.where((step >= 0) & (step < self.values.size), step, -1)]


def runs_of(multipliers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Run-length encodes numbers or rows: the value and the length of each run, in order."""
    # This compares and does not subtract, since infinity minus infinity is NaN.
    changes = multipliers[1:] != multipliers[:-1]
    if changes.ndim > 1:
        changes = changes.any(axis=1)
    starts = np.flatnonzero(np.append(True, changes)[: len(multipliers)])
    return multipliers[starts], np.diff(starts, append=len(multipliers))


def values(schedule: optax.Schedule, steps: int) -> Float[np.ndarray, " steps"]:
    """The values of a schedule, called with a traced step, at steps 0 to ``steps - 1``.

    Example:
      >>> values(CURRICULA["linear-down"](epochs=5), 401)[[0, 99, 100, 400]]
      array([5., 5., 4., 1.], dtype=float32)
    """

    def value(step: Array) -> Array:
        given = schedule(step)
        if np.shape(given):
            raise TypeError(
                f"schedules.values: the schedule returned shape {np.shape(given)}; expected one "
                "number at each step, as schedules.table(values) gives."
            )
        return jnp.asarray(given, jnp.float32)

    try:
        # Steps evaluate it in int32 and float32 too; another width may round differently.
        return np.asarray(jax.vmap(value)(jnp.arange(steps, dtype=jnp.int32)))
    except jax.errors.JAXTypeError as error:
        raise TypeError(
            "schedules.values: the schedule needs the step as a Python number, but the step is "
            "traced. Write jnp.where(step < 5, 2.0, 1.0), an Optax schedule or schedules.table."
        ) from error


def times(value: float | optax.Schedule, factor: float) -> Any:
    """A number or a schedule, multiplied by a factor."""
    if not callable(value):
        return value * factor
    return lambda step: value(step) * factor


def _linear(t: np.ndarray, epochs: int) -> np.ndarray:
    """``t / (T-1)``."""
    return t / max(epochs - 1, 1)


def _exponential(t: np.ndarray, epochs: int) -> np.ndarray:
    """``(1 - e^-t) / (1 - e^-(T-1))``: most of the change happens in the first epochs."""
    return np.expm1(-t) / np.expm1(-max(epochs - 1.0, 1.0))


def _explosive(t: np.ndarray, epochs: int) -> np.ndarray:
    """``(e^t - 1) / (e^(T-1) - 1)``: `_exponential` reversed."""
    # Computed as the reversal, because e^t overflows after 709 epochs.
    return 1 - _exponential(max(epochs - 1, 1) - t, epochs)


SHAPES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "linear": _linear,
    "quadratic": lambda t, epochs: _linear(t, epochs) ** 2,
    "exponential": _exponential,
    "explosive": _explosive,
    # The paper divides by log(T+1) and not by log(T), so it ends below 1.
    "logarithmic": lambda t, epochs: np.log1p(t) / np.log(epochs + 1),
    # Five plateaus; their lengths differ by 1 unless 5 divides T.
    "piecewise": lambda t, epochs: (5 * t.astype(np.int64)) // epochs / 4,
}


def curriculum(
    shape: str, start: float, stop: float, *, epochs: int, steps_per_epoch: int
) -> optax.Schedule:
    """Moves from ``start`` to ``stop`` along a shape s: $F(t) = start + (stop - start) s(t)$.

    Args:
      shape: A name in `SHAPES`; s(0) = 0, and s(epochs - 1) = 1 except as below.
      start: Multiplier of the first epoch.
      stop: Multiplier of the last epoch, if s is 1 there.
      epochs: T; epochs are counted t = 0 .. T-1, and the last value is held afterwards.
      steps_per_epoch: Steps that share a value; 1, with ``epochs`` the number of steps, changes
        it every step.

    One epoch has ``start``. The last epoch of "logarithmic" stays short of ``stop``, and so does
    that of "piecewise" with 2, 3 and 4 epochs: at 1/2, 3/4 and 3/4 of the way.

    Example:
      >>> schedule = curriculum("linear", 2.0, 1.0, epochs=3, steps_per_epoch=10)
      >>> [float(schedule(step)) for step in (0, 10, 20)]
      [2.0, 1.5, 1.0]
    """
    call = "schedules.curriculum"
    checks.one_of(call, "shape", shape, SHAPES)
    epochs = checks.whole(call, "epochs", epochs, "It is how many values the schedule has.")
    # The exponential shapes lose digits in float32, so they are computed in float64 on the host.
    t = np.arange(epochs, dtype=np.float64)
    multipliers = start + (stop - start) * SHAPES[shape](t, epochs)
    return table(multipliers, steps_per_epoch)


@dataclass(frozen=True)
class Curriculum:
    """Builds the schedule of a named curriculum; the defaults are the paper's run."""

    shape: str
    first: str
    """Where it starts, ``"high"`` or ``"low"``."""

    def __call__(
        self, *, epochs: int = 20, steps_per_epoch: int = 100, high: float = 5.0, low: float = 1.0
    ) -> optax.Schedule:
        """The schedule between ``high``, its largest multiplier, and ``low``, its smallest."""
        ends = [low, high]
        if self.first == "high":
            ends.reverse()
        return curriculum(self.shape, *ends, epochs=epochs, steps_per_epoch=steps_per_epoch)


CURRICULA: dict[str, Curriculum] = {
    "exponential-down": Curriculum("exponential", "high"),
    "exponential-up": Curriculum("explosive", "low"),
    "piecewise-down": Curriculum("piecewise", "high"),
    "piecewise-up": Curriculum("piecewise", "low"),
    "linear-down": Curriculum("linear", "high"),
    "linear-up": Curriculum("linear", "low"),
    "quadratic-down": Curriculum("quadratic", "high"),
    "quadratic-up": Curriculum("quadratic", "low"),
    "logarithmic-up": Curriculum("logarithmic", "low"),
}
r"""The curricula of table 1 of the paper, by the names that a command line uses.

With H and L the largest and the smallest multiplier and T the number of epochs, epoch t has

| name | multiplier |
|---|---|
| exponential-down | $(H-c) e^{-t} + c$ with $c = (L - H e^{-(T-1)}) / (1 - e^{-(T-1)})$ |
| exponential-up | $(L-a) e^t + a$ with $a = (L e^{T-1} - H) / (e^{T-1} - 1)$ |
| piecewise-down, -up | $H - (H-L) p_t$, $L + (H-L) p_t$ with $p_t = \lfloor 5t/T \rfloor / 4$ |
| linear-down, -up | $H - (H-L) \, t/(T-1)$, $L + (H-L) \, t/(T-1)$ |
| quadratic-down, -up | $H - (H-L) (t/(T-1))^2$, $L + (H-L) (t/(T-1))^2$ |
| logarithmic-up | $L + (H-L) \log(t+1) / \log(T+1)$, which ends below H |

References:
  An, Shi, "Differentially private stochastic gradient descent with curricula", 2021, table 1.
"""
