# SPDX-License-Identifier: Apache-2.0
"""The five problems that training steps are timed on: network, shape of an input, batch.

They differ in what is hard about them: W1 is small, W2 spends its time in convolutions, W3
has wide inputs and a large batch, W4 is matrix products alone and soon limited by memory, W5
has attention, layer norms and an embedding.  Inputs and labels are noise: speed does not
depend on what they say.  The peers' networks (`torch_models`) have the same layers, and both
sides are held to the number of parameters written here.

This file must never know who takes part, or how they are timed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dpjax import losses, models

SEED, CLASSES = 0, 10


class MaxPoolCNN(nn.Module):
    """A CIFAR-10 network: conv, conv, max-pool, three times, and two dense layers."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for channels in (32, 64, 128):
            x = jnp.tanh(nn.Conv(channels, (3, 3))(x))
            x = jnp.tanh(nn.Conv(channels, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(*x.shape[:-3], -1)
        return nn.Dense(CLASSES)(jnp.tanh(nn.Dense(128)(x)))


class ScatterCNN(nn.Module):
    """The head on scattering features of Tramer and Boneh, 2021: conv, max-pool, conv, dense."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.max_pool(jnp.tanh(nn.Conv(64, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = jnp.tanh(nn.Conv(64, (3, 3))(x))
        return nn.Dense(CLASSES)(x.reshape(*x.shape[:-3], -1))


class Transformer(nn.Module):
    """A classifier of tokens: four pre-norm blocks of width 128, and the mean over positions."""

    vocabulary: int
    width: int = 128

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        where = nn.Embed(tokens.shape[-1], self.width, name="positions")
        x = nn.Embed(self.vocabulary, self.width)(tokens) + where(jnp.arange(tokens.shape[-1]))
        for _ in range(4):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
            hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(hidden)
        return nn.Dense(CLASSES)(nn.LayerNorm()(x).mean(axis=-2))


class Workload(NamedTuple):
    model: nn.Module
    parameters: int
    shape: tuple[int, ...]
    batch_size: int
    vocabulary: int | None = None  # of inputs that are tokens; None if they are numbers


WORKLOADS = {
    "W1": Workload(models.TemperedCNN(), 26_010, (28, 28, 1), 256),
    "W2": Workload(MaxPoolCNN(), 550_570, (32, 32, 3), 256),
    "W3": Workload(ScatterCNN(), 187_210, (8, 8, 243), 1024),
    "W4": Workload(models.MLP(features=(256, 256)), 269_322, (784,), 1024),
    "W5": Workload(Transformer(10_000), 2_082_826, (64,), 64, 10_000),
}


def problem(workload: Workload) -> tuple[Any, Any, Any]:
    """The loss of one example, the first parameters, and a batch of noise with labels."""
    model, expected, shape, size, vocabulary = workload
    for_x, for_y, for_params = jax.random.split(jax.random.key(SEED), 3)
    if vocabulary is None:
        x = jax.random.normal(for_x, (size, *shape))
    else:
        x = jax.random.randint(for_x, (size, *shape), 0, vocabulary)
    params = jax.jit(model.init)(for_params, x[0])["params"]
    held = sum(leaf.size for leaf in jax.tree.leaves(params))
    if held != expected:
        raise RuntimeError(f"workloads: {model} has {held:,} parameters, expected {expected:,}.")
    batch = x, jax.random.randint(for_y, (size,), 0, CLASSES)
    return losses.of(model, losses.cross_entropy), params, batch
