# SPDX-License-Identifier: Apache-2.0
"""One private step, on one page: draw, clip, sum | noise, mean, update.

`private_step` is Algorithm 1 of Abadi et al. (2016), line by line; a stream on disk runs the same
three parts with the host between them. `release` alone turns a sum into parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from dpjax import meshes, trees
from dpjax.gradients.batching import Layout, join, settled, sum_over
from dpjax.gradients.clipped_grad import clipped_sum
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
from dpjax.types import Purpose, PyTree, State


def private_step(
    recipe: Recipe, data: PyTree, state: State, shared: PyTree = None
) -> tuple[State, Seen]:
    """One step on rows on the device; `Seen` is secret. ``shared`` as for `assemble`."""
    # line 3: sample
    draw, epoch_key = recipe.mechanism.sampling.drawn(
        state.key, state.noise_key, state.epoch_key, state.step
    )
    state = state._replace(epoch_key=epoch_key)
    layout = layout_of(bound_to(recipe, shared), state.params, trees.one_row(data))
    zero = no_sums(recipe.mechanism, state.params, layout)

    def add(held: Any, rows: PyTree, mask: Bool[Array, "size ..."], sums: Sums) -> Sums:
        before, arrays = held
        return add_clipped(bound_to(recipe, arrays), before, rows, mask, sums)

    # lines 4 and 5: per-example gradients, clipped and summed; secret up to here
    held = without_optimizer(state), shared
    sums = sum_over(add, zero, layout, draw, data, held, end_block)
    return release(recipe, layout, state, sums)  # lines 6 and 7: noise, mean, update


def without_optimizer(state: State) -> State:
    """What clipping reads of a state: neither the optimizer's part nor the memory of the noise."""
    # Every device receives all of what it gets here, and a mesh may split what is left out.
    return state._replace(optimizer=None, memory=())


def add_clipped(
    recipe: Recipe, state: State, rows: PyTree, mask: Bool[Array, "size ..."], sums: Sums
) -> Sums:
    """Adds the clipped gradients of one microbatch to the sums."""
    rule, adaptive, loss = recipe.mechanism.clipping, recipe.mechanism.adaptive, recipe.loss
    # Clipping the gradient of loss / scale to the bound and multiplying the mean by the scale is
    # clipping to bound * scale. The noise does not depend on the scale, nor does the accounting.
    scale = recipe.bound_scale(state)
    scaled = (lambda p, x: loss(p, x) / scale) if recipe.rescales else loss
    # A client without examples is masked: it has no update, and a mean over none would be NaN.
    examples = with_entry(recipe.entry, state.key, state.step, rows, mask.shape)
    if recipe.mechanism.sampling.most_rows is not None:
        # A person is one example of the engine: its rows, and which of them were drawn.
        examples = examples, mask
    sizes = jnp.sum(mask, axis=tuple(range(1, mask.ndim)), dtype=jnp.int32)
    mask = sizes > 0
    if recipe.sizes is not None:
        sizes = jnp.where(mask, recipe.sizes(rows), 0)
    real = sizes > 0
    directions = trees.step_key(state.noise_key, Purpose.PROJECTIONS, state.step)
    weights = weights_of(recipe, state, examples)
    microbatch = (state.params, examples, real, weights, directions)
    start = sums.gradients.block
    part = clipped_sum(recipe.name, scaled, rule, recipe.engine, *microbatch, start=start)
    finite = jnp.all(jnp.isfinite(part.norms), axis=1)
    # A non-finite example contributed zero to the sum: it is left out of the means.
    scored = real & finite & jnp.isfinite(part.losses)
    losses, norms = jnp.where(scored, part.losses, 0), jnp.where(finite[:, None], part.norms, 0)
    below = adaptive.below(rule, part.norms, real) if adaptive else jnp.zeros((), jnp.float32)
    more = Seen(
        losses=jnp.sum(losses, dtype=jnp.float32) * scale,
        scored=jnp.sum(scored, dtype=jnp.int32),
        norms=jnp.sum(norms, axis=0, dtype=jnp.float32) * scale,
        over=jnp.sum(part.norms > jnp.asarray([rule.bounds]), axis=0, dtype=jnp.float32),
        below=below,
        drawn=jnp.sum(mask, dtype=jnp.int32),
        working=jnp.sum(real, dtype=jnp.int32),
        dropped=jnp.sum(real & ~finite, dtype=jnp.int32),
        examples=jnp.sum(sizes, dtype=jnp.int32),
    )
    return Sums(sums.gradients._replace(block=part.value), jax.tree.map(jnp.add, sums.seen, more))


def end_block(sums: Sums) -> Sums:
    """The sums after a block of microbatches; see `dpjax.gradients.batching.Total`."""
    return sums._replace(gradients=settled(sums.gradients))


def release(recipe: Recipe, layout: Layout, state: State, sums: Sums) -> tuple[State, Seen]:
    """The next state, from sums with one entry per share of the batch; `Seen` is secret."""
    # Two parts, until the noise is added: one array would round the sum of a million examples by
    # more than a twentieth of a bound.
    total, lost, seen = join(sums.gradients, sums.seen, layout, reach_of(recipe, state.params))
    scale = recipe.bound_scale(state)
    mean, bound_scale, memory = private_mean(  # line 6
        recipe.mechanism,
        total,
        state.noise_key,
        state.step,
        memory=state.memory,
        lost=lost,
        bound_scale=state.bound_scale,
        below=seen.below,
        in_parts=meshes.splits_parameters(layout.mesh),
    )
    if recipe.rescales:
        mean = jax.tree.map(lambda x: (x * scale).astype(x.dtype), mean)
    extra = extra_arguments(recipe.optimizer, scale)
    updates, optimizer = recipe.optimizer.update(mean, state.optimizer, state.params, **extra)
    # The step counter moves with the release: draw and noise of the next step follow from it.
    after = state._replace(
        params=optax.apply_updates(state.params, updates),
        optimizer=optimizer,
        bound_scale=bound_scale,
        step=state.step + 1,
        memory=memory,
    )
    return after, seen
