# SPDX-License-Identifier: Apache-2.0
r"""Clipped sums: from factors to the weighted sum of one leaf's per-example gradients.

`of_kept` sums per-example gradients that exist; `recomputed` takes one product for each site.

A *site* is an equation of the loss in which a *view*, a value computed from leaves of the
parameters, meets the data. The view is an *isometry* if it only rearranges the entries of one leaf.
The *form* of a site, an `Outer`, has one example's gradient of the view as a sum of outer products
$x_s g_s^\top$ over positions $s$, in blocks: an array ``[blocks, inputs, outputs]``. A table from
which the data take rows has an *indexed* form: an $x_s$ is one-hot, and stored as a row number.
Where the loss multiplies in one pass of a matrix unit, which rounds its operands, a form is
*short*: norm and sum may both be of the rounded operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpjax import trees
from dpjax.gradients import _platforms
from dpjax.gradients._bookkeeping.cost import as_large_as_cotangents
from dpjax.gradients._bookkeeping.outer_products import (
    HIGHEST,
    Outer,
    precision_of,
    product,
    rounded,
    rounds_operands,
)
from dpjax.gradients._bookkeeping.primitives import form_of
from dpjax.gradients._bookkeeping.sites import Memo, Site, union

Squares = Float[Array, " batch"]


class Entry(NamedTuple):
    """A site with the data and cotangents that one backward pass recorded, with a batch axis."""

    site: Site
    data: Sequence[Array]
    cotangent: Array

    def rounded(self) -> Entry:
        """Data and cotangent as the product of the loss reads them, where forms may be `short`."""
        if not rounds_operands(self.site):
            return self
        form = form_of(*self)
        if form is None or not form.short:
            return self
        data = [rounded(x) for x in self.data]
        return self._replace(data=data, cotangent=rounded(self.cotangent))

    def scaled(self, factors: Squares) -> Entry:
        """Each example's cotangent times its factor; 0 for a factor of 0."""
        scale = trees.expand(factors, self.cotangent)
        cotangent = jnp.where(scale != 0, scale * self.cotangent, 0)
        return self._replace(cotangent=cotangent)


class Pieces(NamedTuple):
    """Per-example gradients of a leaf; ``place`` brings the sums of the pieces to its layout."""

    gradients: Sequence[Array]
    place: Callable[[Sequence[Array]], Array] = lambda pieces: pieces[0]


class LeafSum(NamedTuple):
    """The clipped sum is ``total(arrays)``, after `clipped_sums` has masked unsound examples.

    An example with a factor of 0 contributes 0 if its rows of the arrays are finite.
    """

    arrays: Sequence[Array]
    total: Callable[[Sequence[Array]], Array]


def of_kept(pieces: Pieces, factors: Squares) -> LeafSum:
    """The sum of per-example gradients: the numbers of the norms, so no rounding differs."""

    def total(arrays: Sequence[Array]) -> Array:
        return pieces.place([weighted_sum(gradients, factors) for gradients in arrays])

    return LeafSum(pieces.gradients, total)


def recomputed(
    leaf: int, entries: Sequence[Entry], factors: Squares, leaves: Sequence[Array]
) -> LeafSum:
    """The sum of a leaf by one product for each of its sites: data times scaled cotangents.

    The cotangents are 0 for a factor of 0. The data are `LeafSum.arrays`, which `clipped_sums`
    masks, because 0 times data that are not finite is NaN.
    """
    scaled = [entry.rounded().scaled(factors) for entry in entries]
    data_of_sites = [x for entry in scaled for x in entry.data]

    def total(masked_data: Sequence[Array]) -> Array:
        """The sum, from the masked arrays in place of `data_of_sites`, in the same order."""
        remaining = iter(masked_data)
        masked = []
        for entry in scaled:
            data = [next(remaining) for _ in entry.data]
            masked.append(entry._replace(data=data))
        return summed(leaf, masked, leaves)

    return LeafSum(data_of_sites, total)


def clipped_sums(sums: Mapping[int, LeafSum], sound: Bool[Array, " batch"]) -> dict[int, Array]:
    """The clipped sum of each leaf; an example that is not sound contributes exactly 0."""
    # Both cases share one program, because a branch for unsound batches compiles every sum twice.
    # An array that several leaves read is masked once.
    arrays = {id(x): x for leaf_sum in sums.values() for x in leaf_sum.arrays}
    # Accelerators mask as they read, and wait at a loop.
    mask = _masked_in_place if _platforms.on_cpu() else _masked
    # A list, because JAX sorts dictionaries, here by addresses in memory.
    masked = dict(zip(arrays, mask(list(arrays.values()), sound), strict=True))
    totals = {}
    for leaf, leaf_sum in sums.items():
        totals[leaf] = leaf_sum.total([masked[id(x)] for x in leaf_sum.arrays])
    return totals


def _masked(arrays: list[Array], sound: Bool[Array, " batch"]) -> list[Array]:
    """The arrays with ones in place of the data of unsound examples, whose factors are 0."""
    masked = list(arrays)
    for i, x in enumerate(arrays):
        if jnp.issubdtype(x.dtype, jnp.floating):
            # Ones and not zeros, because some sites divide by their data. `where` selects; a
            # multiplication by 0 keeps NaN.
            masked[i] = jnp.where(trees.expand(sound, x), x, 1)
    return masked


@jax.custom_jvp
def _masked_in_place(arrays: list[Array], sound: Bool[Array, " batch"]) -> list[Array]:
    """As `_masked`, in a loop of one trip, or of none for a batch without unsound examples."""
    # XLA copies the data for a `jax.lax.cond`, and few batches need the mask.
    _, masked = jax.lax.while_loop(
        lambda state: ~state[0],
        lambda state: (jnp.ones((), bool), _masked(state[1], sound)),
        (jnp.all(sound), arrays),
    )
    return masked


@_masked_in_place.defjvp
def _(primals: Any, tangents: Any) -> tuple[list[Array], list[Array]]:
    # A gradient through `dpjax.clipped_grad` needs reverse mode, which JAX does not have for loops.
    return jax.jvp(_masked, primals, tangents)


def weighted_sum(gradients: Array, factors: Squares) -> Array:
    """The sum of per-example gradients, each times its factor."""
    gradients = trees.widened_exactly(gradients)  # as their norm reads them
    if not _platforms.on_cpu():
        # Multiplied and reduced in float32 as the gradients are read; a matrix unit rounds.
        return jnp.sum(trees.expand(factors, gradients) * gradients, axis=0)
    # One product: XLA on CPU is much slower if it multiplies first and reduces afterwards.
    return jnp.einsum("b,b...->...", factors, gradients, precision=jax.lax.Precision.HIGHEST)


def summed(leaf: int, entries: Sequence[Entry], leaves: Sequence[Array]) -> Array:
    """The sum over examples of the gradients of a leaf, from cotangents that are already scaled.

    Each site adds its part by the first way that fits: a VJP for all examples if its form is short,
    a matrix product if it has another form, or, without matrices to multiply, a plain sum or a VJP.
    """
    total = jnp.zeros_like(leaves[leaf])
    for entry in entries:
        form = form_of(*entry)
        if form is not None and form.short:
            # The loss's own product in one pass rounds what it multiplies, so the cotangent is
            # divided into two halves that one pass each reads exactly.
            pull_back = _summing(leaf, entry, leaves)
            sums = [pull_back(half) for half in halves(entry.cotangent)]
            total = added([total, *sums])
            continue
        if form is not None and not form.indexed:
            # One product sums over examples. Then one VJP goes from the view, `site.of(leaves)`, to
            # all leaves of the site: a VJP to only the padding value of a `pad` fails in JAX.
            pull_back = pulled(sorted(entry.site.leaves), leaves, entry.site.of)
            gradient_of_view = form.joined(_over_all(form))
            of_site = pull_back(gradient_of_view)[leaf]
        elif form is None and as_large_as_cotangents(leaves[leaf], [entry.site]):
            # An example's gradient is as large as its cotangent, as at an elementwise use. So the
            # gradients are formed and added. Their factors are in the cotangents, and are 1 here.
            gradients = instantiated([leaf], [entry], forms=[None], leaves=leaves)[leaf]
            of_site = weighted_sum(gradients, jnp.ones(len(gradients), gradients.dtype))
        else:
            # The VJP of an indexed form is a scatter-add; other sites here have no form.
            of_site = _summing(leaf, entry, leaves)(entry.cotangent)
        total = total + of_site
    return total


DROPPED = 2.0**-16
"""A bound on the digits of a number that `halves` drop, relative to the number."""


def halves(x: Array) -> tuple[Array, Array]:
    """An array in two parts, which one pass of a matrix unit each multiplies exactly."""
    high = rounded(x)
    return high, rounded(x - high)


def _summing(leaf: int, entry: Entry, leaves: Sequence[Array]) -> Callable[[Array], Array]:
    """The VJP of a site for all examples: from their cotangents to the sum of their gradients."""
    apply = jax.vmap(entry.site.apply, (None, 0))

    def outputs(leaves: Sequence[Array]) -> Array:
        return apply(leaves, entry.data)

    pull_back = pulled(sorted(entry.site.leaves), leaves, outputs)
    return lambda cotangents: pull_back(cotangents)[leaf]


def into_table(leaf: int, entries: Sequence[Entry]) -> Callable[[Array, Squares], Array] | None:
    """``(total, factors) -> total``, which adds the clipped sum of a table in place.

    A batch uses few rows of a table, so a separate sum is mostly zeros. The result is None for a
    leaf that is used twice, and for one from which the data do not take rows as they are: the view
    of the site has to be the leaf itself, outside of scans, and its form has to be indexed.
    """
    if len(entries) > 1:
        return None
    (entry,) = entries
    site = entry.site
    # `stacks` has a flag for each scan around the site.
    if site.stacks or not site.isometry or site.leaves != {leaf}:
        return None
    form = form_of(*entry)
    has_axes_of_leaf = site.axes == tuple(range(len(site.shape)))
    if form is None or not form.indexed or not has_axes_of_leaf:
        return None

    def add(total: Array, factors: Squares) -> Array:
        scaled = form_of(*entry.scaled(factors))
        assert scaled is not None
        # A row of cotangents, and its number in the table, for each position of each example.
        rows = scaled.g.reshape(-1, *total.shape[1:])
        indices = scaled.x[0].reshape(-1)
        return total.at[indices].add(rows.astype(total.dtype))

    return add


def _over_all(form: Outer) -> list[Array]:
    """The outer products of all examples and positions, summed: ``[blocks, inputs, outputs]``."""
    return [_sum_of_products(piece, form.g) for piece in form.x]


def _sum_of_products(x: Array, g: Array) -> Array:
    """One piece of the inputs of `_over_all`."""
    blocks, _, outputs = g.shape[1:]
    if blocks > 1:
        return product("bhks,bhsd->hkd", x, g)
    # XLA need not copy the inputs into its layout for a product of two matrices.
    inputs = x.shape[2]
    x = jnp.swapaxes(x, 2, 3).reshape(-1, inputs)
    return product("nk,nd->kd", x, g.reshape(-1, outputs))[None]


def placed(
    leaf: int, entry: Entry, form: Outer, leaves: Sequence[Array], exact: bool = True
) -> tuple[Callable[[Sequence[Array]], Array], list[Array]]:
    """The map from pieces of a gradient to the leaf, and each example's gradient in such pieces.

    A piece is ``[blocks, inputs, outputs]``, with some of the inputs of the form. Unless ``exact``,
    the gradients are rounded as the product of the loss rounds, or to bfloat16.
    """
    pull_back = pulled([leaf], leaves, entry.site.of)

    def place(pieces: Sequence[Array]) -> Array:
        return pull_back(form.joined(pieces))[leaf]

    return place, _products(entry, form, exact)


def _products(entry: Entry, form: Outer, exact: bool) -> list[Array]:
    """Each example's outer products, summed over positions.

    The result has an array ``[batch, blocks, inputs, outputs]`` for each piece of the inputs. It
    may round as the loss's own product does, and on a GPU to bfloat16, unless it has to be
    ``exact``: then a short form has to be of an entry that is already rounded.
    """
    precision = precision_of(entry.site.equation.params)
    if exact and not form.short:  # one pass is exact for rounded operands
        precision = HIGHEST
    dtypes = {x.dtype for x in (*entry.site.data, entry.site.output)}
    # If the loss multiplies in bfloat16, a GPU also keeps these gradients in bfloat16. The norm and
    # the clipped sum both read them, and add in float32.
    as_bfloat16 = not exact and _platforms.on_gpu() and dtypes == {jnp.dtype(jnp.bfloat16)}

    def product_of(x: Array, g: Array) -> Array:
        if as_bfloat16:
            x = x.astype(jnp.bfloat16)
            g = g.astype(jnp.bfloat16)
        return product("bhks,bhsd->bhkd", x, g, precision)

    return [product_of(x, form.g) for x in form.x]


def instantiated(
    wanted: Sequence[int],
    entries: Sequence[Entry],
    forms: Sequence[Outer | None],
    leaves: Sequence[Array],
    exact: bool = True,
) -> dict[int, Float[Array, "batch ..."]]:
    """Each example's gradients of the ``wanted`` leaves, from all sites of these leaves.

    Where a site has a form, a product gives the gradient of its view; other sites have a cotangent
    of their output. One VJP then goes back from all these views and outputs to the leaves, because
    they may share costly values, such as a norm of all parameters. ``exact`` is as in `_products`.
    """
    # The keys are `site.of`, the functions from leaves to views, one for all sites of a view.
    gradients_of_views: dict[Any, list[Array]] = {}
    others: list[Entry] = []
    for entry, form in zip(entries, forms, strict=True):
        if form is None or form.indexed:  # there are no matrices to multiply
            others.append(entry)
        else:
            gradients = jax.vmap(form.joined)(_products(entry, form, exact))  # [batch, *view]
            of_view = gradients_of_views.setdefault(entry.site.of, [])
            of_view.append(trees.widened_exactly(gradients))
    # Also leaves that are not wanted: a VJP to only the padding value of a `pad` fails in JAX.
    differentiated = sorted(union(entry.site.leaves for entry in entries))

    def pulled_back(
        data: Sequence[Sequence[Array]], cotangents: Sequence[Array]
    ) -> dict[int, Array]:
        """The gradients of one example, from its data at the other sites and all its cotangents."""

        def views_and_outputs(leaves: Sequence[Array]) -> list[Array]:
            memo: Memo = {}  # of values that several views and sites compute
            values = [view_of(leaves, memo) for view_of in gradients_of_views]
            for entry, entry_data in zip(others, data, strict=True):
                values.append(entry.site.apply(leaves, entry_data, memo))
            return values

        return pulled(differentiated, leaves, views_and_outputs)(cotangents)

    cotangents = list(map(added, gradients_of_views.values()))  # summed over the sites of a view
    cotangents += [entry.cotangent for entry in others]
    gradients = jax.vmap(pulled_back)([entry.data for entry in others], cotangents)
    return {leaf: gradients[leaf] for leaf in wanted}


def pulled(
    differentiated: Sequence[int],
    leaves: Sequence[Array],
    function: Callable[[Sequence[Array]], Any],
) -> Callable[[Any], dict[int, Array]]:
    """The VJP at ``leaves`` of a function of all leaves, with respect to some of them."""

    def of_some(chosen: dict[int, Array]) -> Any:
        return function([chosen.get(i, leaf) for i, leaf in enumerate(leaves)])

    # Other leaves that the function reads are constants of this derivative.
    outputs, pull_back = jax.vjp(of_some, {i: leaves[i] for i in differentiated})

    def gradients(cotangents: Any) -> dict[int, Array]:
        cast = jax.tree.map(lambda c, output: c.astype(output.dtype), cotangents, outputs)
        return pull_back(cast)[0]

    return gradients


def added(terms: Sequence[Array]) -> Array:
    """The sum of arrays of one shape."""
    return sum(terms[1:], terms[0])
