# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saves any state atomically, and restores it to the last bit.

Privacy: `dpjax.fit` saves states without their noise keys, but a checkpoint holds means without
noise and, with correlated noise, its memory. So other users cannot read the folder, and it must not
be released.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import checks, meshes, processes, trees
from dpjax.types import PyTree

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


class Damaged(RuntimeError):
    """The last checkpoint cannot be read."""


class Restored(NamedTuple):
    """The contents of a checkpoint."""

    state: PyTree
    """The saved state, in the structure of ``like``."""
    facts: Mapping[str, Any]
    """The JSON that was saved with it."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: A folder for these checkpoints alone; made if it does not exist.
      keep: The number of latest checkpoints that are kept.

    Example:
      >>> import tempfile
      >>> saved = Checkpoints(tempfile.mkdtemp())
      >>> saved.save(3, {"w": jnp.arange(2.0)}, {"note": "three"})
      >>> state, facts = saved.latest(like={"w": jnp.zeros(2)})
      >>> state["w"].tolist(), facts["note"]
      ([0.0, 1.0], 'three')
      >>> saved.close()
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        self.directory = pathlib.Path(directory).absolute()
        self.keep = keep
        # Of several processes the first alone reads and writes.
        processes.from_first(self._open)

    def _open(self) -> None:
        import orbax.checkpoint as ocp  # a second that only runs with a folder cost

        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        # Orbax would otherwise wait for the other processes, which have no manager.
        alone: Any = {"active_processes": {0}} if jax.process_count() > 1 else {}
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.keep,
            cleanup_tmp_directories=True,  # what a kill left half written
            # A step is released only after its checkpoint is on disk.
            enable_async_checkpointing=False,
            create=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(**alone),
        )
        self.args = ocp.args
        self.manager: ocp.CheckpointManager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Writes a tree of arrays and typed keys, and facts as JSON; returns when they are on disk.

        Raises:
          OSError: It could not be written.
          ValueError: This step or a later one is there.
        """
        # Of several processes, each gives its part.
        numbers = map(trees.on_host, jax.tree.leaves(state))
        named = dict(zip(trees.leaf_names(state), numbers, strict=True))
        processes.from_first(lambda: self._write(step, named, facts))

    def _write(self, step: int, named: dict[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        # Orbax skips such a step without a word, and then the step would be released unsaved.
        if (last := self.manager.latest_step()) is not None and last >= step:
            raise ValueError(
                f"checkpoints.save(step={step}): {self.directory} holds step {last}; expected a "
                "later one."
            )
        # Orbax cannot write arrays without elements; their shapes are in the notes.
        written = {str(i): x for i, x in enumerate(named.values()) if x.size}
        notes = {
            "facts": facts,
            "leaves": {name: [list(x.shape), x.dtype.name] for name, x in named.items()},
            "digest": trees.fingerprint(list(named.values())),
        }
        args = self.args.Composite(
            state=self.args.StandardSave(written), notes=self.args.JsonSave(notes)
        )
        error: Any = None
        try:
            self.manager.save(step, args=args)
            self.manager.wait_until_finished()
        except Exception as fault:  # storage layers raise many unrelated kinds
            error = fault
        if error or not (self.directory / str(step)).is_dir():
            self._open()  # after an error the manager cannot be used
            raise OSError(
                f"checkpoints: step {step} could not be written to {self.directory} "
                f"({_first_line(error)}). Run the same command again."
            ) from error

    def latest(self, like: PyTree) -> Restored | None:
        """The latest checkpoint, with the structure and the shapes of ``like``; None without one.

        Raises:
          Damaged: It cannot be read.
          ValueError: It has another structure or other shapes than ``like``.
        """
        saved = processes.from_first(self._latest)
        if saved is None:
            return None
        step, named, facts = saved
        return Restored(_as(like, named, f"{self.directory}/{step}"), facts)

    def _latest(self) -> tuple[int, dict[str, np.ndarray], Mapping[str, Any]] | None:
        if (step := self.manager.latest_step()) is None:
            return None
        try:
            return step, *self._read(step)
        except Exception as error:  # a damaged file raises many unrelated kinds
            raise Damaged(f"{self.directory}/{step} is damaged ({_first_line(error)}).") from error

    def _read(self, step: int) -> tuple[dict[str, np.ndarray], Mapping[str, Any]]:
        """The leaves of a checkpoint by name, checked against their digest, and the facts."""

        def read(**items: Any) -> Any:
            return self.manager.restore(step, args=self.args.Composite(**items))

        notes = read(notes=self.args.JsonRestore())["notes"]
        # By jnp.dtype, which knows bfloat16's name.
        empty = [np.empty(shape, jnp.dtype(dtype)) for shape, dtype in notes["leaves"].values()]
        # As NumPy arrays of the saved shapes: what they become on a device is decided against
        # `like`, with an error that names the leaf.
        target = {str(i): x for i, x in enumerate(empty) if x.size}
        arrays = read(state=self.args.StandardRestore(target))["state"]
        numbers = [np.asarray(arrays.get(str(i), x)) for i, x in enumerate(empty)]
        # Orbax notices a file that is cut off, not one whose content was exchanged.
        if trees.fingerprint(numbers) != notes["digest"]:
            raise ValueError("its numbers differ from the saved ones")
        return dict(zip(notes["leaves"], numbers, strict=True)), notes["facts"]

    def close(self) -> None:
        """Ends the threads."""
        if processes.first_process():
            self.manager.close()


def _as(like: PyTree, named: Mapping[str, np.ndarray], where: str) -> PyTree:
    """The leaves in the structure of ``like``, as JAX arrays, keys or NumPy arrays like there."""
    leaves, structure = jax.tree.flatten(like)
    names = list(trees.leaf_names(like))
    # By names too: layers of equal shapes would be exchanged without a word.
    if names != list(named):
        differ = sorted({*names} ^ {*named}) or names
        raise ValueError(
            f"checkpoints: {where} and this run's state have other leaves, such as {differ[0]}."
        )

    def one(name: str, old: Any, new: np.ndarray) -> Any:
        if type(old) in (bool, int, float, complex):
            return new.item()
        if not isinstance(old, jax.Array):
            return new
        is_key = checks.is_typed_key(old)
        plain = jax.random.key_data(old) if is_key else old
        if (plain.shape, plain.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"checkpoints: {where} has {name} as {new.dtype}{list(new.shape)}; expected "
                f"{plain.dtype}{list(plain.shape)}."
            )
        # What JAX made of a Python number takes the dtype of what it meets; others would widen it.
        number = jnp.asarray(new.item()) if jax.typeof(plain).weak_type and not new.ndim else new
        number = number if number.dtype == new.dtype else new
        # An uncommitted array stays uncommitted: JAX may then move it to the run's devices.
        placed = meshes.put(number, plain.sharding) if old.committed else jnp.asarray(number)
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(old)) if is_key else placed

    return structure.unflatten(map(one, names, leaves, named.values()))


def _first_line(error: Exception | None) -> str:
    return str(error or "it is not there").strip().split("\n")[0]
