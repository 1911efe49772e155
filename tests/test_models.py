# SPDX-License-Identifier: Apache-2.0
"""Models: the papers' parameter counts, and one example as good as a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import activations, models

KEY = jax.random.key(0)
CASES = {
    "linear": (models.by_name("linear", 10), (8, 8, 1), 650),
    "mlp": (
        models.MLP(features=(32, 16), classes=3),
        (5,),
        5 * 32 + 32 + 32 * 16 + 16 + 16 * 3 + 3,
    ),
    "mlp of images": (models.MLP(features=(32,)), (8, 8, 1), 64 * 32 + 32 + 330),
    "tempered, SAME": (models.TemperedCNN(), (28, 28, 1), 26_010),
    "tempered, 2": (models.TemperedCNN(padding=2), (28, 28, 1), 26_010),
    "cifar": (models.CIFARCNN(), (32, 32, 3), 605_226),
}


def some_variables(model, x):
    """Parameters of the right shapes without compiling an initialiser."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, KEY, x)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.1).astype("f4"), shapes)


@pytest.mark.parametrize(("model", "shape", "count"), CASES.values(), ids=CASES.keys())
def test_count_and_shapes(model, shape, count):
    x = np.random.default_rng(1).uniform(size=(2, *shape)).astype("f4")
    variables = some_variables(model, x[0])
    assert set(variables) == {"params"}
    assert sum(leaf.size for leaf in jax.tree.leaves(variables)) == count
    single, batch = jax.jit(lambda v: (model.apply(v, x[0]), model.apply(v, x)))(variables)
    assert single.shape == (model.classes,)
    assert batch.shape == (2, model.classes)
    np.testing.assert_allclose(batch[0], single, atol=1e-4)


@pytest.mark.parametrize(("padding", "sides"), [("SAME", [14, 5]), (2, [13, 5])])
def test_both_paddings_have_the_sides_of_their_papers(padding, sides):
    model = models.TemperedCNN(padding=padding)
    _, kept = jax.eval_shape(
        lambda x: model.init_with_output(KEY, x, capture_intermediates=True), jnp.zeros((28, 28, 1))
    )
    outputs = kept["intermediates"]
    assert [outputs[f"Conv_{i}"]["__call__"][0].shape[0] for i in (0, 1)] == sides
    assert kept["params"]["Dense_0"]["kernel"].shape == (4 * 4 * 32, 32)


def test_the_activation_is_used_and_tanh_by_default():
    x = np.random.default_rng(1).normal(size=(28, 28, 1)).astype("f4")
    variables = some_variables(models.TemperedCNN(), x)

    def logits(**options):
        return jax.jit(models.TemperedCNN(**options).apply)(variables, x)

    assert jnp.array_equal(logits(), logits(activation=activations.tempered_sigmoid()))
    assert not jnp.allclose(logits(), logits(activation=jax.nn.relu))


def test_the_mlp_is_the_formula():
    model = models.MLP(features=(4,), classes=2)
    x = np.array([0.5, -1.0, 2.0], np.float32)
    params = some_variables(model, x)["params"]
    hidden = jnp.tanh(x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"])
    expected = hidden @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
    np.testing.assert_allclose(model.apply({"params": params}, x), expected, rtol=1e-6)


def test_every_name_makes_its_model():
    made = [
        models.by_name(n, 7, activation=jax.nn.relu) for n in ("mlp", "tempered_cnn", "cifar_cnn")
    ]
    assert [type(model) for model in made] == [models.MLP, models.TemperedCNN, models.CIFARCNN]
    assert all(model.classes == 7 and model.activation is jax.nn.relu for model in made)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'resnet'.*mlp.*tempered_cnn.*losses\.of"):
        models.by_name("resnet", 10)


@pytest.mark.parametrize("model", [models.TemperedCNN(), models.CIFARCNN()])
@pytest.mark.parametrize("shape", [(28, 28), (4, 4, 1)])
def test_an_input_that_is_no_image_is_refused(model, shape):
    with pytest.raises(ValueError, match="missing channel axis"):
        model.init(KEY, jnp.zeros(shape))
