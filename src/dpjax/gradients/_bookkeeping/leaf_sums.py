# SPDX-License-Identifier: Apache-2.0
"""Clipped sums: from factors to the weighted sum of one leaf's per-example gradients.

`kept` sums per-example gradients that exist; `recomputed` forms the sum in one product per site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpjax import trees
from dpjax.gradients import platforms
from dpjax.gradients._bookkeeping.cost import entire
from dpjax.gradients._bookkeeping.outer_products import (
    HIGHEST,
    Outer,
    precision_of,
    product,
    rounded,
    rounds,
)
from dpjax.gradients._bookkeeping.primitives import form_of
from dpjax.gradients._bookkeeping.sites import Memo, Site, union

Squares = Float[Array, " batch"]


class Entry(NamedTuple):
    """A site with what one backward pass recorded there, with a batch axis."""

    site: Site
    data: Sequence[Array]
    cotangent: Array

    def rounded(self) -> Entry:
        """Data and cotangent as the product of the loss reads them, where forms may be `short`."""
        form = form_of(*self) if rounds(self.site) else None
        if form is None or not form.short:
            return self
        return self._replace(data=list(map(rounded, self.data)), cotangent=rounded(self.cotangent))

    def scaled(self, factors: Squares) -> Entry:
        """Each example's cotangent times its factor; 0 for a factor of 0."""
        scale = trees.expand(factors, self.cotangent)
        return self._replace(cotangent=jnp.where(scale != 0, scale * self.cotangent, 0))


class Pieces(NamedTuple):
    """Per-example gradients of a leaf; ``place`` brings the sums of the pieces to its layout."""

    gradients: Sequence[Array]
    place: Callable[[Sequence[Array]], Array] = lambda pieces: pieces[0]


class LeafSum(NamedTuple):
    """The clipped sum: ``total`` of ``arrays``; if these are finite, a factor of 0 gives 0."""

    arrays: Sequence[Array]
    total: Callable[[Sequence[Array]], Array]


def kept(pieces: Pieces, factors: Squares) -> LeafSum:
    """From per-example gradients: the numbers whose norm was taken, so nothing rounds otherwise."""

    def total(arrays: Sequence[Array]) -> Array:
        return pieces.place([weighted_sum(x, factors) for x in arrays])

    return LeafSum(pieces.gradients, total)


def recomputed(
    leaf: int, entries: Sequence[Entry], factors: Squares, leaves: Sequence[Array]
) -> LeafSum:
    """From the data and scaled cotangents of all sites of a leaf."""
    scaled = [entry.rounded().scaled(factors) for entry in entries]

    def total(arrays: Sequence[Array]) -> Array:
        rest = iter(arrays)
        again = [entry._replace(data=[next(rest) for _ in entry.data]) for entry in scaled]
        return summed(leaf, again, leaves)

    return LeafSum([x for entry in scaled for x in entry.data], total)


def clipped_sums(sums: Mapping[int, LeafSum], sound: Bool[Array, " batch"]) -> dict[int, Array]:
    """The clipped sum of each leaf; an example that is not sound contributes exactly 0."""
    # No branch for batches that are not sound, as it would compile every sum twice.
    # What several leaves read is masked once.
    arrays = {id(x): x for leaf in sums.values() for x in leaf.arrays}
    # Accelerators mask as they read, and would wait at a loop.
    mask = _masked_in_place if platforms.on_cpu() else _masked
    # In a list: JAX sorts dictionaries, and so would order the program by addresses in memory.
    masked = dict(zip(arrays, mask(list(arrays.values()), sound), strict=True))
    return {i: leaf.total([masked[id(x)] for x in leaf.arrays]) for i, leaf in sums.items()}


def _masked(arrays: list[Array], sound: Bool[Array, " batch"]) -> list[Array]:
    # Factors are 0 already, and any finite data times 0 give 0. They are 1, because some sites
    # divide by them; `where` selects, as a multiplication by 0 would keep NaN.
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]
    pairs = zip(arrays, floats, strict=True)
    return [jnp.where(trees.expand(sound, x), x, 1) if is_float else x for x, is_float in pairs]


@jax.custom_jvp
def _masked_in_place(arrays: list[Array], sound: Bool[Array, " batch"]) -> list[Array]:
    # Few batches need it: a loop of no trip or one. For a `jax.lax.cond` XLA would copy the data.
    return jax.lax.while_loop(
        lambda state: ~state[0],
        lambda state: (jnp.ones((), bool), _masked(state[1], sound)),
        (jnp.all(sound), arrays),
    )[1]


@_masked_in_place.defjvp
def _(primals: Any, tangents: Any) -> tuple[list[Array], list[Array]]:
    # A gradient through `dpjax.clipped_grad` needs reverse mode, which JAX does not have for loops.
    return jax.jvp(_masked, primals, tangents)


def weighted_sum(gradients: Array, factors: Squares) -> Array:
    """The sum of per-example gradients, each times its factor."""
    gradients = trees.widened_exactly(gradients)  # as their norm reads them
    if not platforms.on_cpu():
        # Multiplied and reduced in float32 as the gradients are read; a matrix unit would round.
        return jnp.sum(trees.expand(factors, gradients) * gradients, axis=0)
    # One product: XLA on CPU is much slower if it multiplies first and reduces afterwards.
    return jnp.einsum("b,b...->...", factors, gradients, precision=jax.lax.Precision.HIGHEST)


def summed(leaf: int, entries: Sequence[Entry], leaves: Sequence[Array]) -> Array:
    """The sum of the examples' gradients of a leaf, site by site."""
    total = jnp.zeros_like(leaves[leaf])
    for entry in entries:
        form = form_of(*entry)
        if form is not None and form.short:
            pull = _summing(leaf, entry, leaves)
            total = added([total, *map(pull, halves(entry.cotangent))])
            continue
        # One-hot columns have no product; their VJP is a scatter-add.
        # The pull-back through the view runs once, after the sum over examples.
        if form is not None and not form.chosen:
            # By all leaves of the site: JAX cannot differentiate by a padding value alone.
            pull_back = pulled(sorted(entry.site.leaves), leaves, entry.site.of)
            of_site = pull_back(form.joined(_over_all(form)))[leaf]
        elif form is None and entire(leaves[leaf], [entry.site]):
            # The scaled cotangents of an elementwise use are the scaled gradients.
            gradients = instantiated([leaf], [entry], [None], leaves)[leaf]
            of_site = weighted_sum(gradients, jnp.ones(len(gradients), gradients.dtype))
        else:
            of_site = _summing(leaf, entry, leaves)(entry.cotangent)
        total = total + of_site
    return total


DROPPED = 2.0**-16
"""A bound on what `halves` drop of a number, relative to it."""


def halves(x: Array) -> tuple[Array, Array]:
    """An array in two parts, which one pass of a matrix unit each multiplies exactly."""
    high = rounded(x)
    return high, rounded(x - high)


def _summing(leaf: int, entry: Entry, leaves: Sequence[Array]) -> Callable[[Array], Array]:
    """From cotangents of all examples at one site to the sum of their gradients of a leaf."""
    run = jax.vmap(entry.site.apply, (None, 0))
    pull = pulled(sorted(entry.site.leaves), leaves, lambda p: run(p, entry.data))
    return lambda cotangents: pull(cotangents)[leaf]


def into_table(leaf: int, entries: Sequence[Entry]) -> Callable[[Array, Squares], Array] | None:
    """Adds the clipped sum of a table to a total; None for other leaves."""
    site = entries[0].site
    # Used once, as it is, outside of scans: then rows of the form are rows of the leaf.
    if len(entries) > 1 or site.stacks or not site.isometry or site.leaves != {leaf}:
        return None
    form = form_of(*entries[0])
    if form is None or not form.chosen or site.axes != tuple(range(len(site.shape))):
        return None

    # A batch uses few rows: to write the sum out first would be a pass over zeros.
    def put(total: Array, factors: Squares) -> Array:
        rows = form_of(*entries[0].scaled(factors))
        assert rows is not None
        taken = rows.g.reshape(-1, *total.shape[1:])
        return total.at[rows.x[0].reshape(-1)].add(taken.astype(total.dtype))

    return put


def _over_all(form: Outer) -> list[Array]:
    """The outer products of all examples and positions, summed: ``[blocks, inputs, outputs]``."""

    def one(x: Array) -> Array:
        if form.g.shape[1] > 1:
            return product("bhks,bhsd->hkd", x, form.g)
        # As a product of two matrices, for which XLA need not copy the inputs into its layout.
        x = jnp.swapaxes(x, 2, 3).reshape(-1, x.shape[2])
        return product("nk,nd->kd", x, form.g.reshape(-1, form.g.shape[3]))[None]

    return [one(x) for x in form.x]


def placed(
    leaf: int, entry: Entry, form: Outer, leaves: Sequence[Array], exact: bool = True
) -> tuple[Callable[[Sequence[Array]], Array], list[Array]]:
    """Each example's gradient in the pieces of its form, and the map from pieces to the leaf.

    Unless ``exact``, they are rounded as the product of the loss rounds, or to bfloat16.
    """
    pull = pulled([leaf], leaves, entry.site.of)
    return lambda parts: pull(form.joined(parts))[leaf], _products(entry, form, exact)


def _products(entry: Entry, form: Outer, exact: bool) -> list[Array]:
    # Numbers of a `short` form are rounded, so that one pass is exact; others take all passes.
    all_passes = exact and not form.short
    precision = HIGHEST if all_passes else precision_of(entry.site.equation.params)
    # A GPU keeps gradients in bfloat16, from which norm and sum are taken in float32.
    dtypes = {x.dtype for x in (*entry.site.data, entry.site.output)}
    short = not exact and platforms.on_gpu() and dtypes == {jnp.dtype(jnp.bfloat16)}

    def one(x: Array) -> Array:
        x, g = (a.astype(jnp.bfloat16) for a in (x, form.g)) if short else (x, form.g)
        return product("bhks,bhsd->bhkd", x, g, precision)

    return list(map(one, form.x))


def instantiated(
    by: Sequence[int],
    entries: Sequence[Entry],
    forms: Sequence[Outer | None],
    leaves: Sequence[Array],
    exact: bool = True,
) -> dict[int, Float[Array, "batch ..."]]:
    """Each example's gradients of some leaves, from all their sites; ``exact`` as in `placed`."""
    by_view, rest = dict[Any, list[Array]](), list[Entry]()
    for entry, form in zip(entries, forms, strict=True):
        if form is None or form.chosen:
            rest.append(entry)
        else:
            gradients = jax.vmap(form.joined)(_products(entry, form, exact))
            by_view.setdefault(entry.site.of, []).append(trees.widened_exactly(gradients))

    def one(data: Sequence[Sequence[Array]], cotangents: Sequence[Array]) -> dict[int, Array]:
        def run(leaves: Sequence[Array]) -> list[Array]:
            memo: Memo = {}
            views = [of(leaves, memo) for of in by_view]
            uses = zip(rest, data, strict=True)
            return [*views, *(entry.site.apply(leaves, x, memo) for entry, x in uses)]

        return pulled(sorted(union(e.site.leaves for e in entries)), leaves, run)(cotangents)

    # One derivative for all: a value that they share, such as a kernel or a norm of all parameters,
    # may take longer than the sites.
    cotangents = [*map(added, by_view.values()), *(entry.cotangent for entry in rest)]
    gradients = jax.vmap(one)([entry.data for entry in rest], cotangents)
    return {leaf: gradients[leaf] for leaf in by}


def pulled(
    by: Sequence[int], leaves: Sequence[Array], function: Callable[[Sequence[Array]], Any]
) -> Callable[[Any], dict[int, Array]]:
    """The VJP of a function of all leaves with respect to some of them."""

    def of_some(chosen: dict[int, Array]) -> Any:
        return function([chosen.get(i, leaf) for i, leaf in enumerate(leaves)])

    # Other leaves that the function reads are constants of this derivative.
    outputs, pull = jax.vjp(of_some, {i: leaves[i] for i in by})

    def back(cotangents: Any) -> dict[int, Array]:
        return pull(jax.tree.map(lambda c, y: c.astype(y.dtype), cotangents, outputs))[0]

    return back


def added(parts: Sequence[Array]) -> Array:
    """The sum of arrays of one shape."""
    return sum(parts[1:], parts[0])
