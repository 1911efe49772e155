# SPDX-License-Identifier: Apache-2.0
"""Decisions are those of the platform that a program is lowered for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mutation import kills

from dpjax import clipped_grad, clipping, gradients
from dpjax.gradients import platforms
from dpjax.gradients._bookkeeping import leaf_norms, leaf_sums, outer_products
from dpjax.gradients._bookkeeping.trace import trace

FLAT = clipping.flat(0.5)


def convolved(params, x):
    h = lax.conv_general_dilated(
        x[None], params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    h = lax.reduce_window(jnp.tanh(h), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.sum((h.reshape(-1) @ params["dense"]) ** 2)


PARAMS = {
    "kernel": jax.ShapeDtypeStruct((3, 3, 32, 32), jnp.float32),
    "dense": jax.ShapeDtypeStruct((16 * 16 * 32, 2), jnp.float32),
}
IMAGES = jax.ShapeDtypeStruct((64, 32, 32, 32), jnp.float32)


def lowered(step, platform):
    return step.trace(PARAMS, IMAGES).lower(lowering_platforms=(platform,)).as_text()


@kills("gradients/platforms.py", 'cpu=under("cpu")', "cpu=under(ACCELERATOR)")
@kills("gradients/platforms.py", "default=under(ACCELERATOR)", 'default=under("cpu")')
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
@pytest.mark.parametrize(
    "gradient",
    [
        lambda p, x: clipped_grad(convolved, FLAT)(p, x).value,
        lambda p, x: gradients.plain_grad(convolved)(p, x),
    ],
    ids=["clipped", "plain"],
)
def test_a_step_is_lowered_for_the_platform_that_is_named(gradient, platform):
    """On this machine too: a CPU compiles for an accelerator that it does not have."""
    text = lowered(jax.jit(gradient), platform)
    # Microbatches are a loop, patches are concatenated, and the input cotangent of a convolution
    # stands behind a barrier: all of it for the sake of a CPU.
    marks = ("stablehlo.while", "stablehlo.optimization_barrier")
    assert [mark in text for mark in marks] == 2 * [platform == "cpu"]
    assert ("select_and_scatter" in text) == (platform != "cpu")
    # No patches of 9 x 32 numbers for each pixel, of any microbatch.
    assert ("x9x32x1x32x32xf32" in text or "x8x32x1x32x32xf32" in text) == (platform == "cpu")


def test_the_mesh_in_force_settles_the_platform():
    assert platforms.known() is None
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert platforms.known() == "cpu"
    with platforms.traced_for(mesh):
        assert platforms.known() == platforms.current() == "cpu"
    with platforms.traced_for("tpu"), platforms.traced_for(None):
        assert not platforms.on_cpu()
    seen = []
    jax.shard_map(
        lambda x: (seen.append(platforms.known()), x)[1],
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
    )(jnp.ones(1))
    assert seen == ["cpu"]


def test_an_accelerator_takes_the_batch_in_one_piece_while_it_fits():
    def pair(params, x):
        return convolved(params, x), None

    row = jax.ShapeDtypeStruct(IMAGES.shape[1:], jnp.float32)
    on_cpu = gradients.layout(pair, PARAMS, row, 512)
    with platforms.traced_for("tpu"):
        assert gradients.layout(pair, PARAMS, row, 512) == gradients.Layout(512)
        assert gradients.layout(pair, PARAMS, row, 2**20).microbatch_size < 2**14
    assert on_cpu.microbatch_size < 64


def positions(w, example):
    """The second part of an example is the cotangent of the product."""
    x, g = example
    return jnp.sum(g * (x @ w))


@kills("gradients/_bookkeeping/cost.py", "keep, instantiate, after = True,", "instantiate, after =")
def test_a_gradient_of_low_precision_is_kept_for_its_sum(monkeypatch):
    """Its norm and its sum are of the same numbers, so its rounding cannot pass the bound."""

    def rounded(formula, a, b, precision=outer_products.HIGHEST):
        if precision is not outer_products.HIGHEST:  # as the matrix unit of a TPU
            a, b = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (a, b))
        return jnp.einsum(formula, a, b, precision=outer_products.HIGHEST)

    for module in (leaf_norms, leaf_sums):
        monkeypatch.setattr(module, "product", rounded)
    # Pairs of positions that cancel but for a rest below the precision of bfloat16.
    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=(80, 704)).astype(np.float32) for _ in range(2))
    x[1::2] = x[::2] * (1 + 1e-3 * rng.normal(size=x[::2].shape))
    g[1::2] = -g[::2]
    w = jnp.zeros((704, 704))
    with platforms.traced_for("tpu"):
        assert "instantiate, kept" in gradients.explain(positions, w, (x, g))
        result = clipped_grad(positions, FLAT)(w, (x[None], g[None]))
    assert float(jnp.linalg.norm(result.value)) <= FLAT.bounds[0] * 1.0001
    assert "kept" not in gradients.explain(positions, w, (x, g))


def test_gradients_take_the_precision_of_the_loss_on_accelerators_alone():
    def found(precision):
        def loss(w, x):
            return jnp.sum(jnp.dot(x, w, precision=precision)), None

        (site,) = trace(loss, jnp.ones((3, 2)), jnp.ones((4, 3))).sites
        return outer_products.precision_of(site)

    assert found(None) is outer_products.HIGHEST
    with platforms.traced_for("tpu"):
        assert found(None) is None
        assert found("high") is lax.Precision.HIGH
        assert found("highest") is outer_products.HIGHEST
        assert found("BF16_BF16_F32_X3") is outer_products.HIGHEST
