# SPDX-License-Identifier: Apache-2.0
"""The words: what a Clipping, a Sampler and an Algorithm hold together."""

import dataclasses
import math
from typing import Any, get_args, get_type_hints

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import clipping, sampling, types
from dpjax.verify.facts import Sampling


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


def sampler_of(facts):
    return dataclasses.replace(sampling.poisson(60, 12), name="mine", facts=facts)


FACTS = sampling.stated(60, 12, rates=[[0.2, 1]])["facts"]


@pytest.mark.parametrize("name", FACTS)
def test_a_sampler_needs_each_fact(name):
    rest = {key: fact for key, fact in FACTS.items() if key != name}
    with pytest.raises(
        ValueError, match=r"'mine'.*write Sampler\(\*\*dpjax.sampling.stated\("
    ) as found:
        sampler_of(rest)
    assert name not in str(found.value).partition(", not ")[0]


@pytest.mark.parametrize("facts", [{}, sampling.stated(60, 12), {**FACTS, "note": 1}])
def test_a_sampler_takes_no_other_facts(facts):
    """Nothing; all that `stated` gives; one that no card holds."""
    with pytest.raises(ValueError, match="the facts are"):
        sampler_of(facts)


@pytest.mark.parametrize("fact", [lambda step: 0.2, np.int64(1), jnp.float32(0.2)])
def test_the_facts_of_a_sampler_fit_a_card(fact):
    with pytest.raises(TypeError, match=r"'mine'.*the fact cycle is .* as JSON"):
        sampler_of({**FACTS, "cycle": fact})


def test_these_facts_are_all_that_a_card_says_of_draws():
    others = {"name", "examples", "batch_size", "neighbours"}
    read = get_type_hints(Sampling)
    assert read.keys() == set(types.FACTS) | others == set(FACTS) | others
    assert get_args(read["event"]) == tuple(types.Event)
    assert get_args(read["place"]) == (None, *types.Place)


@pytest.mark.parametrize("name", ["event", "place"])
def test_a_misspelt_fact_is_refused(name):
    """Another event would be counted as Poisson sampling."""
    with pytest.raises(ValueError, match=rf"stated\({name}='Poison'\): expected one of"):
        sampling.stated(60, 12, **{name: "Poison"})


def test_the_sampling_rate_follows_from_public_sizes():
    assert sampling.poisson(60_000, 256).sampling_rate == 256 / 60_000


@pytest.mark.parametrize("word", ["add-or-remove", "zero-out", "replace-one"])
def test_neighbours_are_words(word):
    assert types.Neighbours(word) == word
