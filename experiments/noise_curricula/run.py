# SPDX-License-Identifier: Apache-2.0
"""Noise that falls over the epochs, and easy examples first (An and Shi, 2021).

claim     falling noise and easy examples first beat constant noise and random order
verdict   falling beats rising noise, not a constant of equal epsilon; no order of examples helps
time      one to four minutes a run on a shared CPU core
hardware  CPU cores
command   python -m experiments.noise_curricula --table=2 --seeds=3
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import optax

import dpjax
from dpjax import clipping, data, models, sampling, schedules
from experiments.common import runs
from experiments.common.paper import Paper
from experiments.noise_curricula import figures, scorers, settings
from experiments.noise_curricula.settings import BATCH, EPOCHS, EXAMPLES, STEPS, Row

SMALL_BATCH = 400
SMALL_STEPS = 80


def mechanism_of(row: Row) -> dpjax.Mechanism:
    """The noise of a row on Poisson batches; `prepared` changes the order of examples."""
    noise: Any = row.noise
    examples = 1_437 if row.small else EXAMPLES
    steps = SMALL_STEPS if row.small else STEPS
    if isinstance(noise, str):
        noise = schedules.CURRICULA[noise](epochs=EPOCHS, steps_per_epoch=steps // EPOCHS)
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(examples, batch_size(row)),
        clipping=clipping.flat(settings.BOUND),
        noise_multiplier=noise,
        steps=steps,
    )
    if row.equal:
        target = mechanism.epsilon(runs.DELTA, row.equal)
        constant = dataclasses.replace(mechanism, noise_multiplier=1.0)
        return constant.calibrate(target, runs.DELTA, row.equal)
    return mechanism


def epsilons(row: Row) -> tuple[dpjax.Mechanism, Any, str]:
    """The mechanism that runs; the paper prints the epsilons of the improved conversion."""
    return prepared(row), mechanism_of(row).event, "rdp"


def batch_size(row: Row) -> int:
    """The expected size of a batch."""
    return SMALL_BATCH if row.small else BATCH


def dataset_of(row: Row) -> data.Dataset:
    """The images of a row."""
    return runs.loaded("digits" if row.small else "mnist")


@functools.lru_cache(maxsize=2)
def prepared(row: Row) -> dpjax.Mechanism:
    """The mechanism with the row's order of examples."""
    mechanism = mechanism_of(row)
    if row.order in ("poisson", "weights"):
        return mechanism
    dataset = dataset_of(row)
    if row.order == "easy first":
        order = sampling.curriculum(scorers.difficulty(dataset), batch_size(row))
        return dataclasses.replace(mechanism, sampling=order)
    scorer, batches = row.order.split()
    rates = {"growing": scorers.GROWING, "full": scorers.FULL}[batches]
    if scorer == "public":
        bins = scorers.public(dataset)
        spent = []
    else:  # one private scorer for all seeds of the row: a release is paid for once
        bins, release = scorers.private(dataset, 0)
        spent = [release]
    sampler = scorers.drawn(bins, rates, mechanism.steps)
    return dataclasses.replace(mechanism, sampling=sampler, before=spent)


def train(row: Row, seed: int, folder: pathlib.Path | None) -> Mapping[str, Any]:
    """One run of a row."""
    dataset = dataset_of(row)
    model: Any = models.TemperedCNN(activation=nn.relu)
    if row.small:
        model = models.by_name("mlp", dataset.classes)
    mechanism = prepared(row)
    weights = scorers.easy(model, mechanism.steps) if row.order == "weights" else None
    optimizer = optax.sgd(settings.RATE)
    return runs.trained(
        dataset=dataset,
        model=model,
        mechanism=mechanism,
        optimizer=optimizer,
        seed=seed,
        directory=folder,
        weights=weights,
    )


PAPER = Paper.of(
    "an2021",
    "An and Shi, 2021: noise curricula",
    settings,
    train=train,
    epsilons=epsilons,
    figures=figures.FIGURES,
    note="Falling and rising noise of one epsilon by RDP differ by PLD only for quadratic noise:\n"
    "0.88 against 1.41.",
)
