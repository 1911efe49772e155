# SPDX-License-Identifier: Apache-2.0
"""Scans: the body of a loop over layers or time is traced, and its sites are stacked.

A *view* is a value that depends on parameters only; a *site* is an equation in which a view meets
the data, and which is linear in the view. A `Book` records the sites of a program and the data at
them. Leaves with another use are *materialised*: JAX differentiates by them for each example.

A view that the scan slices, or that is the same in every round, enters the body as a leaf of the
body's own `Book`. A view that the rounds carry along is materialised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array

from dpjax import trees
from dpjax.gradients import _platforms
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
from dpjax.gradients._jaxprs import scan_counts

Walk = Callable[[Jaxpr, Sequence[Any], Sequence[Any], Book], list[Any]]


def scan_sites(equation: JaxprEqn, inputs: list[Any], book: Book, walk: Walk) -> list[Any]:
    """Evaluates a scan by `walk` of its body; its sites have a leading axis for the rounds.

    The inputs of a scan are its constants, its first carry, and the arrays that it slices, in this
    order. The views among them that read leaves *enter* the body: they are the leaves of its book.
    ``walk(program, constants, arguments, book)`` evaluates the body, first on shapes to find its
    sites, and then in the scan that runs.
    """
    parameters = equation.params
    program = parameters["jaxpr"]
    constants_end, carried = scan_counts(equation)
    carry_end = constants_end + carried
    # A carried value changes from round to round, so its use is not linear in the leaf. `plain`
    # gives the values of views, and with a book materialises their leaves.
    plain_carry = plain(inputs[constants_end:carry_end], book, "the carry of a scan")
    inputs = [*inputs[:constants_end], *plain_carry, *inputs[carry_end:]]
    # Keys are numbers of inputs. Leaf j of the body is the j-th of these views.
    entering = {i: x for i, x in enumerate(inputs) if isinstance(x, View) and x.reads}
    # A literal of the program may be a Python number, which takes the dtype of its variable.
    pairs = zip(plain(inputs), equation.invars, strict=True)
    values = [jnp.asarray(x, dtype(variable)) for x, variable in pairs]
    constants = list[Any](values[:constants_end])
    for i, x in enumerate(inputs[:constants_end]):
        if isinstance(x, View) and not x.reads:
            constants[i] = x  # a view of no leaf is such a view in the body too
    carry = values[constants_end:carry_end]
    rows = values[carry_end:]

    def body(inner: Book, carry: Sequence[Array], rows: Sequence[Array]) -> list[Array]:
        """One round: the next carry and the outputs, with records in the book of the body."""
        arguments: list[Any] = [*constants, *carry, *rows]
        # Sizes in the program around the scan, so a sliced view counts all rounds.
        inner.sizes = {j: view.value.size for j, view in enumerate(entering.values())}
        for j, (i, view) in enumerate(entering.items()):
            # If all leaves that a view reads are behind a `stop_gradient`, it is not trained.
            arguments[i] = inner.enter(j, arguments[i], trained=bool(view.leaves))
        outputs = walk(program.jaxpr, program.consts, arguments, inner)
        # No view leaves the body, neither in the carry nor in an output of the round.
        return plain(outputs, inner, "the carry of a scan")

    # `settled` repeats the walk, each time without the leaves that the walk before materialised.
    one_row = trees.one_row(rows)
    settled_body = settled(
        lambda inner: jax.eval_shape(functools.partial(body, inner), carry, one_row)
    )
    views = list(entering.values())
    for j, reason in settled_body.materialised.items():
        # A leaf of the body is a view outside, computed from these leaves.
        book.materialise(views[j].leaves, f"{reason}, in a scan")

    # A tap is a zero that is added to the output of a site, to take its cotangent. The taps of the
    # body's sites are stacked over rounds, and each round receives its own slice.
    taps = book.next_taps()
    if taps is not None:
        taps = list(taps[: len(settled_body.sites)])

    def one_round(carry: Any, of_round: Any) -> tuple[Any, Any]:
        """The body as `jax.lax.scan` takes it; the data of its sites are outputs too."""
        rows, taps = of_round
        inner = Book(settled_body.materialised, taps)
        outputs = body(inner, carry, rows)
        return outputs[:carried], (outputs[carried:], tuple(inner.data))

    last_carry, (stacked, data) = jax.lax.scan(
        one_round,
        carry,
        (rows, taps),
        parameters["length"],
        parameters["reverse"],
        parameters["unroll"],
    )
    is_sliced = [i >= carry_end for i in entering]
    for site, site_data in zip(settled_body.sites, data, strict=True):
        book.record(_stacked(site, views, is_sliced, parameters["length"]), site_data)
    return [*last_carry, *stacked]


def _stacked(site: Site, views: Sequence[View], sliced: Sequence[bool], rounds: int) -> Site:
    """A site of the body of a scan as a site of the program around the scan.

    Leaf j of the body is the view ``views[j]`` of that program, and ``sliced[j]`` is whether the
    scan takes a row of it in each round. The new site has the outputs and data of all rounds, with
    an axis for the rounds in front. So has its view, if it differs from round to round.
    """
    reads = sorted(site.reads)  # leaves of the body
    # A site whose view reads a sliced leaf, perhaps with shared ones, has a view for each round.
    by_round = any(sliced[j] for j in reads)
    # A view of several leaves does not rearrange one leaf, and does not have its axes.
    isometry = False
    axes = None
    if len(reads) == 1:
        view = views[reads[0]]
        isometry = site.isometry and view.isometry
        axes = _stacked_axes(site, view, by_round)
    use = _StackedUse(site, {j: views[j] for j in reads}, sliced, by_round, rounds)
    return site._replace(
        leaves=union(views[j].leaves for j in site.leaves),
        reads=union(views[j].reads for j in reads),
        of=use.of,
        isometry=isometry,
        axes=axes,
        apply=use.apply,
        data=tuple(jax.ShapeDtypeStruct((rounds, *x.shape), x.dtype) for x in site.data),
        output=jax.ShapeDtypeStruct((rounds, *site.output.shape), site.output.dtype),
        # For each scan around the equation, outermost first: whether it slices the view.
        stacks=(by_round, *site.stacks),
        # The leaves whose gradient is common to all examples, apart from scales: none. A sliced
        # view has another gradient in each round, and no rule adds the scales of a shared one.
        slices={},
    )


def _stacked_axes(site: Site, view: View, by_round: bool) -> tuple[int, ...] | None:
    """The leaf's axis of each axis of the view of all rounds."""
    if view.axes is None or site.axes is None:
        return None
    if not by_round:
        return tuple(view.axes[axis] for axis in site.axes)
    rounds_axis, *others = view.axes
    in_round = [others[axis] for axis in site.axes]
    return (rounds_axis, *in_round)


@dataclass(frozen=True, eq=False)
class _StackedUse:
    """The functions of a site in a scan, for all rounds together."""

    site: Site
    views: Mapping[int, View]  # by their number as leaves of the body
    sliced: Sequence[bool]
    by_round: bool
    rounds: int

    def of(self, leaves: Leaves, memo: Memo | None = None) -> Array:
        """The view, with an axis for the rounds if the scan slices it."""
        in_body = self._leaves_of_body(leaves, memo)
        if not self.by_round:
            return self.site.of(in_body)
        return jax.vmap(self.site.of, (self._in_axes(),))(in_body)

    def apply(self, leaves: Leaves, data: Sequence[Array], memo: Memo | None = None) -> Array:
        """The outputs of all rounds."""
        in_body = self._leaves_of_body(leaves, memo)
        in_axes = self._in_axes()
        if row_of(self.site).entrywise and _platforms.on_cpu():
            # XLA on CPU is slow at the fused reduction of cotangents times a number of each round.
            for j in self.views:
                if not self.sliced[j]:
                    in_body[j] = _repeated(in_body[j], self.rounds)
            in_axes = dict.fromkeys(self.views, 0)
        return jax.vmap(self.site.apply, (in_axes, 0))(in_body, data)

    def _leaves_of_body(self, leaves: Leaves, memo: Memo | None) -> dict[int, Array]:
        memo = {} if memo is None else memo
        return {j: view.of(leaves, memo) for j, view in self.views.items()}

    def _in_axes(self) -> dict[int, int | None]:
        """The axis of the rounds in each leaf of the body, as `jax.vmap` takes it."""
        return {j: 0 if self.sliced[j] else None for j in self.views}


def _repeated(x: Array, rounds: int) -> Array:
    """The value for every round. A product with ones, so its VJP is a product too."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.broadcast_to(x, (rounds, *x.shape))
    return product("r,...->r...", jnp.ones(rounds, x.dtype), x)
