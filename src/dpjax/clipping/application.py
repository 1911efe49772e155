# SPDX-License-Identifier: Apache-2.0
"""Applies a rule: from per-example gradients to their clipped sum.

A rule scales each group of leaves of an example's gradient by a factor. `clip` is the definition
that every engine is held to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from dpjax import checks, meshes, trees
from dpjax.clipping.rules import Norms
from dpjax.types import ClippedSum, Clipping, PyTree, Sum


def clip(
    rule: Clipping,
    gradients: PyTree,
    mask: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[PyTree, Norms, Norms]:
    """Clips per-example gradients and sums them.

    Args:
      rule: The rule, whose ``sensitivity`` the sum has.
      gradients: Per-example gradients; every leaf ``(batch, ...)``, real or complex.
      mask: ``[batch]``: 1 for a real example, 0 for padding, which contributes exactly 0. True, or
        None, if all are real.
      weights: Further factors ``[batch, groups]``. The sum has the sensitivity only if they lie in
        [0, 1], to which `dpjax.clipped_grad` limits them.

    Returns:
      The clipped sum, without the batch axis; the norms of gradients before clipping and the
      factors, both ``[batch, groups]`` and 0 for padding.

    Example:
      >>> from dpjax import clipping
      >>> gradients = jnp.array([[0.0, 4.0], [0.0, 0.5]])
      >>> total, norms, factors = clip(clipping.flat(bound=1.0), gradients)
      >>> total.tolist(), norms.tolist(), factors.tolist()
      ([0.0, 1.5], [[4.0], [0.5]], [[0.25], [1.0]])
    """
    checks.instance("clipping.clip", "rule", rule, Clipping, "Such as clipping.flat(bound).")
    # A `jax.shard_map` that tracks varying values, the default, sums gradients over devices before
    # they arrive here, so a row is then not one example.
    meshes.refuse_tracking("clipping.clip")
    size = trees.leading_size(gradients, name="clipping.clip")
    real = real_rows("clipping.clip", mask, size)[:, None]
    # The partition gets shapes without the batch axis, as it does for parameters and noise, because
    # a partition by rank or size answers differently for a batch.
    groups = rule.partition.assign(trees.one_row(gradients))
    norms = trees.group_norms(gradients, groups, rule.partition.size)
    # A row of padding also has a gradient: its factor of 0 keeps it out of the sum.
    factors = jnp.where(real, rule.factors(norms), 0)
    norms = jnp.where(real, norms, 0)
    if weights is not None:
        # Weights multiply factors that already hold the bound, so one in [0, 1] keeps it.
        factors *= jnp.broadcast_to(jnp.asarray(weights, factors.dtype), factors.shape)
    return trees.scaled_sum(gradients, factors, groups), norms, factors


def real_rows(call: str, mask: ArrayLike | None, size: int) -> Bool[Array, " size"]:
    """Checks the mask of a batch, and gives it as booleans: true is an example, false is padding.

    None or True marks all ``size`` rows as examples. Any other mask must have one entry for each
    row, 0 or 1.
    """
    if mask is None or mask is True:
        return jnp.ones(size, bool)
    if np.shape(mask) != (size,):
        cure = ""
        if np.ndim(mask) == 2:  # likely [persons, rows of each], for privacy of whole persons
            cure = (
                " For persons give dpjax.losses.of_person(loss), (rows, mask) and mask=mask[:, 0]."
            )
        raise ValueError(
            f"{call}: mask has shape {np.shape(mask)}; expected ({size},), one entry per "
            f"example.{cure}"
        )
    # A mask has no values inside jit, and one of several processes cannot read all of a JAX array
    # that they share. The entries of neither are checked.
    is_readable = not isinstance(mask, Tracer) and getattr(mask, "is_fully_addressable", True)
    if is_readable and not np.isin(np.asarray(mask), (0, 1)).all():
        raise ValueError(
            f"{call}: mask has entries that are neither 0 nor 1. Give weights as weights=."
        )
    return jnp.asarray(mask, bool)


@jax.tree_util.register_static
@dataclass(frozen=True)
class ClipState:
    """The shapes of the parameters: no arrays, only what is needed to refuse."""

    shapes: tuple[tuple[int, ...], ...]


def clip_and_sum(rule: Clipping) -> optax.GradientTransformationExtraArgs:
    """The Optax link from per-example gradients ``(batch, ...)`` to their clipped sum.

    ``update(gradients, state, params=None, mask=None)`` expects every leaf of the gradients to have
    one more, leading, axis than its parameter. It returns a `dpjax.types.Sum`, for the noise link
    that comes next.

    Sensitivity:
      ``rule.sensitivity``.  The sum is not private until noise is added to it.

    Example:
      >>> import dpjax
      >>> link = clip_and_sum(dpjax.clipping.flat(bound=1.0))
      >>> state = link.init({"w": jnp.zeros(2)})
      >>> gradients = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5]])}
      >>> summed, state = link.update(gradients, state)
      >>> [round(float(x), 4) for x in summed.value["w"]]
      [0.6, 1.3]
    """
    checks.instance("clip_and_sum", "rule", rule, Clipping, "Write dpjax.clipping.flat(bound).")

    def init(params: PyTree) -> Any:
        return ClipState(tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(params)))

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        mask: ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        _require_rows(updates, state)
        total, _, _ = clip(rule, updates, mask)
        return trusted_sum(total, rule), state

    return optax.GradientTransformationExtraArgs(init, update)


def trusted_sum(total: PyTree, rule: Clipping) -> Sum:
    """Declares a tree to be a clipped sum, which a noise link takes.

    For sums that were clipped and added by other means than `clip_and_sum` and
    `dpjax.clipped_grad`, such as a sum over the processes of a cluster.

    Privacy:
      Nothing is checked. You vouch that one example moves the sum by at most ``rule.sensitivity``:
      otherwise the noise has the wrong scale.

    Example:
      >>> import dpjax
      >>> rule, params = dpjax.clipping.flat(bound=1.0), {"w": jnp.ones(2)}
      >>> link = dpjax.noise.gaussian(1.0, rule)
      >>> noisy, _ = link.update(trusted_sum(params, rule), link.init(params))
    """
    return Sum(total, rule.limits(total))


def empty_sum(rule: Clipping, params: PyTree) -> ClippedSum:
    """The clipped sum over no examples, with which a loop over microbatches begins.

    Example:
      >>> import dpjax
      >>> rule, w = dpjax.clipping.flat(bound=1.0), jnp.zeros(2)
      >>> clipped = dpjax.clipped_grad(lambda w, x: w @ x, rule)
      >>> add = lambda total, batch: (clipped(w, batch, start=total).total, None)
      >>> total, _ = jax.lax.scan(add, empty_sum(rule, w), jnp.ones((3, 5, 2)))
      >>> [round(float(x), 4) for x in total.sum.value]
      [10.6066, 10.6066]
    """
    nothing: Any = None
    zeros = trees.zeros_wide(params)
    return ClippedSum(zeros, nothing, nothing, nothing, rule=rule.limits(params))


def _require_rows(gradients: PyTree, state: ClipState) -> None:
    """Raises unless every gradient leaf is ``(batch, *parameter shape)``, and none is masked."""
    # `optax.masked` passes the other leaves on as raw per-example gradients.
    if trees.nodes(gradients, optax.MaskedNode):
        raise ValueError(
            "clip_and_sum: masked leaves would be released without noise. Put optax.masked or "
            "multi_transform behind the noise."
        )
    for leaf, shape in zip(jax.tree.leaves(gradients), state.shapes, strict=True):
        if jnp.shape(leaf)[1:] != shape or jnp.ndim(leaf) == len(shape):
            raise ValueError(
                f"clip_and_sum: a gradient has shape {jnp.shape(leaf)}; expected (batch, "
                f"{', '.join(map(str, shape))}), as of jax.vmap(jax.grad(loss), (None, 0))."
            )
