# SPDX-License-Identifier: Apache-2.0
"""One private step, on one page: draw, clip, sum | noise, mean, update.

`private_step` is Algorithm 1 of Abadi et al. (2016), line by line, for DP-SGD, Langevin dynamics
and federated rounds alike; a stream on disk runs the same three parts with the host between them.
Everything in `Sums` is secret. `release` is the one function that turns a sum into parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, Bool, Float, Int

from dpjax import trees
from dpjax.gradients import layout as choose_layout
from dpjax.gradients.batching import Layout, device_sum, sum_over
from dpjax.gradients.clipped_grad import clipped_sum
from dpjax.gradients.nan_isolation import each
from dpjax.mechanism import Mechanism
from dpjax.types import Draw, Key, LossFn, Purpose, PyTree, Schedule, State


class Recipe(NamedTuple):
    """What every step of a run does; the arguments of `dpjax.dpsgd`, and two of federated runs."""

    loss: LossFn
    optimizer: optax.GradientTransformation
    mechanism: Mechanism
    engine: str = "auto"
    entry: Callable[[Key, Int[Array, ""]], PyTree] | None = None
    """``entry(key, step)``, which the step appends to every example; `per_step` of dpsgd."""
    bound_schedule: Schedule | None = None
    weights: Callable[[Int[Array, ""], PyTree, PyTree], Array] | None = None
    microbatch_size: int | None = None
    sizes: Callable[[PyTree], Int[Array, " size"]] | None = None
    """How many examples each row holds, where a row is a client. Rows of 0 are masked."""

    @property
    def rescales(self) -> bool:
        """Whether the rule's bounds change with the step."""
        return self.bound_schedule is not None or self.mechanism.adaptive is not None

    def bound_scale(self, state: State) -> Any:
        """The factor on the rule's bounds, and on the noise with them, at this step."""
        if self.bound_schedule is not None:
            return jnp.asarray(self.bound_schedule(state.step), jnp.float32)
        return state.bound_scale if self.mechanism.adaptive is not None else 1.0


class Sums(NamedTuple):
    """What a step has summed over its draw, **before** any noise: all of it is secret."""

    gradients: PyTree
    losses: Float[Array, ""]
    scored: Int[Array, ""]
    """How many losses were summed. A loss may be NaN although its gradient is finite."""
    norms: Float[Array, " groups"]
    over: Float[Array, " groups"]
    below: Float[Array, ""]
    """The count that an adapted bound follows; 0 without one."""
    drawn: Int[Array, ""]
    working: Int[Array, ""]
    """Drawn rows that hold at least one example."""
    dropped: Int[Array, ""]
    examples: Int[Array, ""]


def private_step(recipe: Recipe, data: PyTree, state: State) -> tuple[State, Sums]:
    """One step of Algorithm 1 on data that lie on the device.

    Args:
      recipe: What the run does.
      data: Arrays with one row per example (or per client).
      state: The state before the step.

    Returns:
      The state after the step, and the sums without the gradient.

    Privacy:
      ``state.params`` may be released. The sums may not.
    """
    draw = draw_step(recipe, state.key, state.step)  # line 3: sample
    layout = layout_of(recipe, state.params, trees.one_row(data))
    zero = no_sums(recipe, state.params)
    # lines 4 and 5: per-example gradients, clipped and summed; secret up to here
    sums = sum_over(partial(add_clipped, recipe), zero, layout, draw, data, state)
    return release(recipe, state, sums)  # lines 6 and 7: noise, mean, update


def draw_step(recipe: Recipe, key: Key, step: Int[Array, ""]) -> Draw:
    """The rows of one step, a pure function of the root key and the step."""
    return recipe.mechanism.sampling.draw(key, step)


def add_clipped(
    recipe: Recipe, state: State, rows: PyTree, mask: Bool[Array, " size"], sums: Sums
) -> Sums:
    """Adds the clipped gradients of one microbatch to the sums."""
    rule, adaptive, loss = recipe.mechanism.clipping, recipe.mechanism.adaptive, recipe.loss
    # Clipping the gradient of loss / scale to the bound and multiplying the mean by the scale is
    # clipping to bound * scale. The noise does not depend on the scale, nor does the accounting.
    scale = recipe.bound_scale(state)
    scaled = (lambda p, x: loss(p, x) / scale) if recipe.rescales else loss
    examples = with_entry(recipe, state.key, state.step, rows, mask.shape)
    sizes = mask if recipe.sizes is None else jnp.where(mask, recipe.sizes(rows), 0)
    real = sizes > 0
    directions = trees.step_key(state.key, Purpose.PROJECTIONS, state.step)
    weights = _weights(recipe, state, examples)
    part = clipped_sum(
        scaled,
        rule,
        recipe.engine,
        state.params,
        examples,
        real,
        weights,
        directions,
        sums.gradients,
    )
    finite = jnp.all(jnp.isfinite(part.norms), axis=1)
    scored = real & finite & jnp.isfinite(part.losses)
    losses, norms = jnp.where(scored, part.losses, 0), jnp.where(finite[:, None], part.norms, 0)
    over = part.norms > jnp.asarray(rule.bounds)
    return Sums(
        part.value,
        sums.losses + jnp.sum(losses, dtype=jnp.float32) * scale,
        sums.scored + jnp.sum(scored, dtype=jnp.int32),
        sums.norms + jnp.sum(norms, axis=0, dtype=jnp.float32) * scale,
        sums.over + jnp.sum(over, axis=0, dtype=jnp.float32),
        sums.below + (0.0 if adaptive is None else adaptive.below(rule, part.norms, real)),
        sums.drawn + jnp.sum(mask, dtype=jnp.int32),
        sums.working + jnp.sum(real, dtype=jnp.int32),
        sums.dropped + jnp.sum(real & ~finite, dtype=jnp.int32),
        sums.examples + jnp.sum(sizes, dtype=jnp.int32),
    )


def release(recipe: Recipe, state: State, sums: Sums) -> tuple[State, Sums]:
    """Turns the sums of a step into the next state: noise once, the mean, the optimizer.

    Args:
      recipe: What the run does.
      state: The state before the step.
      sums: One entry per device, stacked.

    Returns:
      The state after the step, and the sums of all devices without the gradient.

    Privacy:
      The parameters that come out are private. The sums are not.
    """
    sums = device_sum(sums)
    scale = recipe.bound_scale(state)
    mean, bound_scale = recipe.mechanism.private_mean(  # line 6
        sums.gradients, state.key, state.step, bound_scale=state.bound_scale, below=sums.below
    )
    if recipe.rescales:
        mean = jax.tree.map(lambda x: (x * scale).astype(x.dtype), mean)
    updates, optimizer = optax.with_extra_args_support(recipe.optimizer).update(  # line 7
        mean, state.optimizer, state.params, bound_scale=scale
    )
    after = state._replace(
        params=optax.apply_updates(state.params, updates),
        optimizer=optimizer,
        bound_scale=bound_scale,
        step=state.step + 1,
    )
    return after, sums._replace(gradients=None)


def no_sums(recipe: Recipe, params: PyTree) -> Sums:
    """The sums over no examples."""
    groups = jnp.zeros(len(recipe.mechanism.clipping.bounds), jnp.float32)
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    gradients = trees.zeros_wide(params)
    return Sums(gradients, zero, none, groups, groups, zero, none, none, none, none)


def layout_of(recipe: Recipe, params: PyTree, row: PyTree) -> Layout:
    """The microbatch and the devices of a run, chosen by shapes alone.

    Args:
      recipe: What the run does.
      params: Parameters, or their shapes.
      row: Shapes of one row of the data.
    """
    return choose_layout(
        lambda p, x: (recipe.loss(p, x), None),
        params,
        example_of(recipe, row),
        recipe.mechanism.sampling.usual_size,
        recipe.engine,
        microbatch_size=recipe.microbatch_size,
    )


def example_of(recipe: Recipe, row: PyTree) -> PyTree:
    """Shapes of the example that the loss receives, from the shapes of a row of the data."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(lambda k, rows: with_entry(recipe, k, jnp.int32(0), rows, ()), key, row)


def with_entry(
    recipe: Recipe, key: Key, step: Int[Array, ""], rows: PyTree, size: tuple[int, ...]
) -> PyTree:
    """Rows, with the entry of the step appended to each if the recipe has one."""
    if recipe.entry is None:
        return rows
    entry = jax.tree.map(jnp.asarray, recipe.entry(key, step))
    return (*rows, jax.tree.map(lambda x: jnp.broadcast_to(x, (*size, *x.shape)), entry))


def _weights(recipe: Recipe, state: State, examples: PyTree) -> Float[Array, " size"] | None:
    """The weight of each example. It is mapped over examples, so none can see another."""
    weigh = recipe.weights
    if weigh is None:
        return None
    return each(lambda example: weigh(state.step, state.params, example), examples)


class Info(NamedTuple):
    """What a step saw, **before** any noise.

    Privacy: computed from private data without noise. Look at it, do not publish it.
    """

    loss: Float[Array, ""]
    """Mean loss of the drawn examples that counted and have a finite loss; NaN if none."""
    examples: Int[Array, ""]
    """How many examples were drawn."""
    dropped: Int[Array, ""]
    """How many of them contributed zero because their gradient was not finite."""
    norm: Float[Array, " groups"]
    """Mean gradient norm per group before clipping, over the examples that counted."""
    clipped: Float[Array, " groups"]
    """Fraction of the drawn examples with a norm above the bound, per group."""


_UNSCORED = (
    "dpsgd: %d of %d examples have a finite gradient and a loss that is not finite. They count in "
    "the step and not in info.loss. Usually a label is out of range."
)


def mean_info(sums: Sums) -> Info:
    """The means of steps, ``[steps, ...]``, from the sums that `release` returned.

    NumPy computes the means on the host: an empty draw is lawful and has none, and
    ``jax_debug_nans`` would end the run there.
    """
    sums = jax.tree.map(np.asarray, sums)
    counted = sums.working - sums.dropped
    if unscored := int(np.sum(counted - sums.scored)):
        logging.log_first_n(logging.WARNING, _UNSCORED, 1, unscored, int(np.sum(counted)))
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = np.float32(sums.losses / sums.scored)
        norm = np.float32(sums.norms / counted[:, None])
        clipped = np.float32(sums.over / sums.working[:, None])
    return Info._make([loss, sums.examples, sums.dropped, norm, clipped])
