# SPDX-License-Identifier: Apache-2.0
"""The book-keeping engine: clipped sums without per-example gradients.

One forward pass and one backward pass give, for every site, the inputs and the output's
cotangent of each example.  Norms follow from those by the table in `rules`; the rule of
the mechanism makes factors of them; and the sum is formed once, already scaled.  Leaves
that the walk could not follow come out of the same backward pass whole.

References:
  Goodfellow, "Efficient Per-Example Gradient Computations", 2015; Bu et al.,
  "Differentially Private Optimization on Large Model at Small Cost", 2023.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from dpjax import trees
from dpjax.gradients.rules import square_norms, weighted_sum
from dpjax.gradients.walk import trace
from dpjax.types import ClippedSum, Clipping, LossFn, PyTree

__all__ = ["explain", "ghost"]


def ghost(
    loss: LossFn,
    rule: Clipping,
    params: PyTree,
    batch: PyTree,
    mask: Bool[Array, " batch"],
    microbatch_size: int,
) -> ClippedSum:
    """Norms and sum from the inputs and cotangents of every place a parameter enters."""
    del microbatch_size
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    program = trace(loss, params, example)
    leaves, structure = jax.tree.flatten(params)
    groups = rule.partition.assign(params)
    taps = [jnp.zeros(site.output.shape, site.output.dtype) for site in program.sites]
    whole = {i: leaves[i] for i in program.materialised}

    backward = jax.value_and_grad(program.run, argnums=(0, 1), has_aux=True)
    (losses, (aux, others)), (cotangents, gradients) = jax.vmap(
        backward, in_axes=(None, None, None, 0)
    )(taps, whole, leaves, batch)

    squares = [jnp.zeros_like(losses, trees.wide(losses.dtype))] * rule.partition.size
    for site, inputs, cotangent in zip(program.sites, others, cotangents, strict=True):
        square = square_norms(site, leaves[site.leaf], inputs, cotangent)
        squares[groups[site.leaf]] = squares[groups[site.leaf]] + square
    for i, gradient in gradients.items():
        square = trees.group_norms([gradient], (0,), 1)[:, 0] ** 2
        squares[groups[i]] = squares[groups[i]] + square
    norms = jnp.sqrt(jnp.stack(squares, axis=-1))
    real = mask[:, None]
    factors = jnp.where(real, rule.factors(norms), 0)

    sums = [jnp.zeros(leaf.shape, trees.wide(leaf.dtype)) for leaf in leaves]
    for site, inputs, cotangent in zip(program.sites, others, cotangents, strict=True):
        factor = factors[:, groups[site.leaf]]
        sums[site.leaf] = weighted_sum(site, leaves[site.leaf], inputs, cotangent, factor)
    for i, gradient in gradients.items():
        sums[i] = trees.scaled_sum([gradient], factors, (groups[i],))[0]
    return ClippedSum(
        structure.unflatten(sums),
        jnp.where(mask, losses, 0),
        jnp.where(real, norms, 0),
        factors,
        aux,
    )


def explain(loss: LossFn, params: PyTree, example: PyTree) -> str:
    """Says, leaf by leaf, where a loss uses its parameters and how each is handled.

    Args:
      loss: ``loss(params, example) -> scalar``.
      params: Parameters, or their shapes.
      example: One example, or its shapes.

    Example:
      >>> loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["kernel"] + p["bias"])) + p["scale"] ** 2
      >>> params = {"bias": jnp.zeros(3), "kernel": jnp.zeros((2, 3)), "scale": jnp.ones(())}
      >>> print(explain(loss, params, jnp.zeros(2)))
      bias    add
      kernel  dot_general
      scale   materialised: enters integer_pow
    """
    program = trace(lambda p, x: (loss(p, x), None), params, example)
    words = {site.leaf: site.equation.primitive.name for site in program.sites}
    words |= {i: f"materialised: {why}" for i, why in program.materialised.items()}
    names = trees.leaf_names(params)
    width = max(map(len, names), default=0)
    return "\n".join(f"{name:{width}}  {words.get(i, 'not used')}" for i, name in enumerate(names))
