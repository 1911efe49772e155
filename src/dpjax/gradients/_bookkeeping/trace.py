# SPDX-License-Identifier: Apache-2.0
"""Traces a loss and finds where its parameters meet the data: views and sites (`sites`).

A zero *tap* is added to the output of each site. Its cotangent is the cotangent of that output;
with the recorded data it determines the gradient of the view, and so of its leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array

from dpjax import trees
from dpjax.gradients._bookkeeping.outer_products import precision_of
from dpjax.gradients._bookkeeping.primitives import known
from dpjax.gradients._bookkeeping.rewrites import rewritten
from dpjax.gradients._bookkeeping.scan_trace import scan_sites
from dpjax.gradients._bookkeeping.sites import (
    Book,
    Leaves,
    Memo,
    Program,
    Site,
    View,
    constant,
    dtype,
    plain,
    settled,
    union,
)
from dpjax.gradients._bookkeeping.structure import slices, structure
from dpjax.gradients._xla_cpu.primitives import bind_fast
from dpjax.gradients.jaxprs import bind, equations, evaluate, inner_programs, own_vjp
from dpjax.types import LossFn, PyTree

# A view calls the views that it is computed from, and Python's stack ends at about 1,000 calls.
_DEEP = 100
# A leaf is large if it has this many times the entries of a leaf or a product beside it.
_FEW = 4
_REMATERIALISED = "remat2"  # a region of `jax.checkpoint`


def trace(loss: LossFn, params: PyTree, example: PyTree) -> Program:
    """Finds the sites of ``loss(params, example) -> (scalar, aux)``."""
    closed, shape = jax.make_jaxpr(loss, return_shape=True)(params, example)
    structure = jax.tree.structure(shape)

    def walk(book: Book, leaves: Sequence[Array], inputs: Sequence[Array]) -> list[Array]:
        book.sizes = {i: leaf.size for i, leaf in enumerate(leaves)}
        entering = [*(book.enter(i, leaf) for i, leaf in enumerate(leaves)), *inputs]
        value, *aux = _walk(closed.jaxpr, closed.consts, entering, book)
        return [*plain([value], book, "the result"), *plain(aux)]

    leaves, inputs = jax.tree.leaves(params), jax.tree.leaves(example)
    book = settled(lambda book: jax.eval_shape(functools.partial(walk, book), leaves, inputs))
    materialised = book.materialised

    def run(
        taps: Sequence[Array], chosen: dict[int, Array], leaves: Sequence[Array], example: PyTree
    ) -> tuple[Array, Any]:
        tapped = Book(materialised, taps)
        mixed = [chosen.get(i, leaf) for i, leaf in enumerate(leaves)]
        value, aux = structure.unflatten(walk(tapped, mixed, jax.tree.leaves(example)))
        return value, (aux, tuple(tapped.data))

    return Program(tuple(book.sites), materialised, run)


def _walk(
    program: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any], book: Book
) -> list[Any]:
    step = functools.partial(_step, book=book)
    return evaluate(program, map(constant, constants), arguments, step, literal=constant)


def _step(equation: JaxprEqn, inputs: list[Any], book: Book) -> list[Any]:
    """One equation: a call is entered, a view stays one, a site is tapped."""
    name = equation.primitive.name
    row = known(name)
    if row.calls:
        inner = equation.params[row.calls]
        inner, constants = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
        return _walk(inner, constants, inputs, book)
    if name == _REMATERIALISED:
        return _rematerialised(equation, inputs, book)
    sources = [i for i, x in enumerate(inputs) if isinstance(x, View) and x.leaves]
    if name == "dynamic_slice" and _takes_a_row(equation, inputs):
        gather = jax.make_jaxpr(_row)(*plain(inputs[:2]))
        return _walk(gather.jaxpr, gather.consts, inputs[:2], book)
    if (operand := _narrows(equation, inputs, book)) is not None:
        # The small leaves count as data: no example's gradient of the large leaf exists.
        other = inputs[1 - operand]
        book.materialise(other.leaves, f"meets a large leaf in {name}")
        mixed = [x if i == operand else other.value for i, x in enumerate(inputs)]
        return [_site(equation, mixed, operand, book)]
    # No input comes from the data, so the result is a value of parameters alone again.
    if all(isinstance(x, View) for x in inputs):
        return _derive(equation, inputs, book)
    if sources and (better := rewritten(equation, inputs)):
        function, arguments = better
        program = jax.make_jaxpr(function)(*plain(arguments))
        return _walk(program.jaxpr, program.consts, arguments, book)
    # Most large models have their layers in a scan. What enters a while loop or a conditional is
    # materialised.
    if sources and name == "scan":
        return scan_sites(equation, inputs, book, _walk)
    floats = sources and _is(jnp.floating, equation.outvars[0].aval)
    if floats and row.linear(sources, len(inputs)):
        return [_site(equation, inputs, sources[0], book)]
    return bind_fast(equation, plain(inputs, book, name))


def _rematerialised(equation: JaxprEqn, inputs: list[Any], book: Book) -> list[Any]:
    """A region of `jax.checkpoint`, which the backward pass computes again: site data leave it."""
    p, start, walked = equation.params, len(book.sites), list[Any]()

    def region() -> tuple[list[Any], list[tuple[Array, ...]]]:
        child = Book(book.materialised, None if book.taps is None else book.taps[start:])
        child.sizes = book.sizes
        outputs = _walk(p["jaxpr"], (), inputs, child)
        walked[:] = child, outputs
        return plain(outputs), child.data

    # Inputs and taps are closed over: the values that the region reads become its inputs.
    marks = p["prevent_cse"]  # one for all inputs, or one for each
    prevent = marks if isinstance(marks, bool) else any(marks)
    again = jax.checkpoint(region, prevent_cse=prevent, policy=p["policy"])
    values, data = again()
    child, outputs = walked
    for leaf, why in child.materialised.items():
        book.materialise([leaf], why)
    for site, noted in zip(child.sites, data, strict=True):
        book.record(site, noted)
    # A view stays one outside of the region, with the value that left it. Its inputs stay inside.
    both = zip(outputs, values, strict=True)
    return [x._replace(value=v, made=None) if isinstance(x, View) else v for x, v in both]


def _narrows(equation: JaxprEqn, inputs: Sequence[Any], book: Book) -> int | None:
    """Which input is a large leaf that small ones multiply, as where they generate a kernel."""
    if equation.primitive.name != "dot_general" or not all(isinstance(x, View) for x in inputs):
        return None
    sizes = [sum(book.sizes[i] for i in x.leaves) for x in inputs]
    operand, small = int(sizes[1] > sizes[0]), min(sizes)
    alone = not (inputs[0].leaves & inputs[1].leaves) and inputs[operand].isometry
    output: Any = equation.outvars[0].aval
    narrow = _FEW * max(small, output.size) <= sizes[operand] and output.dtype.itemsize >= 4
    return operand if small and alone and narrow else None


def _takes_a_row(equation: JaxprEqn, inputs: Sequence[Any]) -> bool:
    """Whether the equation is ``table[i]`` with a table of parameters and ``i`` from the data."""
    table, *starts = inputs  # none of a scalar
    trained = isinstance(table, View) and bool(table.leaves) and bool(starts)
    trained = trained and not isinstance(starts[0], View)
    return trained and tuple(equation.params["slice_sizes"]) == (1, *table.value.shape[1:])


def _row(table: Array, start: Array) -> Array:
    """``table[start]`` as a gather of one row, which has a rule in `outer_products`."""
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, table.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return jax.lax.gather(table, start.reshape(1, 1), numbers, (1, *table.shape[1:]), mode="clip")


def _derive(equation: JaxprEqn, views: list[View], book: Book) -> list[Any]:
    """An equation whose inputs are all views has views as outputs."""
    name = equation.primitive.name
    outputs = bind(equation, [view.value for view in views])
    if not outputs:  # an effect, such as a print
        return outputs
    leaves, reads = union(view.leaves for view in views), union(view.reads for view in views)
    # The result still reads the leaves, but no gradient flows back to them.
    if name == "stop_gradient":
        leaves = frozenset[int]()
    # A user's VJP may clip its cotangent: pulled back once for the sum of all examples, it would
    # not give the sum of their clipped gradients.
    inside = (e for program in inner_programs(equation) for e in equations(program))
    if leaves and any(map(own_vjp, (equation, *inside))):
        book.materialise(leaves, f"{name} with a derivative of the user's own")
        return outputs
    # A view is recomputed in float32: an operation that rounds would give other values there.
    floats = [x for x in outputs if _is(jnp.floating, x)]
    trained = [view.value for view in views if view.leaves and floats]
    row, narrow = known(name), any(map(_narrow, [*floats, *trained]))
    # Entries that are only moved are the same in any dtype, but not as coarse as a float8.
    moved = len(views) == 1 and (row.rearranges or row.repeats)
    coarse = name == "reduce_precision" or any(x.dtype.itemsize < 2 for x in floats)
    narrow = (narrow and not moved) or coarse
    if leaves and (narrow or any(_is(jnp.complexfloating, x) for x in outputs)):
        book.materialise(leaves, f"{name} in {outputs[0].dtype}")
        return outputs
    depth = 1 + max(view.depth for view in views) if leaves else 0
    if depth > _DEEP:
        book.materialise(leaves, f"more than {_DEEP} equations of parameters alone")
        return outputs

    cast = name == "convert_element_type" and _narrow(outputs[0])
    smooth = bool(leaves and floats)

    def compute(leaves: Leaves, memo: Memo | None = None) -> list[Array]:
        memo = {} if memo is None else memo
        if id(views) not in memo:
            inputs = [view.of(leaves, memo) for view in views]
            # A comparison, an index or what is frozen must see the numbers that the model has.
            if not smooth:
                given = zip(inputs, equation.invars, strict=True)
                inputs = [jnp.asarray(x, dtype(variable)) for x, variable in given]
            computed = bind(equation, inputs)
            memo[id(views)] = [_rounded(*inputs, *computed)] if cast else computed
        return memo[id(views)]

    # Only a rearrangement keeps every norm, so only then is the view's norm the leaf's norm.
    source = _rearranged(name, views, outputs[0])
    axes = source.axes if source else None
    if name == "transpose" and axes is not None:
        axes = tuple(axes[i] for i in equation.params["permutation"])
    elif name in {"reshape", "squeeze", "rev", "neg"} or (name == "sub" and views[1] is source):
        # A change of sign keeps the norm at one site, but not inner products of two sites.
        axes = None
    made = (equation, tuple(views)) if len(outputs) == 1 else None

    def view(i: int, x: Any) -> View:
        # Integers have no gradient, even if they were computed from parameters.
        trained = leaves if _is(jnp.floating, x) else frozenset[int]()
        constant, axes_of = structure(equation, views, x)
        runs = {leaf: along for leaf, along in axes_of.items() if leaf in trained}
        of = functools.partial(lambda i, *given: compute(*given)[i], i)
        return View(trained, reads, of, x, bool(source), axes, depth, constant, runs, made)

    return [view(i, x) for i, x in enumerate(outputs)]


def _rounded(x: Array, narrow: Array) -> Array:
    """A trained value that was cast to a narrower dtype: rounded, with the derivative 1."""
    # The sum is exact: what follows sees the model's numbers, and no cotangent is rounded.
    return x + jax.lax.stop_gradient(narrow.astype(x.dtype) - x)


def _rearranged(name: str, views: Sequence[View], output: Any) -> View | None:
    """The view whose entries the result holds in another order, apart from a constant."""
    trained = [view for view in views if view.leaves]
    if len(trained) != 1 or not trained[0].isometry:
        return None
    if len(views) == 1:
        return trained[0] if known(name).rearranges else None
    # The derivative of 1 + scale is the identity. A broadcast scale has other norms.
    moved = name in {"add", "add_any", "sub"} and trained[0].value.shape == output.shape
    return trained[0] if moved else None


def _site(equation: JaxprEqn, inputs: list[Any], operand: int, book: Book) -> Array:
    views = {i: x for i, x in enumerate(inputs) if isinstance(x, View)}
    sources = {i: view for i, view in views.items() if view.leaves}
    view, data = sources[operand], tuple(x for x in inputs if not isinstance(x, View))
    entrywise, flat = known(equation.primitive.name).entrywise, tuple(view.constant)
    sizes = [n for a, n in enumerate(view.value.shape) if a not in flat and n > 1]
    # The forward pass keeps the dtypes of the model; `apply` is for the gradient, and is wide.
    (output,) = bind_fast(equation, plain(inputs))
    wide = trees.wide(output.dtype)

    def mixed(leaves: Leaves, data: Sequence[Array], memo: Memo | None = None) -> list[Array]:
        memo, rest = {} if memo is None else memo, iter(data)
        arguments = [
            views[i].of(leaves, memo) if i in views else next(rest) for i in range(len(inputs))
        ]
        return [x.astype(wide) if _is(jnp.floating, x) else x for x in arguments]

    def run(arguments: Sequence[Array]) -> Array:
        changed = dict(equation.params)
        if "precision" in changed:
            # Read when a gradient is formed: what is formed here is kept, or summed as it is.
            precision = precision_of(equation.params)
            changed["precision"] = None if precision is None else (precision, precision)
        if "preferred_element_type" in changed:
            changed["preferred_element_type"] = wide
        return equation.primitive.bind(*arguments, **changed)

    def scales(leaves: Leaves, data: Sequence[Array], cotangent: Array) -> Array:
        inputs = mixed(leaves, data)

        def by_view(x: Array) -> Array:
            return run([*inputs[:operand], x, *inputs[operand + 1 :]])

        (gradient,) = jax.vjp(by_view, inputs[operand])[1](cotangent)
        return jnp.sum(gradient, axis=flat).reshape(sizes)

    def unscaled(leaves: Leaves) -> Array:
        places = (0 if a in flat else slice(None) for a in range(view.value.ndim))
        return view.of(leaves)[tuple(places)].reshape(sizes)

    # The tap is zero: it changes no value, and its cotangent is the output's.
    tapped = book.tap(output)
    site = Site(
        leaves=union(view.leaves for view in sources.values()),
        reads=union(view.reads for view in views.values()),
        equation=equation,
        operand=operand,
        shape=view.value.shape,
        of=view.of,
        isometry=view.isometry and len(sources) == 1,
        axes=view.axes if len(sources) == 1 else None,
        apply=lambda leaves, data, memo=None: run(mixed(leaves, data, memo)),
        data=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in data),
        output=jax.ShapeDtypeStruct(output.shape, output.dtype),
        slices=slices(view) if entrywise and view.value.size and len(sources) == 1 else {},
        scales=scales,
        unscaled=unscaled,
    )
    book.record(site, data)
    return tapped


def _is(kind: Any, x: Any) -> bool:
    return jnp.issubdtype(x.dtype if hasattr(x, "dtype") else jnp.result_type(x), kind)


def _narrow(x: Any) -> bool:
    """Whether the dtype rounds more coarsely than float32."""
    return _is(jnp.floating, x) and x.dtype.itemsize < 4
