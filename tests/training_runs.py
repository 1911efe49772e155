# SPDX-License-Identifier: Apache-2.0
"""Short runs of `dpsgd` for tests, which name only the arguments that matter to them."""

import jax
import jax.numpy as jnp
import optax
from small_mechanisms import mechanism_with

import dpjax

DATA = jnp.ones((50, 3))


def loss(w, x):
    return 0.5 * jnp.sum((w - x) ** 2)


def make(steps=20, multiplier=1.0, optimizer=None, batch=10, **options):
    mechanism = mechanism_with(50, batch, noise_multiplier=multiplier, steps=steps)
    return algorithm_with(mechanism, optimizer=optimizer, **options)


def algorithm_with(mechanism=None, data=DATA, loss=loss, optimizer=None, **options):
    """Steps of `dpsgd` by SGD, with the mechanism of `make` unless another is given."""
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    return dpjax.dpsgd(loss, optimizer, mechanism or mechanism_with(), data, **options)


def start(algorithm, seed=0):
    return algorithm.init(jnp.zeros(3), None if seed is None else jax.random.key(seed))


def first_step(algorithm):
    return algorithm.step(start(algorithm))


def fit(algorithm, state=None, *, progress=False, **options):
    """Quietly, and from the beginning unless a state is given."""
    state = start(algorithm) if state is None else state
    return dpjax.fit(algorithm, state, progress=progress, **options)
