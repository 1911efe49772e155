# SPDX-License-Identifier: Apache-2.0
"""Small models of many kinds, for `zoo`: functions that return loss, parameters and batch.

A loss is a pure function of parameters and one example. The models are written as their users
write them: nothing in them knows of per-example gradients. `MODELS` holds them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen.initializers import he_normal, lecun_normal, normal, ones, zeros
from jax import lax

from dpjax import models

Array = jax.Array
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

    def normal(self, *shape: int) -> Array:
        return jnp.asarray(self.rng.normal(size=shape), jnp.float32)

    def below(self, limit: int, *shape: int) -> Array:
        return jnp.asarray(self.rng.integers(limit, size=shape), jnp.int32)


def of_module(module: nn.Module, batch: tuple[Array, ...], error: Any = cross_entropy) -> Case:
    """The error of a Flax module's output; the last array of the batch holds the targets."""
    *inputs, _ = batch
    first = [x[0] for x in inputs]
    params = jax.jit(module.init)(jax.random.key(0), *first)["params"]

    def loss(params: Any, example: Any) -> Array:
        *inputs, target = example
        return error(module.apply({"params": params}, *inputs), target)

    return Case(loss, params, batch)


def classifier(module: nn.Module, *shape: int) -> Callable[[int], Case]:
    """A module that maps noise of a shape to logits of ten classes."""

    def case(size: int) -> Case:
        draw = Draw()
        x = draw.normal(size, *shape)
        labels = draw.below(10, size)
        return of_module(module, (x, labels))

    return case


def mean_square(prediction: Array, target: Array) -> Array:
    return jnp.mean((prediction - target) ** 2)


class Normalised(nn.Module):
    """A perceptron with weight normalisation."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in (256, 256):
            x = nn.relu(nn.WeightNorm(nn.Dense(width))(x))
        return nn.WeightNorm(nn.Dense(10))(x)


def weight_decay_in_the_loss(size: int) -> Case:
    """The loss holds half the squared norm of the parameters."""
    case = classifier(models.MLP(features=(256, 256), activation=nn.relu), 784)(size)

    def loss(params: Any, example: Any) -> Array:
        decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return case.loss(params, example) + 5e-4 * decay

    return case._replace(loss=loss)


class Hypernetwork(nn.Module):
    """Layer embeddings generate the kernels of a residual perceptron (static hypernetwork)."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        hidden = nn.Dense(32)
        out = nn.Dense(64 * 64, kernel_init=normal(0.02))
        codes = self.param("codes", normal(1.0), (4, 16))
        h = nn.Dense(64)(x)
        for code in codes:
            kernel = out(jnp.tanh(hidden(code))).reshape(64, 64)
            h = h + nn.relu(h @ kernel)
        return nn.Dense(10)(h)


class HypernetworkOfTheExample(nn.Module):
    """The example generates the weights of a small network over its points (an implicit field)."""

    width: int = 16

    @nn.compact
    def __call__(self, x: Array, places: Array) -> Array:
        n = self.width
        cuts = np.cumsum([2 * n, n, n * n, n, n])
        generate = nn.Dense(int(cuts[-1]))
        h = nn.relu(nn.Dense(64)(x))
        kernel_1, bias_1, kernel_2, bias_2, out = jnp.split(generate(h), cuts[:-1])
        h = jnp.sin(places @ kernel_1.reshape(2, n) + bias_1)
        h = jnp.sin(h @ kernel_2.reshape(n, n) + bias_2)
        return h @ out


def hypernetwork_of_the_example(size: int) -> Case:
    draw = Draw()
    x = draw.normal(size, 128)
    places = draw.normal(size, 64, 2)
    values = draw.normal(size, 64)
    return of_module(HypernetworkOfTheExample(), (x, places, values), mean_square)


class StandardConv(nn.Module):
    """A convolution with a standardised kernel, as in BiT."""

    channels: int
    kernel: int = 3
    strides: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (self.kernel, self.kernel, x.shape[-1], self.channels)
        w = self.param("kernel", he_normal(), shape)
        centred = w - w.mean((0, 1, 2))
        w = centred / jnp.sqrt(w.var((0, 1, 2)) + 1e-10)
        y = lax.conv_general_dilated(
            x[None],
            w,
            window_strides=(self.strides, self.strides),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y[0]


class BiT(nn.Module):
    """A pre-activation ResNet with standardised kernels and group normalisation."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = StandardConv(16)(x)
        for channels, strides in ((32, 2), (64, 2)):
            y = nn.relu(nn.GroupNorm(8)(x))
            shortcut = StandardConv(channels, 1, strides)(y)
            y = StandardConv(channels // 2, 1)(y)
            y = nn.relu(nn.GroupNorm(8)(y))
            y = StandardConv(channels // 2, 3, strides)(y)
            y = nn.relu(nn.GroupNorm(8)(y))
            x = shortcut + StandardConv(channels, 1)(y)
        y = nn.relu(nn.GroupNorm(8)(x))
        return nn.Dense(10)(y.mean((0, 1)))


class ResBlock(nn.Module):
    """A residual block of a diffusion network; ``t`` is the embedding of the time."""

    channels: int

    @nn.compact
    def __call__(self, x: Array, t: Array) -> Array:
        h = nn.swish(nn.GroupNorm(8)(x))
        h = nn.Conv(self.channels, (3, 3))(h)
        h = h + nn.Dense(self.channels)(nn.swish(t))
        h = nn.swish(nn.GroupNorm(8)(h))
        h = nn.Conv(self.channels, (3, 3))(h)
        if x.shape != h.shape:
            x = nn.Conv(self.channels, (1, 1))(x)
        return h + x


class UNet(nn.Module):
    """A diffusion network with two resolutions, and attention at the lower one."""

    @nn.compact
    def __call__(self, x: Array, t: Array) -> Array:
        angles = t * jnp.exp(jnp.linspace(0.0, 4.0, 16))
        embed = nn.Dense(64)
        t = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])
        t = nn.swish(nn.Dense(64)(t))
        t = embed(t)

        h = nn.Conv(16, (3, 3))(x)
        fine = ResBlock(16)(h, t)
        h = nn.Conv(16, (3, 3), strides=2)(fine)
        coarse = ResBlock(32)(h, t)

        h = ResBlock(32)(coarse, t)
        flat = nn.GroupNorm(8)(h).reshape(-1, h.shape[-1])
        attended = nn.MultiHeadDotProductAttention(num_heads=2)(flat)
        h = h + attended.reshape(h.shape)

        h = jnp.concatenate([h, coarse], axis=-1)
        h = ResBlock(32)(h, t)
        h = jnp.repeat(jnp.repeat(h, 2, axis=0), 2, axis=1)
        h = nn.Conv(32, (3, 3))(h)
        h = jnp.concatenate([h, fine], axis=-1)
        h = ResBlock(16)(h, t)
        h = nn.swish(nn.GroupNorm(8)(h))
        return nn.Conv(x.shape[-1], (3, 3))(h)


def denoiser(module: nn.Module, *shape: int) -> Callable[[int], Case]:
    """A network that predicts the noise of an image, given the noisy image and the time."""

    def diffuse(x: Array, noise: Array, t: Array) -> Array:
        return jnp.cos(t) * x + jnp.sin(t) * noise

    def case(size: int) -> Case:
        draw = Draw()
        x = draw.normal(size, *shape)
        noise = draw.normal(size, *shape)
        t = jnp.asarray(draw.rng.uniform(size=size), jnp.float32)
        noisy = jax.vmap(diffuse)(x, noise, t)
        return of_module(module, (noisy, t, noise), mean_square)

    return case


class Recurrent(nn.Module):
    """A classifier of the last state of an LSTM."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = nn.RNN(nn.OptimizedLSTMCell(64))(x)
        return nn.Dense(10)(h[-1])


class Residual(nn.Module):
    """Two residual layers over a series, between linear ones."""

    layer: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = nn.Dense(32)(x)
        for _ in range(2):
            y = nn.RMSNorm(use_scale=False)(h)
            y = nn.gelu(self.layer()(y))
            h = h + nn.glu(nn.Dense(64)(y))
        return nn.Dense(10)(h.mean(0))


class LRU(nn.Module):
    """Linear recurrent units: complex diagonal recurrences, parameters in real numbers."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        def real(name: str, init: Any, *shape: int) -> Array:
            return self.param(name, init, shape)

        def complex_(name: str) -> Array:
            real_part = real(f"{name} real", lecun_normal(), 32, 32)
            imaginary = real(f"{name} imag", lecun_normal(), 32, 32)
            return real_part + 1j * imaginary

        def join(a: Any, b: Any) -> Any:
            decay_a, h_a = a
            decay_b, h_b = b
            return decay_a * decay_b, decay_b * h_a + h_b

        phase = jnp.exp(real("theta", normal(0.3), 32))
        rate = jnp.exp(real("nu", normal(0.3), 32) - 1)
        decay = jnp.exp(1j * phase - rate)
        inputs = x.astype(jnp.complex64) @ complex_("b")
        inputs = inputs * jnp.exp(real("gamma", zeros, 32))
        # The scan computes h_t = decay h_(t-1) + inputs_t.
        decays = jnp.broadcast_to(decay, inputs.shape)
        _, h = lax.associative_scan(join, (decays, inputs))
        outputs = (h @ complex_("c")).real
        return outputs + real("d", normal(1.0), 32) * x


class S4D(nn.Module):
    """S4D: diagonal state-space layers, applied as long convolutions by the FFT."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        length, width = x.shape
        states = 16

        def frequencies(_: Any) -> Array:
            return jnp.pi * jnp.tile(jnp.arange(16.0), (width, 1))

        phases = self.param("phases", frequencies)
        rates = self.param("rates", nn.initializers.constant(np.log(0.5)), (width, states))
        log_step = self.param("log_step", normal(0.3), (width,)) - 3.0
        a = lax.complex(-jnp.exp(rates), phases)
        c = lax.complex(*self.param("c", normal(0.7), (2, width, states)))

        step = a * jnp.exp(log_step)[:, None]
        powers = jnp.exp(step[..., None] * jnp.arange(length))
        weights = c * (jnp.exp(step) - 1) / a
        kernel = 2 * jnp.einsum("hn,hnl->hl", weights, powers).real

        padded = 2 * length
        spectrum = jnp.fft.rfft(kernel, n=padded) * jnp.fft.rfft(x.T, n=padded)
        y = jnp.fft.irfft(spectrum, n=padded)[:, :length].T
        return y + self.param("d", ones, (width,)) * x


def rotary(x: Array) -> Array:
    """Positions as rotations of ``[positions, heads, width]``."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** -(jnp.arange(half) / half)
    angles = jnp.arange(len(x))[:, None, None] * rates
    a, b = jnp.split(x, 2, axis=-1)
    sin = jnp.sin(angles)
    cos = jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class GatedBlock(nn.Module):
    """A block like Gemma 2's: four query heads share a head of keys and values."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        def linear(*shape: int) -> Any:
            return nn.DenseGeneral(shape, use_bias=False)

        y = nn.RMSNorm()(x)
        q = rotary(linear(4, 16)(y)) / 4
        k, v = jnp.moveaxis(linear(2, 16)(y), 1, 0)
        k = rotary(k[:, None])[:, 0]
        scores = jnp.einsum("thk,sk->hts", q, k)
        scores = 50.0 * jnp.tanh(scores / 50.0)
        causal = jnp.tril(jnp.ones((len(x), len(x)), bool))
        scores = jnp.where(causal, scores, -1e9)
        y = jnp.einsum("hts,sk->thk", nn.softmax(scores), v)
        y = linear(64)(y.reshape(len(x), 64))
        x = x + nn.RMSNorm()(y)

        y = nn.RMSNorm()(x)
        gate, up = jnp.moveaxis(linear(2, 128)(y), 1, 0)
        y = linear(64)(nn.gelu(gate) * up)
        return x + nn.RMSNorm()(y)


class GatedDecoder(nn.Module):
    """A decoder like Gemma 2: RMS norm, GeGLU, soft caps, rotary positions, a tied embedding."""

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        embed = nn.Embed(256, 64, embedding_init=normal(0.1))
        x = 8.0 * embed(tokens)
        for _ in range(2):
            x = GatedBlock()(x)
        logits = embed.attend(nn.RMSNorm()(x))
        return 30.0 * jnp.tanh(logits / 30.0)


def gated_decoder(size: int) -> Case:
    tokens = Draw().below(256, size, 48)
    batch = tokens[:, :-1], tokens[:, 1:]

    def error(logits: Array, targets: Array) -> Array:
        return cross_entropy(logits, targets).mean()

    return of_module(GatedDecoder(), batch, error)


class GraphNetwork(nn.Module):
    """Message passing over the edges of each example, summed by `jax.ops.segment_sum`."""

    @nn.compact
    def __call__(self, x: Array, ends: Array) -> Array:
        source, target = ends.T
        h = nn.relu(nn.Dense(48)(x))
        for _ in range(2):
            pairs = jnp.concatenate([h[source], h[target]], axis=-1)
            sent = nn.relu(nn.Dense(48)(pairs))
            received = jax.ops.segment_sum(sent, target, len(x))
            nodes = jnp.concatenate([h, received], axis=-1)
            h = h + nn.relu(nn.Dense(48)(nodes))
        return nn.Dense(10)(h.sum(0))


def graph_network(size: int) -> Case:
    draw = Draw()
    x = draw.normal(size, 24, 8)
    ends = draw.below(24, size, 64, 2)
    labels = draw.below(10, size)
    return of_module(GraphNetwork(), (x, ends, labels))


class FactorisationMachine(nn.Module):
    """Fields with embeddings in one table: their pairwise products, and a deep part (DeepFM)."""

    @nn.compact
    def __call__(self, ids: Array) -> Array:
        v = nn.Embed(2_000, 16, embedding_init=normal(0.1))(ids)
        pairs = 0.5 * jnp.sum(v.sum(0) ** 2 - (v**2).sum(0))
        linear = nn.Embed(2_000, 1, embedding_init=zeros)(ids).sum()
        last = nn.Dense(1)
        hidden = nn.relu(nn.Dense(64)(v.ravel()))
        deep = last(hidden)[0]
        return self.param("bias", zeros, ()) + linear + pairs + deep


def factorisation_machine(size: int) -> Case:
    draw = Draw()
    ids = draw.below(2_000, size, 16)
    labels = 1.0 * draw.below(2, size)
    return of_module(FactorisationMachine(), (ids, labels), optax.sigmoid_binary_cross_entropy)


def field(params: Any, h: Array, t: Array) -> Array:
    """The vector field of the neural ODEs."""
    hidden = jnp.tanh(h @ params["in"] + params["bias"] + t * params["time"])
    return hidden @ params["out"]


class NeuralODE(nn.Module):
    """A classifier of where an ODE ends."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        params = {
            "in": self.param("in", lecun_normal(), (16, 64)),
            "bias": self.param("bias", zeros, (64,)),
            "time": self.param("time", normal(0.1), (64,)),
            "out": self.param("out", lecun_normal(), (64, 16)),
        }
        return nn.Dense(10)(midpoint(params, x))


def midpoint(params: Any, h: Array) -> Array:
    """Where the ODE ends: 16 steps of the midpoint rule from time 0 to 1."""

    def step(h: Array, t: Array) -> tuple[Array, None]:
        middle = h + field(params, h, t) / 32
        return h + field(params, middle, t + 1 / 32) / 16, None

    end, _ = lax.scan(step, h, jnp.arange(16) / 16)
    return end


VIT = models.ViT(patch=4, width=64, depth=3, heads=4, hidden=128)
# The batch size of each model, and a function from a batch size to its case.
MODELS: dict[str, tuple[int, Callable[[int], Case]]] = {
    "weight decay in the loss": (256, weight_decay_in_the_loss),
    "hypernetwork": (64, classifier(Hypernetwork(), 64)),
    "hypernetwork of the example": (64, hypernetwork_of_the_example),
    "weight normalisation": (128, classifier(Normalised(), 256)),
    "standardised resnet": (32, classifier(BiT(), 32, 32, 3)),
    "lru": (16, classifier(Residual(LRU), 128, 8)),
    "s4d": (16, classifier(Residual(S4D), 128, 8)),
    "gated decoder": (16, gated_decoder),
    "lstm": (32, classifier(Recurrent(), 32, 16)),
    "diffusion unet": (16, denoiser(UNet(), 16, 16, 3)),
    "vit": (32, classifier(VIT, 32, 32, 3)),
    "graph network": (64, graph_network),
    "factorisation machine": (128, factorisation_machine),
    "neural ode": (128, classifier(NeuralODE(), 16)),
}
