# SPDX-License-Identifier: Apache-2.0
"""Views and sites, which the trace of a loss finds, and the `Book` that records them.

A *view* is a value that depends on parameters only. A *site* is an equation in which a view
meets the data, and which is linear in the view. A leaf that meets the data in any other way is
*materialised*: differentiated like any argument of `jax.grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jaxtyping import Array

# All leaves in order; or, by number, the leaves that a site in a scan reads.
Leaves: TypeAlias = Sequence[Array] | Mapping[int, Array]
Memo = dict[int, list[Array]]
Axes = tuple[int | None, ...]


class View(NamedTuple):
    """A value that depends on parameters only; a constant depends on none."""

    leaves: frozenset[int]  # with respect to which the value is differentiated
    reads: frozenset[int]  # from which it is computed; some may be behind a `stop_gradient`
    # ``(leaves, memo={})``: from all leaves to this value, in full precision. The memo holds values
    # that several views share.
    of: Callable[..., Array]
    value: Any
    isometry: bool = False  # whether it only rearranges the entries of one leaf
    axes: tuple[int, ...] | None = None  # of the leaf, if it is a transpose of one
    depth: int = 0  # the number of equations between the value and a leaf
    constant: frozenset[int] = frozenset()  # axes along which all entries are equal
    # An axis of the leaf for each leaf and each axis of the value, or None: an entry of the value
    # depends only on entries of the leaf with the same index along that axis.
    own: Mapping[int, Axes] = {}
    # The equation with this value as its only result, and the views that entered it.
    made: tuple[JaxprEqn, tuple[View, ...]] | None = None


class Site(NamedTuple):
    """An equation in which a view meets the data; fields of `View` describe its ``operand``."""

    leaves: frozenset[int]
    reads: frozenset[int]
    equation: JaxprEqn
    operand: int  # the first, if several inputs are views
    shape: tuple[int, ...]  # of the operand, in one round of the scans around it
    of: Callable[..., Array]  # the same function for all sites of one view
    isometry: bool  # and the operand is the only view
    axes: tuple[int, ...] | None
    apply: Callable[..., Array]  # ``(leaves, data, memo={}) -> output`` in full precision
    data: tuple[jax.ShapeDtypeStruct, ...]  # for one example, as the output
    output: jax.ShapeDtypeStruct
    # An example's gradient by the view is ``scales(leaves, data, cotangent)``, one number for each
    # of the ``slices``, times the derivative of ``unscaled(leaves)``.
    scales: Callable[[Leaves, Sequence[Array], Array], Array]
    unscaled: Callable[[Leaves], Array]
    # Whether each scan around the equation, outermost first, slices the view, as it does with
    # stacked layers. Data, output and a sliced view have a leading axis for each scan.
    stacks: tuple[bool, ...] = ()
    # The axes of a leaf that count its slices, for leaves with one gradient for all examples apart
    # from a scale for each slice. See `common`.
    slices: Mapping[int, tuple[int, ...]] = {}


class Program(NamedTuple):
    """A traced loss: its sites in order, the materialised leaves, and the loss with taps."""

    sites: tuple[Site, ...]
    materialised: dict[int, str]  # the reason for each leaf
    # ``(taps, materialised leaves, leaves, example) -> (loss, (aux, data of each site))``
    run: Callable[..., tuple[Array, Any]]


class Book:
    """Records of one evaluation: sites with their data, and leaves to materialise.

    Sites are recorded in the order of their evaluation, in which ``taps`` has an array for each.
    """

    def __init__(self, materialised: dict[int, str], taps: Sequence[Array] | None = None) -> None:
        self.materialised = dict(materialised)
        self.taps = taps
        self.sites: list[Site] = []
        self.data: list[tuple[Array, ...]] = []
        self.sizes: dict[int, int] = {}  # the number of entries of each leaf

    def materialise(self, leaves: Iterable[int], reason: str) -> None:
        for leaf in leaves:
            # The first reason stays: later ones often follow from it, and `explain` prints one.
            self.materialised.setdefault(leaf, reason)

    def record(self, site: Site, data: tuple[Array, ...]) -> None:
        self.sites.append(site)
        self.data.append(data)

    def next_taps(self) -> Sequence[Array] | None:
        """The taps of sites that are not recorded yet; None in an evaluation without taps."""
        if self.taps is None:
            return None
        return self.taps[len(self.sites) :]

    def tap(self, output: Array) -> Array:
        """The output of the next site, plus its tap."""
        taps = self.next_taps()
        if taps is None:
            return output
        return output + taps[0]

    def enter(self, leaf: int, value: Array, trained: bool = True) -> Any:
        """A leaf as an input of a program: a view, unless it is materialised."""
        if leaf in self.materialised:
            return value
        # A leaf is the identity view of itself: an isometry, with its own axes.
        itself = frozenset([leaf])
        axes = tuple(range(value.ndim))
        view = View(itself, itself, functools.partial(_leaf, leaf), value, True, axes)
        if not trained:
            # A frozen leaf in a scan still is a leaf from which its views are computed.
            return view._replace(leaves=frozenset[int]())
        return view._replace(own={leaf: axes})


def _leaf(leaf: int, leaves: Leaves, *_: Any) -> Array:
    return leaves[leaf]


def settled(run: Callable[[Book], Any]) -> Book:
    """The book of a run that materialises no further leaf."""
    book = Book({})
    before = None
    # A materialised leaf counts as data, which other leaves may then meet: repeat until stable.
    while before != book.materialised.keys():
        before = set(book.materialised)
        book = Book(book.materialised)
        run(book)
    return book


def constant(value: Any) -> View:
    """A view of no leaf."""
    return View(frozenset(), frozenset(), lambda *_: jnp.asarray(value), value)


def union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    """The union of sets of leaves."""
    return frozenset[int]().union(*sets)


def plain(values: Sequence[Any], book: Book | None = None, name: str = "") -> list[Any]:
    """The values of views, and other values as they are.

    With a book, the leaves of these views are materialised, because their use is not linear.
    """
    plain_values = []
    for x in values:
        if not isinstance(x, View):
            plain_values.append(x)
            continue
        if book is not None:
            # JAX then differentiates by the leaf for each example: exact, but slower.
            book.materialise(x.leaves, f"enters {name}")
        plain_values.append(x.value)
    return plain_values


def dtype(variable: Any) -> Any:
    """The dtype of a variable of a jaxpr."""
    return variable.aval.dtype
