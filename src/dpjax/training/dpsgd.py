# SPDX-License-Identifier: Apache-2.0
"""DP-SGD, for any loss and any Optax optimizer.

Read `step` from top to bottom: the ledger admits, the sampler draws, microbatches are
gathered and clipped and summed, noise is added once, the optimizer moves.  Each is one
call into the room that owns it; this file only joins them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from dpjax import ledger, trees
from dpjax.gradients import clipped_grad, layout
from dpjax.mechanism import Mechanism
from dpjax.types import Algorithm, ClippedSum, Draw, Key, LossFn, PyTree

__all__ = ["Info", "State", "dpsgd"]


class State(NamedTuple):
    """What the next step needs.

    Privacy: ``params`` may be released, and so may anything computed from them.  ``key``
    (also inside ``optimizer``) may not: who holds it can subtract the noise.
    """

    params: PyTree
    optimizer: PyTree
    key: Key
    ledger: ledger.Ledger


class Info(NamedTuple):
    """What a step saw, **before** any noise.

    Privacy: computed from private data without noise.  Look at it, do not publish it.
    """

    loss: Float[Array, ""]
    """Mean loss of the drawn examples; NaN for an empty draw."""
    examples: Int[Array, ""]
    """How many examples were drawn."""
    norm: Float[Array, " groups"]
    """Mean gradient norm per group, before clipping."""
    clipped: Float[Array, " groups"]
    """Fraction of the drawn examples whose norm is above the bound, per group."""


def dpsgd(
    loss: LossFn,
    optimizer: optax.GradientTransformation,
    mechanism: Mechanism,
    data: PyTree,
    engine: str = "auto",
    *,
    per_step: Callable[[Int[Array, ""]], PyTree] | None = None,
    microbatch_size: int | None = None,
    budget: ledger.Budget | None = None,
) -> Algorithm:
    """Differentially private stochastic gradient descent.

    Args:
      loss: ``loss(params, example) -> scalar`` for one example.
      optimizer: Any Optax optimizer; it receives private mean gradients.
      mechanism: What is run and accounted.
      data: A tree of arrays with a leading axis of ``mechanism.sampling.examples``.
      engine: How the clipped sum is computed; see `dpjax.clipped_grad`.  Speed only.
      per_step: For a loss that changes over time: what ``per_step(step)`` returns becomes a
        further entry of every example, ``(x, y)`` turning into ``(x, y, per_step(step))``.
        Steps count from 0 and go on where an earlier `fit` stopped.  It is traced: it
        returns an array or a tree of them, by arithmetic and ``jnp.where``, not by ``if``.
      microbatch_size: Examples on the chip at once; by default what fits.  Speed only.
      budget: A `dpjax.ledger.Budget` that no step may pass.

    Returns:
      An `Algorithm`: ``init(key, params) -> state``, ``step(state) -> (state, info)``.
      ``step`` is compiled inside; do not ``jit`` it, the ledger looks before each step.

    Privacy:
      ``state.params`` after n steps are private with ``ledger.epsilon`` of these steps.
      ``per_step`` costs nothing: it sees the number of the step, which is public, and no
      data; and whatever the loss makes of it, clipping bounds each example's gradient.

    Example:
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.poisson(examples=100, batch_size=10),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=1.0,
      ...     steps=5,
      ... )
      >>> loss = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
      >>> algorithm = dpsgd(loss, optax.sgd(0.1), mechanism, data=jnp.ones((100, 3)))
      >>> state = algorithm.init(dpjax.noise.secret_key(), jnp.zeros(3))
      >>> state, info = algorithm.step(state)
      >>> state.ledger.steps
      1

      A loss that asks for the epoch, here of 10 steps, as `dpjax.losses.composite` does:

      >>> loss = lambda w, example: (1 + example[1]) * jnp.sum((w - example[0]) ** 2)
      >>> data = (jnp.ones((100, 3)),)
      >>> algorithm = dpsgd(loss, optax.sgd(0.1), mechanism, data, per_step=lambda t: t // 10)
    """
    _check_data(data, mechanism, per_step)
    data = jax.tree.map(jnp.asarray, data)

    def init(key: Key, params: PyTree) -> State:
        noise_state = mechanism.privatize(key).init(params)
        return State(params, (noise_state, optimizer.init(params)), key, ledger.empty())

    def step(state: State) -> tuple[State, Info]:
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
            raise TypeError(
                "dpsgd.step: called inside a JAX transformation. The step is compiled "
                "already, and the ledger has to look before every one: call it directly."
            )
        spent = ledger.admit(state.ledger, mechanism, budget)
        params, moved, info = compiled(state.params, state.optimizer, state.key, data)
        return State(params, moved, state.key, spent), info

    @jax.jit
    def compiled(
        params: PyTree, optimizer_state: Any, key: Key, data: PyTree
    ) -> tuple[PyTree, Any, Info]:
        noise_state, inner = optimizer_state
        draw = mechanism.sampling.draw(key, noise_state.step)
        gather = _gather(data, per_step, noise_state.step)
        example = jax.eval_shape(gather, draw.size)  # one index gives one example
        usual = _usual_size(mechanism)
        size, devices = layout(
            lambda p, x: (loss(p, x), None),
            params,
            example,
            usual,
            engine,
            microbatch_size=microbatch_size,
        )
        clipped = clipped_grad(loss, mechanism.clipping, engine, size, devices=devices)
        summed, info = _sum_microbatches(clipped, mechanism, params, gather, draw, size * devices)
        mean, noise_state = mechanism.privatize(key).update(summed, noise_state)
        updates, inner = optimizer.update(mean, inner, params)
        return optax.apply_updates(params, updates), (noise_state, inner), info

    return Algorithm(init, step, mechanism, budget)


_PerStep = Callable[[Int[Array, ""]], PyTree] | None
_Gather = Callable[[Int[Array, "..."]], PyTree]


def _gather(data: PyTree, per_step: _PerStep, step: Int[Array, ""]) -> _Gather:
    """From rows of the data to a batch, with what this step adds to every example."""

    def gather(rows: Int[Array, "..."]) -> PyTree:
        return jax.tree.map(lambda x: x[rows], data)

    if per_step is None:
        return gather
    entry = jax.tree.map(jnp.asarray, per_step(step))

    def gather_and_add(rows: Int[Array, "..."]) -> PyTree:
        every = jax.tree.map(lambda x: jnp.broadcast_to(x, (*rows.shape, *x.shape)), entry)
        return (*gather(rows), every)

    return gather_and_add


def _sum_microbatches(
    clipped: Any,
    mechanism: Mechanism,
    params: PyTree,
    gather: _Gather,
    draw: Draw,
    size: int,
) -> tuple[PyTree, Info]:
    """The clipped sum of a draw of any size: a device loop with as many trips as it takes."""
    bounds = jnp.asarray(mechanism.clipping.bounds)
    # The list of indices is padded so that the last microbatch is never shifted back.
    indices = jnp.pad(draw.indices, (0, size))

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        start, total, losses, norms, over = carry
        rows = jax.lax.dynamic_slice_in_dim(indices, start, size)
        mask = start + jnp.arange(size) < draw.size
        part: ClippedSum = clipped(params, gather(rows), mask)
        return (
            start + size,
            jax.tree.map(jnp.add, total, part.value),
            losses + jnp.sum(part.losses, dtype=jnp.float32),
            norms + jnp.sum(part.norms, axis=0, dtype=jnp.float32),
            over + jnp.sum(part.norms > bounds, axis=0, dtype=jnp.float32),
        )

    nothing, zeros = jnp.zeros((), jnp.float32), jnp.zeros(bounds.shape, jnp.float32)
    first = (jnp.zeros((), jnp.int32), trees.zeros_wide(params), nothing, zeros, zeros)
    carry = jax.lax.while_loop(lambda carry: carry[0] < draw.size, body, first)
    _, total, losses, norms, over = carry
    count = draw.size
    return total, Info(losses / count, count, norms / count, over / count)


def _usual_size(mechanism: Mechanism) -> int:
    """The size that nearly every draw stays below."""
    sampler = mechanism.sampling
    mean, rate = sampler.batch_size, sampler.sampling_rate
    spread = (mean * (1 - rate)) ** 0.5 if sampler.capacity > mean else 0.0
    return max(1, min(sampler.capacity, -(-int(mean + 3 * spread) // 8) * 8))


def _check_data(data: PyTree, mechanism: Mechanism, per_step: _PerStep) -> None:
    if per_step is not None and not isinstance(data, tuple):
        raise TypeError(
            f"dpsgd(per_step=...): the data are a {type(data).__name__}; expected a tuple, such as "
            "(x, y), to every example of which the step's entry is added: (x, y, per_step(step)). "
            "For a single array write (x,)."
        )
    size, expected = trees.leading_size(data, name="dpsgd data"), mechanism.sampling.examples
    if size != expected:
        raise ValueError(
            f"dpsgd: the data hold {size} examples, the mechanism's sampler {expected}; the "
            "sampling rate would not be what is accounted. Build the sampler from this "
            f"data set: dpjax.sampling.poisson(examples={size}, batch_size=...)."
        )
