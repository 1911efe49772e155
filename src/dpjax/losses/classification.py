# SPDX-License-Identifier: Apache-2.0
"""Losses of class labels: logits of one example and its whole number in, one number out.

The cross-entropy and its focal variant, in forms that stay exact for logits of any size:
a private step cannot afford to lose an example to an overflow that clipping then drops.
`one_hot` makes a loss of labels of any loss of numbers.  Nothing here looks at more than
one example.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(logits: Float[Array, " classes"], label: Int[Array, ""]) -> Float[Array, ""]:
    r"""The cross-entropy of one example, :math:`\log \sum_j e^{h_j} - h_y`.

    Its gradient by the logits is ``softmax(logits) - one_hot(label)``, whose norm is at
    most the square root of 2.

    ======================  ===========================================
    edge case               value
    ======================  ===========================================
    logits of any size      exact: no exponential of a large number
    label out of range      NaN, with a gradient of zero
    ======================  ===========================================

    Args:
      logits: h, one score for each class.
      label: y, a whole number.

    Returns:
      The loss in nats.

    Example:
      >>> round(float(cross_entropy(jnp.zeros(10), jnp.array(3))), 4)
      2.3026
    """
    scores, chosen = _classes("cross_entropy", logits, label)
    return _known(chosen, jax.nn.logsumexp(scores) - jnp.sum(scores, where=chosen))


def focal(gamma: float = 2.0) -> Callable[[Array, Array], Array]:
    r"""Makes a cross-entropy that pays less heed to what is already learnt.

    .. math:: -(1 - p_y)^\gamma \log p_y, \qquad p = \mathrm{softmax}(h)

    The probability of being wrong, :math:`1 - p_y`, is taken from the other logits and not
    by subtraction, so that neither it nor its powers lose their digits when it is small.

    Args:
      gamma: 0 gives the cross-entropy; the larger, the less an easy example counts.

    Returns:
      A loss of one example.

    Example:
      >>> round(float(focal(gamma=2.0)(jnp.zeros(2), jnp.array(0))), 4)
      0.1733

    References:
      Lin, Goyal, Girshick, He and Dollar, "Focal Loss for Dense Object Detection", 2017,
      equation 4.
    """
    if not (math.isfinite(gamma) and gamma >= 0):
        raise ValueError(
            f"losses.focal(gamma={gamma}): gamma must be at least 0 and finite; it is the power "
            "of the probability of being wrong. 0 gives the cross-entropy, 2 is usual."
        )

    def loss(logits: Float[Array, " classes"], label: Int[Array, ""]) -> Float[Array, ""]:
        scores, chosen = _classes("focal", logits, label)
        total = jax.nn.logsumexp(scores)
        log_right = jnp.sum(scores, where=chosen) - total
        log_wrong = jax.nn.logsumexp(jnp.where(chosen, -jnp.inf, scores)) - total
        weight = jnp.exp(gamma * log_wrong) if gamma else 1.0  # 0 times minus infinity is NaN
        return _known(chosen, -weight * log_right)

    return loss


def one_hot(error: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    r"""Makes a loss of class labels from a loss of numbers, on the logits themselves.

    .. math:: \text{error}(h, e_y), \qquad e_y = (0, \dots, 1, \dots, 0)

    With `squared_error` it is the SSE of losing_less_2022, with `absolute` its SAE.  A label
    out of range gives NaN, with a gradient of zero.

    Args:
      error: ``error(prediction, target)``.

    Returns:
      A loss of logits and a label.

    Example:
      >>> from dpjax.losses import squared_error
      >>> float(one_hot(squared_error)(jnp.zeros(10), jnp.array(3)))
      0.5

    References:
      Shamsabadi and Papernot, "Losing Less: A Loss for Differentially Private Deep
      Learning", 2022, equation 5 and appendix F.
    """

    def loss(logits: Float[Array, " classes"], label: Int[Array, ""]) -> Float[Array, ""]:
        scores, chosen = _classes("one_hot", logits, label)
        return _known(chosen, error(scores, chosen.astype(scores.dtype)))

    return loss


def _classes(name: str, logits: Array, label: Array) -> tuple[Array, Array]:
    """The logits, wide enough to sum, and which of them is the label's."""
    logits, label = jnp.asarray(logits), jnp.asarray(label)
    whole = jnp.issubdtype(label.dtype, jnp.integer)
    if logits.ndim != 1 or label.ndim != 0 or not whole:
        raise ValueError(
            f"losses.{name}: got logits of shape {logits.shape} and a label of shape {label.shape} "
            f"and type {label.dtype}; expected [classes] and one whole number. A loss takes a "
            f"single example: for a batch use jax.vmap(losses.{name}). Labels that are floats or "
            "one-hot rows are made whole numbers first: y.astype(int), y.argmax(-1)."
        )
    scores = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return scores, jnp.arange(logits.size) == label


def _known(chosen: Array, loss: Array) -> Array:
    # A label outside the classes has no loss.  NaN says so, and its gradient, through this
    # branch, is zero: the example drops out of a private sum instead of pulling it somewhere.
    return jnp.where(chosen.any(), loss, jnp.nan)
