# SPDX-License-Identifier: Apache-2.0
"""The loss of losing_less_2022: squared error first, focal loss later, and a penalty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Integer

from dpjax import checks, trees
from dpjax.losses.classification import focal, one_hot
from dpjax.losses.regression import squared_error


def composite(
    *,
    gamma: float = 5.0,
    threshold: float = 0.0,
    beta: float = 1.0,
    coefficient: Literal["(1-alpha)/beta", "1/beta", "beta"] = "(1-alpha)/beta",
    error: Callable[[Array, Array], Array] = squared_error,
) -> Callable[..., Float[Array, ""]]:
    r"""Makes the weighted sum of focal loss, squared error and pre-activation penalty.

    The squared error converges fast and keeps logits small; the focal loss follows once the easy
    examples are learnt; the penalty keeps weights, and with them gradients, small.

    $$ \alpha \, \text{focal}_\gamma(h, y) + (1 - \alpha) \, \tfrac12 \|h - y\|^2
       + \tfrac{1 - \alpha}\beta \sum_m \tfrac1{2 d_m} \|h_m\|^2,
       \qquad \alpha = \sigma(e - e_t) $$

    with the logits $h$, the one-hot label $y$, the sigmoid $\sigma$, the epoch $e$ and the
    pre-activations $h_m$ of the hidden layers, of $d_m$ numbers each. Published choices of
    (threshold, beta, gamma):

    | network | CIFAR-10 | Fashion-MNIST | MNIST |
    |---|---|---|---|
    | end to end | (7, 11, 5) | (0, 1, 5) | (0, 1, 5) |
    | on wavelet features | (2, 1, 2) | (2, 51, 2) | (2, 11, 10) |

    The penalty is for the early epochs: with the squared error it fades at the threshold. A
    constant penalty ("1/beta") dominates the gradient once the focal losses are flat: on
    Fashion-MNIST from pixels at beta 1 the accuracy is 78.1 % with it, and 86.4 % with the fading
    one (`experiments/results`, 3 seeds each).

    Args:
      gamma: The power in the focal loss.
      threshold: $e_t$, the epoch at which focal loss and squared error weigh the same.
      beta: The larger, the weaker the penalty; positive. ``math.inf`` means no penalty.
      coefficient: The factor before the penalty, which is illegible in the paper as printed. The
        default is that of a public implementation and of the formula above. "1/beta" and "beta"
        are other readings: constant factors of $\sum_m \|h_m\|^2 / d_m$, without the half.
      error: Replaces the squared error, for example by ``losses.absolute``.

    Returns:
      ``loss(logits, label, *, hidden, epoch)``. `of` passes ``hidden`` and ``epoch``;
      ``dpjax.dpsgd(..., per_step=lambda step: step // steps_per_epoch)`` defines the epoch. A label
      out of range gives NaN, with a gradient of zero.

    Example:
      >>> loss = composite(gamma=0.0, beta=2.0)
      >>> value = loss(jnp.zeros(2), jnp.array(0), hidden=[jnp.full(3, 2.0)], epoch=0)
      >>> bool(jnp.isclose(value, 0.5 * jnp.log(2) + 0.5 * 0.5 + 0.5 * 4 / 4))
      True

    References:
      Shamsabadi and Papernot, "Losing Less: A Loss for Differentially Private Deep Learning",
      2022, equations 5 to 8, tables 6 and 7.
    """
    call = "losses.composite"
    checks.one_of(call, "coefficient", coefficient, ("(1-alpha)/beta", "1/beta", "beta"))
    # An infinite beta makes the penalty 0, except if beta itself is the factor.
    beta = checks.positive(call, "beta", beta, infinite=coefficient != "beta")
    # The constant before the sum of |h_m|^2 / d_m: by default with the half from the formula.
    penalty_weights = {"(1-alpha)/beta": 0.5 / beta, "1/beta": 1 / beta, "beta": beta}
    penalty_weight = penalty_weights[coefficient]
    focal_loss = focal(gamma)
    error_loss = one_hot(error)

    def loss(
        logits: Float[ArrayLike, " classes"],
        label: Integer[ArrayLike, ""],
        *,
        hidden: Sequence[Float[ArrayLike, "..."]],
        epoch: ArrayLike,
    ) -> Float[Array, ""]:
        logits = jnp.asarray(logits)
        label = jnp.asarray(label)
        # The epoch is public, so alpha costs no privacy.
        alpha = jax.nn.sigmoid(jnp.asarray(epoch, jnp.float32) - threshold)
        # An error with weight 0 reads zeros, because 0 times an error that overflows is NaN.
        focal_logits = jnp.where(alpha > 0, logits, 0)
        error_logits = jnp.where(1 - alpha > 0, logits, 0)
        focal_term = alpha * focal_loss(focal_logits, label)
        total = focal_term + (1 - alpha) * error_loss(error_logits, label)
        if penalty_weight:  # a penalty with weight 0 is left out, for the same reason
            fading = jnp.ones(())  # a constant penalty does not fade
            if coefficient == "(1-alpha)/beta":
                fading = 1 - alpha
            penalized = [jnp.where(fading > 0, h, 0) for h in hidden]
            total += fading * penalty_weight * _mean_squares(penalized)
        # A label out of range also drops the penalty. `label < logits.size` does not test this for
        # labels in uint8, in which 256 classes overflow to 0.
        is_class = jnp.any(jnp.arange(logits.size) == label)
        return jnp.where(is_class, total, jnp.nan)

    return loss


def _mean_squares(hidden: Sequence[ArrayLike]) -> Array:
    r"""$\sum_m \|h_m\|^2 / d_m$."""
    total = jnp.zeros((), jnp.float32)
    for h in map(jnp.asarray, hidden):
        wide = h.astype(trees.wide(h.dtype))  # the square of a bfloat16 number has two digits
        total = total + jnp.mean(wide * wide)
    return total
