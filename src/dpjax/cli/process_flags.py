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

    found: dict[str, Any] = {name: given[name].value for name in NAMES}
    missing = [name for name, value in found.items() if value is None]
    shown = " ".join(f"--{name}={value}" for name, value in found.items() if value is not None)
    if missing and shown:
        raise app.UsageError(
            f"{shown}: --{' and --'.join(missing)} missing; expected all three, in every process. "
            "On a cluster that JAX knows, --distributed alone finds them."
        )
    if shown and not found["process_id"] < found["num_processes"]:
        raise app.UsageError(
            f"{shown}: expected a number below {found['num_processes']}. Processes are numbered "
            "from 0."
        )
    if missing and not given.distributed:
        return 1
    try:
        jax.distributed.initialize(**found)
    except (RuntimeError, ValueError) as error:
        raise app.UsageError(
            f"{shown or '--distributed'}: {error} Usually JAX does not know this cluster, or the "
            "address is not that of process 0. Give --coordinator_address=HOST:PORT, "
            "--num_processes and --process_id to every process."
        ) from error
    return found["num_processes"]
