# SPDX-License-Identifier: Apache-2.0
"""The canary audit: a second training, on data in which some examples are canaries.

An example is a row, or all rows of a person in a run that protects persons. Its number is its place
on the first axis of the data.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

import dpjax
from dpjax import auditing
from dpjax.cli.audit.lines import OF_A_RUN, Line
from dpjax.cli.audit.rebuilt_run import Rebuilt

_KNOWN = 2_000  # other examples, whose gradients the attacker knows and subtracts


def audit_canaries(rebuilt: Rebuilt, count: int | None, steps: int) -> Line:
    """Trains a second run, with canaries that join by fair coins, and guesses which joined.

    Many right guesses are unlikely if the run is private, so their number gives a lower bound on
    epsilon. ``count`` is the number of canaries, by default a quarter of the examples, at most
    1000. ``steps`` is the most steps of the second run.
    """
    planned = rebuilt.planned
    examples = rebuilt.dataset.examples
    delta = rebuilt.run.delta
    if count is None:
        count = min(1000, examples // 4)
    if not 10 <= count < examples:
        raise app.UsageError(f"--canaries={count}: expected 10 or more, below the {examples} rows.")
    rng = np.random.default_rng(0)
    places, data = with_canaries(rebuilt.dataset, count, persons=planned.persons, rng=rng)
    members = rng.random(count) < 0.5  # which canaries join
    other_places = np.setdiff1d(np.arange(examples), places)
    known_places = rng.permutation(other_places)[:_KNOWN]
    # The data hold all canaries; the sampler never draws a canary that does not join.
    sampler = auditing.without(planned.mechanism.sampling, places[~members])
    # Only steps are audited, so the second run asks no queries (`preparation`) and follows no
    # earlier run (`before`). It keeps the plan of all steps, although few run, because correlated
    # noise is designed for the whole run.
    mechanism = dataclasses.replace(planned.mechanism, sampling=sampler, preparation=(), before=())
    steps = min(steps, mechanism.steps)
    # The scores compare gradients of canaries with the private means, which the optimizer records.
    recording = auditing.recording(planned.optimizer)
    algorithm = planned.algorithm(mechanism, data, optimizer=recording)
    canaries = jax.tree.map(lambda leaf: jnp.asarray(leaf[places]), data)
    known = jax.tree.map(lambda leaf: jnp.asarray(leaf[known_places]), data)
    state = algorithm.init(rebuilt.first_params, jax.random.key(0))
    scores, _ = auditing.score_canaries(
        algorithm,
        state,
        steps,
        loss=planned.of_example,
        canaries=canaries,
        rest=known,
        per_step=planned.per_step,
    )
    # Only a fifth of the canaries are guessed, those with the clearest scores.
    right, guesses = auditing.guess_members(scores, members, count // 5)
    # The guesses refute trade-off curves: the run's own with its noise scaled, or any curve.
    curve, curve_name = curve_of(mechanism, steps)
    bound = auditing.epsilon_lower_bound(
        right, guesses, canaries=count, delta=delta, confidence=OF_A_RUN, curve=curve
    )
    # The claim is on the steps that ran, by the accountant of the run.
    claimed = mechanism.epsilon_of(mechanism.multipliers[:steps], delta, planned.method)
    measured = f"{right} of {guesses} guesses right, {count} canaries, {steps} steps; {curve_name}"
    return Line(
        "canaries in a second run",
        measured,
        bound,
        claimed,
        confidence=OF_A_RUN,
        refutes=bound > claimed,
    )


def curve_of(mechanism: dpjax.Mechanism, steps: int) -> tuple[Any, str]:
    """The trade-off curve that canaries refute, and its name: the run's own, where it is known."""
    # The run's own curve is of neighbours that join or leave, as canaries do, and of exact norms.
    replaced = mechanism.relation is dpjax.types.Neighbours.REPLACE_ONE
    if replaced or mechanism.clipping.projections is not None:
        return "any", "any curve"
    return mechanism.event_of(mechanism.multipliers[:steps]), "its own curve"


def with_canaries(
    dataset: dpjax.data.Dataset, count: int, persons: bool, rng: np.random.Generator
) -> tuple[np.ndarray, Any]:
    """Puts canaries in the places of random examples; returns these places, and the data.

    Without ``persons``, the data are ``(x, y)``, and ``x`` is ``[examples, ...]``. With them, they
    are ``((x, y), mask)``, and ``x`` is ``[persons, rows, ...]``; the mask is False for padding. A
    canary has no padding.
    """
    # A copy. `x`, `y` and `real` are its arrays, so canaries are written into it.
    train = jax.tree.map(np.array, dataset.train)
    places = rng.choice(dataset.examples, count, replace=False)
    if persons:
        (x, y), real = train
        real[places] = True
    else:
        x, y = train
    if np.issubdtype(x.dtype, np.integer):
        # White noise is not a token, so entries are exchanged among the examples that become
        # canaries.
        x[places] = rng.permuted(x[places], axis=0)
    else:
        # White noise with a random label: its gradient is nearly orthogonal to all others.
        noise = rng.normal(size=(count, *x.shape[1:]))
        if persons:
            noise[:] = noise[:, :1]  # rows of a canary are equal, so their gradients add up
        # A canary has the norm of the example that it replaces.
        replaced_norms = np.linalg.norm(x[places].reshape(count, -1), axis=1)
        noise_norms = np.linalg.norm(noise.reshape(count, -1), axis=1)
        scale = replaced_norms / noise_norms  # [count]; reshaped to the axes of x, [count, 1, ...]
        x[places] = noise * scale.reshape(-1, *[1] * (x.ndim - 1))
    if dataset.classes is None:
        labels = rng.choice([-1.0, 1.0], count)  # the ends of a target's range
    else:
        labels = rng.integers(0, dataset.classes, count)
    # [count] or [count, 1]: all rows of a person have its label.
    y[places] = labels.reshape(-1, *[1] * (y.ndim - 1))
    return places, train
