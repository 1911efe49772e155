# SPDX-License-Identifier: Apache-2.0
"""The SHA-256 of the parameters in a ``params.msgpack``, by a reader of its own.

Flax writes an array as an extension of msgpack, which holds ``(shape, dtype, bytes)``, and one of
more than a gigabyte as a mapping of flat chunks. `dpjax.trees.digest` documents the digest.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any, NamedTuple

import msgpack

from dpjax.verify.facts import Unreadable


class Leaf(NamedTuple):
    """An array, whose numbers stay bytes."""

    shape: list[int]
    dtype: str
    numbers: bytes


def digest(path: pathlib.Path) -> str:
    """The digest of the parameters in a file, as `dpjax.trees.digest` has it of arrays."""
    try:
        return _digest(path.read_bytes())
    except Exception as error:  # msgpack raises many kinds
        raise Unreadable(f"{path.name} holds no parameters of a run ({error}).") from None


def _digest(content: bytes) -> str:
    """Hashes each array's name, dtype and shape, and then its numbers, in the order of names."""
    leaves = msgpack.unpackb(content, ext_hook=lambda _, array: Leaf(*msgpack.unpackb(array)))
    hasher = hashlib.sha256()
    for name in sorted(leaves):
        leaf = leaves[name]
        if isinstance(leaf, dict):  # an array of more than a gigabyte, in chunks
            chunks = _ordered(leaf["chunks"])
            shape = _ordered(leaf["shape"])
        else:
            chunks = [leaf]
            shape = leaf.shape
        hasher.update(f"{json.dumps([name, chunks[0].dtype, shape])}\n".encode())
        for chunk in chunks:
            hasher.update(chunk.numbers)
    return hasher.hexdigest()


def _ordered(entries: dict[str, Any]) -> list[Any]:
    """The list that Flax wrote as a mapping from ``"0"``, ``"1"``, ... to its entries."""
    return [entries[str(place)] for place in range(len(entries))]
