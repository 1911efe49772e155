# SPDX-License-Identifier: Apache-2.0
"""Short-lived processes that train in one folder, for tests that kill them.

They are forked from a server that has imported everything and computed nothing, so a life
begins in some tens of milliseconds.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import signal

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_mechanisms import mechanism_with

import dpjax
from dpjax import clipping

DATA = np.random.default_rng(0).normal(size=(200, 5)).astype(np.float32)
STEPS = 60


def loss(w, x):
    return 0.5 * jnp.sum((w - x) ** 2)


def make(multiplier=1.0, batch=20, bound=1.0, data=DATA, steps=STEPS, rate=0.1, **options):
    mechanism = mechanism_with(
        len(data), batch, clipping=clipping.flat(bound), noise_multiplier=multiplier, steps=steps
    )
    optimizer = optax.sgd(rate, momentum=0.9)
    return dpjax.dpsgd(options.pop("loss", loss), optimizer, mechanism, data, **options)


def start(algorithm, key=None, size=5):
    return algorithm.init(jnp.zeros(size), key)


def fit(directory, algorithm=None, state=None, **options):
    algorithm = make() if algorithm is None else algorithm
    state = start(algorithm) if state is None else state
    settings = {"evaluate_every": 7, "save_every": 3, "progress": False}
    return dpjax.fit(algorithm, state, directory=directory, **{**settings, **options})


def dies_after(algorithm, steps):
    """The same algorithm, whose process dies before it takes more steps than these."""

    def run(state, count):
        if state.ledger.steps + count > steps:
            raise InterruptedError
        return algorithm.run(state, count)

    return dataclasses.replace(algorithm, run=run)


def cut_off(folder, algorithm=None, *, after, **options):
    """A run that dies when these steps have run."""
    with pytest.raises(InterruptedError):
        fit(folder, dies_after(algorithm or make(), after), **options)


def life(directory, born, options=None):
    """One process: trains in the folder until it is done, or killed; notes what it releases."""

    def evaluate(state):
        with open(f"{directory}.seen", "a") as file:
            print(json.dumps([state.ledger.steps, state.params.tolist()]), file=file, flush=True)
        return {"length": jnp.linalg.norm(state.params)}

    born.set()
    fit(directory, evaluate=evaluate, **(options or {}))


def server():
    """What forks; the first call begins it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["orbax.checkpoint", "matplotlib.figure", "dpjax", __name__])
    return context


def environment():
    """For a process that begins again: it finds the modules beside this one."""
    paths = [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def begin(context, directory, **options):
    """A process that has begun to live."""
    born = context.Event()
    process = context.Process(target=life, args=(directory, born, options))
    process.start()
    assert born.wait(60)
    return process


def killed(process, after):
    """Kills a process, unless it is faster; whether it was killed."""
    process.join(after)
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    return process.exitcode == -signal.SIGKILL
