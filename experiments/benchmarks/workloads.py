# SPDX-License-Identifier: Apache-2.0
"""The six models that training steps are timed on, with the shape of an input and a batch.

Inputs and labels are noise: speed does not depend on what they say. The peers' networks
(`torch_models`) have the same layers, and both sides are held to the number of parameters written
here.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from dpjax import losses, models

SEED, CLASSES, TOKENS, LENGTH = 0, 10, 10_000, 64


class ResNet18(nn.Module):
    """ResNet-18 for images of 32 x 32, with group normalisation."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, padding=1)
        norm = functools.partial(nn.GroupNorm, 32, reduction_axes=(-3, -2, -1))
        x = nn.relu(norm()(conv(64, (3, 3))(x)))
        for channels, first in ((64, 1), (128, 2), (256, 2), (512, 2)):
            for strides in (first, 1):
                y = nn.relu(norm()(conv(channels, (3, 3), strides)(x)))
                y = norm()(conv(channels, (3, 3))(y))
                if strides > 1:
                    x = norm()(conv(channels, (1, 1), strides, padding=0)(x))
                x = nn.relu(x + y)
        return nn.Dense(CLASSES)(x.mean((-3, -2)))


class Block(nn.Module):
    """A block in the manner of GPT-2; with a rank, LoRA beside its layers."""

    rank: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        length, width = x.shape
        h = nn.LayerNorm(name="before")(x)
        q, k, v = (
            self.dense(name, h, width).reshape(length, self.heads, -1)
            for name in ("query", "key", "value")
        )
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + self.dense("out", h, width)
        h = self.dense("up", nn.LayerNorm(name="between")(x), 4 * width)
        return x + self.dense("down", nn.gelu(h), width), None

    def dense(self, name: str, x: jax.Array, width: int) -> jax.Array:
        y = nn.Dense(width, name=name)(x)
        if not self.rank:
            return y
        thin = nn.Dense(self.rank, use_bias=False, name=f"{name}_lora_a")(x)
        return y + nn.Dense(width, use_bias=False, name=f"{name}_lora_b")(thin)


class Decoder(nn.Module):
    """A causal Transformer; `tied` heads are the table of embeddings, `scanned` blocks a loop."""

    rank: int = 0
    width: int = 128
    heads: int = 4
    depth: int = 2
    words: int = TOKENS
    length: int = LENGTH
    tied: bool = False
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedding = nn.Embed(self.words, self.width, name="tokens")
        positions = self.param("positions", nn.initializers.normal(0.02), (self.length, self.width))
        x = embedding(tokens) + positions
        if self.scanned:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            loop = nn.scan(Block, length=self.depth, **axes)(self.rank, self.heads, name="blocks")
            x, _ = loop(x, None)
        else:
            for i in range(self.depth):
                x, _ = Block(self.rank, self.heads, name=f"{i}")(x)
        x = nn.LayerNorm(name="last")(x)
        return embedding.attend(x) if self.tied else nn.Dense(self.words, name="head")(x)


class Workload(NamedTuple):
    model: nn.Module
    parameters: int  # that are trained
    shape: tuple[int, ...]
    batch_size: int
    text: bool = False  # tokens, each the label of those before it


WORKLOADS = {
    "tempered CNN": Workload(models.TemperedCNN(), 26_010, (28, 28, 1), 256),
    "WideResNet-16-4": Workload(models.WideResNet(), 2_748_890, (32, 32, 3), 32),
    "MLP on a table": Workload(models.MLP(features=(256, 256)), 94_218, (100,), 1024),
    "ResNet-18": Workload(ResNet18(), 11_173_962, (32, 32, 3), 32),
    "decoder of 2 layers": Workload(Decoder(), 2_974_992, (LENGTH,), 64, text=True),
    "LoRA on the decoder": Workload(Decoder(rank=8), 36_864, (LENGTH,), 64, text=True),
}


def split(params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The leaves of adapters by name, and all others."""
    flat = flatten_dict(params, sep="/")
    adapters = {name: flat.pop(name) for name in list(flat) if "lora" in name}
    return adapters, flat


def joined(params: Any, frozen: Any) -> Any:
    return unflatten_dict({**frozen, **params}, sep="/")


def problem(workload: Workload) -> tuple[Any, Any, Any]:
    """The loss of one example, the parameters that are trained, and a batch of noise."""
    model, expected, shape, size, text = workload
    for_x, for_y, for_params = jax.random.split(jax.random.key(SEED), 3)
    if text:
        x = jax.random.randint(for_x, (size, *shape), 0, TOKENS)
        batch = x, jnp.roll(x, -1, axis=1)
    else:
        x = jax.random.normal(for_x, (size, *shape))
        batch = x, jax.random.randint(for_y, (size,), 0, CLASSES)
    params = dict(jax.jit(model.init)(for_params, x[0])["params"])
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    loss = losses.of(model, lambda logits, y: jnp.mean(cross_entropy(logits, y)))
    if getattr(model, "rank", 0):
        params, frozen = split(params)
        whole = loss

        def loss(params: Any, example: Any) -> jax.Array:
            return whole(joined(params, frozen), example)

    held = sum(leaf.size for leaf in jax.tree.leaves(params))
    if expected != held:
        raise RuntimeError(f"workloads: {model} trains {held:,} parameters, expected {expected:,}.")
    return loss, params, batch
