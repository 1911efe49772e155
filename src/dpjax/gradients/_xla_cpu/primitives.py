# SPDX-License-Identifier: Apache-2.0
"""Single equations: evaluated as they stand, or through a version that is fast in loops.

XLA on CPU rewrites convolutions to its fast form only at the top of a program, the
derivative of a max-pool is slow wherever it stands, and so is tanh after a bias of few
channels.  `FAST` holds, by primitive, versions with the same values and the same
derivatives, in a form that stays fast inside the loops where microbatches live.  Nothing
here knows of parameters, sites or norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, DebugInfo, DropVar, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jaxtyping import Array

from dpjax.gradients._xla_cpu.convolution import convolution
from dpjax.gradients._xla_cpu.fusion_barrier import apart
from dpjax.gradients._xla_cpu.max_pool import pool_max


def _pad(parameters: dict[str, Any], x: Array, filling: Any) -> Array:
    """JAX cannot differentiate a pad by its filling alone, as where a parameter is padded."""
    edges = parameters["padding_config"]
    if not isinstance(filling, Tracer):
        return jax.lax.pad(x, filling, edges)
    outside = jax.lax.pad(jnp.zeros(x.shape, bool), jnp.array(True), edges)
    return jnp.where(outside, filling, jax.lax.pad(x, jnp.zeros((), x.dtype), edges))


# Images of at least so many numbers have their tanh apart, if channels are at most so many.
_LEAST, _CHANNELS = 512, 32


def _tanh(parameters: dict[str, Any], x: Array) -> Array:
    """Beside a bias XLA does not make vectors of a few channels: 4.2 ns a number for 1.4."""

    def as_written(x: Array) -> Array:
        return jax.lax.tanh_p.bind(x, **parameters)

    if x.size < _LEAST or x.shape[-1] > _CHANNELS or jnp.iscomplexobj(x):
        return as_written(x)
    alone = apart(as_written)
    tanh = jax.custom_vjp(alone)
    tanh.defvjp(lambda x: (y := alone(x), y), lambda y, g: (g * (1 + y) * (1 - y),))
    return tanh(x)


FAST: dict[str, Callable[..., Array]] = {
    "conv_general_dilated": convolution,
    "pad": _pad,
    "reduce_window_max": pool_max,
    "tanh": _tanh,
}


def bind(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one equation; calls and custom derivatives included.

    The equation becomes a program of its own, which every version of JAX can run, whatever
    the parameters of its primitives look like inside.
    """
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


def bind_fast(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one equation, by its row of `FAST` if it has one."""
    fast = FAST.get(equation.primitive.name)
    return bind(equation, inputs) if fast is None else [fast(equation.params, *inputs)]


def equations(program: Jaxpr) -> Iterator[JaxprEqn]:
    """All of a program, however deep."""
    for equation in program.eqns:
        yield equation
        for inner in inner_programs(equation):
            yield from equations(inner)


def inner_programs(equation: JaxprEqn) -> list[Jaxpr]:
    """The programs inside an equation: of a call, a loop, every branch of a `cond`."""
    held = [
        part
        for value in equation.params.values()
        for part in (value if isinstance(value, tuple | list) else [value])
    ]
    opened = [part.jaxpr if isinstance(part, ClosedJaxpr) else part for part in held]
    return [part for part in opened if isinstance(part, Jaxpr)]
