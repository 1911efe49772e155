# SPDX-License-Identifier: Apache-2.0
"""The five problems that training steps are timed on: network, shape of an input, batch.

They differ in what is hard about them: W1 is small, W2 spends its time in convolutions, W3
has wide inputs and a large batch, W4 is matrix products alone and soon limited by memory, W5
has attention, layer norms and an embedding.  Inputs and labels are noise: speed does not
depend on what they say.  The networks come from `dpjax.models`; the peers' (`torch_models`)
have the same layers, and both sides are held to the number of parameters written here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax

from dpjax import losses, models

SEED, CLASSES = 0, 10


class Workload(NamedTuple):
    model: nn.Module
    parameters: int | None  # expected; None for those without a peer
    shape: tuple[int, ...]
    batch_size: int
    vocabulary: int | None = None  # of inputs that are tokens; None if they are numbers


TEXTS = models.TextTransformer(
    classes=CLASSES,
    vocabulary=10_000,
    length=64,
    width=128,
    depth=4,
    heads=4,
    padding=None,
    activation=nn.gelu,  # by its tanh approximation, as the peers' is
)
WORKLOADS = {
    "W1": Workload(models.TemperedCNN(), 26_010, (28, 28, 1), 256),
    "W2": Workload(models.CIFARDenseCNN(), 550_570, (32, 32, 3), 256),
    "W3": Workload(models.ScatterCIFARCNN(), 187_210, (8, 8, 243), 1024),
    "W4": Workload(models.MLP(features=(256, 256)), 269_322, (784,), 1024),
    "W5": Workload(TEXTS, 2_082_826, (64,), 64, 10_000),
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
    if expected not in (None, held):
        raise RuntimeError(f"workloads: {model} has {held:,} parameters, expected {expected:,}.")
    batch = x, jax.random.randint(for_y, (size,), 0, CLASSES)
    return losses.of(model, losses.cross_entropy), params, batch
