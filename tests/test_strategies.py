# SPDX-License-Identifier: Apache-2.0
"""Correlated noise: sensitivities against all patterns, streams against matrices, errors."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutation import kills

from dpjax import strategies
from dpjax.strategies import apart, cycles, once, sensitivity
from dpjax.strategies.toeplitz import InverseToeplitz

LENGTHS = (1, 2, 5, 7, 8)
MAKERS = {
    "white": strategies.white,
    "tree": strategies.tree,
    "square-root": strategies.square_root,
    "cut-root": lambda steps: strategies.square_root(steps, min(3, steps)),
    "banded": lambda steps: strategies.banded(steps, min(3, steps)),
    "banded-plain": lambda steps: strategies.banded(steps, min(3, steps), normalized=False),
    "banded-overlapping": lambda steps: strategies.banded(steps, min(4, steps), apart(2)),
    "inverse": lambda steps: strategies.banded_inverse_square_root(steps, min(3, steps)),
    "buffered": lambda steps: strategies.buffered(steps, 2, apart(3)),
    "normalized": lambda n: strategies.toeplitz(n, [0.5, 0.25, 0.25][:n], normalized=True),
    "signs": lambda steps: strategies.toeplitz(steps, [1, -0.5, 0.75][:steps]),
    "gap": lambda steps: strategies.toeplitz(steps, [1.0, 0.0, 0.0, 1.0][:steps]),
    "signs-normalized": lambda n: strategies.toeplitz(n, [1, -0.5, 0.75][:n], normalized=True),
    "signs-inverse": lambda n: InverseToeplitz(name="i", steps=n, values=(1, 0.5, 0.25)[:n]),
}
PARTICIPATIONS = [once(), apart(1), apart(2, 2), apart(2), apart(3), apart(4), cycles(2), cycles(3)]
CASES = pytest.mark.parametrize("maker", MAKERS)


def patterns(steps, participation):
    """All sets of steps that one example may have."""
    for number in range(1, participation.within(steps) + 1):
        for pattern in itertools.combinations(range(steps), number):
            gaps = np.diff(pattern)
            sound = gaps == participation.separation if participation.even else True
            if np.all(sound) and np.all(gaps >= participation.separation):
                yield list(pattern)


def brute(matrix, participation):
    """The largest norm over all patterns and signs."""
    return max(
        float(np.linalg.norm(matrix[:, pattern] @ np.array([1, *signs])))
        for pattern in patterns(len(matrix), participation)
        for signs in itertools.product([1, -1], repeat=len(pattern) - 1)
    )


def by_magnitudes(matrix, participation):
    """The largest sum of magnitudes in C^T C over all patterns: what any gradients can reach."""
    gram = np.abs(matrix.T @ matrix)
    return max(float(gram[np.ix_(p, p)].sum()) for p in patterns(len(matrix), participation)) ** 0.5


def streamed(strategy, z, *, at=0):
    """The noise of the stream, step by step, compiled."""
    advance = jax.jit(strategy.next)
    memory, rows = strategy.start({"w": jnp.zeros(z.shape[1:])}), []
    for step in range(len(z)):
        noise, memory = advance({"w": jnp.asarray(z[step])}, memory, step + at)
        rows.append(noise["w"])
    return np.array(rows)


@CASES
def test_no_pattern_moves_more_than_the_sensitivity(maker):
    for steps in LENGTHS:
        strategy = MAKERS[maker](steps)
        matrix = np.linalg.inv(strategy.inverse())
        for participation in PARTICIPATIONS:
            found = sensitivity(strategy, participation)
            assert found >= brute(matrix, participation) * (1 - 1e-12)
            assert found >= by_magnitudes(matrix, participation) * (1 - 1e-12)
            # A bound that is far too large costs accuracy.
            assert found <= 1.2 * by_magnitudes(matrix, participation)


@pytest.mark.parametrize("maker", ["white", "square-root", "cut-root", "inverse", "buffered"])
def test_decreasing_coefficients_have_their_exact_sensitivity(maker):
    for steps in LENGTHS:
        strategy = MAKERS[maker](steps)
        for participation in PARTICIPATIONS:
            expected = brute(strategy.matrix(), participation)
            assert sensitivity(strategy, participation) == pytest.approx(expected, rel=1e-12)


def test_products_of_bands_bound_a_long_run():
    """Above the largest matrix too; the triangle bound would be 500."""
    long = strategies.toeplitz(5_000, np.linspace(1, 0.2, 16), normalized=True)
    assert sensitivity(long, cycles(10)) < 40


def test_the_scale_is_that_of_the_normalized_matrix():
    # Normalised, every column has norm 1, also the last one, which has one term.
    strategy = strategies.toeplitz(6, [0.5, 0.25], normalized=True)
    assert sensitivity(strategy, once()) == 1.0
    np.testing.assert_allclose(strategy.column_norms(), np.ones(6))
    np.testing.assert_allclose(np.linalg.norm(strategy.matrix(), axis=0), np.ones(6))
    np.testing.assert_allclose(strategy.matrix() @ strategy.inverse(), np.eye(6), atol=1e-12)
    plain = strategies.toeplitz(6, [0.5, 0.25])
    assert sensitivity(plain, once()) == pytest.approx(0.3125**0.5)
    assert strategy.coefficients is None


def test_a_sensitivity_is_rounded_up():
    for steps in (3, 1_000):
        strategy = strategies.banded(steps, 3, normalized=False)
        exact = sum(int(2**40 * float(c)) ** 2 for c in strategy.coefficients) / 2**80
        assert sensitivity(strategy, once()) ** 2 >= exact


@kills(
    "strategies/_streams.py",
    "(jnp.asarray(step) - 1 - jnp.arange(size)) % size + 1",
    "(jnp.asarray(step) - jnp.arange(size)) % size + 1",
    case="cut-root",
)
@kills(
    "strategies/toeplitz.py",
    "self.steps - 1 - jnp.asarray(step), 0, size",
    "self.steps - jnp.asarray(step), 0, size",
    case="normalized",
)
@CASES
@pytest.mark.sample(4)
def test_the_stream_is_the_inverse_of_the_matrix(maker):
    for steps in LENGTHS:
        strategy = MAKERS[maker](steps)
        z = np.random.default_rng(steps).normal(size=(steps, 3)).astype(np.float32)
        inverse = strategy.inverse()
        np.testing.assert_allclose(strategy.matrix() @ inverse, np.eye(steps), atol=1e-9)
        np.testing.assert_allclose(streamed(strategy, z), inverse @ z, atol=2e-5)
        norms = np.linalg.norm(strategy.matrix(), axis=0)
        np.testing.assert_allclose(strategy.column_norms(), norms, rtol=1e-9)


@pytest.mark.thorough
def test_noise_of_float32_parameters_stays_float32_beside_64_bits():
    z = jnp.ones(3, jnp.float32)
    with jax.enable_x64(True):
        for maker in ("tree", "normalized"):
            strategy = MAKERS[maker](4)
            assert strategy.next(z, strategy.start(z), 1)[0].dtype == jnp.float32, maker


@CASES
def test_facts_are_json_and_rebuild_the_strategy(maker):
    strategy = MAKERS[maker](7)
    again = strategies.from_facts(json.loads(json.dumps(strategy.facts)))
    assert again == strategy
    assert hash(again) == hash(strategy)
    np.testing.assert_array_equal(again.matrix(), strategy.matrix())


@CASES
def test_errors_are_those_of_the_matrices(maker):
    for steps in LENGTHS:
        strategy = MAKERS[maker](steps)
        scale, inverse = sensitivity(strategy, apart(3)), strategy.inverse()
        rates, momentum = np.linspace(1, 0.1, steps), 0.7
        lag = np.arange(steps)[:, None] - np.arange(steps)
        averages = np.where(lag >= 0, momentum ** np.maximum(lag, 0), 0)
        sums = np.tril(np.ones((steps, steps)))
        workloads = {
            (): sums,
            (("momentum", momentum),): sums @ averages,
            (("momentum", momentum), ("learning_rates", tuple(rates))): sums * rates @ averages,
        }
        for options, workload in workloads.items():
            squares = np.sum((workload @ inverse) ** 2, axis=1)
            expected = scale * np.sqrt([squares.mean(), squares.max()])
            found = strategy.errors(apart(3), **dict(options))
            np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_a_tree_has_a_node_count_for_each_pair_of_steps():
    for steps in (1, 4, 6, 11, 16):
        matrix = strategies.tree(steps).matrix()
        pairs = np.bitwise_xor.outer(np.arange(steps), np.arange(steps))
        apart_on = np.array([[int(pair).bit_length() for pair in row] for row in pairs])
        np.testing.assert_allclose(matrix.T @ matrix, (steps - 1).bit_length() + 1 - apart_on)


def test_a_tree_of_many_steps_is_bounded_by_its_levels():
    # Steps 0 and 5,000 are in 15 nodes each and share the largest two.
    found = sensitivity(strategies.tree(10_000), apart(5_000))
    assert found == pytest.approx((15 + 15 + 2 * 2) ** 0.5)
    assert sensitivity(strategies.tree(10_000), once()) == pytest.approx(15**0.5)


@pytest.mark.slow
def test_memory_is_at_most_the_bands_or_buffers():
    steps, zeros = 64, {"a": jnp.zeros((2, 3)), "b": jnp.zeros((), jnp.bfloat16)}
    made = {
        strategies.banded(steps, 8): 7,
        strategies.banded_inverse_square_root(steps, 8): 7,
        strategies.buffered(steps, 3): 3,
        strategies.tree(steps): 6,
        strategies.white(steps): 0,
    }
    for strategy, rows in made.items():
        assert strategy.remembers == rows
        memory = strategy.start(zeros)
        assert memory["a"].shape == (rows, 2, 3)
        assert memory["b"].dtype == jnp.float32
        noise, after = strategy.next(zeros, memory, 0)
        assert jax.tree.structure(noise) == jax.tree.structure(zeros)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, memory)


def test_a_step_after_the_run_has_no_noise():
    z = np.ones((1, 2), np.float32)
    for maker in ("banded", "inverse", "buffered", "tree", "white"):
        strategy = MAKERS[maker](7)
        assert np.all(np.isnan(streamed(strategy, z, at=7)))
        with pytest.raises(ValueError, match="at least 0 and at most 6"):
            strategy.next(z[0], strategy.start(z[0]), 7)


def test_optimised_strategies_have_less_error():
    steps, part = 200, apart(25, 8)
    errors = {
        "banded": strategies.banded(steps, 25, part).errors(part).mean,
        "buffered": strategies.buffered(steps, 3, part).errors(part).mean,
        "inverse": strategies.banded_inverse_square_root(steps, 25).errors(part).mean,
        "white": strategies.white(steps).errors(part).mean,
    }
    assert errors["banded"] < errors["inverse"] < errors["white"]
    assert errors["buffered"] < errors["white"]
    assert strategies.banded(60, 60).errors().mean < strategies.tree(60).errors().mean


def test_searches_weight_what_they_are_given():
    steps, rates = 60, np.linspace(1, 0, 61)[:-1]
    plain, heavy = strategies.banded(steps, 6), strategies.banded(steps, 6, momentum=0.9)
    assert heavy.errors(momentum=0.9).mean < plain.errors(momentum=0.9).mean
    both = strategies.banded(steps, 6, momentum=0.9, learning_rates=rates)
    options = {"momentum": 0.9, "learning_rates": rates}
    assert both.errors(**options).mean <= heavy.errors(**options).mean
    for make in (
        lambda error: strategies.banded(steps, 6, normalized=False, error=error),
        lambda error: strategies.buffered(steps, 2, error=error),
    ):
        mean, maximal = make("mean").errors(), make("maximal").errors()
        assert mean.mean < maximal.mean
        assert maximal.maximal < mean.maximal
    heavy = strategies.buffered(steps, 3, momentum=0.9).errors(momentum=0.9)
    assert heavy.mean < strategies.buffered(steps, 3).errors(momentum=0.9).mean


def test_a_search_meets_the_optimum_of_few_coefficients():
    # Two bands have one free coefficient.
    def error(second):
        return strategies.toeplitz(50, [1.0, second]).errors().mean

    found = strategies.banded(50, 2, normalized=False)
    grid = min(error(second) for second in np.linspace(0, 1, 201))
    assert found.errors().mean <= grid * (1 + 1e-9)


def test_long_runs_take_no_matrix():
    steps = 100_000
    strategy = strategies.banded_inverse_square_root(steps, 16)
    assert strategy.errors().maximal == pytest.approx(66.41, abs=0.01)
    with pytest.raises(ValueError, match="at most 4096 steps"):
        strategies.tree(steps).errors()


def test_the_square_root_has_its_closed_form_and_error():
    strategy = strategies.square_root(4)
    np.testing.assert_allclose(strategy.coefficients, [1, 1 / 2, 3 / 8, 5 / 16])
    # Both factors are the root, so the maximal error is the squared norm of its first column.
    norm = float(np.sum(strategy.coefficients**2))
    assert strategy.errors().maximal == pytest.approx(norm)


@pytest.mark.parametrize("maker", ["cut-root", "inverse", "buffered", "tree"])
def test_no_matrix_unit_rounds_the_memory_of_noise(maker):
    strategy, z = MAKERS[maker](8), {"w": jnp.ones(3)}
    program = str(jax.make_jaxpr(strategy.next)(z, strategy.start(z), 3))
    highest = program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
    assert 0 < program.count("dot_general[") == highest


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: strategies.apart(0), "separation=0"),
        (lambda: strategies.banded(4, 5), "bands=5"),
        (lambda: strategies.banded(4, 2, momentum=1.0), "from 0 to below 1"),
        (lambda: strategies.banded(4, 2, learning_rates=[1.0]), "learning_rates"),
        (lambda: strategies.banded(4, 2, error="worst"), "one of mean, maximal"),
        (lambda: strategies.toeplitz(4, [0.0, 1.0]), "the first above 0"),
        (lambda: strategies.toeplitz(1, [1.0, 1.0]), "expected 1 to 1 finite"),
        (lambda: strategies.toeplitz(2, [float("nan")]), "finite coefficients"),
        (lambda: strategies.from_facts({"kind": "fir", "steps": 2}), "one of toeplitz"),
        (lambda: strategies.banded(100, 4, 4), "participation is a int"),
    ],
)
def test_errors_teach(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


KILLS = {
    "test_no_pattern_moves_more_than_the_sensitivity": [
        kills(
            "strategies/sensitivity.py",
            "decreasing = np.maximum.accumulate(np.abs(column)[::-1])[::-1]",
            "decreasing = np.abs(column)",
            case="gap",
        ),
        kills(
            "strategies/toeplitz.py",
            "np.abs(products) / np.sqrt(squares)",
            "products / np.sqrt(squares)",
            case="signs-normalized",
        ),
        kills(
            "strategies/sensitivity.py",
            "collected *= 2",
            "collected *= 1",
            case="normalized",
            slow=True,
        ),
        kills(
            "strategies/sensitivity.py",
            "strategy.bands <= participation.separation",
            "strategy.bands <= participation.separation + 1",
            case="cut-root",
        ),
    ],
}
