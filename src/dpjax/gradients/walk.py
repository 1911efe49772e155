# SPDX-License-Identifier: Apache-2.0
"""The walk: evaluates a loss's own program and finds where its parameters enter.

A parameter leaf is followed through reshapes, transposes and the like as a *view*.  Where
an equation is linear in exactly one view, that is a *site*: a zero *tap* is added to the
equation's output, whose cotangent is the cotangent of that output, and the equation's
other inputs are noted down.  From inputs and cotangent the leaf's gradient follows
without ever differentiating by the leaf.

A leaf that enters anywhere else, or at several sites, is *materialised*: differentiated
like any argument.  That is always right and never approximate.  This file must never
know what is done at a site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, DebugInfo, DropVar, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jaxtyping import Array

from dpjax.gradients.primitives import convolution
from dpjax.types import LossFn, PyTree

__all__ = ["Program", "Site", "View", "trace"]

# Rearrangements of a leaf's entries: its gradient's norm is not changed by them.
_REARRANGE = {"reshape", "transpose", "squeeze", "expand_dims", "rev", "copy", "copy_p"}
# Other linear maps of a leaf alone, which do change the norm of what flows back.
_LINEAR_MAPS = {"broadcast_in_dim", "convert_element_type", "neg"}
# Equations that are linear (or affine) in the operands named, given all others.
_LINEAR_IN: dict[str, tuple[int, ...]] = {
    "add": (0, 1),
    "add_any": (0, 1),
    "sub": (0, 1),
    "mul": (0, 1),
    "div": (0,),
    "dot_general": (0, 1),
    "conv_general_dilated": (0, 1),
    "gather": (0,),
    "dynamic_slice": (0,),
    "slice": (0,),
    "reduce_sum": (0,),
}
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "checkpoint": "jaxpr"}


class View(NamedTuple):
    """A value that is a linear map of one parameter leaf and of nothing else."""

    leaf: int
    of: Callable[[Array], Array]
    """From the leaf to this value."""
    value: Array
    isometry: bool
    """Whether the map only rearranges entries."""


class Site(NamedTuple):
    """An equation that is linear in one view of one leaf.

    Args:
      leaf: Which leaf.
      equation: The equation, with its parameters.
      operand: Which of its inputs is the view.
      view: From the leaf to that input.
      isometry: Whether the view only rearranges entries.
      output: Shape and dtype of the equation's output, for one example.
    """

    leaf: int
    equation: JaxprEqn
    operand: int
    view: Callable[[Array], Array]
    isometry: bool
    output: jax.ShapeDtypeStruct

    def apply(self, leaf: Array, others: Sequence[Array]) -> Array:
        """The equation's output in full precision, as a function of the leaf."""
        parameters = dict(self.equation.params)
        if "precision" in parameters:
            parameters["precision"] = (jax.lax.Precision.HIGHEST,) * 2
        if "preferred_element_type" in parameters:
            parameters["preferred_element_type"] = leaf.dtype
        inputs = list(others)
        inputs.insert(self.operand, self.view(leaf))
        return self.equation.primitive.bind(*inputs, **parameters)


class Program(NamedTuple):
    """A loss, ready to be run with taps.

    Args:
      sites: The sites, in the order of the program.
      materialised: For each leaf that is differentiated as a whole, why.
      run: ``(taps, materialised leaves, leaves, example) -> (loss, (aux, other inputs of
        each site))``.
    """

    sites: tuple[Site, ...]
    materialised: dict[int, str]
    run: Callable[..., tuple[Array, Any]]


class _Book:
    """What one walk finds: sites, and leaves to materialise."""

    def __init__(self, materialised: dict[int, str], taps: Sequence[Array] | None) -> None:
        self.materialised = dict(materialised)
        self.taps = taps
        self.sites: list[Site] = []
        self.others: list[tuple[Array, ...]] = []


def trace(loss: LossFn, params: PyTree, example: PyTree) -> Program:
    """Finds the sites of ``loss(params, example) -> (scalar, aux)``.

    Args:
      loss: The loss of one example.
      params: Parameters, or their shapes.
      example: One example, or its shapes.
    """
    closed, shape = jax.make_jaxpr(loss, return_shape=True)(params, example)
    structure = jax.tree.structure(shape)

    def walk(book: _Book, leaves: Sequence[Array], inputs: Sequence[Array]) -> list[Array]:
        entering = [
            leaf if i in book.materialised else View(i, lambda x: x, leaf, True)
            for i, leaf in enumerate(leaves)
        ]
        return _values(_evaluate(closed.jaxpr, closed.consts, [*entering, *inputs], book), book)

    leaves, inputs = jax.tree.leaves(params), jax.tree.leaves(example)
    first = _Book({}, None)
    jax.eval_shape(lambda p, x: walk(first, p, x), leaves, inputs)
    materialised = first.materialised
    found = [site.leaf for site in first.sites]
    for leaf in set(found):
        if found.count(leaf) > 1:
            materialised.setdefault(leaf, f"used at {found.count(leaf)} places")
    second = _Book(materialised, None)
    jax.eval_shape(lambda p, x: walk(second, p, x), leaves, inputs)

    def run(
        taps: Sequence[Array], chosen: dict[int, Array], leaves: Sequence[Array], example: PyTree
    ) -> tuple[Array, Any]:
        book = _Book(materialised, taps)
        mixed = [chosen.get(i, leaf) for i, leaf in enumerate(leaves)]
        value, aux = structure.unflatten(walk(book, mixed, jax.tree.leaves(example)))
        return value, (aux, tuple(book.others))

    return Program(tuple(second.sites), materialised, run)


def _evaluate(
    jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any], book: _Book
) -> list[Any]:
    """Evaluates a program whose values may be views."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        outputs = _step(equation, [read(v) for v in equation.invars], book)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _step(equation: JaxprEqn, inputs: list[Any], book: _Book) -> list[Any]:
    """One equation: a call is entered, a view stays one, a site is tapped."""
    name = equation.primitive.name
    viewed = [i for i, x in enumerate(inputs) if isinstance(x, View)]
    if viewed and name in _CALLS:
        inner = equation.params[_CALLS[name]]
        if isinstance(inner, ClosedJaxpr):
            return _evaluate(inner.jaxpr, inner.consts, inputs, book)
        return _evaluate(inner, (), inputs, book)
    if len(viewed) == 1 and inputs[viewed[0]].leaf not in book.materialised:
        (operand,) = viewed
        if len(inputs) == 1 and name in _REARRANGE | _LINEAR_MAPS:
            return [_look(equation, inputs[0])]
        if operand in _LINEAR_IN.get(name, ()) and len(equation.outvars) == 1:
            return [_tap(equation, inputs, operand, book)]
    for i in viewed:
        book.materialised.setdefault(inputs[i].leaf, f"enters {name}")
    return _bind(equation, _values(inputs, book))


def _look(equation: JaxprEqn, view: View) -> View:
    """The view of a view."""

    def onward(x: Array) -> Array:
        parameters = dict(equation.params)
        if "new_dtype" in parameters:  # in full precision a cast is no map at all
            return x
        return equation.primitive.bind(x, **parameters)

    return View(
        view.leaf,
        lambda leaf: onward(view.of(leaf)),
        equation.primitive.bind(view.value, **equation.params),
        view.isometry and equation.primitive.name not in ("broadcast_in_dim",),
    )


def _tap(equation: JaxprEqn, inputs: list[Any], operand: int, book: _Book) -> Array:
    """Evaluates a site, adds its tap and notes its other inputs."""
    view: View = inputs[operand]
    others = tuple(x for i, x in enumerate(inputs) if i != operand)
    plain = [*inputs[:operand], view.value, *inputs[operand + 1 :]]
    if equation.primitive.name == "conv_general_dilated" and operand == 1:
        output = convolution(equation.params, *plain)
    else:
        (output,) = _bind(equation, plain)
    shape = jax.ShapeDtypeStruct(output.shape, output.dtype)
    if book.taps is not None:
        output = output + book.taps[len(book.sites)]
    book.sites.append(Site(view.leaf, equation, operand, view.of, view.isometry, shape))
    book.others.append(others)
    return output


def _bind(equation: JaxprEqn, inputs: Sequence[Array]) -> list[Any]:
    """Evaluates one equation on plain values, calls and custom derivatives included."""
    chosen = {
        variable: x
        for variable, x in zip(equation.invars, inputs, strict=True)
        if not isinstance(variable, Literal)
    }
    wanted = [v for v in equation.outvars if not isinstance(v, DropVar)]
    debug = DebugInfo("dpjax", equation.primitive.name, ("",) * len(chosen), ("",) * len(wanted))
    alone = Jaxpr([], list(chosen), wanted, [equation], equation.effects, debug)
    results = dict(zip(wanted, jaxpr_as_fun(ClosedJaxpr(alone, []))(*chosen.values()), strict=True))
    return [results.get(v, 0) for v in equation.outvars]


def _values(values: Sequence[Any], book: _Book) -> list[Any]:
    """Plain values; a view that ends up here is used in a way that is not linear."""
    for x in values:
        if isinstance(x, View):
            book.materialised.setdefault(x.leaf, "is returned by the loss")
    return [x.value if isinstance(x, View) else x for x in values]
