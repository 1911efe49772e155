# SPDX-License-Identifier: Apache-2.0
"""The files of a run that may be published: card, statements and parameters.

All are of the same step, unless the process was killed while it wrote them. Then the card counts
more steps than the parameters have.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import jax

from dpjax import processes, reports, trees
from dpjax._files import replace
from dpjax.training.run_folder import Folder
from dpjax.types import Algorithm, HeldOut, PyTree, State

_FILE = "params.msgpack"


def write_released(
    folder: Folder,
    algorithm: Algorithm,
    state: State,
    delta: float,
    method: str,
    *,
    last: bool,
    held_out: HeldOut | None = None,
    settings: str | None = None,
) -> None:
    """Writes card, statements and parameters of a state.

    Card and statements give epsilon at ``delta``, by ``method`` among others. ``last`` is whether
    the run has ended. ``held_out`` are the units that it did not train on, and ``settings`` is a
    sentence on how its settings were chosen.
    """
    # All processes take part in this line, because they may share a leaf.
    params = jax.tree.map(trees.on_host, state.params)
    if not processes.first_process():
        return
    path = folder.path
    mechanism: Any = algorithm.mechanism
    # None stands for all methods. The method "pld" takes seconds for many different steps, so cards
    # before the last have it only if it is the method of the run.
    methods = None if last else ("rdp", "rdp-classic", method)
    facts: dict[str, Any] = {"ledger": state.ledger, "methods": methods}
    card = reports.card(mechanism, delta, parameters=trees.digest(params), **facts)
    # Board and statement name these two, and the card does not: no epsilon follows from them.
    facts["held_out"] = held_out
    facts["settings"] = settings
    board = reports.board(mechanism, delta, **facts)
    words = reports.statement(mechanism, delta, scaled_by=algorithm.scaled_by, **facts)
    replace(path / "privacy.json", json.dumps(card, indent=2) + "\n", public=True)
    replace(path / "statement.txt", words + "\n", public=True)
    replace(path / "board.txt", board + "\n", public=True)
    # The parameters come last: no file counts fewer steps than they have.
    replace(path / _FILE, trees.serialized(params), public=True)


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
      Free: the card in the folder states the cost of the parameters.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from flax import serialization
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "params.msgpack"
      >>> _ = file.write_bytes(serialization.to_bytes({"w": jnp.arange(2.0)}))
      >>> released_params(file.parent, {"w": jnp.zeros(2)})
      {'w': Array([0., 1.], dtype=float32)}
    """
    path = pathlib.Path(folder)
    if path.is_dir():
        path = path / _FILE
    return trees.restored(path.read_bytes(), like, f"training.released_params({str(folder)!r})")
