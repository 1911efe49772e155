# SPDX-License-Identifier: Apache-2.0
r"""Standard normal numbers that have their tails, drawn fast on any device.

A float32 inverse-CDF sampler ends at 5.4 standard deviations and a bfloat16 one at 2.9;
beyond its end an attacker who sees a value knows that no noise made it.  Here pairs come by
Box and Muller, $r (\cos\theta, \sin\theta)$ with $r^2 = -2 \log u$, from 64 random bits:
40 for $u$ and 24 for $\theta$.

The bits are those of the threefry cipher: a key enciphers its counter, which is the row and
the column that a number stands in.  XLA on CPU takes a long expression apart badly: computed
at once for both numbers of a pair, or along one long axis, it runs number by number.  So rows
are short, and what is worked out once is written down by a loop of two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from dpjax import trees
from dpjax.types import Key

__all__ = ["standard_normal"]

# Pairs in a row, and rows that are worked on at once: what lies in between fits a cache.
_COLUMNS, _ROWS = 1024, 16
# Left turns of the cipher's second word in four rounds, then in the next four.
_TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))


def standard_normal(
    key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> Float[Array, "..."]:
    """Standard normal numbers with full tails; consumes the key.

    The support reaches 7.5 standard deviations on both sides (``jax.random.normal`` in
    float32 ends at 5.4 and 5.2), beyond which a true normal has a mass of 6e-14.

    Args:
      key: Consumed.  Of whatever generator: it gives the 64 bits that the cipher is keyed with.
      shape: Any shape, empty ones too.
      dtype: float32 or float64; nothing narrower is drawn.

    Example:
      >>> standard_normal(jax.random.key(0), (2, 3)).shape
      (2, 3)

    References:
      Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958; Salmon et
      al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """
    if trees.wide(dtype) != jnp.dtype(dtype):
        raise ValueError(
            f"noise.standard_normal(dtype={jnp.dtype(dtype).name}): noise is never drawn "
            "in less than float32; a narrow type has few distinct values and no tail. "
            "Draw in float32 and cast the noisy sum."
        )
    secret = jax.random.bits(key, (2,), jnp.uint32)
    return _drawn(secret, math.prod(shape), jnp.dtype(dtype)).reshape(shape)


@functools.partial(jax.jit, static_argnames=("count", "dtype"))
def _drawn(secret: UInt32[Array, "2"], count: int, dtype: Any) -> Float[Array, " count"]:
    """So many numbers: block after block, and in each the one half of the pairs, then the other."""
    rows = -(-count // (2 * _COLUMNS))
    size = max(1, min(_ROWS, rows))

    def block(first: Array) -> Array:
        counter = [jax.lax.broadcasted_iota(jnp.uint32, (size, _COLUMNS), a) for a in (0, 1)]
        counter[0] += first
        words = _in_turn(lambda last: _either(last, *_threefry(secret, counter)))
        return _in_turn(lambda across: _box_muller(words[0], words[1], across, dtype))

    blocks = jax.lax.map(block, size * jnp.arange(-(-rows // size), dtype=jnp.uint32))
    return blocks.reshape(-1)[:count]


def _in_turn(one: Callable[[Bool[Array, ""]], Array]) -> Array:
    """The first of two and the second, in a loop."""
    return jax.lax.map(one, jnp.array([False, True]))


def _either(second: Array, this: Array, that: Array) -> Array:
    return jnp.where(second, that, this)


def _threefry(key: Array, counter: list[Array]) -> tuple[Array, Array]:
    """Two random words for each counter of two words: threefry-2x32 with 20 rounds.

    Written out, because JAX's own runs as a loop over arrays on a CPU, several times slower.
    """
    keys = key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for turn in _TURNS[group % 2]:
            x = x + y
            y = x ^ ((y << turn) | (y >> (32 - turn)))
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def _box_muller(first: Array, second: Array, across: Any, dtype: Any = jnp.float32) -> Array:
    """One of the two normal numbers from 64 random bits: 40 for the radius, 24 for the angle."""
    # u = (first + low / 2^8) / 2^32 in (0, 1).  Its upper half is held as 1 - u, so that
    # both ends keep the full relative precision of a float.
    low = second >> 24
    upper = first >= jnp.uint32(1 << 31)
    first, low = jnp.where(upper, ~first, first), jnp.where(upper, 255 - low, low)
    tail = (first.astype(dtype) + (low.astype(dtype) + 0.5) * 2.0**-8) * 2.0**-32
    radius = jnp.sqrt(-2 * _log(tail, upper))
    # A direction within an eighth of a turn of the axis, then one of four quarter turns:
    # there a short Taylor series is exact, and much cheaper than jnp.cos and jnp.sin.
    eighth = (second & 0x3FFFFF).astype(dtype) - (2.0**21 - 0.5)
    cosine, sine = _cos_sin(eighth * (math.pi * 2.0**-23))
    half, quarter = (second & (1 << 22)) != 0, (second & (1 << 23)) != 0
    # A quarter turn takes (cosine, sine) to (-sine, cosine), a half turn changes both signs.
    back = half ^ (quarter & jnp.logical_not(across))
    return jnp.where(back, -radius, radius) * jnp.where(quarter ^ across, sine, cosine)


def _log(tail: Array, upper: Array) -> Array:
    """log(t), or log(1 - t) where told; t is below 1/2."""
    u = jnp.where(upper, 1 - tail, tail)
    log = jnp.log(u)
    # What rounding 1 - t has lost is put right to first order: log(1 - t) is about -t there.
    precise = jnp.where(u == 1, -tail, log * (tail / (1 - u)))
    return jnp.where(upper, precise, log)


def _cos_sin(angle: Array) -> tuple[Array, Array]:
    """Cosine and sine for angles up to pi / 4, to the last digit of the dtype."""
    square = angle * angle
    cosine = sine = jnp.ones_like(angle)
    for k in range(8 if angle.dtype == jnp.float64 else 5, 0, -1):
        cosine = 1 - cosine * (square * (1 / (2 * k * (2 * k - 1))))
        sine = 1 - sine * (square * (1 / (2 * k * (2 * k + 1))))
    return cosine, angle * sine
