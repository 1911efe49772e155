# SPDX-License-Identifier: Apache-2.0
"""Published weights: local files in, parameters out.

Two layouts are read: the ``.npz`` files of the original Vision Transformer release, whose names
`dpjax.models.ViT` uses, and BERT's ``.safetensors`` files, whose names are translated. A weight
that does not fit, or is not finite, is an error that names it; only the last layer keeps its
initial values if the file has other classes.

Files are data and never code: nothing is unpickled, and every size in a header is checked.
Nothing is downloaded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dpjax import trees
from dpjax._files import read_arrays
from dpjax.types import PyTree

_POSITIONS = "Transformer/posembed_input/pos_embedding"
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E4M3": jnp.float8_e4m3fn,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_BROKEN_OFF = (
    "Usually the download broke off, or the arrays were pickled, which is never read: it can run "
    "code."
)
_DIFFER = (
    "Usually depth, width, heads or patch of the model differ from the file's: print the shapes of "
    "both."
)
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


def load_vit(path: str | Path, params: PyTree) -> PyTree:
    """Fills the parameters of a `ViT` from an ``.npz`` of the original release.

    | the file has | the result has |
    |---|---|
    | a weight of the same shape | that weight, in the dtype of ``params`` |
    | positions of another grid | resized linearly, corners on corners; both grids square |
    | a head of other classes | the head of ``params`` |
    | a number that is not finite in the dtype of ``params`` | an error that names it |
    | any other difference | an error that names it |

    Args:
      path: The file; names may begin with ``params/`` or ``opt/target/``.
      params: ``model.init(...)["params"]``, for the size of image to be used.

    Returns:
      Parameters of the same structure.

    Privacy:
      The weights count as public: nothing is spent on what they were trained on.

    Example:
      >>> import tempfile
      >>> params = {"head": {"bias": jnp.zeros(2), "kernel": jnp.zeros((3, 2))}}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     np.savez(
      ...         f"{folder}/w.npz", **{"head/bias": np.ones(2), "head/kernel": np.eye(3)[:, :2]}
      ...     )
      ...     load_vit(f"{folder}/w.npz", params)["head"]["bias"]
      Array([1., 1.], dtype=float32)
    """
    stored = read_arrays(_existing(path), "models.load_vit", _BROKEN_OFF)
    leaves = _flat(params)
    for prefix in ("params/", "opt/target/"):
        inside = {n.removeprefix(prefix): v for n, v in stored.items() if n.startswith(prefix)}
        stored = inside or stored
    extra = {n for n in stored if n not in leaves and not n.startswith(("pre_logits/", "head/"))}
    _expect_nothing(path, "has weights that the model lacks", extra)
    if _POSITIONS in leaves and _POSITIONS in stored:
        stored[_POSITIONS] = _resize(path, stored[_POSITIONS], leaves[_POSITIONS].shape)
    return _fill(path, leaves, stored)


def load_bert(path: str | Path, params: PyTree) -> PyTree:
    """Fills a ``TextTransformer(layout="bert")`` from a BERT ``.safetensors`` file.

    Kernels are transposed and divided among the heads. The file does not contain the number of
    heads; the ``config.json`` in the same folder does. Positions beyond the model's length are
    left out. If the model has no segments, the first segment's vector is added to every position,
    as BERT does with one sentence. The classifier is read if it has the model's classes.

    Args:
      path: The file; names may begin with ``bert.``, and norms may have gamma and beta.
      params: ``model.init(...)["params"]``.

    Privacy:
      As for `load_vit`.
    """
    given, leaves = _bert_given(path), _flat(params)
    stored = {
        name: _bert_weight(name, given[_bert_name(name)], leaf.shape)
        for name, leaf in leaves.items()
        if _bert_name(name) in given
    }
    segments = given.get(_bert_name("segment/embedding"))
    if "segment/embedding" not in leaves and segments is not None and _POSITIONS in stored:
        # BERT adds the vector of the first segment to every token of a single sentence; a model
        # without segments gets it with the positions.
        # In float32 or wider: in bfloat16 the sum would be rounded.
        kind = trees.wide(leaves[_POSITIONS].dtype)
        stored[_POSITIONS] = _as(kind, stored[_POSITIONS]) + _as(kind, segments[0])
    layers = {n: re.match(r"encoder\.layer\.(\d+)\.", n) for n in given}
    ours = " ".join(leaves)
    deeper = {n for n, m in layers.items() if m and f"encoderblock_{m[1]}/" not in ours}
    _expect_nothing(path, "has more layers than the model:", deeper)
    return _fill(path, leaves, stored)


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a ``.safetensors`` file, by name; bfloat16 is the type of ``ml_dtypes``."""
    data = memoryview(_existing(path).read_bytes())
    size = int.from_bytes(data[:8], "little")
    try:
        if not 2 <= size <= len(data) - 8:
            raise ValueError(f"a header of {size} bytes in a file of {len(data)}")
        # The format is a length, a JSON header and raw numbers: no code runs when it is read.
        header = json.loads(bytes(data[8 : 8 + size]))
        return {
            name: _tensor(data[8 + size :], name, entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    # A RecursionError, of a header of nested brackets.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: not a whole safetensors file ({error}). Usually the download broke off, "
            "or the saved file is a page of text: fetch it again and compare its size."
        ) from error


def _tensor(data: memoryview, name: str, entry: Mapping) -> np.ndarray:
    (begin, end), kind = entry["data_offsets"], entry["dtype"]
    if kind not in _DTYPES:
        raise ValueError(f"{name} has the type {kind!r}; expected one of {', '.join(_DTYPES)}")
    dtype, shape = np.dtype(_DTYPES[kind]), tuple(entry["shape"])
    count = math.prod(shape)
    # A header from elsewhere may lie: no offset is used before it is compared with the file.
    if not 0 <= begin <= end <= len(data) or end - begin != count * dtype.itemsize:
        raise ValueError(f"{name} of shape {shape} is said to be at {begin}:{end}")
    return np.frombuffer(data, dtype, count, begin).reshape(shape)


def _flat(params: PyTree) -> dict[str, Any]:
    leaves: Any = traverse_util.flatten_dict(params, sep="/")
    return leaves


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: there is no such file. dpjax downloads no weights: fetch the published "
            "file yourself and give its path."
        )
    return path


def _resize(path: str | Path, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Moves position vectors to another grid; the class token's stays as it is."""
    if stored.shape == shape or stored.ndim != 3 or stored.shape[2] != shape[2]:
        return stored
    # Text becomes NaN, which `_fill` refuses by name.
    stored = _as(np.dtype(np.float32), stored)
    sides = [math.isqrt(n - 1) for n in (stored.shape[1], shape[1])]
    if any(side**2 != n - 1 for side, n in zip(sides, (stored.shape[1], shape[1]), strict=True)):
        raise ValueError(
            f"{path}: {_POSITIONS} has {stored.shape[1]} positions, the model {shape[1]}; both "
            "must be a square and one class token. Use square images."
        )
    from scipy import ndimage  # half a second that only another image size costs

    # The class token has no place in the image, so its vector is not interpolated.
    first, grid = stored[0, :1], stored[0, 1:].reshape(sides[0], sides[0], -1)
    factor = sides[1] / sides[0]
    # Bilinear, as in the published code for fine-tuning at another resolution.
    grid = np.asarray(ndimage.zoom(grid, (factor, factor, 1), order=1))
    return np.concatenate([first, grid.reshape(sides[1] ** 2, -1)])[None]


def _bert_given(path: str | Path) -> dict[str, np.ndarray]:
    """BERT's weights by their current names; old files call norms' parameters gamma and beta."""
    today = {"gamma": "weight", "beta": "bias"}
    return {
        re.sub(r"(gamma|beta)$", lambda m: today[m[0]], name.removeprefix("bert.")): value
        for name, value in read_safetensors(path).items()
    }


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


def _fill(path: str | Path, leaves: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> PyTree:
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
    read = {n: _as(leaf.dtype, stored[n]) for n, leaf in leaves.items() if n not in fresh}
    broken = {
        f"{n} ({stored[n].dtype})" for n, weight in read.items() if not np.isfinite(weight).all()
    }
    # One such weight would make every gradient NaN, and every example be dropped.
    hint = "Usually the training diverged, or params are narrower than the file: print the weights."
    _expect_nothing(
        path, "has NaN, infinity or no numbers, in the dtype of params, in", broken, hint
    )
    filled = {n: jnp.asarray(read[n]) if n in read else leaf for n, leaf in leaves.items()}
    return traverse_util.unflatten_dict(filled, sep="/")


def _as(dtype: np.dtype, weight: np.ndarray) -> np.ndarray:
    """A weight in another dtype; NaN where it holds text or complex numbers."""
    if not any(jnp.issubdtype(weight.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        return np.full(weight.shape, np.nan, dtype)
    with np.errstate(over="ignore"):  # becomes infinite, which `_fill` refuses by name
        return weight.astype(dtype)


def _expect_nothing(path: str | Path, complaint: str, names: set[str], hint: str = _DIFFER) -> None:
    if names:
        shown = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
        raise ValueError(f"{path}: {complaint} {shown} ({len(names)} in all). {hint}")
