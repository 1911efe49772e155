# SPDX-License-Identifier: Apache-2.0
"""Samplers whose batches are disjoint in an epoch: `shuffled` and `curriculum`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax import trees
from dpjax.sampling.events import stated
from dpjax.sampling.sizes import checked_whole_sizes, is_sparse
from dpjax.sampling.sparse import LARGEST, permuted
from dpjax.types import Draw, Key, Neighbours, Purpose, Sampler


def shuffled(examples: int, batch_size: int) -> Sampler:
    """A fresh shuffle every epoch, cut into batches; the remainder of an epoch is skipped.

    For small batches of large data sets the shuffle is a pseudo-random permutation (a Feistel
    network) that is computed for the indices of one batch. No proof needs it to be uniform.

    Privacy:
      Shuffling is *not* Poisson sampling; the Poisson epsilon claims too much for it. The
      proved event, for zero-out neighbours: an example is in at most one batch an epoch, so
      each epoch is one Gaussian with the epoch's smallest multiplier, without amplification.
      `random_allocation` trains in epochs at about the epsilon of Poisson sampling.

    Example:
      >>> sampler, key = shuffled(examples=6, batch_size=3), jax.random.key(0)
      >>> epoch = [sampler.draw(key, step).indices for step in (0, 1)]
      >>> sorted(jnp.concatenate(epoch).tolist())
      [0, 1, 2, 3, 4, 5]
    """
    examples, batch_size = checked_whole_sizes("shuffled", examples, batch_size)

    if is_sparse(examples, batch_size):
        kind = "pseudo-randomly shuffled"
        # With n batches in an epoch, batch t has the examples at t, t + n, t + 2n, ... of the
        # permutation. These are int64 constants plus an int32, because JAX has no int64 by default.
        places = np.arange(batch_size) * (examples // batch_size)

        def batch(key: Key, epoch: Any, number: Any) -> Array:
            key = trees.step_key(key, Purpose.SAMPLING, epoch)
            return permuted(key, examples, places, number)
    else:
        kind = "shuffled"

        # Every step shuffles the whole data set again, because a cached order is state.
        def batch(key: Key, epoch: Any, number: Any) -> Array:
            order = jax.random.permutation(trees.step_key(key, Purpose.SAMPLING, epoch), examples)
            return jax.lax.dynamic_slice_in_dim(order, number * batch_size, batch_size)

    return _epochs(
        "shuffled",
        examples,
        batch_size,
        batch,
        f"{kind} batches; no amplification is proved: one Gaussian an epoch",
        place="any",  # each epoch has an example in another step
    )


def curriculum(
    order: Sequence[int] | np.ndarray, batch_size: int, *, public: bool = False
) -> Sampler:
    """Identical batches in identical order every epoch, for example easy examples first.

    Args:
      order: A permutation of the examples.
      batch_size: Examples a step; the remainder of an epoch is skipped.
      public: Whether the order was fixed *without the private data*, for example by public dates
        or names of files.

    Privacy:
      An order computed from the private data, also by a public scorer, is itself a release without
      noise: with another score of one example, all examples between its two places move, so epsilon
      is infinite. For scores there is `scored`. A public order has the event of `shuffled`.

    Example:
      >>> sampler = curriculum([2, 0, 3, 1], batch_size=2, public=True)
      >>> [sampler.draw(jax.random.key(0), step).indices.tolist() for step in (0, 1, 2)]
      [[2, 0], [3, 1], [2, 0]]
    """
    indices = np.asarray(order)
    if not np.array_equal(np.sort(indices), np.arange(indices.size)):
        raise ValueError(
            f"sampling.curriculum(order): expected every index from 0 to {indices.size - 1} once, "
            "as np.argsort(scores) gives."
        )
    _, batch_size = checked_whole_sizes("curriculum", indices.size, batch_size, LARGEST)
    fixed_order = jnp.asarray(indices, jnp.int32)
    claim = "the order comes from the private data without noise: not private"
    event = "none"  # its epsilon is infinite
    place = None
    if public:
        claim = "a public fixed order; no amplification is proved: one Gaussian an epoch"
        # Poisson sampling at rate 1: an example is in one step of each epoch, always the same step.
        event = "poisson"
        place = "same"

    def batch(key: Key, epoch: Any, number: Any) -> Array:
        return jax.lax.dynamic_slice_in_dim(fixed_order, number * batch_size, batch_size)

    return _epochs(
        "curriculum",
        indices.size,
        batch_size,
        batch,
        claim,
        event=event,
        place=place,
        fingerprint=trees.fingerprint(np.asarray(indices, np.int64)),
    )


def _epochs(
    name: str,
    examples: int,
    batch_size: int,
    batch: Callable[[Key, Any, Any], Array],
    claim: str,
    *,
    event: str = "poisson",
    place: str | None,
    fingerprint: str | None = None,
) -> Sampler:
    """A sampler whose batches are disjoint in an epoch.

    ``batch(key, epoch, number)`` gives the examples of a batch, ``[batch_size]``. ``event`` and
    ``place`` are as for `stated`, with an epoch as the cycle.
    """
    # A last, smaller batch has no place in a compiled step.
    steps = examples // batch_size
    # A step is an int32, so a longer epoch never ends, and the divisor must fit too.
    turn = min(steps, LARGEST)

    def draw(key: Key, step: Any) -> Draw:
        chosen = batch(key, step // turn, step % turn)
        return Draw(chosen, jnp.ones(batch_size, bool))

    return Sampler(
        name=name,
        capacity=batch_size,
        draw=draw,
        neighbours=Neighbours.ZERO_OUT,
        claim=claim,
        fingerprint=fingerprint,
        padded=False,
        published_as_poisson=True,
        **stated(examples, batch_size, event=event, cycle=steps, place=place),
    )
