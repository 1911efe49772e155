# SPDX-License-Identifier: Apache-2.0
"""Checks from a sampler's program, without drawing, that its draws differ between steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._jaxpr import depends
from dpjax.accounting.event_parts import split
from dpjax.types import Sampler


def check_draw(call: str, sampler: Sampler) -> None:
    """Refuses a sampler whose batch is the same at every step, unless its event pays for that."""
    key = jax.random.key(0, impl="threefry2x32")
    # Traced and not drawn: NumPy's random numbers are constants of the program, which `depends`
    # sees.
    program = jax.make_jaxpr(sampler.draw)(key, jnp.int32(0)).jaxpr
    moved, *_ = depends(program, [True] * len(program.invars))
    # A batch that stays is sound where each step is paid for without amplification.
    parts = split(sampler.event(np.ones(2)))
    paid = not parts.sampled and not parts.foreign and parts.precision >= 2
    if sampler.batch_size < sampler.examples and not moved and not paid:
        raise ValueError(
            f"{call}: the sampler {sampler.name!r} draws indices that depend neither on its key "
            "nor on the step, so every step would see the same examples, but the accounting "
            "assumes fresh draws. Usually the indices were drawn with NumPy, which runs once, when "
            "the step is compiled. Draw with jax.random, from dpjax.trees.step_key(key, "
            "dpjax.types.Purpose.SAMPLING, step)."
        )
