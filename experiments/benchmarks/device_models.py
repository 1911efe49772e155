# SPDX-License-Identifier: Apache-2.0
"""The models of `devices` by name, in shapes alone, and the steps that are timed on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import dpjax
from dpjax import clipping, losses, models, noise, sampling
from experiments.benchmarks.workloads import CLASSES, SEED, WORKLOADS

BOUND, NOISE_MULTIPLIER, LEARNING_RATE = 1.0, 1.1, 0.1
STEPS = ("plain", "auto", "vmap", "jax_privacy", "noised")
BATCH_SIZES = {
    "W1": 256,
    "W2": 256,
    "W3": 1024,
    "W4": 1024,
    "W5": 64,
    "WRN-16-4": 4096,
    "ViT-S": 256,
    "Transformer": 64,
    "Transformer LoRA": 64,
}
TEXTS = {"vocabulary": 50_304, "length": 1024, "width": 768, "depth": 12, "heads": 12}


RANK = 8  # of adapters
Loss = Callable[[Any, Any], jax.Array]


class Problem(NamedTuple):
    """The loss of one example, and the shapes of parameters, of a batch and of frozen arrays."""

    loss: Callable[..., Any]
    params: Any
    batch: Any
    frozen: Any = None


def problem(name: str, batch_size: int) -> Problem:
    """A model of the benchmark by its name, in shapes alone."""
    key = jax.random.key(SEED)
    if name.startswith("Transformer"):
        network = models.TextTransformer(classes=CLASSES, padding=None, activation=nn.gelu, **TEXTS)
        x = jax.ShapeDtypeStruct((batch_size, TEXTS["length"]), jnp.int32)
        loss = loss_of(network)
    elif name == "WRN-16-4":
        network, x = models.WideResNet(), jax.ShapeDtypeStruct((batch_size, 32, 32, 3), jnp.float32)
        loss = losses.of(network, losses.cross_entropy)
    elif name == "ViT-S":
        network = models.ViT(width=384, heads=6)
        x = jax.ShapeDtypeStruct((batch_size, 224, 224, 3), jnp.float32)
        loss = losses.of(network, losses.cross_entropy)
    else:
        network, _, shape, _, vocabulary = WORKLOADS[name]
        dtype = jnp.float32 if vocabulary is None else jnp.int32
        x = jax.ShapeDtypeStruct((batch_size, *shape), dtype)
        loss = losses.of(network, losses.cross_entropy)
    row = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    params = jax.eval_shape(network.init, key, row)["params"]
    batch = x, jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    if not name.endswith("LoRA"):
        return Problem(loss, params, batch)
    frozen = jax.eval_shape(halved, params)
    thin = jax.eval_shape(lambda: adapters(key, TEXTS["width"], TEXTS["depth"]))
    return Problem(loss, thin, batch, frozen)


def gradient_of(step: str, loss: Any, batch_size: int) -> tuple[Any, optax.GradientTransformation]:
    """A gradient ``(params, batch) -> tree``, and what makes it private.

    Args:
      step: "plain"; "noised", which is plain and the noise of a private step; an engine;
        or "jax_privacy".
      loss: Of one example.
      batch_size: The size of a batch.
    """
    key, each = jax.random.key(SEED), jax.vmap(loss, (None, 0))
    if step in ("plain", "noised"):
        gradient = jax.grad(lambda params, batch: jnp.mean(each(params, batch)))
        return gradient, optax.identity() if step == "plain" else _noised(key)
    if step == "jax_privacy":
        from jax_privacy import clipping as theirs
        from jax_privacy import noise_addition

        gradient = theirs.clipped_grad(
            loss, l2_clip_norm=BOUND, normalize_by=batch_size, keep_batch_dim=False
        )
        deviation = NOISE_MULTIPLIER * BOUND / batch_size
        return gradient, noise_addition.gaussian_privatizer(stddev=deviation, prng_key=key)
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(examples=60_000, batch_size=batch_size),
        clipping=clipping.flat(BOUND),
        noise_multiplier=NOISE_MULTIPLIER,
        steps=1_000_000,
    )
    clipped = dpjax.clipped_grad(loss, mechanism.clipping, engine=step)
    return lambda params, batch: clipped(params, batch).sum, mechanism.privatize(key)


def _noised(key: Any) -> optax.GradientTransformation:
    """Adds noise to a plain gradient: no private step can cost less."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return jax.tree.map(lambda x: x + noise.standard_normal(key, x.shape), updates), state

    return optax.GradientTransformation(lambda _: (), update)


def halved(params: Any) -> Any:
    """The parameters in bfloat16, which the network then computes in."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def loss_of(model: nn.Module) -> Loss:
    """The loss of one example, computed in bfloat16 up to the logits."""
    each = losses.of(model, lambda h, y: losses.cross_entropy(h.astype(jnp.float32), y))
    return lambda params, example: each(halved(params), example)


def adapters(key: jax.Array, width: int, depth: int) -> dict[str, dict[str, jax.Array]]:
    """Two thin matrices beside the kernel of every query and value; the product begins at 0."""
    block = "Transformer/encoderblock_{}/MultiHeadDotProductAttention_1/{}"
    names = [block.format(i, which) for i in range(depth) for which in ("query", "value")]
    return {
        name: {
            "down": jax.random.normal(one, (width, RANK)) / width**0.5,
            "up": jnp.zeros((RANK, width)),
        }
        for name, one in zip(names, jax.random.split(key, len(names)), strict=True)
    }


def adapted(loss: Loss, frozen: Any) -> Loss:
    """The loss of the adapters: what the network itself holds is closed over, and so frozen."""

    def of_adapters(added: Any, example: Any) -> jax.Array:
        thin = halved(added)

        def beside(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            out, pair = call(*args, **kwargs), thin.get("/".join(context.module.path))
            if pair is None or context.method_name != "__call__":
                return out
            return out + (args[0] @ pair["down"] @ pair["up"]).reshape(out.shape)

        with nn.intercept_methods(beside):
            return loss(frozen, example)

    return of_adapters
