# SPDX-License-Identifier: Apache-2.0
"""Several processes played by threads of this one, for quick tests of what they agree on."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
from small_mechanisms import mechanism_with

from dpjax import dpsgd, processes


def small_run(rate=0.1, *, batch=10, steps=6, multiplier=1.0, **options):
    """An algorithm that compiles quickly, and the state before its first step."""
    data = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    options = {"data": data, "microbatch_size": 10, **options}
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    mechanism = mechanism_with(50, batch, steps=steps, noise_multiplier=multiplier)

    def loss(w, x):
        return jnp.sum((w - x) ** 2)

    algorithm = dpsgd(loss, optimizer, mechanism, **options)
    return algorithm, algorithm.init(jnp.zeros(3), jax.random.key(0))


def in_threads(monkeypatch, work, count=2):
    """What ``work(process)`` returns, or the exception that it raises, in each process.

    A process that enters a collective which another one never enters gets a `TimeoutError`.
    A context of JAX that ``work`` enters changes the settings of its own thread alone.
    """
    here, changed, given, left = threading.local(), threading.Condition(), {}, set()

    def gathered(ours):
        with changed:
            here.entered += 1
            places = [(here.entered, process) for process in range(count)]
            given[places[here.process]] = np.asarray(ours)
            changed.notify_all()
            while missing := {place for place in places if place not in given}:
                if {process for _, process in missing} & left or not changed.wait(60):
                    raise TimeoutError(f"process {here.process} waits for ever")
            # A collective has one shape in all processes.
            return np.stack([given[place] for place in places])

    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: here.process)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", gathered)
    monkeypatch.setattr(processes.multihost_utils, "broadcast_one_to_all", lambda x: gathered(x)[0])

    def alone(process):
        here.process, here.entered = process, 0
        try:
            return work(process)
        except Exception as error:
            return error
        finally:
            with changed:
                left.add(process)
                changed.notify_all()

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(alone, range(count)))
