# SPDX-License-Identifier: Apache-2.0
"""The door for data: what is given becomes arrays that JAX reads as they are, or is refused.

Tensors and frames of other libraries become NumPy arrays; loaders and sources are answered by
name. No other library is imported. A tensor or a frame has `__array__`; everything else is known
by its methods and by the module of its type, and the error holds the line that converts it.

JAX would cut whole numbers off at 32 bits and drop a mask without a word: `native` refuses both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dpjax.types import PyTree

__all__ = [
    "arrays",
    "fits",
    "fitted",
    "kind_of",
    "native",
    "no_arrays",
    "plain",
    "unmasked",
]

# From the library to the line that makes an array of numbers.
_CONVERT = {
    "torch": "tensor.detach().cpu().numpy(), for bfloat16 with .float() before .numpy()",
    "pandas.Series": "series.cat.codes.to_numpy() for categories (a missing one is -1), "
    "np.unique(series, return_inverse=True)[1] for words",
    "pandas": "frame[columns].to_numpy('float32'), with the columns that hold numbers",
    "polars": "frame.select(columns).to_numpy(), with the columns that hold numbers",
}


def arrays(tree: PyTree, name: str) -> PyTree:
    """The tree with its arrays, tensors and frames as `native` arrays.

    Arrays of JAX, single numbers and single objects stay as they are.

    Args:
      tree: What the user gave as data, as a batch or as parameters.
      name: How errors call it: ``"dpsgd data"``.

    Raises:
      TypeError: A leaf is a loader, a source that is read by index, a masked array, or text.
      ValueError: A leaf has whole numbers of more bits than JAX computes with, or two frames
        differ in their index.
    """
    if isinstance(tree, Iterator):  # jax.tree.map of an iterator is deprecated
        raise no_arrays(tree, name)
    _check_labels(jax.tree.leaves(tree), name)

    def converted(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array | np.number | np.bool):
            return leaf
        where = jax.tree_util.keystr(path, simple=True, separator="/") or "(the array)"
        called = f"{name}: leaf {where}"
        if isinstance(leaf, np.ndarray | str | bytes):
            return native(leaf, called)
        if hasattr(leaf, "__array__"):
            return native(_numbers(leaf, called), called)
        if isinstance(leaf, Iterable) or hasattr(leaf, "__getitem__"):
            raise no_arrays(leaf, name)
        return leaf

    return jax.tree_util.tree_map_with_path(converted, tree)


def native(given: Any, called: str) -> np.ndarray:
    """The array as NumPy and JAX compute with it; refuses what JAX would change or leave out.

    Args:
      given: An array, or what NumPy makes one of.
      called: How errors call it: ``"dpsgd data: leaf 0"``.

    Example:
      >>> native(np.ones(2, ">f4"), "x").dtype.isnative
      True
    """
    array = plain(given, called)
    if array.dtype.kind not in "iu":
        return array
    return fitted(array, jax.dtypes.canonicalize_dtype(array.dtype), called)


def plain(given: Any, called: str) -> np.ndarray:
    """The array in this machine's byte order; refuses masks, text and fields. See `native`."""
    array = unmasked(given, called)
    if array.dtype.kind in "OSUMm":
        raise TypeError(
            f"{called} is of type {array.dtype}; expected numbers. Usually labels are words: "
            "np.unique(labels, return_inverse=True)[1] numbers them. Of numbers of several types "
            "in one array, as frame.values makes it, write array.astype('float32'). Leave other "
            "text out: a name among the parameters stands in the loss."
        )
    if array.dtype.names is not None:
        raise TypeError(
            f"{called} is a structured array with the fields {', '.join(array.dtype.names):.200}; "
            "expected numbers. Usually np.genfromtxt(names=True) read a table: "
            "numpy.lib.recfunctions.structured_to_unstructured(array) has a column for each field, "
            "and array[field] is one column."
        )
    if not array.dtype.isnative:  # FITS, HDF5 and IDX store the other order, which JAX refuses
        return array.astype(array.dtype.newbyteorder("="))
    return array


def fitted(array: np.ndarray, kind: Any, called: str) -> np.ndarray:
    """The array; refuses whole numbers that JAX would change where it makes ``kind`` of them."""
    # JAX takes the last 32 bits: labels of 2^32 and 2^32 + 1 would train classes 0 and 1.
    if array.dtype.kind in "iu" and kind != array.dtype and not fits(array, kind):
        raise ValueError(
            f"{called} has whole numbers from {array.min()} to {array.max()}; expected numbers "
            f"that fit into {kind}, the type that JAX computes with. Usually they are identifiers, "
            "times or hashes: leave them out, or number them from 0. Quantities are floats."
        )
    return array


def unmasked(given: Any, called: str) -> np.ndarray:
    """The array of NumPy; refuses a masked one, whose mask NumPy would leave out."""
    if isinstance(given, np.ma.MaskedArray):
        raise TypeError(
            f"{called} is a masked array, and its mask would be ignored; expected a plain array. "
            "Fill it first, array.filled(value), or leave masked examples out."
        )
    return np.asarray(given)


def fits(numbers: np.ndarray, kind: Any) -> bool:
    """Whether a type of whole numbers holds all of these.

    Example:
      >>> fits(np.array([0, 2**31 - 1]), np.int32), fits(np.array([2**31]), np.int32)
      (True, False)
    """
    # Not by the absolute value: in int64, abs(-2**63) is -2**63.
    limits = np.iinfo(kind)
    return not numbers.size or bool(limits.min <= numbers.min() and numbers.max() <= limits.max)


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
    elif isinstance(given, Mapping):  # of h5py, or the splits of a data set
        cure = "It is a mapping: give the arrays or the split that it holds, by their keys."
    elif hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        cure = (
            "It is read by index: dpjax.data.Stream(source) is data for dpsgd, with "
            "example=lambda record: ... if a record is more than numbers. Stream(source)"
            ".rows(indices) is one batch of arrays."
        )
    return TypeError(f"{name}: got a {kind_of(given)}; expected arrays. {cure}")


def kind_of(given: Any) -> str:
    """The library and the name of a type, ``torch.Tensor``; of Python's and a script's the name."""
    kind = type(given)
    library = kind.__module__.split(".")[0]
    return kind.__name__ if library in ("builtins", "__main__") else f"{library}.{kind.__name__}"


def _check_labels(leaves: list[Any], name: str) -> None:
    """Refuses frames with other row labels than each other: rows are paired by position."""
    frames = [leaf for leaf in leaves if kind_of(leaf).startswith("pandas.")]
    labels = [frame.index for frame in frames if hasattr(frame, "index")]
    if any(not each.equals(labels[0]) for each in labels):
        raise ValueError(
            f"{name}: the index of one frame is not that of another; expected equal ones, because "
            "rows are paired by position. Usually one was shuffled or filtered: order it as the "
            "other, series.loc[frame.index]. If positions are meant, give each as .to_numpy()."
        )


def _numbers(leaf: Any, name: str) -> np.ndarray:
    """A tensor or a frame as an array of numbers."""
    kind = kind_of(leaf)
    line = _CONVERT.get(kind) or _CONVERT.get(kind.split(".")[0], "np.asarray(array, 'float32')")
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
