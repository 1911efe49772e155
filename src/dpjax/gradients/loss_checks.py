# SPDX-License-Identifier: Apache-2.0
"""A loss is read before it is believed: primitives through which examples could see each other.

The guarantee rests on one sentence: the loss of an example is a function of this example and of the
parameters. The loss is evaluated for a whole microbatch by `jax.vmap`, and a primitive may do
something else there than it does for one example. `require_one_example` accepts the primitives that
JAX defines and batches itself, except a few, and refuses all others by name. `check_loss` reads a
loss and its gradient so.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import traceback
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from dpjax import trees
from dpjax._jaxpr import (
    VOUCHED,
    equations,
    evaluate,
    inner_programs,
    marked_programs,
    name_of,
    of_jax,
    outputs_depend,
    own_vjp,
    parts,
    row_by_row,
)
from dpjax.checks import KEY_OF_EXAMPLE
from dpjax.gradients.traced import Traced
from dpjax.types import PyTree

_HOST = "calls the host, which may keep what it saw of other examples or see the whole batch"
_FOREIGN = "calls foreign code, which JAX may batch by handing it all examples"
_OWN_RULE = "has a batching rule of its own, which sees the whole batch"
_DEVICES = "names an axis of devices, and so may read the examples of other devices"
_OUTSIDE = "is not one of JAX's primitives, so its batching rule may mix the whole batch"
_CUDNN = (
    "calls cuDNN once for the whole batch, with one gradient of the bias, one seed of dropout and "
    "one maximum in fp8"
)
_KEYS = "has a key of another generator than threefry, which may draw by the first example's key"
# What primitives of JAX could do to the other examples of a batch.
_COULD: dict[str, str] = {
    "custom_vmap_call": _OWN_RULE,
    "call_hi_primitive": _OWN_RULE,
    "linear_call": "has a transpose of its own, which JAX does not batch",
    "pure_callback": _HOST,
    "io_callback": _HOST,
    "buffer_callback": _HOST,
    "ffi_call": _FOREIGN,
    "tpu_custom_call": _FOREIGN,
    "rng_bit_generator": "is batched by the key of the first example alone",
    "rng_uniform": "draws for the whole batch, from no key",
}
# What may be done with the keys of other generators: nothing that runs the generator, which is
# batched by its first key in `random_bits`, and for unsafe_rbg in `random_split` and
# `random_fold_in` too. `random_gamma` and other samplers draw inside.
_KEPT = {
    "random_wrap",
    "random_unwrap",
    "broadcast_in_dim",
    "concatenate",
    "dynamic_slice",
    "gather",
    "pvary",
    "reshape",
    "select_n",
    "slice",
    "squeeze",
    "transpose",
}

# What makes random numbers of a key, its first input.
_DRAWS = {"random_bits", "random_gamma"}

# What takes a mean, gives it the axes of its numbers, and subtracts it from them.
_CENTRING = {"reduce_sum", "div", "convert_element_type", "broadcast_in_dim", "reshape", "squeeze"}
_CENTRING |= {"sub"}


def check_params(call: str, params: PyTree) -> None:
    """Refuses leaves that no gradient has; ``call`` is what received the parameters."""
    kinds = type(params).__mro__
    if any((kind.__module__, kind.__name__) == ("flax.nnx.module", "Module") for kind in kinds):
        raise TypeError(
            f"{call}: the parameters are a {type(params).__name__}, a module of NNX; "
            "expected a tree of arrays. Split it, graph, params, rest = nnx.split(model, "
            "nnx.Param, ...), and join it in the loss: nnx.merge(graph, params, rest, copy=True)."
        )
    for name, leaf in zip(trees.leaf_names(params), jax.tree.leaves(params), strict=True):
        kind = getattr(leaf, "dtype", None)
        if callable(leaf):
            raise TypeError(
                f"{call}: leaf {name} is a function ({type(leaf).__name__}); expected "
                "arrays of real floating-point numbers. Usually a whole module of Equinox was "
                "given: params, rest = eqx.partition(model, eqx.is_inexact_array), and the loss "
                "joins them, model = eqx.combine(params, rest)."
            )
        if kind is None or not jnp.issubdtype(kind, jnp.inexact):
            raise TypeError(
                f"{call}: leaf {name or '(the array)'} is "
                f"{type(leaf).__name__ if kind is None else kind}; expected arrays of real "
                "floating-point numbers. Usually a Python number, a counter or a key sits among "
                "the parameters: close the loss over it, or write jnp.asarray(x, jnp.float32). Or "
                "the state of a module was given with them: hk.transform_with_state(f).init(...) "
                "returns params, state, and nnx.split(model, nnx.Param, ...) returns graph, "
                "params, rest. Close the loss over state and rest."
            )


def check_loss(loss: Traced, params: PyTree, example: PyTree, name: str) -> ClosedJaxpr:
    """The program of a loss; raises unless it is one real number, of one example alone.

    Args:
      loss: The loss.
      params: Parameters.
      example: Shapes of one example.
      name: How errors call the function that received the loss.
    """
    _check_trainable(params, name)
    with noted(example, name):
        program, found = jax.make_jaxpr(loss, return_shape=True)(params, example)
        _check_scalar(found[0], name)
    require_one_example(program.jaxpr, f"{name}: the loss")
    if has_own_derivatives(program.jaxpr):
        with noted(example, name):
            gradient = loss.gradient(params, example)
        require_one_example(gradient, f"{name}: the gradient of the loss")
    return program


@contextlib.contextmanager
def noted(example: PyTree, name: str) -> Iterator[None]:
    """Notes at an error of a user's loss how dpjax called it, and what is usually wrong.

    Args:
      example: Shapes of one example.
      name: How errors call the function that received the loss.
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
    except jax.errors.UnexpectedTracerError:  # `leaks_noted` has its note
        raise
    except Exception as error:
        if type(error).__name__ == "TraceContextError":  # of Flax, which not all users load
            raise TypeError(
                f"{name}: the loss changes an NNX module that was made outside of it ({error}). "
                "Usually it has dropout, whose keys it counts. Split the module outside, graph, "
                "params, rest = nnx.split(model, nnx.Param, ...), and join a copy in the loss: "
                "nnx.merge(graph, params, rest, copy=True)."
            ) from error
        shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", example)
        usual = (
            "a dictionary: read it by name, example['x']"
            if isinstance(example, dict)
            else "one argument: unpack it inside, x, y = example"
        )
        cure = f"The example is {usual}. If the loss needs anything else, it must close over it."
        if isinstance(error, TypeError) and _is_not_called(error):
            raise TypeError(
                f"{name}: the loss does not take two arguments ({error}); expected loss(params, "
                f"example). Usually it was written as loss(params, x, y). {cure}"
            ) from error
        error.add_note(
            f"dpjax called loss(params, example), where example is {shapes}: one example, without "
            "a batch axis. Usually the loss was written for a batch (x.mean(0), y[:, None], "
            f"len(x)). {cure}"
        )
        raise


@contextlib.contextmanager
def leaks_noted() -> Iterator[None]:
    """Notes at JAX's error of a leaked tracer what a loss usually does to leak one.

    The first trace of the loss leaves the tracer without an error, and a later trace meets it.
    """
    try:
        yield
    # The second one where a leaked tracer is a constant of a program that is hashed.
    except (jax.errors.UnexpectedTracerError, jax.errors.TracerArrayConversionError) as error:
        error.add_note(
            "The loss keeps a traced value in an object outside of it, and the next trace meets "
            "it; expected a pure function. Usually it takes keys from a sequence, next(keys), or "
            f"appends to a list. {KEY_OF_EXAMPLE} What you want to look at is returned, with "
            "clipped_grad(has_aux=True)."
        )
        raise


def _is_not_called(error: TypeError) -> bool:
    """Whether a function refused the number of its arguments, and this room had called it."""
    # The frame of a function that was called would stand last.
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = pathlib.Path(last).parent.is_relative_to(pathlib.Path(__file__).parent)
    return ours and "positional argument" in str(error)


def require_one_example(program: Jaxpr, name: str) -> None:
    """Refuses a program in which one example could see another.

    Args:
      program: The traced loss of one example, or the traced wish of a rule.
      name: How errors call it.

    Raises:
      ValueError: It holds a primitive that could mix examples.
    """
    for equation in _not_vouched(program):
        if why := _why_mixing(equation):
            raise ValueError(
                f"{name}: its program holds {name_of(equation)}, which {why}; expected a "
                "function of one example. Clipping could then not bound what one example moves. "
                "Usually it came with a library (a host callback, a custom_vmap, a primitive or a "
                "kernel), or keys are of rbg: make them by jax.random.key(seed, "
                "impl='threefry2x32'). If the function treats each example alone whatever batch it "
                "is given, wrap it: dpjax.losses.vouched(function)."
            )


def _why_mixing(equation: JaxprEqn) -> str | None:
    """How an equation could see several examples under `jax.vmap`, if it could."""
    name, p = equation.primitive.name, equation.params
    if not of_jax(equation.primitive):
        return _OUTSIDE
    # A jax.vmap inside of the loss made numbers of its axes: they are axes of the example.
    axes = jax.tree.leaves((p.get("axes"), p.get("axis_name")))
    # `pvary` changes the type of an array, not its numbers.
    if name != "pvary" and not all(isinstance(axis, Integral) for axis in axes):
        return _DEVICES
    kinds = [getattr(v.aval, "dtype", None) for v in (*equation.invars, *equation.outvars)]
    others = [k for k in kinds if k is not None and jnp.issubdtype(k, jax.dtypes.prng_key)]
    # The equations inside of a call are read one by one.
    if name not in _KEPT and not inner_programs(equation) and set(others) - {_threefry()}:
        return _KEYS
    # As JAX 0.10.2 batches the gradient of a bias that all examples share: it has no batch axis.
    if name.startswith("dot_product_attention") and (
        p.get("dropout_rate") or p.get("variadic_args", (True, True))[1]
    ):
        return _CUDNN
    return None if row_by_row(equation) else _COULD.get(name)


@functools.cache
def _threefry() -> Any:
    """The dtype of keys that draw for each example of a batch from its own key."""
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def has_own_derivatives(program: Jaxpr) -> bool:
    """Whether the gradient of a program may run derivatives that its author wrote.

    They stand in the program of the gradient alone.
    """
    return any(e.primitive.name.startswith("custom_") or own_vjp(e) for e in equations(program))


def closed_over(program: ClosedJaxpr, examples: int) -> tuple[int, ...] | None:
    """The shape of a constant that has a row for each example of the data, if there is one.

    Args:
      program: The traced loss.
      examples: The number of examples in the data set.
    """
    shapes = (getattr(constant, "shape", ()) for constant in _constants(program))
    # A single row would match every scalar that was given an axis.
    return next((shape for shape in shapes if examples > 1 and shape[:1] == (examples,)), None)


def centres_alone(program: Jaxpr) -> bool:
    """Whether a program subtracts from numbers their own mean over axes of length one: zero.

    Batch normalisation in training mode does so behind a dense layer, as its batch is one example.
    """
    # From a variable to the one whose numbers it holds in their order, and whether as a mean.
    held: dict[Any, tuple[Any, bool]] = {}
    for equation in equations(program):
        name, inputs, outputs = equation.primitive.name, equation.invars, equation.outvars
        counts = {getattr(v.aval, "size", None) for v in (*inputs[:1], *outputs)}
        if name not in _CENTRING or len(counts) > 1:  # added up, or repeated
            continue
        seen = [(v, False) if isinstance(v, Literal) else held.get(v, (v, False)) for v in inputs]
        of, mean = seen[0]
        if name == "sub" and seen[1] == (of, True):
            return True
        by_one = name == "div" and isinstance(inputs[1], Literal) and np.all(inputs[1].val == 1)
        if by_one or len(inputs) == 1:
            held[outputs[0]] = of, mean or name == "reduce_sum"
    return False


def draws_alike(program: Jaxpr) -> bool:
    """Whether a program draws random numbers by a key that follows from none of its inputs.

    Dropout with a key that the loss closes over does: all examples and steps have one mask.
    """
    found = []

    def rule(equation: JaxprEqn, moving: Sequence[bool]) -> list[bool]:
        if equation.primitive.name in _DRAWS and not moving[0]:
            found.append(equation)
        for inner, marks in marked_programs(equation, moving):
            follow(inner, marks)
        return outputs_depend(equation, moving)

    def follow(program: Jaxpr, moving: Sequence[bool]) -> None:
        still = [False] * len(program.constvars)
        evaluate(program, still, moving, rule, literal=lambda _: False)

    follow(program, [True] * len(program.invars))
    return bool(found)


def warn_of_one_draw(name: str, loss: Jaxpr) -> None:
    """Warns about random numbers that all examples and steps share."""
    # A warning, since a random projection is meant to be fixed.
    if draws_alike(loss):
        logging.warning(
            "%s: the loss draws random numbers by a key that does not depend on the example, so "
            "all examples and steps share the numbers. If they are a random projection or other "
            "constants, all is well. Usually they are dropout: with one mask, what it drops is "
            "never trained. %s",
            name,
            KEY_OF_EXAMPLE,
        )


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
            for inner in parts(equation):
                yield from _constants(inner)
