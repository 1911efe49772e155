# SPDX-License-Identifier: Apache-2.0
"""Rules: a leaf's per-example gradient norms and clipped sum, from one site.

Each rule sees the site's other inputs and the cotangent of its output, both with a batch
axis.  `norms` is a table by primitive; what has no row, or does not fit its row, takes
the generic rule, which instantiates one example's gradient by the equation's own
derivative.  The sum needs no table: it is the derivative of the batched equation at the
cotangents scaled by the factors, one matrix product for most sites.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpjax import trees
from dpjax.gradients.walk import Site

__all__ = ["NORM_RULES", "square_norms", "weighted_sum"]

Squares = Float[Array, " batch"]
Rule = Callable[[Site, Array, Sequence[Array], Array], "Squares | None"]


def square_norms(
    site: Site, leaf: Array, others: Sequence[Array], cotangent: Array
) -> Float[Array, " batch"]:
    """The squared norm of each example's gradient of a leaf.

    Args:
      site: Where the leaf is used.
      leaf: Its value (or shape).
      others: The site's other inputs, with a batch axis.
      cotangent: Of the site's output, with a batch axis.
    """
    others, cotangent = _widened(others), _widened([cotangent])[0]
    rule = NORM_RULES.get(site.equation.primitive.name)
    found = rule(site, leaf, others, cotangent) if rule and site.isometry else None
    return _instantiated(site, leaf, others, cotangent) if found is None else found


def weighted_sum(
    site: Site, leaf: Array, others: Sequence[Array], cotangent: Array, factors: Squares
) -> Array:
    """The sum of the examples' gradients of a leaf, each times its factor.

    An example with factor 0 contributes exactly 0, whatever its inputs and cotangent.
    """
    # With a cotangent of 0 any finite input gives 0; 1 is one that may also be divided by.
    others = [_silenced(x, factors != 0, 1) for x in _widened(others)]
    cotangent = _silenced(_widened([cotangent])[0], factors != 0, 0)
    scaled = cotangent * trees.expand(factors, cotangent)
    wide = jnp.zeros(leaf.shape, trees.wide(leaf.dtype))
    if site.equation.primitive.name == "conv_general_dilated" and _fits_patches(site):
        patches, g = _patches_and_cotangent(site, leaf, others, scaled)
        kernel = _kernel(site, leaf, _product("bks,bcs->kc", patches, g))
        return jax.vjp(site.view, wide)[1](kernel)[0]

    def outputs(w: Array) -> Array:
        return jax.vmap(lambda *x: site.apply(w, x))(*others)

    return jax.vjp(outputs, wide)[1](scaled)[0]


def _instantiated(site: Site, leaf: Array, others: Sequence[Array], cotangent: Array) -> Squares:
    """The generic rule: each example's gradient by the equation's own derivative."""
    wide = jnp.zeros(leaf.shape, trees.wide(leaf.dtype))

    def square(cotangent: Array, *others: Array) -> Array:
        gradient = jax.vjp(lambda w: site.apply(w, others), wide)[1](cotangent)[0]
        return jnp.sum(gradient * gradient)

    return jax.vmap(square)(cotangent, *others)


def _dot_general(
    site: Site, leaf: Array, others: Sequence[Array], cotangent: Array
) -> Squares | None:
    r"""The gradient of a matrix is $x^\top g$, over the positions of one example.

    One position: $\lVert x \rVert^2 \lVert g \rVert^2$.  Several: the Gram matrices of
    positions, or the product itself, whichever takes fewer operations.  Gram matrices
    square what cancels between positions, so their answer is rounded up.
    """
    (contract, batch) = site.equation.params["dimension_numbers"]
    if batch[0]:
        return None
    (x,), side = others, 1 - site.operand
    inner = [d + 1 for d in contract[side]]
    free = [d for d in range(1, x.ndim) if d not in inner]
    size = x.shape[0]
    positions = math.prod(x.shape[d] for d in free)
    width = math.prod(x.shape[d] for d in inner)
    x = jnp.transpose(x, (0, *free, *inner)).reshape(size, positions, width)
    # The output has the free axes of the left operand first, then those of the right.
    if side == 0:
        g = cotangent.reshape(size, positions, -1)
    else:
        g = jnp.swapaxes(cotangent.reshape(size, -1, positions), 1, 2)
    if positions == 1:
        return _square(x) * _square(g)
    depth = g.shape[-1]
    if positions * (width + depth) < width * depth:
        grams = _product("bsk,btk->bst", x, x) * _product("bsk,btk->bst", g, g)
        # Positions that cancel leave rounding behind; a norm may be too long, never too short.
        lengths = jnp.sqrt(jnp.sum(x * x, axis=-1) * jnp.sum(g * g, axis=-1))
        rounding = jnp.finfo(x.dtype).eps * jnp.sum(lengths, axis=1) ** 2
        return jnp.maximum(jnp.sum(grams, axis=(1, 2)), 0) + rounding
    return _square(_product("bsk,bsd->bkd", x, g))


def _convolution(
    site: Site, leaf: Array, others: Sequence[Array], cotangent: Array
) -> Squares | None:
    """The gradient of a kernel is patches times cotangents, over the positions."""
    if not _fits_patches(site):
        return None
    patches, g = _patches_and_cotangent(site, leaf, others, cotangent)
    return _square(_product("bks,bcs->bkc", patches, g))


def _fits_patches(site: Site) -> bool:
    p = site.equation.params
    plain = p["feature_group_count"] == p["batch_group_count"] == 1
    return site.operand == 1 and plain and site.isometry


def _patches_and_cotangent(
    site: Site, leaf: Array, others: Sequence[Array], cotangent: Array
) -> tuple[Array, Array]:
    """Patches ``[batch, channels * kernel, positions]`` and the cotangent beside them.

    Patches are strided slices of the padded input, one for each entry of the kernel: a
    copy, where a convolution with an identity kernel would be many multiplications by 0.
    """
    p = site.equation.params
    (x,), numbers = others, p["dimension_numbers"]
    x = jnp.transpose(x, (0, *(1 + d for d in numbers.lhs_spec)))
    g = jnp.transpose(cotangent, (0, *(1 + d for d in numbers.out_spec)))
    kernel = [site.view(leaf).shape[d] for d in numbers.rhs_spec[2:]]
    edges = [
        (low, high, spread - 1)
        for (low, high), spread in zip(p["padding"], p["lhs_dilation"], strict=True)
    ]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 3 + edges)
    space = g.shape[3:]

    def shifted(offset: tuple[int, ...]) -> Array:
        starts = [o * d for o, d in zip(offset, p["rhs_dilation"], strict=True)]
        ends = [
            a + (n - 1) * stride + 1
            for a, n, stride in zip(starts, space, p["window_strides"], strict=True)
        ]
        whole = list(x.shape[:3])
        return jax.lax.slice(
            x, [0, 0, 0, *starts], [*whole, *ends], [1, 1, 1, *p["window_strides"]]
        )

    offsets = itertools.product(*map(range, kernel))
    patches = jnp.stack([shifted(offset) for offset in offsets], axis=3)
    size, images, channels, entries = patches.shape[:4]
    patches = patches.reshape(size, images, channels * entries, -1)
    g = g.reshape(size, images, g.shape[2], -1)
    # The images of one example are further positions.
    patches = jnp.swapaxes(patches, 1, 2).reshape(size, channels * entries, -1)
    return patches, jnp.swapaxes(g, 1, 2).reshape(size, g.shape[2], -1)


def _kernel(site: Site, leaf: Array, product: Array) -> Array:
    """From ``[channels * kernel, out]`` to the layout of the kernel."""
    numbers = site.equation.params["dimension_numbers"]
    shape = site.view(leaf).shape
    out, channels, *space = (shape[d] for d in numbers.rhs_spec)
    gradient = jnp.moveaxis(product.reshape(channels, *space, out), -1, 0)
    return jnp.transpose(gradient, np.argsort(numbers.rhs_spec).tolist())


NORM_RULES: dict[str, Rule] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
}


def _product(formula: str, a: Array, b: Array) -> Array:
    return jnp.einsum(formula, a, b, precision=jax.lax.Precision.HIGHEST)


def _square(x: Array) -> Squares:
    return jnp.sum(x * x, axis=tuple(range(1, x.ndim)))


def _silenced(x: Array, keep: Array, filling: float) -> Array:
    """A constant where an example takes no part, so that its NaN reaches nobody."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.where(trees.expand(keep, x), x, filling)


def _widened(arrays: Sequence[Array]) -> list[Array]:
    """Floats in float32 or wider; indices as they are."""
    return [
        x.astype(trees.wide(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for x in arrays
    ]
