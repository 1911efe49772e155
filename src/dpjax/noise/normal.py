# SPDX-License-Identifier: Apache-2.0
r"""Standard normal numbers with full tails, fast on any device.

A float32 inverse-CDF sampler ends at 5.4 standard deviations and a bfloat16 one at 2.9. An attacker
who sees a value beyond the end knows that not only noise made it. Here the transform of Box
and Muller, $r (\cos\theta, \sin\theta)$ with $r^2 = -2 \log u$, makes pairs from 64 random bits: 40
for $u$ and 24 for $\theta$.

The bits come from the threefry cipher, which enciphers the row and the column of the pair. A pair
is one complex number, because XLA on CPU computes two real ones once for each use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Complex, Float, UInt32

from dpjax import trees
from dpjax.types import Key

# Pairs are drawn in whole rows: XLA:CPU does not vectorise a long axis of odd length well.
_ROW = 1024
# Left rotations of the cipher's second word, in four rounds and in the next four.
_TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))


def standard_normal(
    key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32, after: Array | None = None
) -> Float[Array, "..."]:
    """Standard normal numbers with full tails; consumes the key.

    The support reaches 7.5 standard deviations on both sides (``jax.random.normal`` in
    float32 ends at 5.4 and 5.2), beyond which a true normal has a mass of 6e-14.

    Args:
      key: Consumed. A key of any generator: it supplies the 64 bits that key the cipher.
      shape: Any shape, including empty ones.
      dtype: float32 or float64.
      after: An array that must exist before these numbers are drawn on a CPU, so large draws are
        not in memory together. Its values have no effect.

    Example:
      >>> standard_normal(jax.random.key(0), (2, 3)).shape
      (2, 3)

    References:
      Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958; Salmon et
      al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """
    if trees.wide(dtype) != jnp.dtype(dtype):
        raise ValueError(
            f"noise.standard_normal(dtype={jnp.dtype(dtype).name}): expected float32 or float64."
        )
    # 64 bits of the user's key stream key the generator below, whatever implementation the key has.
    secret = jax.random.bits(key, (2,), jnp.uint32)
    ready = secret[0] if after is None else _word(after)
    return _drawn(secret, ready, math.prod(shape), jnp.dtype(dtype)).reshape(shape)


def normal_in_parts(
    key: Key, shapes: Sequence[tuple[int, ...]], dtype: Any = jnp.float32
) -> list[Float[Array, "..."]]:
    """The numbers of `standard_normal`, cut to these shapes.

    Each number is computed from the key and from its place, which is its index in the whole draw.
    So devices that hold parts of an array have the noise of one device. On one device
    `standard_normal` takes half the time, because it computes each pair once for both numbers.
    """
    secret = jax.random.bits(key, (2,), jnp.uint32)  # as in `standard_normal`
    count = sum(map(math.prod, shapes))
    if count > 2**32:  # places are 32-bit words, so further numbers are the first ones again
        raise ValueError(
            f"noise: devices share a draw of {count:,} numbers; expected at most 2^32."
        )
    # The order of `_drawn`: places below `pairs` have the first number of each pair, and further
    # places the second numbers.
    pairs = _rows_for(count) * _ROW
    arrays = []
    start = 0  # the place of the array's first number
    for shape in shapes:
        place = _places(shape, start)
        is_second = place >= pairs
        pair = jnp.where(is_second, place - jnp.uint32(pairs), place)
        z = _box_muller(*_threefry(secret, [pair // _ROW, pair % _ROW]), dtype)
        arrays.append(jnp.where(is_second, z.imag, z.real))
        start += math.prod(shape)
    return arrays


def _places(shape: tuple[int, ...], start: int = 0) -> UInt32[Array, "..."]:
    """The number of each entry, counted from ``start``, as ``[[0, 1, 2], [3, 4, 5]]`` from 0."""
    place = jnp.full(shape, start, jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]))
        place += stride * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return place


def _rows_for(count: int) -> int:
    """How many rows of pairs hold ``count`` numbers."""
    return -(-count // (2 * _ROW))


@functools.partial(jax.jit, static_argnames=("count", "dtype"))
def _drawn(
    secret: UInt32[Array, "2"], ready: UInt32[Array, ""], count: int, dtype: Any
) -> Float[Array, " count"]:
    """``count`` numbers: the first numbers of all pairs, then the second numbers.

    ``ready`` is a word of an array for which the draw waits on a CPU.
    """
    shape = (_rows_for(count), _ROW)

    def pairs(secret: UInt32[Array, "2"]) -> Complex[Array, "rows row"]:
        row_and_column = [jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1)]
        return _box_muller(*_threefry(secret, row_and_column), dtype)

    def nothing(secret: UInt32[Array, "2"]) -> Complex[Array, "rows row"]:
        return jnp.zeros_like(jax.eval_shape(pairs, secret))

    def pairs_in_a_branch(secret: UInt32[Array, "2"]) -> Complex[Array, "rows row"]:
        # The branch is always taken, and XLA does not know it. Without a branch, XLA:CPU fuses the
        # pairs into both of their uses below, and so computes each pair twice. Other devices wait
        # for the host at a branch, so they have none.
        always = (ready | 1) != 0
        return jax.lax.cond(always, pairs, nothing, secret)

    z = jax.lax.platform_dependent(secret, cpu=pairs_in_a_branch, default=pairs)
    # Interleaved pairs cost one more pass over all numbers.
    return jnp.concatenate([z.real, z.imag]).reshape(-1)[:count]


def _word(array: Array) -> UInt32[Array, ""]:
    """A word that depends on the array."""
    first = array.reshape(-1)[:1].astype(jnp.float32)
    return jnp.sum(jax.lax.bitcast_convert_type(first, jnp.uint32))  # 0 of an empty one


def _threefry(key: UInt32[Array, "2"], counter: list[Array]) -> tuple[Array, Array]:
    """Two random words for each counter of two words: threefry-2x32 with 20 rounds.

    ``counter`` has an array of first words and one of second words. A round adds the second word to
    the first, rotates the second, and combines it with the first by exclusive or. After each group
    of four rounds the next words of the key are added, and the number of the group to the second.
    """
    # The rounds are written out: JAX's own function is a loop over arrays on a CPU, several times
    # slower.
    keys = key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)  # the cipher's constant
    x = counter[0] + keys[0]
    y = counter[1] + keys[1]
    for group in range(5):
        for turn in _TURNS[group % 2]:
            x = x + y
            rotated = (y << turn) | (y >> (32 - turn))
            y = x ^ rotated
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def _box_muller(first: Array, second: Array, dtype: Any = jnp.float32) -> Complex[Array, "..."]:
    """Two normal numbers from 64 random bits, as r cos(theta) + i r sin(theta).

    The radius r = sqrt(-2 log u) has the 32 bits of ``first`` and the highest 8 of ``second``. The
    angle theta has the other 24 of ``second``: a bit for a quarter turn, a bit for a half turn, and
    22 bits for an angle of at most an eighth of a turn.
    """
    # u = (first + (low + 1/2) / 2^8) / 2^32 in (0, 1). If it is above 1/2, the tail is 1 - u, which
    # has the inverted bits, so both ends keep the full relative precision of a float.
    low = second >> 24
    upper = first >= jnp.uint32(1 << 31)
    first = jnp.where(upper, ~first, first)
    low = jnp.where(upper, 255 - low, low)
    tail = (first.astype(dtype) + (low.astype(dtype) + 0.5) * 2.0**-8) * 2.0**-32
    radius = jnp.sqrt(-2 * _log(tail, upper))
    # Up to an eighth of a turn, pi / 4, a short Taylor series is exact, and much cheaper than
    # jnp.cos and jnp.sin. The last 22 bits, centred, are -2^21 to 2^21 in units of pi / 2^23.
    units = (second & 0x3FFFFF).astype(dtype) - (2.0**21 - 0.5)
    cosine, sine = _cos_sin(units * (math.pi * 2.0**-23))
    # A half turn changes both signs, a quarter turn takes (cosine, sine) to (-sine, cosine).
    is_half_turn = (second & (1 << 22)) != 0
    is_quarter_turn = (second & (1 << 23)) != 0
    radius = jnp.where(is_half_turn, -radius, radius)
    along = jnp.where(is_quarter_turn, -sine, cosine)
    across = jnp.where(is_quarter_turn, cosine, sine)
    return jax.lax.complex(radius * along, radius * across)


def _log(tail: Array, upper: Array) -> Array:
    """log(1 - t) where ``upper``, else log(t); t is below 1/2."""
    u = jnp.where(upper, 1 - tail, tail)
    log = jnp.log(u)
    # First-order correction of the rounding of 1 - t, where log(1 - t) is about -t.
    precise = jnp.where(u == 1, -tail, log * (tail / (1 - u)))
    return jnp.where(upper, precise, log)


def _cos_sin(angle: Array) -> tuple[Array, Array]:
    """Cosine and sine for angles up to pi / 4, to the last digit of the dtype.

    Taylor's series from the last term to the first: cos x = 1 - x^2/2 (1 - x^2/12 (1 - ...)), and
    sin x = x (1 - x^2/6 (1 - x^2/20 (1 - ...))).
    """
    square = angle * angle
    cosine = sine = jnp.ones_like(angle)
    terms = 5
    if angle.dtype == jnp.float64:
        terms = 8
    for k in range(terms, 0, -1):
        cosine = 1 - cosine * (square * (1 / (2 * k * (2 * k - 1))))
        sine = 1 - sine * (square * (1 / (2 * k * (2 * k + 1))))
    return cosine, angle * sine
