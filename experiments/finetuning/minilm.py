# SPDX-License-Identifier: Apache-2.0
"""all-MiniLM-L6-v2: a BERT encoder of six layers with published weights, and its tokens.

The network is `dpjax.models.TextTransformer` in BERT's layout, which
`transformers.load_bert` fills.  As in its training on pairs of sentences, the head reads
the mean over tokens; the pooler, which that training did not touch, is left out.

References:
  Wang et al., "MiniLM: Deep Self-Attention Distillation for Task-Agnostic Compression of
  Pre-Trained Transformers", 2020.  Reimers and Gurevych, "Sentence-BERT", 2019.  Hu et al.,
  "LoRA: Low-Rank Adaptation of Large Language Models", 2022.
"""

from __future__ import annotations

import io
import json
import pathlib
import tempfile
import unicodedata
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from dpjax import features, models
from experiments.finetuning import files, transformers

PADDING, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
_LONGEST = 100  # characters of a word; longer words are unknown, as in BERT


class MiniLM(models.TextTransformer):
    """BERT's encoder of six layers and width 384; its head reads the mean over tokens."""

    width: int = 384
    depth: int = 6
    heads: int = 12
    length: int = 32
    layout: str = "bert"

    def _summary(
        self,
        h: Float[Array, "*batch positions width"],
        real: Bool[Array, "*batch positions"],
    ) -> Array:
        count = jnp.maximum(real.sum(axis=-1, keepdims=True), 1)
        return jnp.sum(jnp.where(real[..., None], h, 0), axis=-2) / count


class WithAdapters:
    """A network whose queries and values have low-rank adapters: LoRA.

    A projection ``W x`` becomes ``W x + B (A x)``, with A of ``rank`` rows.  B starts at zero, so
    the adapted network starts as the network.  The loss trains "lora" and the head alone.
    """

    def __init__(self, network: MiniLM, rank: int = 8) -> None:
        self.network, self.rank = network, rank

    def init(self, key: Any, x: Any) -> dict[str, Any]:
        """Parameters of the network, and "lora" with the adapters."""
        width, names = self.network.width, self._names()
        draw = nn.initializers.lecun_normal()
        lora = {
            name: {"a": draw(each, (width, self.rank)), "b": jnp.zeros((self.rank, width))}
            for name, each in zip(names, jax.random.split(key, len(names)), strict=True)
        }
        return {"params": {**self.network.init(key, x)["params"], "lora": lora}}

    def apply(self, variables: Any, x: Any) -> Any:
        params = dict(variables["params"])
        lora = params.pop("lora")

        def adapted(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            name = "_".join(context.module.path[1::2])
            out = call(*args, **kwargs)
            if context.method_name != "__call__" or name not in lora:
                return out
            low = args[0] @ lora[name]["a"]
            return out + (low @ lora[name]["b"]).reshape(out.shape)

        with nn.intercept_methods(adapted):
            return self.network.apply({"params": params}, x)

    def _names(self) -> list[str]:
        parts = ("query", "value")
        return [f"encoderblock_{i}_{part}" for i in range(self.network.depth) for part in parts]


class WordPiece:
    """BERT's tokenizer for text without capitals: words, then the longest pieces in a vocabulary.

    Args:
      vocabulary: The number of each piece; a piece that continues a word begins with ``##``.

    Example:
      >>> pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##like", "##ly", "!"]
      >>> WordPiece({piece: i for i, piece in enumerate(pieces)})("Unlikely!", 8).tolist()
      [2, 4, 5, 6, 7, 3, 0, 0]
    """

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        self.vocabulary = vocabulary

    def __call__(self, text: str, length: int) -> np.ndarray:
        """The tokens of a text, between [CLS] and [SEP], cut and padded to a length."""
        pieces = [piece for word in _words(text) for piece in self._pieces(word)]
        pieces = [START, *pieces[: length - 2], END]
        tokens = [self.vocabulary[piece] for piece in pieces]
        padding = [self.vocabulary[PADDING]] * (length - len(tokens))
        return np.array(tokens + padding, np.int32)

    def _pieces(self, word: str) -> list[str]:
        found, start = [], 0
        while start < len(word):
            mark = "##" * (start > 0)
            ends = range(len(word), start, -1)
            end = next((e for e in ends if mark + word[start:e] in self.vocabulary), None)
            if end is None or len(word) > _LONGEST:
                return [UNKNOWN]  # one piece without a number makes the whole word unknown
            found.append(mark + word[start:end])
            start = end
        return found


def _words(text: str) -> Sequence[str]:
    """Words and single punctuation marks, without capitals and accents."""
    return "".join(_spaced(text)).split()


def _spaced(text: str) -> Iterator[str]:
    for character in unicodedata.normalize("NFD", text.lower()):
        kind = unicodedata.category(character)
        if character in "\t\n\r" or kind == "Zs":
            yield " "
        elif kind == "Mn" or kind.startswith("C") or character == "\ufffd":
            continue
        elif kind.startswith("P") or _is_symbol(character) or _is_ideograph(character):
            yield f" {character} "
        else:
            yield character


def _is_symbol(character: str) -> bool:
    # BERT splits at all ASCII symbols, such as $, though Unicode does not call them punctuation.
    return character.isascii() and character.isprintable() and not character.isalnum()


def _is_ideograph(character: str) -> bool:
    return unicodedata.name(character, "").startswith("CJK ") and character.isalpha()


def load(path: str | pathlib.Path, params: Any) -> Any:
    """Fills the parameters of a `MiniLM`; its head keeps its initial values."""
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        return transformers.load_bert(archive.extract("model.safetensors", folder), params)


def tokenizer(path: str | pathlib.Path) -> WordPiece:
    with zipfile.ZipFile(path) as archive:
        content = json.load(io.BytesIO(archive.read("tokenizer.json")))
    return WordPiece(content["model"]["vocab"])


def published(folder: str | None) -> pathlib.Path:
    """The archive with the model, checked."""
    return files.checked(files.MINILM, folder)


def features_of(tokens: np.ndarray, folder: str | None, directory: str) -> np.ndarray:
    """The mean over tokens of each text, kept in a cache that is as secret as the texts."""
    archive = published(folder)

    def compute(tokens: np.ndarray) -> np.ndarray:
        network = MiniLM(classes=1, length=tokens.shape[1])
        shapes = jax.eval_shape(network.init, jax.random.key(0), tokens[0])["params"]
        params = load(archive, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))
        # The features are the logits of a head that copies its input.
        params["head"] = {"kernel": jnp.eye(network.width), "bias": jnp.zeros(network.width)}
        copying = network.clone(classes=network.width)

        def of_text(row: Array) -> Any:
            return copying.apply({"params": params}, row)

        return np.asarray(jax.jit(lambda rows: jax.lax.map(of_text, rows, batch_size=64))(tokens))

    settings = {"weights": files.MINILM.sha256}
    return features.cached(compute, tokens, settings=settings, directory=directory, name="minilm")
