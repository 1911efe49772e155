# SPDX-License-Identifier: Apache-2.0
"""Noise is released once: each step of a root key has one release.

Noise is a function of (root key, step). If it met two different sums, or one sum at two scales,
the two releases could be solved for a sum without noise, and no epsilon would hold. So a process
remembers a *seal* of each (key, step) that ran: a checksum of its release. Another release is
refused, whatever differs. An equal one is a replay: it tells nothing new, and stays free.

`dpjax.fit` writes the seals to the run's folder too, which holds later processes to them.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from dpjax import trees
from dpjax._checksums import checksum
from dpjax.checks import Refused
from dpjax.noise.measured import is_measured
from dpjax.types import Key, PyTree

# From the hash of a root key to the seal of each step, 0 where none ran. This outlives every
# argument on purpose: no argument can say whether its noise was used before.
_seen: dict[bytes, np.ndarray] = {}
_lock = threading.Lock()  # two threads may run steps of one key


def seal(tree: PyTree, in_parts: bool = False) -> UInt32[Array, "2"]:
    """Two words, never 0, that differ, but for chance, where trees of equal shapes differ.

    Args:
      tree: Floats of any dtype.
      in_parts: Whether a mesh splits the leaves. Then no leaf is flattened, which would gather it
        on every device. The bits are the same; on one device they take half as long again.
    """
    return checksum(tree, in_parts) | jnp.uint32(1)  # never 0


def require_one_release(key: Any, first: int, seals: Any, name: str) -> None:
    """Remembers the seals of some steps, or refuses them.

    Args:
      key: The root key.
      first: The number of the first step.
      seals: ``[steps, 2]``, from `seal`; or ``[steps]``, from `remembered`.
      name: The function that ran the steps.

    Raises:
      Refused: A step had another release before.
    """
    # The noise of a small seed is public, and experiments repeat seeds with other settings.
    if not trees.on_host(key).reshape(-1)[0]:
        return
    now = np.ascontiguousarray(seals).view(np.uint64).reshape(-1)
    with _lock:
        before = remembered(key, first + len(now))[first:]
        # A folder has 0 for steps that ran before it was given.
        other = np.flatnonzero((before != 0) & (now != 0) & (before != now)).tolist()
        if not other:
            _remember(key, first, np.where(now == 0, before, now))
    if other:
        raise Refused(
            f"{name}: step {first + other[0]} of this key ran before, and released something "
            "else. Its noise is the same, so the two releases together would tell a sum without "
            "noise. Usually one key or state was given to two runs: with another loss, optimizer, "
            "engine, multiplier, strategy or data, or with edited parameters. A killed run resumes "
            "on the kind of machine and with the XLA_FLAGS of before: others change last bits. "
            "Start each run with a key of its own, dpjax.noise.secret_key(), and count what all of "
            "them spend. To compare settings without a release, use a seed: jax.random.key(0)."
        )


def seal_outside_jit(key: Any, step: Any, released: PyTree, name: str) -> None:
    """`require_one_release` for a link outside ``jit``; a traced step has no values to compare.

    Args:
      key: The root key.
      step: The number of the step.
      released: What leaves the link, after the noise.
      name: How errors call the link.
    """
    # A measurement gives one noise to two sums on purpose, and releases neither.
    if not trees.traced((key, step, released)) and not is_measured():
        require_one_release(key, int(step), _sealed(released)[None], name)


_sealed = jax.jit(seal)


def remembered(key: Key, steps: int) -> np.ndarray:
    """The seals of the first steps of a key, ``[steps]``; 0 for a step that did not run."""
    known = _seen.get(_name(key), np.zeros(0, np.uint64))[:steps]
    return np.pad(known, (0, steps - len(known)))


def _remember(key: Key, first: int, seals: np.ndarray) -> None:
    end, known = first + len(seals), _seen.get(_name(key), np.zeros(0, np.uint64))
    if end > len(known):  # doubled, so that single steps do not copy the table each time
        known = np.pad(known, (0, max(end, 2 * len(known)) - len(known)))
    known[first:end] = seals
    _seen[_name(key)] = known


def _name(key: Any) -> bytes:
    """A hash, so that the table of a process shows no key."""
    return hashlib.sha256(trees.on_host(key).tobytes()).digest()
