# SPDX-License-Identifier: Apache-2.0
"""The laws of private training, as functions to run on your own rules, losses and chains.

Other libraries test their parts; what makes training private is their composition.
Each function here takes the real thing, measures the conserved quantity and raises
`LawBroken` with what was found: one example's influence on the sum, the agreement of
engines, the noise that really comes out of a chain. `dpjax.auditing` looks at whole
steps and whole runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import clipping, trees
from dpjax.gradients import ENGINES, clipped_grad
from dpjax.types import ClippedSum, Clipping, LossFn, PyTree

__all__ = [
    "LawBroken",
    "assert_engines_agree",
    "assert_noise",
    "assert_sensitivity",
    "influence",
]


class LawBroken(AssertionError):
    """A guarantee was measured and did not hold."""


def influence(rule: Clipping, gradients: PyTree) -> float:
    """How far the clipped sum moves, at most, when one of these examples is removed.

    Args:
      rule: The rule.
      gradients: Per-example gradients ``(batch, ...)``; hostile ones are welcome.

    Example:
      >>> influence(clipping.flat(2.0), {"w": jnp.array([[3.0, 0.0], [0.0, 1.0]])})
      2.0
    """
    size = trees.leading_size(gradients)
    every = np.arange(size)

    def summed(rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
        taken = jax.tree.map(lambda x: jnp.asarray(x)[rows], gradients)
        return _vector(clipping.clip(rule, taken, mask)[0])

    whole = summed(every, np.ones(size, bool))
    # Masked, as padding is, and really gone.
    without = [
        rest
        for i in every
        for rest in (summed(every, every != i), summed(every[every != i], np.ones(size - 1, bool)))
    ]
    return float(max((np.linalg.norm(whole - rest) for rest in without), default=0.0))


def assert_sensitivity(rule: Clipping, gradients: PyTree) -> None:
    """Raises unless no example moves the sum by more than ``rule.sensitivity``.

    Allows for float32: a relative 2e-6 of the sum's own size.
    """
    found = influence(rule, gradients)
    total = _vector(clipping.clip(rule, gradients)[0])
    rounding = 2e-6 * (rule.sensitivity + float(np.linalg.norm(total)))
    if not found <= rule.sensitivity + rounding:
        raise LawBroken(
            f"{rule.name}: one example moved the sum by {found:.6g}; its sensitivity is "
            f"stated as {rule.sensitivity:.6g}, and noise is scaled to that."
        )


def assert_engines_agree(
    loss: LossFn,
    rule: Clipping,
    params: PyTree,
    batch: PyTree,
    *,
    mask: Any = None,
    engines: Sequence[str] = tuple(ENGINES),
    microbatch_sizes: Sequence[int] = (3,),
    tolerance: float = 1e-5,
) -> None:
    """Raises unless every engine gives the sum, losses, norms and factors of ``vmap``."""

    def run(engine: str, size: int | None) -> ClippedSum:
        return jax.jit(clipped_grad(loss, rule, engine, size))(params, batch, mask)

    want = run("vmap", None)
    for engine, size in itertools.product(set(engines) - {"vmap"}, microbatch_sizes):
        got = run(engine, size)
        for name in ("value", "losses", "norms", "factors"):
            a, b = _vector(getattr(want, name)), _vector(getattr(got, name))
            scale = max(1.0, float(np.max(np.abs(a[np.isfinite(a)]), initial=0.0)))
            if not np.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
                raise LawBroken(
                    f"engine {engine!r} with microbatches of {size} gives other {name} than "
                    f"'vmap': largest difference {np.max(np.abs(a - b)):.3g}."
                )


def assert_noise(
    link: optax.GradientTransformation,
    params: PyTree,
    deviation: float,
    *,
    tolerance: float = 0.005,
) -> None:
    """Raises unless a link (or a whole chain) adds noise of this standard deviation.

    Args:
      link: Started and run once on zeros.
      params: A tree of the sums' shapes; 1e6 numbers or more for the default tolerance.
      deviation: The standard deviation expected of what comes out.
      tolerance: Relative.
    """
    zeros = jax.tree.map(jnp.zeros_like, params)
    noise, _ = link.update(zeros, link.init(params), params)
    found = float(np.std(_vector(noise)))
    if not abs(found - deviation) <= tolerance * deviation:
        raise LawBroken(
            f"the noise has standard deviation {found:.6g}, expected {deviation:.6g} "
            f"(off by {found / max(deviation, 1e-30) - 1:+.2%})."
        )


def _vector(tree: PyTree) -> np.ndarray:
    """All leaves as one float64 vector."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves) if leaves else np.zeros(0)
