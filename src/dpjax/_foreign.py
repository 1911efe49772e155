# SPDX-License-Identifier: Apache-2.0
"""Data of other libraries: tensors and frames become NumPy arrays, the rest is answered by name.

No other library is imported. A tensor or a frame has `__array__`; everything else is known by its
methods and by the module of its type, and the error holds the line that converts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from dpjax.types import PyTree

__all__ = ["arrays", "joined_records", "kind_of", "no_arrays"]

# From the library to the line that makes an array of numbers.
_CONVERT = {
    "torch": "tensor.detach().cpu().numpy(), for bfloat16 with .float() before .numpy()",
    "pandas": "frame[columns].to_numpy('float32'), with the columns that hold numbers",
    "polars": "frame.select(columns).to_numpy(), with the columns that hold numbers",
}
# Transformations of grain after which a record is no single example, or one that occurs again.
_JOINED = {
    "BatchMapDataset": "`.batch(...)` makes one record of several examples",
    "RepeatMapDataset": "`.repeat(...)` gives an example several indices, so it could count twice",
}


def arrays(tree: PyTree, name: str) -> PyTree:
    """The tree, with tensors and frames of other libraries as NumPy arrays.

    Args:
      tree: What the user gave as data, or as a batch.
      name: How errors call it: ``"dpsgd data"``.

    Raises:
      TypeError: A leaf is a loader, a source that is read by index, or has no numbers.
    """
    if isinstance(tree, Iterator):  # jax.tree.map of an iterator is deprecated
        raise no_arrays(tree, name)

    def converted(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | str | bytes):
            return leaf
        if hasattr(leaf, "__array__"):
            where = jax.tree_util.keystr(path, simple=True, separator="/") or "(the array)"
            return _numbers(leaf, f"{name}: leaf {where}")
        if isinstance(leaf, Iterable) or hasattr(leaf, "__getitem__"):
            raise no_arrays(leaf, name)
        return leaf

    return jax.tree_util.tree_map_with_path(converted, tree)


def no_arrays(given: Any, name: str) -> TypeError:
    """The error for a loader, an iterator, a source, or another object that is not an array."""
    cure = (
        "Usually a loader or an iterator was given: dpsgd draws the batches itself, because their "
        "sampling is accounted. Give the arrays of all examples, or dpjax.data.Stream(source, "
        "example=...) over a source that can be indexed."
    )
    if hasattr(given, "dataset"):  # torch's loader has one
        cure = (
            "A loader draws the batches, and dpsgd draws them itself, because their sampling is "
            "accounted. Give its data set: dpjax.data.Stream(loader.dataset)."
        )
    elif hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        cure = (
            "It is read by index: dpjax.data.Stream(source) is data for dpsgd, with "
            "example=lambda record: ... if a record is more than numbers. Stream(source)"
            ".rows(indices) is one batch of arrays."
        )
    return TypeError(f"{name}: got a {kind_of(given)}; expected arrays. {cure}")


def joined_records(source: Any) -> str | None:
    """Why the records of a grain data set are no single examples; None if they are."""
    if not kind_of(source).startswith("grain."):
        return None
    reasons = map(joined_records, getattr(source, "parents", ()))
    return _JOINED.get(type(source).__name__) or next(filter(None, reasons), None)


def kind_of(given: Any) -> str:
    """The library and the name of a type, ``torch.Tensor``; of Python's and a script's the name."""
    kind = type(given)
    library = kind.__module__.split(".")[0]
    return kind.__name__ if library in ("builtins", "__main__") else f"{library}.{kind.__name__}"


def _numbers(leaf: Any, name: str) -> np.ndarray:
    """A tensor or a frame as an array of numbers."""
    kind = kind_of(leaf)
    line = _CONVERT.get(kind.split(".")[0], "numpy.asarray(array, 'float32')")
    try:
        found, why = np.asarray(leaf), "some of it is no number"
    except (RuntimeError, TypeError, ValueError) as error:
        found, why = None, str(error)
    if found is None or found.dtype.kind == "O":
        raise TypeError(
            f"{name} is a {kind}, and NumPy makes no array of numbers of it ({why}). Convert it: "
            f"{line}."
        )
    return found
