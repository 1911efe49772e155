# SPDX-License-Identifier: Apache-2.0
"""The laws that users run pass for sound parts and raise for broken ones."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from mutation import kills
from small_mechanisms import mechanism_with

from dpjax import clipping, gradients, noise, sampling, schedules, testing, types

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


def test_a_broken_engine_is_caught(monkeypatch):
    def forgetful(loss, rule, params, rows, start):
        rows = rows._replace(mask=rows.mask.at[0].set(False))
        return gradients.ENGINES["vmap"](loss, rule, params, rows, start)

    monkeypatch.setitem(gradients.ENGINES, "forgetful", forgetful)
    case = lambda w, x: jnp.sum((w - x) ** 2), RULE, jnp.zeros(3), jnp.ones((4, 3))
    with pytest.raises(testing.LawBroken, match="engine 'forgetful'"):
        testing.assert_engines_agree(*case, engines=("forgetful",))


LINK = noise.gaussian(2.0, RULE)
LIKE = jnp.zeros(1_000_000)


def test_right_noise_passes():
    testing.assert_noise(LINK, LIKE, 2.0)
    testing.assert_noise(optax.chain(LINK, optax.scale(0.5)), LIKE, 1.0)


@pytest.mark.parametrize(
    ("chain", "found"),
    [
        (noise.gaussian(0.0, RULE), 0),
        (optax.chain(LINK, optax.scale(0.9)), 1.8),
        (noise.gaussian(2.0, clipping.flat(3.0)), 6),
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


@pytest.mark.parametrize(("leaf", "factor"), [("b", 0.0), ("c", 0.8), ("c", 1.25)])
def test_wrong_noise_of_one_leaf_is_caught(leaf, factor):
    """A leaf without noise is lost among all others, and released as it is."""
    params = {"a": jnp.zeros(1_000_000), "b": jnp.zeros(1), "c": jnp.zeros(1000)}
    testing.assert_noise(LINK, params | {"none": jnp.zeros((0, 3))}, 2.0)
    with pytest.raises(testing.LawBroken, match=f"noise of {leaf} has"):
        testing.assert_noise(wrong_in(leaf, factor), params, 2.0)


def test_a_step_with_the_noise_of_another_is_caught():
    def update(updates, state, params=None):
        inner, kept = state
        new, inner = LINK.update(updates, inner, params)
        return (new, (inner, new)) if kept is None else (kept, (inner, None))

    reused = optax.GradientTransformation(lambda p: (LINK.init(p), None), update)
    with pytest.raises(testing.LawBroken, match="steps 0 and 1 have the same noise"):
        testing.assert_noise(reused, LIKE, 2.0)


def coins(key, step, some):
    drawn = jax.random.bernoulli(jax.random.fold_in(key, step), 0.4, (60,)) & some
    indices = jnp.argsort(~drawn)
    return types.Draw(indices, drawn[indices])


DRAWS = {
    "poisson": sampling.poisson(60, 12),
    "full": sampling.full(60),
    "shuffled": sampling.shuffled(60, 12),
    "random_allocation": sampling.random_allocation(60, 5),
    "cyclic_poisson": sampling.cyclic_poisson(60, 6, cycle=2),
    "balls_in_bins": sampling.balls_in_bins(60, 12),
    "fixed": sampling.fixed(60, 12),
    "of one's own": types.Sampler(
        name="turns",
        capacity=60,
        draw=lambda key, step: coins(key, step, jnp.arange(60) % 2 == step % 2),
        claim="Poisson sampling from two public parts in turn",
        **sampling.stated(60, 12, rates=[[0.4, 1]], cycle=2),
    ),
}


def drawing(name, change):
    """A sampler that draws in another way than it states."""
    stated = DRAWS[name]
    return dataclasses.replace(stated, draw=lambda key, step: change(stated, key, step))


WRONG_DRAWS = {
    "a rate of its double": (
        drawing("poisson", lambda s, k, t: sampling.poisson(60, 24).draw(k, t)),
        "expected a rate of 0.2",
    ),
    "a fixed size": (
        drawing("poisson", lambda s, k, t: sampling.fixed(60, 12).draw(k, t)),
        "from 12 to 12 vary less",
    ),
    "padding counted": (
        drawing("poisson", lambda s, k, t: s.draw(k, t)._replace(mask=jnp.ones(60, bool))),
        "expected a rate of 0.2",
    ),
    "with replacement": (
        drawing(
            "poisson",
            lambda s, k, t: types.Draw(
                jax.random.randint(jax.random.fold_in(k, t), (12,), 0, 60), jnp.ones(12, bool)
            ),
        ),
        "holds an example twice",
    ),
    "bins afresh at each step": (
        drawing("shuffled", lambda s, k, t: sampling.fixed(60, 12).draw(k, t)),
        "twice in a cycle of 5",
    ),
    "of one's own, at each step": (
        drawing("of one's own", lambda s, k, t: coins(k, t, True)),
        "twice in a cycle of 2",
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_right_draws_pass(name):
    testing.assert_sampling(DRAWS[name])


@pytest.mark.parametrize("name", WRONG_DRAWS)
def test_wrong_draws_are_caught(name):
    sampler, found = WRONG_DRAWS[name]
    with pytest.raises(testing.LawBroken, match=found):
        testing.assert_sampling(sampler)


@pytest.mark.parametrize(
    "chain",
    [
        optax.identity(),
        optax.chain(LINK, LINK),
        optax.MultiSteps(LINK, 4).gradient_transformation(),
    ],
)
def test_a_chain_that_refuses_to_run_breaks_the_law(chain):
    with pytest.raises(testing.LawBroken, match=r"refuses to run|adds no noise"):
        testing.assert_noise(chain, LIKE, 2.0)


# What one example moves: `assert_private` ---------------------------------------------------

FULL = mechanism_with(sampling=sampling.full(4), clipping=RULE, steps=3)
PARAMS = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}


@pytest.mark.parametrize("name", ["groups", "schedule", "a padded sampler"])
def test_multipliers_of_all_kinds_are_measured(name):
    rule, multiplier = RULE, 1.3
    if name == "groups":
        rule, multiplier = clipping.per_group((0.5, 2.0), groups=2), (1.0, 3.0)
    if name == "schedule":
        multiplier = schedules.table([1.0, 2.0, 3.0])
    chain = mechanism_with(clipping=rule, noise_multiplier=multiplier).private()
    if name != "a padded sampler":
        chain = optax.chain(clipping.clip_and_sum(rule), noise.gaussian(multiplier, rule))
    testing.assert_private(chain, PARAMS)
    with pytest.raises(ValueError, match=r"assert_private\(steps=0\): expected a whole number"):
        testing.assert_private(chain, PARAMS, steps=0)


@kills(
    "testing.py",
    "if not least - tolerance <= ratio <= drawn + tolerance:",
    "if False:",
    case="trusted",
    slow=True,
)
@pytest.mark.parametrize("name", ["bare", "trusted"])
def test_what_the_links_cannot_see_is_measured(name):
    """A user may vouch for a sum that the rule does not bound."""
    tenfold = optax.stateless(
        lambda s, _: clipping.trusted_sum(jax.tree.map(lambda x: 10 * x, s.value), RULE)
    )
    links = {"bare": [], "trusted": [tenfold, noise.gaussian(1.0, RULE)]}[name]
    message = {"bare": "0 times in 3 steps", "trusted": "moves the release by 10 times"}[name]
    with pytest.raises(testing.LawBroken, match=message):
        testing.assert_private(optax.chain(clipping.clip_and_sum(RULE), *links), PARAMS)


BEFORE = {
    "scale": (optax.scale(10.0), None),
    "ones for NaN": (
        optax.stateless(lambda g, _: jax.tree.map(partial(jnp.nan_to_num, nan=1.0), g)),
        None,
    ),
    "global norm": (optax.clip_by_global_norm(1.0), "see several examples"),
    "a guard": (optax.apply_if_finite(optax.identity(), 5), "an example of NaN .*several examples"),
    "momentum": (optax.trace(0.9), "step 1.*expected 0.*earlier batches"),
}


@pytest.mark.sample(4)
@kills(
    "testing.py",
    "others = _others(params, 3)",
    "others = jax.tree.map(jnp.zeros_like, _others(params, 3))",
    case="global norm",
    slow=True,
)
@pytest.mark.parametrize("name", BEFORE)
def test_a_link_before_the_clipping_is_measured_too(name):
    """Clipping bounds a row of what it receives, whichever examples made that row."""
    link, message = BEFORE[name]
    chain = optax.chain(link, FULL.private())
    if message is None:
        testing.assert_private(chain, PARAMS)
    else:
        with pytest.raises(testing.LawBroken, match=message):
            testing.assert_private(chain, PARAMS)


def leaking(chain, leak):
    """A function around a chain that lets gradients pass beside the noise."""

    def update(gradients, state, params=None):
        updates, state = chain.update(gradients, state, params)
        return jax.tree.map(leak, updates, gradients), state

    return optax.GradientTransformation(chain.init, update)


def lengths(g):
    return jnp.linalg.norm(g.reshape(len(g), -1), axis=1)


LEAKS = {
    "the gradients": lambda u, g: u + 1e-9 * g.mean(axis=0),
    "the clipped sum": lambda u, g: u + jnp.tensordot(1 / jnp.maximum(1, lengths(g)), g, 1),
    "how many are drawn": lambda u, g: u / jnp.sum(lengths(g) != 0),
    "whether one is NaN": lambda u, g: u * jnp.isfinite(lengths(g)).all(),
    "nothing": lambda u, g: u * len(g),
}


def of_mask(scale):
    """A link behind the noise that sees which examples are drawn."""

    def update(updates, state, params=None, *, mask, **extra):
        return jax.tree.map(lambda u: u * scale(mask), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


SIZES = {
    "the drawn size": of_mask(lambda mask: 1 / mask.sum()),
    "a size that is never 0": of_mask(lambda mask: 1 / max(mask.sum(), 1)),
    "who is drawn": of_mask(lambda mask: mask[0]),
    "the expected size": of_mask(lambda mask: 1 / 4),
    "all rows": of_mask(lambda mask: 1 / mask.size),
}


@kills("testing.py", "np.arange(4) < size", "np.arange(4) < 3", case="the drawn size")
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SIZES)
def test_a_link_that_uses_the_drawn_size_is_found(name):
    """The size of a Poisson batch tells whether one example was drawn."""
    chain = optax.chain(FULL.private(), SIZES[name])
    if name in ("the expected size", "all rows"):
        testing.assert_private(chain, PARAMS)
    else:
        with pytest.raises(testing.LawBroken, match="the drawn size pass beside the noise"):
            testing.assert_private(chain, PARAMS)


@kills("testing.py", "[drawn, 1, 1, 1]", "[1, 1, 1, 1]", slow=True)
def test_a_link_before_the_clipping_that_uses_the_drawn_size_is_found():
    with pytest.raises(testing.LawBroken, match="at step 0 one example moves the release"):
        testing.assert_private(optax.chain(SIZES["the drawn size"], FULL.private()), PARAMS)


@pytest.mark.sample(3)
@kills("testing.py", "fingerprint(updates) != trees.", "fingerprint(again) != trees.", slow=True)
@pytest.mark.parametrize("name", LEAKS)
def test_gradients_beside_the_noise_are_found(name):
    chain = leaking(FULL.private(), LEAKS[name])
    if name == "nothing":
        testing.assert_private(chain, PARAMS)
    else:
        with pytest.raises(testing.LawBroken, match="beside the noise"):
            testing.assert_private(chain, PARAMS)
