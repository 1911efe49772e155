# SPDX-License-Identifier: Apache-2.0
"""Traces a loss and finds where its parameters meet the data: views and sites (`sites`).

The program is walked equation by equation. A *view* is a value that depends on parameters only; an
equation of views gives `views`. An equation in which a view meets the data is a *site*: `tapped`
records it in a `Book`. Any other use of a leaf *materialises* it: JAX then differentiates by the
leaf, for each example. `plain` takes the values of views; with a book, it materialises their
leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array

from dpjax.gradients._bookkeeping.primitives import known
from dpjax.gradients._bookkeeping.rewrites import rewritten
from dpjax.gradients._bookkeeping.scan_trace import scan_sites
from dpjax.gradients._bookkeeping.sites import Book, Program, View, constant, plain, settled
from dpjax.gradients._bookkeeping.taps import tapped
from dpjax.gradients._bookkeeping.views import derived, is_a
from dpjax.gradients._jaxprs import evaluate
from dpjax.gradients._xla_cpu.primitives import bind_fast
from dpjax.types import LossFn, PyTree

# An operand is large if its leaves have this many times the entries of the product, and of the
# leaves of the other operand.
_FEW = 4
_CHECKPOINT = "remat2"  # the primitive of `jax.checkpoint`


def trace(loss: LossFn, params: PyTree, example: PyTree) -> Program:
    """Finds the sites of ``loss(params, example) -> (scalar, aux)``; arguments may be shapes.

    The program is walked on shapes to find the sites. Its ``run`` walks it again on arrays, and
    adds a *tap* to the output of each site: a zero, by which it can be differentiated.
    """
    closed, shape = jax.make_jaxpr(loss, return_shape=True)(params, example)
    structure = jax.tree.structure(shape)

    def walk(book: Book, leaves: Sequence[Array], inputs: Sequence[Array]) -> list[Array]:
        """The loss and the leaves of aux for an example, with records in the book."""
        book.sizes = {i: leaf.size for i, leaf in enumerate(leaves)}
        entering = [book.enter(i, leaf) for i, leaf in enumerate(leaves)]
        value, *aux = _walk(closed.jaxpr, closed.consts, [*entering, *inputs], book)
        # No gradient is taken of aux, so a view there materialises nothing.
        return [*plain([value], book, "the result"), *plain(aux)]

    leaves = jax.tree.leaves(params)
    inputs = jax.tree.leaves(example)
    # A materialised leaf is data, which other leaves may then meet: `settled` repeats the walk,
    # with a new book, until it materialises no further leaf.
    book = settled(lambda book: jax.eval_shape(functools.partial(walk, book), leaves, inputs))
    materialised = book.materialised

    def run(
        taps: Sequence[Array],
        differentiated: dict[int, Array],
        leaves: Sequence[Array],
        example: PyTree,
    ) -> tuple[Array, Any]:
        """`Program.run`: ``differentiated`` has the materialised leaves, by their numbers."""
        book = Book(materialised, taps)
        leaves = [differentiated.get(i, leaf) for i, leaf in enumerate(leaves)]
        outputs = walk(book, leaves, jax.tree.leaves(example))
        value, aux = structure.unflatten(outputs)
        return value, (aux, tuple(book.data))

    return Program(tuple(book.sites), materialised, run)


def _walk(
    program: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any], book: Book
) -> list[Any]:
    """Evaluates a program; arguments and results are views, or values that depend on the data."""
    step = functools.partial(_step, book=book)
    return evaluate(program, map(constant, constants), arguments, step, literal=constant)


def _step(equation: JaxprEqn, inputs: list[Any], book: Book) -> list[Any]:
    """Evaluates one equation by the first rule that fits it; returns its outputs.

    An input is a `View`, which depends on parameters only, or a value that depends on the data. A
    view is *trained* if it has leaves: a constant and a frozen weight have none. The book records
    sites and materialised leaves.
    """
    name = equation.primitive.name
    properties = known(name)
    # These three replace the equation by a program, which is walked in its place.
    if properties.calls:  # the name of the parameter that holds the called program
        return _called(equation.params[properties.calls], inputs, book)
    if name == _CHECKPOINT:
        return _checkpointed(equation, inputs, book)
    if name == "dynamic_slice" and _takes_a_row(equation, inputs):
        # A gather has a rule. The row is whole, so the starts along further axes are 0.
        table_and_index = inputs[:2]
        gather = jax.make_jaxpr(_row)(*plain(table_and_index))
        return _walk(gather.jaxpr, gather.consts, table_and_index, book)
    # A product of two views is a site as well if one of them has far more parameters: then only
    # the few parameters of the other are differentiated for each example.
    large = _large_operand(equation, inputs, book)
    if large is not None:
        return _with_large_operand(equation, inputs, large, book)
    if all(isinstance(x, View) for x in inputs):
        return derived(equation, inputs, book)
    # Some inputs depend on the data. Trained views among the others meet them here.
    trained = [i for i, x in enumerate(inputs) if isinstance(x, View) and x.leaves]
    if trained:
        # In another order, as `(x @ a) @ b` for `x @ (a @ b)`, the data may meet the leaves and not
        # a product of them.
        better = rewritten(equation, inputs)
        if better is not None:
            function, arguments = better
            program = jax.make_jaxpr(function)(*plain(arguments))
            return _walk(program.jaxpr, program.consts, arguments, book)
        if name == "scan":
            # Most large models have their layers in a scan. A while loop or a conditional instead
            # materialises the leaves that enter it.
            return scan_sites(equation, inputs, book, _walk)
        # A site is linear in its trained views together, and has one output, which must be real: no
        # rule handles complex gradients. `tapped` finds trained views after the first itself.
        linear = properties.linear(trained, len(inputs))
        if linear and is_a(jnp.floating, equation.outvars[0].aval):
            return [tapped(equation, inputs, trained[0], book)]
    # Either no view is trained, or this use of one has no rule: `plain` materialises its leaves.
    return bind_fast(equation, plain(inputs, book, name))


def _called(program: Any, inputs: list[Any], book: Book) -> list[Any]:
    """Enters a program that an equation calls, with or without constants."""
    if hasattr(program, "consts"):
        return _walk(program.jaxpr, program.consts, inputs, book)
    return _walk(program, (), inputs, book)


def _checkpointed(equation: JaxprEqn, inputs: list[Any], book: Book) -> list[Any]:
    """A region of `jax.checkpoint`: walked with a book of its own inside a new `jax.checkpoint`.

    So the backward pass still computes the region again; only its outputs and the data of its sites
    are stored. Afterwards the region's records, its sites and materialised leaves, are copied to
    the outer book. A *tap* is a zero added to the output of a site, to receive its cotangent.
    """
    parameters = equation.params
    walked = list[Any]()

    def region() -> tuple[list[Any], list[tuple[Array, ...]]]:
        # Taps are in the order of all sites: the region's begin at the next one.
        inner = Book(book.materialised, book.next_taps())
        inner.sizes = book.sizes  # the number of entries of each leaf
        outputs = _walk(parameters["jaxpr"], (), inputs, inner)
        # Only arrays can leave a checkpoint as results: the book and the views leave in this list.
        walked[:] = inner, outputs
        return plain(outputs), inner.data

    prevent_cse = parameters["prevent_cse"]
    if not isinstance(prevent_cse, bool):
        # The equation may have a flag for each input, and `jax.checkpoint` takes one for all.
        prevent_cse = any(prevent_cse)
    # Inputs and taps are closed over: the values that the region reads become its inputs.
    checkpointed = jax.checkpoint(region, prevent_cse=prevent_cse, policy=parameters["policy"])
    values, data = checkpointed()
    inner, outputs = walked
    for leaf, reason in inner.materialised.items():
        book.materialise([leaf], reason)
    for site, site_data in zip(inner.sites, data, strict=True):
        book.record(site, site_data)
    return [_outside(*pair) for pair in zip(outputs, values, strict=True)]


def _outside(output: Any, value: Array) -> Any:
    """An output of a checkpointed region, with the value that left it."""
    if isinstance(output, View):
        # Its inputs stay inside of the region.
        return output._replace(value=value, made=None)
    return value


def _large_operand(equation: JaxprEqn, inputs: Sequence[Any], book: Book) -> int | None:
    """Which operand of a product of two views, 0 or 1, `_with_large_operand` should treat as large.

    A large operand has leaves with at least ``_FEW`` times the entries of the other operand's
    leaves, and of the product. An example is ``w`` in the kernel ``code @ w``, with a short vector
    ``code``. None: neither is large, or a site of the large one is not exact or not faster.
    """
    if equation.primitive.name != "dot_general" or not all(isinstance(x, View) for x in inputs):
        return None
    left_size, right_size = (sum(book.sizes[leaf] for leaf in view.leaves) for view in inputs)
    small_size, large_size = sorted((left_size, right_size))
    large = int(right_size > left_size)
    output: Any = equation.outvars[0].aval
    # A site is linear in its leaves, and the product is not in a leaf of both operands.
    shared_leaves = inputs[0].leaves & inputs[1].leaves
    # A site forms its gradient in float32, but the model rounds that of a narrower product.
    is_narrow = output.dtype.itemsize < 4
    # A site is faster if the view only rearranges its leaf, because their gradients then have one
    # norm. Otherwise each example's gradient of the leaf is formed anyway.
    is_isometry = inputs[large].isometry
    # An operand of no leaves is a constant, and the product stays a view.
    if not small_size or shared_leaves or is_narrow or not is_isometry:
        return None
    if _FEW * max(small_size, output.size) > large_size:
        return None
    return large


def _with_large_operand(
    equation: JaxprEqn, inputs: Sequence[Any], large: int, book: Book
) -> list[Any]:
    """Makes the product a site of the large leaf, whose data are the small operand.

    No example's gradient of the large leaf is then formed, only of the small leaves.
    """
    small = inputs[1 - large]
    book.materialise(small.leaves, f"meets a large leaf in {equation.primitive.name}")
    operands = [small.value, small.value]
    operands[large] = inputs[large]
    return [tapped(equation, operands, large, book)]


def _takes_a_row(equation: JaxprEqn, inputs: Sequence[Any]) -> bool:
    """Whether the equation is ``table[i]`` with a table of parameters and ``i`` from the data."""
    table, *starts = inputs
    if not isinstance(table, View) or not table.leaves:
        return False
    if not starts or isinstance(starts[0], View):  # a scalar has no start
        return False
    return tuple(equation.params["slice_sizes"]) == (1, *table.value.shape[1:])


def _row(table: Array, start: Array) -> Array:
    """``table[start]`` as a gather of one row, which has a rule in `outer_products`."""
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, table.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return jax.lax.gather(table, start.reshape(1, 1), numbers, (1, *table.shape[1:]), mode="clip")
