# SPDX-License-Identifier: Apache-2.0
"""Losses: closed forms, finite differences, edges, and the step from model to loss."""

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special

from dpjax import clipped_grad, clipping, losses, models, types

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
LOGITS = np.array([2.0, -1.0, 0.5, 3.0], np.float32)
PREDICTION = np.array([3.0, -0.25, 0.0], np.float32)
TARGET = np.array([1.0, 0.25, 0.5], np.float32)


@pytest.mark.parametrize("label", [0, 3])
def test_cross_entropy_and_its_gradient(label):
    value, slope = jax.value_and_grad(losses.cross_entropy)(jnp.asarray(LOGITS), jnp.array(label))
    assert value == pytest.approx(-special.log_softmax(LOGITS)[label], rel=1e-6)
    np.testing.assert_allclose(slope, special.softmax(LOGITS) - np.eye(4)[label], atol=1e-6)
    assert losses.cross_entropy(LOGITS, np.array([label])) == value, "a row of a column"


@pytest.mark.parametrize(("gamma", "label"), [(0.5, 0), (2.0, 2), (5.0, 1)])
def test_focal(gamma, label):
    p = special.softmax(LOGITS.astype(np.float64))[label]
    value = losses.focal(gamma)(jnp.asarray(LOGITS), jnp.array(label))
    assert value == pytest.approx(-((1 - p) ** gamma) * np.log(p), rel=1e-5)


def test_focal_without_gamma_is_the_cross_entropy():
    x, y = jnp.asarray(LOGITS), jnp.array(1)
    focal, plain = (jax.value_and_grad(f)(x, y) for f in (losses.focal(0.0), losses.cross_entropy))
    np.testing.assert_allclose(focal[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(focal[1], plain[1], atol=1e-6)
    alone = jnp.array([3.0, -jnp.inf]), jnp.array(0)  # no chance of being wrong, to the power of 0
    assert losses.focal(0.0)(*alone) == losses.cross_entropy(*alone) == 0


@pytest.mark.parametrize(
    ("loss", "value", "slope"),
    [
        (losses.squared_error, (4 + 0.25 + 0.25) / 2, [2.0, -0.5, -0.5]),
        (losses.absolute, 3.0, [1.0, -1.0, -1.0]),
        (losses.huber(1.0), 1.5 + 0.125 + 0.125, [1.0, -0.5, -0.5]),
        (losses.huber(0.25), 0.25 * (2 - 0.125) + 2 * 0.25 * (0.5 - 0.125), [0.25, -0.25, -0.25]),
        (losses.huber(1e9), 2.25, [2.0, -0.5, -0.5]),
    ],
)
def test_regression_losses(loss, value, slope):
    got = jax.value_and_grad(loss)(jnp.asarray(PREDICTION), jnp.asarray(TARGET))
    assert got[0] == pytest.approx(value, rel=1e-6)
    np.testing.assert_allclose(got[1], slope, rtol=1e-6)


@pytest.mark.parametrize("loss", [losses.cross_entropy, losses.focal(0.5)])
@pytest.mark.parametrize("label", [0, 1])
def test_huge_logits_stay_finite(loss, label):
    value, slope = jax.value_and_grad(loss)(jnp.array([1e4, -1e4, 0.0]), jnp.array(label))
    assert value == pytest.approx([0.0, 2e4][label])
    assert jnp.isfinite(slope).all()


@pytest.mark.parametrize("loss", [losses.cross_entropy, losses.focal(2.0)])
def test_gradients_of_large_logits_are_exact(loss):
    slope = lambda *logits, label: jax.grad(loss)(jnp.array(logits), label)  # noqa: E731
    for size in (1e3, 1e7, 1e30):
        assert slope(size, size / 2, -size, label=2).tolist() == [1, 0, -1]
        assert not slope(size, size / 2, -size, label=0).any()
    near = slope(1e7, 1e7 + 1, label=0) - slope(0.0, 1.0, label=0)  # the difference alone counts
    np.testing.assert_allclose(near, 0, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_classes_that_are_ruled_out_leave_focal_finite(gamma):
    for logits in ([3.0], [3.0, -np.inf], [3.0, -np.inf, -np.inf]):
        value, slope = jax.value_and_grad(losses.focal(gamma))(jnp.array(logits), 0)
        assert value == 0
        assert not slope.any()
    some = jax.value_and_grad(losses.focal(gamma))
    masked, fewer = some(jnp.array([3.0, -jnp.inf, 2.0]), 0), some(jnp.array([3.0, 2.0]), 0)
    np.testing.assert_allclose(masked[0], fewer[0], rtol=1e-6)
    np.testing.assert_allclose(masked[1][jnp.array([0, 2])], fewer[1], rtol=1e-6)


@pytest.mark.parametrize(
    "loss", [losses.cross_entropy, losses.focal(), losses.one_hot(losses.squared_error)]
)
@pytest.mark.parametrize("label", [-1, 4])
def test_a_label_outside_the_classes_has_no_loss_and_no_gradient(loss, label):
    value, slope = jax.value_and_grad(loss)(jnp.asarray(LOGITS), jnp.array(label))
    assert jnp.isnan(value)
    assert not slope.any()


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: losses.cross_entropy(jnp.zeros((2, 3)), jnp.zeros(2, int)), "jax.vmap"),
        (lambda: losses.cross_entropy(jnp.zeros(3), jnp.zeros(3)), "one whole number"),
        (lambda: losses.cross_entropy(jnp.zeros(3), jnp.zeros(2, int)), "one whole number"),
        (lambda: losses.squared_error(jnp.zeros(3), jnp.array(1)), "one_hot"),
        (lambda: losses.squared_error(jnp.zeros((5, 1)), jnp.zeros(5)), "expected the same"),
        (lambda: losses.focal(-1.0), "expected a finite number, 0 or more"),
        (lambda: losses.composite(beta=0.0), "beta=0.0.: expected a number above 0"),
        (lambda: losses.composite(coefficient="beta/1"), "expected one of .1-alpha./beta, 1/beta"),
    ],
)
def test_errors_teach(call, word):
    with pytest.raises(ValueError, match=word):
        call()


def some_params(model, x):
    """Parameters of the right shapes without compiling an initialiser."""
    shapes = jax.eval_shape(model.init, KEY, x)["params"]
    return jax.tree.map(lambda leaf: RNG.normal(size=leaf.shape).astype("f4"), shapes)


def test_of_is_the_loss_of_the_output():
    model = models.MLP(features=(4,), classes=3)
    x, y = RNG.normal(size=5).astype("f4"), jnp.array(2)
    params = some_params(model, x)
    loss = losses.of(model, losses.cross_entropy)
    expected = losses.cross_entropy(model.apply({"params": params}, x), y)
    assert loss(params, (x, y)) == expected


def test_of_gives_per_example_gradients_under_vmap():
    model = models.MLP(features=(), classes=3)
    x, y = RNG.normal(size=(6, 5)).astype("f4"), np.arange(6) % 3
    params = some_params(model, x[0])
    grad = jax.grad(losses.of(model, losses.cross_entropy))
    grads = jax.jit(jax.vmap(grad, (None, 0)))(params, (x, y))
    error = jax.nn.softmax(model.apply({"params": params}, x)) - jax.nn.one_hot(y, 3)
    np.testing.assert_allclose(
        grads["Dense_0"]["kernel"], x[:, :, None] * error[:, None], atol=1e-6
    )


class Normalised(nn.Module):
    """A model that mixes the examples of a batch."""

    @nn.compact
    def __call__(self, x, average=False):
        return nn.BatchNorm(use_running_average=average)(nn.Dense(3)(x))


@pytest.mark.parametrize("name", ["cross_entropy", "composite"])
def test_of_refuses_batch_statistics(name):
    shapes = jax.eval_shape(lambda x: Normalised().init(KEY, x), np.zeros(5))
    variables = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    error = partial(losses.composite(), epoch=0.0) if "site" in name else losses.cross_entropy
    for params in (variables, variables["params"]):
        with pytest.raises(ValueError, match=r"Batch statistics mix.*GroupNorm"):
            losses.of(Normalised(), error)(params, (jnp.zeros(5), jnp.array(0)))


def test_of_refuses_the_whole_dictionary_of_variables():
    model = models.MLP()
    variables = {"params": some_params(model, np.zeros(5))}
    with pytest.raises(ValueError, match=r"variables \['params'\].*\(...\)\[\"params\"\]"):
        losses.of(model, losses.cross_entropy)(variables, (np.zeros(5), np.array(0)))


def test_of_refuses_a_key_of_all_examples():
    with pytest.raises(ValueError, match=r"key of row and step"):
        losses.of(Dropped(), losses.squared_error, train=True, rngs={"dropout": KEY})


def test_of_says_what_to_do_about_a_dropout_without_a_key():
    loss = losses.of(Dropped(), losses.squared_error, train=True)
    with pytest.raises(ValueError, match=r"Dropped has no key.* train=False.*row and step"):
        loss({}, (jnp.ones(3), jnp.zeros(3)))


@pytest.mark.parametrize("model", [lambda params, x: x, models.MLP])
def test_of_says_what_to_do_with_other_models(model):
    with pytest.raises(TypeError, match=r"expected a Linen module.*write loss"):
        losses.of(model, losses.squared_error)


class Dropped(nn.Module):
    """A model with dropout, which is active in training only."""

    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5)(x, deterministic=not train)


HIDDEN = [np.array([[1.0, -2.0], [3.0, 0.5]], np.float32), np.array([0.25, -4.0], np.float32)]
PENALTY = (1 + 4 + 9 + 0.25) / 4 + (0.0625 + 16) / 2


@pytest.mark.parametrize("epoch", [3.0, 40])
@pytest.mark.parametrize(
    ("coefficient", "weight"),
    [
        ("(1-alpha)/beta", lambda alpha: (1 - alpha) / 22),
        ("1/beta", lambda _: 1 / 11),
        ("beta", lambda _: 11),
    ],
)
def test_composite_is_the_formula(epoch, coefficient, weight):
    loss = losses.composite(gamma=5.0, threshold=7.0, beta=11.0, coefficient=coefficient)
    got = loss(jnp.asarray(LOGITS), jnp.array(2), hidden=HIDDEN, epoch=epoch)
    alpha = special.expit(epoch - 7.0)
    p = special.softmax(LOGITS.astype(np.float64))[2]
    focal, sse = -((1 - p) ** 5) * np.log(p), np.sum((LOGITS - np.eye(4)[2]) ** 2) / 2
    expected = alpha * focal + (1 - alpha) * sse + weight(alpha) * PENALTY
    assert got == pytest.approx(expected, rel=1e-5)


def test_composite_of_an_infinite_beta_has_no_penalty():
    loss = losses.composite(gamma=2.0, threshold=3.0, beta=math.inf)
    broken = [np.full(3, np.inf, np.float32)]
    got = loss(jnp.asarray(LOGITS), jnp.array(2), hidden=broken, epoch=4.0)
    without = losses.composite(gamma=2.0, threshold=3.0)
    assert got == without(jnp.asarray(LOGITS), jnp.array(2), hidden=[], epoch=4.0)


def test_an_error_of_composite_without_weight_may_overflow():
    loss = losses.composite(threshold=0.0)
    huge = [jnp.full(3, 1e20)]
    late, logits = lambda x: loss(x, 1, hidden=huge, epoch=1000), jnp.array([1e20, 0.0])
    found = jax.value_and_grad(late)(logits)
    want = jax.value_and_grad(lambda x: losses.focal(5.0)(x, 1))(logits)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    # And the other way: a focal loss of infinity, before the threshold.
    early = loss(jnp.array([1e18, 0.0]), 0, hidden=[], epoch=-1000)
    assert float(early) == pytest.approx(0.5e36, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.promotes
def test_composite_takes_narrow_labels_of_many_classes():
    """Where a whole number of the label's dtype does not reach the number of classes."""
    loss, logits = losses.composite(), jnp.linspace(-1.0, 1.0, 256)
    want = loss(logits, jnp.int32(100), hidden=[logits], epoch=0)
    assert loss(logits, jnp.asarray(100, jnp.uint8), hidden=[logits], epoch=0) == want


@pytest.mark.thorough
def test_composite_of_a_label_outside_the_classes_pulls_at_nothing():
    loss = losses.composite()
    value, slopes = jax.value_and_grad(
        lambda x, h: loss(x, jnp.array(4), hidden=h, epoch=0.0), argnums=(0, 1)
    )(jnp.asarray(LOGITS), [jnp.asarray(h) for h in HIDDEN])
    assert jnp.isnan(value)
    assert not any(leaf.any() for leaf in jax.tree.leaves(slopes))


@pytest.mark.thorough
def test_of_gives_a_loss_the_preactivations_and_the_epoch():
    model = models.MLP(features=(4, 6), classes=3)
    x, y = RNG.normal(size=5).astype("f4"), jnp.array(2)
    params = some_params(model, x)
    composite = losses.composite(beta=3.0)
    first = x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    second = jnp.tanh(first) @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
    logits = model.apply({"params": params}, x)
    expected = composite(logits, y, hidden=[first, second], epoch=2.0)
    got = losses.of(model, composite)(params, (x, y, 2.0))
    assert got == pytest.approx(float(expected), rel=1e-6)
    assert losses.of(model, partial(composite, epoch=2.0))(params, (x, y)) == got


def shifted(key, x):
    return x + jax.random.normal(key, x.shape)


class TestAugmented:
    MODEL = models.MLP(features=(4,), classes=3)
    BATCH = RNG.normal(size=(5, 6)).astype("f4"), np.arange(5) % 3, np.arange(5), np.full(5, 7)

    def losses(self, views=3):
        plain = losses.of(self.MODEL, losses.cross_entropy)
        return plain, losses.augmented(plain, shifted, views, key=KEY)

    @pytest.mark.slow
    def test_it_is_the_mean_over_views_and_clipped_as_one_example(self):
        plain, loss = self.losses()
        params = some_params(self.MODEL, self.BATCH[0][0])
        example = jax.tree.map(lambda leaf: leaf[2], self.BATCH)
        root = jax.random.fold_in(KEY, types.Purpose.VIEWS)
        keys = jax.random.split(jax.random.fold_in(jax.random.fold_in(root, 2), 7), 3)
        each = [plain(params, (shifted(key, example[0]), example[1])) for key in keys]
        assert float(loss(params, example)) == pytest.approx(float(np.mean(each)), rel=1e-5)
        rule = clipping.flat(0.01)
        alone = jax.tree.map(lambda leaf: leaf[2:3], self.BATCH)
        moved = clipped_grad(loss, rule)(params, alone).value
        assert float(optax.tree.norm(moved)) == pytest.approx(0.01, rel=1e-4)

    @pytest.mark.slow
    def test_rows_and_steps_have_views_of_their_own_and_come_back(self):
        _, loss = self.losses(1)
        params = some_params(self.MODEL, self.BATCH[0][0])
        x, y = self.BATCH[0][0], jnp.array(1)
        seen = [float(loss(params, (x, y, row, step))) for row in (0, 1) for step in (0, 1)]
        assert len(set(seen)) == 4
        assert float(loss(params, (x, y, 1, 1))) == seen[-1]


def test_of_explains_what_a_loss_lacks():
    x, y = np.zeros(5, np.float32), jnp.array(0)
    model = models.MLP(features=(4,), classes=3)
    params = some_params(model, x)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'epoch'"):
        losses.of(model, losses.composite())(params, (x, y))
    silent = nn.Sequential([nn.Dense(4), jnp.tanh, nn.Dense(3)])
    with pytest.raises(ValueError, match=r'self\.sow\("preactivations"'):
        losses.of(silent, losses.composite())(some_params(silent, x), (x, y, 1.0))
    plain = losses.of(model, losses.cross_entropy)
    with pytest.raises(TypeError, match=r"losses.of: the example is .*expected a tuple \(x, y\)"):
        plain(params, {"x": x, "y": y})


X, Y = RNG.normal(size=(6, 5)).astype("f4"), np.arange(6) % 3


def as_linen(params):
    """The output of a Linen network of two layers with these parameters."""
    rule, model = clipping.flat(0.5), models.MLP(features=(4,), classes=3)
    loss = losses.of(model, losses.cross_entropy)
    gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, (X, Y))
    return clipping.clip(rule, gradients)[0]


@pytest.mark.slow
def test_a_model_of_equinox():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(KEY, 2)
    first, second = eqx.nn.Linear(5, 4, key=keys[0]), eqx.nn.Linear(4, 3, key=keys[1])
    model = eqx.nn.Sequential([first, eqx.nn.Lambda(jnp.tanh), second])
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, example):
        x, y = example
        return losses.cross_entropy(eqx.combine(params, rest)(x), y)

    gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, (X, Y))
    got = clipping.clip(clipping.flat(0.5), gradients)[0]
    layers = [params.layers[i] for i in (0, 2)]
    dense = [{"kernel": layer.weight.T, "bias": layer.bias} for layer in layers]
    want = as_linen({"Dense_0": dense[0], "Dense_1": dense[1]})
    for i, name in ((0, "Dense_0"), (2, "Dense_1")):
        np.testing.assert_allclose(got.layers[i].weight.T, want[name]["kernel"], atol=1e-5)
