# SPDX-License-Identifier: Apache-2.0
"""Views and sites: what the trace of a loss finds, and the book in which it is recorded.

A *view* is a value that depends on parameters alone. A *site* is an equation in which a view
meets the data, and which is linear in the view. A leaf that meets the data in any other way is
*materialised*: differentiated like any argument of `jax.grad`.
"""

from __future__ import annotations

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
    """A value that depends on parameters alone; a constant depends on none."""

    leaves: frozenset[int]  # by which the value is differentiated
    reads: frozenset[int]  # from which it is computed; some may be behind a `stop_gradient`
    # ``(leaves, memo={})``: from all leaves to this value, in full precision. The memo holds values
    # that several views share.
    of: Callable[..., Array]
    value: Any
    isometry: bool = False  # whether it only rearranges the entries of one leaf
    axes: tuple[int, ...] | None = None  # of the leaf, if it is a transpose of one
    depth: int = 0  # the number of equations between the value and a leaf
    constant: frozenset[int] = frozenset()  # axes along which all entries are equal
    # For each leaf and each axis of the value, the axis of the leaf on whose same index alone an
    # entry depends; or None.
    own: Mapping[int, Axes] = {}
    # The equation whose only result it is, and the views that entered it.
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
    # ``(leaves, data, cotangent) -> scales`` of ``slices``, and from leaves to what they multiply.
    scales: Callable[[Leaves, Sequence[Array], Array], Array]
    unscaled: Callable[[Leaves], Array]
    # For each scan around the equation, outermost first: whether the view is sliced by it (layer
    # after layer). Data, output and a sliced view have a leading axis for it.
    stacks: tuple[bool, ...] = ()
    # Leaves whose gradient at this site is one gradient for all examples, apart from one scale for
    # each slice; and the axes of the leaf that count the slices. See `common`.
    slices: Mapping[int, tuple[int, ...]] = {}


class Program(NamedTuple):
    """A traced loss: its sites in order, why leaves are materialised, and the loss with taps."""

    sites: tuple[Site, ...]
    materialised: dict[int, str]
    # ``(taps, materialised leaves, leaves, example) -> (loss, (aux, data of each site))``
    run: Callable[..., tuple[Array, Any]]


class Book:
    """The findings of one evaluation: sites with their data, and leaves to materialise."""

    def __init__(self, materialised: dict[int, str], taps: Sequence[Array] | None = None) -> None:
        self.materialised = dict(materialised)
        self.taps = taps
        self.sites: list[Site] = []
        self.data: list[tuple[Array, ...]] = []
        self.sizes: dict[int, int] = {}

    def materialise(self, leaves: Iterable[int], why: str) -> None:
        for leaf in leaves:
            # The first reason stays: later ones often follow from it, and `explain` prints one.
            self.materialised.setdefault(leaf, why)

    def record(self, site: Site, data: tuple[Array, ...]) -> None:
        self.sites.append(site)
        self.data.append(data)

    def tap(self, output: Array) -> Array:
        # The tap of the next site: sites are recorded in the order in which they are evaluated.
        return output if self.taps is None else output + self.taps[len(self.sites)]

    def enter(self, leaf: int, value: Array, trained: bool = True) -> Any:
        """A leaf as an input of a program: a view, unless it is materialised."""
        if leaf in self.materialised:
            return value
        # A leaf is the identity view of itself: an isometry, with its own axes.
        alone, axes = frozenset([leaf]), tuple(range(value.ndim))
        # A frozen leaf in a scan still is a leaf from which its views are computed.
        trained_by = alone if trained else frozenset[int]()
        own = {leaf: axes} if trained else {}
        return View(trained_by, alone, lambda leaves, *_: leaves[leaf], value, True, axes, own=own)


def settled(run: Callable[[Book], Any]) -> Book:
    """The book of a run that materialises no further leaf."""
    book, known = Book({}), None
    # A materialised leaf counts as data, which other leaves may then meet: repeat until stable.
    while known != book.materialised.keys():
        known = set(book.materialised)
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
    """Plain values. With a book, views among them are materialised: their use is not linear."""
    for x in values:
        if isinstance(x, View) and book is not None:
            # From here on JAX differentiates by the leaf for each example: exact, only slower.
            book.materialise(x.leaves, f"enters {name}")
    return [x.value if isinstance(x, View) else x for x in values]


def dtype(variable: Any) -> Any:
    """The dtype of a variable of a jaxpr."""
    return variable.aval.dtype
