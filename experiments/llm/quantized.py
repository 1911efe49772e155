# SPDX-License-Identifier: Apache-2.0
"""Frozen kernels in 8 or 4 bits, in blocks of 64 numbers with a scale each.

The adapters are trained on the quantised base, as in QLoRA. Embeddings, norms and biases stay as
they are. The loss computes with kernels that are dequantised to their own type, so a step still
needs the memory of the dense kernels: only the stored weights are smaller.

References:
  Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023: blocks and 4-bit
  NormalFloat (appendix E); scales are not quantised here.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import norm

from experiments.llm.networks import Adapters, Cache, Leaves, Network

KINDS = ("int8", "nf4")
BLOCK = 64

# The 16 levels of NormalFloat: quantiles of the normal distribution, and 0.
_TAIL = 1 - (1 / 32 + 1 / 30) / 2
_POSITIVE = norm.ppf(np.linspace(_TAIL, 0.5, 9))  # ends with 0
_NEGATIVE = -norm.ppf(np.linspace(_TAIL, 0.5, 8)[:-1])
_QUANTILES = np.sort([*_POSITIVE, *_NEGATIVE])
LEVELS = np.float32(_QUANTILES / _POSITIVE[0])


@flax.struct.dataclass
class Quantized:
    """A kernel: codes ``[blocks, 64]``, for nf4 two in a byte, and scales ``[blocks, 1]``."""

    codes: Any
    scales: Any
    shape: tuple[int, ...] = flax.struct.field(pytree_node=False)
    kind: str = flax.struct.field(pytree_node=False)

    def dense(self) -> Any:
        """The kernel in the type of its scales."""
        if self.kind == "int8":
            values = self.codes / np.float32(127)
        else:
            pairs = jnp.stack([self.codes >> 4, self.codes & 15], axis=-1)
            levels = jnp.asarray(LEVELS)
            values = levels[pairs].reshape(-1, BLOCK)
        kernel = values * self.scales
        return kernel.astype(self.scales.dtype).reshape(self.shape)


def quantized(leaf: Any, kind: str) -> Quantized:
    """A kernel in blocks of `BLOCK` numbers, rounded to the nearest level of its kind."""
    blocks = jnp.asarray(leaf).reshape(-1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
    # A block of zeros has the scale 0.
    divisors = jnp.where(scales == 0, 1, scales)
    values = (blocks / divisors).astype(jnp.float32)
    if kind == "int8":
        codes = jnp.round(127 * values).astype(jnp.int8)
    else:
        between = (LEVELS[1:] + LEVELS[:-1]) / 2
        levels = jnp.searchsorted(between, values).astype(jnp.uint8)
        first = levels[:, ::2]
        second = levels[:, 1::2]
        codes = (first << 4) | second
    return Quantized(codes, scales, jnp.shape(leaf), kind)


def kernels_quantized(leaves: Leaves, kind: str) -> dict[str, Any]:
    """The leaves of a network, with its kernels quantised where blocks divide them."""
    made = dict(leaves)
    for path, leaf in leaves.items():
        is_kernel = jnp.ndim(leaf) > 1 and "embed" not in path and not path.endswith("bias")
        if is_kernel and leaf.size % BLOCK == 0:
            made[path] = quantized(leaf, kind)
    return made


def dense(leaves: Leaves) -> dict[str, Any]:
    """The leaves as the network takes them."""
    made = dict(leaves)
    for path, leaf in leaves.items():
        if isinstance(leaf, Quantized):
            made[path] = leaf.dense()
    return made


def of_quantized(network: Network) -> Network:
    """The network of leaves whose kernels may be quantised."""

    def apply(leaves: Leaves, adapters: Adapters, tokens: Any) -> Any:
        return network.apply(dense(leaves), adapters, tokens)

    def begin(leaves: Leaves, length: int) -> Cache:
        return network.begin(jax.eval_shape(dense, leaves), length)

    def read(
        leaves: Leaves, adapters: Adapters, token: Any, place: Any, cache: Cache
    ) -> tuple[Any, Cache]:
        return network.read(dense(leaves), adapters, token, place, cache)

    return network._replace(apply=apply, begin=begin, read=read)
