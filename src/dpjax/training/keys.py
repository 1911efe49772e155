# SPDX-License-Identifier: Apache-2.0
"""The keys of a run: what each start renews, and what checkpoints hold.

A noise key that `init` drew is renewed at each start of `fit` and never leaves memory, so the
difference of what a state and its copy release is never free of noise. The key for draws is renewed
where steps draw independently: an example must not be in two batches of an epoch, nor change its
part of a cycle. A supplied key is never renewed, and no file holds it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dpjax import noise, processes, trees
from dpjax.mechanism import Mechanism
from dpjax.noise.state import shared_key
from dpjax.types import Key, State


def first_keys(key: Key | None) -> tuple[Key, Key]:
    """The keys for draws and for noise: two secret ones, or the first process's given one twice."""
    if key is None:
        return shared_key(), shared_key()
    words = jnp.asarray(processes.from_first(lambda: trees.on_host(key)))
    root = jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))
    return root, root


def renewed(state: State, mechanism: Mechanism) -> State:
    """The state with keys from which nothing was drawn: to run, to return, and to show."""
    return state if supplied(state) else noise.renew(without_secrets(state, mechanism))


def without_secrets(state: State, mechanism: Mechanism) -> State:
    """The state for a checkpoint: zeros in place of each key that a start renews or is given."""
    state = state._replace(noise_key=_zeros(state.noise_key))
    forgets = supplied(state) or mechanism.sampling.independent
    return state._replace(key=_zeros(state.key)) if forgets else state


def with_supplied(saved: State, given: State) -> State:
    """The state of a checkpoint with the keys of the given state, if they were supplied."""
    if not supplied(saved):
        return saved
    return saved._replace(key=given.key, noise_key=given.noise_key)


def supplied(state: State) -> bool:
    """Whether the caller supplied the key of the run, and may so know its noise."""
    return bool(state.ledger.supplied)


def _zeros(key: Key) -> Key:
    """The unset key, or as many as an ensemble has."""
    return jax.random.wrap_key_data(jnp.zeros((*key.shape, 2), jnp.uint32), impl="threefry2x32")
