# SPDX-License-Identifier: Apache-2.0
"""The book-keeping engine against the definition, on every way a parameter can enter."""

import jax
import jax.numpy as jnp
import pytest
from ghost_cases import CASES, array, assert_ghost_agrees, case, squared
from jax.extend.core import Primitive, primitives
from mutation import kills

from dpjax import clipping
from dpjax.gradients import _platforms
from dpjax.gradients._bookkeeping.ghost import backward
from dpjax.gradients._bookkeeping.primitives import PRIMITIVES
from dpjax.gradients._xla_cpu.primitives import FAST
from dpjax.gradients.traced import Traced

# `make test` runs a few of them.
FEW = pytest.param(["tied weights", "embedding", "weight decay", "conv strided"], id="few")
MORE = pytest.param(["normalised columns", "layers of a scan, a shared bias"], id="more")


GROUPS = [pytest.param(CASES[x], marks=pytest.mark.slow, id=x) for x in CASES]


def together(names):
    """The sum of several losses, of their own parameters and examples."""
    losses, params, batches = zip(*map(case, names), strict=True)

    def loss(params, examples):
        return sum(of_case(w, x) for of_case, w, x in zip(losses, params, examples, strict=True))

    return loss, params, batches


def by_leaf(params, bound=0.1):
    """With it every norm of every leaf counts, and so every sum."""
    return clipping.grouped(bound, clipping.by_leaf(params))


def assert_is_the_definition(names, rule_of=by_leaf, tolerance=2e-5):
    loss, params, batch = together(names)
    options = {"mask": jnp.array([1, 1, 0, 1, 1]), "microbatch_sizes": (2,), "tolerance": tolerance}
    assert_ghost_agrees(loss, params, batch, rule_of(params), **options)


@pytest.mark.parametrize("names", [FEW, MORE, *GROUPS])
def test_ghost_is_the_definition(names):
    assert_is_the_definition(names)


@pytest.mark.thorough
@pytest.mark.parametrize("names", [["embedding", "conv strided"], *GROUPS])
def test_the_forms_of_accelerators_are_the_definition(names):
    with _platforms.traced_for(_platforms.ACCELERATOR):
        assert_is_the_definition(names, tolerance=5e-4)


@pytest.mark.slow
def test_a_change_of_sign_counts_between_sites():
    names = ["two minus a parameter", "a parameter and its negative", "a negative table"]
    assert_is_the_definition(names, lambda params: clipping.flat(0.1))


def twice(w, x):
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    return layer(layer(x, w["a"]), w["b"])


REGIONS = {
    "two regions": twice,
    "a region in a region": lambda w, x: jax.checkpoint(twice)(w, jnp.sin(x)),
    "a view leaves": lambda w, x: x @ jax.checkpoint(lambda w: w["a"].T @ w["b"])(w),
    "a leaf meets the data": lambda w, x: jax.checkpoint(jnp.maximum)(x, w["a"][0]) @ w["b"],
    "no leaf enters": lambda w, x: jax.checkpoint(jnp.sin)(x) @ w["a"] + w["b"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.sample(1)
def test_what_a_rematerialised_region_holds_is_found(name):
    params = {"a": array(4, 4), "b": array(4, 4, seed=1)}
    loss = squared(lambda w, x: REGIONS[name](w, x))
    assert_ghost_agrees(loss, params, array(5, 4, seed=2))
    # No leaf is materialised but the one that meets the data in a maximum.
    materialised = backward(Traced(loss), params, array(5, 4, seed=2)).gradients
    assert set(materialised) == ({0} if name == "a leaf meets the data" else set())


def test_tables_name_primitives_that_exist():
    """A name that no JAX has is never found, so its row does nothing."""
    known = {x.name for x in vars(primitives).values() if isinstance(x, Primitive)}
    # JAX 0.11 no longer has the first; JAX 0.12 made the others, and does not export the last.
    new = {"closed_call", "log2", "one_minus_square", "polynomial", "xla_metadata_call"}
    assert {*PRIMITIVES, *FAST, "remat2"} - known <= new


KILLS = {
    "test_ghost_is_the_definition": [
        kills(
            "gradients/_bookkeeping/ghost.py",
            "for entry in entries})",
            "for entry in entries[:1]})",
            case="uses",
            slow=True,
        ),
        kills(
            "gradients/_bookkeeping/leaf_sums.py",
            "total + of_site",
            "of_site",
            case="uses",
            slow=True,
        ),
        kills(
            "gradients/_bookkeeping/leaf_sums.py",
            ".at[indices].add",
            ".at[indices].set",
            case="tables",
            slow=True,
        ),
        kills(
            "gradients/_bookkeeping/common.py",
            "total + 2 * sum(_cross",
            "total + sum(_cross",
            case="numbers",
            slow=True,
        ),
    ],
}
