# SPDX-License-Identifier: Apache-2.0
"""The platform that a program is lowered for decides."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from mutation import kills

from dpjax import clipped_grad, clipping, gradients, testing
from dpjax.gradients import _platforms
from dpjax.gradients._bookkeeping import cost, leaf_norms, leaf_sums, outer_products
from dpjax.gradients._bookkeeping.trace import trace
from dpjax.gradients._jaxprs import equations

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


@kills("gradients/_platforms.py", 'cpu=traced_for("cpu")', "cpu=traced_for(ACCELERATOR)")
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_a_step_is_lowered_for_the_platform_that_is_named(platform):
    """On this machine too: a CPU compiles for an accelerator that it does not have."""
    text = lowered(jax.jit(lambda p, x: clipped_grad(convolved, FLAT)(p, x).value), platform)
    # Microbatches are a loop, patches are concatenated, and the input cotangent of a convolution
    # stands behind a barrier: all of it for the sake of a CPU.
    marks = ("stablehlo.while", "stablehlo.optimization_barrier")
    assert [mark in text for mark in marks] == 2 * [platform == "cpu"]
    assert ("select_and_scatter" in text) == (platform != "cpu")


def test_the_mesh_in_force_settles_the_platform():
    assert _platforms.known() is None
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert _platforms.known() == "cpu"
    with _platforms.traced_for(_platforms.of(mesh)):
        assert _platforms.known() == _platforms.current() == "cpu"
    with _platforms.traced_for("tpu"), _platforms.traced_for(None):
        assert not _platforms.on_cpu()
    seen = []
    jax.shard_map(
        lambda x: (seen.append(_platforms.known()), x)[1],
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
    )(jnp.ones(1))
    assert seen == ["cpu"]


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_max_pool_scatters_nothing_on_a_gpu(platform):
    clipped = clipped_grad(convolved, FLAT)
    with _platforms.traced_for(platform):
        program = str(jax.make_jaxpr(lambda p, x: clipped(p, x).value)(PARAMS, IMAGES))
    assert ("select_and_scatter" in program) == (platform == "tpu")


def test_an_unknown_accelerator_is_the_one_that_is_here(monkeypatch):
    for here in ("tpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda here=here: here)
        with _platforms.traced_for(_platforms.ACCELERATOR):
            assert _platforms.on_gpu() == (here == "gpu") != _platforms.on_tpu()
        with _platforms.traced_for("cpu"):
            assert not _platforms.on_gpu()
            assert not _platforms.on_tpu()


def test_an_accelerator_takes_the_batch_in_one_piece_while_it_fits():
    row = jax.ShapeDtypeStruct(IMAGES.shape[1:], jnp.float32)
    on_cpu = gradients.layout(convolved, PARAMS, row, 512)
    with _platforms.traced_for("tpu"):
        assert gradients.layout(convolved, PARAMS, row, 512) == gradients.Layout(512)
        assert gradients.layout(convolved, PARAMS, row, 2**20).microbatch_size == 1024
    assert on_cpu.microbatch_size < 64


def test_convolutions_in_a_derivative_of_the_users_own_are_not_left_to_xla():
    """It partitions their gradients over `model` wrongly; forwards there is a product alone."""

    def convolution(x, w):
        return jax.lax.conv_general_dilated(x[None, None], w[None, None], (1,), "VALID")

    def backwards(kept, c):
        w, x = kept
        turn = jax.vjp(partial(convolution, x), w)[1]
        return c * turn(jnp.ones((1, 1, 6)))[0], None

    held = jax.custom_vjp(lambda w, x: jnp.sum(w * x[:3]))
    held.defvjp(lambda w, x: (jnp.sum(w * x[:3]), (w, x)), backwards)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    row = jnp.ones(8)
    assert gradients.layout(held, jnp.ones(3), row, 8, devices=mesh).axes == ("data", "model")
    plain = gradients.layout(lambda w, x: w @ x[:3], jnp.ones(3), row, 8, devices=mesh)
    assert plain.axes == ("data",)


def positions(w, example, precision: str | None = "high"):
    """The second part of an example is the cotangent of the product."""
    x, g = example
    return jnp.sum(g * jnp.dot(x, w, precision=precision))


def in_one_pass(formula, a, b, precision=outer_products.HIGHEST):
    """A product as a matrix unit has it that reads 11 digits."""
    if precision is not outer_products.HIGHEST:
        a, b = (lax.reduce_precision(x, 8, 10) for x in (a, b))
    return jnp.einsum(formula, a, b, precision=outer_products.HIGHEST)


@pytest.mark.thorough
@kills("gradients/_bookkeeping/cost.py", "keep = True\n        instantiated", "instantiated")
def test_a_gradient_of_low_precision_is_kept_for_its_sum(monkeypatch):
    """Its norm and its sum are of the same numbers, so its rounding cannot pass the bound."""

    for module in (leaf_norms, leaf_sums):
        monkeypatch.setattr(module, "product", in_one_pass)
    # Pairs of positions that cancel but for a rest below the precision of the product.
    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=(80, 704)).astype(np.float32) for _ in range(2))
    x[1::2] = x[::2] * (1 + 1e-4 * rng.normal(size=x[::2].shape))
    g[1::2] = -g[::2]
    w = jnp.zeros((704, 704))
    with _platforms.traced_for("tpu"):
        assert "instantiate, kept" in gradients.explain(positions, w, (x, g))
        result = clipped_grad(positions, FLAT)(w, (x[None], g[None]))
    assert float(jnp.linalg.norm(result.value)) <= FLAT.bounds[0] * 1.0001
    assert "kept" not in gradients.explain(positions, w, (x, g))


def test_an_example_of_2048_tokens_has_no_table_of_its_own():
    """A gradient of GPT-2's table takes 154 MB; a text of 2,048 tokens has 6 MB of its rows."""
    shapes = (
        jax.ShapeDtypeStruct((50_257, 768), jnp.float32),
        jax.ShapeDtypeStruct((2048,), jnp.int32),
    )
    with _platforms.traced_for("tpu"):
        assert "rows" in gradients.explain(lambda table, ids: jnp.sum(table[ids] ** 2), *shapes)


@pytest.mark.thorough
def test_norm_and_sum_are_of_the_same_rounded_numbers():
    """The norm takes one pass, the sum two, for the digits of factors."""
    short = [np.asarray(lax.reduce_precision(drawn((32, 400)), 8, 10)) for _ in range(2)]
    # Rounding makes each number longer.
    x, g = (a * np.float32(1 - 2**-13) for a in short)

    def loss(w, example):
        return positions(w, example, precision=None)

    with _platforms.traced_for(_platforms.ACCELERATOR):
        assert "gram" in gradients.explain(loss, jnp.zeros((400, 400)), (x, g))
        result = clipped_grad(loss, FLAT)(jnp.zeros((400, 400)), (x[None], g[None]))
    gradient = short[0].astype(np.float64).T @ short[1]
    want = gradient * float(result.factors[0, 0])
    np.testing.assert_allclose(result.value, want, rtol=1e-5, atol=1e-5 * want.max())
    # The norm grows by what the sum may drop.
    longer = float(result.norms[0, 0]) / np.linalg.norm(gradient)
    assert 1 + 1e-5 < longer < 1.001


def test_numbers_are_rounded_where_the_product_of_the_loss_rounds_them():
    def found(dtype=jnp.float32, precision=None):
        def loss(w, x):
            return jnp.sum(jnp.dot(x, w, precision=precision)), None

        (site,) = trace(loss, jnp.ones((3, 2), dtype), jnp.ones((4, 3), dtype)).sites
        return outer_products.rounds_operands(site)

    assert not found()
    with _platforms.traced_for(_platforms.ACCELERATOR):
        assert found()
        assert found(jnp.bfloat16)
        assert not found(jnp.float16)  # it has more digits than a bfloat16
        assert not found(precision="high")
        with jax.enable_x64(True):
            assert not found(jnp.float64)
    text = {
        p: jax.jit(outer_products.rounded).trace(1.0).lower(lowering_platforms=(p,)).as_text()
        for p in ("tpu", "cuda")
    }
    assert "e8m7" in text["tpu"]
    assert "e8m10" in text["cuda"]


def of_sides(w, x, **options):
    rank = x.ndim - 1
    axes = "XYZ"[:rank]
    options = {"window_strides": (1,) * rank, "padding": "SAME", **options}
    numbers = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    return jnp.sum(
        jnp.sin(lax.conv_general_dilated(x[None], w, dimension_numbers=numbers, **options))
    )


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("rule", "kernel", "image", "options"),
    [
        ("instantiate", (3, 2), (11, 12), {"padding": ((1, 1), (0, 1))}),
        ("instantiate", (3, 3), (12, 11), {"rhs_dilation": (2, 1)}),
        ("gram", (4, 2), (7, 6), {"window_strides": (2, 1), "padding": ((2, -1), (0, 3))}),
        ("gram", (3,), (9,), {}),
    ],
)
def test_convolutions_of_many_channels_are_the_definition(
    rule, kernel, image, options, monkeypatch
):
    monkeypatch.setattr(cost, "_PAIR", 0 if rule == "gram" else np.inf)
    w, x = drawn((*kernel, 40, 24)), drawn((5, *image, 40))

    def loss(w, x):
        return of_sides(w, x, **options)

    with _platforms.traced_for(_platforms.ACCELERATOR):
        assert rule in gradients.explain(loss, w, x[0])
        testing.assert_engines_agree(loss, FLAT, w, x, engines=("ghost",), tolerance=5e-4)


def test_gradients_take_the_precision_of_the_loss_on_accelerators_alone():
    def found(precision):
        def loss(w, x):
            return jnp.sum(jnp.dot(x, w, precision=precision)), None

        (site,) = trace(loss, jnp.ones((3, 2)), jnp.ones((4, 3))).sites
        return outer_products.precision_of(site.equation.params)

    assert found(None) is outer_products.HIGHEST
    with _platforms.traced_for("tpu"):
        assert found(None) is None
        assert found("high") is lax.Precision.HIGH
        assert found("highest") is outer_products.HIGHEST
        assert found("BF16_BF16_F32_X3") is outer_products.HIGHEST


@pytest.mark.slow
def test_gradients_of_a_bfloat16_loss_are_kept_as_it_has_them(monkeypatch):
    """On a GPU; norms are of the kept numbers, so an example adds exactly its bound."""
    monkeypatch.setattr(cost, "_PAIR", np.inf)
    w, x = drawn((40, 24)), drawn((5, 9, 40))

    def loss(w, x):
        return jnp.sum(jnp.sin((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype("float32")))

    def kept(w, x):
        program = jax.make_jaxpr(lambda w, x: clipped_grad(loss, FLAT)(w, x).value)(w, x).jaxpr
        found = [e.outvars[0].aval for e in equations(program)]
        return any(v.dtype == jnp.bfloat16 for v in found if v.shape == (5, 1, 40, 24))

    with _platforms.traced_for("gpu"):
        assert kept(w, x)
        testing.assert_engines_agree(loss, FLAT, w, x, engines=("ghost",), tolerance=1e-2)
        for row in x:
            alone = clipped_grad(loss, FLAT)(w, row[None])
            assert float(jnp.linalg.norm(alone.value)) == pytest.approx(0.5, rel=1e-6)
    for other in ("cpu", "tpu"):
        with _platforms.traced_for(other):
            assert not kept(w, x)


def few_channels(w, x, **options):
    options = {"window_strides": (1, 1), "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **options}
    y = lax.conv_general_dilated(x[None], w, padding="SAME", **options)
    # A loss may hide what is not finite: the data are broken all the same.
    return jnp.sum(jnp.sin(jnp.where(jnp.isfinite(y), y, 0)))


ON_A_GPU = {
    "few channels": (few_channels, (3, 3, 4, 4), (5, 6, 6, 4)),
    "depthwise": (
        lambda w, x: few_channels(w, x, feature_group_count=4),
        (6, 6, 1, 8),
        (5, 6, 6, 4),
    ),
    "many entries": (few_channels, (6, 5, 32, 2), (5, 6, 6, 32)),
    "many channels": (few_channels, (3, 3, 32, 4), (5, 12, 12, 32)),
    "with a common gradient": (
        lambda w, x: few_channels(w, x) - 20 * jnp.sum(w**2),
        (3, 3, 32, 4),
        (5, 12, 12, 32),
    ),
}


def drawn(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def convolutions(clipped, *arguments):
    """The convolutions of a program that have examples as groups."""
    program = jax.make_jaxpr(lambda *a: clipped(*a).value)(*arguments).jaxpr
    found = [e for e in equations(program) if e.primitive.name == "conv_general_dilated"]
    groups = ("feature_group_count", "batch_group_count")
    return [e for e in found if any(e.params[name] % len(arguments[1]) == 0 for name in groups)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_GPU)
def test_kernels_on_accelerators_are_products_of_all_patches(name):
    loss, kernel, images = ON_A_GPU[name]
    w, x = drawn(kernel), drawn(images)
    with _platforms.traced_for(_platforms.ACCELERATOR):
        assert not convolutions(clipped_grad(loss, FLAT), w, x)
        testing.assert_engines_agree(loss, FLAT, w, x, engines=("ghost",), tolerance=5e-4)
        assert re.search(r"instantiate( \+ common)?, kept", gradients.explain(loss, w, x[0]))


KILLS = {
    "test_norm_and_sum_are_of_the_same_rounded_numbers": [
        kills(
            "gradients/_bookkeeping/leaf_sums.py",
            "high, rounded(x - high)",
            "high, 0 * high",
            slow=True,
        ),
        kills(
            "gradients/_bookkeeping/leaf_sums.py",
            "entry.rounded().scaled(factors)",
            "entry.scaled(factors)",
            slow=True,
        ),
        kills(
            "gradients/_bookkeeping/leaf_norms.py",
            "form_of(*entry.rounded()) for",
            "form_of(*entry) for",
            slow=True,
        ),
        kills(
            "gradients/_bookkeeping/leaf_norms.py",
            "DROPPED * _uncancelled(short)",
            "0 * _uncancelled(short)",
            slow=True,
        ),
    ],
}
