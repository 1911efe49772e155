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
    """Evaluates one equation, which may be a call or have a custom derivative."""
    # As a program of its own, which every version of JAX can run.
    pairs = zip(equation.invars, inputs, strict=True)
    given = {variable: x for variable, x in pairs if not isinstance(variable, Literal)}
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
    """Evaluates a program, equation after equation; ``literal`` makes a value of a number."""
    values: dict[Any, Any] = dict(zip(program.constvars, constants, strict=True))
    values.update(zip(program.invars, arguments, strict=True))

    def read(variable: Any) -> Any:
        return literal(variable.val) if isinstance(variable, Literal) else values[variable]

    for equation in program.eqns:
        outputs = rule(equation, [read(v) for v in equation.invars])
        # Values that no later equation reads stay: to drop them would take a pass for last uses.
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
    opened = [x.jaxpr if isinstance(x, ClosedJaxpr) else x for x in parts(equation)]
    return [x for x in opened if isinstance(x, Jaxpr)]


def own_vjp(equation: JaxprEqn) -> bool:
    """Whether a user may have written the VJP of an equation itself; it then need not be linear."""
    of_jax = type(equation.params.get("_prim")).__name__ in _CLASSES
    return equation.primitive.name.startswith(_OWN_VJP) and not of_jax


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many it carries; the rest are sliced."""
    p = equation.params
    if "ft_in" in p:  # since JAX 0.11: the inputs in three groups
        constants, carried, _ = map(len, p["ft_in"].unpack())
        return constants, carried
    return p["num_consts"], p["num_carry"]
