# SPDX-License-Identifier: Apache-2.0
"""Arrays, tensors and frames of the user, which all have `__array__`, as arrays of NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from dpjax.types import PyTree


def arrays(tree: PyTree, name: str) -> PyTree:
    """The tree with each tensor or frame as an array of NumPy; arrays of JAX and numbers stay.

    ``name`` is the name of the argument, for error messages.
    """
    if isinstance(tree, Iterator):  # deprecated as a leaf: JAX warns, and will raise
        raise no_arrays(tree, name)

    def converted(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array | np.number | np.bool):
            return leaf
        # Text is not an array; `native` refuses it with the name of the leaf.
        if isinstance(leaf, str | bytes) or hasattr(leaf, "__array__"):
            # The path is empty if the tree is a single leaf.
            where = jax.tree_util.keystr(path, simple=True, separator="/") or "(the array)"
            return native(leaf, f"{name}: leaf {where}")
        # A loader or a data set has many records, but JAX takes the whole object for one leaf.
        if isinstance(leaf, Iterable) or hasattr(leaf, "__getitem__"):
            raise no_arrays(leaf, name)
        return leaf  # such as a number of Python

    return jax.tree_util.tree_map_with_path(converted, tree)


def native(given: Any, called: str, dtype: DTypeLike | None = None) -> np.ndarray:
    """NumPy's array, of numbers that JAX holds unchanged; ``dtype`` is JAX's for it, if known."""
    array = np.asarray(given)
    if array.dtype.kind in "OSUMm":  # objects, text, dates and durations
        raise TypeError(f"{called} is of type {array.dtype}; expected numbers.")
    if array.dtype.kind in "iu" and array.size:
        # JAX takes the last 32 bits: a label of 2^32 trains class 0.
        dtype = np.dtype(dtype or jax.dtypes.canonicalize_dtype(array.dtype))
        if dtype != array.dtype and (array.astype(dtype) != array).any():
            raise ValueError(
                f"{called} has whole numbers from {array.min()} to {array.max()}; expected "
                f"numbers that fit into {dtype}, the type that JAX computes with."
            )
    return array


def no_arrays(given: Any, name: str) -> TypeError:
    """The error for a loader, an iterator, a source, or another object that is not an array."""
    return TypeError(
        f"{name}: got a {type(given).__name__}; expected arrays. Of a loader give its data set, "
        "and of a source that is read by index dpjax.data.Stream(source): dpsgd draws the batches."
    )
