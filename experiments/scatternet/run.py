# SPDX-License-Identifier: Apache-2.0
"""Wavelet features against learnt ones (Tramèr and Boneh, 2021).

claim     fixed wavelets beat learnt features at epsilon 3
verdict   reproduced
time      2 to 10 minutes a run of a CPU core; the CNNs of CIFAR-10 16 (wavelets) and 46 (pixels)
hardware  CPU cores; the CNN on CIFAR-10's pixels an H100
command   python -m experiments.scatternet --row=mnist --seeds=3
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dpjax
from dpjax import accounting, clipping, data, features, models, sampling
from experiments.common import runs
from experiments.common.paper import Paper
from experiments.scatternet import settings
from experiments.scatternet.settings import Row


def mechanism_of(row: Row) -> dpjax.Mechanism:
    """The mechanism that runs: Poisson batches, and every query on the data."""
    examples = settings.EXAMPLES[row.dataset]
    sampler = sampling.poisson(examples, row.batch)
    if row.shuffled:
        sampler = sampling.shuffled(examples, row.batch)
    queries = ()
    if row.scaled == "data":
        queries = normalization(examples).multipliers
    return dpjax.Mechanism(
        sampling=sampler,
        clipping=clipping.flat(settings.BOUND),
        noise_multiplier=row.noise,
        steps=examples // row.batch * row.epochs,
        preparation=queries,
    )


def claimed(row: Row) -> Any:
    """The event of the paper: Poisson batches, and two queries for moments."""
    examples = settings.EXAMPLES[row.dataset]
    steps = examples // row.batch * row.epochs
    training = accounting.subsampled_gaussian(row.noise, row.batch / examples, steps)
    queries = []
    if row.scaled == "data":
        queries = [accounting.gaussian(settings.MOMENTS)] * 2
    return accounting.compose(*queries, training)


def epsilons(row: Row) -> tuple[dpjax.Mechanism, Any, str]:
    """The mechanism that runs, the event of the paper, and its conversion, the older one."""
    return mechanism_of(row), claimed(row), "rdp-classic"


def normalization(examples: int) -> features.Normalization:
    """The private moments of wavelet features, with private thresholds."""
    return features.Normalization(
        examples=examples,
        noise_multiplier=settings.MOMENTS,
        thresholds=features.Search(noise_multiplier=settings.SEARCH),
    )


def prepared(row: Row, key: Any) -> data.Dataset:
    """Pixels as in the paper, or scaled wavelet features."""
    dataset = runs.standardized(runs.loaded(row.dataset))
    if not row.scaled:
        return dataset
    x, y = dataset.train
    x_test, y_test = dataset.test
    x = wavelets(x)
    x_test = wavelets(x_test)
    if row.scaled == "data":
        moments = normalization(len(x)).release(key, x)
        scale = jax.jit(partial(features.normalize, moments=moments))
    else:
        groups = 27 * x.shape[-1] // 81  # 27 for each colour
        scale = jax.jit(partial(features.group_norm, groups=groups))
    return dataset._replace(train=(scale(x), y), test=(scale(x_test), y_test))


def wavelets(images: Any) -> jax.Array:
    """The scattering coefficients of images, from the cache if they are in it."""
    return jnp.asarray(features.scattered(images, directory=runs.CACHE_DIR.value))


def train(row: Row, seed: int, folder: pathlib.Path | None) -> Mapping[str, Any]:
    """One run of a row."""
    dataset = prepared(row, jax.random.key(seed))
    model = models.by_name(row.model, dataset.classes, torch_init=True)
    optimizer = optax.sgd(row.rate, momentum=0.9)
    return runs.trained(
        dataset=dataset,
        model=model,
        mechanism=mechanism_of(row),
        optimizer=optimizer,
        seed=seed,
        directory=folder,
    )


PAPER = Paper.of(
    "tramer2021", "Tramèr and Boneh, 2021: features", settings, train=train, epsilons=epsilons
)
