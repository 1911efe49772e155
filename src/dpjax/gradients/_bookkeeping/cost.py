# SPDX-License-Identifier: Apache-2.0
"""Costs: which rule computes the norms of a leaf, chosen by shapes only.

A cost is a number of multiplications of a large matrix product, by measured ratios for other work.
Each rule has two costs: the norms of a batch, and the clipped sum that follows them.

A *site* is an equation of the loss in which a *view*, a value computed from leaves of the
parameters, meets the data. The view is an *isometry* if it only rearranges the entries of one leaf:
their gradients then have the same norm.
The *form* of a site has one example's gradient of the view as outer products over positions,
``gradient[block, input, output] = sum(x[block, input, s] * g[block, s, output] for each s)``. The
rules of `leaf_norms` compute the norm of this sum:

* *product*: there is a single position;
* *gram*: from inner products between all pairs of positions;
* *rows*: the same for a table, whose inputs ``x`` are row numbers;
* *instantiate*: from the gradient itself; *derivative*: likewise, by JAX, without a form.

A form is *short* where the loss multiplies in one pass of a matrix unit, which rounds its operands.
A site has a *common* gradient if all examples share it, apart from scales: it needs no rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpjax.gradients import _platforms
from dpjax.gradients._bookkeeping.outer_products import Outer
from dpjax.gradients._bookkeeping.primitives import form_of, row_of
from dpjax.gradients._bookkeeping.sites import Site

Shape = jax.ShapeDtypeStruct

# Costs on a CPU: to write one number and square or scale it, and a multiplication in the small
# inner products between few positions.
_NUMBER = 8
_SMALL_PRODUCT = 10
# Costs on an accelerator, in multiplications of one pass: to write, square and scale a number; one
# pair of positions; a multiplication at the highest precision, and in a sum of rounded numbers.
# They are expected cycles of a TPU v5e (docs/pages/engine.md).
_KEPT_NUMBER = 1250
_PAIR = 20_000
_ALL_PASSES = 16
_TWO_PASSES = 2
# Costs of a table on an accelerator: to compare the rows of two positions, and to add a number of
# equal rows.
_COMPARISON = 500
_ADDITION = 4
# The Gram rule compiles a program for each pair of sites: 20 sites took more than a minute.
_MANY_SITES = 6
# Instantiated gradients are kept if they have at most this many times the numbers that the product
# reads: a second product for the sum costs more than the memory.
_ROOM = 4
# A gradient is common to all examples if a leaf has this many times the entries that scale it.
_FEW_SCALES = 4


class Choice(NamedTuple):
    """How norms and sum of a leaf are computed; the cost of one norm, and the numbers it writes."""

    rule: str
    keep: bool  # whether the clipped sum reads the per-example gradients of the norm
    operations: int
    numbers: int


class _Sizes(NamedTuple):
    """Sizes of the outer products of all sites of a leaf, for one example."""

    blocks: int
    positions: int
    inputs: int
    outputs: int
    read: int  # all inputs and cotangents
    copied: int  # inputs that a product writes out first
    has_indices: bool  # a form selects rows of a table
    is_one_table: bool  # the only form selects rows of a table


class _Costs(NamedTuple):
    """The costs of a rule for one example."""

    norm: int
    sum: int


def choose(leaf: Array | Shape, sites: Sequence[Site], forms: Sequence[Outer | None]) -> Choice:
    """The cheapest rule of `leaf_norms` that fits the sites of a leaf; only shapes matter."""
    outers = [form for form in forms if form is not None]
    isometric = all(site.isometry for site in sites)
    if len(outers) < len(sites):
        return _by_derivative(leaf, sites, isometric)
    sizes = _sizes(outers)
    # Instantiated gradients are kept for the clipped sum if there is room. Otherwise the sum comes
    # from a second product, which rounds differently than the norm. `leaf_norms` bounds the
    # difference for isometries only.
    keep = leaf.size <= _ROOM * sizes.read or not isometric
    # The costs of "instantiate", and of the rules by pairs of positions, "gram" and "rows".
    if _platforms.on_cpu():
        instantiated = _instantiated_on_cpu(leaf, sizes, keep)
        paired = _paired_on_cpu(sizes)
    else:
        # A kept gradient may be formed at the loss's own precision, so in fewer passes of the
        # matrix unit than a second product. `_KEPT_NUMBER` includes the cost of the clipped sum.
        keep = True
        instantiated = _Costs(norm=_product(sizes) + _KEPT_NUMBER * leaf.size, sum=0)
        paired = _paired_on_accelerator(sizes, short=all(outer.short for outer in outers))
    # The rules "product", "rows" and "gram" take the norm of the view's gradient from the forms. It
    # is the norm of the leaf's gradient only for an isometry. Several forms, as of tied weights,
    # also need the same axes of the leaf as blocks, inputs and outputs; `aligned` can exchange the
    # last two.
    forms_give_norm = isometric and aligned(outers) is not None
    if forms_give_norm and sizes.positions == 1 and not sizes.has_indices:
        # No rule is cheaper, because this one only reads the two vectors of each block.
        operations = sizes.blocks * (sizes.inputs + sizes.outputs)
        return Choice("product", keep=False, operations=operations, numbers=sizes.copied)
    pairs_are_cheaper = paired.norm + paired.sum < instantiated.norm + instantiated.sum
    if forms_give_norm and len(outers) <= _MANY_SITES and pairs_are_cheaper:
        # The rows rule takes a single form. The Gram rule takes row numbers too, for a table with
        # further uses.
        rule = "rows" if sizes.is_one_table else "gram"
        # The Gram rule writes two inner products for each pair of positions; the rows rule writes
        # at most as many numbers.
        return Choice(
            rule,
            keep=False,
            operations=paired.norm,
            numbers=sizes.copied + 2 * _pairs(sizes),
        )
    # A form of row numbers has no matrices to multiply, so JAX's VJP of the gather adds its rows.
    rule = "derivative" if sizes.has_indices else "instantiate"
    return Choice(rule, keep, instantiated.norm, leaf.size + sizes.copied)


def _by_derivative(leaf: Array | Shape, sites: Sequence[Site], isometric: bool) -> Choice:
    """The choice for a leaf with a site that has no form."""
    row = row_of(sites[0])
    keep = True
    if isometric and len(sites) == 1 and row.entrywise and row.linear_in:
        # The cotangents of such a use may be the gradients: as large, and rounded the same.
        keep = not as_large_as_cotangents(leaf, sites)
    return Choice("derivative", keep, _NUMBER * leaf.size, leaf.size)


def _sizes(outers: Sequence[Outer]) -> _Sizes:
    """Positions of all sites together; blocks, inputs and outputs are common to the sites."""
    _, blocks, _, outputs = outers[0].g.shape
    copied = [piece for outer in outers if outer.copied for piece in outer.x]
    read = [array for outer in outers for array in (*outer.x, outer.g)]
    has_indices = any(outer.indexed for outer in outers)
    return _Sizes(
        blocks=blocks,
        positions=sum(outer.g.shape[2] for outer in outers),
        # A one-hot column costs a comparison instead of a product over the inputs.
        inputs=max(1 if outer.indexed else outer.width for outer in outers),
        outputs=outputs,
        read=sum(math.prod(array.shape[1:]) for array in read),
        copied=sum(math.prod(piece.shape[1:]) for piece in copied),
        has_indices=has_indices,
        is_one_table=has_indices and len(outers) == 1,
    )


def _product(sizes: _Sizes) -> int:
    """The cost of the product over positions, on a matrix unit in one pass."""
    if sizes.has_indices:
        return 0
    return sizes.blocks * sizes.positions * sizes.inputs * sizes.outputs


def _pairs(sizes: _Sizes) -> int:
    """The number of pairs of positions."""
    return sizes.blocks * sizes.positions**2


def _product_again(sizes: _Sizes) -> int:
    """The cost on a CPU of a sum that takes the product of scaled cotangents."""
    return _product(sizes) + _NUMBER * sizes.copied


def _instantiated_on_cpu(leaf: Array | Shape, sizes: _Sizes, keep: bool) -> _Costs:
    """Gradients of all examples, which are scaled for the sum if they are kept."""
    norm = _product(sizes) + _NUMBER * leaf.size
    if keep or sizes.has_indices:
        return _Costs(norm, sum=_NUMBER * leaf.size)
    return _Costs(norm, sum=_product_again(sizes))


def _paired_on_cpu(sizes: _Sizes) -> _Costs:
    """Norms by inner products between positions; the sum needs the product again."""
    norm = _pairs(sizes) * (sizes.inputs + sizes.outputs)
    if not sizes.is_one_table:
        norm *= _SMALL_PRODUCT
    return _Costs(norm, sum=_product_again(sizes))


def _paired_on_accelerator(sizes: _Sizes, short: bool) -> _Costs:
    """As `_paired_on_cpu`; ``short`` forms take fewer passes of the matrix unit."""
    norm_passes = 1 if short else _ALL_PASSES
    sum_passes = _TWO_PASSES if short else _ALL_PASSES
    if sizes.is_one_table:
        pair = _COMPARISON + _ADDITION * sizes.outputs
    else:
        pair = _PAIR + norm_passes * (sizes.inputs + sizes.outputs)
    return _Costs(norm=_pairs(sizes) * pair, sum=sum_passes * _product(sizes))


def common_sites(
    index: int, leaf: Array | Shape, sites: Sequence[Site], forms: Sequence[Outer | None]
) -> list[int]:
    """Which sites of leaf number ``index`` are better taken as common to all examples.

    There are none if another site of the leaf needs an example's gradient for its inner product
    with a common gradient.
    """
    common = [k for k, site in enumerate(sites) if _has_few_scales(index, leaf, site)]
    if len(common) > _MANY_SITES:
        return []
    scaled_axes = {axis for k in common for axis in sites[k].slices[index]}
    for k, (site, form) in enumerate(zip(sites, forms, strict=True)):
        if k not in common and not _meets_common(site, form, leaf, scaled_axes):
            return []
    return common


def _has_few_scales(index: int, leaf: Array | Shape, site: Site) -> bool:
    """Whether a site only scales a few slices of leaf number ``index``."""
    axes = site.slices.get(index)
    if axes is None:
        return False
    return _FEW_SCALES * math.prod(leaf.shape[axis] for axis in axes) <= leaf.size


def _meets_common(
    site: Site, form: Outer | None, leaf: Array | Shape, scaled_axes: set[int]
) -> bool:
    """Whether inner products with a common gradient need no gradient of an example."""
    if form is None or not site.isometry:
        return False
    if form.indexed:
        is_whole_table = not site.stacks and site.axes == tuple(range(leaf.ndim))
        return is_whole_table and not scaled_axes
    if not scaled_axes:
        return True
    one_block = form.g.shape[1] == 1
    return one_block and form.axes is not None and scaled_axes <= {*form.axes.outputs}


def foresee(leaf: Shape, sites: Sequence[Site], index: int) -> Choice:
    """The choice for leaf number ``index``, from shapes only.

    It calls the functions that choose during a run, on the shapes of a batch of one example. So its
    choice is that of the run: a rule for the sites whose gradients differ between examples, plus
    the operations of the common gradients.
    """
    choices: list[Choice] = []  # `eval_shape` can only return arrays, so `on_shapes` fills a list

    def on_shapes(data: Sequence[Sequence[Array]], cotangents: Sequence[Array]) -> None:
        forms = list(map(form_of, sites, data, cotangents))
        common = common_sites(index, leaf, sites, forms)
        others = [k for k in range(len(sites)) if k not in common]
        if others:
            choice = choose(leaf, [sites[k] for k in others], [forms[k] for k in others])
        else:
            # No example has a gradient of its own.
            choice = Choice("common", keep=False, operations=0, numbers=0)
        if others and common:
            choice = choice._replace(rule=f"{choice.rule} + common")
        # Each common gradient, as large as the leaf, is multiplied with the data at every position
        # of the other sites, or once with itself. Cotangents have the axes
        # [batch, *positions, outputs].
        positions = sum(math.prod(cotangents[k].shape[1:-1]) for k in others)
        for_common = len(common) * max(1, positions) * leaf.size
        choices.append(choice._replace(operations=choice.operations + for_common))

    def with_batch_axis(x: Shape) -> Shape:
        return jax.ShapeDtypeStruct((1, *x.shape), x.dtype)

    data = [[with_batch_axis(x) for x in site.data] for site in sites]
    jax.eval_shape(on_shapes, data, [with_batch_axis(site.output) for site in sites])
    return choices[0]


def aligned(forms: Sequence[Outer]) -> list[Outer] | None:
    """The forms of one leaf, transposed where inputs and outputs are exchanged in the first form.

    The Gram rule takes inner products of different forms, which have to count the same axes of the
    leaf as blocks, inputs and outputs. The result is None if a form has other axes, or unknown
    ones.
    """
    if len(forms) < 2:
        return list(forms)  # there is nothing to align
    first = forms[0]
    if first.axes is None:
        return None
    blocks, inputs, outputs = first.axes
    aligned_forms = []
    for form in forms:
        if form.axes == first.axes:
            aligned_forms.append(form)
        elif form.axes == (blocks, outputs, inputs) and not form.indexed:
            # Tied weights: one use contracts the axis that the other produces. The transpose of an
            # outer product exchanges its two factors.
            inputs_of_form = jnp.concatenate(form.x, axis=2)
            x = jnp.swapaxes(form.g, 2, 3)  # [batch, blocks, outputs, positions]
            g = jnp.swapaxes(inputs_of_form, 2, 3)  # [batch, blocks, positions, inputs]
            aligned_forms.append(form._replace(x=(x,), g=g))
        else:
            return None
    return aligned_forms


def as_large_as_cotangents(leaf: Array | Shape, sites: Sequence[Site]) -> bool:
    """Whether one example's gradient of a leaf has as many numbers as its cotangents."""
    return leaf.size == sum(math.prod(site.output.shape) for site in sites)
