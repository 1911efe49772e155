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
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPES |= {"I64": "int64", "I32": "int32"}
# From our names to BERT's, in this order.
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
    # Old files call the parameters of norms gamma and beta.
    today = {"gamma": "weight", "beta": "bias"}
    given = {
        re.sub(r"(gamma|beta)$", lambda m: today[m[0]], name.removeprefix("bert.")): value
        for name, value in read_safetensors(path).items()
    }
    leaves: Any = traverse_util.flatten_dict(params, sep="/")
    stored = {
        name: _bert_weight(name, given[_bert_name(name)], leaf.shape)
        for name, leaf in leaves.items()
        if _bert_name(name) in given
    }
    segments = given.get(_bert_name("segment/embedding"))
    if "segment/embedding" not in leaves and segments is not None and _POSITIONS in stored:
        stored[_POSITIONS] = stored[_POSITIONS].astype(np.float32) + segments[0].astype(np.float32)
    layers = {n: re.match(r"encoder\.layer\.(\d+)\.", n) for n in given}
    ours = " ".join(leaves)
    deeper = {n for n, m in layers.items() if m and f"encoderblock_{m[1]}/" not in ours}
    _expect_nothing(path, "has more layers than the model:", deeper)
    return _filled(path, leaves, stored)


def read_safetensors(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a ``.safetensors`` file, by name; bfloat16 is the type of ``ml_dtypes``."""
    data = memoryview(pathlib.Path(path).read_bytes())
    # The format is a length, a JSON header and raw numbers: no code runs when it is read.
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:size]))
    header.pop("__metadata__", None)
    return {name: _tensor(data[size:], entry) for name, entry in header.items()}


def _tensor(data: memoryview, entry: Mapping) -> np.ndarray:
    (begin, end), dtype = entry["data_offsets"], jnp.dtype(_DTYPES[entry["dtype"]])
    return np.frombuffer(data[begin:end], dtype).reshape(entry["shape"])


def _bert_name(name: str) -> str:
    # One rule after the other on the whole path: order matters, as weight and bias come last.
    for ours, theirs in _BERT:
        name = re.sub(ours, theirs, name)
    return name


def _bert_weight(name: str, weight: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if name == _POSITIONS:
        return weight[None, : shape[1]]
    if name.endswith("kernel"):  # PyTorch stores [outputs, inputs]
        weight = weight.T
    divided = "MultiHeadDotProductAttention_1" in name and weight.size == math.prod(shape)
    return weight.reshape(shape) if divided else weight


def _filled(path: str | pathlib.Path, leaves: Mapping[str, Any], stored: Mapping) -> Any:
    """The stored weights where they fit, the given ones for a head that does not."""
    unfit = {n for n, leaf in leaves.items() if n not in stored or stored[n].shape != leaf.shape}
    # A head for other classes is expected in fine-tuning; every other difference is an error.
    heads = {n for n in leaves if n.startswith("head/")}
    fresh = heads if heads & unfit else set()
    wrong = {
        f"{n} {stored[n].shape if n in stored else '(missing)'}, expected {leaves[n].shape}"
        for n in unfit - fresh
    }
    _expect_nothing(path, "does not fit the model:", wrong)
    read = {n: jnp.asarray(stored[n], leaf.dtype) for n, leaf in leaves.items() if n not in fresh}
    return traverse_util.unflatten_dict({**leaves, **read}, sep="/")


def _expect_nothing(path: str | pathlib.Path, complaint: str, names: set[str]) -> None:
    if names:
        raise ValueError(f"{path}: {complaint} {', '.join(sorted(names)[:4])} ({len(names)}).")
