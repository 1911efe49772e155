# SPDX-License-Identifier: Apache-2.0
"""Features of a whole data set: computed once, then read.

A file's name has a hash of the data's bytes and of the settings, so a file is never stale. A cache
is as secret as the data.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpjax import checks
from dpjax._files import replacing
from dpjax.scattering import scatter

# A new version, for a transform whose values change, makes old files unused.
_VERSION = 1


def scattered(
    images: np.ndarray,
    J: int = 2,
    L: int = 8,
    *,
    directory: str | os.PathLike[str] | None = None,
    batch_size: int = 2048,
) -> np.ndarray:
    """The scattering features of all images, ``[examples, out_height, out_width, features]``.

    Args:
      images: ``[examples, height, width, channels]``, floating point.
      J: The number of scales; see `dpjax.scattering.scatter`.
      L: The number of angles.
      directory: The folder of the cache; by default features are computed in every call.
      batch_size: The number of images on the device; changes only speed and memory.

    Privacy:
      Each row is a function of one image: the features cost nothing, and are as secret as the
      images.

    Example:
      >>> scattered(np.ones((5, 8, 8, 1), np.float32), J=1, L=2, batch_size=2).shape
      (5, 4, 4, 3)
    """
    batch_size = checks.whole("features.scattered", "batch_size", batch_size)

    def transform(images: Any) -> jax.Array:
        return scatter(images, J, L)

    images = np.asarray(images)
    # One byte order, so equal images share a file.
    images = images.astype(images.dtype.newbyteorder("="), copy=False)
    # The shape and the dtype of the features of one image, which is not transformed.
    one_image = jax.ShapeDtypeStruct((1, *images.shape[1:]), images.dtype)
    row = jax.eval_shape(transform, one_image)  # [1, out_height, out_width, features]

    def compute(images: np.ndarray) -> np.ndarray:
        # One array is filled: features are several times as large as the images, and joining
        # batches needs them twice.
        features = np.empty((len(images), *row.shape[1:]), row.dtype)
        size = min(batch_size, len(images))  # of every batch; the last one is padded to it
        for start in range(0, len(images), max(1, size)):  # `range` refuses a step of 0
            batch = images[start : start + size]
            count = len(batch)
            if count < size:  # compiling a second shape takes longer than padding
                batch = np.pad(batch, [(0, size - count)] + [(0, 0)] * (images.ndim - 1))
            features[start : start + count] = transform(batch)[:count]
        return features

    if directory is None:
        return compute(images)
    # All facts that decide the features. Order 2 is the most wavelets on a path of `scatter`.
    settings = {"J": J, "L": L, "order": 2, "dtype": str(row.dtype), "version": _VERSION}
    return cached(compute, images, settings=settings, directory=directory, name="scattering")


def cached(
    compute: Callable[[np.ndarray], np.ndarray],
    inputs: np.ndarray,
    *,
    settings: Mapping[str, Any],
    directory: str | os.PathLike[str],
    name: str = "features",
) -> np.ndarray:
    """Returns ``compute(inputs)``, from the disk if it was computed before.

    The file is ``{name}-{hash}.npy`` in the directory, with a hash of the inputs and the settings.

    Args:
      compute: A function of the inputs that returns one array.
      inputs: An array; a single changed bit makes another hash.
      settings: All other facts that the result depends on, as JSON: numbers, strings, lists.
      directory: The folder; made if it does not exist.
      name: The beginning of the file's name.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> double = lambda x: print("computing") or 2 * x
      >>> for _ in range(2):
      ...     print(cached(double, np.arange(3), settings={}, directory=folder))
      computing
      [0 2 4]
      [0 2 4]
    """
    inputs = np.asarray(inputs)
    # The name of a dtype leaves out the byte order. Its `str` has it, but is "<V2" for bfloat16, as
    # for any other type of two bytes that NumPy does not know. Together they identify the dtype.
    kind = [inputs.dtype.name, inputs.dtype.str]
    facts = {"name": name, "kind": kind, "shape": inputs.shape, "settings": dict(settings)}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    # The hash reads all bytes, because a changed image must not get the features of the old one.
    content = np.ascontiguousarray(inputs).reshape(-1).view(np.uint8)
    digest.update(content.data)
    path = Path(directory, f"{name}-{digest.hexdigest()[:32]}.npy")
    if path.is_file():
        return np.load(path, allow_pickle=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    computed = np.asarray(compute(inputs))
    with replacing(path) as file:  # written whole or not at all, so no later call reads a part
        np.save(file, computed, allow_pickle=False)
    return computed
