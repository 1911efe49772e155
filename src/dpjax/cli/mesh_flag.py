# SPDX-License-Identifier: Apache-2.0
"""The flag ``--mesh`` of the binaries, which names the devices of a run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from absl import app

HELP = (
    "Axes of the devices and their sizes: data:4, or data:4,model:2. Axis model splits the "
    "parameters, others the batch. On a CPU as many devices are made; by default one for each "
    "core, at most four."
)


@contextlib.contextmanager
def mesh_in_force(text: str | None, processes: int | None = 1) -> Iterator[None]:
    """The mesh of the flag, for all that runs inside; without the flag, devices for the cores.

    Args:
      text: The value of the flag, or None.
      processes: Among how many processes the devices of a CPU are divided; None if that is not
        known, and then each process keeps the devices that it has.
    """
    import jax  # here, because flags are defined and read before JAX is imported

    from dpjax import meshes

    if text is None:
        # A choice of the user stands; and it is too late if JAX ran already.
        if processes == 1 and getattr(jax.config, "jax_num_cpu_devices", 0) < 0:
            with contextlib.suppress(RuntimeError):
                jax.config.update("jax_num_cpu_devices", meshes.host_devices())
        yield
        return
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
