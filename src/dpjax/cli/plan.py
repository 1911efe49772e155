# SPDX-License-Identifier: Apache-2.0
"""`dpjax plan`: the run that `dpjax train` plans, with the time and the noise of other sizes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

import dpjax
from dpjax import planning
from dpjax._display import duration
from dpjax.cli.train import build, command, inputs


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Prints the plan with its reasons, and a table of other batch sizes and numbers of steps."""
    del argv
    dataset = command.load(given)
    try:
        examples = dataset.units  # persons, if rows have owners
        model = build.build_model(given, dataset.classes or 1)  # a regression has one output
        x = inputs.input_shape(given, dataset)
        params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
        loss = dpjax.losses.of(model, build.build_loss(given, dataset.classes))
        guarantee = {"epsilon": given.target_epsilon, "delta": given.delta}
        most_rows = None  # that a step reads of a person
        if dataset.owners is not None:
            most_rows = given.most_rows
        speed = speed_of(loss, model, x, most_rows)
        planned = dpjax.plan(
            examples,
            params,
            **guarantee,
            **build.pace_of(given),
            minutes=given.minutes,
            examples_per_second=speed,
        )
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    print(planned)
    mechanism = planned.mechanism
    chosen = (round(mechanism.batch_size), mechanism.steps)
    most_examples = np.inf  # that all steps together may compute
    if given.minutes is not None:
        most_examples = 60 * given.minutes * speed
    print(f"\n{'batch':>9}  {'steps':>6}  {'noise':>6}  time")
    for size in planning.other_sizes(examples, **guarantee, most=most_examples):
        # `excess` is the noise on the mean gradient, relative to batches of all examples.
        line = f"{size.batch:>9,}  {size.steps:>6,}  {size.excess:>6.2f}  "
        line += duration(size.examples / speed)
        if (size.batch, size.steps) == chosen:
            line += "  planned"
        print(line)
    print("Noise is relative to batches of all examples, at equal epsilon and steps.")
    # Without --minutes `dpjax train` makes the same plan itself.
    if given.minutes is not None:
        batch, steps = chosen
        print(f"To train: dpjax train --batch_size={batch} --steps={steps}, and the other flags.")


def speed_of(loss: Any, model: Any, x: jax.ShapeDtypeStruct, most_rows: int | None) -> float:
    """The examples that private steps compute in a second, measured on rows of zeros.

    The time of a step depends on shapes, and not on values, so no data are read. ``x`` is the shape
    and dtype of one input. ``most_rows`` is the most rows of a person in a step; if it is given, an
    example is a person.
    """
    rows = 1024  # all of them are in each batch
    batches = dpjax.sampling.poisson(rows, rows)
    if most_rows is not None:
        # Each person has one row, but a step computes ``most_rows`` rows for each person, with
        # padding in the place of missing ones.
        batches = dpjax.sampling.persons(np.arange(rows), rows, most_rows)
    data = (np.zeros((rows, *x.shape), x.dtype), np.zeros(rows, np.int32))  # inputs and labels
    # `dpjax.plan` has this rule and this optimizer. Its quantile and its average cost no time, and
    # the speed does not depend on the noise multiplier.
    mechanism = dpjax.Mechanism(
        sampling=batches,
        clipping=dpjax.clipping.automatic(1.0),
        noise_multiplier=1.0,
        steps=4,  # one that compiles, and three that are timed
    )
    optimizer = planning.paced(mechanism)
    algorithm = dpjax.dpsgd(loss, optimizer, mechanism, data)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros(x.shape, x.dtype))["params"]
    state, _ = algorithm.step(algorithm.init(params))  # compiles
    jax.block_until_ready(state.params)
    began = time.perf_counter()
    for _ in range(3):
        state, _ = algorithm.step(state)
    jax.block_until_ready(state.params)
    return 3 * rows / (time.perf_counter() - began)
