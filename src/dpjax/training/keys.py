# SPDX-License-Identifier: Apache-2.0
"""The keys of a run: what each start renews, and what checkpoints hold.

A noise key that `init` drew is renewed at each start of `fit` and never leaves memory. So a forked
state, a copied folder, a second `fit` from one state, or a resume with another loss have other
noise: honest releases, whose difference is never free of noise. The key for draws is renewed too
where steps draw independently. Otherwise it is kept: an example must not be in two batches of an
epoch, nor change its part of a cycle.

A key that the caller supplied is never renewed, and no file holds it: the caller gives it again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dpjax import noise, processes, trees
from dpjax.noise.link import with_noise_keys
from dpjax.types import Key, State


def first_keys(key: Key | None) -> list[Key]:
    """The keys for draws and for noise of a new run: two secret ones, or the given one twice.

    All processes have those of the first process.
    """
    impl = "threefry2x32" if key is None else jax.random.key_impl(key)
    roots = [noise.secret_key(), noise.secret_key()] if key is None else [key, key]
    words = processes.from_first(lambda: [trees.on_host(root) for root in roots])
    return [jax.random.wrap_key_data(jnp.asarray(x), impl=impl) for x in words]


def renewed(state: Any, mechanism: Any) -> Any:
    """The state with keys from which nothing was drawn: to run, to return, and to show."""
    if supplied(state):
        return state
    state = noise.renew(state)
    again = _draws_again(state, mechanism)
    return state._replace(key=noise.renew(state).noise_key) if again else state


def without_secrets(state: Any, mechanism: Any) -> Any:
    """The state for a checkpoint: zeros in place of each key that a start renews or is given."""
    if supplied(state) and not isinstance(state, State):
        return state  # of an algorithm of the user's own, whose keys are unknown
    state = with_noise_keys(state, bytes)
    forgets = supplied(state) or _draws_again(state, mechanism)
    return state._replace(key=state.noise_key) if forgets else state


def with_supplied(saved: Any, given: Any) -> Any:
    """The state of a checkpoint with the keys of the given state, if they were supplied."""
    if not (supplied(saved) and isinstance(saved, State)):
        return saved
    return saved._replace(key=given.key, noise_key=given.noise_key)


def supplied(state: Any) -> bool:
    """Whether the caller supplied the key of the run, and may so know its noise."""
    return bool(state.ledger.supplied)


def _draws_again(state: Any, mechanism: Any) -> bool:
    sampling = getattr(mechanism, "sampling", None)  # which a plan of the user's own may lack
    return isinstance(state, State) and getattr(sampling, "independent", False)
