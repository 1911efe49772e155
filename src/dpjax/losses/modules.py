# SPDX-License-Identifier: Apache-2.0
"""From a module and a loss to ``loss(params, example)``, a pure function of one example.

Here it is decided what a loss is shown: the output and the target, and, if it has
arguments of these names, the pre-activations and the epoch.  And here a model whose
examples see each other is turned away.

This file must never know a layer's name.
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

from dpjax.types import LossFn, PyTree

ExampleLoss: TypeAlias = Callable[..., Float[Array, ""]]
"""``loss(output, target)``, and ``hidden`` and ``epoch`` if it has arguments so named."""


def of(model: nn.Module, loss: ExampleLoss, **options: Any) -> LossFn:
    """Joins a Linen module and a loss: ``loss(model.apply({"params": params}, x), y)``.

    A loss may ask for more by the names of its arguments:

    ==========  ===========================================================================
    argument    what it is given
    ==========  ===========================================================================
    ``hidden``  the pre-activations of all hidden layers: whatever the model keeps by
                ``self.sow("preactivations", name, h)``, as the models of dpjax do
    ``epoch``   the third entry of an example ``(x, y, epoch)``, which `dpjax.dpsgd` adds if
                it is told what an epoch is: ``per_step=lambda step: step // 117``; or fix it
                beforehand, with ``functools.partial(loss, epoch=3)``
    ==========  ===========================================================================

    Args:
      model: A module whose only variables are its parameters.
      loss: Takes the output for one example and its target.
      **options: For ``model.apply``, such as ``train=True``.  Not ``rngs``: a key that is given
        here is that of all examples and steps, and so is its dropout mask.

    Returns:
      ``loss(params, example)`` with ``example = (x, y)``, one example without a batch axis,
      and ``params`` the inner tree, ``variables["params"]``.

    Privacy:
      The parameters are all the state there is.  Batch statistics are refused: with them the
      output for one example depends on the others, and no clipping bounds its influence.

    Example:
      >>> from dpjax.losses import cross_entropy
      >>> from dpjax.models import MLP
      >>> model = MLP(features=(), classes=10)
      >>> params = model.init(jax.random.key(0), jnp.zeros(64))["params"]
      >>> loss = of(model, cross_entropy)
      >>> round(float(loss(params, (jnp.zeros(64), jnp.array(7)))), 4)
      2.3026

      Where a model drops out, the loss makes its key of the example's row, which is in the data,
      and of the step, which ``dpsgd(per_step=lambda step: step)`` adds:

      >>> import flax.linen as nn
      >>> model = nn.Sequential([nn.Dense(10), nn.Dropout(0.5, deterministic=False)])
      >>> def loss(params, example):
      ...     x, y, row, step = example
      ...     key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), row), step)
      ...     return cross_entropy(model.apply({"params": params}, x, rngs={"dropout": key}), y)

      A module of NNX or Equinox is parameters and a rest; the loss puts them together again.
      With ``copy=True`` nothing that a call changes outlives it.  So a Dropout in training has one
      mask for all examples and steps, and a BatchNorm in training takes its statistics from a
      single example: split after ``model.eval()``, and normalise by groups or layers.

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
    if "rngs" in options:
        raise ValueError(_ONE_KEY)
    named = inspect.signature(loss).parameters

    def per_example(params: PyTree, example: tuple[Any, ...]) -> Float[Array, ""]:
        _refuse_collections(params)
        x, y, *epoch = example
        more = _epoch(named, epoch)
        try:
            if "hidden" in named:
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


def _check_module(model: Any) -> None:
    if isinstance(model, type) or not callable(getattr(model, "apply", None)):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"losses.of: the model is {kind}; expected a Linen module, such as "
            "dpjax.models.MLP(), whose `apply` is called. Any other model needs no `of`: write "
            "loss(params, example) yourself. Of NNX: graph, params, rest = nnx.split(model, "
            "nnx.Param, ...), and in the loss nnx.merge(graph, params, rest, copy=True)(x). Of "
            "Equinox: params, rest = eqx.partition(model, eqx.is_inexact_array), and in the loss "
            "eqx.combine(params, rest)(x)."
        )


_OWN_KEY = (
    "make the key in a loss of your own, from the example: "
    'loss(model.apply({"params": params}, x, rngs={"dropout": key}), y) with '
    "key = jax.random.fold_in(jax.random.fold_in(root, row), step), where x, y, row, step = "
    "example; the row is in the data, (x, y, jnp.arange(len(x))), and the step is added by "
    "dpsgd(per_step=lambda step: step)."
)

_ONE_KEY = (
    "losses.of(rngs=...): a key that is given here is that of all examples and steps, so that all "
    f"would have one dropout mask. Instead, {_OWN_KEY}"
)

_NO_KEY = (
    "draws random numbers, usually for dropout, and has no key for them. To leave them out, give "
    "the option that switches them off, as in losses.of(model, loss, train=False), or define the "
    f"model with deterministic=True. To train with them, {_OWN_KEY}"
)


def _epoch(named: Mapping[str, inspect.Parameter], given: list[Any]) -> dict[str, Any]:
    """The epoch, if the loss asks for one and the example brings one."""
    if len(given) > 1 or (given and "epoch" not in named):
        raise ValueError(
            f"losses.of: got an example of {2 + len(given)} entries; expected (x, y), or "
            "(x, y, epoch) for a loss that has an argument named epoch."
        )
    if not given and "epoch" in named and named["epoch"].default is inspect.Parameter.empty:
        raise ValueError(
            "losses.of: the loss depends on the epoch, and the example (x, y) brings none. Tell "
            "dpjax.dpsgd what an epoch is, per_step=lambda step: step // steps_per_epoch; or give "
            "(x, y, epoch) yourself, or fix it: functools.partial(loss, epoch=3)."
        )
    return {"epoch": given[0]} if given else {}


def _hidden(model: nn.Module, params: PyTree, kept: Any) -> list[Array]:
    """What the model kept; a model of several layers that keeps nothing is an error."""
    hidden = jax.tree.leaves(kept)
    if not hidden and sum(jnp.ndim(leaf) > 1 for leaf in jax.tree.leaves(params)) > 1:
        raise ValueError(
            f"losses.of: the loss asks for pre-activations, and {type(model).__name__} keeps "
            'none. In its hidden layers write self.sow("preactivations", "hidden", h) before '
            "the activation is applied; models of dpjax do."
        )
    return hidden


_STATE = (
    "losses.of: {} variables beside its parameters, most often the batch_stats of batch "
    "normalisation. Batch statistics mix the examples of a batch, so that one example's influence "
    "on the gradient is not bounded by clipping. Use nn.GroupNorm or nn.LayerNorm, which look at "
    'one example, and give the inner tree: model.init(...)["params"].'
)


def _refuse_collections(params: PyTree) -> None:
    if not isinstance(params, Mapping):
        return
    if "batch_stats" in params:
        raise ValueError(_STATE.format(f"was given the collections {sorted(params)}, that is,"))
    if set(params) == {"params"}:
        raise ValueError(
            "losses.of: got the whole dictionary of variables; expected the parameters alone. "
            'Give the inner tree: model.init(...)["params"].'
        )
