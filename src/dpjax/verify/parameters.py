# SPDX-License-Identifier: Apache-2.0
"""The SHA-256 of the parameters in a ``params.msgpack``, by a reader of its own.

Flax writes an array as the msgpack extension 1, which holds ``(shape, dtype, bytes)``, and one of
more than a gigabyte as a mapping of flat chunks. `dpjax.trees.digest` documents the digest.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any, NamedTuple

from dpjax.verify.facts import Unreadable

_ARRAY = 1
_CHUNKED = "__msgpack_chunked_array__"


class Leaf(NamedTuple):
    """An array, without a copy as numbers."""

    shape: list[int]
    dtype: str
    parts: list[bytes]


def digest(path: pathlib.Path) -> str:
    """The digest of the parameters in a file, as `dpjax.trees.digest` has it of arrays."""
    import msgpack  # Flax brings it; a card without parameters does not need it

    try:
        content = msgpack.unpackb(path.read_bytes(), ext_hook=_array, strict_map_key=False)
        leaves = {name: _whole(leaf) for name, leaf in content.items()}
    except OSError as error:
        raise Unreadable(f"{path.name} cannot be read ({error}).") from None
    except Exception as error:  # msgpack raises many kinds
        raise Unreadable(f"{path.name} holds no parameters of a run ({error}).") from None
    total = hashlib.sha256()
    for name in sorted(leaves):
        leaf = leaves[name]
        total.update(f"{json.dumps([name, leaf.dtype, leaf.shape])}\n".encode())
        for part in leaf.parts:
            total.update(part)
    return total.hexdigest()


def _array(kind: int, content: bytes) -> Leaf:
    import msgpack

    if kind != _ARRAY:
        raise ValueError(f"extension {kind} is not an array")
    shape, dtype, numbers = msgpack.unpackb(content)
    return Leaf(list(shape), dtype, [numbers])


def _whole(leaf: Any) -> Leaf:
    """An array, whose chunks are joined if it was cut."""
    if isinstance(leaf, Leaf):
        return leaf
    if not leaf[_CHUNKED]:
        raise ValueError("a leaf is not an array")
    count = len(leaf["chunks"])
    chunks = [leaf["chunks"][str(place)] for place in range(count)]
    shape = [leaf["shape"][str(axis)] for axis in range(len(leaf["shape"]))]
    parts = [part for chunk in chunks for part in chunk.parts]
    return Leaf(shape, chunks[0].dtype, parts)
