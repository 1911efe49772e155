# SPDX-License-Identifier: Apache-2.0
"""Processes: what the processes of a run must agree on, and what the first of them does for all.

The guarantee depends on this file. Each process holds a part of one run. With keys, mechanisms or
steps that differ, their parts are of different runs, and the noise is none that was accounted. So
`require_agreement` compares these facts before a step runs, and `from_first` decides in one
process what depends on a clock or a file. Checkpoints, logs and seals are written by the first
process alone.

A question that one process never asks leaves the others waiting in their collective, so questions
carry their names. Nothing here knows of meshes; `dpjax.meshes` says which devices share a run.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import inspect
import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpjax.checks import Refused

P = ParamSpec("P")
T = TypeVar("T")

__all__ = []


def first_process() -> bool:
    """Whether this process is the one that reads and writes files."""
    return jax.process_index() == 0


def from_first(make: Callable[[], T]) -> T:
    """What the function returns in the first process, in all of them; its exceptions too.

    Files are read and written by the first process alone, so the others need no access to them.
    """
    if jax.process_count() == 1:
        return make()
    text = b""
    if first_process():
        try:
            text = pickle.dumps((True, make()))
        except Exception as error:  # raised below, in every process; also of what cannot be sent
            text = pickle.dumps((False, error))
    answers = _answers(_place(make), len(text).to_bytes(8))
    # The others receive as many bytes.
    sent = np.frombuffer(text or bytes(int.from_bytes(answers[0])), np.uint8)
    # Bytes of this run's own process, never of a file.
    went_well, value = pickle.loads(bytes(multihost_utils.broadcast_one_to_all(sent)))
    if not went_well:
        raise value
    return value


def in_first(method: Callable[P, T]) -> Callable[P, T]:
    """A method that runs in the first process and returns in all of them, by `from_first`."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        # Under the method's own name: questions carry the names of their functions.
        call = functools.update_wrapper(functools.partial(method, *args, **kwargs), method)
        return from_first(call)

    return run


def any_process(value: bool) -> bool:
    """Whether the value is true in any process, such as a signal to stop."""
    if jax.process_count() == 1:
        return value
    return any(map(any, _answers("any process", bytes([bool(value)]))))


# Why processes differ in a fact, and what to do.
_CURES = {
    "the root key": "Usually each process drew its own key: make it in one process, or from one "
    "file, and give it to all.",
    "the data": "Data are whole in every process; a stream reads the rows of its own devices by "
    "itself.",
    "the mesh": "Usually one process ordered the devices in its own way, or has none in the mesh: "
    "make it of jax.devices() in all of them, as jax.make_mesh does; or give each process a mesh "
    "of its jax.local_devices().",
    "directory": "Usually one process alone was given the folder: give it to all. The first "
    "process alone reads and writes there.",
}
_CURE = (
    "Usually a setting, a file or a number that one process measured differs: start all of them "
    "with one command and one environment, and decide in one process what depends on a measurement."
)


def require_agreement(name: str, facts: Callable[[], Mapping[str, Any]]) -> None:
    """Refuses a run whose processes differ in a fact.

    Args:
      name: The algorithm.
      facts: Gives names and values in JSON types; equal names in every process.

    Raises:
      Refused: In every process, with the names of the facts that differ.
    """
    if jax.process_count() == 1:
        return
    texts = {k: json.dumps(v, sort_keys=True, default=str) for k, v in facts().items()}

    def same(what: str, text: str) -> bool:
        return len(set(_answers(what, hashlib.sha256(text.encode()).digest()))) == 1

    # One small collective where all agree, and one for each fact where they do not.
    if same(name, json.dumps(texts)):
        return
    differ = [fact for fact, text in texts.items() if not same(f"{name}: {fact}", text)]
    cures = [_CURES[fact] for fact in differ if fact in _CURES] or [_CURE]
    raise Refused(
        f"{name}: the {jax.process_count()} processes differ in {', '.join(differ)}; expected "
        f"equal ones, because each of them holds a part of one run. {' '.join(cures)}"
    )


def _answers(question: str, answer: bytes) -> list[bytes]:
    """What each process answers to a question, in at most 32 bytes.

    Processes that ask different questions would take each other's answers, or wait for ever: all
    of them raise. All questions have one shape, because collectives of different shapes hang.
    """
    asked = hashlib.sha256(question.encode()).digest()
    ours = np.frombuffer(asked + answer.rjust(32, b"\0"), np.uint8)
    theirs = [bytes(each) for each in multihost_utils.process_allgather(ours)]
    if others := [i for i, each in enumerate(theirs) if each[:32] != asked]:
        raise Refused(
            f"dpjax: this process ({jax.process_index()}) is at {question!r}, and processes "
            f"{others} are elsewhere; expected that all take the same way. Usually the script "
            "branches on jax.process_index(), or a call has other arguments in one process: call "
            "dpjax equally in all of them."
        )
    return [each[32:] for each in theirs]


def _place(function: Callable[[], Any]) -> str:
    """Where a function stands in the source, which is equal in all processes."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{function.__module__}.{function.__qualname__}:{code and code.co_firstlineno}"


def require_equal_hosts() -> None:
    """Refuses processes with unequal numbers of devices, before JAX fails to reshape them."""
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"meshes.of: the processes have {[counts[i] for i in sorted(counts)]} devices; "
            "expected equally many in each. Usually one host sees more accelerators than another, "
            "or jax_num_cpu_devices differs: restrict all of them to one number, for example by "
            "CUDA_VISIBLE_DEVICES."
        )
