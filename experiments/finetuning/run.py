# SPDX-License-Identifier: Apache-2.0
"""Pretrained networks at epsilon 1 and 3, by small, large and mixed bounds.

  claim     large bounds calibrate at level accuracy (Bu et al., 2023, on other networks)
  verdict   reproduced for most linear layers; open for biases, LoRA and all weights (two seeds)
  time      of one core: a linear run minutes, lora or bias-only 12 minutes, full 27
  hardware  CPU cores
  command   python -m experiments.finetuning --row=linear --weights=FOLDER --seeds=3

The paper fine-tunes ViT-Base and BERT-Base, whose weights no package has. Here EfficientNet-Lite0
(ImageNet) reads CIFAR-10 and all-MiniLM-L6-v2 (pairs of sentences) reads SST-2. `files` has the
commands that install the weights, and their licences; the weights count as public.
"""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Callable, Mapping
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
BINS = 15  # of confidence
RANK = 8  # of adapters
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
    if row.data == "cifar10":
        return _images()
    return _phrases(row.part == LINEAR)


def _images() -> data.Dataset:
    """CIFAR-10, as EfficientNet's features."""

    def features_of(images: Any) -> np.ndarray:
        return efficientnet.features_of(images, SIDE, WEIGHTS.value, runs.CACHE_DIR.value)

    return _featured(runs.loaded("cifar10"), features_of)


def _phrases(featured: bool) -> data.Dataset:
    """SST-2, as tokens or as MiniLM's features."""
    tokens_of = minilm.tokenizer(minilm.published(WEIGHTS.value))

    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        rows = text.rows_of(name)
        x = np.stack([tokens_of(words, LENGTH) for words, _ in rows])
        return x, np.array([int(label) for _, label in rows], np.int32)

    def features_of(tokens: Any) -> np.ndarray:
        return minilm.features_of(tokens, WEIGHTS.value, runs.CACHE_DIR.value)

    dataset = data.Dataset("sst2", part("train"), part("test"), 2)
    if not featured:
        return dataset
    return _featured(dataset, features_of)


def _featured(dataset: data.Dataset, features_of: Callable[[Any], np.ndarray]) -> data.Dataset:
    """The data set with scaled features in place of its inputs."""
    x, y = dataset.train
    x_test, y_test = dataset.test
    train = scaled(features_of(x))
    test = scaled(features_of(x_test))
    return dataset._replace(train=(train, y), test=(test, y_test))


def scaled(features: np.ndarray) -> np.ndarray:
    """Each example's features less their mean, at length 1: free, because no other is read."""
    centred = features - features.mean(axis=-1, keepdims=True)
    lengths = np.linalg.norm(centred, axis=-1, keepdims=True)
    return centred / np.maximum(lengths, 1e-6)


def _small(row: Row) -> data.Dataset:
    """The data of a smoke run: digits, or random tokens."""
    if row.part == LINEAR:
        return _featured(data.load("digits"), lambda images: images.reshape(len(images), -1))
    rng = np.random.default_rng(0)
    x = rng.integers(1, 50, (120, 12)).astype(np.int32)
    y = rng.integers(0, 2, 120)
    return data.Dataset("random tokens", (x[:90], y[:90]), (x[90:], y[90:]), 2)


def model_of(row: Row, seed: int) -> Any:
    """A linear layer, or a network that is trained in part."""
    if row.part == LINEAR:
        return models.by_name("linear", dataset_of(row).classes or 0)
    network: Any = minilm.MiniLM(classes=2)
    if runs.SMOKE.value:
        network = minilm.MiniLM(classes=2, vocabulary=50, width=16, depth=1, heads=2)
    key = jax.random.key(seed)
    tokens = jnp.zeros(LENGTH, jnp.int32)
    weights = jax.jit(network.init)(key, tokens)["params"]
    if not runs.SMOKE.value:
        weights = minilm.load(minilm.published(WEIGHTS.value), weights)
    return tuned(network, weights, row.part, key)


def tuned(network: Any, weights: Any, part: str, key: Any) -> Tuned:
    """The network, with the leaves and adapters of a part to train."""
    leaves: Any = flatten_dict(weights, sep="/")
    known = leaves | text.adapters(leaves, key, RANK)
    trained = {name: leaf for name, leaf in known.items() if re.search(PARTS[part], name)}
    return Tuned(network, leaves, trained)


@cache
def setting_of(row: Row) -> calibration.Setting:
    """A run as the paper's other tasks describe theirs, with the noise of this epsilon."""
    examples = dataset_of(row).examples
    batch = 32 if runs.SMOKE.value else row.batch
    steps = 4 if runs.SMOKE.value else row.steps
    noise = 0.0
    if row.epsilon < math.inf:
        plan = runs.calibrated(
            examples=examples,
            batch=batch,
            steps=steps,
            epsilon=row.epsilon,
            bound=1.0,
        )
        noise = float(plan.multipliers[0])
    return calibration.Setting(
        examples=examples,
        batch=batch,
        noise=noise,
        steps=steps,
        accounted=steps,
        printed=row.epsilon,
        delta=DELTA,
        optimizer=row.optimizer,
        rate=row.rate,
        plain_rate=row.rate / row.large if row.optimizer == "sgd" else row.rate,
        small=row.small,
        large=row.large,
        switch=SWITCH,
    )


def train(row: Row, seed: int, folder: pathlib.Path | None) -> Mapping[str, Any]:
    """One run: accuracy and calibration of the last parameters, and their epsilons."""
    dataset = dataset_of(row)
    model = model_of(row, seed)
    setting = setting_of(row)
    (x,), _ = dataset.rows(np.array([0]))
    params = calibration.shapes(model, x)
    mechanism = calibration.mechanism_of(setting, row.way, params)
    bound = calibration.ways(setting, params)[row.way].bound
    optimizer, schedule = calibration.moves(setting, row.way, bound)
    x_test, y_test = jax.tree.map(jnp.asarray, dataset.test)
    logits_of = runs.logits_on(model, x_test, batch_size=100)

    def look(state: Any) -> dict[str, Any]:
        logits = logits_of(state.params)
        return {
            "ece": metrics.ece(logits, y_test, bins=BINS),
            "mce": metrics.mce(logits, y_test, bins=BINS),
        }

    numbers = runs.trained(
        dataset,
        model,
        mechanism,
        optimizer,
        seed,
        folder,
        evaluations=2,  # `trained` keeps no log of a single one
        look=look,
        bound_schedule=schedule,
    )
    last = numbers["way"][-1]
    return {
        "accuracy": numbers["accuracy"],
        "nll": last["nll"],
        "ece": last["ece"],
        "mce": last["mce"],
        "trained": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        "noise": setting.noise,
        "rdp": mechanism.epsilon(DELTA, "rdp"),
        "pld": mechanism.epsilon(DELTA, "pld"),
    }


def epsilons(row: Row) -> tuple[dpjax.Mechanism, Any, str]:
    """The mechanism that runs; no epsilon is printed, since the paper has other networks."""
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
