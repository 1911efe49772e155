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
Loss = Callable[[Any, Any], Array]


class Case(NamedTuple):
    """A loss of one example, with parameters and a batch for it."""

    loss: Loss
    params: Any
    batch: Any


MODELS: dict[str, Callable[[int | None], Case]] = {}


def model(batch_size: int) -> Callable[[Callable[[int], Case]], Callable[[int | None], Case]]:
    """Adds a function ``batch size -> case`` under its own name, with a usual batch size."""

    def added(make: Callable[[int], Case]) -> Callable[[int | None], Case]:
        def made(size: int | None = None) -> Case:
            return make(size or batch_size)

        MODELS[make.__name__.replace("_", " ")] = made
        return made

    return added


class Draw:
    """Random arrays, by NumPy: JAX would compile for each shape."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Array:
        return jnp.asarray(self.rng.normal(scale=scale, size=shape), jnp.float32)

    def matrix(self, *shape: int) -> Array:
        return self.normal(*shape, scale=1 / np.sqrt(np.prod(shape[:-1])))

    def labels(self, size: int, classes: int) -> Array:
        return jnp.asarray(self.rng.integers(classes, size=size), jnp.int32)

    def tokens(self, size: int, length: int, words: int) -> Array:
        return jnp.asarray(self.rng.integers(words, size=(size, length)), jnp.int32)


def cross_entropy(logits: Array, label: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def classifier(module: nn.Module, batch: tuple[Array, Array]) -> Case:
    """A Flax module that returns logits, with its parameters."""
    params = jax.jit(module.init)(jax.random.key(0), batch[0][0])["params"]

    def loss(params: Any, example: Any) -> Array:
        x, y = example
        logits: Any = module.apply({"params": params}, x)
        return cross_entropy(logits, y)

    return Case(loss, params, batch)


def dense(draw: Draw, inputs: int, outputs: int) -> dict[str, Array]:
    return {"w": draw.matrix(inputs, outputs), "b": jnp.zeros(outputs)}


def apply(layer: dict[str, Array], x: Array) -> Array:
    return x @ layer["w"] + layer["b"]


def rms(x: Array, scale: Array | float = 1.0) -> Array:
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


# Parameters alone -----------------------------------------------------------------------


@model(256)
def weight_decay_in_the_loss(size: int) -> Case:
    """An MLP whose loss holds half the squared norm of its parameters."""
    draw, widths = Draw(), (784, 256, 256, 10)
    layers = [dense(draw, *pair) for pair in itertools.pairwise(widths)]

    def loss(params: Any, example: Any) -> Array:
        x, y = example
        for layer in params[:-1]:
            x = jax.nn.relu(apply(layer, x))
        decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return cross_entropy(apply(params[-1], x), y) + 5e-4 * decay

    return Case(loss, layers, (draw.normal(size, 784), draw.labels(size, 10)))


@model(64)
def hypernetwork(size: int) -> Case:
    """Layer embeddings generate the kernels of a residual MLP (static hypernetwork)."""
    draw, width, depth, inner = Draw(), 64, 4, 16
    params = {
        "codes": draw.normal(depth, inner),
        "hidden": dense(draw, inner, 32),
        "out": {"w": draw.matrix(32, width * width) / 8, "b": jnp.zeros(width * width)},
        "first": dense(draw, 64, width),
        "last": dense(draw, width, 10),
    }

    def loss(params: Any, example: Any) -> Array:
        x, y = example
        h = apply(params["first"], x)
        for code in params["codes"]:
            kernel = apply(params["out"], jnp.tanh(apply(params["hidden"], code)))
            h = h + jax.nn.relu(h @ kernel.reshape(width, width))
        return cross_entropy(apply(params["last"], h), y)

    return Case(loss, params, (draw.normal(size, 64), draw.labels(size, 10)))


@model(64)
def hypernetwork_of_the_example(size: int) -> Case:
    """The example generates the weights of a small network over its points (an implicit field)."""
    draw, width, points = Draw(), 16, 64
    count = 2 * width + width + width * width + width + width
    params = {"encoder": dense(draw, 128, 64), "out": dense(draw, 64, count)}

    def loss(params: Any, example: Any) -> Array:
        x, places, values = example
        weights = apply(params["out"], jax.nn.relu(apply(params["encoder"], x)))
        cuts = np.cumsum([2 * width, width, width * width, width])
        a, b, c, d, e = jnp.split(weights, cuts)
        h = jnp.sin(places @ a.reshape(2, width) + b)
        h = jnp.sin(h @ c.reshape(width, width) + d)
        return jnp.mean((h @ e - values) ** 2)

    places, values = draw.normal(size, points, 2), draw.normal(size, points)
    return Case(loss, params, (draw.normal(size, 128), places, values))


@model(128)
def weight_normalisation(size: int) -> Case:
    """An MLP whose kernels have columns that are a direction times a gain."""
    draw, widths = Draw(), (256, 256, 256, 10)
    params = [
        {"v": draw.matrix(n, m), "g": jnp.ones(m), "b": jnp.zeros(m)}
        for n, m in itertools.pairwise(widths)
    ]

    def layer(p: Any, x: Array) -> Array:
        return x @ (p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0)) + p["b"]

    def loss(params: Any, example: Any) -> Array:
        x, y = example
        for p in params[:-1]:
            x = jax.nn.relu(layer(p, x))
        return cross_entropy(layer(params[-1], x), y)

    return Case(loss, params, (draw.normal(size, 256), draw.labels(size, 10)))


class WeightNormCNN(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        for channels in (32, 32, 64):
            x = nn.relu(nn.WeightNorm(nn.Conv(channels, (3, 3), strides=2))(x))
        return nn.WeightNorm(nn.Dense(10))(x.mean((0, 1)))


@model(64)
def weight_normalised_cnn(size: int) -> Case:
    draw = Draw()
    return classifier(WeightNormCNN(), (draw.normal(size, 32, 32, 3), draw.labels(size, 10)))


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


@model(32)
def standardised_resnet(size: int) -> Case:
    """BiT: a pre-activation ResNet with standardised kernels and group normalisation."""
    draw = Draw()
    return classifier(BiT(), (draw.normal(size, 32, 32, 3), draw.labels(size, 10)))


class StandardSequence(nn.Module):
    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(64, 64)(tokens)
        for _ in range(3):
            w = self.param(f"kernel_{_}", nn.initializers.he_normal(), (5, 64, 64))
            w = (w - w.mean((0, 1))) / jnp.sqrt(w.var((0, 1)) * 320 + 1e-4)
            y = nn.relu(nn.GroupNorm(8)(x))
            numbers = ("NWC", "WIO", "NWC")
            x = x + lax.conv_general_dilated(y[None], w, (1,), "SAME", dimension_numbers=numbers)[0]
        return nn.Dense(10)(x.mean(0))


@model(32)
def standardised_sequence_model(size: int) -> Case:
    """Standardised convolutions over a sequence."""
    draw = Draw()
    return classifier(StandardSequence(), (draw.tokens(size, 64, 64), draw.labels(size, 10)))


@model(64)
def low_rank_adapters(size: int) -> Case:
    """LoRA: a frozen kernel plus a product of two thin ones, added before the layer."""
    draw, width, rank = Draw(), 256, 4
    frozen = [draw.matrix(width, width) for _ in range(3)]
    params = [{"a": draw.matrix(width, rank), "b": draw.matrix(rank, width)} for _ in frozen]

    def loss(params: Any, example: Any) -> Array:
        x, y = example
        for w, p in zip(frozen, params, strict=True):
            x = jax.nn.gelu(x @ (w + 2.0 * (p["a"] @ p["b"])))
        return cross_entropy(x[:, :10].mean(0), y)

    return Case(loss, params, (draw.normal(size, 16, width), draw.labels(size, 10)))


@model(128)
def equalised_learning_rate(size: int) -> Case:
    """An MLP whose kernels are scaled by constants at run time."""
    draw, widths = Draw(), (256, 256, 256, 10)
    params = [draw.normal(n, m) for n, m in itertools.pairwise(widths)]

    def loss(params: Any, example: Any) -> Array:
        x, y = example
        for w in params[:-1]:
            x = jax.nn.relu(x @ (w * np.float32(np.sqrt(2 / len(w)))))
        return cross_entropy(x @ (params[-1] / 16), y)

    return Case(loss, params, (draw.normal(size, 256), draw.labels(size, 10)))


# Sequences ------------------------------------------------------------------------------


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


@model(16)
def conformer(size: int) -> Case:
    draw = Draw()
    return classifier(Conformer(), (draw.normal(size, 64, 40), draw.labels(size, 10)))


def diagonal_scan(decay: Array, inputs: Array) -> Array:
    """``h_t = decay h_(t-1) + inputs_t``, by an associative scan over time."""

    def join(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    decays = jnp.broadcast_to(decay, inputs.shape)
    return lax.associative_scan(join, (decays, inputs))[1]


@model(16)
def lru(size: int) -> Case:
    """Linear recurrent units: complex diagonal recurrences, parameters in real numbers."""
    draw, width, states, depth = Draw(), 32, 32, 2

    def block() -> dict[str, Array]:
        return {
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

    params = {"in": dense(draw, 8, width), "blocks": [block() for _ in range(depth)]}
    params["last"] = dense(draw, width, 10)

    def layer(p: Any, x: Array) -> Array:
        decay = jnp.exp(-jnp.exp(p["nu"]) + 1j * jnp.exp(p["theta"]))
        b = (p["b_real"] + 1j * p["b_imag"]) * jnp.exp(p["gamma"])[:, None]
        h = diagonal_scan(decay, x.astype(jnp.complex64) @ b.T)
        return (h @ (p["c_real"] + 1j * p["c_imag"]).T).real + p["d"] * x

    def loss(params: Any, example: Any) -> Array:
        x, y = example
        h = apply(params["in"], x)
        for p in params["blocks"]:
            h = h + nn.glu(jax.nn.gelu(layer(p, rms(h))) @ p["out"])
        return cross_entropy(apply(params["last"], h.mean(0)), y)

    return Case(loss, params, (draw.normal(size, 128, 8), draw.labels(size, 10)))


@model(16)
def s4d(size: int) -> Case:
    """S4D: diagonal state-space layers, applied as long convolutions by the FFT."""
    draw, width, states, length, depth = Draw(), 32, 16, 128, 2

    def block() -> dict[str, Any]:
        rates = jnp.log(0.5 * jnp.ones((width, states)))
        phases = jnp.pi * jnp.broadcast_to(jnp.arange(states, dtype=jnp.float32), (width, states))
        c = draw.normal(width, states, 2, scale=0.7)
        p: dict[str, Any] = {"log_step": draw.normal(width, scale=0.3) - 3.0, "d": jnp.ones(width)}
        return p | {"rates": rates, "phases": phases, "c": c, "out": dense(draw, width, 2 * width)}

    params = {"in": dense(draw, 8, width), "blocks": [block() for _ in range(depth)]}
    params["last"] = dense(draw, width, 10)

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

    def loss(params: Any, example: Any) -> Array:
        x, y = example
        h = apply(params["in"], x)
        for p in params["blocks"]:
            h = h + layer(p, rms(h))
        return cross_entropy(apply(params["last"], h.mean(0)), y)

    return Case(loss, params, (draw.normal(size, length, 8), draw.labels(size, 10)))


@model(16)
def gated_decoder(size: int) -> Case:
    """A decoder like Gemma 2: RMS norm, GeGLU, soft caps, rotary positions, a tied embedding."""
    draw, width, heads, length, words, depth = Draw(), 64, 4, 48, 256, 2
    each = width // heads

    def block() -> dict[str, Array]:
        return {
            **{name: jnp.zeros(width) for name in ("n1", "n2", "n3", "n4")},
            "q": draw.matrix(width, heads * each).reshape(width, heads, each),
            "kv": draw.matrix(width, 2 * each).reshape(width, 2, each),
            "o": draw.matrix(heads * each, width).reshape(heads, each, width),
            "gate": draw.matrix(width, 2 * 128).reshape(width, 2, 128),
            "down": draw.matrix(128, width),
        }

    params: dict[str, Any] = {"embed": draw.normal(words, width, scale=0.1)}
    params["norm"] = jnp.zeros(width)
    params["blocks"] = [block() for _ in range(depth)]

    def turned(x: Array) -> Array:
        rates = 10_000.0 ** -(jnp.arange(each // 2) / (each // 2))
        angles = jnp.arange(length)[:, None, None] * rates
        a, b = jnp.split(x, 2, axis=-1)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attend(p: Any, x: Array) -> Array:
        q = turned(jnp.einsum("td,dhk->thk", x, p["q"])) / np.float32(np.sqrt(each))
        k, v = jnp.moveaxis(jnp.einsum("td,dck->tck", x, p["kv"]), 1, 0)
        k = turned(k[:, None])[:, 0]
        scores = 50.0 * jnp.tanh(jnp.einsum("thk,sk->hts", q, k) / 50.0)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("hts,sk->thk", jax.nn.softmax(scores), v)
        return jnp.einsum("thk,hkd->td", mixed, p["o"])

    def loss(params: Any, tokens: Array) -> Array:
        x = params["embed"][tokens] * np.float32(np.sqrt(width))
        for p in params["blocks"]:
            x = x + rms(attend(p, rms(x, 1 + p["n1"])), 1 + p["n2"])
            gate, up = jnp.moveaxis(jnp.einsum("td,dcf->tcf", rms(x, 1 + p["n3"]), p["gate"]), 1, 0)
            x = x + rms((jax.nn.gelu(gate) * up) @ p["down"], 1 + p["n4"])
        logits = 30.0 * jnp.tanh(rms(x, 1 + params["norm"]) @ params["embed"].T / 30.0)
        return jnp.mean(cross_entropy(logits[:-1], tokens[1:]))

    return Case(loss, params, draw.tokens(size, length, words))


class Recurrent(nn.Module):
    cell: Any
    width: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.Dense(10)(nn.RNN(self.cell(self.width))(x)[-1])


@model(32)
def lstm(size: int) -> Case:
    draw = Draw()
    batch = draw.normal(size, 32, 16), draw.labels(size, 10)
    return classifier(Recurrent(nn.OptimizedLSTMCell, 64), batch)


@model(32)
def gru(size: int) -> Case:
    draw = Draw()
    return classifier(Recurrent(nn.GRUCell, 64), (draw.normal(size, 32, 16), draw.labels(size, 10)))


# Images and scores ----------------------------------------------------------------------


def time_features(t: Array, width: int) -> Array:
    angles = t * jnp.exp(jnp.linspace(0.0, 4.0, width // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])


class ResBlock(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x: Array, t: Array) -> Array:
        h = nn.Conv(self.channels, (3, 3))(nn.swish(nn.GroupNorm(8)(x)))
        h = h + nn.Dense(self.channels)(nn.swish(t))
        h = nn.Conv(self.channels, (3, 3))(nn.swish(nn.GroupNorm(8)(h)))
        return h + (x if x.shape == h.shape else nn.Conv(self.channels, (1, 1))(x))


class UNet(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x: Array, t: Array) -> Array:
        t = nn.Dense(4 * self.width)(nn.swish(nn.Dense(4 * self.width)(time_features(t, 32))))
        h, kept = nn.Conv(self.width, (3, 3))(x), []
        for level, factor in enumerate((1, 2)):
            h = ResBlock(factor * self.width)(h, t)
            kept.append(h)
            if level == 0:
                h = nn.Conv(factor * self.width, (3, 3), strides=2)(h)
        h = ResBlock(2 * self.width)(h, t)
        flat = nn.GroupNorm(8)(h).reshape(-1, h.shape[-1])
        h = h + nn.MultiHeadDotProductAttention(num_heads=2)(flat).reshape(h.shape)
        for factor in (2, 1):
            h = ResBlock(factor * self.width)(jnp.concatenate([h, kept.pop()], axis=-1), t)
            if factor == 2:
                h = jnp.repeat(jnp.repeat(h, 2, axis=0), 2, axis=1)
                h = nn.Conv(factor * self.width, (3, 3))(h)
        return nn.Conv(x.shape[-1], (3, 3))(nn.swish(nn.GroupNorm(8)(h)))


def denoiser(module: nn.Module, size: int, shape: tuple[int, ...]) -> Case:
    """A network that predicts the noise of an image, given the image and the time."""
    draw = Draw()
    x, noise = draw.normal(size, *shape), draw.normal(size, *shape)
    t = jnp.asarray(draw.rng.uniform(size=size), jnp.float32)
    params = jax.jit(module.init)(jax.random.key(0), x[0], t[0])["params"]

    def loss(params: Any, example: Any) -> Array:
        x, noise, t = example
        seen = jnp.cos(t) * x + jnp.sin(t) * noise
        return jnp.mean((module.apply({"params": params}, seen, t) - noise) ** 2)

    return Case(loss, params, (x, noise, t))


@model(16)
def diffusion_unet(size: int) -> Case:
    return denoiser(UNet(), size, (16, 16, 3))


class ScoreMixer(nn.Module):
    @nn.compact
    def __call__(self, x: Array, t: Array) -> Array:
        size, channels = x.shape[0], x.shape[-1]
        time = jnp.broadcast_to(t, (size, size, 1))
        h = nn.Conv(64, (4, 4), strides=4)(jnp.concatenate([x, time], axis=-1))
        side, h = h.shape[0], h.reshape(-1, 64)
        for _ in range(3):
            y = nn.LayerNorm()(h).T
            h = h + nn.Dense(h.shape[0])(nn.gelu(nn.Dense(128)(y))).T
            y = nn.LayerNorm()(h)
            h = h + nn.Dense(64)(nn.gelu(nn.Dense(128)(y)))
        h = nn.LayerNorm()(h).reshape(side, side, 64)
        return nn.ConvTranspose(channels, (4, 4), strides=(4, 4))(h)


@model(32)
def score_mixer(size: int) -> Case:
    return denoiser(ScoreMixer(), size, (28, 28, 1))


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


@model(32)
def resnet(size: int) -> Case:
    draw = Draw()
    return classifier(ResNet(), (draw.normal(size, 32, 32, 3), draw.labels(size, 10)))


class ViT(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(64, (4, 4), strides=4)(x).reshape(-1, 64)
        token = self.param("token", nn.initializers.zeros, (1, 64))
        x = jnp.concatenate([token, x])
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape)
        for _ in range(3):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return nn.Dense(10)(nn.LayerNorm()(x)[0])


@model(32)
def vit(size: int) -> Case:
    draw = Draw()
    return classifier(ViT(), (draw.normal(size, 32, 32, 3), draw.labels(size, 10)))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(64, (4, 4), strides=4)(x).reshape(-1, 64)
        for _ in range(3):
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x).T))).T
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(0))


@model(32)
def mlp_mixer(size: int) -> Case:
    draw = Draw()
    return classifier(Mixer(), (draw.normal(size, 32, 32, 3), draw.labels(size, 10)))


# Sets, graphs, tables, equations --------------------------------------------------------


@model(64)
def graph_network(size: int) -> Case:
    """Message passing over the edges of each example, summed by `jax.ops.segment_sum`."""
    draw, nodes, edges, width = Draw(), 24, 64, 48
    params = {
        "encode": dense(draw, 8, width),
        "edge": [dense(draw, 2 * width, width) for _ in range(2)],
        "node": [dense(draw, 2 * width, width) for _ in range(2)],
        "last": dense(draw, width, 10),
    }

    def loss(params: Any, example: Any) -> Array:
        x, ends, y = example
        h = jax.nn.relu(apply(params["encode"], x))
        for edge, node in zip(params["edge"], params["node"], strict=True):
            pairs = jnp.concatenate([h[ends[:, 0]], h[ends[:, 1]]], axis=-1)
            sent = jax.nn.relu(apply(edge, pairs))
            heard = jax.ops.segment_sum(sent, ends[:, 1], nodes)
            h = h + jax.nn.relu(apply(node, jnp.concatenate([h, heard], axis=-1)))
        return cross_entropy(apply(params["last"], h.sum(0)), y)

    ends = jnp.asarray(draw.rng.integers(nodes, size=(size, edges, 2)), jnp.int32)
    return Case(loss, params, (draw.normal(size, nodes, 8), ends, draw.labels(size, 10)))


@model(128)
def factorisation_machine(size: int) -> Case:
    """Fields with embeddings in one table: their pairwise products, and a deep part (DeepFM)."""
    draw, fields, words, width = Draw(), 16, 2_000, 16
    params = {
        "table": draw.normal(words, width, scale=0.1),
        "linear": jnp.zeros(words),
        "bias": jnp.zeros(()),
        "deep": [dense(draw, fields * width, 64), dense(draw, 64, 1)],
    }

    def loss(params: Any, example: Any) -> Array:
        ids, y = example
        v = params["table"][ids]
        pairs = 0.5 * jnp.sum(v.sum(0) ** 2 - (v**2).sum(0))
        deep = apply(params["deep"][1], jax.nn.relu(apply(params["deep"][0], v.ravel())))[0]
        score = params["bias"] + params["linear"][ids].sum() + pairs + deep
        return optax.sigmoid_binary_cross_entropy(score, y.astype(jnp.float32))

    return Case(loss, params, (draw.tokens(size, fields, words), draw.labels(size, 2)))


def field(params: Any, h: Array, t: Array) -> Array:
    """The vector field of the neural ODEs."""
    return apply(params["out"], jnp.tanh(apply(params["in"], h) + t * params["time"]))


def ode_case(size: int, solve: Callable[[Any, Array], Array]) -> Case:
    draw, width = Draw(), 64
    params = {
        "field": {
            "in": dense(draw, 16, width),
            "out": dense(draw, width, 16),
            "time": draw.normal(width, scale=0.1),
        },
        "last": dense(draw, 16, 10),
    }

    def loss(params: Any, example: Any) -> Array:
        x, y = example
        return cross_entropy(apply(params["last"], solve(params["field"], x)), y)

    return Case(loss, params, (draw.normal(size, 16), draw.labels(size, 10)))


def midpoint(params: Any, h: Array, t: Array, step: float) -> Array:
    half = h + step / 2 * field(params, h, t)
    return h + step * field(params, half, t + step / 2)


@model(128)
def neural_ode(size: int) -> Case:
    """An ODE by a scan of equal steps."""

    def solve(params: Any, h: Array) -> Array:
        def step(h: Array, t: Array) -> tuple[Array, None]:
            return midpoint(params, h, t, 1 / 16), None

        return lax.scan(step, h, jnp.arange(16) / 16)[0]

    return ode_case(size, solve)


@model(128)
def neural_ode_with_an_adjoint(size: int) -> Case:
    """An ODE by a while loop of adaptive steps, whose VJP solves the adjoint equation backwards."""

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

    @jax.custom_vjp
    def solve(params: Any, h: Array) -> Array:
        return adaptive(lambda h, t: field(params, h, t), h)

    def forward(params: Any, h: Array) -> Any:
        end = solve(params, h)
        return end, (params, end)

    def backward(kept: Any, cotangent: Array) -> Any:
        params, end = kept

        def adjoint(state: Any, t: Array) -> Any:
            h, a, _ = state
            value, pull = jax.vjp(lambda p, h: field(p, h, 1 - t), params, h)
            by_params, by_state = pull(a)
            return -value, by_state, by_params

        start = end, cotangent, jax.tree.map(jnp.zeros_like, params)
        _, by_state, by_params = adaptive(adjoint, start)
        return by_params, by_state

    solve.defvjp(forward, backward)
    return ode_case(size, solve)
