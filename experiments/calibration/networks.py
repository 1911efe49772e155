# SPDX-License-Identifier: Apache-2.0
"""Networks and data of convergence_calibration_2023: a CNN, ViT-Base and BERT-Base.

ViT and BERT start from published weights in the user's files; nothing is downloaded.  Of BERT only
the last block, the pooler and the head are trained: the loss closes over all other leaves, which
get neither gradients nor noise.  SNLI is read as tokens.

MNIST is scaled by 0.1307 and 0.3081, as the paper's example has it and as is common.  These two
numbers are moments of the private training images, and epsilon does not count them.  With public
constants, such as 0.5 and 0.5, epsilon would cover everything, but every MNIST result would change.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import traverse_util

from dpjax import data, models
from experiments.common import runs
from experiments.finetuning import transformers

VIT = flags.DEFINE_string("vit", None, "Weights of ViT-Base, patches of 16: the release's .npz.")
BERT = flags.DEFINE_string("bert", None, "Weights of BERT-Base: a .safetensors file.")
SNLI = flags.DEFINE_string(
    "snli",
    None,
    "An .npz of x_train [examples, 2, 128] (tokens, segments), y_train [examples], x_test, y_test.",
)
LAST = r"encoderblock_11/|^pooler/|^head/"
SEGMENTS = 2


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A network with weights of its own: prepares its input, and trains what ``part`` matches."""

    network: nn.Module
    weights: Any
    prepare: Callable[[Any], Any]
    part: str = ""

    def init(self, key: Any, x: Any) -> dict[str, Any]:
        """The part that is trained, as it was loaded, by the names of its leaves."""
        del key, x
        return {"params": {n: w for n, w in self._leaves().items() if re.search(self.part, n)}}

    def apply(self, variables: Any, x: Any) -> Any:
        whole = traverse_util.unflatten_dict({**self._leaves(), **variables["params"]}, sep="/")
        return self.network.apply({"params": whole}, self.prepare(x))

    def _leaves(self) -> dict[str, Any]:
        leaves: Any = traverse_util.flatten_dict(self.weights, sep="/")
        return leaves


def prepared(task: str, seed: int) -> tuple[data.Dataset, Any]:
    """Data and model of a task; with --smoke small ones with random weights."""
    return {"mnist": _cnn, "cifar10": _vit, "snli": _bert}[task](seed)


def _cnn(seed: int) -> tuple[data.Dataset, Any]:
    del seed
    if runs.SMOKE.value:
        return data.load("digits"), models.MLP(features=(32,), activation=nn.relu)
    dataset = data.load("mnist", runs.DATA_DIR.value)
    # By the constants of the example that the paper follows, Opacus' mnist.py.
    train, test = (
        (data.standardize(x, mean=0.1307, scale=0.3081), y)
        for x, y in (dataset.train, dataset.test)
    )
    model = models.TemperedCNN(activation=nn.relu, torch_init=True)
    return dataset._replace(train=train, test=test), model


def _vit(seed: int) -> tuple[data.Dataset, Any]:
    dataset = data.load("digits" if runs.SMOKE.value else "cifar10", runs.DATA_DIR.value)
    side = 16 if runs.SMOKE.value else 224
    small: dict[str, Any] = {"patch": 8, "width": 16, "depth": 1, "heads": 2}

    def prepare(x: Any) -> Any:
        # To [-1, 1], as the published weights have it: a mean of these data would not be public.
        return 2 * jax.image.resize(x, (*x.shape[:-3], side, side, x.shape[-1]), "bilinear") - 1

    network = models.ViT(classes=10, **(small if runs.SMOKE.value else {}))
    return dataset, _tuned(network, prepare, dataset, seed, VIT, transformers.load_vit)


def _bert(seed: int) -> tuple[data.Dataset, Any]:
    small: dict[str, Any] = {"vocabulary": 50, "length": 12, "width": 16, "depth": 1, "heads": 2}
    full: dict[str, Any] = {"width": 768, "depth": 12, "heads": 12}
    shape = small if runs.SMOKE.value else full
    network = models.TextTransformer(classes=3, segments=SEGMENTS, layout="bert", **shape)
    dataset = _sentences()
    part = r"^pooler/|^head/" if runs.SMOKE.value else LAST

    def prepare(x: Any) -> Any:
        return x[..., 0, :], x[..., 1, :]

    return dataset, _tuned(network, prepare, dataset, seed, BERT, transformers.load_bert, part)


def _tuned(
    network: nn.Module,
    prepare: Callable[[Any], Any],
    dataset: data.Dataset,
    seed: int,
    path: flags.FlagHolder,
    load: Callable[[Any, Any], Any],
    part: str = "",
) -> Tuned:
    (x,), _ = dataset.rows(np.array([0]))
    weights = jax.jit(network.init)(jax.random.key(seed), prepare(jnp.asarray(x)))["params"]
    if not runs.SMOKE.value:
        weights = load(_given(path), weights)
    return Tuned(network, weights, prepare, part)


def _sentences() -> data.Dataset:
    if runs.SMOKE.value:
        draw = np.random.default_rng(0)
        x, y = draw.integers(1, 50, (96, 2, 12)), draw.integers(0, 3, 96)
        x[:, 1] = np.arange(12) > 5
        x, y = x.astype(np.int32), y.astype(np.int32)
        return data.Dataset("random tokens", (x[:64], y[:64]), (x[64:], y[64:]), 3)
    with np.load(_given(SNLI), allow_pickle=False) as file:
        train, test = ((file[f"x_{part}"], file[f"y_{part}"]) for part in ("train", "test"))
    return data.Dataset("snli", train, test, 3)


def _given(path: flags.FlagHolder) -> str:
    if path.value is None:
        raise ValueError(f"--{path.name} is missing. --smoke needs none.")
    return path.value
