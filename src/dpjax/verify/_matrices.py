# SPDX-License-Identifier: Apache-2.0
r"""How far one example moves a run with correlated noise, from only the facts on a card.

The noise of step t is row t of $C^{-1} Z$. One example with gradients of norm 1 at the steps $P$
moves $C G$ by at most $(\sum_{i, j \in P} |X_{ij}|)^{1/2}$, with $X = C^T C$. This file finds the
largest such sum over the steps that an example can be in, or a bound on it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dpjax.verify.facts import (
    Buffered,
    InverseToeplitz,
    Run,
    Sampling,
    Strategy,
    Toeplitz,
    Tree,
    Unreadable,
)

# The most steps for which C is computed as a matrix.
LARGEST = 4_096
# Where bins share more on average, random bins gain little, and claims of dpjax count no gain.
_MOST_SHARED = 0.75


def require_hidden(run: Run) -> None:
    """Raises if correlated noise was scaled to less than one example moves."""
    if run.noise is None:
        return
    planned = sum(steps for _, steps in run.multiplier_and_steps)
    several = len({multiplier for multiplier, _ in run.multiplier_and_steps}) > 1
    if planned > run.noise.steps or several or run.projections is not None:
        raise Unreadable(
            f"noise is correlated over {run.noise.steps:,} steps, and the run has {planned:,}, "
            "several multipliers or estimated norms."
        )
    least = sensitivity(run.noise, run.sampling)
    if not run.noise.sensitivity >= least * (1 - 1e-6):
        raise Unreadable(
            f"noise was scaled to {run.noise.sensitivity:.6g}, and one example moves {least:.6g}."
        )


def is_amplified(noise: Strategy, sampling: Sampling) -> bool:
    """Whether the columns of two steps of one example have no row in common."""
    # An example takes part only at every ``cycle``-th step, and step t moves rows t to
    # t + bands - 1. A run of one cycle is always amplified, because no matrix has more bands than
    # steps.
    return sampling.place == "coin" and bands(noise) <= sampling.cycle


def bands(noise: Strategy) -> int:
    """An upper bound on the diagonals of C from the main one to the last that is not zero."""
    if isinstance(noise, Toeplitz):
        return len(noise.values)
    if isinstance(noise, InverseToeplitz) and len(noise.values) == 1:
        return 1
    return noise.steps


def sensitivity(noise: Strategy, sampling: Sampling) -> float:
    """The least scale of the noise that hides an example, in bounds of one step."""
    cycle = sampling.cycle
    cycles = -(-noise.steps // cycle)
    if is_amplified(noise, sampling):  # one participation: the longest column
        return float(column_norms(noise).max())
    match sampling.place:
        case "same" | "random" | "coin":
            return math.sqrt(largest(noise, cycles, cycle))
        case "any":  # the end of a cycle and the start of the next can meet
            return math.sqrt(largest(noise, cycles, 1))
    raise Unreadable(
        f"noise is correlated, and no sensitivity is known for {sampling.name} batches."
    )


def largest(noise: Strategy, most: int, apart: int) -> float:
    r"""The largest $\sum_{i, j \in P} |X_{ij}|$ over the patterns P, or a bound on it.

    A pattern is the steps that one example is in, at most ``most`` of them: any steps if ``apart``
    is 1, and otherwise one of the first ``apart`` steps with every ``apart``-th step after it.
    """
    norms = column_norms(noise)
    if bands(noise) <= apart:  # no two columns of a pattern share a row: X is diagonal on it
        return largest_pattern_sum(norms**2, most, apart)
    # An entry of X is at most the product of the norms of its two columns, so the sum is at most
    # the square of the sum of the norms.
    bound = largest_pattern_sum(norms, most, apart) ** 2
    if isinstance(noise, Tree):
        bound = min(bound, by_nodes(noise, most, apart))
        if noise.steps > LARGEST:
            return bound
    elif not is_normalized(noise):
        # C is Toeplitz, because its columns were not normalized. If its first column falls, the
        # pattern 0, apart, 2 apart, ... has the largest sum. Otherwise the least falling column
        # above |column| gives a bound.
        column = np.abs(first_column(noise))
        falling = np.maximum.accumulate(column[::-1])[::-1]
        bound = min(bound, of_first_pattern(falling, most, apart))
        if np.all(falling == column):
            return bound
    if noise.steps > LARGEST:
        # The bound so far can be far above the sum, so noise below it can still be enough.
        raise Unreadable(
            f"columns of {noise.steps:,} steps meet and do not fall: too many to compute."
        )
    return by_matrix(noise, most, apart, bound)


def by_matrix(noise: Strategy, most: int, apart: int, bound: float) -> float:
    """As `largest`, from all entries of X; ``bound`` is another upper bound."""
    c = matrix(noise)
    x = np.abs(c.T @ c)
    if apart > 1:
        return max(float(x[first::apart, first::apart].sum()) for first in range(apart))
    # A step collects at most its own entry and the largest others of its row.
    squares = np.diagonal(x).copy()
    np.fill_diagonal(x, 0)
    others = np.sort(x, axis=1)[:, noise.steps - most + 1 :].sum(axis=1)
    return min(bound, largest_pattern_sum(squares + others, most, apart))


def largest_pattern_sum(values: np.ndarray, most: int, apart: int) -> float:
    """The largest sum of the values, ``[steps]``, at the steps of a pattern as in `largest`."""
    if apart == 1:
        return float(np.sort(values)[-most:].sum())
    first_steps = np.arange(len(values)) % apart  # of the pattern of each step
    return float(np.bincount(first_steps, values).max())


def by_nodes(tree: Tree, most: int, apart: int) -> float:
    """The sum of |X| if every node above a step has as many steps of the pattern as it can."""
    total = 0
    for level in range(levels(tree)):
        size = min(2**level, tree.steps)
        total += most * min(most, -(-size // apart))
    return float(total)


def of_first_pattern(column: np.ndarray, most: int, apart: int) -> float:
    """The squared norm of the sum of the columns at steps 0, ``apart``, 2 ``apart``, ..."""
    steps = len(column)
    total = np.zeros(steps)
    for number in range(most):
        total[number * apart :] += column[: steps - number * apart]
    return float(total @ total)


def levels(tree: Tree) -> int:
    """The levels of a tree, from the steps to the root."""
    return (tree.steps - 1).bit_length() + 1


def is_normalized(noise: Strategy) -> bool:
    """Whether the columns of a Toeplitz matrix are divided by their norms."""
    return isinstance(noise, Toeplitz) and noise.normalized


def column_norms(noise: Strategy) -> np.ndarray:
    """The norms of the columns of C, ``[steps]``."""
    if isinstance(noise, Tree):
        return np.full(noise.steps, math.sqrt(levels(noise)))
    column = first_column(noise)
    if is_normalized(noise):
        return np.ones(noise.steps)
    squares = np.cumsum(column**2)[::-1]  # the last columns end with the run
    return np.sqrt(squares)


def matrix(noise: Strategy) -> np.ndarray:
    """The lower triangular matrix C, ``[steps, steps]``."""
    steps = noise.steps
    if isinstance(noise, Tree):
        # X_ij = (C^T C)_ij is the number of nodes that have both steps, i and j, below them.
        x = np.zeros((steps, steps))
        for level in range(levels(noise)):
            nodes = np.arange(steps) >> level
            x += np.equal.outer(nodes, nodes)
        # Cholesky factors a matrix as L L^T with a lower triangular L. C^T is upper triangular, and
        # lower triangular with both axes reversed, so it is the L of the reversed X.
        reversed_l = np.linalg.cholesky(x[::-1, ::-1])
        return reversed_l[::-1, ::-1].T
    column = first_column(noise)
    c = np.zeros((steps, steps))
    for step in range(steps):
        c[step:, step] = column[: steps - step]
    if is_normalized(noise):
        c = c / np.linalg.norm(c, axis=0)
    return c


def first_column(noise: Strategy) -> np.ndarray:
    r"""The first column $c$ of a Toeplitz C, ``[steps]``.

    With scales $s_i$ and decays $d_i$, buffered noise has $c_0 = 1$ and
    $c_k = \sum_i s_i d_i^{k - 1}$. If the first column $v$ of $C^{-1}$ is given, $v_0 c_0 = 1$ and
    $\sum_{i=0}^k v_i c_{k - i} = 0$ for each later k.
    """
    steps = noise.steps
    if isinstance(noise, Buffered):
        powers = np.array(noise.decays)[:, None] ** np.arange(steps - 1)  # [decays, steps - 1]
        return np.append(1.0, np.array(noise.scales) @ powers)
    assert isinstance(noise, Toeplitz | InverseToeplitz)
    values = np.array(noise.values)
    if not values[0] > 0:
        raise Unreadable("noise is correlated by a matrix without an inverse: its diagonal has 0.")
    if isinstance(noise, Toeplitz):
        return np.pad(values, (0, steps - len(values)))
    # The values are v, without the zeros that end it.
    column = np.zeros(steps)
    column[0] = 1 / values[0]
    for k in range(1, steps):
        later_values = values[1 : k + 1]  # v_1, v_2, ..., at most v_k
        earlier = column[k - len(later_values) : k][::-1]  # c_{k-1}, c_{k-2}, ...
        column[k] = -(later_values @ earlier) / values[0]
    return column


def change_by_bins(run: Run, orders: np.ndarray) -> np.ndarray:
    r"""How much the divergences of a run change because each example is in an unknown bin.

    The answer, ``[orders]``, is at most 0. The run was counted as one Gaussian with multiplier z,
    whose divergence at order $\alpha$ is $\alpha / (2 z^2)$, as if an attacker knew the bin.

    Bin b of n is the steps b, b + n, b + 2 n, ... An example in it moves row t of $C G$ by at most
    $M_{tb}$, the sum of $|C_{ts}|$ over these steps s. Let $K = M^T M / \sigma^2$, with noise of
    standard deviation $\sigma$, and let $E_b$ be the mean over a random bin b. The divergence of a
    run with the example from one without it, and the reverse one, are at most (Hölder; Jensen)

    $$ \frac1{\alpha - 1} \log \prod_{j=1}^{\alpha - 1} \max_a E_b\, e^{j K_{ab}}, \qquad
       \frac12 \Bigl( \max_{ab} K_{ab} + (\alpha - 1) \max_a E_b K_{ab} \Bigr) $$

    The first is for whole orders. Its logarithm is convex, so a line bounds it between two of them.
    """
    noise: Any = run.noise
    bins = run.sampling.cycle
    multiplier = min(run.multiplier_and_steps)[0]  # `require_hidden` refuses several
    no_change = np.zeros_like(orders)
    # Only random bins are unknown. A larger matrix takes too long, and with a multiplier of 0 there
    # is no noise that could hide the bin.
    if run.sampling.place != "random" or noise.steps > LARGEST or multiplier <= 0:
        return no_change
    entries = np.abs(matrix(noise))
    moves = np.array([entries[:, first::bins].sum(axis=1) for first in range(bins)])  # M^T
    # K for multiplier 1, [bins, bins]: the noise has sigma = multiplier * sensitivity.
    gram = moves @ moves.T / noise.sensitivity**2
    # The sorted entries of each row of K are at most these: [bins], in ascending order. So for any
    # a, the mean over b of a growing function of K_ab is at most its mean over these.
    row_bound = np.sort(gram, axis=1).max(axis=0)
    if np.mean(row_bound) > _MOST_SHARED:
        return no_change
    row_bound = row_bound / multiplier**2
    # A bin of 32 random bits, modulo the number of bins, is a little likelier than 1 / bins.
    bin_probability = (1 + bins / 2**32) / bins
    log_products = [0.0]  # the logarithms of the product at whole orders, from 1, where it is empty
    for j in range(1, math.ceil(max(orders))):
        top = j * row_bound[-1]  # the exponential of this can overflow, so it is taken out
        log_mean = top + math.log(bin_probability * np.exp(j * row_bound - top).sum())
        log_products.append(log_products[-1] + log_mean)
    whole_orders = 1 + np.arange(len(log_products))
    forward = np.interp(orders, whole_orders, log_products) / (orders - 1)
    reverse = (row_bound[-1] + (orders - 1) * bin_probability * row_bound.sum()) / 2
    gaussian = orders / (2 * multiplier**2)
    return np.minimum(np.maximum(forward, reverse) - gaussian, 0.0)
