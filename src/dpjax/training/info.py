# SPDX-License-Identifier: Apache-2.0
"""What a step sums over its draw, and what an observer sees of these sums.

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
from dpjax.gradients.batching import Layout, Total, no_total
from dpjax.mechanism import Mechanism
from dpjax.types import PyTree


class Seen(NamedTuple):
    """What a step sums beside gradients, **before** any noise: all of it is secret."""

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


class Sums(NamedTuple):
    """All that a step has summed over its draw; secret."""

    gradients: Total
    seen: Seen


def nothing_seen(mechanism: Mechanism) -> Seen:
    """The sums over no examples, without gradients; the mechanism's rule has the groups."""
    groups = jnp.zeros(len(mechanism.clipping.bounds), jnp.float32)
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    counts = dict.fromkeys(("scored", "drawn", "working", "dropped", "examples"), none)
    return Seen(losses=zero, norms=groups, over=groups, below=zero, **counts)


def no_sums(mechanism: Mechanism, params: PyTree, layout: Layout) -> Sums:
    """The sums over no examples."""
    gradients = no_total(trees.zeros_wide(params), mechanism.sampling.usual_size, layout)
    return Sums(gradients, nothing_seen(mechanism))


class Info(NamedTuple):
    """What a step saw, **before** any noise: look at it, do not publish it."""

    loss: Float[Array, ""]
    """Mean loss of the drawn examples that counted and have a finite loss; NaN if none."""
    examples: Int[Array, ""]
    """How many examples, or people, were drawn."""
    dropped: Int[Array, ""]
    """How many of them contributed zero because their gradient was not finite."""
    norm: Float[Array, " groups"]
    """Mean gradient norm per group before clipping, over the examples that counted."""
    clipped: Float[Array, " groups"]
    """Fraction of the drawn examples with a norm above the bound, per group."""


def warn_of_unscored(name: str, seen: Seen) -> bool:
    """Warns of examples without a finite loss, and returns whether there are any."""
    counted = int(np.sum(seen.working - seen.dropped))
    if unscored := counted - int(np.sum(seen.scored)):
        logging.warning(
            "%s: %d of %d examples have a finite gradient and a loss that is not finite. Check "
            "their labels: 0 to K-1.",
            name,
            unscored,
            counted,
        )
    return unscored > 0


def mean_info(seen: Seen) -> Info:
    """The means of steps, ``[steps, ...]``, from what they saw."""
    # By NumPy: an empty draw is lawful and has none, and `jax_debug_nans` would end the run.
    seen = jax.tree.map(np.asarray, seen)
    # Dropped examples contributed zero to the sum, so the means leave them out too.
    counted = seen.working - seen.dropped
    with np.errstate(divide="ignore", invalid="ignore"):
        means: dict[str, Any] = {
            "loss": np.float32(seen.losses / seen.scored),
            "norm": np.float32(seen.norms / counted[:, None]),
            "clipped": np.float32(seen.over / seen.working[:, None]),
        }
    return Info(examples=seen.drawn, dropped=seen.dropped, **means)
