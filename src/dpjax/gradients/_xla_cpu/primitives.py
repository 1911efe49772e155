# SPDX-License-Identifier: Apache-2.0
"""`FAST`: primitives that have a faster version, with the same values and derivatives.

Each file of this folder describes its case, and may go when its version is no faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import JaxprEqn
from jaxtyping import Array

from dpjax.gradients import _platforms
from dpjax.gradients._jaxprs import bind, evaluate
from dpjax.gradients._xla_cpu.apart import tanh
from dpjax.gradients._xla_cpu.convolution import convolution
from dpjax.gradients._xla_cpu.max_pool import pool_max


def _pad(parameters: dict[str, Any], x: Array, filling: Any) -> Array:
    """A pad by a traced number, which JAX cannot differentiate by only that number."""
    edges = parameters["padding_config"]
    if not isinstance(filling, Tracer):
        return jax.lax.pad(x, filling, edges)
    is_padding = jax.lax.pad(jnp.zeros(x.shape, bool), jnp.array(True), edges)
    padded = jax.lax.pad(x, jnp.zeros((), x.dtype), edges)
    return jnp.where(is_padding, filling, padded)


class Version(NamedTuple):
    """A version of a primitive, ``(parameters, *inputs) -> output``, and when it is better."""

    run: Callable[..., Array]
    # XLA for accelerators has better forms of most primitives.
    better: Callable[[], bool] = _platforms.on_cpu


FAST = {
    "conv_general_dilated": Version(convolution),
    # JAX's limits are the same on all platforms.
    "pad": Version(_pad, lambda: True),
    # XLA for a GPU scatters the cotangents of a max-pool, or sorts them first for equal bits.
    "reduce_window_max": Version(pool_max, lambda: not _platforms.on_tpu()),
    "tanh": Version(tanh),
}


def bind_fast(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one equation, by its row of `FAST` if it has one that is better here."""
    version = FAST.get(equation.primitive.name)
    if version is None or not version.better():
        return bind(equation, inputs)
    return [version.run(equation.params, *inputs)]


def fast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with each equation evaluated by `bind_fast`.

    Equations inside loops, branches and custom derivatives stay as they are.
    """

    def step(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
        if equation.primitive.name != "jit":
            return bind_fast(equation, inputs)
        # Functions of `jax.numpy` and many layers are programs of their own: they are entered.
        inner = equation.params["jaxpr"]
        return evaluate(inner.jaxpr, inner.consts, inputs, step)

    def evaluated(*arguments: Any) -> Any:
        program, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        outputs = evaluate(program.jaxpr, program.consts, jax.tree.leaves(arguments), step)
        return jax.tree.structure(shape).unflatten(outputs)

    return evaluated
