# SPDX-License-Identifier: Apache-2.0
"""A loss is read before it is believed: primitives through which examples could see each other.

The guarantee rests on one sentence: the loss of an example is a function of this example and of the
parameters. The loss is evaluated for a whole microbatch by `jax.vmap`, and a few primitives do
something else there than they do for one example. `require_one_example` finds them in the traced
program, and refuses them by name. `check_loss` reads a loss and its gradient so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from dpjax import trees
from dpjax._jaxpr import VOUCHED, equations, inner_programs
from dpjax.gradients._bookkeeping.trace import Traced
from dpjax.types import PyTree

_HOST = "calls the host, which may keep what it saw of other examples or see the whole batch"
_DEVICES = "reads the examples of other devices"
# What a primitive could do to the other examples of a batch.
_COULD: dict[str, str] = {
    "custom_vmap_call": "has a batching rule of its own, which sees the whole batch",
    "pure_callback": _HOST,
    "io_callback": _HOST,
    "ffi_call": "calls foreign code, which JAX may batch by handing it all examples",
    "rng_bit_generator": "is batched by the key of the first example alone",
    "rng_uniform": "draws for the whole batch, from no key",
    **dict.fromkeys(
        ("psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter"), _DEVICES
    ),
}
# JAX's own name of the keys of threefry. Other generators draw for a whole batch by its first key.
_THREEFRY = "key<fry>"


def check_loss(loss: Traced, params: PyTree, example: PyTree, name: str) -> ClosedJaxpr:
    """The program of a loss; raises unless it is one real number, of one example alone.

    Args:
      loss: ``loss(params, example) -> (scalar, aux)``.
      params: Parameters.
      example: Shapes of one example.
      name: How errors call the function that received the loss.
    """
    _check_trainable(params, name)
    with noted(example):
        program, found = jax.make_jaxpr(loss, return_shape=True)(params, example)
        _check_scalar(found[0], name)
    require_one_example(program.jaxpr, f"{name}: the loss")
    if has_own_derivatives(program.jaxpr):
        with noted(example):
            gradient = loss.gradient(params, example)
        require_one_example(gradient, f"{name}: the gradient of the loss")
    return program


@contextlib.contextmanager
def noted(example: PyTree) -> Iterator[None]:
    """Notes at an error of a user's loss how dpjax called it, and what is usually wrong.

    Args:
      example: Shapes of one example.
    """
    try:
        yield
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        error.add_note(
            "The loss is traced: its arguments have shapes and types, and no values yet. Usually "
            "it has a Python `if`, float(...) or a NumPy function of them: write jnp.where for "
            "the first, and functions of jax.numpy for the others."
        )
        raise
    except Exception as error:
        shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", example)
        usual = (
            "a dictionary: read it by name, example['x']"
            if isinstance(example, dict)
            else "one argument: unpack it inside, x, y = example"
        )
        error.add_note(
            f"dpjax called loss(params, example), where example is {shapes}: one example, without "
            "a batch axis. Usually the loss was written for a batch (x.mean(0), y[:, None], "
            f"len(x)), or as loss(params, x, y). The example is {usual}. If the loss needs "
            "anything else, it must close over it."
        )
        raise


def require_one_example(program: Jaxpr, name: str) -> None:
    """Refuses a program in which one example could see another.

    Args:
      program: The traced loss of one example, or the traced wish of a rule.
      name: How errors call it.

    Raises:
      ValueError: It holds one of the primitives of the table.
    """
    for equation in _not_vouched(program):
        primitive = equation.primitive.name
        why = _COULD.get(primitive.removesuffix("_invariant"))
        # A jax.vmap inside of the loss made numbers of its axes: they are axes of the example.
        if why is _DEVICES and all(isinstance(a, int) for a in equation.params.get("axes", ("",))):
            continue
        kinds = [getattr(variable.aval, "dtype", None) for variable in equation.invars]
        if primitive == "random_bits" and str(kinds[0]) != _THREEFRY:
            why = "draws from a key of another generator than threefry, by the first example's key"
        if why:
            raise ValueError(
                f"{name}: its program holds {primitive}, which {why}; expected a function of one "
                "example. Clipping could then not bound what one example moves. Usually a host "
                "callback or a custom_vmap came with a library, or keys are of rbg: make them by "
                "jax.random.key(seed, impl='threefry2x32'). If the function treats each example "
                "alone whatever batch it is given, wrap it: dpjax.losses.vouched(function)."
            )


def has_own_derivatives(program: Jaxpr) -> bool:
    """Whether the gradient of a program runs derivatives that its author wrote.

    They stand in the program of the gradient alone.
    """
    return any(e.primitive.name.startswith("custom_") for e in equations(program))


def closed_over(program: ClosedJaxpr, examples: int) -> tuple[int, ...] | None:
    """The shape of a constant that has a row for each example of the data, if there is one.

    Args:
      program: The traced loss.
      examples: The number of examples in the data set.
    """
    shapes = (getattr(constant, "shape", ()) for constant in _constants(program))
    # A single row would match every scalar that was given an axis.
    return next((shape for shape in shapes if examples > 1 and shape[:1] == (examples,)), None)


def _check_trainable(params: PyTree, name: str) -> None:
    """Refuses parameters that hold the statistics of batch normalisation."""
    # A collection of Flax is a dictionary; a leaf of that name is a parameter like others.
    if any("batch_stats" in leaf.split("/")[:-1] for leaf in trees.leaf_names(params)):
        raise ValueError(
            f"{name}: the parameters hold a 'batch_stats' collection. Batch "
            "normalisation mixes the examples of a batch, so clipping one example's "
            "gradient no longer bounds its influence. Use GroupNorm or LayerNorm, and "
            "pass variables['params'] alone."
        )


def _check_scalar(value: Any, name: str) -> None:
    """Raises unless the loss of one example is a real scalar."""
    scalar = getattr(value, "shape", None) == ()
    if not scalar or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"{name}: the loss of one example is {value}; expected a real scalar. "
            "Usually the loss was written for a batch: dpjax passes one example, without batch "
            "axis; return its own loss and do not average. Or it returns (loss, aux): "
            "clipped_grad(..., has_aux=True) returns aux, and dpsgd takes losses that return the "
            "scalar alone."
        )


def _not_vouched(program: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations, without the insides of functions whose author vouches for them."""
    for equation in program.eqns:
        yield equation
        if equation.params.get("name") != VOUCHED:
            for inner in inner_programs(equation):
                yield from _not_vouched(inner)


def _constants(part: Any) -> Iterator[Any]:
    """The constants of a program and of its inner programs."""
    if isinstance(part, ClosedJaxpr):
        yield from part.consts
        part = part.jaxpr
    if isinstance(part, Jaxpr):
        for equation in part.eqns:
            for value in equation.params.values():
                for inner in value if isinstance(value, tuple | list) else [value]:
                    yield from _constants(inner)
