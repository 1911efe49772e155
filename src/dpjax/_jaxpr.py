# SPDX-License-Identifier: Apache-2.0
"""One interpreter of jaxprs, and one analysis of how values depend on inputs.

`evaluate` keeps the environment of a program and gives each equation to a *rule*. With `bind`
as the rule it computes the program. Other rules compute something else of the same program: the
book-keeping engine finds where parameters meet the data, `clipping.jl` watches the magnitude of
tangents, and `depends` follows booleans instead of arrays.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    jaxpr_as_fun,
)

from dpjax import checks

__all__ = [
    "VOUCHED",
    "bind",
    "called",
    "convolutions",
    "depends",
    "equations",
    "evaluate",
    "fingerprint",
    "inner_programs",
    "marked_programs",
    "name_of",
    "of_jax",
    "outputs_depend",
    "own_vjp",
    "parts",
    "rounds_coarsely",
    "row_by_row",
    "scan_counts",
    "steady",
]

VOUCHED = "dpjax_vouched"
"""The name of a jitted function whose author vouches for it; see `dpjax.losses.vouched`."""

# Where the primitives of JAX are defined.
_JAX = ("jax._src.", "jax.experimental.sparse")
# Primitives of JAX that run a VJP of the user's own.
_OWN_VJP = ("custom_vjp", "linear_call", "call_hi_primitive")
# Operations of `jax.numpy` that JAX 0.12 writes as classes, which `call_hi_primitive` calls. They
# hold no function of a user: JAX wrote their derivatives, and batches them row by row.
_CLASSES = {"SearchSorted", "Nonzero", "Ldexp", "Frexp"}

Rule = Callable[[JaxprEqn, list[Any]], Iterable[Any]]
"""``(equation, inputs) -> outputs``."""


def bind(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one equation, which may be a call or have a custom derivative."""
    # As a program of its own, which every version of JAX can run whatever the parameters of its
    # primitives look like.
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


def fingerprint(program: ClosedJaxpr) -> str:
    """A hash of a program and its constants: equal for equal traces, in every process.

    It reads primitives, parameters, shapes, literals and the bits of constants. It leaves out
    names, source lines, the addresses of objects and sharding constraints.
    """
    digest = hashlib.sha256()
    _hash(program, digest.update)
    return digest.hexdigest()


def _hash(part: Any, write: Callable[[bytes], Any]) -> None:
    """Hashes a part of a program: a program, a parameter of an equation, or a constant."""
    match part:
        case ClosedJaxpr():
            for constant in part.consts:
                _hash(constant, write)
            _hash_program(part.jaxpr, write)
        case Jaxpr():
            _hash_program(part, write)
        case jax.Array() if checks.is_typed_key(part):
            _hash(jax.random.key_data(part), write)
        case jax.Array() | np.ndarray() | np.generic():
            data = np.asarray(part)
            write(f"{data.dtype}{data.shape}".encode())
            write(np.ascontiguousarray(data).tobytes())
        case tuple() | list():
            write(f"({len(part)}".encode())
            for each in part:
                write(b",")  # (1, 11) and (11, 1) would be one text without it
                _hash(each, write)
        case Set():  # of axes of a mesh: their order differs from process to process
            _hash(sorted(map(repr, part)), write)
        case Mapping():
            _hash(sorted(part.items(), key=lambda item: repr(item[0])), write)
        case _ if isinstance(
            getattr(part, "jaxpr", None), ClosedJaxpr
        ):  # a jitted function, traced
            _hash(part.jaxpr, write)
        case _ if callable(part) and not isinstance(part, type):
            write(getattr(part, "__qualname__", type(part).__qualname__).encode())
            # An operation that JAX writes as a class: `side` of `jnp.searchsorted` stands there
            # alone. What other objects hold, as of a callback, may change while they run.
            held = [getattr(part, name, None) for name in ("params", "in_avals", "out_aval")]
            if all(each is not None for each in held):
                _hash(held, write)
        case _:
            write(re.sub(r"0x[0-9a-fA-F]+", "", repr(part)).encode())


def _hash_program(program: Jaxpr, write: Callable[[bytes], Any]) -> None:
    """Hashes the equations of a program, without the constants of a closed one."""
    # Variables are numbered by their first occurrence, since their names are not stable.
    numbers: dict[Any, int] = {}
    placed: dict[Any, Any] = {}

    def source(v: Any) -> Any:
        return v if isinstance(v, Literal) else placed.get(v, v)

    def variable(v: Any) -> None:
        v = source(v)
        if isinstance(v, Literal):
            _hash(np.asarray(v.val), write)
        else:
            write(f" {numbers.setdefault(v, len(numbers))}:{v.aval}".encode())

    for v in (*program.constvars, *program.invars):
        variable(v)
    for equation in program.eqns:
        # Where an array lies changes no result, and a run may resume under another mesh.
        if equation.primitive.name == "sharding_constraint":
            placed[equation.outvars[0]] = source(equation.invars[0])
            continue
        write(f"\n{equation.primitive.name} ".encode())
        for name, value in sorted(equation.params.items()):
            if name != "name":  # of a jitted function
                write(f" {name}=".encode())
                _hash(value, write)
        for v in (*equation.invars, *equation.outvars):
            variable(v)
    for v in program.outvars:
        variable(v)


def parts(equation: JaxprEqn) -> Iterator[Any]:
    """The parameters of an equation, and what is in a tuple one by one: branches of a `cond`."""
    for value in equation.params.values():
        yield from value if isinstance(value, tuple | list) else [value]


def inner_programs(equation: JaxprEqn) -> list[Jaxpr]:
    """The programs inside an equation: of a call, a loop, every branch of a `cond`."""
    opened = [part.jaxpr if isinstance(part, ClosedJaxpr) else part for part in parts(equation)]
    return [part for part in opened if isinstance(part, Jaxpr)]


@functools.cache
def of_jax(primitive: Primitive) -> bool:
    """Whether JAX itself defines a primitive, and so how `jax.vmap` batches it."""
    # By identity, since a library may give its primitive any name. The batching rule would not
    # tell: JAX 0.10 wraps the rules of libraries in functions of its own.
    return primitive in _defined(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _defined(modules: int) -> frozenset[Primitive]:
    """The primitives that are attributes of modules of JAX, given how many modules are imported."""
    del modules  # a module that is imported later may define more
    own = [m for name, m in sys.modules.copy().items() if name.startswith(_JAX)]
    values = (value for module in own for value in vars(module).copy().values())
    return frozenset(value for value in values if isinstance(value, Primitive))


def own_vjp(equation: JaxprEqn) -> bool:
    """Whether a user may have written the VJP of an equation, which then need not be linear.

    The equations inside of it are not read.
    """
    named = equation.primitive.name.startswith(_OWN_VJP) and not row_by_row(equation)
    return named or not of_jax(equation.primitive)


def row_by_row(equation: JaxprEqn) -> bool:
    """Whether an equation calls one of JAX's own `_CLASSES`."""
    kind = type(equation.params.get("_prim"))
    # By identity, since a library may give its class any name, and any name of a module.
    home = sys.modules.get(kind.__module__)
    known = kind.__module__.startswith(_JAX) and kind.__name__ in _CLASSES
    return known and getattr(home, kind.__name__, None) is kind


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


def name_of(equation: JaxprEqn) -> str:
    """The name of an equation's primitive, with the class that it calls if it calls one."""
    name, called_class = equation.primitive.name, equation.params.get("_prim")
    return name if called_class is None else f"{name} ({type(called_class).__name__})"


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


def depends(program: Jaxpr, moving: Sequence[bool]) -> list[bool]:
    """Which outputs of a program depend on the inputs marked True.

    Args:
      program: The jaxpr.
      moving: A mark for each input.

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
    each = [depends(program, marks) for program, marks in inside]
    if name == "while":
        # The number of rounds decides every output.
        endless, carried = each[0][0], inside[1][1][p["body_nconsts"] :]
        return [endless or moved for moved in carried]
    if name == "cond":
        # The index of the branch decides every output.
        return [moving[0] or any(some) for some in zip(*each, strict=True)]
    return each[0] if each else [True] * every


def marked_programs(
    equation: JaxprEqn, moving: Sequence[bool]
) -> list[tuple[Jaxpr, Sequence[bool]]]:
    """The programs inside of an equation, as far as they are followed, with marks of their inputs.

    Args:
      equation: A call or a loop; other equations have no programs.
      moving: A mark for each of its inputs. Programs of loops have the marks of any round.
    """
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
    """Which inputs of a loop depend on the marked ones in some round.

    Args:
      equation: A scan or a while loop.
      moving: A mark for each of its inputs in the first round.
    """
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
