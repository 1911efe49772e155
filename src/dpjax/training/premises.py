# SPDX-License-Identifier: Apache-2.0
"""What a run takes for granted, looked at before it begins.

Data as many as are accounted, bounds that stay positive, leaves that have a gradient.  What is
private is not looked at, only its shape.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from absl import logging
from jax.extend.core import Literal

from dpjax import schedules, trees
from dpjax.data import Stream
from dpjax.gradients.clipped import check_loss
from dpjax.mechanism import Mechanism
from dpjax.types import LossFn, PyTree, Schedule

__all__ = [
    "check_data",
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


def tell_of_idle(loss: LossFn, params: PyTree, example: PyTree) -> None:
    """Says which leaves have no gradient: they are given noise all the same.

    Args:
      loss: ``loss(params, example) -> scalar``.
      params: Parameters.
      example: Shapes of one example.
    """
    check_loss(lambda p, x: (loss(p, x), None), params, example)
    program = jax.make_jaxpr(jax.grad(loss))(params, example).jaxpr
    zeros = [
        equation.outvars[0]
        for equation in program.eqns
        if equation.primitive.name == "broadcast_in_dim" and _is_zero(equation.invars[0])
    ]
    names = zip(trees.leaf_names(params), program.outvars, strict=True)
    idle = [
        name or "(the array)"
        for name, v in names
        if _is_zero(v) or any(v is zero for zero in zeros)
    ]
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
