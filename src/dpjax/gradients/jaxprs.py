# SPDX-License-Identifier: Apache-2.0
"""One interpreter of jaxprs, and one analysis of how values depend on inputs.

`evaluate` keeps the environment of a program and gives each equation to a *rule*. With `bind`
as the rule it computes the program. Other rules compute something else of the same program: the
book-keeping engine finds where parameters meet the data, `clipping.jl` watches the magnitude of
tangents, and `depends` follows booleans instead of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DebugInfo, DropVar, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

# Primitives that run a VJP of the user's own.
_OWN_VJP = ("custom_vjp", "linear_call", "call_hi_primitive")
# Operations of `jax.numpy` that JAX 0.12 writes as classes, which `call_hi_primitive` calls.
_CLASSES = {"SearchSorted", "Nonzero", "Ldexp", "Frexp"}

Rule = Callable[[JaxprEqn, list[Any]], Iterable[Any]]
"""``(equation, inputs) -> outputs``."""


def bind(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one equation, which may be a call or have a custom derivative."""
    # As a program of its own, which every version of JAX can run whatever the parameters of its
    # primitives look like.
    given = {
        variable: x
        for variable, x in zip(equation.invars, inputs, strict=True)
        if not isinstance(variable, Literal)
    }
    wanted = [v for v in equation.outvars if not isinstance(v, DropVar)]
    debug = DebugInfo("dpjax", equation.primitive.name, ("",) * len(given), ("",) * len(wanted))
    program = Jaxpr([], list(given), wanted, [equation], equation.effects, debug)
    outputs = jaxpr_as_fun(ClosedJaxpr(program, []))(*given.values())
    results = dict(zip(wanted, outputs, strict=True))
    return [results.get(v, 0) for v in equation.outvars]


def evaluate(
    program: Jaxpr,
    constants: Iterable[Any],
    arguments: Iterable[Any],
    rule: Rule = bind,
    literal: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Evaluates a program, equation after equation.

    Args:
      program: The jaxpr.
      constants: A value for each of its ``constvars``.
      arguments: A value for each of its ``invars``.
      rule: Computes the outputs of an equation. Values may be anything that it understands.
      literal: From a literal number in the program to a value.

    Example:
      >>> import jax
      >>> closed = jax.make_jaxpr(lambda x: 2 * x + 1)(3)
      >>> evaluate(closed.jaxpr, closed.consts, [3])
      [Array(7, dtype=int32, weak_type=True)]
    """
    values: dict[Any, Any] = dict(zip(program.constvars, constants, strict=True))
    values.update(zip(program.invars, arguments, strict=True))

    def read(variable: Any) -> Any:
        return literal(variable.val) if isinstance(variable, Literal) else values[variable]

    for equation in program.eqns:
        outputs = rule(equation, [read(v) for v in equation.invars])
        # Outputs that no equation reads are kept until the end: dropping them would need a pass for
        # their last use.
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(v) for v in program.outvars]


def equations(program: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a program and of its inner programs."""
    for equation in program.eqns:
        yield equation
        for inner in inner_programs(equation):
            yield from equations(inner)


def convolutions(program: Jaxpr) -> list[JaxprEqn]:
    """All convolutions of a program and of its inner programs."""
    return [e for e in equations(program) if e.primitive.name == "conv_general_dilated"]


def parts(equation: JaxprEqn) -> Iterator[Any]:
    """The parameters of an equation, and what is in a tuple one by one: branches of a `cond`."""
    for value in equation.params.values():
        yield from value if isinstance(value, tuple | list) else [value]


def inner_programs(equation: JaxprEqn) -> list[Jaxpr]:
    """The programs inside an equation: of a call, a loop, every branch of a `cond`."""
    opened = [part.jaxpr if isinstance(part, ClosedJaxpr) else part for part in parts(equation)]
    return [part for part in opened if isinstance(part, Jaxpr)]


def called(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The program that an equation calls with its own inputs, if it is such a call."""
    # A jitted function that closes over an array has it among the constants of its program.
    inner = [
        part if isinstance(part, ClosedJaxpr) else ClosedJaxpr(part, ())
        for part in parts(equation)
        if isinstance(part, ClosedJaxpr) or (isinstance(part, Jaxpr) and not part.constvars)
    ]
    alone = len(inner) == 1 and len(inner[0].jaxpr.invars) == len(equation.invars)
    return inner[0] if alone else None


def own_vjp(equation: JaxprEqn) -> bool:
    """Whether a user may have written the VJP of an equation, which then need not be linear.

    The equations inside of it are not read.
    """
    of_jax = type(equation.params.get("_prim")).__name__ in _CLASSES
    return equation.primitive.name.startswith(_OWN_VJP) and not of_jax


def rounds_coarsely(equation: JaxprEqn) -> bool:
    """Whether an equation rounds to fewer bits than its dtype has, as its transpose then does too.

    The equations inside of it are not read.
    """
    if equation.primitive.name != "reduce_precision":
        return False
    # `jax.checkpoint` rounds to all the bits of a dtype, which changes nothing.
    output: Any = equation.outvars[0].aval
    p, own = equation.params, jnp.finfo(output.dtype)
    return p["exponent_bits"] < own.nexp or p["mantissa_bits"] < own.nmant


def depends(program: Jaxpr, moving: Sequence[bool]) -> list[bool]:
    """Which outputs of a program depend on the inputs marked True.

    Example:
      >>> import jax
      >>> program = jax.make_jaxpr(lambda x, y: (x + 1, x * y, 3))(1, 2).jaxpr
      >>> depends(program, [False, True])
      [False, True, False]
    """
    still = [False] * len(program.constvars)
    return evaluate(program, still, moving, outputs_depend, literal=lambda _: False)


def outputs_depend(equation: JaxprEqn, moving: Sequence[bool]) -> list[bool]:
    """Which outputs of an equation depend on the inputs marked True."""
    p, name, every = equation.params, equation.primitive.name, len(equation.outvars)
    if not any(moving):
        return [False] * every
    inside = marked_programs(equation, moving)
    moved = [depends(program, marks) for program, marks in inside]
    if name == "while":
        # The number of rounds decides every output.
        endless, carried = moved[0][0], inside[1][1][p["body_nconsts"] :]
        return [endless or output for output in carried]
    if name == "cond":
        # The index of the branch decides every output.
        return [moving[0] or any(branches) for branches in zip(*moved, strict=True)]
    return moved[0] if moved else [True] * every


def marked_programs(
    equation: JaxprEqn, moving: Sequence[bool]
) -> list[tuple[Jaxpr, Sequence[bool]]]:
    """The programs of a call or a loop, with marks of their inputs: for loops, of any round."""
    p, name = equation.params, equation.primitive.name
    if name == "scan":
        return [(p["jaxpr"].jaxpr, steady(equation, moving))]
    if name == "while":
        moving, conditions = steady(equation, moving), p["cond_nconsts"]
        tested = [*moving[:conditions], *moving[conditions + p["body_nconsts"] :]]
        return [(p["cond_jaxpr"].jaxpr, tested), (p["body_jaxpr"].jaxpr, moving[conditions:])]
    if name == "cond":
        return [(branch.jaxpr, moving[1:]) for branch in p["branches"]]
    inner = called(equation)
    return [] if inner is None else [(inner.jaxpr, moving)]


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many it carries; the rest are sliced."""
    p = equation.params
    if "ft_in" in p:  # since JAX 0.11: the inputs in three groups
        constants, carried, _ = map(len, p["ft_in"].unpack())
        return constants, carried
    return p["num_consts"], p["num_carry"]


def steady(equation: JaxprEqn, moving: Sequence[bool]) -> list[bool]:
    """Which inputs of a loop depend in some round on the inputs marked in the first one."""
    p, moving = equation.params, list(moving)
    if equation.primitive.name == "scan":
        skipped, program = 0, p["jaxpr"].jaxpr
        first, count = scan_counts(equation)
    else:
        skipped, program = p["cond_nconsts"], p["body_jaxpr"].jaxpr
        first = skipped + p["body_nconsts"]
        count = len(moving) - first
    # What one round moves may move more in the next one: repeat until stable.
    while True:
        after = depends(program, moving[skipped:])[:count]
        before = moving[first : first + count]
        if before == (both := [a or b for a, b in zip(before, after, strict=True)]):
            return moving
        moving[first : first + count] = both
