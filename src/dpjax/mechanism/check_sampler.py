# SPDX-License-Identifier: Apache-2.0
"""What can be seen of a sampler's draws without drawing: whether they differ at all.

This file must never know who is drawn.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var

from dpjax.types import Sampler


def check_draw(sampler: Sampler) -> None:
    """Refuses a sampler whose batch is the same at every step, whatever its event says."""
    key = jax.random.key(0, impl="threefry2x32")
    program = jax.make_jaxpr(sampler.draw)(key, jnp.int32(0)).jaxpr
    moved = _among(program.outvars[0], _reached(program))
    if sampler.batch_size < sampler.examples and not moved:
        raise ValueError(
            f"the indices that sampler {sampler.name!r} draws follow neither from its key "
            "nor from the step, so that every step would see the same examples, and those would "
            "pay for all. Usually they were drawn with NumPy, which is asked once, when the step "
            "is compiled: draw with jax.random, from trees.step_key(key, Purpose.SAMPLING, step)."
        )


def _reached(program: Jaxpr) -> set[Var]:
    """What of a program follows from its inputs."""
    moved = set(program.invars)
    for equation in program.eqns:
        if any(_among(v, moved) for v in equation.invars):
            moved |= set(equation.outvars)
    return moved


def _among(v: Any, some: set[Var]) -> bool:
    return not isinstance(v, Literal) and v in some
