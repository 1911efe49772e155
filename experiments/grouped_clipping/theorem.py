# SPDX-License-Identifier: Apache-2.0
"""Theorem 1: flat clipping loses most of a gradient; k groups with the same bound lose less.

The groups partition the paper's network for MNIST. Its gradients are random, with lengths of the
leaves that differ by orders of magnitude, and the part that clipping takes away is measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import clipping, models
from experiments.common.claims import Claim

GRADIENTS = 200
GROUPS = (2, 4, 8)
BOUND = 1.0


class Lost(NamedTuple):
    """The length that a way of clipping takes away, over what flat clipping does."""

    grouped: bool


ROWS = {
    "theorem 1: lost by groups": Lost(grouped=True),
    "theorem 1: lost by flat clipping": Lost(grouped=False),
}
_GROUPS, _FLAT = ROWS
CLAIM = Claim(
    "theorem 1: 2, 4 and 8 groups lose less of a gradient than flat clipping",
    [_GROUPS],
    "below",
    than=[_FLAT],
    measure=lambda run: run["lost"],
)


def measured(row: Lost, seed: int) -> dict[str, Any]:
    """For each number of groups the mean ratio, over gradients that flat clipping shortens.

    ``more`` counts the gradients that lose more in groups: the theorem has none.
    """
    if not row.grouped:
        return {"problems": GRADIENTS, "lost": [1.0] * len(GROUPS), "more": 0}
    model = models.by_name("tempered_cnn", 10)
    image = jnp.zeros((28, 28, 1))
    shapes = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    gradients = structure.unflatten(
        random_leaf(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)
    )
    flat = lost(clipping.flat(BOUND), gradients)
    means = []
    more = 0
    for groups in GROUPS:
        ratios = lost(clipping.grouped(BOUND, groups), gradients) / flat
        means.append(float(jnp.mean(ratios, where=flat > 0)))
        more += int(jnp.sum(ratios > 1 + 1e-5))
    return {"problems": GRADIENTS, "lost": means, "more": more}


def random_leaf(key: Array, shape: tuple[int, ...]) -> Float[Array, "gradients ..."]:
    """Random directions, whose lengths are log-normal and independent of other leaves."""
    for_direction, for_length = jax.random.split(key)
    leaf = jax.random.normal(for_direction, (GRADIENTS, *shape))
    axes = tuple(range(1, leaf.ndim))
    lengths = jnp.exp(2 * jax.random.normal(for_length, (GRADIENTS,) + (1,) * len(shape)))
    return lengths * leaf / jnp.sqrt(jnp.sum(leaf**2, axis=axes, keepdims=True))


def lost(rule: Any, gradients: Any) -> Float[Array, " gradients"]:
    """The length of the part of each gradient that clipping takes away."""

    def one(gradient: Any) -> Array:
        clipped, _, _ = clipping.clip(rule, jax.tree.map(lambda x: x[None], gradient))
        taken = jax.tree.map(jnp.subtract, gradient, clipped)
        return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(taken)))

    return jax.lax.map(one, gradients)
