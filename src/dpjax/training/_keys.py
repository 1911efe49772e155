# SPDX-License-Identifier: Apache-2.0
"""The keys of a run: which ones each start renews, and which ones checkpoints hold.

A noise key that `init` drew is renewed at each start of `fit` and never leaves memory. So if a
state and its copy both run, the difference of their releases has the noise of both. The key for
draws is renewed only if each step draws independently. Otherwise an example could be in two batches
of an epoch, or change its part of a cycle.

Bins follow from a third key, which belongs to the current epoch: checkpoints hold it, and a resumed
run keeps it to the end of the epoch. The next epoch takes its key from the noise key, so two runs
from one state share no later bins, and none if the state is at the beginning of an epoch.

A supplied key is never renewed. No file holds it; a checkpoint holds one byte of its hash.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dpjax import noise, processes, trees
from dpjax.mechanism import Mechanism
from dpjax.types import Key, State


def first_keys(key: Key | None) -> tuple[Key, Key]:
    """The keys for draws and for noise: two new ones, or the given one of the first process twice.

    All processes receive the same keys.
    """
    if key is None:
        return processes.shared_key(), processes.shared_key()
    words = jnp.asarray(processes.from_first(lambda: trees.on_host(key)))
    root = jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))
    return root, root


def renewed(state: State, mechanism: Mechanism) -> State:
    """The state with new keys, unless they were supplied; `fit` runs, shows and returns it."""
    if supplied(state):
        return state
    return noise.renew(without_secrets(state, mechanism))


def without_secrets(state: State, mechanism: Mechanism) -> State:
    """The state for a checkpoint, with zeros in place of the keys that no file may hold."""
    state = state._replace(noise_key=_zeros(state.noise_key))
    if supplied(state) or mechanism.sampling.independent:
        state = state._replace(key=_zeros(state.key))
    if supplied(state) and state.epoch_key is not None:
        state = state._replace(epoch_key=_zeros(state.epoch_key))
    return state


def with_supplied(saved: State, given: State, mechanism: Mechanism) -> State:
    """The state of a checkpoint with the keys of the given state, if they were supplied."""
    if not supplied(saved):
        return saved
    bins = mechanism.sampling.bins
    epoch_key = None
    if bins is not None:
        # The checkpoint has zeros here. The key of an epoch follows from the supplied noise key.
        epoch_key = bins.key(given.noise_key, saved.step)
    return saved._replace(key=given.key, noise_key=given.noise_key, epoch_key=epoch_key)


def supplied(state: State) -> bool:
    """Whether the caller supplied the key of the run, and so may know its noise."""
    return bool(state.ledger.supplied)


def _zeros(key: Key) -> Key:
    """The unset key, in the shape of ``key``: an ensemble has several."""
    return jax.random.wrap_key_data(jnp.zeros((*key.shape, 2), jnp.uint32), impl="threefry2x32")
