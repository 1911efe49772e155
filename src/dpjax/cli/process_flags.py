# SPDX-License-Identifier: Apache-2.0
"""The flags of a run of several processes: the same command on each host of a cluster.

They are the arguments of `jax.distributed.initialize`, by their names there.
"""

from __future__ import annotations

from typing import Any

from absl import app, flags

NAMES = ("coordinator_address", "num_processes", "process_id")

DISTRIBUTED = (
    "One of several processes, which JAX finds: on TPU pods, Slurm, Open MPI and Kubernetes. Give "
    "the same command to all of them. Elsewhere give the three flags below instead."
)
ADDRESS = "Host and port of process 0, such as 10.0.0.1:1234, for a run of several processes."
COUNT = "Number of processes of the run, with --coordinator_address."
NUMBER = "Number of this process, from 0, with --coordinator_address."


def meet(given: flags.FlagValues) -> int | None:
    """Joins the other processes of a run, before anything else of JAX runs.

    Returns:
      How many processes there are; None if the cluster decides it.
    """
    import jax  # here, because flags are defined and read before JAX is imported

    arguments: dict[str, Any] = {name: given[name].value for name in NAMES}
    typed = {name: value for name, value in arguments.items() if value is not None}
    if not typed and not given.distributed:
        return 1
    try:
        jax.distributed.initialize(**arguments)
    except (RuntimeError, ValueError) as error:
        shown = " ".join(f"--{name}={value}" for name, value in typed.items()) or "--distributed"
        raise app.UsageError(
            f"{shown}: {error} Give --coordinator_address, --num_processes and --process_id."
        ) from error
    return arguments["num_processes"]
