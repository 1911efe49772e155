# SPDX-License-Identifier: Apache-2.0
"""The laws that users run pass for sound parts and raise for broken ones."""

import jax
import jax.numpy as jnp
import optax
import pytest
from mutation import kills

from dpjax import clipping, gradients, noise, testing

GRADIENTS = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4], [30.0, 0.0]])}


def test_influence_is_the_largest_move():
    assert testing.influence(clipping.flat(2.0), GRADIENTS) == pytest.approx(2.0)
    assert testing.influence(clipping.flat(100.0), GRADIENTS) == pytest.approx(30.0)
    assert testing.influence(clipping.flat(1.0), {"w": jnp.zeros((0, 2))}) == 0.0


RULE = clipping.flat(1.0)


def test_a_broken_rule_is_caught():
    rule = clipping.flat(1.0)
    testing.assert_sensitivity(rule, GRADIENTS)
    object.__setattr__(rule, "factors", jnp.ones_like)
    with pytest.raises(testing.LawBroken, match="moved the sum by 30"):
        testing.assert_sensitivity(rule, GRADIENTS)


def test_a_chain_may_draw_its_key_where_it_begins():
    def chain(learning_rate):
        link = noise.gaussian(1.0, RULE, key=noise.secret_key())
        return optax.chain(clipping.clip_and_sum(RULE), link, optax.sgd(learning_rate))

    testing.assert_private(optax.inject_hyperparams(chain)(learning_rate=0.1), jnp.zeros(5))


def test_a_broken_engine_is_caught(monkeypatch):
    def forgetful(loss, rule, params, rows, start):
        rows = rows._replace(mask=rows.mask.at[0].set(False))
        return gradients.ENGINES["vmap"](loss, rule, params, rows, start)

    monkeypatch.setitem(gradients.ENGINES, "forgetful", forgetful)
    case = lambda w, x: jnp.sum((w - x) ** 2), RULE, jnp.zeros(3), jnp.ones((4, 3))
    with pytest.raises(testing.LawBroken, match="engine 'forgetful'"):
        testing.assert_engines_agree(*case, engines=("forgetful",))


LINK = noise.gaussian(2.0, RULE, key=jax.random.key(0))
LIKE = jnp.zeros(1_000_000)


def test_right_noise_passes():
    testing.assert_noise(LINK, LIKE, 2.0)
    testing.assert_noise(optax.chain(LINK, optax.scale(0.5)), LIKE, 1.0)


@pytest.mark.parametrize(
    ("chain", "found"),
    [
        (optax.identity(), 0),
        (noise.gaussian(0.0, RULE, key=jax.random.key(0)), 0),
        (optax.chain(LINK, optax.scale(0.9)), 1.8),
        (optax.chain(LINK, optax.scale(1.1)), 2.2),
        (noise.gaussian(2.0, clipping.flat(3.0), key=jax.random.key(0)), 6),
        (optax.chain(LINK, optax.apply_every(4)), 0),
    ],
)
def test_wrong_noise_is_caught(chain, found):
    """The mistakes that the docstring of `assert_noise` lists."""
    with pytest.raises(testing.LawBroken, match="expected 2") as error:
        testing.assert_noise(chain, LIKE, 2.0)
    measured = float(str(error.value).split("deviation ")[1].split(",")[0])
    assert measured == pytest.approx(found, rel=0.01)


def wrong_in(leaf, factor):
    """A chain that scales the noise of one leaf."""

    def scaled(updates, _):
        return {name: x * (factor if name == leaf else 1.0) for name, x in updates.items()}

    return optax.chain(LINK, optax.stateless(scaled))


@kills("testing.py", "if size := np.size(leaf):", "if size := 0:", case="b-0.0", slow=True)
@kills("testing.py", "min(least, 1 - tolerance)", "0.0", case="c-0.8", slow=True)
@kills("testing.py", "max(most, 1 + tolerance)", "9.0", case="c-1.25", slow=True)
@pytest.mark.parametrize(("leaf", "factor"), [("b", 0.0), ("c", 0.0), ("c", 0.8), ("c", 1.25)])
def test_wrong_noise_of_one_leaf_is_caught(leaf, factor):
    """A leaf without noise is lost among all others, and released as it is."""
    params = {"a": jnp.zeros(1_000_000), "b": jnp.zeros(1), "c": jnp.zeros(1000)}
    testing.assert_noise(LINK, params | {"none": jnp.zeros((0, 3))}, 2.0)
    with pytest.raises(testing.LawBroken, match=f"noise of {leaf} has"):
        testing.assert_noise(wrong_in(leaf, factor), params, 2.0)


@pytest.mark.parametrize(
    "chain", [optax.chain(LINK, LINK), optax.MultiSteps(LINK, 4).gradient_transformation()]
)
def test_a_chain_that_refuses_to_run_breaks_the_law(chain):
    with pytest.raises(testing.LawBroken, match="the chain refuses to run"):
        testing.assert_noise(chain, LIKE, 2.0)
