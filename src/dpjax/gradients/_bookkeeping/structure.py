# SPDX-License-Identifier: Apache-2.0
"""Structure of views: along which axes they are constant, and which run along with a leaf's.

The norms of the columns of a kernel are a view with one axis, which runs along with the last axis
of the kernel: each norm depends on its own column alone. So the derivative of all norms is one
array of the kernel's shape, whatever the example, and an example only scales its columns
(`common`). A number, such as a weight decay, has no axis; its derivative is scaled as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from dpjax.gradients._bookkeeping.sites import Axes, View, union

# Primitives whose result depends, entry by entry, on the same entry of each input.
ENTRYWISE = {
    "abs", "add", "add_any", "convert_element_type", "copy", "cos", "div", "erf", "exp",
    "expm1", "integer_pow", "log", "log1p", "log2", "logistic", "max", "min", "mul", "neg",
    "one_minus_square", "pow", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "sub", "tanh",
}  # fmt: skip
_REDUCE = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod"}

Structure = tuple[frozenset[int], Mapping[int, Axes]]


def structure(equation: JaxprEqn, views: Sequence[View], output: Any) -> Structure:
    """The axes of a result that are constant, and the leaves' axes with which it runs.

    Args:
      equation: Its inputs are all views.
      views: Those inputs.
      output: The result.
    """
    shape, leaves = jnp.shape(output), union(view.leaves for view in views)
    if views:
        sources = _sources(equation, views, shape)
        if sources is not None:
            return _together(views, sources, shape, leaves)
    return frozenset(), dict.fromkeys(leaves, (None,) * len(shape))


def slices(view: View) -> dict[int, tuple[int, ...]]:
    """The axes that count slices, for each leaf whose slices each move one entry of the view."""
    shape = view.value.shape
    counted = [a for a, size in enumerate(shape) if a not in view.constant and size > 1]
    found = {leaf: [axes[a] for a in counted] for leaf, axes in view.own.items()}
    return {
        leaf: tuple(a for a in axes if a is not None)
        for leaf, axes in found.items()
        if None not in axes
    }


def _sources(
    equation: JaxprEqn, views: Sequence[View], shape: tuple[int, ...]
) -> Sequence[Sequence[int | None]] | None:
    """For each input and each axis of the result, the input's axis; None where it is repeated."""
    name, p = equation.primitive.name, equation.params
    if name in ENTRYWISE:
        # A number among the inputs is repeated along all axes, an axis of length 1 along its own.
        own = [
            [a if n == shape[a] else None for a, n in enumerate(jnp.shape(v.value))] for v in views
        ]
        return [axes or [None] * len(shape) for axes in own]
    before = jnp.shape(views[0].value)
    if name in _REDUCE:
        return [[a for a in range(len(before)) if a not in p["axes"]]]
    if name == "squeeze":
        return [[a for a in range(len(before)) if a not in p["dimensions"]]]
    if name == "transpose":
        return [list(p["permutation"])]
    if name == "unstack":
        return [[a for a in range(len(before)) if a != p["axis"]]]
    if name in ("slice", "split"):
        return [list(range(len(before)))]
    if name == "broadcast_in_dim":
        places = dict(zip(p["broadcast_dimensions"], range(len(before)), strict=True))
        found = [places.get(a) for a in range(len(shape))]
        # An axis of length 1 is repeated if the result has more entries there.
        return [[None if a is None or before[a] != shape[k] else a for k, a in enumerate(found)]]
    if name == "reshape":
        # Only axes of length 1 come and go.
        rest = iter(a for a, n in enumerate(before) if n > 1)
        if [n for n in before if n > 1] == [n for n in shape if n > 1]:
            return [[next(rest) if n > 1 else None for n in shape]]
    return None


def _together(
    views: Sequence[View],
    sources: Sequence[Sequence[int | None]],
    shape: tuple[int, ...],
    leaves: frozenset[int],
) -> Structure:
    def constant(a: int) -> bool:
        return all(s[a] is None or s[a] in v.constant for v, s in zip(views, sources, strict=True))

    def own(leaf: int, a: int) -> int | None:
        found = set[int | None]()
        for view, source in zip(views, sources, strict=True):
            # Inputs that do not depend on the leaf have no say.
            if leaf in view.leaves:
                b = source[a]
                # An axis that was cut counts from another start.
                whole = b is not None and view.value.shape[b] == shape[a]
                found.add(view.own[leaf][b] if b is not None and whole else None)
        return found.pop() if len(found) == 1 else None

    axes = {leaf: tuple(own(leaf, a) for a in range(len(shape))) for leaf in leaves}
    return frozenset(a for a in range(len(shape)) if constant(a)), axes
