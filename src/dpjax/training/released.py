# SPDX-License-Identifier: Apache-2.0
"""What a run may publish, in the files of its folder: card, statements and parameters.

All are of the same step, or a kill left a card that counts more.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import processes, reports, trees
from dpjax._files import replace
from dpjax.mechanism import Mechanism
from dpjax.training.run_folder import Folder
from dpjax.types import HeldOut, PyTree, State

_FILE = "params.msgpack"


def write_released(
    folder: Folder,
    mechanism: Mechanism,
    state: State,
    delta: float,
    method: str,
    *,
    last: bool,
    held_out: HeldOut | None = None,
) -> None:
    """Writes card, statement and parameters of a state; a last card states all methods."""
    params = jax.tree.map(trees.on_host, state.params)  # of all processes
    if not processes.first_process():
        return
    path = folder.path
    # Loss distributions of many different steps take seconds: the last card has them.
    methods = None if last else ("rdp", "rdp-classic", method)
    facts: dict[str, Any] = {"ledger": state.ledger, "methods": methods}
    card = reports.card(mechanism, delta, **facts)
    facts["held_out"] = held_out
    board = reports.board(mechanism, delta, **facts)
    facts["scaled_by"] = _scaled_by(folder.identity, mechanism)
    words = reports.statement(mechanism, delta, **facts)
    replace(path / "privacy.json", json.dumps(card, indent=2) + "\n", public=True)
    replace(path / "statement.txt", words + "\n", public=True)
    replace(path / "board.txt", board + "\n", public=True)
    replace(path / _FILE, serialized(params), public=True)


def _scaled_by(identity: Mapping[str, Any], mechanism: Mechanism) -> str | None:
    """What this run multiplies sum and noise by, which its mechanism does not say."""
    match identity:  # of another algorithm, these names are of the caller's configuration
        case {"algorithm": "dpsgd", "bound schedule": str()}:
            return "a bound schedule"
        case {"algorithm": "fedavg", "weights": {"total": total}}:
            return None if total == mechanism.sampling.examples else "the total of weights"
    return None


def released_params(folder: str | os.PathLike[str], like: PyTree) -> PyTree:
    """The parameters that a run left in its folder, as a tree like ``like``.

    Leaves are found by their names, in every tree that `fit` trains: the parameters of Flax and
    Haiku, states of NNX, modules of Equinox, tuples.

    Args:
      folder: The folder of a run of `fit` or of ``dpjax train``, or its ``params.msgpack``.
      like: The tree that was trained, with any numbers, or its shapes (``jax.eval_shape``).

    Returns:
      The structure of ``like`` with the arrays of the file: the parameters of the last row of the
      log, or the averaged ones of a ``dpjax train`` that has ended.

    Raises:
      ValueError: The file has other leaves, or leaves of other shapes.

    Privacy:
      Free: the card in the folder says what the parameters cost.

    Example:
      >>> import tempfile
      >>> from flax import serialization
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "params.msgpack"
      >>> _ = file.write_bytes(serialization.to_bytes({"w": jnp.arange(2.0)}))
      >>> released_params(file.parent, {"w": jnp.zeros(2)})
      {'w': Array([0., 1.], dtype=float32)}
    """
    path, call = pathlib.Path(folder), f"training.released_params({str(folder)!r})"
    return restored((path / _FILE if path.is_dir() else path).read_bytes(), like, call)


def restored(saved: bytes, like: PyTree, where: str) -> PyTree:
    """What `serialized` has written, in the structure of ``like``; ``where`` opens errors."""
    from flax import serialization

    leaves, structure = jax.tree.flatten(like)
    expected = dict(zip(trees.leaf_names(like), leaves, strict=True))
    arrays = dict(serialization.msgpack_restore(saved))
    for name in {**expected, **arrays}:
        there, here = (
            list(np.shape(by_name[name])) if name in by_name else "no leaf"
            for by_name in (arrays, expected)
        )
        if there != here:
            raise ValueError(
                f"{where}: found {there} at {name!r}, expected {here}. Give the tree that was "
                "trained."
            )
    return structure.unflatten(jnp.array(arrays[name]) for name in expected)


def serialized(params: Any) -> bytes:
    """The leaves of parameters by name, as msgpack in the dialect of Flax."""
    from flax import serialization  # which training without a folder does not need

    held = jax.tree.map(np.asarray, jax.device_get(params))
    named = dict(zip(trees.leaf_names(held), jax.tree.leaves(held), strict=True))
    return serialization.msgpack_serialize(named)
