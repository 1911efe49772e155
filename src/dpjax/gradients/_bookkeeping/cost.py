# SPDX-License-Identifier: Apache-2.0
"""Costs: which rule computes the norms of a leaf, chosen by shapes alone.

A cost is a number of multiplications of a large matrix product, by measured ratios for other work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpjax.gradients import platforms
from dpjax.gradients._bookkeeping.outer_products import Outer
from dpjax.gradients._bookkeeping.primitives import form_of, row_of
from dpjax.gradients._bookkeeping.sites import Site

Shape = jax.ShapeDtypeStruct

# Writing and squaring one number, or scaling it, in multiplications of a matrix product; and one
# multiplication of inner products between few positions.
_TRAFFIC, _SMALL = 8, 10
# On accelerators, in multiplications of one pass: a number that is written, squared and scaled; an
# inner product of positions; a multiplication at the highest precision, and of a sum of rounded
# numbers. Of a table: comparing two positions, and multiplying by a factor of 0 or 1. Read from
# expected cycles for TPU v5e (docs/pages/engine.md).
_KEPT, _PAIR, _EXACT, _TWO = 1250, 20_000, 16, 2
_COMPARED, _ADDED = 500, 4
# The Gram rule compiles a program for each pair of sites: 20 sites took more than a minute.
_MANY = 6
# Instantiated gradients are kept if they have at most this many times the numbers that the product
# reads: a second product for the sum would cost more than the memory.
_ROOM = 4
# A gradient is common to all examples if a leaf has this many times the entries that scale it.
_FEW = 4


class Choice(NamedTuple):
    """How norms and sum of a leaf are computed; the cost of one norm, and the numbers it writes."""

    rule: str
    keep: bool  # per-example gradients, for the sum
    operations: int
    numbers: int


def choose(leaf: Array | Shape, sites: Sequence[Site], forms: Sequence[Outer | None]) -> Choice:
    """The cheapest rule that fits; only shapes matter."""
    outers = [form for form in forms if form is not None]
    isometric = all(site.isometry for site in sites)
    if len(outers) < len(sites):
        # The cotangents of an elementwise use are as large as the gradients, and round the same.
        row = row_of(sites[0])
        once = len(sites) == 1 and row.entrywise and row.linear_in
        keep = not (isometric and once and entire(leaf, sites))
        return Choice("derivative", keep, _TRAFFIC * leaf.size, leaf.size)
    blocks, positions = outers[0].g.shape[1], sum(o.g.shape[2] for o in outers)
    # A one-hot column costs a comparison instead of a product over the inputs.
    width = max(1 if o.chosen else o.width for o in outers)
    depth, rows = outers[0].g.shape[3], any(o.chosen for o in outers)
    by_rows, pairs = rows and len(outers) == 1, blocks * positions**2
    read = sum(math.prod(a.shape[1:]) for o in outers for a in (*o.x, o.g))
    # A second product rounds otherwise. For an isometry `norms` bounds that; other views would need
    # an operator norm, so their gradients are kept.
    keep = leaf.size <= _ROOM * read or not isometric
    product = 0 if rows else blocks * positions * width * depth
    copied = sum(math.prod(x.shape[1:]) for o in outers if o.copied for x in o.x)
    instantiate, again = product + _TRAFFIC * leaf.size, product + _TRAFFIC * copied
    # A kept gradient is read once more, scaled; otherwise the product is taken again.
    after = _TRAFFIC * leaf.size if rows or keep else again
    # The norm by inner products between positions; the sum needs the product again.
    gram = pairs * (width + depth) * (1 if by_rows else _SMALL)
    written = copied + 2 * pairs
    if not platforms.on_cpu():
        # A kept gradient may be formed at the loss's own precision; a second product may not.
        keep, instantiate, after = True, product + _KEPT * leaf.size, 0
        exact, twice = (1, _TWO) if all(o.short for o in outers) else (_EXACT, _EXACT)
        per_pair = _ADDED * depth + _COMPARED if by_rows else exact * (width + depth) + _PAIR
        gram, again = pairs * per_pair, twice * product
    # These three take the norm of the view's gradient: that of the leaf's for an isometry alone.
    one_form = isometric and alike(outers) is not None
    if one_form and positions == 1 and not rows:
        return Choice("product", False, blocks * (width + depth), copied)
    if one_form and len(outers) <= _MANY and gram + again < instantiate + after:
        return Choice("rows" if by_rows else "gram", False, gram, written)
    # A form with indices has no dense inputs to multiply: the VJP of the gather is a scatter-add.
    rule = "derivative" if rows else "instantiate"
    return Choice(rule, keep, instantiate, leaf.size + copied)


def aside(
    index: int, leaf: Array | Shape, sites: Sequence[Site], forms: Sequence[Outer | None]
) -> list[int]:
    """The sites of a leaf whose gradients are better taken as common to all examples."""

    def few(site: Site) -> bool:
        axes = site.slices.get(index)
        return axes is not None and _FEW * math.prod(leaf.shape[a] for a in axes) <= leaf.size

    common = [k for k, site in enumerate(sites) if few(site)]
    counted = {a for k in common for a in sites[k].slices[index]}

    def meets(site: Site, form: Outer | None) -> bool:
        """Whether inner products with a common gradient need no gradient of an example."""
        if form is None or not site.isometry:
            return False
        if form.chosen:
            return not counted and not site.stacks and site.axes == tuple(range(leaf.ndim))
        alone = form.g.shape[1] == 1 and form.axes is not None and counted <= {*form.axes[2]}
        return alone or not counted

    pairs = zip(sites, forms, strict=True)
    rest = [meets(*pair) for k, pair in enumerate(pairs) if k not in common]
    return common if len(common) <= _MANY and all(rest) else []


def foresee(leaf: Shape, sites: Sequence[Site], index: int) -> Choice:
    """The choice for a leaf, from shapes alone."""
    choices: list[Choice] = []

    def on_shapes(data: Sequence[Sequence[Array]], cotangents: Sequence[Array]) -> None:
        forms = list(map(form_of, sites, data, cotangents))
        common = aside(index, leaf, sites, forms)
        rest = [k for k in range(len(sites)) if k not in common]
        choice = Choice("", False, 0, 0)
        if rest:
            choice = choose(leaf, [sites[k] for k in rest], [forms[k] for k in rest])
        if common:
            rule = f"{choice.rule} + common" if rest else "common"
            # Their inner products take a product as large as that of the forward pass.
            positions = sum(math.prod(cotangents[k].shape[1:-1]) for k in rest)
            more = max(1, positions) * len(common) * leaf.size
            choice = choice._replace(rule=rule, operations=choice.operations + more)
        choices.append(choice)

    def batched(x: Shape) -> Shape:
        return jax.ShapeDtypeStruct((1, *x.shape), x.dtype)

    # Through the functions that the run calls, so that forecast and run cannot differ.
    data = [[batched(x) for x in site.data] for site in sites]
    jax.eval_shape(on_shapes, data, [batched(site.output) for site in sites])
    return choices[0]


def alike(forms: Sequence[Outer]) -> list[Outer] | None:
    """The forms of one leaf, transposed so that their inputs agree; None if they cannot."""
    if len(forms) < 2:
        return list(forms)
    first, turned = forms[0], []
    for form in forms:
        if first.axes is None or form.axes is None or form.axes[0] != first.axes[0]:
            return None
        if form.axes == first.axes:
            turned.append(form)
        # Tied weights: one use contracts the axis that the other produces.
        elif form.axes[1:] == first.axes[:0:-1] and not form.chosen:
            x, g = (jnp.swapaxes(a, 2, 3) for a in (form.g, jnp.concatenate(form.x, axis=2)))
            turned.append(form._replace(x=(x,), g=g))
        else:
            return None
    return turned


def entire(leaf: Array | Shape, sites: Sequence[Site]) -> bool:
    """Whether one example's gradient of a leaf has as many numbers as its cotangents."""
    return leaf.size == sum(math.prod(site.output.shape) for site in sites)
