# SPDX-License-Identifier: Apache-2.0
"""Models: published parameter counts, equal outputs in batches, engines, published weights."""

import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from scipy import special

import dpjax
from dpjax import activations, clipping, losses, models, testing
from dpjax.models import initial, parts, pretrained

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


@pytest.mark.sample(8)
@pytest.mark.parametrize(("model", "shape", "count"), COUNTS.values(), ids=COUNTS.keys())
def test_parameters_and_nothing_else(model, shape, count):
    output, variables = jax.eval_shape(lambda x: model.init_with_output(KEY, x), spec(shape))
    assert set(variables) == {"params"}
    assert size(variables) == count
    assert output.shape == (model.classes,)


def test_bert_base_has_as_many_parameters_as_published():
    tokens = spec((16,), jnp.int32)
    params = jax.eval_shape(BERT_BASE.init, KEY, (tokens, tokens))["params"]
    assert size(params) - size(params["head"]) == 109_482_240


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
@pytest.mark.parametrize(("model", "kind"), SMALL.values(), ids=SMALL.keys())
def test_engines_agree_and_one_example_is_as_good_as_a_batch(model, kind):
    x, y = inputs(kind), np.arange(4) % 3
    params = some_params(model, first(x))
    loss = losses.of(model, losses.composite(gamma=2.0))
    batch = (x, y, np.full(4, 1.0, "f4"))
    testing.assert_engines_agree(loss, clipping.flat(0.5), params, batch, engines=("vmap", "ghost"))
    single, many = (jax.jit(model.apply)({"params": params}, given) for given in (first(x), x))
    assert many.shape == (4, 3)
    np.testing.assert_allclose(many[0], single, atol=1e-5)


HIDDEN = {"mlp": 1, "tempered": 3, "cifar": 7, "cifar, dense": 7, "scatter": 3}
HIDDEN |= {"scatter cifar": 2, "wide": 7, "vit": 1, "bert": 1}


@pytest.mark.parametrize(("name", "layers"), HIDDEN.items())
def test_every_hidden_layer_keeps_its_preactivation(name, layers):
    model, kind = SMALL[name]
    x = first(inputs(kind))
    params = some_params(model, x)
    apply = lambda x: model.apply({"params": params}, x, mutable=["preactivations"])  # noqa: E731
    _, kept = jax.eval_shape(apply, x)
    assert len(jax.tree.leaves(kept)) == layers


def test_a_preactivation_is_what_enters_the_activation():
    model = models.MLP(features=(4,), classes=2)
    x = np.array([0.5, -1.0, 2.0], np.float32)
    params = some_params(model, x)
    hidden = x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    expected = jnp.tanh(hidden) @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
    got, kept = model.apply({"params": params}, x, mutable=["preactivations"])
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(kept["preactivations"]["hidden"][0], hidden, rtol=1e-6)


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
def test_activation_and_pooling_are_used():
    x = RNG.normal(size=(16, 16, 1)).astype("f4")
    params = some_params(models.TemperedCNN(), x)

    def logits(**options):
        return jax.jit(models.TemperedCNN(**options).apply)({"params": params}, x)

    assert jnp.array_equal(logits(), logits(activation=activations.tempered_sigmoid()))
    assert not jnp.allclose(logits(), logits(activation=jax.nn.relu))
    assert not jnp.allclose(logits(), logits(pooling=nn.avg_pool))


def test_kernels_begin_as_asked():
    model = models.MLP(features=(3,), classes=2, kernel_init=nn.initializers.ones)
    params = model.init(KEY, jnp.zeros(4))["params"]
    assert all(layer["kernel"].all() and not layer["bias"].any() for layer in params.values())


@pytest.mark.slow
def test_torch_init_is_uniform_in_one_over_the_root_of_the_fan_in():
    params = jax.jit(models.TemperedCNN(torch_init=True).init)(KEY, jnp.zeros((28, 28, 1)))
    for name, fan_in in {"Conv_0": 64, "Conv_1": 256, "Dense_0": 512, "Dense_1": 32}.items():
        kernel, bias = (params["params"][name][leaf] for leaf in ("kernel", "bias"))
        limit = 1 / math.sqrt(fan_in)
        assert np.abs(kernel).max() <= limit
        assert np.std(kernel) == pytest.approx(limit / math.sqrt(3), rel=0.1)
        assert 0 < np.abs(bias).max() <= limit


@pytest.mark.slow
def test_torch_init_of_a_transformer():
    model = models.TextTransformer(vocabulary=50, length=8, width=32, depth=1, torch_init=True)
    params = jax.jit(model.init)(KEY, jnp.zeros(8, int))["params"]
    assert np.std(params["token"]["embedding"]) == pytest.approx(1, rel=0.1)
    attention = params["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_1"]
    for name, limit in {"query": math.sqrt(6 / 128), "out": 1 / math.sqrt(32)}.items():
        assert 0.9 * limit < np.abs(attention[name]["kernel"]).max() <= limit
        assert not attention[name]["bias"].any()


@pytest.mark.parametrize("name", models.NAMES)
def test_every_name_makes_its_model(name):
    model = models.by_name(name, 7, torch_init=True)
    assert model.classes == 7
    assert model.torch_init
    assert models.by_name(name, 7, activation=jax.nn.elu).activation is jax.nn.elu


def test_a_name_leaves_the_models_own_activation():
    assert models.by_name("tempered_cnn", 10).activation is jnp.tanh
    assert models.by_name("regression_mlp", 1).activation is nn.relu
    assert models.by_name("wide_resnet", 10).activation is nn.relu


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'resnet'.*mlp.*tempered_cnn.*losses\.of"):
        models.by_name("resnet", 10)


@pytest.mark.parametrize("name", ["linear", "vit", "tempered_cnn"])
def test_an_unknown_field_is_answered_with_the_known_ones(name):
    with pytest.raises(ValueError, match="no field dept; it has activation, classes, "):
        models.by_name(name, 10, dept=3)
    with pytest.raises(ValueError, match="no field name; it has activation, classes, "):
        models.by_name(name, 10, **{"name": "a"})


@pytest.mark.parametrize(
    "model", [models.TemperedCNN(), models.CIFARCNN(), models.ViT(), models.WideResNet()]
)
@pytest.mark.parametrize("shape", [(28, 28), (3, 3, 1)])
def test_an_input_that_is_no_image_is_refused(model, shape):
    with pytest.raises(ValueError, match="missing channel axis"):
        model.init(KEY, jnp.zeros(shape))


@pytest.mark.parametrize("model", [models.ScatterCNN(), models.ScatterCIFARCNN()])
@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 3)])
def test_a_raw_image_is_no_wavelet_features(model, shape):
    with pytest.raises(ValueError, match=r"looks like an image.*features\.scattered"):
        model.init(KEY, jnp.zeros(shape))


@pytest.mark.parametrize(
    ("model", "x", "word"),
    [
        (models.WideResNet(depth=15), jnp.zeros((8, 8, 1)), r"6 n \+ 4"),
        (models.WideResNet(depth=10, groups=5), jnp.zeros((8, 8, 1)), "groups must divide"),
        (models.ViT(patch=5), jnp.zeros((8, 8, 1)), "divide both sides"),
        (models.ViT(patch=4, width=9, heads=2), jnp.zeros((8, 8, 1)), "divide the width"),
        (TEXT, jnp.zeros(4), "whole numbers"),
        (TEXT, jnp.zeros(5, int), "Cut longer texts"),
        (TEXT, (jnp.zeros(4, int), jnp.zeros(4, int)), "segments=2"),
        (TEXT.clone(segments=2), jnp.zeros(4, int), "got tokens alone"),
        (TEXT.clone(layout="post"), jnp.zeros(4, int), "layout is one of"),
    ],
)
def test_errors_teach(model, x, word):
    with pytest.raises(ValueError, match=word):
        jax.eval_shape(lambda x: model.init(KEY, x), x)


def test_a_group_of_one_number_is_refused():
    with pytest.raises(ValueError, match="always normalised to 0"):
        parts.group_norm(jnp.zeros((1, 1, 4)), 4)


def test_group_norm_of_an_example_alone_is_that_of_the_formula():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return parts.group_norm(x, 2)

    x = RNG.normal(size=(3, 5, 4)).astype("f4")
    got, _ = Norm().init_with_output(KEY, x)
    grouped = x.reshape(15, 2, 2)
    mean, var = grouped.mean((0, 2), keepdims=True), grouped.var((0, 2), keepdims=True)
    np.testing.assert_allclose(
        got, ((grouped - mean) / np.sqrt(var + 1e-5)).reshape(x.shape), atol=1e-5
    )


@pytest.mark.parametrize("groups", [2.5, 0, "2"])
def test_groups_are_a_whole_number(groups):
    with pytest.raises(ValueError, match=r"models\.group_norm\(groups=.*It divides the channels"):
        parts.group_norm(jnp.zeros((2, 2, 4)), groups)


def test_a_standardised_kernel_keeps_the_variance_and_forgets_the_mean():
    x, kernel = RNG.normal(size=(1, 40, 40, 8)).astype("f4"), RNG.normal(size=(3, 3, 8, 6))
    arguments = ((1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"))
    plain, moved = (
        parts.standardized(jnp.asarray(x), jnp.asarray(k, "f4"), *arguments)
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
@pytest.mark.parametrize("layout", ["pre-norm", "bert"])
@pytest.mark.parametrize("padding", [0, -1])
def test_a_token_without_a_vector_is_not_the_last_word(layout, padding):
    model = TEXT.clone(layout=layout, segments=2, padding=padding)
    texts = np.array([[3, 5, 2, padding], [3, -100, 2, padding], [3, 9, 2, 1], [3, 5, 2, padding]])
    segments = np.array([[0, 0, 1, -1], [0, 0, 1, 0], [0, 0, 1, 0], [0, -1, 1, 0]])
    params = some_params(model, (texts[0], segments[0]))
    logits = jax.jit(model.apply)({"params": params}, (texts, segments))
    # What stands at padding is not read.
    assert np.array_equal(np.isnan(logits).all(axis=-1), [False, True, True, True])
    assert np.isfinite(logits[0]).all()
    loss = losses.of(model, losses.cross_entropy)
    for engine in ("vmap", "ghost"):
        clipped = dpjax.clipped_grad(loss, clipping.flat(1.0), engine=engine)
        norms = jax.jit(clipped)(params, ((texts, segments), np.zeros(4, int))).norms
        assert np.array_equal(np.isfinite(norms[:, 0]), [True, False, False, False])


# Published layouts, written and computed here with NumPy alone.


def norm(x, scale, bias, epsilon):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + epsilon) * scale + bias


def attend(q, k, v):
    """Positions, heads, width of a head."""
    weights = special.softmax(np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1]), axis=-1)
    return np.einsum("hqk,khd->qhd", weights, v)


def bert_in_numpy(w, tokens, segments, heads, depth):
    """BERT's network in NumPy, from the published names."""

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def normed(name, x):
        return norm(x, w[f"{name}.LayerNorm.weight"], w[f"{name}.LayerNorm.bias"], 1e-12)

    table = "bert.embeddings.{}_embeddings.weight".format
    x = w[table("word")][tokens] + w[table("token_type")][segments]
    x = normed("bert.embeddings", x + w[table("position")][: len(tokens)])
    for i in range(depth):
        at = f"bert.encoder.layer.{i}."
        q, k, v = (
            linear(f"{at}attention.self.{n}", x).reshape(len(tokens), heads, -1)
            for n in ("query", "key", "value")
        )
        mixed = attend(q, k, v).reshape(len(tokens), -1)
        x = normed(f"{at}attention.output", x + linear(f"{at}attention.output.dense", mixed))
        h = linear(f"{at}intermediate.dense", x)
        h = h * (1 + special.erf(h / math.sqrt(2))) / 2
        x = normed(f"{at}output", x + linear(f"{at}output.dense", h))
    return linear("classifier", np.tanh(linear("bert.pooler.dense", x[0])))


def bert_weights(vocabulary=11, length=7, width=8, hidden=16, depth=2, classes=3):
    shapes = {
        "bert.embeddings.word_embeddings.weight": (vocabulary, width),
        "bert.embeddings.position_embeddings.weight": (length, width),
        "bert.embeddings.token_type_embeddings.weight": (2, width),
        "bert.pooler.dense.weight": (width, width),
        "classifier.weight": (classes, width),
        "bert.embeddings.LayerNorm.weight": (width,),
    }
    for i in range(depth):
        at = f"bert.encoder.layer.{i}."
        for name in ("query", "key", "value"):
            shapes[f"{at}attention.self.{name}.weight"] = (width, width)
        shapes[f"{at}attention.output.dense.weight"] = (width, width)
        shapes[f"{at}intermediate.dense.weight"] = (hidden, width)
        shapes[f"{at}output.dense.weight"] = (width, hidden)
        for name in ("attention.output", "output"):
            shapes[f"{at}{name}.LayerNorm.weight"] = (width,)
    for name, shape in list(shapes.items()):
        if "embeddings.weight" not in name:
            shapes[name.replace("weight", "bias")] = shape[:1]
    return {name: RNG.normal(size=s, scale=0.5).astype("f4") for name, s in shapes.items()}


def write_safetensors(path, arrays):
    header, blob = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        kind = {"float32": "F32", "bfloat16": "BF16", "int64": "I64"}[str(array.dtype)]
        where = [len(blob), len(blob) + array.nbytes]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": where}
        blob += array.tobytes()
    words = json.dumps(header).encode()
    path.write_bytes(len(words).to_bytes(8, "little") + words + blob)
    return path


def bert_model(**options):
    fields = {"classes": 3, "vocabulary": 11, "length": 7, "width": 8, "depth": 2, "heads": 2}
    fields |= {"hidden": 16, "segments": 2, "layout": "bert", "padding": None}
    return models.TextTransformer(**{**fields, **options})


def empty_params(model, x):
    shapes = jax.eval_shape(lambda x: model.init(KEY, x), x)["params"]
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, 7.0), shapes)


TOKENS, SEGMENTS = np.array([1, 4, 10, 2, 3]), np.array([0, 0, 0, 1, 1])


@pytest.mark.parametrize("style", ["full", "bare names", "gamma and beta"])
@pytest.mark.slow
def test_bert_is_loaded_and_is_bert(tmp_path, style):
    weights = bert_weights()
    expected = bert_in_numpy(weights, TOKENS, SEGMENTS, heads=2, depth=2)
    if style == "bare names":
        weights = {name.removeprefix("bert."): value for name, value in weights.items()}
    if style == "gamma and beta":
        new = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        weights = {
            name.replace(*next(((a, b) for a, b in new.items() if a in name), ("", ""))): value
            for name, value in weights.items()
        }
    weights["bert.embeddings.position_ids"] = np.arange(7)
    path = write_safetensors(tmp_path / "model.safetensors", weights)
    model, x = bert_model(), (TOKENS, SEGMENTS)
    params = models.load_bert(path, empty_params(model, x))
    np.testing.assert_allclose(jax.jit(model.apply)({"params": params}, x), expected, atol=1e-5)


@pytest.mark.slow
def test_bert_of_one_sentence_and_shorter_texts_with_a_new_head(tmp_path):
    weights = bert_weights()
    path = write_safetensors(tmp_path / "model.safetensors", weights)
    model = bert_model(segments=0, length=5, classes=4)
    params = models.load_bert(str(path), empty_params(model, TOKENS))
    assert (params["head"]["kernel"] == 7).all()
    assert (params["head"]["bias"] == 7).all()
    weights["classifier.weight"] = np.full((4, 8), 7.0)
    weights["classifier.bias"] = np.full(4, 7.0)
    expected = bert_in_numpy(weights, TOKENS, np.zeros(5, int), heads=2, depth=2)
    got = jax.jit(model.apply)({"params": params}, TOKENS)
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"depth": 1}, "more layers"),
        ({"depth": 3}, r"encoderblock_2.*missing"),
        ({"vocabulary": 12}, r"token/embedding \(11, 8\), expected \(12, 8\)"),
        ({"length": 8}, "pos_embedding"),
        ({"hidden": 20}, "MlpBlock_3"),
    ],
)
def test_weights_of_another_bert_are_refused_by_name(tmp_path, options, word):
    path = write_safetensors(tmp_path / "model.safetensors", bert_weights())
    model = bert_model(**options)
    with pytest.raises(ValueError, match=word):
        models.load_bert(path, empty_params(model, (TOKENS, SEGMENTS)))


def test_bfloat16_is_read(tmp_path):
    arrays = {"a": np.array([[1.5, -2.0]], jnp.bfloat16), "n": np.array([3], np.int64)}
    got = pretrained.read_safetensors(write_safetensors(tmp_path / "x.safetensors", arrays))
    assert got["a"].dtype == jnp.bfloat16
    assert np.array_equal(got["a"].astype("f4"), [[1.5, -2.0]])
    assert got["n"] == 3


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_safetensors_file_is_named(tmp_path, keep):
    path = write_safetensors(tmp_path / "x.safetensors", {"a": np.ones(9, np.float32)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"x\.safetensors: not a whole"):
        pretrained.read_safetensors(path)


def test_a_safetensors_file_of_other_types_or_of_brackets(tmp_path):
    def written(header, blob=b""):
        path = tmp_path / "x.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + blob)
        return path

    entry = b'{"a": {"dtype": "%s", "shape": [1], "data_offsets": [0, 4]}}'
    assert pretrained.read_safetensors(written(entry % b"U32", b"\x03\0\0\0"))["a"] == 3
    with pytest.raises(ValueError, match="a has the type 'F4'; expected one of F64"):
        pretrained.read_safetensors(written(entry % b"F4", b"\0" * 4))
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        pretrained.read_safetensors(written(b"[" * 100_000 + b"]" * 100_000))


def vit_in_numpy(w, image, patch, heads, depth):
    """The Vision Transformer in NumPy, from the published names."""
    side = image.shape[0] // patch
    cut = image.reshape(side, patch, side, patch, -1).transpose(0, 2, 1, 3, 4)
    kernel = w["embedding/kernel"].reshape(-1, w["embedding/kernel"].shape[-1])
    x = cut.reshape(side * side, -1) @ kernel + w["embedding/bias"]
    x = np.concatenate([w["cls"][0], x]) + w["Transformer/posembed_input/pos_embedding"][0]
    for i in range(depth):
        at = f"Transformer/encoderblock_{i}/"
        h = norm(x, w[f"{at}LayerNorm_0/scale"], w[f"{at}LayerNorm_0/bias"], 1e-6)
        one = f"{at}MultiHeadDotProductAttention_1/"
        q, k, v = (
            np.einsum("pd,dhk->phk", h, w[f"{one}{n}/kernel"]) + w[f"{one}{n}/bias"]
            for n in ("query", "key", "value")
        )
        x = x + np.einsum("phk,hkd->pd", attend(q, k, v), w[f"{one}out/kernel"])
        x = x + w[f"{one}out/bias"]
        h = norm(x, w[f"{at}LayerNorm_2/scale"], w[f"{at}LayerNorm_2/bias"], 1e-6)
        h = h @ w[f"{at}MlpBlock_3/Dense_0/kernel"] + w[f"{at}MlpBlock_3/Dense_0/bias"]
        h = h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2
        x = x + h @ w[f"{at}MlpBlock_3/Dense_1/kernel"] + w[f"{at}MlpBlock_3/Dense_1/bias"]
    x = norm(x, w["Transformer/encoder_norm/scale"], w["Transformer/encoder_norm/bias"], 1e-6)
    return x[0] @ w["head/kernel"] + w["head/bias"]


VIT = models.ViT(classes=3, patch=4, width=8, depth=2, heads=2, hidden=12)


def vit_weights(side=8):
    params = some_params(VIT, spec((side, side, 3)), scale=1.0)
    return traverse_util.flatten_dict(params, sep="/")


@pytest.mark.parametrize("prefix", ["", "params/", "opt/target/"])
def test_a_vit_is_loaded_and_is_a_vit(tmp_path, prefix):
    weights = vit_weights()
    stored = {prefix + name: value for name, value in weights.items()}
    if prefix == "opt/target/":
        stored |= {prefix + "pre_logits/kernel": np.ones((2, 2)), "opt/state/step": np.array(1)}
    np.savez(tmp_path / "w.npz", **stored)
    image = RNG.uniform(size=(8, 8, 3)).astype("f4")
    params = models.load_vit(tmp_path / "w.npz", empty_params(VIT, image))
    expected = vit_in_numpy(weights, image, patch=4, heads=2, depth=2)
    got = jax.jit(VIT.apply)({"params": params}, image)
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_a_larger_image_stretches_the_positions_and_other_classes_get_a_new_head(tmp_path):
    weights = vit_weights()
    np.savez(tmp_path / "w.npz", **weights)
    model = VIT.clone(classes=5)
    params = models.load_vit(tmp_path / "w.npz", empty_params(model, jnp.zeros((12, 12, 3))))
    assert (params["head"]["kernel"] == 7).all()
    old = weights["Transformer/posembed_input/pos_embedding"][0]
    new = params["Transformer"]["posembed_input"]["pos_embedding"][0]
    assert np.array_equal(new[0], old[0])
    new, old = new[1:].reshape(3, 3, 8), old[1:].reshape(2, 2, 8)
    np.testing.assert_allclose(new[::2, ::2], old, rtol=1e-5)
    np.testing.assert_allclose(new[1, 1], old.mean((0, 1)), atol=1e-6)


@pytest.mark.parametrize(
    ("model", "shape", "word"),
    [
        (VIT.clone(depth=1), (8, 8, 3), "weights that the model lacks"),
        (VIT.clone(depth=3), (8, 8, 3), "encoderblock_2.*missing"),
        (VIT.clone(width=16), (8, 8, 3), "does not fit"),
        (VIT, (8, 8, 1), r"embedding/kernel \(4, 4, 3, 8\), expected \(4, 4, 1, 8\)"),
        (VIT, (8, 12, 3), "must be a square"),
    ],
)
def test_weights_of_another_vit_are_refused_by_name(tmp_path, model, shape, word):
    np.savez(tmp_path / "w.npz", **vit_weights())
    with pytest.raises(ValueError, match=word):
        models.load_vit(tmp_path / "w.npz", empty_params(model, jnp.zeros(shape)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("sides", [8, 12])
@pytest.mark.parametrize(
    "weight", ["Transformer/posembed_input/pos_embedding", "Transformer/encoder_norm/scale"]
)
@pytest.mark.parametrize("value", [np.nan, 1e300, "a", 1j])
def test_weights_that_are_not_finite_numbers_are_refused_by_name(tmp_path, sides, weight, value):
    weights = vit_weights()
    weights[weight] = np.full(weights[weight].shape, value)
    np.savez(tmp_path / "w.npz", **weights)
    image = jnp.zeros((sides, sides, 3))
    with pytest.raises(ValueError, match=rf"w\.npz: has NaN, infinity .* in {weight} \("):
        models.load_vit(tmp_path / "w.npz", empty_params(VIT, image))


def test_files_that_are_no_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match="dpjax downloads no weights"):
        models.load_vit(tmp_path / "missing.npz", {})
    np.savez(tmp_path / "pickled.npz", a=np.array([{"code": 1}], dtype=object))
    with pytest.raises(ValueError, match="never read: it can run code"):
        models.load_vit(tmp_path / "pickled.npz", {})
    whole = (tmp_path / "pickled.npz").read_bytes()
    np.savez_compressed(tmp_path / "packed.npz", a=np.arange(1000))
    packed = bytearray((tmp_path / "packed.npz").read_bytes())
    packed[300] ^= 255
    method = bytearray((tmp_path / "packed.npz").read_bytes())
    method[method.rfind(b"PK\x01\x02") + 10] = 77  # a compression that zipfile does not have
    np.save(tmp_path / "lone.npy", np.ones(3))
    for damaged in (whole[:40], packed, method, (tmp_path / "lone.npy").read_bytes()):
        (tmp_path / "damaged.npz").write_bytes(damaged)
        with pytest.raises(ValueError, match="broke off"):
            models.load_vit(tmp_path / "damaged.npz", {})


def test_symmetric_draws_reach_both_ends():
    draws = initial.symmetric(2.0)(KEY, (4000,), jnp.float32)
    assert draws.min() == pytest.approx(-2, abs=0.01)
    assert draws.max() == pytest.approx(2, abs=0.01)
