# SPDX-License-Identifier: Apache-2.0
"""From a module and a loss to ``loss(params, example)``, a pure function of one example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from dpjax.types import LossFn, PyTree

ExampleLoss: TypeAlias = Callable[..., Float[Array, ""]]
"""``loss(output, target)``, with ``hidden`` and ``epoch`` if it has arguments of these names."""

# The ends of error messages: how to draw for dropout, and how to do without batch statistics.
_OWN_KEY = (
    "Pass train=False, or write a loss with a key of row and step, as the examples of `of` do."
)
_STATE = 'Batch statistics mix examples: use GroupNorm, and give model.init(...)["params"].'


def of(model: nn.Module, loss: ExampleLoss, **options: Any) -> LossFn:
    """Joins a Linen module and a loss: ``loss(model.apply({"params": params}, x), y)``.

    A loss may take more arguments, by name:

    | argument | value |
    |---|---|
    | ``hidden`` | the pre-activations of all hidden layers |
    | ``epoch`` | the third entry of an example ``(x, y, epoch)`` |

    Models of other packages keep pre-activations by ``self.sow("preactivations", name, h)``.
    `dpjax.dpsgd` adds the epoch by ``per_step=lambda step: step // steps_per_epoch``.

    Args:
      model: A module whose only variables are its parameters.
      loss: Takes the output for one example and its target.
      **options: For ``model.apply``, such as ``train=True``. ``rngs`` is refused: one key
        gives all examples and steps the same dropout mask.

    Returns:
      ``loss(params, example, frozen=None)`` with ``example = (x, y)``, one example without a batch
      axis, and ``params`` the inner tree, ``variables["params"]``; or a part of it, with the rest
      as ``frozen`` (`dpjax.dpsgd`).

    Privacy:
      Batch statistics are refused: with them the output for one example depends on the others, and
      clipping does not bound its influence.

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

      Modules of NNX, Equinox or Haiku need no `of`: see the page *Your model*.
    """
    if isinstance(model, type) or not callable(getattr(model, "apply", None)):
        raise TypeError(
            f"losses.of: the model is {model!r:.60}; expected a Linen module, such as MLP(). "
            "For other models write loss(params, example)."
        )
    if "rngs" in options:
        raise ValueError(f"losses.of(rngs=...): expected none. {_OWN_KEY}")
    takes_hidden = "hidden" in inspect.signature(loss).parameters

    def per_example(
        params: PyTree, example: tuple[Any, ...], frozen: PyTree = None
    ) -> Float[Array, ""]:
        # A likely mistake is to give all variables of the model in place of their "params".
        if isinstance(params, Mapping) and {"params", "batch_stats"} & params.keys():
            raise ValueError(f"losses.of: got the variables {sorted(params)}. {_STATE}")
        x, y, *epoch = checked_example("of", example)
        if frozen is not None:  # the other parameters; nested trees merge leaf by leaf
            params = unflatten_dict({**flatten_dict(frozen), **flatten_dict(params)})
        # The arguments of the loss after output and target.
        more_arguments: dict[str, Any] = {}
        if epoch:  # absent without `per_step`, and then the loss takes its default
            more_arguments["epoch"] = epoch[0]
        # With `mutable` Flax returns the output and the collections that it names. Batch statistics
        # are never among them, so a model that updates some raises, and is refused below.
        mutable_option: dict[str, Any] = {}
        if takes_hidden:
            mutable_option["mutable"] = ["preactivations"]
        try:
            output = model.apply({"params": params}, x, **mutable_option, **options)
        except (flax.errors.ScopeCollectionNotFound, flax.errors.ModifyScopeVariableError) as error:
            raise ValueError(f"losses.of: {type(model).__name__} keeps state. {_STATE}") from error
        except flax.errors.InvalidRngError as error:
            name = type(model).__name__
            raise ValueError(f"losses.of: {name} has no key for dropout. {_OWN_KEY}") from error
        if takes_hidden:
            output, sown = output
            more_arguments["hidden"] = _hidden(model, params, sown)
        return loss(output, y, **more_arguments)

    return per_example


def checked_example(name: str, example: Any) -> tuple[Any, ...] | list[Any]:
    """The example, a tuple ``(x, y, ...)``; dictionaries and arrays, which also unpack, raise.

    The name is that of the caller, for the message.
    """
    if not isinstance(example, tuple | list) or len(example) < 2:
        raise TypeError(
            f"losses.{name}: the example is {jax.tree.map(jnp.shape, example)!s:.100} (shapes); "
            "expected a tuple (x, y)."
        )
    return example


def _hidden(model: nn.Module, params: PyTree, sown: Any) -> list[Array]:
    """The pre-activations; raises if none is kept, because the penalty is then 0."""
    hidden = jax.tree.leaves(sown)
    # A model with a single kernel has no hidden layer.
    if not hidden and sum(jnp.ndim(leaf) > 1 for leaf in jax.tree.leaves(params)) > 1:
        raise ValueError(
            f"losses.of: {type(model).__name__} keeps no pre-activations for `hidden`. In its "
            'hidden layers write self.sow("preactivations", "hidden", h).'
        )
    return hidden
