# SPDX-License-Identifier: Apache-2.0
"""The sums of a step over its draw, and the measurements that an observer sees.

Everything in this file is computed **before** the noise, so it is private.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Float, Int

from dpjax import trees
from dpjax.gradients.batching import Layout, Total
from dpjax.mechanism import Mechanism
from dpjax.types import PyTree


class Seen(NamedTuple):
    """The sums of a step in addition to gradients, **before** any noise: all are secret."""

    losses: Float[Array, ""]
    scored: Int[Array, ""]
    """The number of summed losses. A loss may be NaN although its gradient is finite."""
    norms: Float[Array, " groups"]
    over: Float[Array, " groups"]
    below: Float[Array, ""]
    """The count that an adapted bound follows; 0 if no bound is adapted."""
    drawn: Int[Array, ""]
    working: Int[Array, ""]
    """Drawn rows that hold at least one example."""
    dropped: Int[Array, ""]
    examples: Int[Array, ""]


class Sums(NamedTuple):
    """All sums of a step over its draw; secret."""

    gradients: Total
    seen: Seen


def nothing_seen(mechanism: Mechanism) -> Seen:
    """The sums over no examples, without gradients; the mechanism's rule has the groups."""
    zero = jnp.zeros((), jnp.float32)
    of_groups = jnp.zeros(len(mechanism.clipping.bounds), jnp.float32)
    no_examples = jnp.zeros((), jnp.int32)
    return Seen(
        losses=zero,
        scored=no_examples,
        norms=of_groups,
        over=of_groups,
        below=zero,
        drawn=no_examples,
        working=no_examples,
        dropped=no_examples,
        examples=no_examples,
    )


def no_sums(mechanism: Mechanism, params: PyTree, layout: Layout) -> Sums:
    """The sums over no examples."""
    gradients = Total.none(trees.zeros_wide(params), mechanism.sampling.usual_size, layout)
    return Sums(gradients, nothing_seen(mechanism))


class Info(NamedTuple):
    """Measurements of a step, **before** any noise: look at them, do not publish them."""

    loss: Float[Array, ""]
    """Mean loss of the drawn examples that counted and have a finite loss; NaN if none."""
    examples: Int[Array, ""]
    """How many examples, or people, were drawn."""
    dropped: Int[Array, ""]
    """How many drawn examples contributed zero because their gradient was not finite."""
    norm: Float[Array, " groups"]
    """Mean gradient norm per group before clipping, over the examples that counted."""
    clipped: Float[Array, " groups"]
    """Fraction of the drawn examples with a norm above the bound, per group."""


def warn_of_unscored(name: str, seen: Seen) -> bool:
    """Warns of examples without a finite loss, and returns whether there are any."""
    counted = int(np.sum(seen.working - seen.dropped))
    unscored = counted - int(np.sum(seen.scored))
    if unscored:
        logging.warning(
            "%s: %d of %d examples have a finite gradient and a loss that is not finite. Check "
            "their labels: 0 to K-1.",
            name,
            unscored,
            counted,
        )
    return unscored > 0


def mean_info(seen: Seen) -> Info:
    """The means of steps, ``[steps, ...]``, from their sums."""
    # NumPy divides, because the means of an empty draw are NaN, at which `jax_debug_nans` raises.
    seen = jax.tree.map(np.asarray, seen)
    # Dropped examples contributed zero to the sum, so the means of loss and norm leave them out.
    # The fraction of clipped ones is of all examples, because an infinite norm is above the bound.
    counted = seen.working - seen.dropped
    with np.errstate(divide="ignore", invalid="ignore"):
        loss: Any = np.float32(seen.losses / seen.scored)
        norm: Any = np.float32(seen.norms / counted[:, None])
        clipped: Any = np.float32(seen.over / seen.working[:, None])
    return Info(
        loss=loss,
        examples=seen.drawn,
        dropped=seen.dropped,
        norm=norm,
        clipped=clipped,
    )
