# SPDX-License-Identifier: Apache-2.0
"""The words: what a Clipping, a Sampler and an Algorithm hold together."""

import math
from typing import Any

import jax.numpy as jnp
import pytest

import dpjax
from dpjax import clipping, sampling, types


def test_a_clipping_is_built_from_partition_bounds_and_factors():
    rule = types.Clipping(clipping.balanced(2), (3.0, 4.0), jnp.ones_like)
    assert (rule.sensitivity, rule.bounds, rule.name) == (5.0, (3.0, 4.0), "custom")
    factors = rule.factors(jnp.array([[6.0, 1.0], [math.nan, 1.0], [1.0, math.inf]]))
    assert factors.tolist() == [[0.5, 1.0], [0.0, 0.0], [0.0, 0.0]]


def test_rules_can_be_compared_hashed_and_kept_in_tables():
    rule = clipping.flat(1.0)
    assert {rule: "kept"}[rule] == "kept"
    mechanism = dpjax.Mechanism(
        sampling=sampling.full(3), clipping=rule, noise_multiplier=1.0, steps=2
    )
    assert {mechanism: "kept"}[mechanism] == "kept"


def test_limits_compare_what_noise_follows_from():
    params, rule = {"a": jnp.zeros(2), "b": jnp.zeros(3)}, clipping.grouped(1.0, 2)
    assert rule.limits(params) == clipping.per_group((1.0, 1.0), 2).limits(params)
    assert rule.limits(params).groups == (0, 1)
    assert clipping.flat(1.0).limits(params) != clipping.jl(1.0).limits(params)


def test_an_algorithm_unpacks():
    unused: Any = None
    given = lambda key, params: params, lambda state: (state, None)
    init, step = types.Algorithm(*given, *[unused] * 4)
    assert step(init(None, 3)) == (3, None)


def test_the_sampling_rate_follows_from_public_sizes():
    assert sampling.poisson(60_000, 256).sampling_rate == 256 / 60_000


@pytest.mark.parametrize("word", ["add-or-remove", "zero-out", "replace-one"])
def test_neighbours_are_words(word):
    assert types.Neighbours(word) == word
