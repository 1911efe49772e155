# SPDX-License-Identifier: Apache-2.0
"""Published weights of BERT: loaded networks compute what the published ones compute."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments.finetuning import transformers as pretrained
from scipy import special

from dpjax import models

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


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


@pytest.mark.parametrize("style", ["full", "gamma and beta"])
@pytest.mark.slow
def test_bert_is_loaded_and_is_bert(tmp_path, style):
    weights = bert_weights()
    expected = bert_in_numpy(weights, TOKENS, SEGMENTS, heads=2, depth=2)
    if style == "gamma and beta":
        new = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        weights = {
            name.replace(*next(((a, b) for a, b in new.items() if a in name), ("", ""))): value
            for name, value in weights.items()
        }
    weights["bert.embeddings.position_ids"] = np.arange(7)
    path = write_safetensors(tmp_path / "model.safetensors", weights)
    model, x = bert_model(), (TOKENS, SEGMENTS)
    params = pretrained.load_bert(path, empty_params(model, x))
    np.testing.assert_allclose(jax.jit(model.apply)({"params": params}, x), expected, atol=1e-5)


@pytest.mark.slow
def test_bert_of_one_sentence_and_shorter_texts_with_a_new_head(tmp_path):
    weights = bert_weights()
    path = write_safetensors(tmp_path / "model.safetensors", weights)
    model = bert_model(segments=0, length=5, classes=4)
    params = pretrained.load_bert(str(path), empty_params(model, TOKENS))
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
    ],
)
def test_weights_of_another_bert_are_refused_by_name(tmp_path, options, word):
    path = write_safetensors(tmp_path / "model.safetensors", bert_weights())
    model = bert_model(**options)
    with pytest.raises(ValueError, match=word):
        pretrained.load_bert(path, empty_params(model, (TOKENS, SEGMENTS)))


def test_bfloat16_is_read(tmp_path):
    arrays = {"a": np.array([[1.5, -2.0]], jnp.bfloat16), "n": np.array([3], np.int64)}
    got = pretrained.read_safetensors(write_safetensors(tmp_path / "x.safetensors", arrays))
    assert got["a"].dtype == jnp.bfloat16
    assert np.array_equal(got["a"].astype("f4"), [[1.5, -2.0]])
    assert got["n"] == 3
