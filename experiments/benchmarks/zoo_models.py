# SPDX-License-Identifier: Apache-2.0
"""Small models of many kinds, for `zoo`: functions that return loss, parameters and batch.

A loss is a pure function of parameters and one example. The models are written as their users
write them: nothing in them knows of per-example gradients. `MODELS` holds them by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

Array = jax.Array
WIDTHS = (256, 256, 256, 10)  # of perceptrons
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Case(NamedTuple):
    """A loss of one example, with parameters and a batch for it."""

    loss: Callable[[Any, Any], Array]
    params: Any
    batch: Any


class Draw:
    """Random arrays, by NumPy: JAX would compile for each shape."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Array:
        return jnp.asarray(self.rng.normal(scale=scale, size=shape), jnp.float32)

    def matrix(self, *shape: int) -> Array:
        return self.normal(*shape, scale=1 / np.sqrt(np.prod(shape[:-1])))

    def below(self, limit: int, *shape: int) -> Array:
        return jnp.asarray(self.rng.integers(limit, size=shape), jnp.int32)

    def dense(self, inputs: int, outputs: int) -> dict[str, Array]:
        return {"w": self.matrix(inputs, outputs), "b": jnp.zeros(outputs)}

    def labelled(self, size: int, *shape: int) -> tuple[Array, Array]:
        """Noise, with labels of ten classes."""
        return self.normal(size, *shape), self.below(10, size)


def classified(logits: Callable[..., Any], params: Any, batch: Any) -> Case:
    """The cross-entropy of a function of parameters and inputs; the label is last."""

    def loss(params: Any, example: Any) -> Array:
        *inputs, label = example
        return cross_entropy(logits(params, *inputs), label)

    return Case(loss, params, batch)


def of_module(module: nn.Module, batch: tuple[Array, Array]) -> Case:
    """A Flax module that returns logits, with its parameters."""
    params = jax.jit(module.init)(jax.random.key(0), batch[0][0])["params"]
    return classified(lambda params, x: module.apply({"params": params}, x), params, batch)


def apply(layer: dict[str, Array], x: Array) -> Array:
    return x @ layer["w"] + layer["b"]


def rms(x: Array, scale: Array | float = 1.0) -> Array:
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


# Parameters alone -----------------------------------------------------------------------


def weight_decay_in_the_loss(size: int) -> Case:
    """An MLP whose loss holds half the squared norm of its parameters."""
    draw = Draw()
    layers = [draw.dense(*pair) for pair in itertools.pairwise((784, 256, 256, 10))]

    def loss(params: Any, example: Any) -> Array:
        x, y = example
        for layer in params[:-1]:
            x = jax.nn.relu(apply(layer, x))
        decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return cross_entropy(apply(params[-1], x), y) + 5e-4 * decay

    return Case(loss, layers, draw.labelled(size, 784))


def hypernetwork(size: int) -> Case:
    """Layer embeddings generate the kernels of a residual MLP (static hypernetwork)."""
    draw, width = Draw(), 64
    params = {
        "codes": draw.normal(4, 16),
        "hidden": draw.dense(16, 32),
        "out": {"w": draw.matrix(32, width * width) / 8, "b": jnp.zeros(width * width)},
        "first": draw.dense(64, width),
        "last": draw.dense(width, 10),
    }

    def logits(params: Any, x: Array) -> Array:
        h = apply(params["first"], x)
        for code in params["codes"]:
            kernel = apply(params["out"], jnp.tanh(apply(params["hidden"], code)))
            h = h + jax.nn.relu(h @ kernel.reshape(width, width))
        return apply(params["last"], h)

    return classified(logits, params, draw.labelled(size, 64))


def hypernetwork_of_the_example(size: int) -> Case:
    """The example generates the weights of a small network over its points (an implicit field)."""
    draw, width, points = Draw(), 16, 64
    cuts = np.cumsum([2 * width, width, width * width, width, width])
    params = {"encoder": draw.dense(128, 64), "out": draw.dense(64, int(cuts[-1]))}

    def loss(params: Any, example: Any) -> Array:
        x, places, values = example
        weights = apply(params["out"], jax.nn.relu(apply(params["encoder"], x)))
        a, b, c, d, e = jnp.split(weights, cuts[:-1])
        h = jnp.sin(places @ a.reshape(2, width) + b)
        h = jnp.sin(h @ c.reshape(width, width) + d)
        return jnp.mean((h @ e - values) ** 2)

    places, values = draw.normal(size, points, 2), draw.normal(size, points)
    return Case(loss, params, (draw.normal(size, 128), places, values))


def weight_normalisation(size: int) -> Case:
    """An MLP whose kernels have columns that are a direction times a gain."""
    draw = Draw()
    layers = [
        {"v": draw.matrix(n, m), "g": jnp.ones(m), "b": jnp.zeros(m)}
        for n, m in itertools.pairwise(WIDTHS)
    ]

    def layer(p: Any, x: Array) -> Array:
        return x @ (p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0)) + p["b"]

    def logits(params: Any, x: Array) -> Array:
        for p in params[:-1]:
            x = jax.nn.relu(layer(p, x))
        return layer(params[-1], x)

    return classified(logits, layers, draw.labelled(size, 256))


def low_rank_adapters(size: int) -> Case:
    """LoRA: a frozen kernel plus a product of two thin ones, added before the layer."""
    draw, width, rank = Draw(), 256, 4
    frozen = [draw.matrix(width, width) for _ in range(3)]
    params = [{"a": draw.matrix(width, rank), "b": draw.matrix(rank, width)} for _ in frozen]

    def logits(params: Any, x: Array) -> Array:
        for w, p in zip(frozen, params, strict=True):
            x = jax.nn.gelu(x @ (w + 2.0 * (p["a"] @ p["b"])))
        return x[:, :10].mean(0)

    return classified(logits, params, draw.labelled(size, 16, width))


def equalised_learning_rate(size: int) -> Case:
    """An MLP whose kernels are scaled by constants at run time."""
    draw = Draw()
    kernels = [draw.normal(n, m) for n, m in itertools.pairwise(WIDTHS)]

    def logits(params: Any, x: Array) -> Array:
        for w in params[:-1]:
            x = jax.nn.relu(x @ (w * np.float32(np.sqrt(2 / len(w)))))
        return x @ (params[-1] / 16)

    return classified(logits, kernels, draw.labelled(size, 256))


# Images ---------------------------------------------------------------------------------


class WeightNormCNN(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        for channels in (32, 32, 64):
            x = nn.relu(nn.WeightNorm(nn.Conv(channels, (3, 3), strides=2))(x))
        return nn.WeightNorm(nn.Dense(10))(x.mean((0, 1)))


class StandardConv(nn.Module):
    """A convolution with a standardised kernel, as in BiT."""

    channels: int
    kernel: int = 3
    strides: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (self.kernel, self.kernel, x.shape[-1], self.channels)
        w = self.param("kernel", nn.initializers.he_normal(), shape)
        mean, variance = w.mean((0, 1, 2)), w.var((0, 1, 2))
        w = (w - mean) / jnp.sqrt(variance + 1e-10)
        numbers = ("NHWC", "HWIO", "NHWC")
        stride = (self.strides, self.strides)
        return lax.conv_general_dilated(x[None], w, stride, "SAME", dimension_numbers=numbers)[0]


class BiT(nn.Module):
    """A pre-activation ResNet with standardised kernels and group normalisation."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = StandardConv(16)(x)
        for channels, strides in ((32, 2), (64, 2)):
            y = nn.relu(nn.GroupNorm(8)(x))
            shortcut = StandardConv(channels, 1, strides)(y)
            y = nn.relu(nn.GroupNorm(8)(StandardConv(channels // 2, 1)(y)))
            y = nn.relu(nn.GroupNorm(8)(StandardConv(channels // 2, 3, strides)(y)))
            x = shortcut + StandardConv(channels, 1)(y)
        return nn.Dense(10)(nn.relu(nn.GroupNorm(8)(x)).mean((0, 1)))


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(16, (3, 3))(x)
        for channels, strides in ((16, 1), (32, 2), (64, 2)):
            y = nn.relu(nn.GroupNorm(8)(nn.Conv(channels, (3, 3), strides=strides)(x)))
            y = nn.GroupNorm(8)(nn.Conv(channels, (3, 3))(y))
            short = x if strides == 1 else nn.Conv(channels, (1, 1), strides=strides)(x)
            x = nn.relu(y + short)
        return nn.Dense(10)(x.mean((0, 1)))


class ViT(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(64, (4, 4), strides=4)(x).reshape(-1, 64)
        x = jnp.concatenate([self.param("token", nn.initializers.zeros, (1, 64)), x])
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape)
        for _ in range(3):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return nn.Dense(10)(nn.LayerNorm()(x)[0])


def mixed(h: Array, hidden: int) -> Array:
    """A block of a mixer: a perceptron over places, and one over channels."""
    h = h + nn.Dense(h.shape[0])(nn.gelu(nn.Dense(hidden)(nn.LayerNorm()(h).T))).T
    return h + nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(h))))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(64, (4, 4), strides=4)(x).reshape(-1, 64)
        for _ in range(3):
            x = mixed(x, 64)
        return nn.Dense(10)(x.mean(0))


class ScoreMixer(nn.Module):
    @nn.compact
    def __call__(self, x: Array, t: Array) -> Array:
        time = jnp.broadcast_to(t, (*x.shape[:2], 1))
        h = nn.Conv(64, (4, 4), strides=4)(jnp.concatenate([x, time], axis=-1))
        side, h = h.shape[0], h.reshape(-1, 64)
        for _ in range(3):
            h = mixed(h, 128)
        h = nn.LayerNorm()(h).reshape(side, side, 64)
        return nn.ConvTranspose(x.shape[-1], (4, 4), strides=(4, 4))(h)


class ResBlock(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x: Array, t: Array) -> Array:
        h = nn.Conv(self.channels, (3, 3))(nn.swish(nn.GroupNorm(8)(x)))
        h = h + nn.Dense(self.channels)(nn.swish(t))
        h = nn.Conv(self.channels, (3, 3))(nn.swish(nn.GroupNorm(8)(h)))
        return h + (x if x.shape == h.shape else nn.Conv(self.channels, (1, 1))(x))


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x: Array, t: Array) -> Array:
        angles = t * jnp.exp(jnp.linspace(0.0, 4.0, 16))
        t = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])
        t = nn.Dense(64)(nn.swish(nn.Dense(64)(t)))
        fine = ResBlock(16)(nn.Conv(16, (3, 3))(x), t)
        coarse = ResBlock(32)(nn.Conv(16, (3, 3), strides=2)(fine), t)
        h = ResBlock(32)(coarse, t)
        flat = nn.GroupNorm(8)(h).reshape(-1, h.shape[-1])
        h = h + nn.MultiHeadDotProductAttention(num_heads=2)(flat).reshape(h.shape)
        h = ResBlock(32)(jnp.concatenate([h, coarse], axis=-1), t)
        h = jnp.repeat(jnp.repeat(h, 2, axis=0), 2, axis=1)
        h = nn.Conv(32, (3, 3))(h)
        h = ResBlock(16)(jnp.concatenate([h, fine], axis=-1), t)
        return nn.Conv(x.shape[-1], (3, 3))(nn.swish(nn.GroupNorm(8)(h)))


def denoiser(module: nn.Module, size: int, shape: tuple[int, ...]) -> Case:
    """A network that predicts the noise of an image, given the image and the time."""
    draw = Draw()
    x, noise = draw.normal(size, *shape), draw.normal(size, *shape)
    t = jnp.asarray(draw.rng.uniform(size=size), jnp.float32)
    params = jax.jit(module.init)(jax.random.key(0), x[0], t[0])["params"]

    def loss(params: Any, example: Any) -> Array:
        x, noise, t = example
        noisy = jnp.cos(t) * x + jnp.sin(t) * noise
        return jnp.mean((module.apply({"params": params}, noisy, t) - noise) ** 2)

    return Case(loss, params, (x, noise, t))


# Sequences ------------------------------------------------------------------------------


class StandardSequence(nn.Module):
    """Standardised convolutions over a sequence."""

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(64, 64)(tokens)
        for i in range(3):
            w = self.param(f"kernel_{i}", nn.initializers.he_normal(), (5, 64, 64))
            w = (w - w.mean((0, 1))) / jnp.sqrt(w.var((0, 1)) * 320 + 1e-4)
            y = nn.relu(nn.GroupNorm(8)(x))
            numbers = ("NWC", "WIO", "NWC")
            x = x + lax.conv_general_dilated(y[None], w, (1,), "SAME", dimension_numbers=numbers)[0]
        return nn.Dense(10)(x.mean(0))


def standardised_sequence_model(size: int) -> Case:
    draw = Draw()
    return of_module(StandardSequence(), (draw.below(64, size, 64), draw.below(10, size)))


class ConformerBlock(nn.Module):
    width: int = 64

    def feed_forward(self, x: Array) -> Array:
        y = nn.Dense(4 * self.width)(nn.LayerNorm()(x))
        return nn.Dense(self.width)(nn.swish(y))

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x + 0.5 * self.feed_forward(x)
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y)
        y = nn.glu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
        y = nn.Conv(self.width, (15,), feature_group_count=self.width)(y)
        x = x + nn.Dense(self.width)(nn.swish(nn.GroupNorm(8)(y)))
        return nn.LayerNorm()(x + 0.5 * self.feed_forward(x))


class Conformer(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Dense(64)(x)
        for _ in range(2):
            x = ConformerBlock()(x)
        return nn.Dense(10)(x.mean(0))


class Recurrent(nn.Module):
    cell: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.Dense(10)(nn.RNN(self.cell(64))(x)[-1])


def residual(draw: Draw, size: int, blocks: list[Any], layer: Callable[[Any, Any], Any]) -> Case:
    """Residual blocks over a series of 128 vectors, between two linear layers."""
    params = {"in": draw.dense(8, 32), "blocks": blocks, "last": draw.dense(32, 10)}

    def logits(params: Any, x: Array) -> Array:
        h = apply(params["in"], x)
        for p in params["blocks"]:
            h = h + layer(p, rms(h))
        return apply(params["last"], h.mean(0))

    return classified(logits, params, draw.labelled(size, 128, 8))


def lru(size: int) -> Case:
    """Linear recurrent units: complex diagonal recurrences, parameters in real numbers."""
    draw, width, states = Draw(), 32, 32
    blocks = [
        {
            "nu": draw.normal(states, scale=0.3) - 1.0,
            "theta": draw.normal(states, scale=0.3),
            "gamma": jnp.zeros(states),
            "b_real": draw.matrix(states, width),
            "b_imag": draw.matrix(states, width),
            "c_real": draw.matrix(width, states),
            "c_imag": draw.matrix(width, states),
            "d": draw.normal(width),
            "out": draw.matrix(width, 2 * width),
        }
        for _ in range(2)
    ]

    def join(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    def layer(p: Any, x: Array) -> Array:
        decay = jnp.exp(-jnp.exp(p["nu"]) + 1j * jnp.exp(p["theta"]))
        b = (p["b_real"] + 1j * p["b_imag"]) * jnp.exp(p["gamma"])[:, None]
        inputs = x.astype(jnp.complex64) @ b.T
        # h_t = decay h_(t-1) + inputs_t
        _, h = lax.associative_scan(join, (jnp.broadcast_to(decay, inputs.shape), inputs))
        y = (h @ (p["c_real"] + 1j * p["c_imag"]).T).real + p["d"] * x
        return nn.glu(jax.nn.gelu(y) @ p["out"])

    return residual(draw, size, blocks, layer)


def s4d(size: int) -> Case:
    """S4D: diagonal state-space layers, applied as long convolutions by the FFT."""
    draw, width, states, length = Draw(), 32, 16, 128
    phases = jnp.pi * jnp.broadcast_to(jnp.arange(states, dtype=jnp.float32), (width, states))
    blocks = [
        {
            "log_step": draw.normal(width, scale=0.3) - 3.0,
            "d": jnp.ones(width),
            "rates": jnp.log(0.5 * jnp.ones((width, states))),
            "phases": phases,
            "c": draw.normal(width, states, 2, scale=0.7),
            "out": draw.dense(width, 2 * width),
        }
        for _ in range(2)
    ]

    def kernel(p: Any) -> Array:
        a = lax.complex(-jnp.exp(p["rates"]), p["phases"])
        c = lax.complex(p["c"][..., 0], p["c"][..., 1])
        step = a * jnp.exp(p["log_step"])[:, None]
        c = c * (jnp.exp(step) - 1) / a
        powers = jnp.exp(step[..., None] * jnp.arange(length))
        return 2 * jnp.einsum("hn,hnl->hl", c, powers).real

    def layer(p: Any, x: Array) -> Array:
        spectrum = jnp.fft.rfft(kernel(p), n=2 * length) * jnp.fft.rfft(x.T, n=2 * length)
        y = jnp.fft.irfft(spectrum, n=2 * length)[:, :length].T + p["d"] * x
        return nn.glu(apply(p["out"], jax.nn.gelu(y)))

    return residual(draw, size, blocks, layer)


def gated_decoder(size: int) -> Case:
    """A decoder like Gemma 2: RMS norm, GeGLU, soft caps, rotary positions, a tied embedding."""
    draw, width, heads, length, words = Draw(), 64, 4, 48, 256
    inner = width // heads
    blocks = [
        {
            **{name: jnp.zeros(width) for name in ("n1", "n2", "n3", "n4")},
            "q": draw.matrix(width, heads * inner).reshape(width, heads, inner),
            "kv": draw.matrix(width, 2 * inner).reshape(width, 2, inner),
            "o": draw.matrix(heads * inner, width).reshape(heads, inner, width),
            "gate": draw.matrix(width, 2 * 128).reshape(width, 2, 128),
            "down": draw.matrix(128, width),
        }
        for _ in range(2)
    ]
    embed = draw.normal(words, width, scale=0.1)
    params = {"embed": embed, "norm": jnp.zeros(width), "blocks": blocks}

    def turned(x: Array) -> Array:
        rates = 10_000.0 ** -(jnp.arange(inner // 2) / (inner // 2))
        angles = jnp.arange(length)[:, None, None] * rates
        a, b = jnp.split(x, 2, axis=-1)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attend(p: Any, x: Array) -> Array:
        q = turned(jnp.einsum("td,dhk->thk", x, p["q"])) / np.float32(np.sqrt(inner))
        k, v = jnp.moveaxis(jnp.einsum("td,dck->tck", x, p["kv"]), 1, 0)
        k = turned(k[:, None])[:, 0]
        scores = 50.0 * jnp.tanh(jnp.einsum("thk,sk->hts", q, k) / 50.0)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        return jnp.einsum("hts,sk,hkd->td", jax.nn.softmax(scores), v, p["o"])

    def loss(params: Any, tokens: Array) -> Array:
        x = params["embed"][tokens] * np.float32(np.sqrt(width))
        for p in params["blocks"]:
            x = x + rms(attend(p, rms(x, 1 + p["n1"])), 1 + p["n2"])
            gate, up = jnp.moveaxis(jnp.einsum("td,dcf->tcf", rms(x, 1 + p["n3"]), p["gate"]), 1, 0)
            x = x + rms((jax.nn.gelu(gate) * up) @ p["down"], 1 + p["n4"])
        logits = 30.0 * jnp.tanh(rms(x, 1 + params["norm"]) @ params["embed"].T / 30.0)
        return jnp.mean(cross_entropy(logits[:-1], tokens[1:]))

    return Case(loss, params, draw.below(words, size, length))


# Graphs, tables, equations --------------------------------------------------------------


def graph_network(size: int) -> Case:
    """Message passing over the edges of each example, summed by `jax.ops.segment_sum`."""
    draw, nodes, width = Draw(), 24, 48
    params = {
        "encode": draw.dense(8, width),
        "edge": [draw.dense(2 * width, width) for _ in range(2)],
        "node": [draw.dense(2 * width, width) for _ in range(2)],
        "last": draw.dense(width, 10),
    }

    def logits(params: Any, x: Array, ends: Array) -> Array:
        h = jax.nn.relu(apply(params["encode"], x))
        for edge, node in zip(params["edge"], params["node"], strict=True):
            pairs = jnp.concatenate([h[ends[:, 0]], h[ends[:, 1]]], axis=-1)
            sent = jax.nn.relu(apply(edge, pairs))
            received = jax.ops.segment_sum(sent, ends[:, 1], nodes)
            h = h + jax.nn.relu(apply(node, jnp.concatenate([h, received], axis=-1)))
        return apply(params["last"], h.sum(0))

    x, ends = draw.normal(size, nodes, 8), draw.below(nodes, size, 64, 2)
    return classified(logits, params, (x, ends, draw.below(10, size)))


def factorisation_machine(size: int) -> Case:
    """Fields with embeddings in one table: their pairwise products, and a deep part (DeepFM)."""
    draw, fields, words, width = Draw(), 16, 2_000, 16
    params = {
        "table": draw.normal(words, width, scale=0.1),
        "linear": jnp.zeros(words),
        "bias": jnp.zeros(()),
        "deep": [draw.dense(fields * width, 64), draw.dense(64, 1)],
    }

    def loss(params: Any, example: Any) -> Array:
        ids, y = example
        v = params["table"][ids]
        pairs = 0.5 * jnp.sum(v.sum(0) ** 2 - (v**2).sum(0))
        deep = apply(params["deep"][1], jax.nn.relu(apply(params["deep"][0], v.ravel())))[0]
        score = params["bias"] + params["linear"][ids].sum() + pairs + deep
        return optax.sigmoid_binary_cross_entropy(score, y.astype(jnp.float32))

    return Case(loss, params, (draw.below(words, size, fields), draw.below(2, size)))


def field(params: Any, h: Array, t: Array) -> Array:
    """The vector field of the neural ODEs."""
    return apply(params["out"], jnp.tanh(apply(params["in"], h) + t * params["time"]))


def of_ode(size: int, solve: Callable[[Any, Array], Array]) -> Case:
    """A classifier of where an ODE ends."""
    draw = Draw()
    moves = {"in": draw.dense(16, 64), "out": draw.dense(64, 16)}
    moves |= {"time": draw.normal(64, scale=0.1)}
    params = {"field": moves, "last": draw.dense(16, 10)}

    def logits(params: Any, x: Array) -> Array:
        return apply(params["last"], solve(params["field"], x))

    return classified(logits, params, draw.labelled(size, 16))


def neural_ode(size: int) -> Case:
    """An ODE by a scan of equal steps, by the midpoint rule."""

    def solve(params: Any, h: Array) -> Array:
        def step(h: Array, t: Array) -> tuple[Array, None]:
            half = h + field(params, h, t) / 32
            return h + field(params, half, t + 1 / 32) / 16, None

        return lax.scan(step, h, jnp.arange(16) / 16)[0]

    return of_ode(size, solve)


def adaptive(function: Any, state: Any, tolerance: float = 1e-4) -> Any:
    """From time 0 to 1, with steps that an embedded Euler-Heun pair chooses."""

    def body(carry: Any) -> Any:
        state, t, step = carry
        step = jnp.minimum(step, 1 - t)
        first = function(state, t)
        euler = jax.tree.map(lambda s, d: s + step * d, state, first)
        second = function(euler, t + step)
        heun = jax.tree.map(lambda s, a, b: s + step / 2 * (a + b), state, first, second)
        gap = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), euler, heun)
        error = jnp.maximum(jax.tree.reduce(jnp.maximum, gap) / tolerance, 1e-3)
        taken = error < 1
        state = jax.tree.map(lambda a, b: jnp.where(taken, a, b), heun, state)
        grown = jnp.clip(0.9 * error**-0.5, 0.2, 5.0)
        return state, jnp.where(taken, t + step, t), step * grown

    start = state, jnp.float32(0), jnp.float32(0.05)
    return lax.while_loop(lambda carry: carry[1] < 1, body, start)[0]


def neural_ode_with_an_adjoint(size: int) -> Case:
    """An ODE by a while loop of adaptive steps, whose VJP solves the adjoint equation backwards."""

    @jax.custom_vjp
    def solve(params: Any, h: Array) -> Array:
        return adaptive(lambda h, t: field(params, h, t), h)

    def forward(params: Any, h: Array) -> Any:
        end = solve(params, h)
        return end, (params, end)

    def backward(saved: Any, cotangent: Array) -> Any:
        params, end = saved

        def adjoint(state: Any, t: Array) -> Any:
            h, a, _ = state
            value, pull = jax.vjp(lambda p, h: field(p, h, 1 - t), params, h)
            by_params, by_state = pull(a)
            return -value, by_state, by_params

        start = end, cotangent, jax.tree.map(jnp.zeros_like, params)
        _, by_state, by_params = adaptive(adjoint, start)
        return by_params, by_state

    solve.defvjp(forward, backward)
    return of_ode(size, solve)


def of_images(module: nn.Module) -> Callable[[int], Case]:
    return lambda size: of_module(module, Draw().labelled(size, 32, 32, 3))


def of_series(module: nn.Module, length: int, width: int) -> Callable[[int], Case]:
    return lambda size: of_module(module, Draw().labelled(size, length, width))


# Name -> batch size, and a function of a batch size.
MODELS: dict[str, tuple[int, Callable[[int], Case]]] = {
    "weight decay in the loss": (256, weight_decay_in_the_loss),
    "hypernetwork": (64, hypernetwork),
    "hypernetwork of the example": (64, hypernetwork_of_the_example),
    "weight normalisation": (128, weight_normalisation),
    "weight normalised cnn": (64, of_images(WeightNormCNN())),
    "standardised resnet": (32, of_images(BiT())),
    "standardised sequence model": (32, standardised_sequence_model),
    "low rank adapters": (64, low_rank_adapters),
    "equalised learning rate": (128, equalised_learning_rate),
    "conformer": (16, of_series(Conformer(), 64, 40)),
    "lru": (16, lru),
    "s4d": (16, s4d),
    "gated decoder": (16, gated_decoder),
    "lstm": (32, of_series(Recurrent(nn.OptimizedLSTMCell), 32, 16)),
    "gru": (32, of_series(Recurrent(nn.GRUCell), 32, 16)),
    "diffusion unet": (16, lambda size: denoiser(UNet(), size, (16, 16, 3))),
    "score mixer": (32, lambda size: denoiser(ScoreMixer(), size, (28, 28, 1))),
    "resnet": (32, of_images(ResNet())),
    "vit": (32, of_images(ViT())),
    "mlp mixer": (32, of_images(Mixer())),
    "graph network": (64, graph_network),
    "factorisation machine": (128, factorisation_machine),
    "neural ode": (128, neural_ode),
    "neural ode with an adjoint": (128, neural_ode_with_an_adjoint),
}
