# SPDX-License-Identifier: Apache-2.0
"""A forward derivative, and how large its numbers were on the way.

A derivative that cancels is short, and rounded as what cancelled was, which was long.  Whoever
trusts its length has to know of the way: so the derivative's program is evaluated equation by
equation, loops and branches too, and the largest of all tangents is noted.  What a linear solve
does inside is not seen, only what comes out of it.

This file must never know what the derivative is for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jaxtyping import Array, Float

from dpjax.gradients._xla_cpu.primitives import bind, inner_programs
from dpjax.types import PyTree

Watched = tuple[list[Any], Float[Array, ""]]


def along(
    function: Callable[[PyTree], Array], at: PyTree, direction: PyTree
) -> tuple[Array, Float[Array, ""]]:
    """The derivative of a number, and the largest tangent that it was computed from.

    Args:
      function: From ``at`` to one number.
      at: Where.
      direction: A tree like it.

    Example:
      >>> a, b = jnp.array([3e6, 1.0]), jnp.array([3e6, 0.0])
      >>> found = along(lambda w: jnp.vdot(w, a) - jnp.vdot(w, b), jnp.zeros(2), jnp.ones(2))
      >>> [float(x) for x in found]
      [1.0, 3000001.0]
    """
    program = jax.make_jaxpr(lambda p, d: jax.jvp(function, (p,), (d,))[1])(at, direction)
    still, moved = jax.tree.leaves(at), jax.tree.leaves(direction)
    moving = [False] * len(still) + [True] * len(moved)
    (product,), largest = _evaluate(program.jaxpr, program.consts, [*still, *moved], moving)
    return product, largest


def _evaluate(
    program: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any], moving: Sequence[bool]
) -> Watched:
    """The outputs of a program, and the largest of its tangents."""
    values: dict[Any, Any] = dict(zip(program.constvars, constants, strict=True))
    values.update(zip(program.invars, arguments, strict=True))
    tangents = {v for v, m in zip(program.invars, moving, strict=True) if m}
    largest = jnp.zeros((), jnp.float32)
    for equation in program.eqns:
        inputs = [v.val if isinstance(v, Literal) else values[v] for v in equation.invars]
        moved = _among(equation.invars, tangents)
        if any(moved):
            outputs, here = _step(equation, inputs, moved)
            largest = jnp.maximum(largest, here)
            after = _moving(equation, moved)
            tangents.update(v for v, m in zip(equation.outvars, after, strict=True) if m)
        else:
            outputs = bind(equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in program.outvars], largest


def _step(equation: JaxprEqn, inputs: list[Any], moving: list[bool]) -> Watched:
    """One equation of tangents: what is inside is looked at too."""
    name, p = equation.primitive.name, equation.params
    if name == "scan":
        return _scan(equation, inputs, _steady(equation, moving))
    if name == "while":
        return _while(equation, inputs, _steady(equation, moving))
    if name == "cond":
        branches = [
            functools.partial(_evaluate, branch.jaxpr, branch.consts, moving=moving[1:])
            for branch in p["branches"]
        ]
        return jax.lax.switch(inputs[0], [lambda *x, b=b: b(x) for b in branches], *inputs[1:])
    inner = _called(equation)
    if inner is not None:
        return _evaluate(inner, (), inputs, moving)
    outputs = bind(equation, inputs)
    sizes = [_largest(x) for x in outputs]
    if name in ("dot_general", "conv_general_dilated"):  # what is added up inside
        (a, b), turned = inputs[:2], moving[1]
        tangent, other = (b, a) if turned else (a, b)
        sizes.append(_largest(tangent) * jnp.linalg.norm(jnp.ravel(other).astype(jnp.float32)))
    return outputs, functools.reduce(jnp.maximum, sizes)


def _scan(equation: JaxprEqn, inputs: list[Any], moving: list[bool]) -> Watched:
    p = equation.params
    constants, carried = p["num_consts"], p["num_consts"] + p["num_carry"]

    def body(carry: tuple[Array, list[Any]], row: list[Any]) -> Any:
        largest, values = carry
        given = [*inputs[:constants], *values, *row]
        outputs, here = _evaluate(p["jaxpr"].jaxpr, p["jaxpr"].consts, given, moving)
        split = p["num_carry"]
        return (jnp.maximum(largest, here), outputs[:split]), outputs[split:]

    start = jnp.zeros((), jnp.float32), inputs[constants:carried]
    (largest, values), rows = jax.lax.scan(
        body, start, inputs[carried:], p["length"], p["reverse"], p["unroll"]
    )
    return [*values, *rows], largest


def _while(equation: JaxprEqn, inputs: list[Any], moving: list[bool]) -> Watched:
    p = equation.params
    asks, first = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]

    def goes_on(carry: tuple[Array, list[Any]]) -> Array:
        still = [False] * (asks + len(carry[1]))
        given = [*inputs[:asks], *carry[1]]
        return _evaluate(p["cond_jaxpr"].jaxpr, p["cond_jaxpr"].consts, given, still)[0][0]

    def body(carry: tuple[Array, list[Any]]) -> tuple[Array, list[Any]]:
        given = [*inputs[asks:first], *carry[1]]
        program = p["body_jaxpr"]
        outputs, here = _evaluate(program.jaxpr, program.consts, given, moving[asks:])
        return jnp.maximum(carry[0], here), outputs

    start = jnp.zeros((), jnp.float32), inputs[first:]
    largest, values = jax.lax.while_loop(goes_on, body, start)
    return values, largest


# Which values are tangents ------------------------------------------------------------------


def _follow(program: Jaxpr, moving: Sequence[bool]) -> list[bool]:
    """Which outputs of a program follow from the inputs that do."""
    tangents = {v for v, m in zip(program.invars, moving, strict=True) if m}
    for equation in program.eqns:
        after = _moving(equation, _among(equation.invars, tangents))
        tangents.update(v for v, m in zip(equation.outvars, after, strict=True) if m)
    return _among(program.outvars, tangents)


def _moving(equation: JaxprEqn, moving: list[bool]) -> list[bool]:
    """Which outputs of an equation follow from the inputs that do."""
    p, name = equation.params, equation.primitive.name
    if not any(moving):
        return [False] * len(equation.outvars)
    if name == "scan":
        return _follow(p["jaxpr"].jaxpr, _steady(equation, moving))
    if name == "while":
        return _steady(equation, moving)[p["cond_nconsts"] + p["body_nconsts"] :]
    if name == "cond":
        each = [_follow(branch.jaxpr, moving[1:]) for branch in p["branches"]]
        return [any(some) for some in zip(*each, strict=True)]
    inner = _called(equation)
    return [True] * len(equation.outvars) if inner is None else _follow(inner, moving)


def _steady(equation: JaxprEqn, moving: list[bool]) -> list[bool]:
    """Which inputs of a loop are tangents in some round."""
    p, moving = equation.params, list(moving)
    if equation.primitive.name == "scan":
        first, program, skipped = p["num_consts"], p["jaxpr"].jaxpr, 0
        count = p["num_carry"]
    else:
        skipped = p["cond_nconsts"]
        first, program = skipped + p["body_nconsts"], p["body_jaxpr"].jaxpr
        count = len(moving) - first
    while True:
        after = _follow(program, moving[skipped:])[:count]
        before = moving[first : first + count]
        if before == (both := [a or b for a, b in zip(before, after, strict=True)]):
            return moving
        moving[first : first + count] = both


def _called(equation: JaxprEqn) -> Jaxpr | None:
    """The program that an equation is a call of."""
    inner = inner_programs(equation)
    alone = len(inner) == 1 and len(inner[0].invars) == len(equation.invars)
    return inner[0] if alone and not inner[0].constvars else None


def _among(variables: Sequence[Any], some: set[Any]) -> list[bool]:
    return [not isinstance(v, Literal) and v in some for v in variables]


def _largest(x: Any) -> Float[Array, ""]:
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or not x.size:
        return jnp.zeros((), jnp.float32)
    return jnp.max(jnp.abs(x)).astype(jnp.float32)
