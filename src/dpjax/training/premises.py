# SPDX-License-Identifier: Apache-2.0
"""What a run takes for granted, looked at before it begins.

Data as many as are accounted, draws that differ from step to step, parameters that can be
trained.  What is private is not looked at, only its shape.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.extend.core import Jaxpr, Literal, Var

from dpjax import schedules, trees
from dpjax.data import Stream
from dpjax.gradients.clipped import check_loss
from dpjax.mechanism import Mechanism
from dpjax.types import LossFn, PyTree, Sampler, Schedule

__all__ = [
    "check_data",
    "check_draw",
    "check_microbatch",
    "check_params",
    "check_schedule",
    "tell_of_idle",
]


def check_schedule(bound_schedule: Schedule | None, mechanism: Mechanism) -> None:
    """Refuses a schedule that is not positive at every planned step."""
    if bound_schedule is not None and mechanism.adaptive is not None:
        raise ValueError(
            "dpsgd(bound_schedule=...): the mechanism's bounds are adapted, so they follow the "
            "gradients and no schedule. Leave one of the two out."
        )
    scales = schedules.values(bound_schedule, mechanism.steps) if bound_schedule else np.ones(1)
    if not np.all((scales > 0) & np.isfinite(scales)):
        raise ValueError(
            "dpsgd(bound_schedule=...): expected positive numbers at all planned steps; at step "
            f"{int(np.argmin((scales > 0) & np.isfinite(scales)))} it is not one. It multiplies "
            "the bounds of the rule; to silence a step, leave it out of the plan."
        )


def check_data(data: PyTree, mechanism: Mechanism, per_step: Any) -> None:
    """Refuses data of another size than is accounted."""
    row = data.row if isinstance(data, Stream) else data
    if per_step is not None and not isinstance(row, tuple):
        raise TypeError(
            f"dpsgd(per_step=...): the data are a {type(row).__name__}; expected a tuple, such as "
            "(x, y), to every example of which the step's entry is added: (x, y, per_step(step)). "
            "For a single array write (x,)."
        )
    expected = mechanism.sampling.examples
    size = len(data) if isinstance(data, Stream) else trees.leading_size(data, name="dpsgd data")
    if size != expected:
        raise ValueError(
            f"dpsgd: the data hold {size} examples, the mechanism's sampler {expected}; the "
            "sampling rate would not be what is accounted. Build the sampler from this "
            f"data set: dpjax.sampling.poisson(examples={size}, batch_size=...)."
        )


def check_draw(sampler: Sampler) -> None:
    """Refuses a sampler whose batch is the same at every step, whatever its event says."""
    key = jax.random.key(0, impl="threefry2x32")
    program = jax.make_jaxpr(sampler.draw)(key, jnp.int32(0)).jaxpr
    moved = _among(program.outvars[0], _reached(program))
    if sampler.batch_size < sampler.examples and not moved:
        raise ValueError(
            f"dpsgd: the indices that sampler {sampler.name!r} draws follow neither from its key "
            "nor from the step, so that every step would see the same examples, and those would "
            "pay for all. Usually they were drawn with NumPy, which is asked once, when the step "
            "is compiled: draw with jax.random, from trees.step_key(key, Purpose.SAMPLING, step)."
        )


def check_microbatch(name: str, size: int | None) -> None:
    """Refuses what is no size of a microbatch."""
    if size is not None and (isinstance(size, bool) or size % 1 or size < 1):
        raise ValueError(
            f"{name}(microbatch_size={size}): expected a whole number of examples, at least 1, "
            "or None for what fits."
        )


def check_params(params: PyTree) -> None:
    """Refuses leaves that no gradient has."""
    for name, leaf in zip(trees.leaf_names(params), jax.tree.leaves(params), strict=True):
        kind = getattr(leaf, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.inexact):
            raise TypeError(
                f"dpsgd: init(key, params): leaf {name or '(the array)'} is "
                f"{type(leaf).__name__ if kind is None else kind}; expected arrays of real "
                "floating-point numbers. Usually a Python number, a counter or a key sits among "
                "the parameters: close the loss over it, or write jnp.asarray(x, jnp.float32)."
            )


def tell_of_idle(loss: LossFn, params: PyTree, example: PyTree) -> None:
    """Says which leaves have no gradient: they are given noise all the same.

    Args:
      loss: ``loss(params, example) -> scalar``.
      params: Parameters.
      example: Shapes of one example.
    """
    check_loss(lambda p, x: (loss(p, x), None), params, example)
    program = jax.make_jaxpr(jax.grad(loss))(params, example).jaxpr
    zeros: set[Var] = set()
    for equation in program.eqns:
        if equation.primitive.name == "broadcast_in_dim" and _is_zero(equation.invars[0]):
            zeros |= set(equation.outvars)
    names = zip(trees.leaf_names(params), program.outvars, strict=True)
    idle = [name or "(the array)" for name, v in names if _is_zero(v) or _among(v, zeros)]
    if idle:
        logging.warning(
            "dpsgd: %d of %d leaves have no gradient (%s%s). They are given noise like all others, "
            "and wander. Usually they are frozen by stop_gradient, or not used: close the loss "
            "over what is not trained, and it gets no noise.",
            len(idle),
            len(program.outvars),
            ", ".join(idle[:3]),
            ", ..." if len(idle) > 3 else "",
        )


def _is_zero(v: Any) -> bool:
    return isinstance(v, Literal) and np.ndim(v.val) == 0 and v.val == 0


def _reached(program: Jaxpr) -> set[Var]:
    """What of a program follows from its inputs."""
    moved = set(program.invars)
    for equation in program.eqns:
        if any(_among(v, moved) for v in equation.invars):
            moved |= set(equation.outvars)
    return moved


def _among(v: Any, some: set[Var]) -> bool:
    return not isinstance(v, Literal) and v in some
