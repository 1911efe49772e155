# SPDX-License-Identifier: Apache-2.0
"""Many leaves in few arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from mutation import kills

from dpjax._packing import packed, unpacked


@kills("_packing.py", "found[i] = piece", "found[places[0]] = piece")
def test_what_was_packed_is_unpacked():
    """Small leaves of a dtype are one array, wherever they stand; large ones stay as they are."""
    large = jnp.ones((2**7, 2**7 + 1))
    tree = {
        "a": jnp.arange(6.0).reshape(2, 3),
        "b": large,
        "c": jnp.zeros((0, 4)),
        "d": jnp.float32(7),
        "e": jnp.arange(4, dtype=jnp.bfloat16),
    }
    arrays = packed(tree)
    assert [x.shape for x in arrays] == [(7,), large.shape, (4,)]
    back = unpacked(arrays, tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, tree)
