# SPDX-License-Identifier: Apache-2.0
"""The steps of `large`, each in a process of its own, because their memory is the question.

  command   python experiments/benchmarks/large_cases.py "private adapters"

Asked in lines of JSON: first ``{"prepare": task}``, and then ``{"steps": 1}`` as often as wanted.
The network is `dpjax.models.TextTransformer` as it is.  It computes in bfloat16 because its loss
is given parameters rounded to that; the parameters themselves stay float32, and so do clipping,
sums and noise.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

import contestants
import flax.linen as nn
import jax
import jax.numpy as jnp
import memory
import optax
import workers

import dpjax
from dpjax import clipping, losses, models, sampling

CLASSES, RANK = 10, 8
CASES = ("plain", "private", "plain adapters", "private adapters")
Loss = Callable[[Any, Any], jax.Array]


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


def gradient_of(case: str, loss: Loss) -> Any:
    """``(trained, (frozen, batch)) -> gradient`` of a case; frozen may be None."""

    def gradient(trained: Any, given: Any) -> Any:
        frozen, batch = given
        each = loss if frozen is None else adapted(loss, frozen)
        if case.startswith("private"):
            return dpjax.clipped_grad(each, clipping.flat(contestants.BOUND))(trained, batch).sum

        def mean(trained: Any) -> jax.Array:
            return jnp.mean(jax.vmap(each, (None, 0))(trained, batch))

        return jax.grad(mean)(trained)

    return gradient


def prepared(case: str, task: dict[str, Any]) -> tuple[contestants.Contestant, dict[str, Any]]:
    """The case after it has compiled, and what it works on."""
    size, shape = task["batch_size"], task["shape"]
    model = models.TextTransformer(classes=CLASSES, padding=None, activation=nn.gelu, **shape)
    for_x, for_y, for_params, for_noise = jax.random.split(jax.random.key(contestants.SEED), 4)
    x = jax.random.randint(for_x, (size, shape["length"]), 0, shape["vocabulary"])
    batch = x, jax.random.randint(for_y, (size,), 0, CLASSES)
    params = jax.jit(model.init)(for_params, x[0])["params"]
    held = sum(leaf.size for leaf in jax.tree.leaves(params))
    frozen = None
    if case.endswith("adapters"):
        frozen, params = halved(params), adapters(for_params, shape["width"], shape["depth"])
    link = optax.identity()
    if case.startswith("private"):
        mechanism = dpjax.Mechanism(
            sampling=sampling.poisson(examples=10_000, batch_size=size),
            clipping=clipping.flat(contestants.BOUND),
            noise_multiplier=contestants.NOISE_MULTIPLIER,
            steps=1_000_000,
        )
        link = mechanism.privatize(for_noise)
    made = contestants.compiled(gradient_of(case, loss_of(model)), link, params, (frozen, batch))
    first = made.run(1)
    rise = memory.of_jax()
    made.run(1)
    facts = {"first_s": first, "peak_bytes": rise(), **made.memory()}
    facts |= {"parameters": held, "trained": sum(leaf.size for leaf in jax.tree.leaves(params))}
    return made, facts


def main() -> None:
    _, case = sys.argv
    state: dict[str, Any] = {}

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        if "prepare" in question:
            state["made"], facts = prepared(case, question["prepare"])
            return facts
        seconds, sound = state["made"].run(question["steps"]), state["made"].sound()
        whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB, on Linux
        return {"seconds": seconds, "sound": sound, "process_bytes": 1024 * whole}

    workers.serve(handle)


if __name__ == "__main__":
    main()
