# SPDX-License-Identifier: Apache-2.0
"""Feature scaling, without a privacy cost: example by example, or by given moments."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from dpjax import trees


class Moments(NamedTuple):
    """Mean and variance of every channel, over examples and pixels."""

    mean: Float[Array, " channels"]
    variance: Float[Array, " channels"]


def group_norm(
    features: Float[ArrayLike, "*examples height width channels"],
    groups: int,
    *,
    stabilizer: float = 1e-5,
) -> Float[Array, "*examples height width channels"]:
    r"""Normalises each group of neighbouring channels of each example by itself.

    $$ y = \frac{x - \mu_g}{\sqrt{\sigma_g^2 + s}} $$

    with the mean $\mu_g$ and the variance $\sigma_g^2$ of all pixels and channels of the group.

    Args:
      features: Height, width and channels last; the axes before them are of examples. An array of
        three axes is a single example: give sequences, ``(examples, length, channels)``, a height
        of 1, ``features[:, None]``.
      groups: The number of groups; the papers use 9, 27 or 81 for the features of a ScatterNet.
      stabilizer: $s$; prevents division by 0 in a constant group.

    Privacy:
      An example's result depends only on that example, so it costs nothing.

    Example:
      >>> group_norm(jnp.array([[[1.0, 3.0, 7.0, 7.0]]]), groups=2).round(3)
      Array([[[-1.,  1.,  0.,  0.]]], dtype=float32)

    References:
      Wu and He, "Group Normalization", 2018; without its learned scale and shift.
    """
    features = jnp.asarray(features)
    *examples_and_pixels, channels = features.shape
    if channels % groups:
        raise ValueError(f"features.group_norm: {groups} groups must divide {channels} channels.")
    # A mean over a group in bfloat16 keeps only two digits.
    wide = features.astype(trees.wide(features.dtype))
    # [*examples, height, width, groups, channels of a group]
    grouped = wide.reshape(*examples_and_pixels, groups, channels // groups)
    # Height, width, and the channels of a group. The axes leave out the batch, because statistics
    # over it make an example depend on others.
    axes = (-4, -3, -1)
    mean = jnp.mean(grouped, axis=axes, keepdims=True)
    variance = jnp.var(grouped, axis=axes, keepdims=True)
    scaled = (grouped - mean) / jnp.sqrt(variance + stabilizer)
    return scaled.reshape(features.shape).astype(features.dtype)


def normalize(
    features: Float[ArrayLike, "*examples height width channels"],
    moments: Moments,
    *,
    stabilizer: float = 1e-5,
) -> Float[Array, "*examples height width channels"]:
    r"""Shifts and scales channels by released or public moments.

    $$ y_c = \frac{x_c - \mu_c}{\sqrt{\sigma_c^2 + s}},
       \quad y_c = 0 \text{ where } \sigma_c^2 = 0 $$

    Channels are last; ``stabilizer`` is $s$. Moments are from `Normalization.release`, or of public
    data. A noisy variance of 0 means more noise than signal.

    Privacy:
      Free: the examples share only the released moments.

    Example:
      >>> moments = Moments(mean=jnp.array([2.0, 5.0]), variance=jnp.array([4.0, 0.0]))
      >>> normalize(jnp.array([[[[6.0, 5.5]]]]), moments).round(3)
      Array([[[[2., 0.]]]], dtype=float32)
    """
    features = jnp.asarray(features)
    # Noise dominates a variance of 0, and its inverse root amplifies the channel.
    scale = jnp.where(moments.variance > 0, jax.lax.rsqrt(moments.variance + stabilizer), 0)
    mean = jnp.broadcast_to(moments.mean, features.shape)
    scale = jnp.broadcast_to(scale, features.shape)
    return (features - mean) * scale
