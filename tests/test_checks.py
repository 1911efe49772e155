# SPDX-License-Identifier: Apache-2.0
"""Argument checks: what each returns, and how each refuses."""

import functools
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from small_mechanisms import mechanism_with

from dpjax import (
    accounting,
    auditing,
    checks,
    clipping,
    features,
    federated,
    losses,
    sampling,
    scattering,
    training,
)
from dpjax.activations import tempered_sigmoid


@pytest.mark.parametrize("three", [3, 3.0, np.int64(3), np.float32(3), jnp.asarray(3)])
def test_scalars_of_every_type_mean_the_same(three):
    assert checks.whole("f", "n", three) == 3
    assert type(checks.whole("f", "n", three)) is int
    assert checks.positive("f", "n", three) == 3.0


@pytest.mark.parametrize("wrong", ["3", True, [3], None, math.nan, np.array([3]), object()])
@pytest.mark.parametrize("check", [checks.number, checks.whole, checks.positive, checks.fraction])
def test_what_is_no_number_is_of_a_wrong_type_and_a_wrong_value(check, wrong):
    for error in (TypeError, ValueError):
        with pytest.raises(error, match=r"f\(n=.*expected a number\. Usual cause\."):
            check("f", "n", wrong, "Usual cause.")


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (checks.whole, 2.5),
        (checks.whole, 0),
        (checks.whole, math.inf),
        (checks.positive, 0),
        (checks.positive, math.inf),
        (checks.not_negative, -1.0),
        (functools.partial(checks.not_negative, infinite=False), math.inf),
        (functools.partial(checks.positive, infinite=True), 0),
        (checks.fraction, 0),
        (checks.fraction, 1),
        (lambda *call: checks.one_of(*call[:3], ["a", "b"], *call[3:]), "c"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(check, wrong):
    with pytest.raises(ValueError, match=r"^f\(n=.*\): expected .*\. Usual cause\.$"):
        check("f", "n", wrong, "Usual cause.")


def test_the_least_and_the_choices_are_kept():
    assert checks.whole("f", "n", 0, least=0) == 0
    assert checks.whole("f", "n", 7, most=7) == 7
    with pytest.raises(ValueError, match="at least 1 and at most 7"):
        checks.whole("f", "n", 8, most=7)
    assert checks.whole_or_none("f", "n", 2.0) == 2
    assert checks.whole_or_none("f", "n", None) is None
    assert checks.not_negative("f", "n", math.inf) == math.inf
    assert checks.positive("f", "n", math.inf, infinite=True) == math.inf
    assert checks.one_of("f", "n", "a", ["a", "b"]) == "a"
    assert checks.instance("f", "n", 3, int) == 3
    with pytest.raises(TypeError, match="f: n is a str; expected a int"):
        checks.instance("f", "n", "3", int)


TEXT = {
    "losses.huber(delta=": lambda text: losses.huber(text),
    "losses.focal(gamma=": lambda text: losses.focal(text),
    "losses.composite(beta=": lambda text: losses.composite(beta=text),
    "losses.composite(threshold=": lambda text: losses.composite(threshold=text),
    "activations.tempered_sigmoid(offset=": lambda text: tempered_sigmoid(offset=text),
    "scattering.scatter(J=": lambda text: scattering.scatter(np.zeros((1, 8, 8, 1)), J=text),
    "features.Search(quantile=": lambda text: features.Search(noise_multiplier=1, quantile=text),
    "accounting.select_best(runs=": lambda text: accounting.select_best(None, 1e-5, runs=text),
    "training.average_parameters(decay=": lambda text: training.average_parameters(text),
    "training.dp_adam(floor=": lambda text: training.dp_adam(0.1, mechanism_with(), floor=text),
    "training.dp_sgld(prior_deviation=": lambda text: training.dp_sgld(
        None,
        0.1,
        sampling=sampling.full(3),
        clipping=clipping.flat(1.0),
        steps=1,
        data=None,
        prior_deviation=text,
    ),
    "training.scaled_rate(batch_size=": lambda text: training.scaled_rate(0.1, text),
    "training.scaled_rate(base=": lambda text: training.scaled_rate(text, 512),
    "federated.Weights(largest=": lambda text: federated.Weights(values=np.ones(3), largest=text),
    "federated.Weights(total=": lambda text: federated.Weights(values=np.ones(3), total=text),
    "auditing.epsilon_lower_bound(delta=": lambda text: BOUND(delta=text),
    "auditing.epsilon_lower_bound(confidence=": lambda text: BOUND(confidence=text),
    "auditing.audit_membership(delta=": lambda text: auditing.audit_membership(
        *np.ones((2, 4)), delta=text
    ),
    "auditing.guess_members(guesses=": lambda text: auditing.guess_members(
        np.ones(4), np.ones(4), text
    ),
}
BOUND = functools.partial(auditing.epsilon_lower_bound, 1, 1, canaries=1)


@pytest.mark.parametrize("call", TEXT)
def test_text_in_the_place_of_a_number_is_refused_by_the_call(call):
    with pytest.raises(
        checks.NotANumber, match=rf"^{re.escape(call)}'0.9'\): expected a number\. "
    ):
        TEXT[call]("0.9")
