# SPDX-License-Identifier: Apache-2.0
"""Models: published parameter counts, equal outputs in batches, engines."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import clipped_grad, clipping, losses, models, testing
from dpjax.models import _parts

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)

COUNTS = {
    "linear": (models.by_name("linear", 10), (8, 8, 1), 650),
    "mlp": (models.MLP(features=(32, 16), classes=3), (5,), 192 + 528 + 51),
    "mlp of images": (models.MLP(features=(32,)), (8, 8, 1), 64 * 32 + 32 + 330),
    "regression": (models.by_name("regression_mlp", 1), (8,), 576 + 4160 + 2080 + 33),
    "tempered, SAME": (models.TemperedCNN(), (28, 28, 1), 26_010),
    "tempered, 2": (models.TemperedCNN(padding=2), (28, 28, 1), 26_010),
    "cifar": (models.CIFARCNN(), (32, 32, 3), 605_226),
    "cifar, dense": (models.CIFARDenseCNN(), (32, 32, 3), 550_570),
    "scatter linear 28": (models.by_name("scatter_linear", 10), (7, 7, 81), 39_700),
    "scatter linear 32": (models.by_name("scatter_linear", 10), (8, 8, 243), 155_530),
    "scatter 28": (models.ScatterCNN(), (7, 7, 81), 33_066),
    "scatter 28, printed": (models.ScatterCNN(as_printed=True), (7, 7, 81), 20_778),
    "scatter 32": (models.ScatterCIFARCNN(), (8, 8, 243), 187_210),
    "scatter 32, printed": (models.ScatterCIFARCNN(as_printed=True), (8, 8, 243), 253_386),
    "wide 16-4": (models.WideResNet(), (32, 32, 3), 2_748_890),
    "wide 28-10": (models.WideResNet(depth=28, width=10), (32, 32, 3), 36_479_194),
    "wide 16-4, standardized": (models.WideResNet(standardized=True), (32, 32, 3), 2_748_890),
    "vit base": (models.ViT(classes=1000), (224, 224, 3), 86_567_656),
}
BERT_BASE = models.TextTransformer(
    layout="bert", length=512, width=768, depth=12, heads=12, segments=2
)


def spec(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def size(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def some_params(model, x, scale=0.5):
    """Parameters of the right shapes without compiling an initialiser."""

    def draw(leaf):
        fan_in = max(1, math.prod(leaf.shape[:-1]))
        return (RNG.normal(size=leaf.shape) * scale / fan_in**0.25).astype("f4")

    return jax.tree.map(draw, jax.eval_shape(model.init, KEY, x)["params"])


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", COUNTS)
def test_parameters_and_nothing_else(name):
    model, shape, count = COUNTS[name]
    output, variables = jax.eval_shape(lambda x: model.init_with_output(KEY, x), spec(shape))
    assert set(variables) == {"params"}
    assert size(variables) == count
    assert output.shape == (model.classes,)


def test_bert_base_has_as_many_parameters_as_published():
    tokens = spec((16,), jnp.int32)
    params = jax.eval_shape(BERT_BASE.init, KEY, (tokens, tokens))["params"]
    assert size(params) - size(params["head"]) == 109_482_240


def test_gpt2_has_as_many_parameters_as_published():
    params = jax.eval_shape(models.Decoder().init, KEY, spec((16,), jnp.int32))["params"]
    assert size(params) == 124_439_808


@pytest.mark.thorough
def test_no_position_of_a_decoder_sees_a_later_one():
    model = models.Decoder(vocabulary=9, length=6, width=8, depth=1, heads=2)
    x = RNG.integers(0, 9, (2, 5))
    params = some_params(model, x[0])
    before = model.apply({"params": params}, x)
    x[:, -1] = (x[:, -1] + 1) % 9
    after = model.apply({"params": params}, x)
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert np.abs(before[:, -1] - after[:, -1]).min() > 0
    np.testing.assert_allclose(model.apply({"params": params}, x[0]), after[0], atol=1e-5)


NARROW = models.WideResNet(classes=3, depth=10, width=1, groups=4)
TEXT = models.TextTransformer(classes=3, vocabulary=9, length=4, width=8, depth=1, heads=2)
SMALL = {
    "mlp": (models.MLP(features=(4,), classes=3), (5,)),
    "tempered": (models.TemperedCNN(classes=3), (16, 16, 1)),
    "cifar": (models.CIFARCNN(classes=3), (8, 8, 1)),
    "cifar, dense": (models.CIFARDenseCNN(classes=3), (8, 8, 1)),
    "scatter": (models.ScatterCNN(classes=3), (5, 5, 6)),
    "scatter, printed": (models.ScatterCNN(classes=3, as_printed=True), (7, 7, 6)),
    "scatter cifar": (models.ScatterCIFARCNN(classes=3), (4, 4, 6)),
    "wide": (NARROW, (8, 8, 1)),
    "wide, standardized": (NARROW.clone(standardized=True), (8, 8, 1)),
    "vit": (models.ViT(classes=3, patch=4, width=8, depth=1, heads=2), (8, 8, 1)),
    "text": (TEXT.clone(length=6), "tokens"),
    "bert": (TEXT.clone(length=6, layout="bert", segments=2), "pairs"),
}


def inputs(kind, batch=4):
    if kind == "tokens":
        return RNG.integers(0, 9, (batch, 5))
    if kind == "pairs":
        return RNG.integers(0, 9, (batch, 5)), RNG.integers(0, 2, (batch, 5))
    return RNG.uniform(size=(batch, *kind)).astype("f4")


def first(x):
    return jax.tree.map(lambda leaf: leaf[0], x)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_engines_agree_and_one_example_is_as_good_as_a_batch(name):
    model, kind = SMALL[name]
    x, y = inputs(kind), np.arange(4) % 3
    params = some_params(model, first(x))
    loss = losses.of(model, losses.composite(gamma=2.0))
    batch = (x, y, np.full(4, 1.0, "f4"))
    testing.assert_engines_agree(loss, clipping.flat(0.5), params, batch, engines=("vmap", "ghost"))
    single, many = (jax.jit(model.apply)({"params": params}, given) for given in (first(x), x))
    assert many.shape == (4, 3)
    np.testing.assert_allclose(many[0], single, atol=1e-5)


HIDDEN = {"mlp": 1, "tempered": 3, "cifar": 7, "wide": 7, "bert": 1}


@pytest.mark.parametrize(("name", "layers"), HIDDEN.items())
def test_every_hidden_layer_keeps_its_preactivation(name, layers):
    model, kind = SMALL[name]
    x = first(inputs(kind))
    params = some_params(model, x)
    apply = lambda x: model.apply({"params": params}, x, mutable=["preactivations"])  # noqa: E731
    _, kept = jax.eval_shape(apply, x)
    assert len(jax.tree.leaves(kept)) == layers


@pytest.mark.parametrize(("padding", "sides"), [("SAME", [14, 5]), (2, [13, 5])])
def test_both_paddings_have_the_sides_of_their_papers(padding, sides):
    model = models.TemperedCNN(padding=padding)
    _, kept = jax.eval_shape(
        lambda x: model.init_with_output(KEY, x, capture_intermediates=True), jnp.zeros((28, 28, 1))
    )
    outputs = kept["intermediates"]
    assert [outputs[f"Conv_{i}"]["__call__"][0].shape[0] for i in (0, 1)] == sides
    assert kept["params"]["Dense_0"]["kernel"].shape == (4 * 4 * 32, 32)


@pytest.mark.slow
def test_activation_is_used():
    x = RNG.normal(size=(16, 16, 1)).astype("f4")
    params = some_params(models.TemperedCNN(), x)

    def logits(**options):
        return jax.jit(models.TemperedCNN(**options).apply)({"params": params}, x)

    assert jnp.array_equal(logits(), logits(activation=models.tempered_sigmoid()))
    assert not jnp.allclose(logits(), logits(activation=jax.nn.relu))


@pytest.mark.slow
def test_torch_init_is_uniform_in_one_over_the_root_of_the_fan_in():
    params = jax.jit(models.TemperedCNN(torch_init=True).init)(KEY, jnp.zeros((28, 28, 1)))
    for name, fan_in in {"Conv_0": 64, "Conv_1": 256, "Dense_0": 512, "Dense_1": 32}.items():
        kernel, bias = (params["params"][name][leaf] for leaf in ("kernel", "bias"))
        limit = 1 / math.sqrt(fan_in)
        assert np.abs(kernel).max() <= limit
        assert np.std(kernel) == pytest.approx(limit / math.sqrt(3), rel=0.1)
        assert 0 < np.abs(bias).max() <= limit


def test_every_name_makes_its_model():
    for name in models.NAMES:
        model = models.by_name(name, 7, torch_init=True)
        assert (model.classes, model.torch_init) == (7, True)
        assert models.by_name(name, 7, activation=jax.nn.elu).activation is jax.nn.elu
    assert models.by_name("regression_mlp", 1).activation is nn.relu


@pytest.mark.parametrize(
    ("model", "shape", "word"),
    [
        (models.TemperedCNN(), (28, 28), r"write x\[..., None\]"),
        (models.CIFARCNN(), (3, 3, 1), "sides from 8"),
        (models.WideResNet(depth=15), (8, 8, 1), r"6 n \+ 4"),
        (models.ViT(patch=5), (8, 8, 1), "must divide the sides"),
        (TEXT.clone(layout="post"), (4,), "expected one of pre-norm, bert"),
    ],
)
def test_inputs_and_fields_that_do_not_fit_are_refused(model, shape, word):
    x = jnp.zeros(shape, int if isinstance(model, models.TextTransformer) else float)
    with pytest.raises(ValueError, match=word):
        jax.eval_shape(lambda x: model.init(KEY, x), x)


def test_group_norm_of_an_example_alone_is_that_of_the_formula():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return _parts.group_norm(x, 2)

    x = RNG.normal(size=(3, 5, 4)).astype("f4")
    got, _ = Norm().init_with_output(KEY, x)
    grouped = x.reshape(15, 2, 2)
    mean, var = grouped.mean((0, 2), keepdims=True), grouped.var((0, 2), keepdims=True)
    np.testing.assert_allclose(
        got, ((grouped - mean) / np.sqrt(var + 1e-5)).reshape(x.shape), atol=1e-5
    )


def test_a_standardised_kernel_keeps_the_variance_and_forgets_the_mean():
    x, kernel = RNG.normal(size=(1, 40, 40, 8)).astype("f4"), RNG.normal(size=(3, 3, 8, 6))
    arguments = ((1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"))
    plain, moved = (
        _parts.standardized(jnp.asarray(x), jnp.asarray(k, "f4"), *arguments)
        for k in (kernel, 7 * kernel + 3)
    )
    assert np.std(plain) == pytest.approx(1, abs=0.1)
    np.testing.assert_allclose(plain, moved, atol=2e-3)


@pytest.mark.slow
def test_padding_changes_no_output():
    x = np.array([3, 5, 2, 0])
    params = some_params(TEXT, x, scale=1.0)
    apply = jax.jit(TEXT.apply)
    full, cut = apply({"params": params}, x), apply({"params": params}, x[:3])
    np.testing.assert_allclose(full, cut, atol=1e-5)
    assert np.isfinite(apply({"params": params}, np.zeros(4, int))).all()
    assert not np.allclose(TEXT.clone(padding=None).apply({"params": params}, x), full)


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, -1])
def test_a_token_without_a_vector_is_not_the_last_word(padding):
    model = TEXT.clone(layout="bert", segments=2, padding=padding)
    texts = np.array([[3, 5, 2, padding], [3, -100, 2, padding], [3, 9, 2, 1], [3, 5, 2, padding]])
    segments = np.array([[0, 0, 1, -1], [0, 0, 1, 0], [0, 0, 1, 0], [0, -1, 1, 0]])
    params = some_params(model, (texts[0], segments[0]))
    logits = jax.jit(model.apply)({"params": params}, (texts, segments))
    # What stands at padding is not read.
    assert np.array_equal(np.isnan(logits).all(axis=-1), [False, True, True, True])
    assert np.isfinite(logits[0]).all()
    loss = losses.of(model, losses.cross_entropy)
    for engine in ("vmap", "ghost"):
        clipped = clipped_grad(loss, clipping.flat(1.0), engine=engine)
        norms = jax.jit(clipped)(params, ((texts, segments), np.zeros(4, int))).norms
        assert np.array_equal(np.isfinite(norms[:, 0]), [True, False, False, False])
