# SPDX-License-Identifier: Apache-2.0
"""The laws that users run: they pass on what is sound and break on what is not."""

import jax
import jax.numpy as jnp
import optax
import pytest

from dpjax import clipping, gradients, noise, testing

GRADIENTS = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4], [30.0, 0.0]])}


def test_influence_is_the_largest_move():
    assert testing.influence(clipping.flat(2.0), GRADIENTS) == pytest.approx(2.0)
    assert testing.influence(clipping.flat(100.0), GRADIENTS) == pytest.approx(30.0)
    assert testing.influence(clipping.flat(1.0), {"w": jnp.zeros((0, 2))}) == 0.0


def test_a_broken_rule_is_caught():
    rule = clipping.flat(1.0)
    testing.assert_sensitivity(rule, GRADIENTS)
    object.__setattr__(rule, "factors", jnp.ones_like)
    with pytest.raises(testing.LawBroken, match="moved the sum by 30"):
        testing.assert_sensitivity(rule, GRADIENTS)


def test_a_broken_engine_is_caught(monkeypatch):
    def forgetful(loss, rule, params, rows, start):
        rows = rows._replace(mask=rows.mask.at[0].set(False))
        return gradients.ENGINES["vmap"](loss, rule, params, rows, start)

    monkeypatch.setitem(gradients.ENGINES, "forgetful", forgetful)
    with pytest.raises(testing.LawBroken, match="engine 'forgetful'"):
        testing.assert_engines_agree(
            lambda w, x: jnp.sum((w - x) ** 2),
            clipping.flat(1.0),
            jnp.zeros(3),
            jnp.ones((4, 3)),
            engines=("forgetful",),
        )


def test_wrong_noise_is_caught():
    like = jnp.zeros(1_000_000)
    for factor, sound in [(1.0, True), (0.9, False), (1.1, False), (0.0, False)]:
        link = optax.chain(
            noise.gaussian(2.0, clipping.flat(1.0), key=jax.random.key(0)), optax.scale(factor)
        )
        if sound:
            testing.assert_noise(link, like, 2.0)
        else:
            with pytest.raises(testing.LawBroken, match="expected 2"):
                testing.assert_noise(link, like, 2.0)
