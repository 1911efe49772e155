# SPDX-License-Identifier: Apache-2.0
"""Applies a rule: from per-example gradients to their clipped sum.

`clip` is the definition that every engine is held to. `clip_and_sum` puts it into an Optax chain,
and refuses gradients that were averaged before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from dpjax import checks, trees
from dpjax._marks import mark
from dpjax.clipping.rules import Norms
from dpjax.clipping.shards import refuse_explicit, refuse_tracking
from dpjax.types import Clipping, PyTree


def clip(
    rule: Clipping,
    gradients: PyTree,
    mask: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[PyTree, Norms, Norms]:
    """Clips per-example gradients and sums them.

    Args:
      rule: The rule.
      gradients: Per-example gradients; every leaf ``(batch, ...)``, real or complex.
      mask: ``[batch]``: 1 for a real example, 0 for padding, which contributes exactly 0.
      weights: Further factors ``[batch, groups]``; only in [0, 1] is the sensitivity kept,
        and `dpjax.clipped_grad` sees to that.

    Returns:
      The clipped sum, the norms and the factors ``[batch, groups]`` (0 for padding).

    Sensitivity:
      ``rule.sensitivity``.

    Example:
      >>> from dpjax import clipping
      >>> gradients = jnp.array([[0.0, 4.0], [0.0, 0.5]])
      >>> total, norms, factors = clip(clipping.flat(bound=1.0), gradients)
      >>> total.tolist(), norms.tolist(), factors.tolist()
      ([0.0, 1.5], [[4.0], [0.5]], [[0.25], [1.0]])
    """
    checks.instance("clipping.clip", "rule", rule, Clipping, "Such as clipping.flat(bound).")
    refuse_tracking("clipping.clip")
    # On the shapes of the parameters, as the noise and the other engines assign: a partition by
    # rank or size would answer otherwise for a batch, and give one group the noise of another.
    groups = rule.partition.assign(trees.one_row(gradients))
    # Norms before the mask: padding has a norm too, and the mask removes norm and factor together.
    norms = trees.group_norms(gradients, groups, rule.partition.size)
    factors = rule.factors(norms)
    real = real_rows("clipping.clip", mask, len(norms))[:, None]
    norms, factors = jnp.where(real, norms, 0), jnp.where(real, factors, 0)
    if weights is not None:
        weights = jnp.asarray(weights, factors.dtype)
        if weights.shape != factors.shape:
            raise ValueError(
                f"clipping.clip: weights have shape {weights.shape}; expected one for each example "
                f"and group, {factors.shape}. For one weight an example write weights[:, None]."
            )
        # After the bound: a weight may shorten a contribution and never lengthen it past its bound.
        factors = factors * weights
    return trees.scaled_sum(gradients, factors, groups), norms, factors


def real_rows(call: str, mask: ArrayLike | None, size: int) -> Bool[Array, " size"]:
    """Which of a batch's rows are examples; raises unless a mask has one entry for each.

    Args:
      call: How errors call the function that received the mask.
      mask: 1 for a real example, 0 for padding; None if all are real.
      size: The number of rows.
    """
    if mask is None:
        return jnp.ones(size, bool)
    if np.shape(mask) != (size,):
        raise ValueError(
            f"{call}: mask has shape {np.shape(mask)}, the batch {size} examples; expected one "
            "entry per example, 1 for real and 0 for padding. Usually the mask belongs to another "
            "batch, or has an axis too many."
        )
    # Inside jit a mask has no values yet, and of several processes each sees a part.
    seen = not isinstance(mask, Tracer) and getattr(mask, "is_fully_addressable", True)
    if seen and not np.isin(np.asarray(mask), (0, 1)).all():
        raise ValueError(
            f"{call}: mask has entries that are neither 0 nor 1; expected 1 for a real example and "
            "0 for padding. Usually weights or labels were given in its place: weights have an "
            "argument of their own, and labels belong to the batch, as in clipped(params, (x, y))."
        )
    return jnp.asarray(mask, bool)


@jax.tree_util.register_static
@dataclass(frozen=True)
class ClipState:
    """The shapes of the parameters: no arrays, only what is needed to refuse."""

    shapes: tuple[tuple[int, ...], ...]


def clip_and_sum(rule: Clipping) -> optax.GradientTransformationExtraArgs:
    """The Optax link from per-example gradients ``(batch, ...)`` to their clipped sum.

    Args:
      rule: The rule.

    Returns:
      A link whose ``update(gradients, state, params=None, mask=None)`` expects every
      leaf of the gradients to have one more, leading, axis than its parameter.

    Sensitivity:
      ``rule.sensitivity``.  The sum is not private until noise is added to it.

    Example:
      >>> import dpjax
      >>> link = clip_and_sum(dpjax.clipping.flat(bound=1.0))
      >>> state = link.init({"w": jnp.zeros(2)})
      >>> gradients = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5]])}
      >>> summed, state = link.update(gradients, state)
      >>> [round(float(x), 4) for x in summed["w"]]
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
    ) -> tuple[PyTree, Any]:
        del params, extra
        _refuse_masked(updates)
        _refuse_unbatched(updates, state.shapes)
        refuse_tracking("clip_and_sum")
        refuse_explicit("clip_and_sum", "gradients", updates, rows=True)
        real = real_rows("clip_and_sum", mask, trees.leading_size(updates, name="clip_and_sum"))
        return mark(clip(rule, updates, real)[0], rule), state

    return optax.GradientTransformationExtraArgs(init, update)


def trusted_sum(total: PyTree, rule: Clipping) -> PyTree:
    """Declares a tree to be a clipped sum, so that a noise link accepts it.

    For sums that were clipped and added by other means than `clip_and_sum` and
    `dpjax.clipped_grad`, such as a sum over the processes of a cluster.

    Args:
      total: The sum.
      rule: The rule. You vouch for it: one example moves the sum by at most
        ``rule.sensitivity``.

    Returns:
      The same tree, of new arrays that a noise link of this rule accepts.

    Privacy:
      Nothing is checked. A wrong declaration gives noise of the wrong scale.

    Example:
      >>> import dpjax
      >>> rule = dpjax.clipping.flat(bound=1.0)
      >>> total = trusted_sum({"w": jnp.ones(2)}, rule)
      >>> link = dpjax.noise.gaussian(1.0, rule, key=dpjax.noise.secret_key())
      >>> noisy, _ = link.update(total, link.init(total))
    """
    return mark(jax.tree.map(jnp.copy, total), rule)


def _refuse_masked(gradients: PyTree) -> None:
    """Raises inside `optax.masked`: other leaves would pass it as raw per-example gradients."""
    if trees.nodes(gradients, optax.MaskedNode):
        raise ValueError(
            "clip_and_sum: some leaves are masked, so clip_and_sum stands inside optax.masked or "
            "optax.multi_transform, and the other leaves would be released unclipped and without "
            "noise. To freeze leaves, let the loss close over them; or chain clip_and_sum, noise, "
            "and then optax.multi_transform with optax.set_to_zero()."
        )


def _refuse_unbatched(gradients: PyTree, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raises unless every gradient leaf is ``(batch, *parameter shape)``."""
    found = [jnp.shape(leaf) for leaf in jax.tree.leaves(gradients)]
    names = trees.leaf_names(gradients)
    for name, given, shape in zip(names, found, shapes, strict=True):
        if len(given) != len(shape) + 1 or given[1:] != shape:
            raise ValueError(
                f"clip_and_sum: the gradient of {name or 'the parameter'} has shape "
                f"{given}; expected (batch, {', '.join(map(str, shape))}): one gradient "
                "per example. Usually the gradient was already averaged over the batch "
                "(jax.grad of a batch loss): use jax.vmap(jax.grad(loss), (None, 0)), or "
                "dpjax.clipped_grad, which clips and sums by itself. Or optax.MultiSteps stands "
                "around the link, and accumulates before it: put MultiSteps behind the noise."
            )
