# SPDX-License-Identifier: Apache-2.0
"""`explain`: prints how the book-keeping engine handles each leaf of a loss.

It traces the loss and chooses rules on shapes alone, with the functions that the engine uses, so
a model of any size is explained in the time that tracing it takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dpjax import trees
from dpjax.gradients._bookkeeping.cost import foresee
from dpjax.gradients._bookkeeping.sites import Site
from dpjax.gradients.traced import Traced
from dpjax.types import LossFn, PyTree


def explain(loss: LossFn, params: PyTree, example: PyTree) -> str:
    """Describes, leaf by leaf, where a loss uses its parameters and how each use is handled.

    The line of a leaf shows its path, the primitives in which it meets the data, the rule for its
    norms, and the multiplications for one example. Or it says why the leaf is materialised, which
    is exact too, but stores one gradient of that leaf per example.

    Args:
      loss: ``loss(params, example) -> scalar``.
      params: Parameters, or their shapes.
      example: One example, or its shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["kernel"] + p["bias"]) ** p["power"])
      >>> params = {"bias": jnp.zeros(3), "kernel": jnp.zeros((2, 3)), "power": jnp.ones(())}
      >>> print(explain(loss, params, jnp.zeros(2)))
      bias    add          derivative         24
      kernel  dot_general  product             5
      power   materialised: enters pow
    """
    program = Traced(loss).program(params, example)
    leaves = [
        jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(params)
    ]
    rows: list[tuple[str, ...]] = []
    for i, name in enumerate(trees.leaf_names(params)):
        sites = [site for site in program.sites if i in site.leaves]
        if i in program.materialised:
            rows.append((name, f"materialised: {program.materialised[i]}"))
        elif not sites:
            rows.append((name, "not used"))
        else:
            rows.append((name, *_handled(leaves[i], sites, i)))
    widths = [max((len(row[k]) for row in rows if len(row) > k + 1), default=0) for k in range(4)]
    return "\n".join(
        "  ".join(
            word if k == len(row) - 1 < 3 else word.rjust(9) if k == 3 else word.ljust(widths[k])
            for k, word in enumerate(row)
        )
        for row in rows
    )


def _handled(leaf: jax.ShapeDtypeStruct, sites: Sequence[Site], index: int) -> tuple[str, str, str]:
    """The primitives of a leaf, its rule, and the cost of the rule."""
    counts = Counter(site.equation.primitive.name for site in sites)
    words = ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items())
    # The engine's own choice from shapes, not a second opinion.
    choice = foresee(leaf, sites, index)
    return words, choice.rule + (", kept" if choice.keep else ""), f"{choice.operations:,}"
