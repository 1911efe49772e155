# SPDX-License-Identifier: Apache-2.0
"""A forward derivative, and the largest tangent from which it was computed.

A derivative that cancels is small, but its rounding error is relative to the large tangents that
cancelled. So the program of the derivative is evaluated equation by equation, loops and branches
included, and the largest tangent is recorded. Of a linear solve only the outputs are seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array, Float

from dpjax.gradients.jaxprs import bind, called, evaluate, outputs_depend, scan_counts, steady
from dpjax.types import PyTree

Watched = tuple[list[Any], Float[Array, ""]]


def along(
    function: Callable[[PyTree], Array], at: PyTree, direction: PyTree
) -> tuple[Array, Float[Array, ""]]:
    """The derivative of a scalar, and the largest tangent from which it was computed.

    Args:
      function: From a tree to a scalar.
      at: The tree at which the function is differentiated.
      direction: A tree like ``at``.

    Example:
      >>> a, b = jnp.array([3e6, 1.0]), jnp.array([3e6, 0.0])
      >>> found = along(lambda w: jnp.vdot(w, a) - jnp.vdot(w, b), jnp.zeros(2), jnp.ones(2))
      >>> [float(x) for x in found]
      [1.0, 3000001.0]
    """
    # JAX evaluates the primal values in the same program, which only needs the tangents watched.
    program = jax.make_jaxpr(lambda p, d: jax.jvp(function, (p,), (d,))[1])(at, direction)
    still, moved = jax.tree.leaves(at), jax.tree.leaves(direction)
    moving = [False] * len(still) + [True] * len(moved)
    (product,), largest = _evaluate(program.jaxpr, program.consts, [*still, *moved], moving)
    return product, largest


def _evaluate(
    program: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any], moving: Sequence[bool]
) -> Watched:
    """The outputs of a program, and the largest of its tangents."""
    largest = jnp.zeros((), jnp.float32)

    def step(equation: JaxprEqn, marked: list[tuple[Any, bool]]) -> Iterable[tuple[Any, bool]]:
        nonlocal largest
        inputs, moved = [x for x, _ in marked], [m for _, m in marked]
        # Primal values cannot hide what a tangent lost.
        if not any(moved):
            return [(x, False) for x in bind(equation, inputs)]
        outputs, here = _step(equation, inputs, moved)
        largest = jnp.maximum(largest, here)
        return zip(outputs, outputs_depend(equation, moved), strict=True)

    entering = zip(arguments, moving, strict=True)
    still = [(x, False) for x in constants]
    found = evaluate(program, still, entering, step, literal=lambda x: (x, False))
    return [x for x, _ in found], largest


def _step(equation: JaxprEqn, inputs: list[Any], moving: list[bool]) -> Watched:
    """One equation of tangents; programs inside the equation are evaluated in the same way."""
    name, p = equation.primitive.name, equation.params
    if name == "scan":
        return _scan(equation, inputs, steady(equation, moving))
    if name == "while":
        return _while(equation, inputs, steady(equation, moving))
    if name == "cond":
        # Only tangents of the branch that runs count.
        branches = [
            functools.partial(_evaluate, branch.jaxpr, branch.consts, moving=moving[1:])
            for branch in p["branches"]
        ]
        return jax.lax.switch(inputs[0], [lambda *x, b=b: b(x) for b in branches], *inputs[1:])
    inner = called(equation)
    if inner is not None:
        return _evaluate(inner.jaxpr, inner.consts, inputs, moving)
    outputs = bind(equation, inputs)
    sizes = [_largest(x) for x in outputs]
    # A contraction may cancel inside. No term is above the largest tangent times the norm of the
    # other operand.
    if name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
        (a, b), turned = inputs[:2], moving[1]
        tangent, other = (b, a) if turned else (a, b)
        sizes.append(_largest(tangent) * jnp.linalg.norm(jnp.ravel(other).astype(jnp.float32)))
    return outputs, functools.reduce(jnp.maximum, sizes)


def _scan(equation: JaxprEqn, inputs: list[Any], moving: list[bool]) -> Watched:
    p = equation.params
    constants, split = scan_counts(equation)
    carried = constants + split

    def body(carry: tuple[Array, list[Any]], row: list[Any]) -> Any:
        largest, values = carry
        given = [*inputs[:constants], *values, *row]
        outputs, here = _evaluate(p["jaxpr"].jaxpr, p["jaxpr"].consts, given, moving)
        return (jnp.maximum(largest, here), outputs[:split]), outputs[split:]

    start = jnp.zeros((), jnp.float32), inputs[constants:carried]
    (largest, values), rows = jax.lax.scan(
        body, start, inputs[carried:], p["length"], p["reverse"], p["unroll"]
    )
    return [*values, *rows], largest


def _while(equation: JaxprEqn, inputs: list[Any], moving: list[bool]) -> Watched:
    p = equation.params
    conditions, first = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]

    def condition(carry: tuple[Array, list[Any]]) -> Array:
        still = [False] * (conditions + len(carry[1]))
        given = [*inputs[:conditions], *carry[1]]
        return _evaluate(p["cond_jaxpr"].jaxpr, p["cond_jaxpr"].consts, given, still)[0][0]

    def body(carry: tuple[Array, list[Any]]) -> tuple[Array, list[Any]]:
        given = [*inputs[conditions:first], *carry[1]]
        program = p["body_jaxpr"]
        outputs, here = _evaluate(program.jaxpr, program.consts, given, moving[conditions:])
        return jnp.maximum(carry[0], here), outputs

    start = jnp.zeros((), jnp.float32), inputs[first:]
    largest, values = jax.lax.while_loop(condition, body, start)
    return values, largest


def _largest(x: Any) -> Float[Array, ""]:
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or not x.size:
        return jnp.zeros((), jnp.float32)
    return jnp.max(jnp.abs(x)).astype(jnp.float32)
