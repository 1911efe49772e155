# SPDX-License-Identifier: Apache-2.0
"""Correlated noise: sensitivities against all patterns, streams against matrices, errors."""

from dpjax import strategies


def test_a_strategy_is_its_facts():
    strategy = strategies.tree(5)
    assert strategies.from_facts(strategy.facts) == strategy
