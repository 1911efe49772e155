# SPDX-License-Identifier: Apache-2.0
"""Losses that use their parameters in every way that the book-keeping engine knows."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import xla_metadata

from dpjax import clipping, testing

FLAT = clipping.flat(0.3)


def array(*shape, seed=0, scale=0.5):
    # Not by JAX, which compiles for each shape.
    return jnp.asarray(np.random.default_rng(seed).normal(scale=scale, size=shape), jnp.float32)


def squared(model):
    """A loss of one example that reaches every output of a model."""

    def loss(params, x):
        y = model(params, x)
        return jnp.sum(jnp.tanh(y) * jnp.arange(1.0, y.size + 1).reshape(y.shape) / y.size)

    return loss


def linen(module, shape, batch=5):
    x = array(batch, *shape, seed=3, scale=1.0)
    params = module.init(jax.random.key(1), x[0])["params"]
    return squared(lambda p, x: module.apply({"params": p}, x)), params, x


def plain(model, shape, **params):
    """A loss of ``model(x, **params)``; of parameters, shapes will do."""

    def case():
        made = {name: array(*x) if isinstance(x, tuple) else x for name, x in params.items()}
        x = array(5, *shape, seed=5, scale=1.0)
        return squared(lambda params, x: model(x, **params)), made, x

    return case


def conv(x_shape, kernel_shape, padding, strides=1, layout=None, **options):
    """A convolution, in NHWC or as `layout` says, above a layer that needs its cotangents."""
    space = "DHW"[5 - len(kernel_shape) :]
    options |= {
        "window_strides": np.broadcast_to(strides, len(space)).tolist(),
        "padding": padding,
        "dimension_numbers": layout or (f"N{space}C", f"{space}IO", f"N{space}C"),
    }

    def product(x, kernel):
        return lax.conv_general_dilated(x, kernel, **options)

    def model(params, x):
        return product(jnp.tanh(x * params["first"]), params["kernel"]) + params["bias"]

    def case():
        x, kernel = array(5, *x_shape, seed=4), array(*kernel_shape)
        out = jax.eval_shape(product, x[0], kernel)
        bias, first = array(*out.shape[1:]), array(*x_shape)
        return squared(model), {"kernel": kernel, "bias": bias, "first": first}, x

    return case


def decayed(case, by):
    """A case with a term of the loss that depends on parameters alone."""

    def made():
        loss, params, x = case()
        return lambda params, x: loss(params, x) + by(params), params, x

    return made


def rotated(x, w, steps=3):
    """A loop over products with two kernels that are computed from one leaf."""
    sine, other = jnp.sin(w), jnp.exp(w)
    for _ in range(steps):
        x = jnp.tanh(x @ sine) + x @ other
    return x


def half_squares(params):
    return 0.2 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


def columns(v):
    return jnp.linalg.norm(v, axis=0)


@jax.custom_vjp
def held(w):
    """Itself; its cotangent is clipped by value, as JAX's documentation has it."""
    return w


held.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(2)(nn.Conv(4, (3, 3), strides=2)(x)))
        x = nn.RMSNorm()(nn.max_pool(nn.Conv(4, (3, 3))(x), (2, 2), (2, 2)))
        return nn.Dense(3)(x.reshape(-1))


class Pooled(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x):
        for layer in range(2):
            x = jnp.tanh(nn.Conv(self.channels, (3, 3))(x))
            if layer % 2:
                x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(3)(jnp.tanh(nn.Dense(8)(x.reshape(-1))))


def scanned(body, start, xs, length=None):
    """The last state of a scan whose ``body(state, x)`` gives the next one."""
    return lax.scan(lambda state, x: (body(state, x), None), start, xs, length)[0]


def row_ids(x, size):
    return jnp.int32(size * jnp.abs(x))


def tagged(function):
    """The function with metadata for XLA: a call of its own, which JAX 0.10 does not have."""
    return getattr(xla_metadata, "xla_metadata_call", lambda function, **_: function)(
        function, tag="layer"
    )


def integers_times(x, w):
    contracted = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, w, contracted, preferred_element_type=jnp.float32)


NHWC, NWC = ("NHWC", "HWIO", "NHWC"), ("NWC", "WIO", "NWC")


# Cases of a group are one program, since each program takes a second to compile.
CASES = {
    "products": {
        "einsum": plain(lambda x, w: jnp.einsum("td,dhk->htk", x, w), (5, 3), w=(3, 2, 4)),
        "matrix on the left": plain(lambda x, w, b: w @ x + b[:, None], (3, 5), w=(4, 3), b=(4,)),
        "integers of a byte": plain(
            lambda x, w: integers_times((40 * x).astype(jnp.int8), w), (3,), w=(3, 4)
        ),
        "metadata for the compiler": plain(lambda x, w: tagged(jnp.dot)(x, w), (3,), w=(3, 4)),
    },
    "views": {
        "two parameters meet": plain(
            lambda x, a, b: x @ (a * b), (3,), a=(3, 4), b=array(3, 4, seed=1)
        ),
        "broadcast bias": plain(
            lambda x, scale, bias, shift: x * scale + bias - shift / 3,
            (5, 3),
            scale=(3,),
            bias=(),
            shift=(5, 1),
        ),
        "divided by the input": plain(
            lambda x, w, v: w / (2 + jnp.tanh(x)) - v, (3,), w=(3,), v=(3,)
        ),
        "normalised columns": plain(
            lambda x, v, g: x @ (g * v / columns(v)), (30,), v=(30, 40), g=(40,)
        ),
        "a derivative of the user's own": plain(lambda x, w: x @ held(w), (3, 30), w=(30, 40)),
        "a kernel of a rematerialised region": plain(
            lambda x, w, g: x @ jax.checkpoint(jnp.multiply)(w, g), (4,), w=(4, 3), g=(3,)
        ),
    },
    "uses": {
        "tied weights": plain(lambda x, w: jnp.tanh(x @ w) @ w.T, (30,), w=(30, 40)),
        "used twice, plainly and scaled": plain(
            lambda x, w: x @ w + jnp.sum(x) * (x @ jnp.sin(w)), (3,), w=(3, 4)
        ),
        "computed kernels of a loop": plain(rotated, (3,), w=(3, 3)),
        "two minus a parameter": plain(lambda x, w: x @ w - x @ (2 - w), (30,), w=(30, 40)),
        "a parameter and its negative": plain(lambda x, w: x @ w - x @ -w, (30,), w=(30, 40)),
        "one plus a parameter": plain(lambda x, w: x @ (1 + w) + x @ (w + 2), (30,), w=(30, 40)),
    },
    "tables": {
        "embedding": plain(
            lambda x, table: table[row_ids(x, 8) % 2] * jnp.arange(6.0)[:, None],
            (6,),
            table=(40, 3),
        ),
        "rows by a number": plain(
            lambda x, u, v, b: u[jnp.int32(9 * x[0])] * v[jnp.int32(9 * x[1])] + b[x.size],
            (2,),
            u=(7, 3),
            v=(5, 3),
            b=(5,),
        ),
        "ids outside the table": plain(
            lambda x, table: jnp.take(table, jnp.int32(4 * x), axis=0, fill_value=0),
            (6,),
            table=(3, 4),
        ),
        "ids outside, by promise": plain(
            lambda x, w: w.at[jnp.int32(10 * x)].get(mode="promise_in_bounds"), (5,), w=(7, 4)
        ),
        "ids of a byte": plain(
            lambda x, table: jnp.take(table, (jnp.abs(x) * 90).astype(jnp.uint8), axis=0),
            (6,),
            table=(256, 4),
        ),
        "a negative table": plain(lambda x, table: (-table)[row_ids(x, 8)], (6,), table=(40, 3)),
    },
    "loops": {
        "layers of a scan, a shared bias": plain(
            lambda x, w, b: scanned(lambda h, w: jnp.tanh(h @ (w / jnp.std(w)) + b), x, w),
            (2, 3),
            w=(4, 3, 3),
            b=(3,),
        ),
        "a scan in a scan": plain(
            lambda x, w: scanned(
                lambda h, w: scanned(lambda g, _: jnp.tanh(g @ w), h, None, 2), x, w
            ),
            (4,),
            w=(3, 4, 4),
        ),
        "cond on a parameter": plain(
            lambda x, w: lax.cond(x[0] > 0, lambda w: x @ w, lambda w: x @ w**2, w), (3,), w=(3, 2)
        ),
        "frozen in a scan": plain(
            lambda x, a, w: scanned(
                lambda h, _: jnp.tanh(h @ (w * lax.stop_gradient(a))), x, None, 3
            ),
            (3,),
            a=array(3, 3, seed=2, scale=1.0),
            w=(3, 3),
        ),
        "a number for each round of a scan": plain(
            lambda x, a, w: scanned(lambda h, t: jnp.tanh(h @ w + t * a), x, jnp.arange(5.0)),
            (3,),
            a=array(3, seed=2, scale=1.0),
            w=(3, 3),
        ),
        "shared plus sliced in a scan": plain(
            lambda x, a, w: scanned(lambda h, w: jnp.tanh(h @ jnp.sin(w.T + a)), x, w),
            (3,),
            a=array(3, seed=2, scale=1.0),
            w=(4, 3, 3),
        ),
        "times of rounds beside slices": plain(
            lambda x, v, w: scanned(
                lambda h, row: jnp.tanh(h * row[0] + row[1] * w), x, (v, jnp.arange(4.0))
            ),
            (3,),
            v=(4, 3),
            w=(3,),
        ),
    },
    "pieces": {
        "class token": plain(
            lambda x, token, w: jnp.concatenate([token[None], x]) @ w, (5, 3), token=(3,), w=(3, 4)
        ),
        "a parameter padded with a parameter": plain(
            lambda x, w, c: x @ jnp.pad(w, 1, constant_values=c), (5, 6), w=(4, 3), c=()
        ),
        "padded with a parameter": plain(
            lambda x, u, w, v: lax.pad(u, x[0], [(1, 2, 1)]) + lax.pad(x * w, v, [(1, 2, 1)]),
            (3,),
            u=(3,),
            w=(3,),
            v=(),
        ),
        "a parameter padded with data": plain(
            lambda x, w: jnp.sin(lax.pad(w, x[0] * x[1], ((1, 0, 0), (-1, 2, 1)))) * x.sum(),
            (2,),
            w=(3, 4),
        ),
        "chosen by the input": plain(
            lambda x, w, v: jnp.where(x > 0, w, v * 2) + jnp.where(x > 1, x, w),
            (4,),
            w=(4,),
            v=array(4, seed=1),
        ),
        "written into the input": plain(
            lambda x, w, v: lax.dynamic_update_slice(x * v, w, (2,)), (6,), w=(3,), v=(6,)
        ),
        "the input written into a parameter": plain(
            lambda x, w: lax.dynamic_update_slice(w, x, (2,)), (3,), w=(6,)
        ),
        "added to rows": plain(
            lambda x, w, v: (
                jnp.zeros(6).at[jnp.array([0, 3, 3])].add(w * x)
                + v.at[jnp.array([1, 1, 4])].add(x)
                + x.sum() * x.sum().at[()].add(v.sum())
            ),
            (3,),
            w=(3,),
            v=(6,),
        ),
        "joined to the input": plain(
            lambda x, w, v: jnp.concatenate([w, x, w * 2, v]), (4,), w=(3,), v=(2,)
        ),
        "coefficients": plain(lambda x, q, w: jnp.polyval(q, x @ w), (3,), q=(3,), w=(3, 4)),
    },
    "numbers": {
        "weight decay": decayed(
            plain(lambda x, w, b: x @ w + b, (30,), w=(30, 40), b=(40,)), half_squares
        ),
        "weight decay of a sequence": decayed(
            plain(lambda x, w: x @ w, (5, 30), w=(30, 40)), half_squares
        ),
        "weight decay of a table": decayed(
            plain(lambda x, table: table[row_ids(x, 8) % 2], (6,), table=(40, 3)), half_squares
        ),
        "weight decay without a use": decayed(
            plain(lambda x, w, v: x @ w, (3,), w=(3, 2), v=(5, 6)), half_squares
        ),
        "a normalised matrix": plain(
            lambda x, v: x @ (v / jnp.sqrt(jnp.sum(v**2))), (30,), v=(30, 40)
        ),
        "low rank beside a matrix": plain(
            lambda x, w, a, b: x @ (w - 2 * (a @ b)), (4, 30), w=(30, 40), a=(30, 2), b=(2, 40)
        ),
        "a generated kernel": plain(
            lambda x, c, w: (
                jnp.tanh(x @ (jnp.tanh(c[0]) @ w).reshape(5, 6)) @ (c[1] @ w).reshape(6, 5)
            ),
            (5,),
            c=(2, 8),
            w=(8, 30),
        ),
        "scaled by a constant": plain(lambda x, w: x @ (0.3 * w) + x @ (w / 3), (30,), w=(30, 40)),
    },
    "convolutions": {
        "conv strided": conv((1, 9, 8, 2), (4, 3, 2, 5), "VALID", strides=(2, 3)),
        "conv of patches": conv((2, 7, 9, 2), (3, 2, 2, 4), "SAME", strides=(3, 2)),
        "conv of many entries": conv(
            (2, 13, 17, 2), (6, 5, 2, 3), ((1, 2), (0, -1)), strides=(2, 1), rhs_dilation=(1, 2)
        ),
        "conv transposed and cut": conv(
            (1, 5, 5, 3), (4, 3, 3, 4), ((1, -1), (-1, 3)), lhs_dilation=(2, 2)
        ),
        "conv in pieces, few positions": conv((1, 4, 4, 96), (3, 3, 96, 64), "VALID"),
        "weight decay of a kernel": decayed(conv((1, 7, 6, 3), (3, 3, 3, 4), "SAME"), half_squares),
    },
    "networks": {
        "tanh of few channels": lambda: linen(Pooled(4), (16, 16, 1)),
        "norms and pools": lambda: linen(Normed(), (8, 8, 2)),
    },
}


def case(name):
    return next(group[name] for group in CASES.values() if name in group)()


def assert_ghost_agrees(loss, params, batch, rule=FLAT, **options):
    testing.assert_engines_agree(loss, rule, params, batch, engines=("ghost",), **options)


def assert_close(tree, expected, **tolerance):
    """Two trees of one structure have nearly equal leaves."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), tree, expected)
