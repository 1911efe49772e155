# SPDX-License-Identifier: Apache-2.0
"""`explain`: how the book-keeping engine handles each leaf of a loss, from shapes only.

A *site* is an equation in which parameters meet the data. A *materialised* leaf has another use,
and is differentiated for each example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax

from dpjax import trees
from dpjax.gradients._bookkeeping.cost import foresee
from dpjax.gradients._bookkeeping.sites import Program, Site
from dpjax.gradients.traced import Traced
from dpjax.types import LossFn, PyTree


def explain(loss: LossFn, params: PyTree, example: PyTree, frozen: PyTree = None) -> str:
    """Describes, leaf by leaf, where a loss uses its parameters and how each use is handled.

    The line of a leaf shows its path, the primitives in which it meets the data, the rule for its
    norms, and the multiplications for one example. A materialised leaf, which is exact too but
    stores one gradient per example, has the reason instead. The loss is
    ``loss(params, example) -> scalar``, or with ``frozen``, weights that are not trained,
    ``loss(params, example, frozen)``. All arguments may be shapes.

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
    programs: list[Program] = []

    def trace(frozen: PyTree) -> None:
        programs.append(Traced(loss, frozen=frozen).program(params, example))

    jax.eval_shape(trace, frozen)  # so frozen weights may be shapes too
    return _described(programs[0], params)


def _described(program: Program, params: PyTree) -> str:
    """The table of `explain`: a line for each leaf of the parameters."""
    # Parameters may be arrays or shapes: here all are shapes.
    leaves = jax.tree.leaves(jax.eval_shape(lambda x: x, params))
    rows: list[tuple[str, ...]] = [("leaf", "used by", "norm by", "products")]
    for i, name in enumerate(trees.leaf_names(params)):
        sites = [site for site in program.sites if i in site.leaves]
        if i in program.materialised:
            rows.append((name, f"materialised: {program.materialised[i]}"))
        elif not sites:
            rows.append((name, "not used"))
        else:
            # The rule by which the engine computes the norms of leaf i, and its cost. A run makes
            # the same choice, because the choice depends on shapes only.
            choice = foresee(leaves[i], sites, i)
            # "kept": the clipped sum reads the per-example gradients that the norms were taken of.
            rule = f"{choice.rule}, kept" if choice.keep else choice.rule
            rows.append((name, _uses(sites), rule, f"{choice.operations:,}"))
    return _aligned(rows)


def _uses(sites: Sequence[Site]) -> str:
    """The primitives of the sites, with the number of sites of each."""
    counts = Counter(site.equation.primitive.name for site in sites)
    return ", ".join(use if count == 1 else f"{count} x {use}" for use, count in counts.items())


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """The rows as lines, in which each column is as wide as its widest entry.

    A row has four entries, the last one a number. The row of a leaf that is materialised, or not
    used, has two: its name and a text that takes the other columns.
    """
    widths = [0, 0, 0]  # of the columns before the numbers
    for *before_last, _ in rows:
        for column, entry in enumerate(before_last):
            widths[column] = max(widths[column], len(entry))
    lines = []
    for *before_last, last in rows:
        # Not strict: a row of two entries has one before the last, and needs only the first width.
        padded = [entry.ljust(width) for entry, width in zip(before_last, widths, strict=False)]
        if len(padded) == len(widths):
            last = last.rjust(9)  # the width of 1,000,000; numbers are aligned on the right
        lines.append("  ".join([*padded, last]))
    return "\n".join(lines)
