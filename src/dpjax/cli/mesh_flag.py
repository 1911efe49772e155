# SPDX-License-Identifier: Apache-2.0
"""The flag ``--mesh`` of the binaries, which names the devices of a run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from absl import app

HELP = (
    "Axes of the devices and their sizes: data:4, or data:4,model:2. Axis model splits the "
    "parameters, others the batch. On a CPU as many devices are made. By default one device, or "
    "all host devices."
)


@contextlib.contextmanager
def mesh_in_force(text: str | None, processes: int | None = 1) -> Iterator[None]:
    """The mesh of the flag, for all that runs inside; without the flag nothing changes.

    Args:
      text: The value of the flag, or None.
      processes: Among how many processes the devices of a CPU are divided; None if that is not
        known, and then each process keeps the devices that it has.
    """
    if text is None:
        yield
        return
    import jax  # here, because flags are defined and read before JAX is imported

    from dpjax import meshes

    with contextlib.suppress(ValueError, RuntimeError):
        # Without effect on other platforms; too late if JAX ran already, which `parse` notices.
        places = math.prod(int(axis.partition(":")[2]) for axis in text.split(","))
        if processes is not None:
            jax.config.update("jax_num_cpu_devices", places // processes)
    try:
        mesh = meshes.parse(text)
    except ValueError as error:
        raise app.UsageError(f"--mesh={text}: {error}") from error
    with jax.set_mesh(mesh):
        yield
