# SPDX-License-Identifier: Apache-2.0
"""`Traced`: the loss as engines receive it, traced once.

It lives as long as one call of `dpjax.clipped_grad`: a trace may hold values of the JAX
transformation around that call, which are invalid afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxpr_as_fun

from dpjax import trees
from dpjax.gradients._bookkeeping.sites import Program
from dpjax.gradients._bookkeeping.trace import trace
from dpjax.gradients.loss_checks import (
    constants,
    has_own_derivatives,
    noted,
    require_one_example,
)
from dpjax.types import LossFn, PyTree

# The setting under which matrix products are traced; pyright does not know its attribute.
_PRECISION = "jax_default_matmul_precision"


class Traced:
    """``(params, example) -> (scalar, aux)``: a loss that remembers its trace."""

    def __init__(self, loss: LossFn, has_aux: bool = False, frozen: PyTree = None) -> None:
        def loss_and_aux(params: PyTree, example: PyTree) -> Any:
            arguments = (params, example) if frozen is None else (params, example, frozen)
            output = loss(*arguments)
            return output if has_aux else (output, None)

        self.loss = loss_and_aux
        self._arguments = (loss, has_aux)
        self.jaxprs: dict[Any, tuple[Any, Any]] = {}
        self.gradients: dict[Any, Jaxpr] = {}
        self.programs: dict[Any, Program] = {}

    def with_frozen(self, frozen: PyTree) -> Traced:
        """The loss with these frozen weights, which are valid in the trace around this call."""
        if frozen is None:
            return self
        return Traced(*self._arguments, frozen)

    def __call__(self, params: PyTree, example: PyTree) -> Any:
        """The loss, evaluated from its jaxpr: its Python code runs once for the same shapes."""
        leaves, key = _shapes(params, example)
        if key not in self.jaxprs:
            jaxpr, shape = jax.make_jaxpr(self.loss, return_shape=True)(params, example)
            self.jaxprs[key] = (jaxpr_as_fun(jaxpr), jax.tree.structure(shape))
        run, structure = self.jaxprs[key]
        return structure.unflatten(run(*leaves))

    def check(self, params: PyTree, example: PyTree, name: str) -> Iterator[Any]:
        """Raises unless the loss is one real number of a single example; returns its constants.

        These are the arrays that the loss closes over, which may be private data by mistake.
        """
        # Flax keeps batch statistics in a dictionary of this name, so the path to a leaf has it
        # before the end. A leaf of this name is a parameter like others.
        if any("batch_stats" in leaf.split("/")[:-1] for leaf in trees.leaf_names(params)):
            raise ValueError(
                f"{name}: the parameters hold 'batch_stats', which mix the examples of a batch. "
                "Use GroupNorm or LayerNorm, and give variables['params'] alone."
            )
        with noted(example, name):
            program, (value, _) = jax.make_jaxpr(self, return_shape=True)(params, example)
            if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
                raise ValueError(
                    f"{name}: the loss of one example is {value}; expected a real scalar. "
                    "For (loss, aux), write clipped_grad(loss, rule, has_aux=True)."
                )
        require_one_example(program.jaxpr, f"{name}: the loss")
        # Only the program of the gradient holds derivatives that users wrote.
        if has_own_derivatives(program.jaxpr):
            require_one_example(self.gradient(params, example), f"{name}: the gradient of the loss")
        return constants(program)

    def gradient(self, params: PyTree, example: PyTree) -> Jaxpr:
        """The jaxpr of the gradient, with the derivatives that users wrote."""
        _, key = _shapes(params, example)
        if key not in self.gradients:
            derivative = jax.grad(self, has_aux=True, allow_int=True)
            self.gradients[key] = jax.make_jaxpr(derivative)(params, example).jaxpr
        return self.gradients[key]

    def program(self, params: PyTree, example: PyTree) -> Program:
        """The trace for these shapes; inside a `jax.shard_map` it is another one."""
        _, key = _shapes(params, example)
        if key not in self.programs:
            # This object is the function, because JAX has cached its jaxpr since `check`.
            self.programs[key] = trace(self, params, example)
        return self.programs[key]


def _shapes(params: PyTree, example: PyTree) -> tuple[list[Any], Any]:
    """The leaves of the arguments of a loss, and the key of its trace for their shapes."""
    leaves, structure = jax.tree.flatten((params, example))
    shapes = tuple(map(jnp.shape, leaves))
    dtypes = tuple((jnp.result_type(x), bool(jax.typeof(x).weak_type)) for x in leaves)
    # Both settings change the jaxpr: the estimator of `clipping.jl` raises the precision.
    mesh = jax.sharding.get_abstract_mesh()
    precision = getattr(jax.config, _PRECISION)
    return leaves, (structure, shapes, dtypes, mesh, precision)
