# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saves any state atomically, and restores it to the last bit.

Orbax writes in the background, one folder a step, which gets its name only when it is whole. A
digest of all numbers is saved with them: a truncated or altered checkpoint is detected and set
aside, and the previous one is restored. (Orbax itself detects truncation only.)

A state is a tree of arrays. JAX arrays are restored with the shape they had; NumPy arrays, such
as a ledger's, may have grown.

Privacy: a checkpoint holds the root key, with which a reader can subtract the noise. So other
users cannot read the folder, and it must not be released.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from dpjax import checks, meshes, processes, trees
from dpjax.types import PyTree

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

__all__ = ["Checkpoints", "Damaged", "Restored"]


class Damaged(RuntimeError):
    """Checkpoints exist, and none can be read."""


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
      >>> kept = Checkpoints(tempfile.mkdtemp())
      >>> kept.save(3, {"w": jnp.arange(2.0)}, {"note": "three"})
      True
      >>> kept.wait()
      True
      >>> state, facts = kept.latest(like={"w": jnp.zeros(2)})
      >>> state["w"].tolist(), facts["note"]
      ([0.0, 1.0], 'three')
      >>> kept.close()
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        self.directory = pathlib.Path(directory).absolute()
        self.keep = keep
        # Of several processes the first alone reads and writes.
        processes.from_first(self._begin)

    def _begin(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o700)  # checkpoints hold the root key
        self.manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        import orbax.checkpoint as ocp  # a second that only runs with a folder cost

        # Orbax would otherwise wait for the other processes, which have no manager.
        alone: Any = {"active_processes": {0}} if jax.process_count() > 1 else {}
        options = ocp.CheckpointManagerOptions(
            # In the background, so that a step waits for the copy to the host alone. Several are
            # kept, because the last one may be damaged by the crash that makes it needed.
            max_to_keep=self.keep,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
            create=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(**alone),
        )
        self.args = ocp.args
        return ocp.CheckpointManager(self.directory, options=options)

    def save(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> bool:
        """Starts to write a state; the caller may change or donate its buffers immediately.

        Args:
          step: The number of the checkpoint, above all earlier numbers. An existing one is not
            overwritten.
          state: A tree of arrays and typed keys.
          facts: Further facts, as JSON.

        Returns:
          Whether this save has started and all earlier ones succeeded. If not, the error is
          logged, and earlier checkpoints remain.

        Raises:
          ValueError: A later checkpoint is there.
        """
        went_well = self.wait()
        # Orbax refuses a second checkpoint of one step; the first holds the same bits.
        if processes.from_first(lambda: step in self.manager.all_steps()):
            return went_well
        # A copy on the host: the next dispatch donates the buffers while Orbax writes. Of several
        # processes, each gives its part.
        numbers = map(trees.on_host, jax.tree.leaves(state))
        named = dict(zip(trees.leaf_names(state), numbers, strict=True))
        return processes.from_first(lambda: self._write(step, named, facts)) and went_well

    def _write(self, step: int, named: dict[str, np.ndarray], facts: Mapping[str, Any]) -> bool:
        numbers = list(named.values())
        # Orbax cannot write arrays without elements; their shapes are in the notes.
        written = {str(i): x for i, x in enumerate(numbers) if x.size}
        notes = {
            "facts": facts,
            "names": list(named),
            "leaves": [[list(x.shape), x.dtype.name] for x in numbers],
            "digest": trees.fingerprint(numbers),
        }
        args = self.args.Composite(
            state=self.args.StandardSave(written), notes=self.args.JsonSave(notes)
        )
        try:
            started = self.manager.save(step, args=args)
        except Exception as error:  # storage layers raise many unrelated kinds
            return self._failed(error)
        if not started:  # Orbax skips such a step without a word
            raise ValueError(
                f"checkpoints.save(step={step}): {self.directory} holds step "
                f"{self.manager.latest_step()}; expected a later step, because `latest` reads the "
                "last one. Usually another run wrote there: give each run a folder of its own."
            )
        return True

    def wait(self) -> bool:
        """Waits for the save in the background; False if it failed."""
        return processes.from_first(self._wait)

    def _wait(self) -> bool:
        try:
            self.manager.wait_until_finished()
        except Exception as error:  # storage layers raise many unrelated kinds
            return self._failed(error)
        return True

    def _failed(self, error: Exception) -> bool:
        logging.error(
            "checkpoints: a checkpoint could not be written to %s (%s). The run continues with its "
            "state in memory; the last good checkpoint is %s. Usually the disk is full.",
            self.directory,
            _first_line(error),
            self.manager.latest_step(),
        )
        self.manager = self._open()
        return False

    def latest(self, like: PyTree) -> Restored | None:
        """The latest checkpoint that is whole; None if there never was one.

        Args:
          like: A state with the structure and the shapes of the saved one.

        Raises:
          Damaged: Checkpoints exist, and none of them is whole.
          ValueError: A whole checkpoint has another structure or other shapes than ``like``.
        """
        found = processes.from_first(self._latest)
        if found is None:
            return None
        step, saved, facts = found
        return Restored(_as(like, *saved, f"{self.directory}/{step}"), facts)

    def _latest(self) -> tuple[int, _Saved, Mapping[str, Any]] | None:
        self._wait()
        steps = sorted(self.manager.all_steps(), reverse=True)
        for step in steps:
            try:
                return step, *self._read(step)
            except Exception as error:  # a damaged file raises many unrelated kinds
                self._set_aside(step, error)
        if steps or list(self.directory.glob("damaged-*")):
            raise Damaged(
                f"checkpoints: no checkpoint in {self.directory} is whole. The root key of the run "
                "is lost, so the run cannot resume. Its releases are spent all the same: add "
                "their cost to the cost of a new run."
            )
        return None

    def _read(self, step: int) -> tuple[_Saved, Mapping[str, Any]]:
        """The numbers of a checkpoint, checked against their digest."""

        def read(**items: Any) -> Any:
            return self.manager.restore(step, args=self.args.Composite(**items))

        notes = read(notes=self.args.JsonRestore())["notes"]
        leaves, digest = notes["leaves"], notes["digest"]
        # By jnp.dtype, which knows bfloat16's name.
        empty = [np.empty(shape, jnp.dtype(dtype)) for shape, dtype in leaves]
        # Restored as NumPy arrays of the saved shapes: what they become on the device is decided
        # against `like`, with an error that names the leaf.
        target = {str(i): x for i, x in enumerate(empty) if x.size}
        found = read(state=self.args.StandardRestore(target))["state"]
        numbers = [np.asarray(found.get(str(i), x)) for i, x in enumerate(empty)]
        # Orbax notices a file that is cut off, not one whose content was exchanged.
        if trees.fingerprint(numbers) != digest:
            raise ValueError("its numbers differ from the saved ones")
        # Checkpoints of earlier versions have no names.
        return _Saved(numbers, notes.get("names")), notes["facts"]

    def _set_aside(self, step: int, error: Exception) -> None:
        again = len(list(self.directory.glob(f"damaged-{step}*")))
        aside = self.directory / (f"damaged-{step}-{again + 1}" if again else f"damaged-{step}")
        logging.error(
            "checkpoints: %s/%d is damaged (%s). It is set aside as %s; the previous one is read.",
            self.directory,
            step,
            _first_line(error),
            aside.name,
        )
        # The manager keeps its own list of steps, so it is opened again after the move.
        self.manager.close()
        os.replace(self.directory / str(step), aside)
        self.manager = self._open()

    def close(self) -> None:
        """Waits for the save in the background and ends the threads."""
        if processes.first_process():
            self._wait()
            self.manager.close()


class _Saved(NamedTuple):
    """The leaves of a saved state."""

    numbers: Sequence[np.ndarray]
    names: Sequence[str] | None


def _as(
    like: PyTree, numbers: Sequence[np.ndarray], saved: Sequence[str] | None, where: str
) -> PyTree:
    """The numbers in the structure of ``like``, as JAX arrays, keys or NumPy arrays like there."""
    leaves, structure = jax.tree.flatten(like)
    names = trees.leaf_names(like)
    if len(leaves) != len(numbers):
        raise ValueError(
            f"checkpoints: {where} holds {len(numbers)} arrays, and this run's state has "
            f"{len(leaves)}. Usually the model or the optimizer was changed."
        )
    # Layers of equal shapes would be exchanged without a word.
    if other := [pair for pair in zip(saved or names, names, strict=True) if pair[0] != pair[1]]:
        raise ValueError(
            f"checkpoints: {where} has {other[0][0]} where this run's state has {other[0][1]}. "
            "Usually a layer was renamed, or the model or the optimizer was changed."
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
                f"checkpoints: {where} has {name} as {new.dtype}{list(new.shape)}, and this run's "
                f"state as {plain.dtype}{list(plain.shape)}. Usually the model was changed."
            )
        # What JAX made of a Python number takes the dtype of what it meets; others would widen it.
        number = jnp.asarray(new.item()) if jax.typeof(plain).weak_type and not new.ndim else new
        found = number if number.dtype == new.dtype else new
        # An uncommitted array stays uncommitted: JAX may then move it to the run's devices.
        # A mesh other than the saved one is no matter: the numbers are whole here.
        placed = meshes.put(found, plain.sharding) if old.committed else jnp.asarray(found)
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(old)) if is_key else placed

    return structure.unflatten(map(one, names, leaves, numbers))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
