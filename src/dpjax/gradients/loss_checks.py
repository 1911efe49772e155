# SPDX-License-Identifier: Apache-2.0
"""Checks of a loss before it is mapped over examples.

The guarantee rests on this: the loss of an example is a function of this example and of the
parameters. `check_loss` refuses a loss of a batch, batch statistics, and functions to which JAX may
pass a whole batch. It relies on every other primitive, and so on a caller's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from dpjax import trees
from dpjax.gradients._jaxprs import equations, own_vjp, parts
from dpjax.gradients.traced import Traced
from dpjax.types import PyTree

# Primitives to which `jax.vmap` may pass all examples, and callbacks, which may remember others.
_MIXING = {"pure_callback", "io_callback", "custom_vmap_call", "ffi_call"}


def check_params(call: str, params: PyTree) -> None:
    """Refuses leaves without a gradient; ``call`` is the function that received the parameters."""
    for name, leaf in zip(trees.leaf_names(params), jax.tree.leaves(params), strict=True):
        kind = getattr(leaf, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.floating):
            raise TypeError(
                f"{call}: leaf {name or '(the array)'} is "
                f"{type(leaf).__name__ if kind is None else kind}; expected floating-point arrays. "
                "Close the loss over the rest: nnx.split, eqx.partition."
            )


def check_loss(loss: Traced, params: PyTree, example: PyTree, name: str) -> ClosedJaxpr:
    """The program of a loss; raises unless it is one real number of a single example."""
    # A collection of Flax is a dictionary; a leaf of that name is a parameter like others.
    if any("batch_stats" in leaf.split("/")[:-1] for leaf in trees.leaf_names(params)):
        raise ValueError(
            f"{name}: the parameters hold 'batch_stats', which mix the examples of a batch. "
            "Use GroupNorm or LayerNorm, and give variables['params'] alone."
        )
    with noted(example, name):
        program, (value, _) = jax.make_jaxpr(loss, return_shape=True)(params, example)
        if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(
                f"{name}: the loss of one example is {value}; expected a real scalar. "
                "For (loss, aux), write clipped_grad(loss, rule, has_aux=True)."
            )
    require_one_example(program.jaxpr, f"{name}: the loss")
    # Only the program of the gradient holds derivatives that users wrote.
    if has_own_derivatives(program.jaxpr):
        require_one_example(loss.gradient(params, example), f"{name}: the gradient of the loss")
    return program


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
    """The arrays that a program holds as constants, or as literals of its equations."""
    if isinstance(program, ClosedJaxpr):
        yield from program.consts
        program = program.jaxpr
    if isinstance(program, Jaxpr):
        for equation in program.eqns:
            for variable in equation.invars:
                if isinstance(variable, Literal) and jnp.ndim(variable.val):
                    yield variable.val
            for inner in parts(equation):
                yield from constants(inner)
