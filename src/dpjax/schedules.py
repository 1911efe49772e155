# SPDX-License-Identifier: Apache-2.0
"""Noise curricula: how much noise at which step, as Optax schedules.

A curriculum walks from one multiplier to another along a *shape*, a curve from 0 to 1 over the
epochs; the nine named ones are six shapes, most in two directions. All are one thing: a table of
values, one an epoch, that a step looks up. So every step of an epoch gets the same float32,
compiled or not, and the accountant, reading the very table that the noise reads, pays for 20
distinct multipliers rather than 2,000.

A schedule is fixed before training and never sees the data. What it costs is the business of
`accounting`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

__all__ = [
    "CURRICULA",
    "SHAPES",
    "constant",
    "curriculum",
    "exponential_down",
    "exponential_up",
    "linear_down",
    "linear_up",
    "logarithmic_up",
    "piecewise_down",
    "piecewise_up",
    "quadratic_down",
    "quadratic_up",
    "table",
    "values",
]

Shape = Callable[[np.ndarray, int], np.ndarray]


def table(multipliers: ArrayLike, steps_per_epoch: int = 1) -> optax.Schedule:
    """A schedule that looks its value up: `F(step) = multipliers[step // steps_per_epoch]`.

    Args:
      multipliers: `[epochs]`, zero or more each.
      steps_per_epoch: how many steps share a value.

    Returns:
      A schedule, step -> float32 scalar; it may be traced, jitted and vmapped.

      | step | value |
      |---|---|
      | past the last epoch | the last value is held |
      | below 0 | the first value |

    Example:
      >>> schedule = table([3.0, 2.0, 1.0], steps_per_epoch=10)
      >>> [float(schedule(step)) for step in (0, 9, 10, 29, 1000)]
      [3.0, 3.0, 2.0, 1.0, 1.0]
    """
    entries = np.asarray(multipliers, np.float32)
    if entries.ndim != 1 or not entries.size or not np.all(entries >= 0):
        raise ValueError(
            "schedules.table: multipliers must be a non-empty list of numbers, none negative; "
            f"got {multipliers}. A schedule that falls below 0 usually runs past its last epoch."
        )
    if steps_per_epoch < 1 or steps_per_epoch != int(steps_per_epoch):
        raise ValueError(
            "schedules.table: steps_per_epoch must be a whole number, 1 or more; got "
            f"{steps_per_epoch}. It is round(examples / batch_size), or 1 for a value a step."
        )

    def schedule(step: ArrayLike) -> Float[Array, "..."]:
        epoch = jnp.asarray(step) // int(steps_per_epoch)
        return jnp.asarray(entries)[jnp.clip(epoch, 0, entries.size - 1).astype(jnp.int32)]

    return schedule


def constant(noise_multiplier: float) -> optax.Schedule:
    """The same multiplier at every step.

    Args:
      noise_multiplier: zero or more.

    Returns:
      A schedule, step -> float32 scalar.

    Example:
      >>> float(constant(1.5)(1000))
      1.5
    """
    return table([noise_multiplier])


def values(schedule: optax.Schedule, steps: int) -> Float[np.ndarray, "steps"]:
    """What a schedule yields at steps 0 to `steps - 1`: what the accountant must be told.

    Args:
      schedule: any Optax schedule that can be vmapped; the step that it is given is traced.
      steps: how many.

    Returns:
      The values, float32, exactly those that the noise will use if the schedule is a `table`.

    Example:
      >>> values(linear_down(epochs=5), 401)[[0, 99, 100, 400]]
      array([5., 5., 4., 1.], dtype=float32)
    """
    if steps == 0:
        return np.zeros(0, np.float32)

    def value(step: Array) -> Array:
        given = schedule(step)
        if given is None or np.shape(given):
            what = "None" if given is None else f"an array of shape {np.shape(given)}"
            raise TypeError(
                f"schedules.values: the schedule returned {what}; expected one number at each "
                "step. Usually a return is missing, or the values of all steps were returned: "
                "their schedule is schedules.table(values)."
            )
        return jnp.asarray(given, jnp.float32)

    try:
        return np.asarray(jax.vmap(value)(jnp.arange(steps, dtype=jnp.int32)))
    except jax.errors.JAXTypeError as error:
        raise TypeError(
            f"schedules.values: the schedule wants the step as a Python number "
            f"({type(error).__name__}), but one compiled program serves all steps, so the step is "
            "traced. Usually an `if` compares it, math or NumPy takes it, or it indexes a list. "
            "Write jnp.where(step < 5, 2.0, 1.0), take an Optax schedule, or look the values up: "
            "schedules.table([2.0, 1.0], steps_per_epoch=5)."
        ) from error


def _linear(t: np.ndarray, epochs: int) -> np.ndarray:
    """`t / (T-1)`."""
    return t / max(epochs - 1, 1)


def _quadratic(t: np.ndarray, epochs: int) -> np.ndarray:
    """`(t / (T-1))^2`."""
    return _linear(t, epochs) ** 2


def _exponential(t: np.ndarray, epochs: int) -> np.ndarray:
    """`(1 - e^-t) / (1 - e^-(T-1))`: most of the way in the first epochs."""
    return np.expm1(-t) / np.expm1(-max(epochs - 1.0, 1.0))


def _explosive(t: np.ndarray, epochs: int) -> np.ndarray:
    """`(e^t - 1) / (e^(T-1) - 1)`, as the reversal that it is: e^t overflows after 709 epochs."""
    return 1 - _exponential(max(epochs - 1, 1) - t, epochs)


def _logarithmic(t: np.ndarray, epochs: int) -> np.ndarray:
    """`log(t+1) / log(T+1)`, which stops short of 1: the paper divides by T+1, not by T."""
    return np.log1p(t) / np.log(epochs + 1)


def _piecewise(t: np.ndarray, epochs: int) -> np.ndarray:
    """`floor(5t / T) / 4`: five treads; where 5 does not divide T they differ by an epoch."""
    return (5 * t.astype(np.int64)) // epochs / 4


SHAPES: dict[str, Shape] = {
    "linear": _linear,
    "quadratic": _quadratic,
    "exponential": _exponential,
    "explosive": _explosive,
    "logarithmic": _logarithmic,
    "piecewise": _piecewise,
}


def curriculum(
    shape: str, start: float, stop: float, *, epochs: int, steps_per_epoch: int
) -> optax.Schedule:
    """A walk from `start` to `stop` along a shape s: `F(t) = start + (stop - start) s(t)`.

    Args:
      shape: a name in `SHAPES`; s(0) = 0, and s(epochs - 1) = 1 for all but "logarithmic".
      start: multiplier of the first epoch.
      stop: multiplier of the last.
      epochs: T; epochs are counted t = 0 .. T-1, and the last value is held afterwards.
      steps_per_epoch: steps that share a value; 1, with `epochs` the number of steps, changes it
        every step.

    Returns:
      A schedule, step -> float32 scalar.

      | given | schedule |
      |---|---|
      | `epochs == 1` | `start` throughout |
      | "exponential", "explosive" | rate one an epoch: over many short ones, a sudden drop |

    Example:
      >>> schedule = curriculum("linear", 2.0, 1.0, epochs=3, steps_per_epoch=10)
      >>> [float(schedule(step)) for step in (0, 10, 20)]
      [2.0, 1.5, 1.0]
    """
    if shape not in SHAPES:
        raise ValueError(
            f"schedules.curriculum(shape={shape!r}): not known; choose one of {', '.join(SHAPES)}."
        )
    if epochs < 1 or epochs != int(epochs):
        raise ValueError(
            f"schedules.curriculum(epochs={epochs}): epochs must be a whole number, 1 or more; it "
            "is how many values the schedule has."
        )
    t = np.arange(int(epochs), dtype=np.float64)
    return table(start + (stop - start) * SHAPES[shape](t, int(epochs)), steps_per_epoch)


def exponential_down(
    *, epochs: int = 20, steps_per_epoch: int = 100, high: float = 5.0, low: float = 1.0
) -> optax.Schedule:
    """Falls at once, then stays low: `(H-c) e^-t + c`, `c = (L - H e^-(T-1)) / (1 - e^-(T-1))`.

    Args:
      epochs: T, counted t = 0 .. T-1.
      steps_per_epoch: steps that share a value.
      high: H, the largest multiplier.
      low: L, the smallest.

    Returns:
      A schedule, step -> float32 scalar. The defaults are the paper's run.

    Example:
      >>> " ".join(f"{float(exponential_down()(100 * t)):.4f}" for t in (0, 1, 2, 19))
      '5.0000 2.4715 1.5413 1.0000'

    References:
      An, Shi, *Differentially private stochastic gradient descent with curricula*, 2021, table 1.
    """
    return curriculum("exponential", high, low, epochs=epochs, steps_per_epoch=steps_per_epoch)


def exponential_up(
    *, epochs: int = 20, steps_per_epoch: int = 100, high: float = 5.0, low: float = 1.0
) -> optax.Schedule:
    """`exponential_down` backwards: `(L-a) e^t + a`, `a = (L e^(T-1) - H) / (e^(T-1) - 1)`.

    Arguments and result as of `exponential_down`.

    Example:
      >>> " ".join(f"{float(exponential_up()(100 * t)):.4f}" for t in (0, 1, 2, 19))
      '1.0000 1.0000 1.0000 5.0000'
    """
    return curriculum("explosive", low, high, epochs=epochs, steps_per_epoch=steps_per_epoch)


def piecewise_down(
    *, epochs: int = 20, steps_per_epoch: int = 100, high: float = 5.0, low: float = 1.0
) -> optax.Schedule:
    """Five treads down: `H - (H-L)/4 floor(5t/T)`.

    Arguments and result as of `exponential_down`.

    Example:
      >>> " ".join(f"{float(piecewise_down()(100 * t)):.4f}" for t in (0, 1, 2, 19))
      '5.0000 5.0000 5.0000 1.0000'
    """
    return curriculum("piecewise", high, low, epochs=epochs, steps_per_epoch=steps_per_epoch)


def piecewise_up(
    *, epochs: int = 20, steps_per_epoch: int = 100, high: float = 5.0, low: float = 1.0
) -> optax.Schedule:
    """Five treads up: `L + (H-L)/4 floor(5t/T)`.

    Arguments and result as of `exponential_down`.

    Example:
      >>> " ".join(f"{float(piecewise_up()(100 * t)):.4f}" for t in (0, 1, 2, 19))
      '1.0000 1.0000 1.0000 5.0000'
    """
    return curriculum("piecewise", low, high, epochs=epochs, steps_per_epoch=steps_per_epoch)


def linear_down(
    *, epochs: int = 20, steps_per_epoch: int = 100, high: float = 5.0, low: float = 1.0
) -> optax.Schedule:
    """Straight down: `H - (H-L) t/(T-1)`.

    Arguments and result as of `exponential_down`.

    Example:
      >>> " ".join(f"{float(linear_down()(100 * t)):.4f}" for t in (0, 1, 2, 19))
      '5.0000 4.7895 4.5789 1.0000'
    """
    return curriculum("linear", high, low, epochs=epochs, steps_per_epoch=steps_per_epoch)


def linear_up(
    *, epochs: int = 20, steps_per_epoch: int = 100, high: float = 5.0, low: float = 1.0
) -> optax.Schedule:
    """Straight up: `L + (H-L) t/(T-1)`.

    Arguments and result as of `exponential_down`.

    Example:
      >>> " ".join(f"{float(linear_up()(100 * t)):.4f}" for t in (0, 1, 2, 19))
      '1.0000 1.2105 1.4211 5.0000'
    """
    return curriculum("linear", low, high, epochs=epochs, steps_per_epoch=steps_per_epoch)


def quadratic_down(
    *, epochs: int = 20, steps_per_epoch: int = 100, high: float = 5.0, low: float = 1.0
) -> optax.Schedule:
    """Down, ever faster: `H - (H-L) (t/(T-1))^2`.

    Arguments and result as of `exponential_down`.

    Example:
      >>> " ".join(f"{float(quadratic_down()(100 * t)):.4f}" for t in (0, 1, 2, 19))
      '5.0000 4.9889 4.9557 1.0000'
    """
    return curriculum("quadratic", high, low, epochs=epochs, steps_per_epoch=steps_per_epoch)


def quadratic_up(
    *, epochs: int = 20, steps_per_epoch: int = 100, high: float = 5.0, low: float = 1.0
) -> optax.Schedule:
    """Up, ever faster: `L + (H-L) (t/(T-1))^2`.

    Arguments and result as of `exponential_down`.

    Example:
      >>> " ".join(f"{float(quadratic_up()(100 * t)):.4f}" for t in (0, 1, 2, 19))
      '1.0000 1.0111 1.0443 5.0000'
    """
    return curriculum("quadratic", low, high, epochs=epochs, steps_per_epoch=steps_per_epoch)


def logarithmic_up(
    *, epochs: int = 20, steps_per_epoch: int = 100, high: float = 5.0, low: float = 1.0
) -> optax.Schedule:
    """Up, ever slower, stopping short of `H`: `L + (H-L) log(t+1)/log(T+1)`.

    Arguments and result as of `exponential_down`.

    Example:
      >>> " ".join(f"{float(logarithmic_up()(100 * t)):.4f}" for t in (0, 1, 2, 19))
      '1.0000 1.9107 2.4434 4.9359'
    """
    return curriculum("logarithmic", low, high, epochs=epochs, steps_per_epoch=steps_per_epoch)


# Names as a command line spells them; all take the same keywords.
CURRICULA: dict[str, Callable[..., optax.Schedule]] = {
    "exponential-down": exponential_down,
    "exponential-up": exponential_up,
    "piecewise-down": piecewise_down,
    "piecewise-up": piecewise_up,
    "linear-down": linear_down,
    "linear-up": linear_up,
    "quadratic-down": quadratic_down,
    "quadratic-up": quadratic_up,
    "logarithmic-up": logarithmic_up,
}
