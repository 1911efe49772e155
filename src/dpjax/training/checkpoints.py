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
      directory: A folder for only these checkpoints; made if it does not exist.
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
        # If there are several processes, only the first reads and writes.
        processes.from_first(self._open)

    def _open(self) -> None:
        """Makes Orbax' manager of the folder."""
        import orbax.checkpoint as ocp  # takes a second; runs without a folder do without it

        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        # The other processes have no manager, so Orbax must not wait for them.
        active = {0} if jax.process_count() > 1 else None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.keep,
            cleanup_tmp_directories=True,  # left by a killed process
            # A step is released only after its checkpoint is on disk.
            enable_async_checkpointing=False,
            create=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=active),
        )
        self.args = ocp.args
        self.manager: ocp.CheckpointManager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Writes a tree of arrays and typed keys, and facts as JSON; returns when they are on disk.

        Raises:
          OSError: It could not be written.
          ValueError: This step or a later one is there.
        """
        # If processes share a leaf, each of them gives its part here.
        arrays = [trees.on_host(leaf) for leaf in jax.tree.leaves(state)]
        named = dict(zip(trees.leaf_names(state), arrays, strict=True))
        processes.from_first(lambda: self._write(step, named, facts))

    def _write(self, step: int, named: dict[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Writes the leaves of a step by name, and facts, in the first process."""
        last = self.manager.latest_step()
        # Orbax silently skips a step that is not later than the last, and `fit` releases a step as
        # soon as `save` returns.
        if last is not None and last >= step:
            raise ValueError(
                f"checkpoints.save(step={step}): {self.directory} holds step {last}; expected a "
                "later one."
            )
        arrays = list(named.values())
        # Two items: the arrays by number, and notes with their names, shapes and dtypes. An array
        # without elements is in the notes only, because Orbax cannot write it.
        numbered = {str(i): array for i, array in enumerate(arrays) if array.size}
        kinds = {name: [list(array.shape), array.dtype.name] for name, array in named.items()}
        notes = {"facts": facts, "leaves": kinds, "digest": trees.fingerprint(arrays)}
        args = self.args.Composite(
            state=self.args.StandardSave(numbered), notes=self.args.JsonSave(notes)
        )
        error: Any = None
        try:
            self.manager.save(step, args=args)
            self.manager.wait_until_finished()
        except Exception as fault:  # storage layers raise many unrelated kinds
            error = fault
        # Orbax may also skip a step without an error.
        if error or not (self.directory / str(step)).is_dir():
            self._open()  # since a manager cannot be used after an error
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
        return Restored(_in_structure(like, named, f"{self.directory}/{step}"), facts)

    def _latest(self) -> tuple[int, dict[str, np.ndarray], Mapping[str, Any]] | None:
        """The last step with its leaves by name and its facts, in the first process."""
        step = self.manager.latest_step()
        if step is None:
            return None
        try:
            return step, *self._read(step)
        except Exception as error:  # a damaged file raises many unrelated kinds
            raise Damaged(f"{self.directory}/{step} is damaged ({_first_line(error)}).") from error

    def _read(self, step: int) -> tuple[dict[str, np.ndarray], Mapping[str, Any]]:
        """The leaves and the facts that `_write` received; compares the digest of the leaves."""

        def read(**items: Any) -> Any:
            return self.manager.restore(step, args=self.args.Composite(**items))

        notes = read(notes=self.args.JsonRestore())["notes"]
        # Orbax takes shapes and dtypes from target arrays. They have the saved shapes: if the
        # shapes of this run differ, `_in_structure` names the leaf. `jnp.dtype` knows bfloat16 too.
        targets = [np.empty(shape, jnp.dtype(dtype)) for shape, dtype in notes["leaves"].values()]
        numbered = {str(i): target for i, target in enumerate(targets) if target.size}
        restored = read(state=self.args.StandardRestore(numbered))["state"]
        # An array without elements was not written, and is equal to its target.
        arrays = [np.asarray(restored.get(str(i), target)) for i, target in enumerate(targets)]
        # Orbax detects a truncated file, but not one with other content.
        if trees.fingerprint(arrays) != notes["digest"]:
            raise ValueError("its numbers differ from the saved ones")
        return dict(zip(notes["leaves"], arrays, strict=True)), notes["facts"]

    def close(self) -> None:
        """Ends the threads."""
        if processes.first_process():
            self.manager.close()


def _in_structure(like: PyTree, named: Mapping[str, np.ndarray], where: str) -> PyTree:
    """The saved leaves in the structure of ``like``, each of the kind of the leaf there."""
    leaves, structure = jax.tree.flatten(like)
    names = list(trees.leaf_names(like))
    # Names are compared as well as shapes: otherwise two layers of one shape could be swapped. If
    # only the order differs, the error names the first leaf.
    if names != list(named):
        differ = sorted({*names} ^ {*named}) or names
        raise ValueError(
            f"checkpoints: {where} and this run's state have other leaves, such as {differ[0]}."
        )
    return structure.unflatten(
        _as_leaf(leaf, named[name], f"{where} has {name}")
        for name, leaf in zip(names, leaves, strict=True)
    )


def _as_leaf(leaf: Any, saved: np.ndarray, subject: str) -> Any:
    """The saved array as a Python number, NumPy array, typed key or JAX array, like ``leaf``."""
    if type(leaf) in (bool, int, float, complex):
        return saved.item()
    if not isinstance(leaf, jax.Array):
        return saved
    if checks.is_typed_key(leaf):
        words = _as_array(jax.random.key_data(leaf), saved, subject)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    return _as_array(leaf, saved, subject)


def _as_array(leaf: jax.Array, saved: np.ndarray, subject: str) -> jax.Array:
    """The saved array as a JAX array with the devices and the weak type of ``leaf``.

    A weakly typed scalar, made of a Python number, does not widen the arrays that it meets.
    """
    if (leaf.shape, leaf.dtype) != (saved.shape, saved.dtype):
        raise ValueError(
            f"checkpoints: {subject} as {saved.dtype}{list(saved.shape)}; expected "
            f"{leaf.dtype}{list(leaf.shape)}."
        )
    restored: Any = saved
    if jax.typeof(leaf).weak_type and saved.ndim == 0:
        # A Python number makes a weak scalar again, in JAX's default dtype. Under another setting
        # of `jax_enable_x64` that is not the saved dtype, which comes first.
        weak = jnp.asarray(saved.item())
        if weak.dtype == saved.dtype:
            restored = weak
    if leaf.committed:
        return meshes.put(restored, leaf.sharding)
    # JAX may move an uncommitted array to the devices of the run, so this one stays uncommitted.
    return jnp.asarray(restored)


def _first_line(error: Exception | None) -> str:
    """The first line of an error's message; without an error, the step's folder is missing."""
    return str(error or "it is not there").strip().split("\n")[0]
