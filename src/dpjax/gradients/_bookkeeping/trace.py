# SPDX-License-Identifier: Apache-2.0
"""The walk: evaluates a loss's own program and finds where its parameters meet the data.

What depends on parameters alone is followed as a *view*: a leaf, its transpose, a kernel
standardised by its own mean.  Where a view meets the data in an equation that is linear in
it, there is a *site*: a zero *tap* is added to the equation's output, whose cotangent is
the cotangent of that output, and the data that went in are noted down.  From data and
cotangent the gradient of the view follows without ever differentiating by it, and from
that the gradient of its leaves.

A leaf that meets the data in any other way is *materialised*: differentiated like any
argument.  That is always right and never approximate.  This file must never know what is
done at a site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jaxtyping import Array

from dpjax import trees
from dpjax.gradients._xla_cpu.primitives import bind, bind_fast, equations, inner_programs
from dpjax.types import LossFn, PyTree

# Equations that move entries about, and change no norm.
_REARRANGE = {"reshape", "transpose", "squeeze", "expand_dims", "rev", "neg", "copy", "copy_p"}
# Other equations of one input that mean the same in float32 as in a narrower dtype.
_WIDEN = {"broadcast_in_dim", "convert_element_type", "reduce_sum", "slice", *_REARRANGE}
# Equations that are linear (or affine) in these of their inputs, given all others.
_ANY = tuple(range(100))
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
    "dynamic_update_slice": (0, 1),
    "scatter-add": (0, 2),
    "pad": (0,),
    "concatenate": _ANY,
    "select_n": _ANY[1:],
}
# Of these several inputs may be views at once: they are linear in all of them together.
_TOGETHER = {"concatenate", "select_n", "dynamic_update_slice"}
# Views ask those that they are made from, and Python's stack ends at about a thousand calls.
_DEEP = 100
# Programs inside a program, and the parameter that holds them.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}

Leaves = Sequence[Array]
Memo = dict[int, list[Array]]


class View(NamedTuple):
    """A value that depends on parameters alone; on none at all, if it is a constant.

    Args:
      leaves: By which parameter leaves it is to be differentiated.
      reads: From which it is computed; some may be behind a `stop_gradient`.
      of: From all leaves to this value, in full precision; the memo keeps what several
        views share from being computed twice.
      value: The value, as the loss computes it.
      isometry: Whether it only rearranges the entries of one leaf.
      axes: The leaf's axis of each of its own, where it is a transpose of one leaf.
      depth: How many equations it is away from a leaf that it is differentiated by.
    """

    leaves: frozenset[int]
    reads: frozenset[int]
    of: Callable[[Leaves, Memo], Array]
    value: Any
    isometry: bool = False
    axes: tuple[int, ...] | None = None
    depth: int = 0


class Site(NamedTuple):
    """An equation in which parameters meet the data, linearly.

    Args:
      leaves: By which leaves it is to be differentiated.
      reads: Which leaves its views are computed from.
      equation: The equation, with its parameters.
      operand: Which of its inputs is the view; the first, if several are.
      shape: The shape of that input, in one round of the scans around it.
      of: From all leaves to that input.
      isometry: Whether that input rearranges the entries of one leaf, and is the only view.
      axes: The leaf's axis of each axis of that input, where it is a transpose.
      apply: ``(leaves, data) -> output`` in full precision.
      data: Shapes and dtypes of the other inputs, for one example.
      output: Shape and dtype of the output, for one example.
      stacks: For each scan around the equation, outermost first: whether the view is sliced
        by it (layer after layer) or is the same in every round.  Data, output and a sliced
        view have a leading axis for it.
    """

    leaves: frozenset[int]
    reads: frozenset[int]
    equation: JaxprEqn
    operand: int
    shape: tuple[int, ...]
    of: Callable[[Leaves], Array]
    isometry: bool
    axes: tuple[int, ...] | None
    apply: Callable[[Leaves, Sequence[Array]], Array]
    data: tuple[jax.ShapeDtypeStruct, ...]
    output: jax.ShapeDtypeStruct
    stacks: tuple[bool, ...] = ()


class Program(NamedTuple):
    """A loss, ready to be run with taps.

    Args:
      sites: The sites, in the order of the program.
      materialised: For each leaf that is differentiated as a whole, why.
      run: ``(taps, materialised leaves, leaves, example) -> (loss, (aux, data of each
        site))``.
    """

    sites: tuple[Site, ...]
    materialised: dict[int, str]
    run: Callable[..., tuple[Array, Any]]


class _Book:
    """What one walk finds: sites with their data, and leaves to materialise."""

    def __init__(self, materialised: dict[int, str], taps: Sequence[Array] | None = None) -> None:
        self.materialised = dict(materialised)
        self.taps = taps
        self.sites: list[Site] = []
        self.data: list[tuple[Array, ...]] = []

    def materialise(self, leaves: Iterable[int], why: str) -> None:
        for leaf in leaves:
            self.materialised.setdefault(leaf, why)

    def record(self, site: Site, data: tuple[Array, ...]) -> None:
        self.sites.append(site)
        self.data.append(data)

    def tap(self, output: Array) -> Array:
        return output if self.taps is None else output + self.taps[len(self.sites)]

    def enter(self, leaf: int, value: Array, trained: bool = True) -> Any:
        """A leaf as it enters a program: a view, but for those to materialise."""
        if leaf in self.materialised:
            return value
        alone, axes = frozenset([leaf]), tuple(range(value.ndim))
        trained_by = alone if trained else frozenset[int]()
        return View(trained_by, alone, lambda leaves, _: leaves[leaf], value, True, axes)


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
        if mutates:
            return jaxpr_as_fun(closed)(*leaves, *inputs)
        entering = [*(book.enter(i, leaf) for i, leaf in enumerate(leaves)), *inputs]
        value, *aux = _evaluate(closed.jaxpr, closed.consts, entering, book)
        return [*_plain([value], book, "the result"), *_plain(aux)]

    leaves, inputs = jax.tree.leaves(params), jax.tree.leaves(example)
    # What is written to a reference is no value that could be computed again.
    mutates = any(e.primitive.name == "new_ref" for e in equations(closed.jaxpr))
    book, known = _Book(dict.fromkeys(range(len(leaves) * mutates), "a mutable reference")), None
    # A leaf that is materialised is data to the rest, which may then meet it in new ways.
    while known != book.materialised.keys():
        known = set(book.materialised)
        book = _Book(book.materialised)
        jax.eval_shape(lambda p, x, book=book: walk(book, p, x), leaves, inputs)
    materialised = book.materialised

    def run(
        taps: Sequence[Array], chosen: dict[int, Array], leaves: Sequence[Array], example: PyTree
    ) -> tuple[Array, Any]:
        tapped = _Book(materialised, taps)
        mixed = [chosen.get(i, leaf) for i, leaf in enumerate(leaves)]
        value, aux = structure.unflatten(walk(tapped, mixed, jax.tree.leaves(example)))
        return value, (aux, tuple(tapped.data))

    return Program(tuple(book.sites), materialised, run)


def _evaluate(
    jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any], book: _Book
) -> list[Any]:
    """Evaluates a program whose values may be views."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(_constant, constants), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(variable: Any) -> Any:
        return _constant(variable.val) if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        outputs = _step(equation, [read(v) for v in equation.invars], book)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _step(equation: JaxprEqn, inputs: list[Any], book: _Book) -> list[Any]:
    """One equation: a call is entered, a view stays one, a site is tapped."""
    name = equation.primitive.name
    if name in _CALLS:
        inner = equation.params[_CALLS[name]]
        inner, constants = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
        return _evaluate(inner, constants, inputs, book)
    if name == "dynamic_slice" and _takes_a_row(equation, inputs):
        gather = jax.make_jaxpr(_row)(*_plain(inputs[:2]))
        return _evaluate(gather.jaxpr, gather.consts, inputs[:2], book)
    if all(isinstance(x, View) for x in inputs):
        return _derive(equation, inputs, book)
    sources = [i for i, x in enumerate(inputs) if isinstance(x, View) and x.leaves]
    if sources and name == "scan":
        return _scan(equation, inputs, book)
    together = len(sources) == 1 or name in _TOGETHER
    linear = together and set(sources) <= set(_LINEAR_IN.get(name, ()))
    if sources and linear and _is(jnp.floating, equation.outvars[0].aval):
        return [_site(equation, inputs, sources[0], book)]
    return bind_fast(equation, _plain(inputs, book, name))


def _takes_a_row(equation: JaxprEqn, inputs: Sequence[Any]) -> bool:
    """Whether it is ``table[i]``, of a table of parameters and a number among the data."""
    table, start, *_ = inputs
    found = isinstance(table, View) and bool(table.leaves) and not isinstance(start, View)
    return found and tuple(equation.params["slice_sizes"]) == (1, *table.value.shape[1:])


def _row(table: Array, start: Array) -> Array:
    """The same as a gather of one row, for which there is a rule."""
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, table.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return jax.lax.gather(table, start.reshape(1, 1), numbers, (1, *table.shape[1:]), mode="clip")


def _derive(equation: JaxprEqn, views: list[View], book: _Book) -> list[Any]:
    """The outputs of an equation of views alone are views."""
    name = equation.primitive.name
    outputs = bind(equation, [view.value for view in views])
    leaves, reads = _union(view.leaves for view in views), _union(view.reads for view in views)
    if name == "stop_gradient":
        leaves = frozenset[int]()
    if leaves and _bends(equation):
        book.materialise(leaves, f"{name} with a derivative of the user's own")
        return outputs
    narrow = any(map(_narrow, outputs)) and not (len(views) == 1 and name in _WIDEN)
    if leaves and (narrow or any(_is(jnp.complexfloating, x) for x in outputs)):
        book.materialise(leaves, f"{name} in {outputs[0].dtype}")
        return outputs
    depth = 1 + max(view.depth for view in views) if leaves else 0
    if depth > _DEEP:
        book.materialise(leaves, f"more than {_DEEP} equations of parameters alone")
        return outputs

    # In full precision a cast of what is trained to a narrower dtype is no map at all.
    cast = name == "convert_element_type" and _narrow(outputs[0]) and bool(leaves)
    smooth = any(_is(jnp.floating, x) for x in outputs)

    def compute(leaves: Leaves, memo: Memo) -> list[Array]:
        if id(views) not in memo:
            inputs = [view.of(leaves, memo) for view in views]
            if not smooth:  # a comparison or an index is of the numbers that the model has
                given = zip(inputs, equation.invars, strict=True)
                inputs = [jnp.asarray(x, _dtype(variable)) for x, variable in given]
            memo[id(views)] = inputs if cast else bind(equation, inputs)
        return memo[id(views)]

    isometry = len(views) == 1 and views[0].isometry
    isometry = isometry and name in {"convert_element_type", *_REARRANGE}
    axes = views[0].axes if isometry else None
    if name == "transpose" and axes is not None:
        axes = tuple(axes[i] for i in equation.params["permutation"])
    elif name not in ("convert_element_type", "copy", "copy_p"):
        axes = None

    def view(i: int, x: Any) -> View:
        # Integers have no gradient, whatever they were made from.
        moved = leaves if _is(jnp.floating, x) else frozenset[int]()
        return View(moved, reads, lambda p, memo: compute(p, memo)[i], x, isometry, axes, depth)

    return [view(i, x) for i, x in enumerate(outputs)]


def _bends(equation: JaxprEqn) -> bool:
    """Whether it is pulled back by a rule of the user's, which need not be linear.

    That of a sum of examples is then not the sum of theirs: clipping by value is an example.
    """
    inside = (e for program in inner_programs(equation) for e in program.eqns)
    return equation.primitive.name.startswith("custom_vjp") or any(map(_bends, inside))


def _site(equation: JaxprEqn, inputs: list[Any], operand: int, book: _Book) -> Array:
    """Evaluates a site, adds its tap and notes its data."""
    views = {i: x for i, x in enumerate(inputs) if isinstance(x, View)}
    sources = {i: view for i, view in views.items() if view.leaves}
    view, data = sources[operand], tuple(x for x in inputs if not isinstance(x, View))

    def apply(leaves: Leaves, data: Sequence[Array]) -> Array:
        memo, rest = {}, iter(data)
        mixed = [
            views[i].of(leaves, memo) if i in views else next(rest) for i in range(len(inputs))
        ]
        wide = trees.wide(output.dtype)
        mixed = [x.astype(wide) if _is(jnp.floating, x) else x for x in mixed]
        return equation.primitive.bind(*mixed, **_in_full_precision(equation.params, wide))

    (output,) = bind_fast(equation, _plain(inputs))
    tapped = book.tap(output)
    site = Site(
        leaves=_union(view.leaves for view in sources.values()),
        reads=_union(view.reads for view in views.values()),
        equation=equation,
        operand=operand,
        shape=view.value.shape,
        of=lambda leaves: view.of(leaves, {}),
        isometry=view.isometry and len(sources) == 1,
        axes=view.axes if len(sources) == 1 else None,
        apply=apply,
        data=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in data),
        output=jax.ShapeDtypeStruct(output.shape, output.dtype),
    )
    book.record(site, data)
    return tapped


def _scan(equation: JaxprEqn, inputs: list[Any], book: _Book) -> list[Any]:
    """A loop over layers or time: its body is walked, its sites are stacked.

    Views that are sliced, and views that stay the same, enter the body as leaves of its
    own; a view that the rounds carry along is materialised.
    """
    p, inner = equation.params, equation.params["jaxpr"]
    first, last = p["num_consts"], p["num_consts"] + p["num_carry"]
    inputs = [
        *inputs[:first],
        *_plain(inputs[first:last], book, "the carry of a scan"),
        *inputs[last:],
    ]
    entering = {i: x for i, x in enumerate(inputs) if isinstance(x, View) and x.reads}
    views, sliced = list(entering.values()), [i >= last for i in entering]
    values = [
        jnp.asarray(x, _dtype(v)) for x, v in zip(_plain(inputs), equation.invars, strict=True)
    ]
    # Constants stay constants inside.
    constants = [
        x if isinstance(x, View) and not x.reads else value
        for x, value in zip(inputs[:first], values[:first], strict=True)
    ]
    carry, slices = values[first:last], values[last:]

    def body(child: _Book, carry: Sequence[Array], slices: Sequence[Array]) -> list[Array]:
        arguments: list[Any] = [*constants, *carry, *slices]
        for j, (i, view) in enumerate(entering.items()):
            arguments[i] = child.enter(j, arguments[i], trained=bool(view.leaves))
        outputs = _evaluate(inner.jaxpr, inner.consts, arguments, child)
        return _plain(outputs, child, "the carry of a scan")

    probe, known = _Book({}), None
    while known != probe.materialised.keys():
        known = set(probe.materialised)
        probe = _Book(probe.materialised)
        rows = trees.one_row(slices)
        jax.eval_shape(lambda c, s, probe=probe: body(probe, c, s), carry, rows)
    for local, why in probe.materialised.items():
        book.materialise(views[local].leaves, f"{why}, in a scan")

    start, count = len(book.sites), len(probe.sites)
    taps = None if book.taps is None else list(book.taps[start : start + count])

    def round_(carry: Any, xs: Any) -> tuple[Any, Any]:
        child = _Book(probe.materialised, xs[1])
        outputs = body(child, carry, xs[0])
        split = p["num_carry"]
        return outputs[:split], (outputs[split:], tuple(child.data))

    ended, (stacked, data) = jax.lax.scan(
        round_, carry, (slices, taps), p["length"], p["reverse"], p["unroll"]
    )
    for site, noted in zip(probe.sites, data, strict=True):
        book.record(_stacked(site, views, sliced, p["length"]), noted)
    return [*ended, *stacked]


def _stacked(site: Site, views: list[View], sliced: list[bool], length: int) -> Site:
    """A site inside a scan, as a site of the program around it."""
    entering = sorted(site.reads)
    axis = {j: 0 if sliced[j] else None for j in entering}
    by_round = any(sliced[j] for j in entering)
    alone = views[entering[0]] if len(entering) == 1 else None

    def over_rounds(function: Callable[..., Array], leaves: Leaves, *data: Any) -> Array:
        memo: Memo = {}
        chosen = {j: views[j].of(leaves, memo) for j in entering}
        if not data and not by_round:
            return function(_Sparse(chosen))
        each = jax.vmap(lambda c, *d: function(_Sparse(c), *d), (axis, *(0 for _ in data)))
        return each(chosen, *data)

    axes = None
    if alone and alone.axes is not None and site.axes is not None:
        axes = tuple(alone.axes[a + by_round] for a in site.axes)
        axes = (alone.axes[0], *axes) if by_round else axes
    return site._replace(
        leaves=_union(views[j].leaves for j in site.leaves),
        reads=_union(views[j].reads for j in entering),
        of=lambda leaves: over_rounds(site.of, leaves),
        isometry=site.isometry and alone is not None and alone.isometry,
        axes=axes,
        apply=lambda leaves, data: over_rounds(site.apply, leaves, data),
        data=tuple(jax.ShapeDtypeStruct((length, *x.shape), x.dtype) for x in site.data),
        output=jax.ShapeDtypeStruct((length, *site.output.shape), site.output.dtype),
        stacks=(by_round, *site.stacks),
    )


class _Sparse(dict):
    """Leaves by number, of which only some are there: all that a site asks for."""


def _constant(value: Any) -> View:
    return View(frozenset(), frozenset(), lambda *_: jnp.asarray(value), value)


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset[int]().union(*sets)


def _plain(values: Sequence[Any], book: _Book | None = None, name: str = "") -> list[Any]:
    """Plain values; with a book, a view of a leaf that ends up here is not used linearly."""
    for x in values:
        if isinstance(x, View) and book is not None:
            book.materialise(x.leaves, f"enters {name}")
    return [x.value if isinstance(x, View) else x for x in values]


def _dtype(variable: Any) -> Any:
    return variable.aval.dtype


def _is(kind: Any, x: Any) -> bool:
    return jnp.issubdtype(x.dtype if hasattr(x, "dtype") else jnp.result_type(x), kind)


def _narrow(x: Any) -> bool:
    """Whether numbers are rounded more coarsely than float32 does."""
    return _is(jnp.floating, x) and x.dtype.itemsize < 4


def _in_full_precision(parameters: dict[str, Any], wide: Any) -> dict[str, Any]:
    changed = dict(parameters)
    if "precision" in changed:
        changed["precision"] = (jax.lax.Precision.HIGHEST,) * 2
    if "preferred_element_type" in changed:
        changed["preferred_element_type"] = wide
    return changed
