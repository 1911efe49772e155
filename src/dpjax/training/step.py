# SPDX-License-Identifier: Apache-2.0
"""One private step, on one page: draw, clip, sum | noise, mean, update.

`private_step` is Algorithm 1 of Abadi et al. (2016), line by line. A run from a stream has the same
three parts, and the host reads the rows between them. Only `release` turns a sum into parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from dpjax import meshes, trees
from dpjax.gradients import Layout
from dpjax.gradients.clipped_grad import clipped_sum
from dpjax.mechanism import Mechanism
from dpjax.mechanism.link import private_mean
from dpjax.training.info import Seen, Sums, no_sums
from dpjax.training.recipe import (
    Recipe,
    bound_to,
    extra_arguments,
    layout_of,
    reach_of,
    weights_of,
    with_entry,
)
from dpjax.types import ClippedSum, LossFn, Purpose, PyTree, State


def private_step(
    recipe: Recipe, data: PyTree, state: State, shared: PyTree = None
) -> tuple[State, Seen]:
    """One step on data in device memory.

    Args:
      recipe: Loss, mechanism and optimizer of the run.
      data: A tree of arrays with a leading axis of rows.
      state: The state before the step.
      shared: Arrays that the loss takes after the example, such as frozen weights, or None.

    Returns:
      The next state, whose parameters may be released, and secret sums for the observer.
    """
    # line 3: sample
    sampler = recipe.mechanism.sampling
    draw, epoch_key = sampler.drawn(state.key, state.noise_key, state.epoch_key, state.step)
    # A sampler with `Bins` replaces the epoch key where an epoch begins; otherwise the key stays.
    state = state._replace(epoch_key=epoch_key)

    # lines 4 and 5: per-example gradients, clipped and summed, one microbatch after the other
    def add(whole: Any, rows: PyTree, mask: Bool[Array, "size ..."], sums: Sums) -> Sums:
        state, shared = whole
        return add_clipped(bound_to(recipe, shared), state, rows, mask, sums)

    # The layout has the size of microbatches, and the devices, each with its share of the draw.
    layout = layout_of(bound_to(recipe, shared), state.params, trees.one_row(data))
    zero = no_sums(recipe.mechanism, state.params, layout)
    # `add` has these arrays as an argument and not in its closure, because it may run on several
    # devices, and each has them as a whole. `end_block` runs after every few microbatches, see
    # `add_clipped`.
    whole = (without_optimizer(state), shared)
    sums = layout.sum_over(add, zero, draw, data, whole, end_block)

    # lines 6 and 7: noise, mean, update
    return release(recipe, layout, state, sums)


def without_optimizer(state: State) -> State:
    """The state without its optimizer state and noise memory, which clipping does not read."""
    # The arguments of the sum are replicated on every device; a mesh may shard these two.
    return state._replace(optimizer=None, memory=())


def add_clipped(
    recipe: Recipe, state: State, rows: PyTree, mask: Bool[Array, "size ..."], sums: Sums
) -> Sums:
    """Adds the clipped gradients of one microbatch to the sums.

    Gradients go to ``sums.gradients.block``, the plain sum of the last few microbatches. Later
    `end_block` adds it to a sum with a correction of rounding errors (`gradients.batching.Total`).

    ``rows`` and ``mask`` have the axis ``[size]`` of the microbatch, whose entries are examples or
    clients. If people are drawn, they are ``[size, most_rows]``. False in the mask is padding.
    """
    scale = recipe.bound_scale(state)
    loss = recipe.loss
    if recipe.rescales:
        # A bound that changes is a fixed bound on the gradients of a loss that is divided.
        loss = _divided(loss, scale)
    # A recipe may append one more leaf to every example, such as the value of ``per_step``.
    examples = with_entry(recipe.entry, state.key, state.step, rows, mask.shape)
    if recipe.mechanism.sampling.most_rows is not None:
        # The engine takes a person as one example: its rows, and which of them were drawn.
        examples = examples, mask

    # How many examples each entry holds, [size]: 1 for an example, the number of drawn rows for a
    # person, and 0 for padding.
    sizes = jnp.sum(mask, axis=tuple(range(1, mask.ndim)), dtype=jnp.int32)
    drawn = sizes > 0
    if recipe.sizes is not None:
        sizes = jnp.where(drawn, recipe.sizes(rows), 0)
    # A client without examples is masked: it has no update, and its mean loss is NaN.
    real = sizes > 0
    # Only `clipping.jl` uses this key: its random directions stay as secret as the noise.
    projection_key = trees.step_key(state.noise_key, Purpose.PROJECTIONS, state.step)
    clipped = clipped_sum(
        recipe.name,
        loss,
        recipe.mechanism.clipping,
        recipe.engine,
        state.params,
        examples,
        real,
        key=projection_key,
        weights=weights_of(recipe, state, examples),
        start=sums.gradients.block,
    )
    gradients = sums.gradients._replace(block=clipped.value)
    seen = _seen(recipe.mechanism, clipped, drawn, sizes, scale)
    return Sums(gradients, jax.tree.map(jnp.add, sums.seen, seen))


def _divided(loss: LossFn, scale: Any) -> LossFn:
    """The loss divided by ``scale``, the factor on the bounds of this step.

    Clipping gradients of it to the bound C, and multiplying the mean by the scale in `release`,
    clips to C * scale. Noise and accounting need only C.
    """
    return lambda params, example: loss(params, example) / scale


def _seen(
    mechanism: Mechanism,
    clipped: ClippedSum,
    drawn: Bool[Array, " size"],
    sizes: Int[Array, " size"],
    scale: Any,
) -> Seen:
    """The sums of one microbatch that an observer sees.

    ``drawn`` is False for padding, and ``sizes`` has the number of examples of each entry.
    ``scale`` is the factor by which losses, and with them gradients, were divided.
    """
    rule = mechanism.clipping
    real = sizes > 0
    # An example with a non-finite gradient contributed zero to the sum of gradients, so the sums of
    # losses and norms leave it out. `over`, the number of norms above the bound in each group,
    # counts infinite ones. Norms are [size, groups], and bounds are [1, groups].
    finite = jnp.all(jnp.isfinite(clipped.norms), axis=1)
    scored = real & finite & jnp.isfinite(clipped.losses)
    losses = jnp.where(scored, clipped.losses, 0)
    norms = jnp.where(finite[:, None], clipped.norms, 0)
    below = jnp.zeros((), jnp.float32)
    if mechanism.adaptive is not None:
        below = mechanism.adaptive.below(rule, clipped.norms, real)
    return Seen(
        losses=jnp.sum(losses, dtype=jnp.float32) * scale,
        scored=jnp.sum(scored, dtype=jnp.int32),  # how many losses the sum has
        norms=jnp.sum(norms, axis=0, dtype=jnp.float32) * scale,
        over=jnp.sum(clipped.norms > jnp.asarray([rule.bounds]), axis=0, dtype=jnp.float32),
        below=below,  # the count that an adapted bound follows
        drawn=jnp.sum(drawn, dtype=jnp.int32),
        working=jnp.sum(real, dtype=jnp.int32),  # drawn entries with an example
        dropped=jnp.sum(real & ~finite, dtype=jnp.int32),  # of these, with a non-finite gradient
        examples=jnp.sum(sizes, dtype=jnp.int32),
    )


def end_block(sums: Sums) -> Sums:
    """The sums after a block of microbatches; see `dpjax.gradients.batching.Total`."""
    return sums._replace(gradients=sums.gradients.settled())


def release(recipe: Recipe, layout: Layout, state: State, sums: Sums) -> tuple[State, Seen]:
    """The next state, from sums with one entry for each share of the batch; `Seen` is secret.

    A share is the part of the batch on one device.
    """
    # The largest coordinate that the sum of each leaf has in nearly every draw. `join` rounds the
    # shares to the last digit of such a number, so they add exactly, and adds the rests apart.
    reach = reach_of(recipe, state.params)
    # The sum of gradients stays in two parts until the noise is added: ``total`` is rounded, and
    # ``lost`` is what rounding lost. In one float32 array, the sum of a million examples is wrong
    # by more than a twentieth of a bound.
    total, lost, seen = layout.join(sums.gradients, sums.seen, reach)
    scale = recipe.bound_scale(state)
    # The mechanism moves the factor in the state only if bounds adapt. Otherwise it stays 1: the
    # factor of a schedule follows from the step.
    mean, next_bound_scale, memory = private_mean(  # line 6
        recipe.mechanism,
        total,
        state.noise_key,
        state.step,
        memory=state.memory,
        lost=lost,
        bound_scale=state.bound_scale,
        below=seen.below,
        in_parts=meshes.splits_parameters(layout.mesh),  # each device draws its part of the noise
    )
    # `add_clipped` divided the losses by the scale.
    if recipe.rescales:
        mean = jax.tree.map(lambda x: (x * scale).astype(x.dtype), mean)
    extra = extra_arguments(recipe.optimizer, scale)
    updates, optimizer = recipe.optimizer.update(mean, state.optimizer, state.params, **extra)
    # The step counter moves with the release: draw and noise of the next step follow from it.
    after = state._replace(
        params=optax.apply_updates(state.params, updates),
        optimizer=optimizer,
        bound_scale=next_bound_scale,
        step=state.step + 1,
        memory=memory,
    )
    return after, seen
