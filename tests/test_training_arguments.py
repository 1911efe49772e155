# SPDX-License-Identifier: Apache-2.0
"""Arguments, data and states that `dpsgd` refuses before a step runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from mutation import kills
from small_mechanisms import mechanism_with
from training_runs import DATA, algorithm_with, fit, loss, make, start

from dpjax import clipping, dpsgd, noise, sampling, strategies, training
from dpjax.data import Dataset
from dpjax.training.checks import any_finite_row


@kills("training/checks.py", "finite = finite & np.isfinite", "finite = np.isfinite")
def test_data_without_a_finite_row_are_refused_before_a_step():
    gaps = np.where(np.arange(3) == 1, np.nan, np.ones((50, 3), np.float32))
    with pytest.raises(ValueError, match=r"each of the 50 rows of the data holds a number that is"):
        algorithm_with(mechanism_with(50, 50), gaps)
    last = gaps.copy()
    last[49] = 1
    algorithm_with(mechanism_with(50, 50), last)
    numbers = np.full(300, np.inf)
    numbers[299] = 0
    assert any_finite_row((numbers, np.ones(300)))
    assert not any_finite_row((numbers, numbers[::-1]))
    assert any_finite_row(np.arange(3)), "whole numbers"


def test_batch_normalisation_of_one_example_is_named(caplog):
    params = {"BatchNorm_0": {"scale": jnp.ones(3)}, "Dense_0": {"kernel": jnp.ones(3)}}
    loss = lambda p, x: p["BatchNorm_0"]["scale"] @ (x * p["Dense_0"]["kernel"])  # noqa: E731
    with caplog.at_level("WARNING"):
        make(loss=loss).init(params)
    assert "BatchNorm_0/scale belongs to a batch normalisation" in caplog.text


def test_trained_batch_normalisation_of_keras_is_refused():
    """By the paths of its variables: the statistics are frozen, and the scale is trained."""
    params = {"dense/kernel": jnp.ones(3), "norm/gamma": jnp.ones(3)}

    def loss(p, x, frozen):
        del frozen
        return p["norm/gamma"] @ x + p["dense/kernel"] @ x

    with pytest.raises(ValueError, match=r"norm is a BatchNormalization.*GroupNormalization"):
        make(loss=loss, frozen={"norm/moving_mean": jnp.zeros(3)}).init(params)
    make(loss=loss, frozen={"norma/moving_mean": jnp.zeros(3)}).init(params)


@pytest.mark.parametrize(
    ("key", "params", "message"),
    [
        (jnp.zeros(3), jax.random.key(0), "given a key as parameters"),
        (jax.random.key(0), {"w": jnp.zeros(3), "n": jnp.arange(3)}, "leaf n is int32"),
    ],
)
def test_keys_and_parameters_that_cannot_be_trained_are_refused(key, params, message):
    with pytest.raises(TypeError, match=message):
        make().init(params, key)


MISTAKES = {
    "a rate": ({"optimizer": 0.1}, TypeError, "optimizer is a float; expected an Optax"),
    "a plan": ({"mechanism": optax.sgd(0.1)}, TypeError, "mechanism is a .*; expected a Mechanism"),
    "a module": ({"loss": linen.Dense(2)}, TypeError, r"loss is a Dense.*losses.of\(model"),
    "an epsilon": ({"budget": 3.0}, TypeError, r"budget is a float; expected a Budget\. Write"),
    "an engine": ({"engine": "fast"}, ValueError, "engine='fast'.*one of auto"),
    "a data set": ({"data": Dataset("mine", (DATA, DATA), (), 2)}, TypeError, r"its \.train"),
    "words": ({"data": (DATA, np.array(["a"] * 50))}, TypeError, "leaf 1 is of type <U1"),
    "pairs": ({"data": list(zip(DATA, range(50), strict=True))}, ValueError, "a leading axis"),
    "no tuple": ({"per_step": lambda step: step}, TypeError, r"expected a tuple.*write \(x,\)"),
    "fewer rows": ({"data": DATA[1:]}, ValueError, "the data hold 49 examples, the mechanism's"),
    "a microbatch": ({"microbatch_size": 1.5}, ValueError, "whole number"),
    "a loader": ({"data": iter([DATA])}, TypeError, "got a list_iterator.*draws the batches"),
    "clients": (
        {"mechanism": mechanism_with(unit="client")},
        ValueError,
        "unit is 'client', and poisson draws rows",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_argument_in_the_wrong_place_is_refused_before_anything_runs(name):
    changed, error, message = MISTAKES[name]
    right = {"loss": loss, "optimizer": optax.sgd(0.1), "mechanism": mechanism_with(), "data": DATA}
    with pytest.raises(error, match=message):
        dpsgd(**{**right, **changed})


def test_a_state_that_run_has_used_up_is_refused():
    algorithm = make(steps=3)
    state = start(algorithm)
    after, _ = algorithm.run(state, 1)
    for take in (algorithm.step, lambda x: algorithm.run(x, 1), lambda x: fit(algorithm, x)):
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            take(state)
    assert algorithm.step(after)[0].ledger.steps == 2


def test_an_algorithm_is_not_to_be_traced():
    algorithm = make()
    state, keys = start(algorithm), jax.random.split(jax.random.key(0), 2)
    traced = {
        "step": lambda: jax.jit(algorithm.step)(state),
        "run": lambda: jax.jit(lambda state: algorithm.run(state, 2))(state),
        "init": lambda: jax.vmap(algorithm.init, (None, 0))(jnp.zeros(3), keys),
    }
    for name, call in traced.items():
        with pytest.raises(TypeError, match=f"dpsgd: {name}: called inside a JAX transformation"):
            call()


@kills("training/assembly.py", "if not supplied(state) and not np.any(", "if False and not np.any(")
def test_a_state_without_a_noise_key_is_refused_until_it_is_renewed():
    algorithm = make()
    state = start(algorithm, None)
    unset = training._keys.without_secrets(state, algorithm.mechanism)
    with pytest.raises(ValueError, match=r"noise\.renew\(state\) sets one"):
        algorithm.step(unset)
    one, two = (algorithm.step(noise.renew(unset))[0].params for _ in range(2))
    assert not np.any(one == two)


BANDED = {"sampling": sampling.cyclic_poisson(50, 5, cycle=2), "noise": strategies.banded(8, 2)}
TRACKED = optax.sgd(0.1).init(jnp.zeros(3))


VALUES = {
    r"scaled_rate\(batch_size // 512=0\)": lambda: training.scaled_rate(0.1, 256),
    "expected independent noise": lambda: training.dp_adam(0.1, mechanism_with(steps=8, **BANDED)),
    r"with training\.average_parameters": lambda: training.averaged(TRACKED),
    r"with training\.keep_samples": lambda: training.samples(TRACKED),
    "adapts its bounds": lambda: algorithm_with(
        mechanism_with(adaptive=clipping.Quantile(count_multiplier=10.0)),
        bound_schedule=lambda step: 1.0,
    ),
}


@pytest.mark.parametrize("words", VALUES)
def test_values_without_a_meaning_are_refused(words):
    with pytest.raises(ValueError, match=words):
        VALUES[words]()


def test_what_is_no_state_is_refused():
    with pytest.raises(
        TypeError, match=r"the state is a dict; expected a State\. Give algorithm\.init"
    ):
        make().step({})
