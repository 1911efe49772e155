# SPDX-License-Identifier: Apache-2.0
"""Models of Keras and KerasHub as losses: engines agree, and the trained weights go back.

`make test-keras` runs this and the section of *Your model* in an environment of its own, because
KerasHub installs TensorFlow. No weights are downloaded.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax.losses import cross_entropy

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="optional; `make test-keras` installs it and KerasHub")
hub = pytest.importorskip("keras_hub")

# A warning of these libraries is none of ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

EXAMPLES, CLASSES, WORDS, LENGTH = 6, 3, 50, 12
SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
TEXT = {"vocabulary_size": WORDS, "max_sequence_length": LENGTH, **SIZES}
LABELS = jnp.arange(EXAMPLES) % CLASSES


def rows():
    return jax.random.normal(jax.random.key(0), (EXAMPLES, 8))


def images():
    return jax.random.normal(jax.random.key(0), (EXAMPLES, 8, 8, 3))


def tokens():
    return jax.random.randint(jax.random.key(0), (EXAMPLES, LENGTH), 1, WORDS)


def sequential(shape, *layers):
    return keras.Sequential([keras.Input(shape), *layers])


def dense():
    layers = keras.layers.Dense(16, "relu"), keras.layers.LayerNormalization()
    return sequential((8,), *layers, keras.layers.Dense(CLASSES)), rows()


def convolutional():
    first = keras.layers.Conv2D(8, 3, activation="relu"), keras.layers.GroupNormalization(2)
    second = keras.layers.SeparableConv2D(8, 3), keras.layers.GlobalAveragePooling2D()
    return sequential((8, 8, 3), *first, *second, keras.layers.Dense(CLASSES)), images()


def recurrent():
    layers = keras.layers.Embedding(WORDS, 8), keras.layers.LSTM(8)
    return sequential((LENGTH,), *layers, keras.layers.Dense(CLASSES)), tokens()


def bert(dropout=0.0):
    backbone = hub.models.BertBackbone(**TEXT, dropout=dropout)
    model = hub.models.BertTextClassifier(
        backbone, CLASSES, preprocessor=None, dropout=dropout, activation=None
    )
    ones = jnp.ones((EXAMPLES, LENGTH), jnp.int32)
    return model, {"token_ids": tokens(), "padding_mask": ones, "segment_ids": 0 * ones}


def head_of_bert():
    model, x = bert()
    model.backbone.trainable = False
    return model, x


def gpt2():
    backbone = hub.models.GPT2Backbone(**TEXT, dropout=0.0)
    last = keras.layers.Dense(CLASSES)(backbone.output[:, -1])
    ones = jnp.ones((EXAMPLES, LENGTH), jnp.int32)
    return keras.Model(backbone.input, last), {"token_ids": tokens(), "padding_mask": ones}


MODELS = [dense, convolutional, recurrent, bert, head_of_bert, gpt2]


def values(variables):
    return {v.path: v.value for v in variables}


def loss_of(model, seeded=False):
    """A loss as *Your model* writes it; ``seeded`` gives dropout a key of each example."""

    def loss(params, example, frozen):
        x, y, *key = example
        batch = jax.tree.map(lambda a: a[None], x)
        if seeded:
            frozen = {
                path: jax.random.key_data(jax.random.fold_in(jax.random.key(*key), seed[0]))
                for path, seed in frozen.items()
            }
        trained = [params[v.path] for v in model.trainable_variables]
        rest = [frozen[v.path] for v in model.non_trainable_variables]
        logits, _ = model.stateless_call(trained, rest, batch, training=True)
        return cross_entropy(logits[0], y)

    return loss


def sums(loss, model, data):
    """The clipped sums of both engines."""
    params, frozen = values(model.trainable_variables), values(model.non_trainable_variables)
    rule = dpjax.clipping.flat(0.1)
    return [
        dpjax.clipped_grad(loss, rule, engine=engine)(params, data, frozen=frozen)
        for engine in ("vmap", "ghost")
    ]


@pytest.mark.parametrize("make", MODELS)
def test_engines_agree(make):
    model, x = make()
    paths = [v.path for v in model.variables]
    assert len(set(paths)) == len(paths)
    vmap, ghost = sums(loss_of(model), model, (x, LABELS))
    np.testing.assert_allclose(vmap.norms, ghost.norms, rtol=1e-5)
    # The gradient of the bias of keys is 0, so both engines give rounding errors there.
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(vmap.value))
    for one, other in zip(*map(jax.tree.leaves, (vmap.value, ghost.value)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6 * scale)


def test_a_key_of_each_example_is_a_mask_of_each_example():
    layers = keras.layers.Dropout(0.5), keras.layers.Dense(CLASSES)
    model, x = sequential((8,), *layers), jnp.ones((EXAMPLES, 8))
    data = x, 0 * LABELS, jnp.arange(EXAMPLES)
    vmap, ghost = sums(loss_of(model, seeded=True), model, data)
    assert len(np.unique(np.asarray(vmap.norms).round(5))) > 2
    np.testing.assert_allclose(vmap.norms, ghost.norms, rtol=1e-5)
    vmap, _ = sums(loss_of(model), model, data)
    assert len(np.unique(np.asarray(vmap.norms).round(5))) == 1, "one mask for all examples"


def algorithm_of(model, x):
    mechanism = dpjax.Mechanism(
        sampling=dpjax.sampling.poisson(EXAMPLES, 3),
        clipping=dpjax.clipping.flat(1.0),
        noise_multiplier=2.0,
        steps=2,
    )
    frozen = values(model.non_trainable_variables)
    return dpjax.dpsgd(loss_of(model), optax.adam(0.1), mechanism, (x, LABELS), frozen=frozen)


def test_weights_return_to_the_model_and_its_file(tmp_path):
    model, x = dense()
    algorithm = algorithm_of(model, x)
    state = algorithm.init(values(model.trainable_variables))
    state, _ = dpjax.fit(algorithm, state, progress=False)
    before = model.predict(x, verbose=0)
    for v in model.trainable_variables:
        v.assign(state.params[v.path])
    model.save(tmp_path / "private.keras")
    after = keras.models.load_model(tmp_path / "private.keras").predict(x, verbose=0)
    np.testing.assert_allclose(after, model.predict(x, verbose=0), rtol=1e-6)
    assert np.abs(after - before).max() > 0.01


def test_only_fixed_batch_statistics_are_taken():
    norm = keras.layers.BatchNormalization(name="standard")
    model, x = sequential((8,), keras.layers.Dense(4), norm, keras.layers.Dense(3)), rows()
    with pytest.raises(ValueError, match=r"standard is a BatchNormalization.*trainable = False"):
        algorithm_of(model, x).init(values(model.trainable_variables))
    norm.trainable = False
    state = algorithm_of(model, x).init(values(model.trainable_variables))
    assert "standard" not in " ".join(state.params)
    logits, _ = model.stateless_call(
        model.trainable_variables, model.non_trainable_variables, x, training=True
    )
    np.testing.assert_allclose(logits, model(x, training=False), rtol=1e-5)
