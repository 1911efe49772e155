# SPDX-License-Identifier: Apache-2.0
"""Taps: an equation in which a view meets the data becomes a site.

A *view* is a value that depends on parameters only, and it is *trained* if it has leaves, by which
it is differentiated. A zero *tap* is added to the output of the equation. Its cotangent is the
cotangent of that output; with the recorded data it determines the gradient of the view, and so of
its leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jaxtyping import Array

from dpjax import trees
from dpjax.gradients._bookkeeping.outer_products import precision_of
from dpjax.gradients._bookkeeping.primitives import known
from dpjax.gradients._bookkeeping.sites import Book, Leaves, Memo, Site, View, plain, union
from dpjax.gradients._bookkeeping.structure import slices
from dpjax.gradients._bookkeeping.views import is_a
from dpjax.gradients._xla_cpu.primitives import bind_fast


def tapped(equation: JaxprEqn, inputs: list[Any], operand: int, book: Book) -> Array:
    """Records an equation as a site; returns its output, to which the tap is added.

    All inputs that are not views are the data of the site. The equation is linear in input number
    ``operand``, the first trained view. The book has the taps, and keeps the site with its data.
    """
    views = {i: x for i, x in enumerate(inputs) if isinstance(x, View)}
    trained = [view for view in views.values() if view.leaves]
    data = tuple(x for x in inputs if not isinstance(x, View))
    # The forward pass keeps the dtypes of the model. Gradients are formed in float32 or wider.
    (output,) = bind_fast(equation, plain(inputs))  # on the values of the views
    use = _Use(equation, views, operand, inputs=len(inputs), wide=trees.wide(output.dtype))
    view = views[operand]
    # Two trained views may read one leaf, whose gradient then has another norm than that of a view.
    is_only_trained = len(trained) == 1
    # If each entry of the view depends on one *slice* of a leaf, such as a column, an example only
    # scales slices of a gradient that all examples share: see `common`. These are the axes that
    # count the slices, for each such leaf. An empty view has no entry that `unscaled` could take.
    slices_of_leaves: Mapping[int, tuple[int, ...]] = {}
    if is_only_trained and known(equation.primitive.name).entrywise and view.value.size:
        slices_of_leaves = slices(view)
    # The tap is added before the site is recorded: the book finds it by the number of its sites.
    output_with_tap = book.tap(output)
    site = Site(
        leaves=union(view.leaves for view in trained),
        reads=union(view.reads for view in views.values()),
        equation=equation,
        operand=operand,
        shape=view.value.shape,
        of=view.of,
        isometry=view.isometry and is_only_trained,
        axes=view.axes if is_only_trained else None,
        apply=use.apply,
        data=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in data),
        output=jax.ShapeDtypeStruct(output.shape, output.dtype),
        slices=slices_of_leaves,
        scales=use.scales,
        unscaled=use.unscaled,
    )
    book.record(site, data)
    return output_with_tap


@dataclass(frozen=True, eq=False)
class _Use:
    """The functions of a site: its equation in a wide dtype, as a function of leaves and data."""

    equation: JaxprEqn
    views: Mapping[int, View]  # by the number of the input
    operand: int
    inputs: int
    wide: Any  # the dtype of outputs and gradients

    def apply(self, leaves: Leaves, data: Sequence[Array], memo: Memo | None = None) -> Array:
        """The output of the equation."""
        return self._run(self._arguments(leaves, data, memo))

    def scales(self, leaves: Leaves, data: Sequence[Array], cotangent: Array) -> Array:
        """The numbers by which an example multiplies the slices of `unscaled`."""
        arguments = self._arguments(leaves, data, None)

        def by_view(view: Array) -> Array:
            before = arguments[: self.operand]
            after = arguments[self.operand + 1 :]
            return self._run([*before, view, *after])

        _, pull_back = jax.vjp(by_view, arguments[self.operand])
        (gradient,) = pull_back(cotangent)
        # A view repeats each entry of `unscaled` along its constant axes, so its derivative is the
        # sum over them.
        constant_axes = tuple(self.views[self.operand].constant)
        return jnp.sum(gradient, axis=constant_axes).reshape(self._slice_counts())

    def unscaled(self, leaves: Leaves) -> Array:
        """One entry of the view for each of its slices."""
        view = self.views[self.operand]
        index: list[Any] = [slice(None)] * view.value.ndim
        for axis in view.constant:
            index[axis] = 0
        return view.of(leaves)[tuple(index)].reshape(self._slice_counts())

    def _slice_counts(self) -> list[int]:
        """The number of slices along each axis along which the view varies."""
        view = self.views[self.operand]
        lengths = enumerate(view.value.shape)
        return [length for axis, length in lengths if axis not in view.constant and length > 1]

    def _arguments(self, leaves: Leaves, data: Sequence[Array], memo: Memo | None) -> list[Array]:
        """The inputs of the equation in their order, recomputed or recorded."""
        memo = {} if memo is None else memo
        recorded = iter(data)
        # All are computed before they are converted, because they may share values.
        arguments = [
            self.views[i].of(leaves, memo) if i in self.views else next(recorded)
            for i in range(self.inputs)
        ]
        return [x.astype(self.wide) if is_a(jnp.floating, x) else x for x in arguments]

    def _run(self, arguments: Sequence[Array]) -> Array:
        """The equation, at the precision and in the dtype in which gradients are formed."""
        parameters = dict(self.equation.params)
        if "precision" in parameters:
            # Read when a gradient is formed, because the platform decides: see `_platforms`.
            precision = precision_of(self.equation.params)
            if precision is None:
                parameters["precision"] = None
            else:
                parameters["precision"] = (precision, precision)
        if "preferred_element_type" in parameters:
            parameters["preferred_element_type"] = self.wide
        return self.equation.primitive.bind(*arguments, **parameters)
