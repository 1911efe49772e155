# SPDX-License-Identifier: Apache-2.0
"""Random numbers for tests, by NumPy: JAX compiles its generator anew for every shape.

A shape costs it most of a second where nothing is cached, which was more than the tests
themselves took.
"""

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=0, scale=1.0):
    """Normal numbers; those of another shape are others."""
    random = np.random.default_rng([seed, *shape])
    return jnp.asarray(scale * random.normal(size=shape), jnp.float32)


def parameters(module, *inputs, seed=1):
    """What a Linen module might begin with; also its biases are not zero, and scales not one."""

    def leaf(path, like):
        fan_in = np.prod(like.shape[:-1]) if like.ndim > 1 else 100
        drawn = normal(*like.shape, seed=seed, scale=fan_in**-0.5)
        return drawn + ("scale" in jax.tree_util.keystr(path[-1:]))

    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]
    return jax.tree_util.tree_map_with_path(leaf, shapes)
