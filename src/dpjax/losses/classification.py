# SPDX-License-Identifier: Apache-2.0
"""Losses of class labels: the logits and the label of one example in, one number out.

Gradients stay exact for large logits, because clipping drops an example whose gradient overflows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Integer

from dpjax import checks, trees

Logits = Float[ArrayLike, " classes"]
Label = Integer[ArrayLike, ""]
Loss = Float[Array, ""]


def cross_entropy(logits: Logits, label: Label) -> Loss:
    r"""The cross-entropy of one example in nats, $\log \sum_j e^{h_j} - h_y$.

    Its gradient with respect to the logits is ``softmax(logits) - one_hot(label)``, whose norm
    is at most the square root of 2. It is exact for large logits. A label out of range gives NaN,
    with a gradient of zero. The label y has the shape ``()`` or ``(1,)``.

    Example:
      >>> round(float(cross_entropy(jnp.zeros(10), jnp.array(3))), 4)
      2.3026
    """
    logits, is_label = _logits_and_mask("cross_entropy", logits, label)
    # A masked sum replaces logits[label]: engines materialise a gather per example, and a gather
    # wraps for negative labels.
    return _nan_if_unknown(is_label, jax.nn.logsumexp(logits) - jnp.sum(logits, where=is_label))


def focal(gamma: float = 2.0) -> Callable[[Array, Array], Array]:
    r"""Makes a cross-entropy in which examples that are already learnt weigh less.

    $$ -(1 - p_y)^\gamma \log p_y, \qquad p = \mathrm{softmax}(h) $$

    with the logits $h$ and the label $y$. A gamma of 0 gives the cross-entropy; the larger gamma,
    the less an easy example weighs. A label out of range gives NaN, with a gradient of zero.

    Example:
      >>> round(float(focal(gamma=2.0)(jnp.zeros(2), jnp.array(0))), 4)
      0.1733

    References:
      Lin et al., "Focal Loss for Dense Object Detection", 2017, equation 4.
    """
    gamma = checks.not_negative("losses.focal", "gamma", gamma, infinite=False)

    def loss(logits: Logits, label: Label) -> Loss:
        logits, is_label = _logits_and_mask("focal", logits, label)
        # The margin m = log sum_{j != y} e^{h_j - h_y} gives both logarithms: -softplus(m) is
        # log p_y, and -softplus(-m) is log(1 - p_y). The second one is log(0) if it is computed
        # from p_y of an example that is learnt to the last bit.
        label_logit = jnp.sum(logits, where=is_label)
        differences = logits - label_logit
        # The sum of m leaves out the label and classes of probability 0. They get the least finite
        # number in place of -inf, because logsumexp of only -inf has the gradient NaN.
        is_excluded = is_label | jnp.isneginf(logits)
        differences = jnp.where(is_excluded, jnp.finfo(differences.dtype).min, differences)
        margin = jax.nn.logsumexp(differences)
        log_p = -jax.nn.softplus(margin)
        if not gamma:  # 0 times an infinite logarithm is NaN
            return _nan_if_unknown(is_label, -log_p)
        log_1_minus_p = -jax.nn.softplus(-margin)
        weight = jnp.exp(gamma * log_1_minus_p)  # (1 - p_y)^gamma
        return _nan_if_unknown(is_label, -weight * log_p)

    return loss


def one_hot(error: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    r"""Makes a loss of class labels from a loss of numbers, on the logits themselves.

    $$ \text{error}(h, e_y), \qquad e_y = (0, \dots, 1, \dots, 0) $$

    With `squared_error` this is the SSE of losing_less_2022, with `absolute` its SAE. A label
    out of range gives NaN, with a gradient of zero.

    Example:
      >>> from dpjax.losses import squared_error
      >>> float(one_hot(squared_error)(jnp.zeros(10), jnp.array(3)))
      0.5

    References:
      Shamsabadi and Papernot, "Losing Less", 2022, equation 5 and appendix F.
    """

    def loss(logits: Logits, label: Label) -> Loss:
        logits, is_label = _logits_and_mask("one_hot", logits, label)
        target = is_label.astype(logits.dtype)
        # The papers apply the squared error to the logits, not to probabilities.
        return _nan_if_unknown(is_label, error(logits, target))

    return loss


def weighted(error: Callable[..., Array], weights: Sequence[float] | Array) -> Callable[..., Array]:
    r"""Makes a loss of class labels with a weight for each class, $w_y \cdot \text{error}(h, y)$.

    Privacy:
      Weights must be public, and cost no epsilon: the weighted gradient is clipped. The price is
      that one at the bound gains nothing, and the others shrink relative to the noise.

    Example:
      >>> rare = weighted(cross_entropy, [1.0, 5.0])
      >>> [round(float(rare(jnp.zeros(2), jnp.array(label))), 4) for label in (0, 1)]
      [0.6931, 3.4657]
    """
    table = jnp.asarray([checks.not_negative("losses.weighted", "weight", w) for w in weights])

    @functools.wraps(error)  # `of` reads the names of the arguments
    def loss(logits: Logits, label: Label, **options: Any) -> Loss:
        weight = jnp.sum(table, where=jnp.arange(table.size) == label)
        return weight * error(logits, label, **options)

    return loss


def _logits_and_mask(name: str, logits: ArrayLike, label: ArrayLike) -> tuple[Array, Array]:
    """The logits in float32 or wider, and a mask ``[classes]`` that is true at the label.

    The mask is false everywhere for a label out of range.
    """
    logits = jnp.asarray(logits)
    label = jnp.asarray(label)
    if label.shape == (1,):  # from a column of labels, [n, 1]
        label = label.reshape(())
    if logits.ndim != 1 or label.ndim != 0 or not jnp.issubdtype(label.dtype, jnp.integer):
        raise ValueError(
            f"losses.{name}: got logits {logits.dtype}{list(logits.shape)} and a label "
            f"{label.dtype}{list(label.shape)}; expected [classes] and one whole number. For a "
            "batch use jax.vmap; for one-hot rows y.argmax(-1)."
        )
    return logits.astype(trees.wide(logits.dtype)), jnp.arange(logits.size) == label


def _nan_if_unknown(is_label: Array, loss: Array) -> Array:
    """The loss, or NaN if the mask has no class, because the label is out of range."""
    # The gradient through NaN's branch is zero, so the example adds nothing to a private sum.
    return jnp.where(is_label.any(), loss, jnp.nan)
