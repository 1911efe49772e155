# SPDX-License-Identifier: Apache-2.0
"""A run of several processes on this machine, for tests that start, disturb and kill them.

Each process has some devices of the CPU and meets the others through `jax.distributed`, as hosts
of a cluster do.  Run as a script it is one of these processes.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent


def free_port():
    """A port of this machine that no program listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(folder, count, *, devices=1, **options):
    """Starts all processes of a run.

    Args:
      folder: The folder of the run; also of each process's output.
      count: How many processes.
      devices: How many devices each of them has.
      options: What `main` reads.
    """
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    started = []
    for process in range(count):
        task = {"port": port, "count": count, "process": process, "devices": devices, **options}
        with open(f"{folder}.{process}.txt", "w") as output:
            command = [sys.executable, __file__, str(folder), json.dumps(task)]
            options_of = {"stdout": output, "stderr": output, "env": environment}
            started.append(subprocess.Popen(command, **options_of))
    return started


def finish(started, folder, seconds=240):
    """Waits for all processes; once one has ended badly, kills the others, as clusters do."""
    end = time.monotonic() + seconds
    while any(each.poll() is None for each in started) and time.monotonic() < end:
        if any(each.poll() for each in started):
            time.sleep(1)  # the others may be about to say why they end
            break
        time.sleep(0.05)
    for each in started:
        if each.poll() is None:
            each.kill()
        each.wait()
    texts = [pathlib.Path(f"{folder}.{i}.txt").read_text() for i in range(len(started))]
    return [each.returncode for each in started], texts


def run(folder, count, **options):
    """The last line that each process printed, which are all to end well."""
    codes, texts = finish(start(folder, count, **options), folder)
    assert not any(codes), texts
    return [json.loads(text.splitlines()[-1]) for text in texts]


def main(folder, task):
    import jax

    jax.config.update("jax_num_cpu_devices", task["devices"])
    if task["count"] > 1:
        address = f"127.0.0.1:{task['port']}"
        jax.distributed.initialize(address, task["count"], task["process"])
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh
    from small_mechanisms import mechanism_with

    import dpjax
    from dpjax import meshes, trees

    last = task["process"] == task["count"] - 1
    data = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    key, first, read = jax.random.key(5), jnp.ones((4, 512)), []
    if last and task.get("differs") == "key":
        key = jax.random.key(6)
    if last and task.get("differs") == "data":
        data = data[::-1]
    if task.get("stream"):
        data = dpjax.data.Stream(data, example=lambda x: read.append(x) or x)

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w - jnp.sum(x)) ** 2)

    mechanism = mechanism_with(60, 20, steps=12)
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    mesh = meshes.parse(task["mesh"]) if "mesh" in task else None
    if task.get("own_mesh"):
        mesh = Mesh(np.array(jax.local_devices()), ("data",))
    algorithm = dpjax.dpsgd(loss, optimizer, mechanism, data, microbatch_size=4, mesh=mesh)
    state = algorithm.init(first, key if task.get("supplied", True) else None)
    if task.get("differs") == "state":
        later, _ = algorithm.step(state)
        state = later if last else state  # the others go back to the first
    before = len(read)

    def evaluate(state):
        if last and int(state.step) == task.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        return {"size": float(jnp.sum(state.params**2))}

    options = {"directory": folder, "evaluate_every": 4, "save_every": 2, "progress": False}
    options["steps"] = task.get("steps")
    if last and task.get("differs") in ("directory", "steps"):
        options |= {"directory": {"directory": None}, "steps": {"steps": 2}}[task["differs"]]
    state, rows = dpjax.fit(algorithm, state, evaluate=evaluate, **options)
    held = {str(shard.data.shape) for shard in state.params.addressable_shards}
    numbers = trees.on_host(state.params).ravel()[::97].tolist()
    found = {"params": numbers, "steps": [row["step"] for row in rows], "held": sorted(held)}
    print(json.dumps({**found, "rows read": len(read) - before}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
