# SPDX-License-Identifier: Apache-2.0
"""all-MiniLM-L6-v2: a BERT encoder of six layers with published weights, and its tokens.

The network is `dpjax.models.TextTransformer` in BERT's layout, which
`transformers.load_bert` fills.  As in its training on pairs of sentences, the head reads
the mean over tokens; the pooler, which that training did not touch, is left out.

References:
  Wang et al., "MiniLM: Deep Self-Attention Distillation for Task-Agnostic Compression of
  Pre-Trained Transformers", 2020.  Reimers and Gurevych, "Sentence-BERT", 2019.
"""

from __future__ import annotations

import importlib
import pathlib
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from dpjax import features, models
from experiments.finetuning import files, transformers


class MiniLM(models.TextTransformer):
    """BERT's encoder of six layers and width 384; its head reads the mean over tokens."""

    width: int = 384
    depth: int = 6
    heads: int = 12
    length: int = 32
    layout: str = "bert"

    def _summary(
        self, h: Float[Array, "*batch positions width"], real: Bool[Array, "*batch positions"]
    ) -> Array:
        masked = jnp.where(real[..., None], h, 0)
        count = jnp.maximum(real.sum(axis=-1, keepdims=True), 1)
        return jnp.sum(masked, axis=-2) / count


def load(path: str | pathlib.Path, params: Any) -> Any:
    """Fills the parameters of a `MiniLM`; its head keeps its initial values."""
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        return transformers.load_bert(archive.extract("model.safetensors", folder), params)


def tokenizer(path: str | pathlib.Path) -> Callable[[str, int], np.ndarray]:
    """The published tokenizer: the tokens of a text, cut and padded to a length."""
    with zipfile.ZipFile(path) as archive:
        content = archive.read("tokenizer.json").decode()
    pieces = importlib.import_module("tokenizers").Tokenizer.from_str(content)

    def tokens_of(text: str, length: int) -> np.ndarray:
        pieces.enable_truncation(length)
        pieces.enable_padding(length=length)
        return np.array(pieces.encode(text).ids, np.int32)

    return tokens_of


def published(folder: str | None) -> pathlib.Path:
    """The archive with the model, checked."""
    return files.checked(files.MINILM, folder)


def features_of(tokens: np.ndarray, folder: str | None, directory: str) -> np.ndarray:
    """The mean over tokens of each text, kept in a cache that is as secret as the texts."""
    archive = published(folder)

    def compute(tokens: np.ndarray) -> np.ndarray:
        network = MiniLM(classes=1, length=tokens.shape[1])
        shapes = jax.eval_shape(network.init, jax.random.key(0), tokens[0])["params"]
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        params = load(archive, zeros)
        # The features are the logits of a head that copies its input.
        params["head"] = {"kernel": jnp.eye(network.width), "bias": jnp.zeros(network.width)}
        copying = network.clone(classes=network.width)

        def of_text(row: Array) -> Any:
            return copying.apply({"params": params}, row)

        @jax.jit
        def of_texts(rows: Any) -> Any:
            return jax.lax.map(of_text, rows, batch_size=64)

        return np.asarray(of_texts(tokens))

    settings = {"weights": files.MINILM.sha256}
    return features.cached(compute, tokens, settings=settings, directory=directory, name="minilm")
