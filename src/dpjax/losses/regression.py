# SPDX-License-Identifier: Apache-2.0
"""Losses of numbers: a prediction and a target of one shape in, one number out.

All are sums over components. A mean changes the gradients, and so which of them are clipped.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Num

from dpjax import checks, trees

Prediction = Float[ArrayLike, "..."]
Target = Num[ArrayLike, "..."]
Loss = Float[Array, ""]


def squared_error(prediction: Prediction, target: Target) -> Loss:
    r"""Half the squared distance, $\tfrac12 \|h - y\|^2$; its gradient is the residual.

    Both have one shape; but a prediction ``(1,)`` may meet a target ``()``.

    Example:
      >>> float(squared_error(jnp.array([3.0, 1.0]), jnp.array([1.0, 1.0])))
      2.0
    """
    return 0.5 * jnp.sum(jnp.square(_residual("squared_error", prediction, target)))


def absolute(prediction: Prediction, target: Target) -> Loss:
    r"""The absolute error, $\sum_j |h_j - y_j|$; its gradient is a sign, 0 at 0.

    Example:
      >>> float(absolute(jnp.array([3.0, 1.0]), jnp.array([1.0, 2.0])))
      3.0
    """
    residual = _residual("absolute", prediction, target)
    # jnp.abs has the derivative 1 at 0, and a perfect prediction must have no gradient.
    return jnp.sum(residual * jnp.sign(residual))


def huber(delta: float = 1.0) -> Callable[[Array, Array], Array]:
    r"""Makes a loss that is squared near the target and absolute far from it.

    $$ \sum_j \begin{cases} \tfrac12 r_j^2 & |r_j| \le \delta \\
       \delta (|r_j| - \tfrac12 \delta) & \text{else} \end{cases}, \qquad r = h - y $$

    Its gradient is the residual clipped to ``[-delta, delta]``, with a positive delta. Equation 11
    of losing_less_2022 is this loss divided by delta.

    Example:
      >>> float(huber(delta=1.0)(jnp.array(3.0), jnp.array(0.0)))
      2.5

    References:
      Huber, "Robust Estimation of a Location Parameter", 1964.
    """
    delta = checks.positive("losses.huber", "delta", delta, infinite=True)

    def loss(prediction: Prediction, target: Target) -> Loss:
        residual = _residual("huber", prediction, target)
        # c (r - c / 2) with c = clip(r) is both branches, without a `where` and its NaN gradients.
        inside = jnp.clip(residual, -delta, delta)
        return jnp.sum(inside * (residual - 0.5 * inside))

    return loss


def _residual(name: str, prediction: ArrayLike, target: ArrayLike) -> Array:
    """The difference in float32 or wider, of a prediction and a target of one shape."""
    prediction = jnp.asarray(prediction)
    target = jnp.asarray(target)
    # A dense layer of one unit has shape (1,), and its target ().
    if prediction.shape != target.shape and not (prediction.shape == (1,) and target.shape == ()):
        raise ValueError(
            f"losses.{name}: got shapes {prediction.shape} and {target.shape}; expected the same "
            "shape. For a batch use jax.vmap; for class labels losses.one_hot."
        )
    # Both are widened first, because targets such as prices lose their digits in a narrow dtype.
    dtype = trees.wide(jnp.result_type(prediction, target))
    return prediction.astype(dtype) - target.astype(dtype)
