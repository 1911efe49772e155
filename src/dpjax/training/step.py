# SPDX-License-Identifier: Apache-2.0
"""One private step, wherever the data are: sum over microbatches, then release once.

`Recipe` is what a run was asked to do.  Each device adds microbatches to `Sums` of its own,
which are secret, and `release` adds these up and turns them into parameters, which are not:
noise once, the division by the expected batch size, the optimizer.  Nothing else reads `Sums`
but `Info`.

This file must never know where examples come from, nor look at the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, Bool, Float, Int

from dpjax import trees
from dpjax.gradients import clipped_grad, layout
from dpjax.gradients.nan_isolation import each
from dpjax.mechanism import Mechanism
from dpjax.types import ClippedSum, Key, LossFn, Purpose, PyTree, Schedule

Steps = Callable[[PyTree, Any, Key, int], tuple[PyTree, Any, "Sums"]]
"""``(params, optimizer state, key, count)``, of which the first two are used up, to both of
them ``count`` steps later and what `seen` said of these as NumPy arrays ``[count, ...]``."""

_UNSCORED = (
    "dpsgd: %d of %d examples have a gradient that is finite and a loss that is not. They count in "
    "the step, and not in info.loss. Usually a label is out of range."
)


class Info(NamedTuple):
    """What a step saw, **before** any noise.

    Privacy: computed from private data without noise.  Look at it, do not publish it.
    """

    loss: Float[Array, ""]
    """Mean loss of the drawn examples that counted and whose loss is finite; NaN if none."""
    examples: Int[Array, ""]
    """How many examples were drawn."""
    dropped: Int[Array, ""]
    """How many of them counted as nothing, because their gradient was not finite."""
    norm: Float[Array, " groups"]
    """Mean gradient norm per group of those that counted, before clipping."""
    clipped: Float[Array, " groups"]
    """Fraction of the drawn examples whose norm is above the bound, per group."""


class Recipe(NamedTuple):
    """What a run was asked to do; the arguments of `dpjax.dpsgd`."""

    loss: LossFn
    optimizer: optax.GradientTransformation
    mechanism: Mechanism
    engine: str
    per_step: Callable[[Int[Array, ""]], PyTree] | None
    bound_schedule: Schedule | None
    weights: Callable[[Int[Array, ""], PyTree, PyTree], Array] | None
    microbatch_size: int | None

    @property
    def rescales(self) -> bool:
        """Whether the rule's bounds change with the step."""
        return self.bound_schedule is not None or self.mechanism.adaptive is not None

    def scale(self, at: Any) -> Any:
        """By how much the rule's bounds, and the noise with them, are larger at this step.

        Args:
          at: The state of the noise: which step it is, and an adapted scale.
        """
        if self.mechanism.adaptive is not None:
            return at.scale
        if self.bound_schedule is None:
            return 1.0
        return jnp.asarray(self.bound_schedule(at.step), jnp.float32)


class Sums(NamedTuple):
    """What a step has added up so far, on one device: secret, all of it."""

    gradients: PyTree
    losses: Float[Array, ""]
    scored: Int[Array, ""]
    """How many losses that is; one may be NaN though its gradient is finite."""
    norms: Float[Array, " groups"]
    over: Float[Array, " groups"]
    below: Float[Array, ""]
    """What an adapted bound follows; 0 where none is."""
    examples: Int[Array, ""]
    dropped: Int[Array, ""]


class Microbatches(NamedTuple):
    """How a batch is taken in pieces.

    Args:
      size: Rows in a microbatch of one device.
      devices: How many devices share a batch.
      add: ``(params, state of the noise, rows, mask, sums) -> sums``, on one of them.
    """

    size: int
    devices: int
    add: Callable[[PyTree, Any, PyTree, Bool[Array, " size"], Sums], Sums]


def nothing(recipe: Recipe, params: PyTree) -> Sums:
    """Sums over no examples."""
    groups = jnp.zeros(len(recipe.mechanism.clipping.bounds), jnp.float32)
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    return Sums(trees.zeros_wide(params), zero, none, groups, groups, zero, none, none)


def microbatches(recipe: Recipe, params: PyTree, row: PyTree) -> Microbatches:
    """Chooses the microbatch, by shapes alone.

    Args:
      recipe: What is run.
      params: Or their shapes.
      row: Shapes of one example of the data.
    """
    rule, adaptive, loss = recipe.mechanism.clipping, recipe.mechanism.adaptive, recipe.loss
    bounds = jnp.asarray(rule.bounds)
    example = example_of(recipe, row)
    size, devices = layout(
        lambda p, x: (loss(p, x), None),
        params,
        example,
        recipe.mechanism.sampling.usual_size,
        recipe.engine,
        microbatch_size=recipe.microbatch_size,
    )

    def add(params: PyTree, at: Any, rows: PyTree, mask: Bool[Array, " size"], sums: Sums) -> Sums:
        # To clip gradients of loss / scale to a bound, and multiply by the scale at the end,
        # is to clip to bound x scale: what is noised does not know of the scale.
        scale = recipe.scale(at)
        scaled = (lambda p, x: loss(p, x) / scale) if recipe.rescales else loss
        clipped = clipped_grad(scaled, rule, recipe.engine, size, devices=1)
        directions = trees.step_key(at.key, Purpose.PROJECTIONS, at.step)
        entered = _with_entry(recipe, at.step, rows, mask.shape)
        weights = _weights(recipe, at.step, params, entered)
        part: ClippedSum = clipped(params, entered, mask, weights, directions, sums.gradients)
        below = 0.0 if adaptive is None else adaptive.below(rule, part.norms, mask)
        sound = jnp.all(jnp.isfinite(part.norms), axis=1)
        norms = jnp.where(sound[:, None], part.norms, 0)
        scored = mask & sound & jnp.isfinite(part.losses)
        losses = jnp.where(scored, part.losses, 0)
        return Sums(
            part.value,
            sums.losses + jnp.sum(losses, dtype=jnp.float32) * scale,
            sums.scored + jnp.sum(scored, dtype=jnp.int32),
            sums.norms + jnp.sum(norms, axis=0, dtype=jnp.float32) * scale,
            sums.over + jnp.sum(part.norms > bounds, axis=0, dtype=jnp.float32),
            sums.below + below,
            sums.examples + jnp.sum(mask, dtype=jnp.int32),
            sums.dropped + jnp.sum(mask & ~sound, dtype=jnp.int32),
        )

    return Microbatches(size, devices, add)


def example_of(recipe: Recipe, row: PyTree) -> PyTree:
    """Shapes of what the loss is given, from those of a row of the data."""
    return jax.eval_shape(lambda rows: _with_entry(recipe, jnp.int32(0), rows, ()), row)


def _weights(
    recipe: Recipe, step: Int[Array, ""], params: PyTree, rows: PyTree
) -> Float[Array, " size"] | None:
    """How much each example counts, by itself: none sees another."""
    weigh = recipe.weights
    if weigh is None:
        return None
    return each(lambda example: weigh(step, params, example), rows)


def release(
    recipe: Recipe, key: Key, params: PyTree, optimizer_state: Any, sums: Sums
) -> tuple[PyTree, Any, Sums]:
    """The end of a step: noise once, the mean, the optimizer.

    Args:
      recipe: What is run.
      key: The root key of the run.
      params: Of the step that ends.
      optimizer_state: The noise's, and the optimizer's own.
      sums: Of all devices, stacked.

    Returns:
      Parameters, the optimizer's state, and what `seen` says.

    Privacy: the parameters that come out are private; what was seen is not.
    """
    noise_state, inner = optimizer_state
    sums = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), sums)
    scale = recipe.scale(noise_state)
    private = recipe.mechanism.privatize(key)
    mean, noise_state = private.update(sums.gradients, noise_state, below=sums.below)
    if recipe.rescales:
        mean = jax.tree.map(lambda x: (x * scale).astype(x.dtype), mean)
    optimizer = optax.with_extra_args_support(recipe.optimizer)
    try:
        updates, inner = optimizer.update(mean, inner, params, bound_scale=scale)
    except TypeError as error:
        if "'bound_scale'" in str(error):
            raise _narrow(error) from error
        if "keyword-only" not in str(error):
            raise
        raise _wanting(error) from error
    return optax.apply_updates(params, updates), (noise_state, inner), seen(sums)


def _wanting(error: TypeError) -> TypeError:
    """What to say of an optimizer that asks for more than gradients."""
    return TypeError(
        f"dpsgd: the optimizer wants more than gradients and parameters ({error}). Usually it "
        "looks at the loss, as optax.contrib.reduce_on_plateau and optax.lbfgs do; a private step "
        "has none to give, for the loss of a batch is not private. Take an optimizer that follows "
        "gradients alone, and a schedule for its rate."
    )


def _narrow(error: TypeError) -> TypeError:
    """What to say of an optimizer that promises Optax to take more, and does not."""
    return TypeError(
        f"dpsgd: the optimizer does not take what is handed to it ({error}). It says to be a "
        "GradientTransformationExtraArgs, whose update takes **extra. Say what it is: "
        "optax.GradientTransformation(optimizer.init, lambda updates, state, params=None: "
        "optimizer.update(updates, state, params))."
    )


def seen(sums: Sums) -> Sums:
    """What there is to tell of a step's sums, before any division."""
    return sums._replace(gradients=None)


def mean_info(sums: Sums) -> Info:
    """What the observer is told of steps, ``[steps, ...]``, from what `seen` said of them.

    On the host, because an empty draw is lawful, and its means are not: a device that looks for
    NaN would end the run there.
    """
    sums = jax.tree.map(np.asarray, sums)
    counted = sums.examples - sums.dropped
    if unscored := int(np.sum(counted - sums.scored)):
        logging.log_first_n(logging.WARNING, _UNSCORED, 1, unscored, int(np.sum(counted)))
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = np.float32(sums.losses / sums.scored)
        norm = np.float32(sums.norms / counted[:, None])
        clipped = np.float32(sums.over / sums.examples[:, None])
    return Info._make([loss, sums.examples, sums.dropped, norm, clipped])


def _with_entry(recipe: Recipe, step: Int[Array, ""], rows: PyTree, size: tuple[int, ...]) -> Any:
    """Rows with what this step adds to every example, if it adds anything."""
    if recipe.per_step is None:
        return rows
    entry = jax.tree.map(jnp.asarray, recipe.per_step(step))
    every = jax.tree.map(lambda x: jnp.broadcast_to(x, (*size, *x.shape)), entry)
    return (*rows, every)
