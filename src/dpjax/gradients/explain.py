# SPDX-License-Identifier: Apache-2.0
"""`explain`: how the book-keeping engine handles each leaf of a loss, from shapes alone."""

from __future__ import annotations

from collections import Counter

import jax

from dpjax import trees
from dpjax.gradients._bookkeeping.cost import foresee
from dpjax.gradients.traced import Traced
from dpjax.types import LossFn, PyTree


def explain(loss: LossFn, params: PyTree, example: PyTree) -> str:
    """Describes, leaf by leaf, where a loss uses its parameters and how each use is handled.

    The line of a leaf shows its path, the primitives in which it meets the data, the rule for its
    norms, and the multiplications for one example. Or it says why the leaf is materialised, which
    is exact too, but stores one gradient of that leaf per example. The loss is
    ``loss(params, example) -> scalar``; both arguments may be shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["kernel"] + p["bias"]) ** p["power"])
      >>> params = {"bias": jnp.zeros(3), "kernel": jnp.zeros((2, 3)), "power": jnp.ones(())}
      >>> print(explain(loss, params, jnp.zeros(2)))
      leaf    used by      norm by      products
      bias    add          derivative         24
      kernel  dot_general  product             5
      power   materialised: enters pow
    """
    program = Traced(loss).program(params, example)
    leaves = jax.tree.leaves(jax.eval_shape(lambda x: x, params))
    rows: list[tuple[str, ...]] = [("leaf", "used by", "norm by", "products")]
    for i, name in enumerate(trees.leaf_names(params)):
        sites = [site for site in program.sites if i in site.leaves]
        if i in program.materialised:
            rows.append((name, f"materialised: {program.materialised[i]}"))
        elif not sites:
            rows.append((name, "not used"))
        else:
            counts = Counter(site.equation.primitive.name for site in sites)
            uses = ", ".join(use if n == 1 else f"{n} x {use}" for use, n in counts.items())
            # The choice of the engine itself, which it makes by shapes.
            choice = foresee(leaves[i], sites, i)
            rule = choice.rule + (", kept" if choice.keep else "")
            rows.append((name, uses, rule, f"{choice.operations:,}"))
    widths = [max((len(row[k]) for row in rows if len(row) > k + 1), default=0) for k in range(3)]

    def line(row: tuple[str, ...]) -> str:
        *words, last = row
        padded = [word.ljust(width) for word, width in zip(words, widths, strict=False)]
        return "  ".join([*padded, last.rjust(9) if len(row) == 4 else last])

    return "\n".join(map(line, rows))
