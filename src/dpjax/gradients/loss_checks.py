# SPDX-License-Identifier: Apache-2.0
"""Checks of a loss before it is mapped over examples.

The guarantee rests on this: the loss of an example is a function of this example and of the
parameters. `Traced.check` refuses a loss of a batch, batch statistics, and functions to which JAX
may pass a whole batch. It relies on every other primitive, and so on a caller's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from dpjax.gradients._jaxprs import equations, own_vjp, parts
from dpjax.types import PyTree

# Primitives to which `jax.vmap` may pass all examples, and callbacks, which may remember others.
_MIXING = {"pure_callback", "io_callback", "custom_vmap_call", "ffi_call"}


@contextlib.contextmanager
def noted(example: PyTree, name: str) -> Iterator[None]:
    """Adds a note to an error of a user's loss: the arguments of dpjax's call."""
    try:
        yield
    except Exception as error:
        shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", example)
        error.add_note(
            f"{name} called loss(params, example) with example = {shapes}: one example, without a "
            "batch axis. A tuple is unpacked in the loss: x, y = example. With has_aux=True the "
            "loss returns (scalar, aux)."
        )
        raise


def require_one_example(program: Jaxpr, name: str) -> None:
    """Refuses a program that may mix examples; warns of prints and callbacks."""
    used = {equation.primitive.name for equation in equations(program)}
    if mixing := sorted(used & _MIXING):
        raise ValueError(
            f"{name} uses {mixing[0]}, which may see the whole batch; expected a function of one "
            "example. Write it with jax.numpy."
        )
    if any(primitive.startswith("debug_") for primitive in used):
        logging.warning("%s prints or calls the host, which shows numbers without noise.", name)


def has_own_derivatives(program: Jaxpr) -> bool:
    """Whether the gradient of a program may run derivatives that its author wrote."""
    return any(e.primitive.name.startswith("custom_") or own_vjp(e) for e in equations(program))


def constants(program: Any) -> Iterator[Any]:
    """The constants of a jaxpr, closed or not, and its literals that are arrays and not scalars.

    Any other object has none.
    """
    if isinstance(program, ClosedJaxpr):
        yield from program.consts
        program = program.jaxpr
    if isinstance(program, Jaxpr):
        for equation in program.eqns:
            for variable in equation.invars:
                if isinstance(variable, Literal) and jnp.ndim(variable.val):
                    yield variable.val
            # A parameter of the equation may be an inner program.
            for inner in parts(equation):
                yield from constants(inner)
