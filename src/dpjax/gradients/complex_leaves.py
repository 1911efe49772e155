# SPDX-License-Identifier: Apache-2.0
r"""Complex leaves: the gradient by a complex leaf is that by its real and imaginary parts.

A complex leaf $z = x + iy$ is clipped as two real arrays, so that the norm of its gradient is that
of $(\partial_x \ell, \partial_y \ell)$. `jax.grad` returns $\partial_x \ell - i \partial_y \ell$
for such a leaf, and so do sums here. A step down the loss takes the conjugate of it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dpjax.types import PyTree


def any_complex(tree: PyTree) -> bool:
    """Whether some leaf is complex."""
    return any(map(jnp.iscomplexobj, jax.tree.leaves(tree)))


def parts(tree: PyTree, sign: int = 1) -> PyTree:
    """Each complex leaf as a real one, with its two parts along a last axis.

    Args:
      tree: Some leaves may be complex.
      sign: -1 for gradients, whose imaginary part JAX negates.
    """

    def of(leaf: Any) -> Any:
        if not jnp.iscomplexobj(leaf):
            return leaf
        return jnp.stack([jnp.real(leaf), sign * jnp.imag(leaf)], axis=-1)

    return jax.tree.map(of, tree)


def joined(tree: PyTree, like: PyTree, sign: int = 1) -> PyTree:
    """The inverse of `parts`.

    Args:
      tree: What `parts` returned, or gradients of its shapes.
      like: Which leaves are complex.
      sign: As for `parts`.
    """

    def of(leaf: Any, before: Any) -> Any:
        if not jnp.iscomplexobj(before):
            return leaf
        return jax.lax.complex(leaf[..., 0], sign * leaf[..., 1])

    return jax.tree.map(of, tree, like)
