# SPDX-License-Identifier: Apache-2.0
"""Losses of one example, and the step from a model to a function of parameters.

A private gradient is clipped example by example, so a loss here takes the output for
**one** example and returns one number; averaging is not its business.  `of` joins a Flax
Linen module and such a loss into the ``loss(params, example)`` that the rest of dpjax
asks for.  Any other pure function of that form does as well.

All are computed in float32 or wider.  This room must never know of batches, clipping or
noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dpjax.types import LossFn, PyTree

__all__ = ["ExampleLoss", "absolute", "cross_entropy", "focal", "huber", "of", "squared_error"]

ExampleLoss: TypeAlias = Callable[[Any, Any], Float[Array, ""]]


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


def focal(gamma: float = 2.0) -> ExampleLoss:
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
        return _known(chosen, -jnp.exp(gamma * log_wrong) * log_right)

    return loss


def squared_error(prediction: Float[Array, "..."], target: Float[Array, "..."]) -> Float[Array, ""]:
    r"""Half the squared distance, :math:`\tfrac12 \|h - y\|^2`; its gradient is the residual.

    Args:
      prediction: h.
      target: y, of the same shape; a prediction ``(1,)`` may meet a target ``()``.

    Returns:
      The loss, summed over components.

    Example:
      >>> float(squared_error(jnp.array([3.0, 1.0]), jnp.array([1.0, 1.0])))
      2.0
    """
    return 0.5 * jnp.sum(jnp.square(_residual("squared_error", prediction, target)))


def absolute(prediction: Float[Array, "..."], target: Float[Array, "..."]) -> Float[Array, ""]:
    r"""The absolute error, :math:`\sum_j |h_j - y_j|`; its gradient is a sign, 0 at 0.

    Args:
      prediction: h.
      target: y, of the same shape; a prediction ``(1,)`` may meet a target ``()``.

    Returns:
      The loss, summed over components.

    Example:
      >>> float(absolute(jnp.array([3.0, 1.0]), jnp.array([1.0, 2.0])))
      3.0
    """
    residual = _residual("absolute", prediction, target)
    # Not jnp.abs, whose derivative at 0 is 1: a perfect prediction would still pull.
    return jnp.sum(residual * jnp.sign(residual))


def huber(delta: float = 1.0) -> ExampleLoss:
    r"""Makes a loss that is squared near the target and absolute far from it.

    .. math:: \sum_j \begin{cases} \tfrac12 r_j^2 & |r_j| \le \delta \\
              \delta (|r_j| - \tfrac12 \delta) & \text{else} \end{cases}, \qquad r = h - y

    Its gradient is the residual clipped to ``[-delta, delta]``.

    Args:
      delta: Where one turns into the other; positive.

    Returns:
      A loss of one example.

    Example:
      >>> float(huber(delta=1.0)(jnp.array(3.0), jnp.array(0.0)))
      2.5

    References:
      Huber, "Robust Estimation of a Location Parameter", 1964.
    """
    if not delta > 0:
        raise ValueError(
            f"losses.huber(delta={delta}): delta must be positive; it is the largest residual "
            "that is still squared. For the plain absolute error use losses.absolute."
        )

    def loss(prediction: Float[Array, "..."], target: Float[Array, "..."]) -> Float[Array, ""]:
        residual = _residual("huber", prediction, target)
        inside = jnp.clip(residual, -delta, delta)
        return jnp.sum(inside * (residual - 0.5 * inside))

    return loss


def of(model: nn.Module, loss: ExampleLoss, **options: Any) -> LossFn:
    """Joins a Linen module and a loss: ``loss(model.apply({"params": params}, x), y)``.

    Args:
      model: A module whose only variables are its parameters.
      loss: Takes the output for one example and its target.
      **options: For ``model.apply``, such as ``train=True``.

    Returns:
      ``loss(params, example)`` with ``example = (x, y)``, one example without a batch axis,
      and ``params`` the inner tree, ``variables["params"]``.

    Privacy:
      The parameters are all the state there is.  Batch statistics are refused: with them the
      output for one example depends on the others, and no clipping bounds its influence.

    Example:
      >>> from dpjax.models import MLP
      >>> model = MLP(features=(), classes=10)
      >>> params = model.init(jax.random.key(0), jnp.zeros(64))["params"]
      >>> loss = of(model, cross_entropy)
      >>> round(float(loss(params, (jnp.zeros(64), jnp.array(7)))), 4)
      2.3026
    """

    def per_example(params: PyTree, example: tuple[Any, Any]) -> Float[Array, ""]:
        _refuse_collections(params)
        x, y = example
        try:
            output = model.apply({"params": params}, x, **options)
        except (flax.errors.ScopeCollectionNotFound, flax.errors.ModifyScopeVariableError) as error:
            raise ValueError(_STATE.format(f"{type(model).__name__} keeps")) from error
        return loss(output, y)

    return per_example


_STATE = (
    "losses.of: {} variables beside its parameters, most often the batch_stats of batch "
    "normalisation. Batch statistics mix the examples of a batch, so that one example's influence "
    "on the gradient is not bounded by clipping. Use nn.GroupNorm or nn.LayerNorm, which look at "
    'one example, and give the inner tree: model.init(...)["params"].'
)


def _refuse_collections(params: PyTree) -> None:
    if not isinstance(params, Mapping):
        return
    if "batch_stats" in params:
        raise ValueError(_STATE.format(f"was given the collections {sorted(params)}, that is,"))
    if set(params) == {"params"}:
        raise ValueError(
            "losses.of: got the whole dictionary of variables; expected the parameters alone. "
            'Give the inner tree: model.init(...)["params"].'
        )


def _classes(name: str, logits: Array, label: Array) -> tuple[Array, Array]:
    """The logits, wide enough to sum, and which of them is the label's."""
    logits, label = jnp.asarray(logits), jnp.asarray(label)
    whole = jnp.issubdtype(label.dtype, jnp.integer)
    if logits.ndim != 1 or label.ndim != 0 or not whole:
        raise ValueError(
            f"losses.{name}: got logits of shape {logits.shape} and a label of shape {label.shape} "
            f"and type {label.dtype}; expected [classes] and one whole number. A loss takes a "
            f"single example: for a batch use jax.vmap(losses.{name})."
        )
    scores = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return scores, jnp.arange(logits.size) == label


def _known(chosen: Array, loss: Array) -> Array:
    # A label outside the classes has no loss.  NaN says so, and its gradient, through this
    # branch, is zero: the example drops out of a private sum instead of pulling it somewhere.
    return jnp.where(chosen.any(), loss, jnp.nan)


def _residual(name: str, prediction: Array, target: Array) -> Array:
    prediction, target = jnp.asarray(prediction), jnp.asarray(target)
    one_number = prediction.shape == (1,) and target.shape == ()
    if prediction.shape != target.shape and not one_number:
        raise ValueError(
            f"losses.{name}: got a prediction of shape {prediction.shape} and a target of shape "
            f"{target.shape}; expected the same shape, for a single example. For a batch use "
            "jax.vmap; for class labels make the target jax.nn.one_hot(label, classes)."
        )
    kind = jnp.promote_types(jnp.result_type(prediction, target), jnp.float32)
    return prediction.astype(kind) - target.astype(kind)
