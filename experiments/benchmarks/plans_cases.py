# SPDX-License-Identifier: Apache-2.0
"""One plan for `plans`: a training step on one device, compiled for a device that is not there.

The process needs an environment with the compiler of this device, as `pods_cases` does. It
allocates nothing: arguments are shapes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import large_cases
import numpy as np
import optax
import pods_cases
import pods_hlo
import workers
from jax.interpreters import partial_eval as pe
from jax.sharding import AxisType, Mesh, SingleDeviceSharding
from workloads import CLASSES, SEED, WORKLOADS

import dpjax
from dpjax import clipping, losses, models, noise, sampling
from dpjax.gradients import platforms
from dpjax.gradients._bookkeeping import cost

BOUND, NOISE_MULTIPLIER, LEARNING_RATE = 1.0, 1.1, 0.1
# FLOPs of one pass and bytes of memory, per second: NVIDIA's data sheet of the H100 SXM, with
# TF32 on its matrix units and no sparsity.
H100_FLOP, H100_BYTES = 495e12, 3.35e12
# GiB that a process has by default, which decide microbatches: JAX takes three quarters of a GPU.
MEMORY = {"h100": 60, "v5e": 16, "v5p": 95, "v6e": 32}
TEXTS = {"vocabulary": 50_304, "length": 1024, "width": 768, "depth": 12, "heads": 12}


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
        loss = large_cases.loss_of(network)
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
    frozen = jax.eval_shape(large_cases.halved, params)
    thin = jax.eval_shape(lambda: large_cases.adapters(key, TEXTS["width"], TEXTS["depth"]))
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


def form_of(step: str, sizes: list[int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Norms and clipped sum of the gradients of one matrix, by one form at one precision.

    Args:
      step: "plain" is the sum without norms. "kept" forms each example's gradient once, "twice"
        forms the sum by a second product, "gram" takes norms from inner products of positions.
        The precision of all products follows: "kept default".
      sizes: Examples, positions, inputs and outputs.
    """
    form, _, precision = step.partition(" ")
    examples, positions, inputs, outputs = sizes

    def product(formula: str, x: Any, g: Any) -> Any:
        return jnp.einsum(formula, x, g, precision=precision or None)

    def run(x: Any, g: Any) -> Any:
        if form in ("kept", "twice"):
            each = product("bsk,bsd->bkd", x, g)
            squares = jnp.sum(each * each, axis=(1, 2))
        elif form == "gram":
            pairs = product("bsk,btk->bst", x, x) * product("bsd,btd->bst", g, g)
            squares = jnp.sum(pairs, axis=(1, 2))
        else:
            return product("bsk,bsd->kd", x, g)
        factors = jnp.minimum(1, BOUND / jnp.sqrt(squares))[:, None, None]
        if form == "kept":
            return jnp.sum(jnp.where(factors != 0, factors * each, 0), axis=0)
        return product("bsk,bsd->kd", x, factors * g)

    x = jax.ShapeDtypeStruct((examples, positions, inputs), jnp.float32)
    return run, (x, jax.ShapeDtypeStruct((examples, positions, outputs), jnp.float32))


def kernel_form_of(step: str, sizes: list[int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The clipped sum of the gradients of one 3x3 kernel, by one form.

    Args:
      step: "plain" is the sum without norms, "vmap" the engine of that name. "kept" and "gram" are
        the book-keeping engine's forms, whichever it would choose.
      sizes: Examples, the side of the image, inputs and outputs.
    """
    examples, side, inputs, outputs = sizes

    def loss(kernel: Any, example: Any) -> Any:
        # In the layouts that convolutions have in a network.
        x, g = jax.tree.map(jnp.tanh, example)
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x[None], kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.sum(g * y[0])

    def run(kernel: Any, batch: Any) -> Any:
        if step == "plain":
            return jax.grad(lambda k: jnp.sum(jax.vmap(loss, (None, 0))(k, batch)))(kernel)
        engine = "vmap" if step == "vmap" else "ghost"
        price = 0 if step == "gram" else math.inf
        with mock.patch.object(cost, "_PAIR", price):
            return dpjax.clipped_grad(loss, clipping.flat(BOUND), engine)(kernel, batch).value

    def image(channels: int) -> Any:
        return jax.ShapeDtypeStruct((examples, side, side, channels), jnp.float32)

    kernel = jax.ShapeDtypeStruct((3, 3, inputs, outputs), jnp.float32)
    return run, (kernel, (image(inputs), image(outputs)))


def step_of(task: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step of a task and the shapes of its arguments."""
    if "sizes" in task:
        return form_of(task["step"], task["sizes"])
    if "convolution" in task:
        return kernel_form_of(task["step"], task["convolution"])
    size = task["batch_size"]
    loss, params, batch, frozen = problem(task["model"], size)

    def own(frozen: Any) -> Any:
        return loss if frozen is None else large_cases.adapted(loss, frozen)

    def step(params: Any, state: Any, batch: Any, frozen: Any) -> tuple[Any, Any]:
        gradient, link = gradient_of(task["step"], own(frozen), size)
        optimizer = optax.chain(link, optax.sgd(LEARNING_RATE))
        updates, state = optimizer.update(gradient(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    _, link = gradient_of(task["step"], loss, size)
    state = jax.eval_shape(optax.chain(link, optax.sgd(LEARNING_RATE)).init, params)
    return step, (params, state, batch, frozen)


def plan(task: dict[str, Any]) -> dict[str, Any]:
    """What the compiler plans for one step.

    ``expected_ms`` and ``cycles`` are two estimates of the compiler of a TPU. The first is its
    analysis of FLOPs and bytes, which counts the body of a loop once and takes a product of six
    passes for one of one; the second is what its scheduler expects, loop by loop.
    """
    devices = pods_cases.devices_of(task["device"])
    alone = SingleDeviceSharding(devices[0])
    step, arguments = step_of(task)
    began = time.perf_counter()
    limit = MEMORY.get(task["device"].partition(":")[0], 16) * 2**30
    # A mesh of one device in force: otherwise this CPU might compile for several.
    with (
        jax.set_mesh(Mesh(np.array(devices[:1]), "one", axis_types=(AxisType.Auto,))),
        mock.patch.object(platforms, "memory_limit", return_value=limit),
    ):
        traced = jax.jit(step, in_shardings=alone, out_shardings=alone).trace(*arguments)
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if not (found := pods_cases.too_large(error)):
            raise
        return {"too_large": found, "compiler": pods_cases.compiler_of(task["device"])}
    memory, text = compiled.memory_analysis(), compiled.as_text()
    answer = {
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "compile_s": time.perf_counter() - began,
        "compiler": pods_cases.compiler_of(task["device"]),
    }
    if task["device"].startswith("h100"):
        # The compiler of a GPU has no analysis of its own for a device that is not there.
        used = pe.dce_jaxpr(traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.jaxpr.outvars))[0]
        flop = pods_hlo.matmul_flop(used, {}, (1, 1))
        held = pods_hlo.accessed(text, (1, 1))
        seconds = max(flop / H100_FLOP, held / H100_BYTES)
        return {**answer, "flop": flop, "bytes": held, "roofline_ms": 1e3 * seconds}
    answer["cycles"] = pods_hlo.counted(text, {"one": 1}, (1, 1))["cycles"]
    if answer["cycles"] and " while(" in text:
        return answer  # a loop over microbatches, whose body the analysis would count once
    cost = compiled.cost_analysis() or {}
    seconds = cost.get("optimal_seconds", 0.0)  # that of a CPU has none
    # The compiler subtracts a second for each operation that it cannot estimate.
    seconds -= math.floor(min(seconds, 0))
    return {
        **answer,
        "flop": cost.get("flops"),
        "bytes": cost.get("bytes accessed"),
        "expected_ms": 1e3 * seconds,
    }


if __name__ == "__main__":
    workers.serve(plan)
