# SPDX-License-Identifier: Apache-2.0
"""The flags of the machines of a run: ``--mesh``, and the flags of several processes.

Flags of processes are the arguments of `jax.distributed.initialize`, by their names there. The
functions import JAX themselves, because the help of `dpjax train` needs only the texts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from absl import app, flags

MESH = (
    "Axes of the devices and their sizes: data:4, or data:4,model:2. Axis model splits the "
    "parameters, others the batch. On a CPU as many devices are made; by default one for each "
    "core, at most four."
)
DISTRIBUTED = (
    "One of several processes, which JAX finds: on TPU pods, Slurm, Open MPI and Kubernetes. Give "
    "the same command to all of them. Elsewhere give the three flags below instead."
)
ADDRESS = "Host and port of process 0, such as 10.0.0.1:1234, for a run of several processes."
COUNT = "Number of processes of the run, with --coordinator_address."
NUMBER = "Number of this process, from 0, with --coordinator_address."
PROCESSES = ("coordinator_address", "num_processes", "process_id")


def meet(given: flags.FlagValues) -> int | None:
    """Joins the other processes of a run, and returns their number; None if unknown."""
    import jax

    arguments: dict[str, Any] = {name: given[name].value for name in PROCESSES}
    if not given.distributed and not any(value is not None for value in arguments.values()):
        return 1
    try:
        jax.distributed.initialize(**arguments)
    except (RuntimeError, ValueError) as error:
        raise app.UsageError(f"{error} Give all of --{', --'.join(PROCESSES)}.") from error
    return arguments["num_processes"]


@contextlib.contextmanager
def mesh_in_force(text: str | None, processes: int | None = 1) -> Iterator[None]:
    """A context in which JAX uses the mesh that ``text``, the value of ``--mesh``, describes.

    A CPU gets as many devices as the mesh needs, divided by the number of ``processes``; if that is
    None, which is unknown, none are set up. Without ``text`` there is no mesh, and the CPU of a
    single process gets a device for each core, at most four.
    """
    import jax

    from dpjax import meshes

    if text is None:
        # `jax_num_cpu_devices` is negative while it is not set, and a number that the user set
        # stays. JAX raises if it ran already, and then keeps its devices.
        if processes == 1 and getattr(jax.config, "jax_num_cpu_devices", 0) < 0:
            with contextlib.suppress(RuntimeError):
                jax.config.update("jax_num_cpu_devices", meshes.host_devices())
        yield
        return
    # The setting has no effect on accelerators. Both errors are ignored here, because `parse` below
    # raises a better one if the text does not describe a mesh, or if JAX already ran with other
    # devices.
    with contextlib.suppress(ValueError, RuntimeError):
        sizes = [int(axis.partition(":")[2]) for axis in text.split(",")]  # 4 of "data:4"
        devices = math.prod(sizes)
        if processes is not None:
            jax.config.update("jax_num_cpu_devices", devices // processes)
    try:
        mesh = meshes.parse(text)
    except ValueError as error:
        raise app.UsageError(f"--mesh={text}: {error}") from error
    with jax.set_mesh(mesh):
        yield
