# SPDX-License-Identifier: Apache-2.0
"""Scans: the body of a loop over layers or time is traced, and its sites are stacked.

Views that the scan slices, and views that are the same in every round, enter the body as leaves
of its own. A view that the rounds carry along is materialised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array

from dpjax import trees
from dpjax.gradients import platforms
from dpjax.gradients._bookkeeping.outer_products import product
from dpjax.gradients._bookkeeping.primitives import row_of
from dpjax.gradients._bookkeeping.sites import (
    Book,
    Leaves,
    Memo,
    Site,
    View,
    dtype,
    plain,
    settled,
    union,
)
from dpjax.gradients.jaxprs import scan_counts

Walk = Callable[[Jaxpr, Sequence[Any], Sequence[Any], Book], list[Any]]


def scan_sites(equation: JaxprEqn, inputs: list[Any], book: Book, walk: Walk) -> list[Any]:
    """Evaluates a scan by `walk` of its body; its sites have a leading axis for the rounds."""
    p, inner = equation.params, equation.params["jaxpr"]
    first, carried = scan_counts(equation)
    last = first + carried
    inputs = [
        *inputs[:first],
        # A carried value changes from round to round, so its use is not linear in the leaf.
        *plain(inputs[first:last], book, "the carry of a scan"),
        *inputs[last:],
    ]
    entering = {i: x for i, x in enumerate(inputs) if isinstance(x, View) and x.reads}
    views, sliced = list(entering.values()), [i >= last for i in entering]
    values = [jnp.asarray(x, dtype(v)) for x, v in zip(plain(inputs), equation.invars, strict=True)]
    # Constants stay constants in the body: a view computed from one is a view there too.
    constants = [
        x if isinstance(x, View) and not x.reads else value
        for x, value in zip(inputs[:first], values[:first], strict=True)
    ]
    carry, slices = values[first:last], values[last:]

    def body(child: Book, carry: Sequence[Array], slices: Sequence[Array]) -> list[Array]:
        arguments: list[Any] = [*constants, *carry, *slices]
        child.sizes = {j: view.value.size for j, view in enumerate(entering.values())}
        for j, (i, view) in enumerate(entering.items()):
            arguments[i] = child.enter(j, arguments[i], trained=bool(view.leaves))
        outputs = walk(inner.jaxpr, inner.consts, arguments, child)
        return plain(outputs, child, "the carry of a scan")

    rows = trees.one_row(slices)
    probe = settled(lambda book: jax.eval_shape(functools.partial(body, book), carry, rows))
    for local, why in probe.materialised.items():
        book.materialise(views[local].leaves, f"{why}, in a scan")

    start, count = len(book.sites), len(probe.sites)
    # Stacked over rounds: the scan hands each round its own slice of them.
    taps = None if book.taps is None else list(book.taps[start : start + count])

    def round_(carry: Any, xs: Any) -> tuple[Any, Any]:
        child = Book(probe.materialised, xs[1])
        outputs = body(child, carry, xs[0])
        return outputs[:carried], (outputs[carried:], tuple(child.data))

    ended, (stacked, data) = jax.lax.scan(
        round_, carry, (slices, taps), p["length"], p["reverse"], p["unroll"]
    )
    for site, noted in zip(probe.sites, data, strict=True):
        book.record(_stacked(site, views, sliced, p["length"]), noted)
    return [*ended, *stacked]


def _stacked(site: Site, views: list[View], sliced: list[bool], length: int) -> Site:
    """A site of the body of a scan as a site of the program around the scan."""
    entering = sorted(site.reads)
    axis = {j: 0 if sliced[j] else None for j in entering}
    # A view of a shared and a sliced leaf differs from round to round.
    by_round = any(sliced[j] for j in entering)
    alone = views[entering[0]] if len(entering) == 1 else None

    def over_rounds(
        function: Callable[..., Array], leaves: Leaves, memo: Memo | None, *data: Any
    ) -> Array:
        memo = {} if memo is None else memo
        chosen = {j: views[j].of(leaves, memo) for j in entering}
        if not data and not by_round:
            return function(chosen)
        places = axis
        if data and row_of(site).entrywise and platforms.on_cpu():
            # XLA on CPU is slow at the fused reduction of cotangents times a number of each round.
            chosen = {j: x if sliced[j] else _repeated(x, length) for j, x in chosen.items()}
            places = dict.fromkeys(entering, 0)
        return jax.vmap(function, (places, *(0 for _ in data)))(chosen, *data)

    axes = None
    if alone and alone.axes is not None and site.axes is not None:
        axes = tuple(alone.axes[a + by_round] for a in site.axes)
        axes = (alone.axes[0], *axes) if by_round else axes
    return site._replace(
        leaves=union(views[j].leaves for j in site.leaves),
        reads=union(views[j].reads for j in entering),
        of=lambda leaves, memo=None: over_rounds(site.of, leaves, memo),
        isometry=site.isometry and alone is not None and alone.isometry,
        axes=axes,
        apply=lambda leaves, data, memo=None: over_rounds(site.apply, leaves, memo, data),
        data=tuple(jax.ShapeDtypeStruct((length, *x.shape), x.dtype) for x in site.data),
        output=jax.ShapeDtypeStruct((length, *site.output.shape), site.output.dtype),
        stacks=(by_round, *site.stacks),
        # Common gradients of rounds would add up for a shared view alone: they are not followed.
        slices={},
    )


def _repeated(x: Array, length: int) -> Array:
    """The value for every round. A product with ones, so that its VJP is one too."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.broadcast_to(x, (length, *x.shape))
    return product("r,...->r...", jnp.ones(length, x.dtype), x)
