# SPDX-License-Identifier: Apache-2.0
"""Errors of strategies that papers and their authors' libraries print, beside ours.

The table of docs/pages/correlated.md is this file's. Sources: the tests of jax_privacy
(``tests/matrix_factorization``, of McMahan et al. 2024 and McKenna 2024), and theorems.
"""

import math
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from dpjax import strategies
from dpjax.strategies._series import square_root
from dpjax.strategies.buffered import Buffered

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "pages" / "correlated.md"
JAX_PRIVACY = "jax_privacy"
# jax_privacy, buffered_toeplitz_test: the best two buffers for 100,000 steps by the maximal error.
TWO = Buffered(
    name="printed",
    steps=100_000,
    scales=(0.0122853238, 0.1878393665),
    decays=(0.9999528892, 0.9857068667),
)


class Figure(NamedTuple):
    """A printed figure, and how we find it."""

    words: str
    printed: float
    here: Callable[[], float]
    source: str
    most: bool = False  # whether the source prints an upper bound
    digits: float = 1e-6


def bound(steps):
    """Mathias 1993, Corollary 3.5: the least maximal error is not above this."""
    return 1 + math.log(steps) / math.pi


def to_bound(steps, buffers):
    """The maximal error of buffers that were searched for it, relative to the bound."""
    return strategies.buffered(steps, buffers, error="maximal").errors().maximal / bound(steps)


def figures():
    """All of them; the last ones are ratios that jax_privacy holds its own search to."""
    rows = [
        Figure(
            "square root, 2 steps: largest variance",
            1.25 * 1.25,
            lambda: strategies.square_root(2).errors().maximal ** 2,
            JAX_PRIVACY,
        ),
        Figure(
            "tree, 2 steps: largest variance",
            2 * 2 / 3,
            lambda: strategies.tree(2).errors().maximal ** 2,
            JAX_PRIVACY,
        ),
        Figure(
            "2 buffers, 100,000 steps: largest deviation",
            TWO.errors().maximal,
            lambda: strategies.buffered(100_000, 2, error="maximal").errors().maximal,
            JAX_PRIVACY,
        ),
    ]
    for steps, buffers, most in (
        (10, 1, 1.04),
        (100, 2, 1.03),
        (100, 3, 1.03),
        (1_000, 2, 1.04),
        (1_000, 3, 1.03),
        (10_000, 1, 1.45),
        (10_000, 3, 1.03),
        (10_000, 4, 1.03),
        (100_000, 2, 1.16),
        (100_000, 4, 1.03),
        (1_000_000, 5, 1.05),
    ):
        words = f"{buffers} buffer{'s' * (buffers > 1)}, {steps:,} steps: relative to the bound"
        ratio = lambda n=steps, d=buffers: to_bound(n, d)  # noqa: E731
        rows.append(Figure(words, most, ratio, JAX_PRIVACY, most=True))
    return rows


FIGURES = figures()


def row(figure, here):
    """A row of the page."""
    printed = f"at most {figure.printed:.2f}" if figure.most else f"{figure.printed:.4f}"
    return f"| {figure.words} | {printed} | {here:.{3 if figure.most else 4}f} | {figure.source} |"


@pytest.mark.parametrize(
    "figure",
    [
        pytest.param(each, id=each.words, marks=pytest.mark.slow if "000,000" in each.words else ())
        for each in FIGURES
    ],
)
def test_printed_errors_are_met(figure):
    here = figure.here()
    assert row(figure, here) in PAGE.read_text(), row(figure, here)
    if figure.most:
        assert 1 <= here <= figure.printed
    else:
        assert here == pytest.approx(figure.printed, rel=figure.digits)


def test_the_printed_buffers_are_found():
    found = strategies.buffered(100_000, 2, error="maximal")
    assert isinstance(found, Buffered)
    np.testing.assert_allclose(found.scales, TWO.scales, rtol=1e-5)
    np.testing.assert_allclose(found.decays, TWO.decays, rtol=1e-5)


@pytest.mark.parametrize("steps", [8, 64, 1_000])
def test_no_strategy_is_below_the_proved_least_error(steps):
    """Matousek, Nikolov and Talwar 2020: no factorisation of prefix sums has less maximal error."""
    least = (2 + math.log((2 * steps + 1) / 3)) / math.pi
    made = [
        strategies.tree(steps),
        strategies.square_root(steps),
        strategies.toeplitz(steps, square_root(steps), normalized=True),
        strategies.buffered(steps, 4, error="maximal"),
        strategies.banded(steps, min(steps, 64), error="maximal"),
        strategies.banded_inverse_square_root(steps, min(steps, 64)),
    ]
    for strategy in made:
        assert least <= strategy.errors().maximal, strategy.name
    assert min(strategy.errors().maximal for strategy in made) <= bound(steps)


def test_the_least_mean_error_approaches_its_limit():
    r"""Henzinger, Kalinin, Upadhyay 2025: $\ln(n) / \pi$ and 0.748 (mean), 0.846 (largest)."""
    errors = strategies.toeplitz(4_000, square_root(4_000), normalized=True).errors()
    assert errors.mean - math.log(4_000) / math.pi == pytest.approx(0.748, abs=0.035)
    assert errors.maximal - math.log(4_000) / math.pi == pytest.approx(0.846, abs=0.03)
