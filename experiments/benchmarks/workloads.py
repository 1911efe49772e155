# SPDX-License-Identifier: Apache-2.0
"""The six models that training steps are timed on, with the shape of an input and a batch.

Inputs and labels are noise: speed does not depend on their values. The peers' networks
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

SEED = 0
CLASSES = 10
TOKENS = 10_000
LENGTH = 64


class ResNet18(nn.Module):
    """ResNet-18 for images of 32 x 32, with group normalisation."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, padding=1)
        norm = functools.partial(nn.GroupNorm, 32, reduction_axes=(-3, -2, -1))
        x = conv(64, (3, 3))(x)
        x = nn.relu(norm()(x))
        for channels, first in ((64, 1), (128, 2), (256, 2), (512, 2)):
            for strides in (first, 1):
                y = conv(channels, (3, 3), strides)(x)
                y = nn.relu(norm()(y))
                y = conv(channels, (3, 3))(y)
                y = norm()(y)
                if strides > 1:
                    x = conv(channels, (1, 1), strides, padding=0)(x)
                    x = norm()(x)
                x = nn.relu(x + y)
        return nn.Dense(CLASSES)(x.mean((-3, -2)))


class Block(nn.Module):
    """A block like GPT-2's; with a rank, its layers have LoRA."""

    rank: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        length, width = x.shape

        def split(name: str, h: jax.Array) -> jax.Array:
            return self.dense(name, h, width).reshape(length, self.heads, -1)

        h = nn.LayerNorm(name="before")(x)
        query = split("query", h)
        key = split("key", h)
        value = split("value", h)
        h = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dense("out", h.reshape(x.shape), width)
        h = nn.LayerNorm(name="between")(x)
        h = self.dense("up", h, 4 * width)
        x = x + self.dense("down", nn.gelu(h), width)
        return x, None

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
            blocks = nn.scan(Block, length=self.depth, **axes)
            x, _ = blocks(self.rank, self.heads, name="blocks")(x, None)
        else:
            for i in range(self.depth):
                x, _ = Block(self.rank, self.heads, name=f"{i}")(x)
        x = nn.LayerNorm(name="last")(x)
        if self.tied:
            return embedding.attend(x)
        return nn.Dense(self.words, name="head")(x)


class Workload(NamedTuple):
    """A model, and the shapes that are timed."""

    model: nn.Module
    parameters: int  # that are trained
    shape: tuple[int, ...]
    batch_size: int
    text: bool = False  # tokens, each the label of those before it


WORKLOADS = {
    "tempered CNN": Workload(
        model=models.TemperedCNN(),
        parameters=26_010,
        shape=(28, 28, 1),
        batch_size=256,
    ),
    "WideResNet-16-4": Workload(
        model=models.WideResNet(),
        parameters=2_748_890,
        shape=(32, 32, 3),
        batch_size=32,
    ),
    "MLP on a table": Workload(
        model=models.MLP(features=(256, 256)),
        parameters=94_218,
        shape=(100,),
        batch_size=1024,
    ),
    "ResNet-18": Workload(
        model=ResNet18(),
        parameters=11_173_962,
        shape=(32, 32, 3),
        batch_size=32,
    ),
    "decoder of 2 layers": Workload(
        model=Decoder(),
        parameters=2_974_992,
        shape=(LENGTH,),
        batch_size=64,
        text=True,
    ),
    "LoRA on the decoder": Workload(
        model=Decoder(rank=8),
        parameters=36_864,
        shape=(LENGTH,),
        batch_size=64,
        text=True,
    ),
}


def split(params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The leaves of adapters by name, and all others."""
    flat = flatten_dict(params, sep="/")
    adapters = {name: flat.pop(name) for name in list(flat) if "lora" in name}
    return adapters, flat


def joined(params: Any, frozen: Any) -> Any:
    """All parameters of a model, from both sides of `split`."""
    return unflatten_dict({**frozen, **params}, sep="/")


def problem(workload: Workload) -> tuple[Any, Any, Any]:
    """The loss of one example, the parameters that are trained, and a batch of noise."""
    model, expected, shape, size, text = workload
    x_key, y_key, params_key = jax.random.split(jax.random.key(SEED), 3)
    if text:
        x = jax.random.randint(x_key, (size, *shape), 0, TOKENS)
        y = jnp.roll(x, -1, axis=1)
    else:
        x = jax.random.normal(x_key, (size, *shape))
        y = jax.random.randint(y_key, (size,), 0, CLASSES)
    params = dict(jax.jit(model.init)(params_key, x[0])["params"])

    def error(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    loss = losses.of(model, error)
    if getattr(model, "rank", 0):
        params, frozen = split(params)
        whole = loss

        def loss(params: Any, example: Any) -> jax.Array:
            return whole(joined(params, frozen), example)

    trains = sum(leaf.size for leaf in jax.tree.leaves(params))
    if trains != expected:
        raise RuntimeError(
            f"workloads: {model} trains {trains:,} parameters, expected {expected:,}."
        )
    return loss, params, (x, y)
