# SPDX-License-Identifier: Apache-2.0
"""Pretrained networks at epsilon 1 and 3, by small, large and mixed bounds.

  claim     large bounds calibrate at level accuracy (Bu et al., 2023, on other networks)
  verdict   reproduced for linear layers, biases and all weights; LoRA loses accuracy
  time      of one core: a linear run minutes, lora or bias-only 12 minutes, full 27
  hardware  CPU cores
  command   python -m experiments.finetuning --row=linear --weights=FOLDER --seeds=3

The paper fine-tunes ViT-Base and BERT-Base, whose weights no package has. Here EfficientNet-Lite0
(ImageNet) reads CIFAR-10 and all-MiniLM-L6-v2 (pairs of sentences) reads SST-2. `files` says how to
get the weights and what their licences are; they count as public.
"""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

import dpjax
from dpjax import data, metrics, models
from experiments import text
from experiments.calibration import settings as calibration
from experiments.common import runs
from experiments.common.paper import Paper
from experiments.finetuning import efficientnet, minilm, settings
from experiments.finetuning.files import WEIGHTS
from experiments.finetuning.settings import LINEAR, PARTS, SWITCH, Row

SIDE = 96  # pixels to which images are resized
LENGTH = 32  # tokens; 6 % of the phrases are longer and cut
BINS, RANK = 15, 8  # of confidence; of adapters
DELTA = runs.DELTA


class Tuned(NamedTuple):
    """A network with leaves of its own, and the leaves or adapters that are trained."""

    network: Any
    leaves: Mapping[str, Any]
    trained: Mapping[str, Any]

    def init(self, key: Any, x: Any) -> dict[str, Any]:
        del key, x
        return {"params": dict(self.trained)}

    def apply(self, variables: Any, x: Any) -> Any:
        params = text.assembled(self.leaves, variables["params"])
        return self.network.apply({"params": params}, x)


@cache
def dataset_of(row: Row) -> data.Dataset:
    """Images, tokens, or features for a linear layer; with --smoke small ones."""
    if runs.SMOKE.value:
        return _small(row)
    return _images() if row.data == "cifar10" else _phrases(row.part == LINEAR)


def _images() -> data.Dataset:
    dataset = runs.loaded("cifar10")
    train, test = (
        efficientnet.features_of(x, SIDE, WEIGHTS.value, runs.CACHE_DIR.value)
        for x, _ in (dataset.train, dataset.test)
    )
    return _featured(dataset, train, test)


def _phrases(featured: bool) -> data.Dataset:
    tokens_of = minilm.tokenizer(minilm.published(WEIGHTS.value))
    parts = []
    for rows in map(text.rows_of, ("train", "test")):
        x = np.stack([tokens_of(words, LENGTH) for words, _ in rows])
        parts.append((x, np.array([int(label) for _, label in rows], np.int32)))
    dataset = data.Dataset("sst2", parts[0], parts[1], 2)
    if not featured:
        return dataset
    train, test = (minilm.features_of(x, WEIGHTS.value, runs.CACHE_DIR.value) for x, _ in parts)
    return _featured(dataset, train, test)


def _featured(dataset: data.Dataset, train: np.ndarray, test: np.ndarray) -> data.Dataset:
    (_, y), (_, y_test) = dataset.train, dataset.test
    return dataset._replace(train=(scaled(train), y), test=(scaled(test), y_test))


def scaled(features: np.ndarray) -> np.ndarray:
    """Each example's features less their mean, at length 1: free, because no other is read."""
    centred = features - features.mean(axis=-1, keepdims=True)
    return centred / np.maximum(np.linalg.norm(centred, axis=-1, keepdims=True), 1e-6)


def _small(row: Row) -> data.Dataset:
    if row.part == LINEAR:
        dataset = data.load("digits")
        train, test = (x.reshape(len(x), -1) for x, _ in (dataset.train, dataset.test))
        return _featured(dataset, train, test)
    draw = np.random.default_rng(0)
    x, y = draw.integers(1, 50, (120, 12)).astype(np.int32), draw.integers(0, 2, 120)
    return data.Dataset("random tokens", (x[:90], y[:90]), (x[90:], y[90:]), 2)


def model_of(row: Row, seed: int) -> Any:
    """A linear layer, or a network that is trained in part."""
    if row.part == LINEAR:
        return models.by_name("linear", dataset_of(row).classes or 0)
    small: dict[str, Any] = {"vocabulary": 50, "width": 16, "depth": 1, "heads": 2}
    network: Any = minilm.MiniLM(classes=2, **small if runs.SMOKE.value else {})
    tokens, key = jnp.zeros(LENGTH, jnp.int32), jax.random.key(seed)
    weights = jax.jit(network.init)(key, tokens)["params"]
    if not runs.SMOKE.value:
        weights = minilm.load(minilm.published(WEIGHTS.value), weights)
    return tuned(network, weights, row.part, key)


def tuned(network: Any, weights: Any, part: str, key: Any) -> Tuned:
    leaves: Any = flatten_dict(weights, sep="/")
    known = leaves | text.adapters(leaves, key, RANK)
    trained = {name: leaf for name, leaf in known.items() if re.search(PARTS[part], name)}
    return Tuned(network, leaves, trained)


@cache
def setting_of(row: Row) -> calibration.Setting:
    """A run as the paper's other tasks describe theirs, with the noise of this epsilon."""
    examples = dataset_of(row).examples
    batch, steps = (32, 4) if runs.SMOKE.value else (row.batch, row.steps)
    noise = 0.0
    if row.epsilon < math.inf:
        plan = runs.calibrated(examples, batch, steps, row.epsilon, 1.0)
        noise = float(plan.multipliers[0])
    rates = row.rate, row.rate / row.large if row.optimizer == "sgd" else row.rate
    given = (examples, batch, noise, steps, steps, row.epsilon, DELTA, row.optimizer)
    return calibration.Setting(*given, *rates, row.small, row.large, SWITCH)


def train(row: Row, seed: int, folder: pathlib.Path | None) -> Mapping[str, Any]:
    """One run: accuracy and calibration of the last parameters, and what they cost."""
    dataset, model, setting = dataset_of(row), model_of(row, seed), setting_of(row)
    (x,), _ = dataset.rows(np.array([0]))
    params = calibration.shapes(model, x)
    mechanism = calibration.mechanism_of(setting, row.way, params)
    bound = calibration.ways(setting, params)[row.way].bound
    optimizer, schedule = calibration.moves(setting, row.way, bound)
    x_test, y_test = jax.tree.map(jnp.asarray, dataset.test)
    logits_of = runs.logits_on(model, x_test, batch_size=100)

    def look(state: Any) -> dict[str, Any]:
        logits = logits_of(state.params)
        return {way: getattr(metrics, way)(logits, y_test, bins=BINS) for way in ("ece", "mce")}

    numbers = runs.trained(
        dataset,
        model,
        mechanism,
        optimizer,
        seed,
        folder,
        evaluations=2,  # at the end, and once before: `trained` keeps no log of a single one
        look=look,
        bound_schedule=schedule,
    )
    last = numbers["way"][-1]
    return {
        "accuracy": numbers["accuracy"],
        **{figure: last[figure] for figure in ("nll", "ece", "mce")},
        "trained": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        "noise": setting.noise,
        "rdp": mechanism.epsilon(DELTA, "rdp"),
        "pld": mechanism.epsilon(DELTA, "pld"),
    }


def epsilons(row: Row) -> tuple[dpjax.Mechanism, Any, str]:
    """What runs; the paper has other networks, so nothing is printed."""
    mechanism = calibration.mechanism_of(setting_of(row), calibration.SMALL, {"w": jnp.zeros(1)})
    return mechanism, mechanism.event, "pld"


PAPER = Paper.of(
    "finetuning",
    "Bu et al., 2023, on other pretrained networks: fine-tuning",
    settings,
    train=train,
    epsilons=epsilons,
    note="Comparisons of this repository: the paper has other networks.",
)
