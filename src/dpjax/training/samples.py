# SPDX-License-Identifier: Apache-2.0
"""Posterior samples: parameters kept during a run, and predictions averaged over them.

The guarantee covers all parameters of a run together: releasing many samples costs no more than
releasing the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dpjax import checks
from dpjax.training.averaging import link_of
from dpjax.types import PyTree


class SamplesState(NamedTuple):
    """A ring buffer of samples."""

    ring: PyTree
    """The parameters' tree, each leaf ``[count, ...]``; sample i is in slot i mod count."""
    taken: Int[Array, ""]
    """How many samples were written, including overwritten ones."""
    step: Int[Array, ""]


def keep_samples(
    count: int, *, burn_in: int = 0, every: int = 1
) -> optax.GradientTransformationExtraArgs:
    """Keeps the last ``count`` samples of the parameters; updates pass through unchanged.

    Put this link at the end of a chain; `samples` reads them.

    Args:
      count: How many samples to keep; each takes the memory of the parameters.
      burn_in: Steps before the first sample: the way from the start to the posterior.
      every: Steps between samples, because neighbouring steps are nearly equal.

    Privacy:
      Post-processing of private parameters: free.

    Example:
      >>> optimizer = optax.chain(optax.sgd(1.0), keep_samples(2, burn_in=1, every=2))
      >>> params = jnp.zeros(())
      >>> state = optimizer.init(params)
      >>> for _ in range(8):
      ...     updates, state = optimizer.update(jnp.array(-1.0), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> samples(state).tolist()
      [5.0, 7.0]
    """
    call = "training.keep_samples"
    count = checks.whole(call, "count", count)
    burn_in = checks.whole(call, "burn_in", burn_in, least=0)
    every = checks.whole(call, "every", every)

    def init(params: PyTree) -> SamplesState:
        # A ring takes the memory of `count` models, however long the run is.
        ring = jax.tree.map(lambda x: jnp.zeros((count, *jnp.shape(x)), jnp.result_type(x)), params)
        return SamplesState(ring, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: Any, params: Any = None, **extra: Any
    ) -> tuple[PyTree, SamplesState]:
        step = state.step + 1
        keep = (step > burn_in) & ((step - burn_in) % every == 0)
        slot = state.taken % count

        def write(ring: Array, after: Array) -> Array:
            # Every step writes its slot, with the old value if it keeps no sample. A branch instead
            # needs memory for a second ring.
            return ring.at[slot].set(jnp.where(keep, after.astype(ring.dtype), ring[slot]))

        ring = jax.tree.map(write, state.ring, optax.apply_updates(params, updates))
        return updates, SamplesState(ring, state.taken + keep.astype(jnp.int32), step)

    return optax.GradientTransformationExtraArgs(init, update)


def samples(state: Any) -> PyTree:
    """The samples inside the state of an optimizer or of a run, which must not be traced.

    They are the parameters' tree, each leaf ``[samples, ...]``, the oldest first.
    """
    sampled = link_of(state, SamplesState, "samples", "keep_samples(20)")
    taken = int(sampled.taken)
    size = jax.tree.leaves(sampled.ring)[0].shape[0]
    if taken == 0:
        raise ValueError(
            f"training.samples: the {int(sampled.step)} steps that ran kept no sample."
        )
    # The order is from the oldest to the newest. If the last step kept a sample, it comes last.
    order = jnp.arange(max(0, taken - size), taken) % size
    return jax.tree.map(lambda ring: ring[order], sampled.ring)


def predictive(
    logits: Callable[[PyTree, Any], Float[Array, "batch classes"]], samples: PyTree, inputs: Any
) -> Float[Array, "batch classes"]:
    r"""Log probabilities averaged over samples, which `dpjax.metrics` accepts as logits.

    $$ \log \frac{1}{S} \sum_{s=1}^{S} \mathrm{softmax}\, f(\theta_s, x) $$

    ``logits(params, inputs)`` is $f$ for one set of parameters and a batch; `samples` gives the
    parameters with a leading axis of samples.

    Privacy:
      Post-processing of private samples.

    Example:
      >>> sure_of_either = jnp.array([[[50.0, 0.0]], [[0.0, 50.0]]])
      >>> jnp.exp(predictive(lambda params, _: params, sure_of_either, None)).tolist()
      [[0.5, 0.5]]
    """
    # `map` holds the activations of one model at a time in memory.
    scores = jax.lax.map(lambda params: jax.nn.log_softmax(logits(params, inputs)), samples)
    return jax.nn.logsumexp(scores, axis=0) - math.log(scores.shape[0])
