# SPDX-License-Identifier: Apache-2.0
"""Random networks: the book-keeping engine against the definition.

A network is a list of *parts*. Each part takes a sequence ``[6, 4]`` to another in one of
the ways in which losses use parameters.  The parts, their sizes, the rules, masks, weights,
batch and microbatch sizes follow from a seed.  A network that fails is made shorter, part by
part, and printed as the call of `check` that repeats it.

Float64 shows faults of the engine, which are never as small as rounding; float32 and bfloat16
show what is computed in the wrong precision.
"""

import math
import os
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpjax import clipped_grad, clipping
from dpjax.gradients import _platforms

ROWS, WIDTH = 6, 4
PARTS = {}


class Draw:
    """Everything random about one part."""

    def __init__(self, *seed):
        self.rng = np.random.default_rng(seed)

    def array(self, *shape):
        return self.rng.normal(size=shape) / max(1, math.prod(shape[:-1])) ** 0.5

    def pick(self, *options):
        return options[self.rng.integers(len(options))]

    def shuffled(self, letters):
        return "".join(self.rng.permutation(list(letters)))


def part(function):
    """Adds ``function(draw) -> (parameters, apply(parameters, sequence, example))``."""
    PARTS[function.__name__] = function
    return function


def choice(name, *uses, **shapes):
    """Adds a part that uses parameters of these shapes in one of several ways."""

    def made(draw):
        params = {key: draw.array(*shape) for key, shape in shapes.items()}
        return params, draw.pick(*uses)

    made.__name__ = name
    part(made)


def folded(y):
    """The output of a part as a sequence to which every entry counts."""
    rows = -(-y.size // (ROWS * WIDTH))
    y = jnp.pad(y.ravel(), (0, rows * ROWS * WIDTH - y.size)).reshape(rows, ROWS, WIDTH)
    weights = 0.5 + jnp.sin(jnp.arange(1, rows + 1, dtype=y.dtype)) ** 2
    return jnp.tanh(jnp.tensordot(weights / math.sqrt(rows), y, 1))


# Matrix products ----------------------------------------------------------------------


@part
def dense(draw):
    width = draw.pick(1, 3, 30)
    params = {"w": draw.array(WIDTH, width), "b": draw.array(width)}
    return params, lambda p, h, e: h @ p["w"] + p["b"]


choice("vector", lambda p, h, e: h.ravel() @ p["w"] + p["b"], w=(ROWS * WIDTH, 5), b=(5,))
# Few positions and a large matrix, so that Gram matrices are cheapest.
choice("wide", lambda p, h, e: h.reshape(2, 12) @ p["w"], w=(12, 40))
# Many positions and a small matrix.
choice("long", lambda p, h, e: jnp.tile(h.reshape(12, 2), (5, 1)) @ p["w"], w=(2, 3))


@part
def seen(draw):
    """A matrix that is turned, mirrored, negated or reshaped before it is used."""
    turned = draw.pick(
        lambda w: w.T,
        lambda w: -w.T,
        lambda w: w[:, ::-1].T,
        lambda w: w.reshape(WIDTH, 5),
        lambda w: w.reshape(5, 2, 2).transpose(1, 2, 0).reshape(WIDTH, 5),
        lambda w: w.T[None][0],
    )
    return {"w": draw.array(5, WIDTH)}, lambda p, h, e: h @ turned(p["w"])


choice("left", lambda p, h, e: p["w"] @ h - p["b"][:, None], w=(3, ROWS), b=(3,))


@part
def einsum(draw):
    sizes = {"t": ROWS, "d": WIDTH, "h": 2, "k": 3}
    view, out = draw.pick(
        ("dhk", "htk"), ("thd", "th"), ("td", "t"), ("td", "d"), ("tdk", "tk"), ("kd", "tk"),
        ("hdk", "kth"), ("dth", "th"), ("tdhk", "kh"), ("dt", "td"), ("t", "td"), ("kdht", "dkh"),
    )  # fmt: skip
    params = {"w": draw.array(*(sizes[a] for a in view))}
    formula = draw.pick(f"td,{view}->{out}", f"{view},td->{out}")
    swap = formula.startswith(view + ",")

    def apply(p, h, e):
        return jnp.einsum(formula, p["w"], h) if swap else jnp.einsum(formula, h, p["w"])

    return params, apply


choice(
    "bilinear", lambda p, h, e: jnp.einsum("td,dk,sk->ts", h, p["w"], jnp.sin(h)), w=(WIDTH, WIDTH)
)


@part
def low_rank(draw):
    params = {"w": draw.array(WIDTH, 6), "a": draw.array(WIDTH, 2), "b": draw.array(2, 6)}
    apart = draw.pick(True, False)

    def apply(p, h, e):
        frozen = lax.stop_gradient(p["w"])
        return h @ frozen + h @ p["a"] @ p["b"] if apart else h @ (frozen + p["a"] @ p["b"])

    return params, apply


# Convolutions and pools ---------------------------------------------------------------


def image(h, shape, spec):
    """The sequence as images ``[N, C, *space]``, their axes in the order of ``spec``."""
    x = jnp.resize(h, shape)
    letters = "NC" + "XYZ"[: len(shape) - 2]
    return jnp.transpose(x, [letters.index(a) for a in spec])


def drawn_convolution(draw):
    """Shapes and options of some convolution; its kernel; where its input comes from."""
    rank = draw.pick(1, 1, 2, 2, 3)
    space = "XYZ"[:rank]
    groups = draw.pick(1, 1, 2, 4)
    channels = groups * draw.pick(1, 2)
    out = groups * draw.pick(1, 2, 3)
    sizes = [draw.pick(3, 4, 5) if rank < 3 else draw.pick(2, 3) for _ in space]
    kernel = [draw.pick(1, 2, 3) for _ in space]
    strides = [draw.pick(1, 1, 2, 3) for _ in space]
    spread, apart = ([draw.pick(1, 1, 2) for _ in space] for _ in range(2))
    padding = []
    for size, k, s, a in zip(sizes, kernel, spread, apart, strict=True):
        low, high = draw.pick(-1, 0, 1, 2), draw.pick(0, 0, 1, 2)
        missing = (k - 1) * a - (size - 1) * s - low - high
        padding.append((low, high + max(0, missing)))
    # Windows are told in the order of the kernel's letters.
    specs = tuple(draw.shuffled(letters + space) for letters in ("NC", "OI", "NC"))
    order = [space.index(a) for a in specs[1] if a in space]
    shape = (draw.pick(1, 1, 2), channels, *sizes)
    lengths = dict(zip("OI" + space, (out, channels // groups, *kernel), strict=True))
    options = {
        "window_strides": tuple(strides[i] for i in order),
        "padding": tuple(padding[i] for i in order),
        "lhs_dilation": tuple(spread[i] for i in order),
        "rhs_dilation": tuple(apart[i] for i in order),
        "dimension_numbers": specs,
        "feature_group_count": groups,
    }
    return options, shape, [lengths[a] for a in specs[1]]


@part
def convolution(draw):
    options, shape, kernel = drawn_convolution(draw)
    spec = options["dimension_numbers"][0]
    standardised = draw.pick(False, False, True)

    def apply(p, h, e):
        w = (p["w"] - p["w"].mean()) / (1 + p["w"].std()) if standardised else p["w"]
        return lax.conv_general_dilated(image(h, shape, spec), w, **options)

    return {"w": draw.array(*kernel)}, apply


@part
def transposed_convolution(draw):
    params = {"w": draw.array(3, 2, 2, 3)}
    strides, padding = draw.pick((1, 1), (2, 1), (2, 2)), draw.pick("SAME", "VALID")
    return params, lambda p, h, e: lax.conv_transpose(
        h.reshape(1, 3, 4, 2), p["w"], strides, padding
    )


@part
def pool(draw):
    """Max (with ties) and sum pools over any axes, with a scale before them."""
    _, shape, _ = drawn_convolution(draw)
    window = [draw.pick(1, 2, 3) for _ in shape]
    strides = [draw.pick(1, 2, 3) for _ in shape]
    window = [min(a, b) for a, b in zip(window, shape, strict=True)]
    padding, largest = draw.pick("SAME", "VALID"), draw.pick(True, True, False)

    def apply(p, h, e):
        x = jnp.maximum(jnp.resize(h, shape) * p["s"], 0.0)
        start, function = (-jnp.inf, lax.max) if largest else (0.0, lax.add)
        return lax.reduce_window(x, start, function, window, strides, padding)

    return {"s": draw.array(*shape[1:])}, apply


# Bias, scale, norms, embeddings --------------------------------------------------------


@part
def bias_and_scale(draw):
    shapes = [draw.pick((), (WIDTH,), (ROWS, 1), (ROWS, WIDTH), (1, 1)) for _ in range(4)]
    params = {name: draw.array(*shape) for name, shape in zip("abcd", shapes, strict=True)}
    first = draw.pick(True, False)

    def apply(p, h, e):
        h = p["a"] * h - p["b"] if first else p["b"] - h * p["a"]
        return h / (2 + jnp.abs(p["c"])) + p["d"] / (2 + h**2)

    return params, apply


choice("position", lambda p, h, e: h + p["p"][:ROWS], p=(ROWS + 2, WIDTH))


@part
def norm(draw):
    params = {"s": 1 + draw.array(WIDTH), "b": draw.array(WIDTH)}
    kind = draw.pick("layer", "group", "rms")

    def apply(p, h, e):
        if kind == "rms":
            return h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 0.1) * p["s"]
        x = h.reshape(ROWS, 2, -1) if kind == "group" else h
        axes = (0, 2) if kind == "group" else (1,)
        x = (x - x.mean(axes, keepdims=True)) / jnp.sqrt(x.var(axes, keepdims=True) + 0.1)
        return x.reshape(h.shape) * p["s"] + p["b"]

    return params, apply


@part
def embedding(draw):
    params = {"w": draw.array(8, *draw.pick((), (WIDTH,), (2, 2)))}
    take = draw.pick(
        lambda w, ids: w[ids],
        lambda w, ids: w[ids[:1]],
        lambda w, ids: w[ids.reshape(2, 3) - 2],
        lambda w, ids: jnp.take(w, ids + 3, axis=0, fill_value=0),
        lambda w, ids: jnp.take(w, ids + 3, axis=0, mode="clip"),
        lambda w, ids: w[jnp.zeros_like(ids)],
    )

    def apply(p, h, e):
        rows = take(p["w"], e["ids"])
        return jnp.concatenate([h.ravel(), rows.ravel()]) * jnp.resize(h, h.size + rows.size)

    return params, apply


@part
def tied_embedding(draw):
    params = {"w": draw.array(*draw.pick((8, WIDTH), (40, 16)))}
    head_first = draw.pick(True, False)

    def apply(p, h, e):
        if head_first:
            h = jnp.resize(h @ p["w"][:WIDTH, :WIDTH], (ROWS, p["w"].shape[1]))
        return jnp.tanh(p["w"][e["ids"][:2]] + jnp.resize(h, (2, p["w"].shape[1]))) @ p["w"].T

    return params, apply


# Computations on parameters alone, and parameters used more than once ---------------------


@part
def computed(draw):
    """A matrix that is a function of parameters."""
    params = {"w": draw.array(WIDTH, WIDTH), "v": draw.array(WIDTH)}
    view = draw.pick(
        lambda p: (p["w"] - p["w"].mean(0)) / (0.1 + p["w"].std(0)),
        lambda p: p["w"] / jnp.linalg.norm(p["w"]) * p["v"],
        lambda p: p["w"] * p["v"][:, None],
        lambda p: jnp.exp(p["w"]) - jnp.cumsum(p["w"], 1),
        lambda p: jax.nn.softmax(p["w"]) + p["w"].T,
        lambda p: jnp.outer(p["v"], jnp.sin(p["v"])),
        lambda p: jnp.concatenate([p["w"], p["v"][None]]).T,
        lambda p: jnp.tril(p["w"]),
        lambda p: p["w"][jnp.array([2, 0, 0, 1])],
        lambda p: jnp.pad(p["w"], ((0, 0), (1, 2))),
        lambda p: jnp.broadcast_to(p["v"][:, None], (WIDTH, 3)),
        lambda p: p["w"].at[1].set(p["v"]),
        lambda p: jnp.where(p["w"] > 0, p["w"], 0.1 * p["w"]),
        lambda p: p["w"] + lax.stop_gradient(jnp.round(p["w"]) - p["w"]),
        lambda p: lax.stop_gradient(p["w"]) * p["v"],
        lambda p: jnp.diag(p["v"]),
        lambda p: lax.scan(lambda c, row: (c + row, c * row), p["v"], p["w"])[1],
        lambda p: jax.nn.relu(p["w"]) @ p["w"],
        lambda p: p["w"] * (p["v"][:, None] * p["v"]),
        lambda p: jnp.exp(-((p["v"][:, None] - p["v"]) ** 2)),
        lambda p: jax.checkpoint(jnp.multiply)(p["w"], p["v"]),
        lambda p: lax.cond(p["v"][0] > 0, lambda w: (w[0], w), lambda w: (w[1], -w), p["w"])[1],
    )
    return params, lambda p, h, e: h @ view(p)


@part
def tied(draw):
    params = {"w": draw.array(WIDTH, WIDTH)}
    use = draw.pick(
        lambda w, h: jnp.tanh(h @ w) @ w.T,
        lambda w, h: jnp.tanh(h @ w) @ w,
        lambda w, h: h @ w + jnp.sin(h) @ jnp.sin(w),
        lambda w, h: jnp.tanh(h[0] @ w) @ w.T,
        lambda w, h: h @ w + w[0] * h,
        lambda w, h: h @ (-w) + (h * h) @ w,
        lambda w, h: jnp.einsum("td,dk->tk", h, w) + jnp.einsum("td,kd->tk", h * h, w),
        lambda w, h: h @ w @ w @ w,
        lambda w, h: w @ jnp.tanh(h.T) + w.T @ h.T,
    )
    return params, lambda p, h, e: use(p["w"], h)


choice("penalty", lambda p, h, e: jnp.tanh(h @ p["w"]) + 0.1 * jnp.sum(p["w"] ** 2), w=(WIDTH, 3))
choice(
    "not_linear",
    lambda p, h, e: jnp.sin(h + p["w"]) ** 2 + jnp.logaddexp(h, p["v"]),
    w=(WIDTH,),
    v=(ROWS, 1),
)
choice("unused", lambda p, h, e: h + 0 * lax.stop_gradient(p["w"][0]), w=(2,))


# Whole layers and control flow ----------------------------------------------------------


@part
def attention(draw):
    params = {name: draw.array(WIDTH, 2, 3) for name in ("q", "k", "v")}
    params |= {"o": draw.array(2, 3, WIDTH), "b": draw.array(ROWS, ROWS)}

    def apply(p, h, e):
        q, k, v = (jnp.einsum("td,dhk->thk", h, p[name]) for name in ("q", "k", "v"))
        scores = jnp.einsum("thk,shk->hts", q, k) + p["b"]
        scores = jnp.where(jnp.tri(ROWS, dtype=bool), scores, -1e9)
        return jnp.einsum("hts,shk,hkd->td", jax.nn.softmax(scores), v, p["o"])

    return params, apply


@part
def recurrent(draw):
    params = {"w": draw.array(WIDTH, 12), "u": draw.array(3, 12), "b": draw.array(12)}
    lstm, reverse = draw.pick(True, False), draw.pick(True, False)

    def apply(p, h, e):
        def cell(state, x):
            c, y = state
            i, f, g, o = jnp.split(x @ p["w"] + y @ p["u"] + p["b"], 4)
            if lstm:
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                y = jax.nn.sigmoid(o) * jnp.tanh(c)
            else:
                y = (1 - jax.nn.sigmoid(i)) * y + jax.nn.sigmoid(i) * jnp.tanh(g * f + o)
            return (c, y), y

        start = jnp.zeros(3, h.dtype)
        return lax.scan(cell, (start, start), h, reverse=reverse)[1]

    return params, apply


@part
def stacked(draw):
    """A scan over layers, whose body uses slices and what all rounds share."""
    params = {"w": draw.array(3, WIDTH, WIDTH), "b": draw.array(3, WIDTH), "s": draw.array(WIDTH)}
    body = draw.pick(
        lambda h, p, s: jnp.tanh(h @ p["w"] + p["b"]),
        lambda h, p, s: jnp.tanh(h @ p["w"] + s),
        lambda h, p, s: h + jnp.tanh(h @ (p["w"] / (1 + jnp.std(p["w"]))) * p["b"]),
        lambda h, p, s: jnp.tanh(jnp.einsum("td,kd->tk", h, p["w"]) - s * h),
        lambda h, p, s: jnp.tanh(jax.checkpoint(lambda w, h: h @ w)(p["w"], h) + p["b"]),
        lambda h, p, s: jnp.tanh(h[0] @ p["w"]) + h * p["b"],
        lambda h, p, s: lax.scan(lambda g, _: (jnp.tanh(g @ p["w"]), None), h, None, 2)[0],
        lambda h, p, s: lax.scan(lambda g, b: (jnp.tanh(g @ p["w"] + b * s), g), h, h)[0],
        lambda h, p, s: jnp.sin(p["w"] + h[0]) @ s + h,
    )
    reverse, unroll = draw.pick(True, False), draw.pick(1, 2)

    def apply(p, h, e):
        layers = {"w": p["w"], "b": p["b"]}
        step = lambda h, layer: (body(h, layer, p["s"]), jnp.sum(h))  # noqa: E731
        h, sums = lax.scan(step, h, layers, reverse=reverse, unroll=unroll)
        return h * (1 + jnp.mean(sums))

    return params, apply


@part
def rematerialised(draw):
    params = {"w": draw.array(WIDTH, 5), "v": draw.array(5, WIDTH)}
    inner = lambda p, h: jnp.tanh(h @ p["w"]) @ p["v"]  # noqa: E731
    policy = draw.pick(None, jax.checkpoint_policies.dots_saveable)
    return params, lambda p, h, e: jax.checkpoint(inner, policy=policy)(p, h)


@part
def jitted(draw):
    params = {"w": draw.array(WIDTH, WIDTH), "b": draw.array(WIDTH)}
    inner = jax.jit(lambda p, h: jax.jit(jnp.tanh)(h @ p["w"]) + p["b"])
    return params, lambda p, h, e: inner(p, h) + inner(p, h * h)


@jax.custom_jvp
def steep(x):
    return jnp.sign(x) * jnp.sqrt(jnp.abs(x) + 1)


steep.defjvps(lambda dx, y, x: dx / (1 + x**2))


@jax.custom_vjp
def reversed_product(h, w):
    return h @ w


reversed_product.defvjp(
    lambda h, w: (h @ w, (h, w)), lambda kept, g: (-g @ kept[1].T, 2 * kept[0].T @ g)
)


choice(
    "custom_derivatives",
    lambda p, h, e: steep(h @ p["w"]) * steep(p["v"]),
    lambda p, h, e: h @ steep(p["w"]) + p["v"],
    lambda p, h, e: reversed_product(h, p["w"]) + h @ p["w"],
    lambda p, h, e: steep(h + p["v"]) @ reversed_product(p["w"], p["w"]),
    lambda p, h, e: jax.nn.relu(h * p["v"]) @ jax.nn.relu(p["w"]),
    w=(WIDTH, WIDTH),
    v=(WIDTH,),
)


@part
def branches(draw):
    params = {"w": draw.array(WIDTH, WIDTH), "v": draw.array(WIDTH, WIDTH), "s": draw.array(WIDTH)}

    def looped(p, h):
        ended = lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: c / 2, lax.stop_gradient(p["s"]))
        return h @ p["w"] * ended

    use = draw.pick(
        lambda p, h: lax.cond(h[0, 0] > 0, lambda w: h @ w, lambda w: h @ w**2, p["w"]),
        lambda p, h: lax.cond(h[0, 0] > 0, lambda: h @ p["w"], lambda: h @ p["v"]),
        lambda p, h: lax.switch(jnp.int32(h[0, 0] > 0), [jnp.sin, jnp.cos], h @ p["w"]) + p["s"],
        lambda p, h: h @ lax.cond(p["s"][0] > 0, jnp.sin, jnp.cos, p["w"]),
        lambda p, h: lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ p["w"]), h),
        lambda p, h: lax.fori_loop(0, 2, lambda i, h: h + jnp.tanh(h @ p["w"][i]), h[0]),
        looped,
    )
    return params, lambda p, h, e: use(p, h)


@part
def narrow(draw):
    """Computed in bfloat16, from parameters in full precision."""
    params = {"w": draw.array(WIDTH, 5), "b": draw.array(5), "s": draw.array(5)}
    half = lambda x: x.astype(jnp.bfloat16)  # noqa: E731
    use = draw.pick(
        lambda p, h: half(h) @ half(p["w"]) + half(p["b"]),
        lambda p, h: half(h) @ half(p["w"] / jnp.std(p["w"])) * half(p["s"]),
        lambda p, h: half(h) @ jnp.tanh(half(p["w"])),
        lambda p, h: half(h) @ (half(p["w"]) * half(p["s"])),
        lambda p, h: half(h[0]) @ half(p["w"]),
        lambda p, h: jnp.einsum("td,dk->tk", half(h), half(p["w"]), precision="highest"),
    )
    return params, lambda p, h, e: use(p, h).astype(h.dtype)


# Rules ------------------------------------------------------------------------------------

PARTITIONS = {
    "one group": lambda params: 1,
    "two groups": lambda params: 2,
    "by leaf": clipping.by_leaf,
    "by layer": clipping.by_layer,
}
SCREEN = 0.6
RULES = {
    "flat": lambda groups: clipping.flat(0.3),
    "grouped": lambda groups: clipping.grouped(0.15, groups),
    "grouped, total": lambda groups: clipping.grouped(total=0.3, groups=groups),
    "per_group": lambda groups: clipping.per_group(
        [0.1 + 0.1 * i for i in range(clipping.grouped(1.0, groups).partition.size)], groups
    ),
    "automatic": lambda groups: clipping.automatic(0.5, groups=groups),
    "normalized": lambda groups: clipping.normalized(0.5, groups=groups),
    "hard_threshold": lambda groups: clipping.hard_threshold(0.3, SCREEN, groups=groups),
    "unclipped": lambda groups: clipping.grouped(math.inf, groups),
}

# Relative to an example's whole gradient.  Bfloat16 keeps eight bits, and the two engines round a
# dozen numbers between loss and gradient in different places: 12 * 2**-9, with a little room.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2.0**-5}


# A network, and what must hold for it -------------------------------------------------------


class Case(NamedTuple):
    loss: Callable
    params: dict
    batch: dict
    rules: dict
    microbatch: int | None
    mask: jax.Array
    weights: dict


def network(seed, names, dtype):
    """The network of these parts, a batch, and rules for it."""
    parts = [PARTS[name](Draw(seed, i, *name.encode())) for i, name in names]
    number = jnp.float64 if dtype == "float64" else jnp.float32
    params = {
        f"{i} {name}": {k: jnp.asarray(x, number) for k, x in made.items()}
        for (i, name), (made, _) in zip(names, parts, strict=True)
    }

    def loss(params, example):
        h = example["x"]
        for p, (_, apply) in zip(params.values(), parts, strict=True):
            h = folded(jnp.asarray(apply(p, h, example), number)) + 0.3 * h
        return jnp.sum(jnp.tanh(h) * jnp.cos(jnp.arange(h.size, dtype=number)).reshape(h.shape))

    draw = Draw(seed, b"rest"[0])
    size = draw.pick(1, 3, 5, 5, 8)
    batch = {
        "x": jnp.asarray(draw.rng.normal(size=(size, ROWS, WIDTH)), number),
        "ids": jnp.asarray(draw.rng.integers(8, size=(size, ROWS)), jnp.int32),
        "key": jnp.asarray(draw.rng.integers(2**31, size=(size, 2)), jnp.uint32),
    }
    rules, weights = {}, {}
    for name in draw.rng.permutation(list(RULES))[:2]:
        where = draw.pick(*PARTITIONS) if len(jax.tree.leaves(params)) > 1 else "one group"
        rule = RULES[name](PARTITIONS[where](params))
        rules[f"{name}, {where}"] = rule
        shape = draw.pick(None, (size,), (size, rule.partition.size))
        weights[f"{name}, {where}"] = None if shape is None else draw.rng.uniform(0, 1.2, shape)
    mask = jnp.asarray(draw.rng.random(size) < 0.8)
    return Case(loss, params, batch, rules, draw.pick(None, 2, 3), mask, weights)


def run(case, engine, microbatch=None):
    """All rules in one program: ``(batch, mask) -> {rule: result}``."""

    @jax.jit
    def every(batch, mask):
        return {
            name: clipped_grad(case.loss, rule, engine, microbatch)(
                case.params, batch, mask, case.weights[name]
            )
            for name, rule in case.rules.items()
        }

    return every


def disagreement(case, rule, mask, want, got, tolerance):
    """What two engines do not agree on, or None."""
    a, b = (jax.tree.map(lambda x: np.asarray(x, np.float64), r) for r in (want, got))
    if not np.allclose(a.losses, b.losses, rtol=tolerance, atol=tolerance):
        return f"losses: {a.losses} and {b.losses}"
    # A network may have no derivative where it stands; then no engine may find one.
    if np.any(np.isfinite(a.norms) != np.isfinite(b.norms)):
        return f"norms: {a.norms} and {b.norms}"
    a, b = (r._replace(norms=np.where(np.isfinite(r.norms), r.norms, 0)) for r in (a, b))
    # Of squares, relative to the whole: positions that cancel leave Gram matrices less.
    whole = np.linalg.norm(a.norms, axis=1, keepdims=True) + 1e-30
    if not np.all(np.abs(a.norms**2 - b.norms**2) <= tolerance * whole**2):
        return f"norms: {a.norms} and {b.norms}"
    held = expected_factors(case, rule, mask, got.norms)
    if not np.allclose(b.factors, held, rtol=1e-6, atol=0):
        return f"factors do not follow from the norms: {b.factors} and {held}"
    apart = np.abs(a.factors - b.factors)
    slack = tolerance * whole**2 / np.maximum(a.norms**2, 1e-300)
    if rule.startswith("hard_threshold") and np.any(np.abs(a.norms / SCREEN - 1) < slack):
        return None
    if np.any((slack < 0.1) & (apart > 2 * slack * a.factors)):
        return f"factors: {a.factors} and {b.factors}"
    # Each example may be off by as much as its norm; other factors are another matter.
    groups = case.rules[rule].partition.assign(case.params)
    for group, x, y in zip(groups, *map(jax.tree.leaves, (a.value, b.value)), strict=True):
        off = float(np.linalg.norm(x - y))
        allowed = tolerance * np.sum((b.factors * whole)[:, group])
        if not off <= allowed + np.sum((apart * a.norms)[:, group]):
            return f"the sum of a leaf {x.shape}: off by {off:.3g}, allowed {allowed:.3g}"
    return None


def expected_factors(case, rule, mask, norms):
    factors, weights = case.rules[rule].factors(norms), case.weights[rule]
    if weights is not None:
        factors = factors * np.clip(weights, 0, 1).reshape(len(weights), -1)
    return np.where(np.asarray(mask)[:, None], factors, 0)


def spread_of_a_broken_example(rule, before, spoilt, without, definition, tolerance):
    """How example 0, which has become NaN or infinite, reaches others; None if it does not.

    Args:
      rule: The name of the rule.
      before: The result for the batch as it was.
      spoilt: The result now.
      without: The same without example 0.
      definition: What the definition says now; believed about example 0 alone.
      tolerance: As everywhere.
    """
    a, b = np.asarray(before.norms, np.float64), np.asarray(spoilt.norms, np.float64)
    if not np.all(np.isfinite(a)):
        return None  # without a derivative even before; that says nothing of the spread
    whole = np.linalg.norm(a, axis=1, keepdims=True)
    if not np.all(np.abs(a - b)[1:] <= tolerance * whole[1:]):
        return f"{rule}: others have other norms, {a} and now {b}"
    if np.all(np.isfinite(b[0])):
        return None if np.all(np.isfinite(definition.norms[0])) else f"{rule}: it is not broken"
    if np.any(spoilt.factors[0]):
        return f"{rule}: it takes part, {spoilt.factors}"
    for x, y in zip(*map(jax.tree.leaves, (spoilt.value, without.value)), strict=True):
        # Examples may be taken one by one where another is broken: another order of rounding.
        if not np.allclose(x, y, rtol=0, atol=16 * np.finfo(x.dtype).eps * np.abs(y).max()):
            return f"{rule}: it moves the sum by {np.abs(x - y).max()}"
    return None


def excess(case, rule, one):
    """How an example that is alone in a sum passes the bounds of a rule; None if it does not."""
    groups, bounds = case.rules[rule].partition.assign(case.params), case.rules[rule].bounds
    squares = np.zeros(len(bounds))
    for group, leaf in zip(groups, jax.tree.leaves(one.value), strict=True):
        squares[group] += np.sum(np.square(np.asarray(leaf, np.float64)))
    # The margin of the noise covers half of 2^-10 in norms.
    if np.all(np.sqrt(squares) <= (1 + 2**-11) * np.asarray(bounds)):
        return None
    return f"{rule}: {np.sqrt(squares)} passes the bounds {bounds}"


def check(seed, names, dtype="float64", platform="cpu"):
    """What is wrong with a network, in words; None if nothing is.

    Args:
      seed: Of everything random.
      names: The parts; or pairs of a number and a part, where others were left out.
      dtype: "float64", "float32", or "bfloat16" for networks with narrow parts.
      platform: Whose forms the engine takes: "cpu", "tpu" or "gpu". All run on the CPU.
    """
    names = [name if isinstance(name, tuple) else (i, name) for i, name in enumerate(names)]
    # Accelerators multiply operands of float32 that are rounded to 8 or 11 digits.
    tolerance = TOLERANCES["bfloat16" if platform != "cpu" and dtype == "float32" else dtype]
    with jax.enable_x64(dtype == "float64"):
        case = network(seed, names, dtype)
        definition = run(case, "vmap")
        fast = _platforms.traced_for(platform)(run(case, "ghost", case.microbatch))
        want, got = definition(case.batch, case.mask), fast(case.batch, case.mask)
        for rule in case.rules:
            found = disagreement(case, rule, case.mask, want[rule], got[rule], tolerance)
            if found is not None:
                return f"{rule}: {found}"
        for i in range(len(case.mask)):
            alone = fast(case.batch, jnp.arange(len(case.mask)) == i)
            for rule, one in alone.items():
                if (found := excess(case, rule, one)) is not None:
                    return f"example {i} alone, {found}"
        spoil = (math.nan, math.inf)[seed % 2]
        batch = dict(case.batch, x=case.batch["x"].at[0, 0, 0].set(spoil))
        mask = case.mask.at[0].set(True)
        whole, spoilt = fast(case.batch, mask), fast(batch, mask)
        others, judged = fast(batch, mask.at[0].set(False)), definition(batch, mask)
        for rule in case.rules:
            results = whole[rule], spoilt[rule], others[rule], judged[rule]
            found = spread_of_a_broken_example(rule, *results, tolerance)
            if found is not None:
                return f"with {spoil} in example 0, {found}"
    return None


def attempt(*recipe):
    try:
        return check(*recipe)
    except Exception as error:  # an engine that cannot is as wrong as one that errs
        return f"{type(error).__name__}: {error}"


def shortest(seed, names, *how):
    """Leaves out parts for as long as what remains still fails."""
    for left in names:
        rest = [name for name in names if name != left]
        if rest and attempt(seed, rest, *how) is not None:
            return shortest(seed, rest, *how)
    return names


def hunt(seed, names, dtype, platform="cpu"):
    """Checks a network; if it fails, says so with the recipe of a short one that does."""
    numbered, how = list(enumerate(names)), (dtype, platform)
    if attempt(seed, numbered, *how) is not None:
        short = shortest(seed, numbered, *how)
        recipe = f"test_fuzz.check({seed}, {short}, {dtype!r}, {platform!r})"
        pytest.fail(f"{attempt(seed, short, *how)}\nTo repeat it: {recipe}", pytrace=False)


# The tests ----------------------------------------------------------------------------------

NARROW = {"narrow"}
USUAL = [name for name in PARTS if name not in NARROW]


def drawn(seed, least, most, first=()):
    """Names of parts for one network."""
    rng = np.random.default_rng(seed)
    names = [*first, *map(str, rng.choice(USUAL, rng.integers(least, most + 1)))]
    return [str(name) for name in rng.permutation(names)]


SHUFFLED = list(map(str, np.random.default_rng(0).permutation(USUAL)))
PAIRS = [SHUFFLED[i : i + 2] for i in range(0, len(SHUFFLED), 2)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(PAIRS)), ids=map("+".join, PAIRS))
def test_every_part_beside_another(seed):
    hunt(seed, PAIRS[seed], "float32" if seed % 4 == 3 else "float64")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(150))
def test_networks(number):
    """``DPJAX_FUZZ`` chooses others than the usual ones."""
    seed = 10_000 * int(os.environ.get("DPJAX_FUZZ", "1")) + number
    if number % 8 == 7:
        hunt(seed, [*drawn(seed, 1, 2), "narrow"], "bfloat16")
    else:
        hunt(seed, drawn(seed, 2, 4), "float32" if number % 4 == 3 else "float64")


SPATIAL = "convolution", "transposed_convolution", "pool", "convolution"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_networks_in_the_forms_of_accelerators(number):
    """Half of the networks have a convolution, since there the forms differ most."""
    seed = 10_000 * int(os.environ.get("DPJAX_FUZZ", "1")) + 1_000 + number
    platform, first = ("tpu", "gpu")[number % 2], ()
    if number % 4 >= 2:
        first = (SPATIAL[number // 4 % 4],)
    if number % 8 == 7:
        hunt(seed, [*drawn(seed, 1, 2), "narrow"], "bfloat16", platform)
    else:
        dtype = "float32" if number % 8 in (2, 3) else "float64"
        hunt(seed, drawn(seed, 1, 3, first), dtype, platform)
