# SPDX-License-Identifier: Apache-2.0
"""Checks from a sampler's program, without drawing, that its draws differ between steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dpjax._jaxpr import depends
from dpjax.types import Sampler


def check_draw(sampler: Sampler) -> None:
    """Refuses a sampler whose batch is the same at every step, whatever its event says."""
    key = jax.random.key(0, impl="threefry2x32")
    # Traced and not drawn: NumPy's random numbers are constants of the program, which `depends`
    # sees.
    program = jax.make_jaxpr(sampler.draw)(key, jnp.int32(0)).jaxpr
    moved, *_ = depends(program, [True] * len(program.invars))
    if sampler.batch_size < sampler.examples and not moved:
        raise ValueError(
            f"The sampler {sampler.name!r} draws indices that depend neither on its key nor on the "
            "step, so every step would see the same examples, but the accounting assumes fresh "
            "draws. Usually the indices were drawn with NumPy, which runs once, when the step is "
            "compiled. Draw with jax.random, from trees.step_key(key, Purpose.SAMPLING, step)."
        )
