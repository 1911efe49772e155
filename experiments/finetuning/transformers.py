# SPDX-License-Identifier: Apache-2.0
"""Published weights of BERT: a local file in, parameters out.

The names of its ``.safetensors`` files become the names of `dpjax.models.TextTransformer`.
A weight that does not fit is an error that names it; only the last layer keeps its initial values
if the file has other classes.  Files are data and never code: nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

_POSITIONS = "Transformer/posembed_input/pos_embedding"
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
}
# These rules turn our names into BERT's, one after the other.
_BERT = (
    (r"^token/embedding$", "embeddings.word_embeddings.weight"),
    (r"^segment/embedding$", "embeddings.token_type_embeddings.weight"),
    (rf"^{_POSITIONS}$", "embeddings.position_embeddings.weight"),
    (r"^Transformer/input_norm/", "embeddings.LayerNorm."),
    (r"^Transformer/encoderblock_(\d+)/", r"encoder.layer.\1."),
    (r"MultiHeadDotProductAttention_1/out/", "attention.output.dense."),
    (r"MultiHeadDotProductAttention_1/(query|key|value)/", r"attention.self.\1."),
    (r"LayerNorm_0/", "attention.output.LayerNorm."),
    (r"LayerNorm_2/", "output.LayerNorm."),
    (r"MlpBlock_3/Dense_0/", "intermediate.dense."),
    (r"MlpBlock_3/Dense_1/", "output.dense."),
    (r"^pooler/", "pooler.dense."),
    (r"^head/", "classifier."),
    (r"(kernel|scale)$", "weight"),
)


def load_bert(path: str | pathlib.Path, params: Any) -> Any:
    """Fills a ``TextTransformer(layout="bert")`` from a BERT ``.safetensors`` file.

    Kernels are transposed and divided among the heads, whose number the ``config.json`` in the same
    folder has.  Positions beyond the model's length are left out.  If the model has no segments,
    the first segment's vector is added to every position, as BERT does with one sentence.

    Args:
      path: The file; names may begin with ``bert.``, and norms may have gamma and beta.
      params: ``model.init(...)["params"]``.
    """
    given = {_today(name): value for name, value in read_safetensors(path).items()}
    leaves: Any = traverse_util.flatten_dict(params, sep="/")
    stored = {}
    for name, leaf in leaves.items():
        theirs = _bert_name(name)
        if theirs in given:
            stored[name] = _bert_weight(name, given[theirs], leaf.shape)
    segments = given.get(_bert_name("segment/embedding"))
    if "segment/embedding" not in leaves and segments is not None and _POSITIONS in stored:
        positions = stored[_POSITIONS].astype(np.float32)
        stored[_POSITIONS] = positions + segments[0].astype(np.float32)
    deeper = set()
    for name in given:
        layer = re.match(r"encoder\.layer\.(\d+)\.", name)
        if layer and not any(f"encoderblock_{layer[1]}/" in leaf for leaf in leaves):
            deeper.add(name)
    _expect_nothing(path, "has more layers than the model:", deeper)
    return _filled(path, leaves, stored)


def _today(name: str) -> str:
    """A name as newer files have it: old ones call the parameters of norms gamma and beta."""
    name = name.removeprefix("bert.")
    name = re.sub("gamma$", "weight", name)
    return re.sub("beta$", "bias", name)


def read_safetensors(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a ``.safetensors`` file, by name; bfloat16 is the type of ``ml_dtypes``."""
    data = memoryview(pathlib.Path(path).read_bytes())
    # The format is a length, a JSON header and raw numbers: no code runs when it is read.
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:size]))
    header.pop("__metadata__", None)
    return {name: _tensor(data[size:], entry) for name, entry in header.items()}


def _tensor(data: memoryview, entry: Mapping) -> np.ndarray:
    begin, end = entry["data_offsets"]
    dtype = jnp.dtype(_DTYPES[entry["dtype"]])
    return np.frombuffer(data[begin:end], dtype).reshape(entry["shape"])


def _bert_name(name: str) -> str:
    for ours, theirs in _BERT:
        name = re.sub(ours, theirs, name)
    return name


def _bert_weight(name: str, weight: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if name == _POSITIONS:
        return weight[None, : shape[1]]
    if name.endswith("kernel"):  # PyTorch stores [outputs, inputs]
        weight = weight.T
    if "MultiHeadDotProductAttention_1" in name and weight.size == math.prod(shape):
        weight = weight.reshape(shape)  # the kernel is divided among the heads
    return weight


def _filled(path: str | pathlib.Path, leaves: Mapping[str, Any], stored: Mapping) -> Any:
    """The stored weights where they fit, the given ones for a head that does not."""
    differences = {}
    for name, leaf in leaves.items():
        if name not in stored:
            differences[name] = f"{name} (missing), expected {leaf.shape}"
        elif stored[name].shape != leaf.shape:
            differences[name] = f"{name} {stored[name].shape}, expected {leaf.shape}"
    # A head for other classes is expected in fine-tuning; every other difference is an error.
    head = {name for name in leaves if name.startswith("head/")}
    if head.isdisjoint(differences):
        head = set()
    wrong = {words for name, words in differences.items() if name not in head}
    _expect_nothing(path, "does not fit the model:", wrong)
    filled = dict(leaves)
    for name, leaf in leaves.items():
        if name not in head:
            filled[name] = jnp.asarray(stored[name], leaf.dtype)
    return traverse_util.unflatten_dict(filled, sep="/")


def _expect_nothing(path: str | pathlib.Path, complaint: str, names: set[str]) -> None:
    if names:
        raise ValueError(f"{path}: {complaint} {', '.join(sorted(names)[:4])} ({len(names)}).")
