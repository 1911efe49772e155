# SPDX-License-Identifier: Apache-2.0
"""The white-box audit of one step: how far one row moves what is released."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpjax
from dpjax import auditing
from dpjax._rounding import upwards
from dpjax.cli.audit.lines import Line
from dpjax.cli.audit.rebuilt_run import Rebuilt
from dpjax.cli.train.evaluation import spread

# A step is measured so exactly that a confidence of 95 % refutes 1 of 20 sound mechanisms.
_CONFIDENCE = 0.999
_MOST = 512  # rows among which the canary is chosen


def audit_step(rebuilt: Rebuilt, pairs: int) -> auditing.Separation:
    """Measures how far one row, the canary, moves the first step, in units of its noise.

    The canary is the row whose clipped gradient is longest among up to 512 rows, because it moves
    the step most. ``pairs`` is the number of pairs of steps that measure the noise. In a run that
    protects persons a row of ``rebuilt.dataset`` is a person.
    """
    dataset = rebuilt.dataset
    planned = rebuilt.planned
    mechanism = planned.mechanism
    places = spread(dataset.examples, _MOST)  # row numbers at equal distances
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[places]), dataset.train)
    # A loss with `per_step` reads the epoch as the last part of a row; it is 0 in the first step.
    if planned.per_step is not None:
        rows = (*rows, jnp.zeros(len(places), jnp.int32))
    clipped = dpjax.clipped_grad(planned.of_example, mechanism.clipping)(rebuilt.first_params, rows)
    # [rows, groups]: each group of parameters is clipped to a bound of its own. A row whose norm is
    # not finite has factor 0, and moves nothing.
    clipped_norms = np.nan_to_num(np.asarray(clipped.factors * clipped.norms))
    lengths = np.linalg.norm(clipped_norms, axis=1)  # [rows], of whole gradients

    def build(sampler: Any) -> Any:
        """The algorithm of the run with a sampler that includes the canary, or leaves it out."""
        with_sampler = dataclasses.replace(mechanism, sampling=sampler)
        # The update of SGD with rate 1 is the negative private mean.
        return planned.algorithm(with_sampler, dataset.train, optimizer=optax.sgd(1.0))

    return auditing.audit_algorithm(
        build,
        mechanism.sampling,
        rebuilt.first_params,
        canary=int(places[np.argmax(lengths)]),
        pairs=pairs,
        confidence=_CONFIDENCE,
    )


def line_of_step(step: auditing.Separation, delta: float, name: str) -> Line:
    """The line of an audited step, whose epsilon is that of a row which the step draws."""
    bound = step.epsilon(delta)
    claimed = step.claimed_epsilon(delta)
    measured = f"mu {np.median(step.measured):.4f}, claimed {upwards(step.claimed, '.4f')}"
    refutes = step.refutes or bound > claimed
    return Line(name, measured, bound, claimed, step.confidence, refutes)
