# SPDX-License-Identifier: Apache-2.0
"""From a module and a loss to ``loss(params, example)``, a pure function of one example.

A loss receives the output and the target and, if it has arguments of these names, the
pre-activations (``hidden``) and the ``epoch``. A model whose examples depend on each other, such
as one with batch normalisation, is refused: clipping could not bound an example's influence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import checks
from dpjax.types import LossFn, PyTree

ExampleLoss: TypeAlias = Callable[..., Float[Array, ""]]
"""``loss(output, target)``, and ``hidden`` and ``epoch`` if it has arguments so named."""


def of(model: nn.Module, loss: ExampleLoss, **options: Any) -> LossFn:
    """Joins a Linen module and a loss: ``loss(model.apply({"params": params}, x), y)``.

    A loss may take more arguments, by name:

    | argument | value |
    |---|---|
    | ``hidden`` | the pre-activations of all hidden layers |
    | ``epoch`` | the third entry of an example ``(x, y, epoch)`` |

    A model of dpjax keeps its pre-activations; other models call
    ``self.sow("preactivations", name, h)``. `dpjax.dpsgd` adds the epoch if ``per_step`` defines
    it, as in ``per_step=lambda step: step // 117``.

    Args:
      model: A module whose only variables are its parameters.
      loss: Takes the output for one example and its target.
      **options: For ``model.apply``, such as ``train=True``. ``rngs`` is refused: with one key,
        all examples and steps would share one dropout mask.

    Returns:
      ``loss(params, example)`` with ``example = (x, y)``, one example without a batch axis,
      and ``params`` the inner tree, ``variables["params"]``.

    Privacy:
      The model has no state but its parameters. Batch statistics are refused: with them the
      output for one example depends on the others, and clipping does not bound its influence.

    Example:
      >>> from dpjax.losses import cross_entropy
      >>> from dpjax.models import MLP
      >>> model = MLP(features=(), classes=10)
      >>> params = model.init(jax.random.key(0), jnp.zeros(64))["params"]
      >>> loss = of(model, cross_entropy)
      >>> round(float(loss(params, (jnp.zeros(64), jnp.array(7)))), 4)
      2.3026

      For a model with dropout, the loss derives the key from the example's row, which is in the
      data, and from the step, which ``dpsgd(per_step=lambda step: step)`` adds:

      >>> import flax.linen as nn
      >>> model = nn.Sequential([nn.Dense(10), nn.Dropout(0.5, deterministic=False)])
      >>> def loss(params, example):
      ...     x, y, row, step = example
      ...     key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), row), step)
      ...     return cross_entropy(model.apply({"params": params}, x, rngs={"dropout": key}), y)

      A module of NNX or Equinox splits into parameters and a rest, and the loss merges them.
      With ``copy=True``, changes of state are discarded after each call. So a Dropout in training
      has one mask for all examples and steps, and a BatchNorm in training takes its statistics
      from a single example: split after ``model.eval()``, and use group or layer normalisation.

      >>> from flax import nnx
      >>> model = nnx.Linear(64, 10, rngs=nnx.Rngs(0))
      >>> graph, params, rest = nnx.split(model, nnx.Param, ...)
      >>> loss = lambda params, example: cross_entropy(
      ...     nnx.merge(graph, params, rest, copy=True)(example[0]), example[1]
      ... )
      >>> loss(params, (jnp.zeros(64), jnp.array(7))).shape
      ()

      >>> import equinox as eqx
      >>> linear = eqx.nn.Linear(64, 10, key=jax.random.key(0))
      >>> params, rest = eqx.partition(linear, eqx.is_inexact_array)
      >>> loss = lambda params, example: cross_entropy(
      ...     eqx.combine(params, rest)(example[0]), example[1]
      ... )
      >>> loss(params, (jnp.zeros(64), jnp.array(7))).shape
      ()
    """
    _check_module(model)
    # Refused before the model runs: Flax would accept the key, and every example would share one
    # dropout mask.
    if "rngs" in options:
        raise ValueError(_ONE_KEY)
    # By argument name, so that one `of` serves all losses. Read once, not in every trace.
    named = inspect.signature(loss).parameters

    def per_example(params: PyTree, example: tuple[Any, ...]) -> Float[Array, ""]:
        _refuse_collections(params)
        x, y, *epoch = unpacked("of", example)
        more = _epoch(named, epoch)
        try:
            if "hidden" in named:
                # No other collection is mutable: batch statistics raise and are refused below.
                output, kept = model.apply(
                    {"params": params}, x, mutable=["preactivations"], **options
                )
                more["hidden"] = _hidden(model, params, kept)
            else:
                output = model.apply({"params": params}, x, **options)
        except (flax.errors.ScopeCollectionNotFound, flax.errors.ModifyScopeVariableError) as error:
            raise ValueError(_STATE.format(f"{type(model).__name__} keeps")) from error
        except flax.errors.InvalidRngError as error:
            raise ValueError(f"losses.of: {type(model).__name__} {_NO_KEY}") from error
        return loss(output, y, **more)

    return per_example


def unpacked(name: str, example: Any) -> tuple[Any, ...] | list[Any]:
    """The example as ``(x, y, ...)``; a dictionary would give its keys, and an array its rows."""
    if not isinstance(example, tuple | list) or len(example) < 2:
        what = list(example) if isinstance(example, Mapping) else jax.tree.map(jnp.shape, example)
        raise TypeError(
            f"losses.{name}: the example is a {type(example).__name__} of {what!s:.200}; expected "
            "a tuple (x, y). Usually the data are inputs without targets, or a dictionary: give "
            "the data as (x, y), or name the entries of a dictionary in a loss: "
            "lambda params, e: loss(params, (e['x'], e['y']))."
        )
    return example


def _check_module(model: Any) -> None:
    if isinstance(model, type) or not callable(getattr(model, "apply", None)):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"losses.of: the model is {kind}; expected a Linen module, such as "
            "dpjax.models.MLP(), which has `apply`. For any other model, write "
            "loss(params, example) yourself. With NNX: graph, params, rest = nnx.split(model, "
            "nnx.Param, ...), and in the loss nnx.merge(graph, params, rest, copy=True)(x). With "
            "Equinox: params, rest = eqx.partition(model, eqx.is_inexact_array), and in the loss "
            "eqx.combine(params, rest)(x)."
        )


_OWN_KEY = (
    'write a loss of your own, loss(model.apply({"params": params}, x, rngs={"dropout": key}), y). '
    + checks.KEY_OF_EXAMPLE
)

_ONE_KEY = (
    "losses.of(rngs=...): this key would serve all examples and steps, so that all of them "
    f"would have one dropout mask. Instead, {_OWN_KEY}"
)

_NO_KEY = (
    "draws random numbers, usually for dropout, and has no key for them. To train without "
    "dropout, give the option that disables it, as in losses.of(model, loss, train=False), or "
    f"define the model with deterministic=True. To train with dropout, {_OWN_KEY}"
)


def _epoch(named: Mapping[str, inspect.Parameter], given: list[Any]) -> dict[str, Any]:
    """The epoch as a keyword argument, if the loss has one and the example brings one."""
    if len(given) > 1 or (given and "epoch" not in named):
        raise ValueError(
            f"losses.of: got an example of {2 + len(given)} entries; expected (x, y), or "
            "(x, y, epoch) for a loss that has an argument named epoch."
        )
    if not given and "epoch" in named and named["epoch"].default is inspect.Parameter.empty:
        raise ValueError(
            "losses.of: the loss depends on the epoch, and the example is (x, y). Define the "
            "epoch by dpjax.dpsgd(per_step=lambda step: step // steps_per_epoch), or give "
            "(x, y, epoch) yourself, or fix the epoch: functools.partial(loss, epoch=3)."
        )
    # An epoch with a default stays at it, so that one loss serves runs with and without `per_step`.
    return {"epoch": given[0]} if given else {}


def _hidden(model: nn.Module, params: PyTree, kept: Any) -> list[Array]:
    """The pre-activations; a model of several layers that keeps none is an error."""
    hidden = jax.tree.leaves(kept)
    # A penalty that is silently 0 would look like a result.
    if not hidden and sum(jnp.ndim(leaf) > 1 for leaf in jax.tree.leaves(params)) > 1:
        raise ValueError(
            f"losses.of: the loss has an argument `hidden`, and {type(model).__name__} keeps no "
            'pre-activations. In its hidden layers write self.sow("preactivations", "hidden", h) '
            "before the activation is applied, as the models of dpjax do."
        )
    return hidden


_STATE = (
    "losses.of: {} variables that are not parameters, most often the batch_stats of batch "
    "normalisation. Batch statistics mix the examples of a batch, so that clipping does not bound "
    "one example's influence on the gradient. Use nn.GroupNorm or nn.LayerNorm, which look at "
    'one example, and give the inner tree: model.init(...)["params"].'
)


def _refuse_collections(params: PyTree) -> None:
    if not isinstance(params, Mapping):
        return
    # Flax collects the running statistics of a batch under this name, beside "params".
    if "batch_stats" in params:
        raise ValueError(_STATE.format(f"was given the collections {sorted(params)}, that is,"))
    if set(params) == {"params"}:
        raise ValueError(
            "losses.of: got the whole dictionary of variables; expected the parameters alone. "
            'Give the inner tree: model.init(...)["params"].'
        )
