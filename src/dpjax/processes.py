# SPDX-License-Identifier: Apache-2.0
"""Processes: values that the first process of a run sends to the others, and one comparison.

Each process holds a part of one run. Keys, counts, and values that depend on a clock or a file come
from the first process. Values that are too large to send, such as the data, are compared once.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dpjax.checks import Refused
from dpjax.types import Key

T = TypeVar("T")

__all__ = []


def first_process() -> bool:
    """Whether this process is the one that reads and writes files."""
    return jax.process_index() == 0


def from_first(make: Callable[[], T]) -> T:
    """Calls ``make`` in the first process; all processes return its result or raise its error."""
    if jax.process_count() == 1:
        return make()
    # The pickle of (whether `make` succeeded, its result or error), in the first process.
    answer = b""
    if first_process():
        try:
            answer = pickle.dumps((True, make()))
        except Exception as error:  # raised below, in every process; also if pickling fails
            answer = pickle.dumps((False, error))
    # A broadcast needs arrays of one shape, so the other processes give as many zeros.
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(answer))))
    given = np.frombuffer(answer or bytes(size), np.uint8)
    # The bytes are safe to unpickle: they come from a process of this run, and never from a file.
    succeeded, value = pickle.loads(bytes(multihost_utils.broadcast_one_to_all(given)))
    if not succeeded:
        raise value
    return value


def secret_key() -> Key:
    """A key from the operating system's randomness."""
    # The implementation is named: rbg is not a function of the key only on every platform.
    return key_of(np.frombuffer(os.urandom(8), np.uint32))


def shared_key() -> Key:
    """A `secret_key` that the first process draws for all of them."""
    words = np.asarray(jax.random.key_data(secret_key()))
    return key_of(multihost_utils.broadcast_one_to_all(words))


def key_of(words: Any) -> Key:
    """The key of threefry with these two words."""
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def any_process(value: bool) -> bool:
    """Whether the value is true in any process, such as a signal to stop."""
    if jax.process_count() == 1:
        return value
    return bool(np.any(multihost_utils.process_allgather(np.array([value], np.uint8))))


def require_equal(call: str, facts: Callable[[], Mapping[str, str]]) -> None:
    """Raises in all processes if they differ in a fact, or if ``facts`` fails in one of them.

    ``facts`` returns each fact as a text, under the name that the error lists. The error begins
    with ``call``, the name of the caller.
    """
    if jax.process_count() == 1:
        return
    values = {}
    fault = None
    try:
        values = dict(facts())
    except Exception as error:  # raised below, after the other processes have learned of it
        fault = error
    if any_process(fault is not None):
        raise fault or Refused(f"{call}: another process failed; its output says why.")
    # Hashes have one length, which `process_allgather` needs.
    hashes = [hashlib.sha256(value.encode()).digest() for value in values.values()]
    here = np.stack([np.frombuffer(x, np.uint8) for x in hashes])  # [facts, bytes]
    everywhere = np.asarray(multihost_utils.process_allgather(here))  # [processes, facts, bytes]
    same = np.all(everywhere == everywhere[:1], axis=(0, 2))
    if not same.all():
        names = ", ".join(name for name, equal in zip(values, same, strict=True) if not equal)
        raise Refused(
            f"{call}: the {len(everywhere)} processes differ in {names}. Start all of them with "
            "one command, and give each the whole data in one order."
        )
