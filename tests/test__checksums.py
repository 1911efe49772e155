# SPDX-License-Identifier: Apache-2.0
"""Checksums of trees; `test_seals` has what a release may not repeat."""

import jax.numpy as jnp
import numpy as np
import pytest
from mutation import kills

from dpjax._checksums import checksum


@pytest.mark.sample(2)
@kills("_checksums.py", "math.prod(shape[axis + 1 :])", "math.prod(shape[axis:])", slow=True)
@kills("_checksums.py", "start += words.size", "start += 1", slow=True)
@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (2, 3, 4)])
def test_a_checksum_in_parts_has_the_same_bits(shape):
    """A mesh that splits parameters makes another program, and a run resumes without it."""
    tree = {"a": jnp.ones(2), "b": jnp.asarray(np.random.default_rng(0).normal(size=shape))}
    np.testing.assert_array_equal(checksum(tree), checksum(tree, in_parts=True))
