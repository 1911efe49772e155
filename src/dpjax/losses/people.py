# SPDX-License-Identifier: Apache-2.0
"""From the loss of a row to the loss of a person, whose gradient is clipped once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpjax import trees
from dpjax.types import LossFn, PyTree


def of_person(loss: LossFn) -> LossFn:
    r"""Makes the mean of a loss over the drawn rows of a person.

    $$ \frac{1}{\max(1, \sum_j m_j)} \sum_j m_j \, \text{loss}(\theta, x_j) $$

    `dpjax.dpsgd` does this itself where `dpjax.sampling.persons` draws. A loop of your own gives
    the result to `dpjax.clipped_grad`, with rows and mask of ``sampler.batch``.

    Args:
      loss: ``loss(params, row)``, or ``loss(params, row, frozen)``.

    Returns:
      ``loss(params, (rows, mask))``, with rows ``[most_rows, ...]`` of one person.

    Sensitivity:
      That of one example: the divisor depends on only this person's rows, and clipping bounds the
      gradient of the mean.

    Example:
      >>> import dpjax
      >>> sampler = dpjax.sampling.persons([0, 0, 0, 1, 2], batch_size=2, most_rows=2)
      >>> rows, mask = sampler.batch(jnp.arange(5.0), jax.random.key(0), step=0)
      >>> loss = of_person(lambda w, x: 0.5 * jnp.sum((w - x) ** 2))
      >>> clipped = dpjax.clipped_grad(loss, dpjax.clipping.flat(1.0))
      >>> clipped(jnp.zeros(()), (rows, mask), mask=mask[:, 0]).norms.shape
      (3, 1)
    """

    def mean_loss(
        params: PyTree, person: tuple[PyTree, Bool[Array, " rows"]], *frozen: PyTree
    ) -> Float[Array, ""]:
        rows, mask = person
        values = jax.vmap(lambda row: loss(params, row, *frozen))(rows)
        values = values.astype(trees.wide(values.dtype))
        total = jnp.sum(jnp.where(mask, values, 0))
        return total / jnp.maximum(1, jnp.sum(mask))

    return mean_loss
