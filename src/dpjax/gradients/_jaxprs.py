# SPDX-License-Identifier: Apache-2.0
"""One interpreter of jaxprs: `evaluate` gives each equation of a program to a *rule*."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, DebugInfo, DropVar, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

# Primitives that run a VJP of the user's own.
_OWN_VJP = ("custom_vjp", "linear_call", "call_hi_primitive")
# Operations of `jax.numpy` that JAX 0.12 writes as classes, which `call_hi_primitive` calls.
_CLASSES = {"SearchSorted", "Nonzero", "Ldexp", "Frexp"}

Rule = Callable[[JaxprEqn, list[Any]], Iterable[Any]]
"""``(equation, inputs) -> outputs``."""


def bind(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one equation, which may be a call or have a custom derivative.

    Every version of JAX can run it as a program of one equation. An output that no later equation
    reads, which JAX drops from programs, is 0 in the result.
    """
    pairs = zip(equation.invars, inputs, strict=True)
    arguments = {variable: x for variable, x in pairs if not isinstance(variable, Literal)}
    results = [variable for variable in equation.outvars if not isinstance(variable, DropVar)]
    debug_info = DebugInfo(
        "dpjax", equation.primitive.name, ("",) * len(arguments), ("",) * len(results)
    )
    program = Jaxpr([], list(arguments), results, [equation], equation.effects, debug_info)
    outputs = jaxpr_as_fun(ClosedJaxpr(program, []))(*arguments.values())
    values = dict(zip(results, outputs, strict=True))
    return [values.get(variable, 0) for variable in equation.outvars]


def evaluate(
    program: Jaxpr,
    constants: Iterable[Any],
    arguments: Iterable[Any],
    rule: Rule = bind,
    literal: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Evaluates a program, equation after equation, and returns its outputs.

    With another rule than `bind`, values may be anything, such as flags. ``literal`` makes such a
    value of each number that stands in the program itself.
    """
    values: dict[Any, Any] = dict(zip(program.constvars, constants, strict=True))
    values.update(zip(program.invars, arguments, strict=True))

    def read(variable: Any) -> Any:
        if isinstance(variable, Literal):
            return literal(variable.val)
        return values[variable]

    for equation in program.eqns:
        outputs = rule(equation, list(map(read, equation.invars)))
        # Values stay after their last use, because finding that use takes a pass of its own.
        values.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, program.outvars))


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
    """The parameters of an equation, and the elements of tuples, as of the branches of a `cond`."""
    for value in equation.params.values():
        if isinstance(value, tuple | list):
            yield from value
        else:
            yield value


def inner_programs(equation: JaxprEqn) -> list[Jaxpr]:
    """The programs inside an equation: of a call, a loop, every branch of a `cond`."""
    programs = [x.jaxpr if isinstance(x, ClosedJaxpr) else x for x in parts(equation)]
    return [x for x in programs if isinstance(x, Jaxpr)]


def own_vjp(equation: JaxprEqn) -> bool:
    """Whether a user may have written the VJP of an equation itself; it then need not be linear."""
    if type(equation.params.get("_prim")).__name__ in _CLASSES:
        return False
    return equation.primitive.name.startswith(_OWN_VJP)


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many it carries; the rest are sliced."""
    parameters = equation.params
    if "ft_in" in parameters:  # since JAX 0.11: the inputs in three groups
        constants, carried, _ = map(len, parameters["ft_in"].unpack())
        return constants, carried
    return parameters["num_consts"], parameters["num_carry"]
