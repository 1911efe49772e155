# SPDX-License-Identifier: Apache-2.0
"""Views of views: the results of an equation whose inputs all depend on parameters only.

Such a result is a view again: it is recomputed from the leaves in full precision, float32 or wider,
when a gradient is pulled back to them. If that changes a value or a derivative of the model, the
leaves are *materialised* instead: differentiated for each example, as by `jax.grad`. A view is
*trained* if it has leaves by which it is differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jaxtyping import Array

from dpjax.gradients._bookkeeping.primitives import known
from dpjax.gradients._bookkeeping.sites import Book, Leaves, Memo, View, dtype, union
from dpjax.gradients._bookkeeping.structure import structure
from dpjax.gradients._jaxprs import bind, equations, inner_programs, own_vjp

# A view calls the views that it is computed from, and Python's stack ends at about 1,000 calls.
_DEEP = 100


def derived(equation: JaxprEqn, views: list[View], book: Book) -> list[Any]:
    """The results of an equation of views: views, or values if their leaves are materialised.

    Leaves are numbers of parameters: those by which the value of a view is differentiated.
    """
    outputs = bind(equation, [view.value for view in views])
    if not outputs:  # an effect, such as a print
        return outputs
    leaves = union(view.leaves for view in views)
    if equation.primitive.name == "stop_gradient":
        # The result still reads the leaves, but no gradient flows back to them.
        leaves = frozenset[int]()
    # Only a trained view can be materialised, so only its depth is counted. A recomputation does
    # not end at a view of depth 0: it also computes the views that this view is computed from.
    depth = 0
    if leaves:
        depth = 1 + max(view.depth for view in views)
        reason = _why_materialised(equation, views, outputs, depth)
        if reason is not None:
            book.materialise(leaves, reason)
            return outputs

    recompute = _recomputation(equation, views, outputs, is_trained=bool(leaves))
    # The one trained view, if the result is a rearrangement of it. An equation that rearranges has
    # one output.
    source = _rearranged(equation.primitive.name, views, outputs[0])
    # `rewrites` reads how a value was made, if by an equation with no other result.
    made = (equation, tuple(views)) if len(outputs) == 1 else None
    results = []
    for i, output in enumerate(outputs):
        result_leaves = leaves
        if not is_a(jnp.floating, output):
            # Integers have no gradient, even if they were computed from parameters.
            result_leaves = frozenset[int]()
        constant, axes_of_leaves = structure(equation, views, output)
        view = View(
            leaves=result_leaves,
            reads=union(view.reads for view in views),  # also the leaves behind a stop_gradient
            of=functools.partial(_result, recompute, i),  # from the leaves to this result
            value=output,
            isometry=source is not None,
            axes=_axes(equation, views, source),
            depth=depth,
            constant=constant,  # axes along which all entries are equal
            # By leaf: for each axis of the result, the axis of the leaf that runs along with it.
            own={leaf: axes for leaf, axes in axes_of_leaves.items() if leaf in result_leaves},
            made=made,
        )
        results.append(view)
    return results


def _why_materialised(
    equation: JaxprEqn, views: Sequence[View], outputs: Sequence[Any], depth: int
) -> str | None:
    """The reason why trained inputs of an equation are materialised; None if they are not."""
    name = equation.primitive.name
    if _runs_own_vjp(equation):
        return f"{name} with a derivative of the user's own"
    complex_result = any(is_a(jnp.complexfloating, output) for output in outputs)
    if complex_result or _differs_in_float32(equation, views, outputs):
        return f"{name} in {outputs[0].dtype}"
    if depth > _DEEP:
        return f"more than {_DEEP} equations of parameters alone"
    return None


def _runs_own_vjp(equation: JaxprEqn) -> bool:
    """Whether a user wrote a VJP of the equation, or of an equation of its inner programs.

    Such a VJP may clip its cotangent. Pulled back once for the sum of all examples, it does not
    give the sum of their clipped gradients.
    """
    if own_vjp(equation):
        return True
    inner = (e for program in inner_programs(equation) for e in equations(program))
    return any(map(own_vjp, inner))


def _differs_in_float32(equation: JaxprEqn, views: Sequence[View], outputs: Sequence[Any]) -> bool:
    """Whether a view that is recomputed in float32 may have another value or derivative.

    The model rounds wherever a dtype is narrower than float32; the recomputation does not.
    """
    name = equation.primitive.name
    floats = [output for output in outputs if is_a(jnp.floating, output)]
    has_float8 = any(output.dtype.itemsize < 2 for output in floats)
    if name == "reduce_precision" or has_float8:
        return True  # the derivative of either rounds the cotangent too
    properties = known(name)
    if len(views) == 1 and (properties.rearranges or properties.repeats):
        # The entries of the one input are moved, copied, negated or cast. `_rounded` recomputes a
        # cast to 16 bits exactly.
        return False
    if not floats:
        return False  # integers have no gradient, and are recomputed in the dtypes of the model
    trained_inputs = [view.value for view in views if view.leaves]
    return any(map(_is_narrow, [*floats, *trained_inputs]))


def _recomputation(
    equation: JaxprEqn, views: list[View], outputs: Sequence[Any], is_trained: bool
) -> Callable[..., list[Array]]:
    """A function ``(leaves, memo={}) -> outputs``, which computes the equation from the leaves.

    A trained result with a gradient is computed in full precision, any other in the dtypes of the
    model. The memo holds the outputs of equations that were already computed from these leaves.
    """
    # A cast has one input and one output.
    is_narrow_cast = equation.primitive.name == "convert_element_type" and _is_narrow(outputs[0])
    has_gradient = is_trained and any(is_a(jnp.floating, output) for output in outputs)
    key = id(views)  # unique, because each equation has a list of its own

    def recompute(leaves: Leaves, memo: Memo | None = None) -> list[Array]:
        memo = {} if memo is None else memo
        if key not in memo:
            inputs = [view.of(leaves, memo) for view in views]
            if not has_gradient:
                # A comparison, an index or a frozen value must see the numbers of the model, so
                # inputs in full precision are cast to the model's dtypes.
                pairs = zip(inputs, equation.invars, strict=True)
                inputs = [jnp.asarray(x, dtype(variable)) for x, variable in pairs]
            computed = bind(equation, inputs)
            if is_narrow_cast:
                computed = [_rounded(inputs[0], computed[0])]
            memo[key] = computed
        return memo[key]

    return recompute


def _result(recompute: Callable[..., list[Array]], i: int, *arguments: Any) -> Array:
    """The output number ``i`` of a recomputation: `View.of`."""
    return recompute(*arguments)[i]


def _rounded(x: Array, narrow: Array) -> Array:
    """The rounded number ``narrow`` in the dtype of ``x``, with the derivative 1 by ``x``."""
    # The sum is exact: later equations see the model's numbers, and no cotangent is rounded.
    return x + jax.lax.stop_gradient(narrow.astype(x.dtype) - x)


def _rearranged(name: str, views: Sequence[View], output: Any) -> View | None:
    """The only trained view, if the result has its entries in another order; None otherwise.

    The entries may be negated, and constants may be added: gradients by the result and by the view
    still have the same norm. The view must itself be a rearrangement of its leaf
    (`View.isometry`).
    """
    trained = [view for view in views if view.leaves]
    if len(trained) != 1 or not trained[0].isometry:
        return None
    (source,) = trained
    if len(views) == 1:
        keeps_norms = known(name).rearranges
    else:
        # A sum with a constant, such as 1 + scale, has the derivative 1, or -1 if it subtracts. A
        # view that the sum broadcasts gets the sum of several cotangents, which has another norm.
        adds = name in {"add", "add_any", "sub"}
        keeps_norms = adds and source.value.shape == output.shape
    if not keeps_norms:
        return None
    return source


def _axes(equation: JaxprEqn, views: Sequence[View], source: View | None) -> tuple[int, ...] | None:
    """The leaf's axis of each axis of the result, if the result is a transpose of a leaf."""
    if source is None or source.axes is None:
        return None
    name = equation.primitive.name
    if name == "transpose":
        return tuple(source.axes[axis] for axis in equation.params["permutation"])
    # A change of sign keeps the norm at one site, but not inner products of two sites. After the
    # three other primitives the result is not a transpose of the leaf.
    negates = name == "neg" or (name == "sub" and views[1] is source)
    if negates or name in {"reshape", "squeeze", "rev"}:
        return None
    return source.axes


def is_a(kind: Any, x: Any) -> bool:
    """Whether the dtype of a value or of a shape is of a kind, such as `jax.numpy.floating`."""
    given = getattr(x, "dtype", None)
    if given is None:
        given = jnp.result_type(x)
    return jnp.issubdtype(given, kind)


def _is_narrow(x: Any) -> bool:
    """Whether the dtype rounds more coarsely than float32."""
    return is_a(jnp.floating, x) and x.dtype.itemsize < 4
