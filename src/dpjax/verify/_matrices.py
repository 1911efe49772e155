# SPDX-License-Identifier: Apache-2.0
r"""How far one example moves a run with correlated noise, from the facts on a card alone.

The noise of step t is row t of $C^{-1} Z$. One example with gradients of norm 1 at the steps $P$
moves $C G$ by at most $(\sum_{i, j \in P} |X_{ij}|)^{1/2}$, with $X = C^T C$. This file finds the
largest such sum over the steps that an example can be in, or a bound on it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dpjax.verify.facts import Run, Sampling, Unreadable

LARGEST = 4_096  # steps for which the whole of C is written down


def require_hidden(run: Run) -> None:
    """Refuses correlated noise that was scaled to less than one example moves."""
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


def is_amplified(noise: Any, sampling: Sampling) -> bool:
    """Whether the columns of two steps of one example have no row in common."""
    # An example takes part at every ``cycle``-th step alone, and step t moves rows t to
    # t + bands - 1. No matrix has more bands than steps: a run of one cycle is always amplified.
    return sampling.place == "coin" and bands(noise) <= sampling.cycle


def bands(noise: Any) -> int:
    """How many diagonals of C, from the main one on, hold all its numbers; or at least as many."""
    if noise.kind == "toeplitz" or (noise.kind == "inverse_toeplitz" and len(noise.values) == 1):
        return len(noise.values)
    return noise.steps


def sensitivity(noise: Any, sampling: Sampling) -> float:
    """What the noise must be scaled to, in bounds of one step."""
    steps, cycle = noise.steps, sampling.cycle
    cycles = -(-steps // cycle)
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


def largest(noise: Any, most: int, apart: int) -> float:
    """The largest sum of |X| over ``most`` steps, any or every ``apart``-th, or a bound on it."""
    steps = noise.steps

    def chosen(values: np.ndarray) -> float:
        if apart == 1:
            return float(np.sort(values)[-most:].sum())
        return float(np.bincount(np.arange(steps) % apart, values).max())

    norms = column_norms(noise)
    if bands(noise) <= apart:  # no two columns meet
        return chosen(norms**2)
    known = chosen(norms) ** 2
    if noise.kind == "tree":  # as many of the example's steps as fit below a node, for each step
        sizes = [min(2**level, steps) for level in range(levels(noise))]
        known = min(known, float(sum(most * min(most, -(-size // apart)) for size in sizes)))
    elif not getattr(noise, "normalized", False):
        # Of columns that fall, the first pattern is the worst; others are below such columns.
        column = np.abs(first_column(noise))
        falling = np.maximum.accumulate(column[::-1])[::-1]
        total = np.zeros(steps)
        for number in range(most):
            total[number * apart :] += falling[: steps - number * apart]
        known = min(known, float(total @ total))
        if np.all(falling == column):
            return known
    if steps > LARGEST:
        if noise.kind == "tree":
            return known
        raise Unreadable(f"columns of {steps:,} steps meet and do not fall: too many to compute.")
    c = matrix(noise)
    x = np.abs(c.T @ c)
    if apart > 1:
        return max(float(x[first::apart, first::apart].sum()) for first in range(apart))
    # A step collects at most its own entry and the largest others of its row.
    squares = np.diagonal(x).copy()
    np.fill_diagonal(x, 0)
    return min(known, chosen(squares + np.sort(x, axis=1)[:, steps - most + 1 :].sum(axis=1)))


def levels(tree: Any) -> int:
    """The levels of a tree, from the steps to the root."""
    return (tree.steps - 1).bit_length() + 1


def column_norms(noise: Any) -> np.ndarray:
    """The norms of the columns of C, ``[steps]``."""
    if noise.kind == "tree":
        return np.full(noise.steps, math.sqrt(levels(noise)))
    squares = np.cumsum(first_column(noise) ** 2)[::-1]  # the last columns end with the run
    return np.ones(noise.steps) if getattr(noise, "normalized", False) else np.sqrt(squares)


def matrix(noise: Any) -> np.ndarray:
    """C itself, ``[steps, steps]``."""
    steps = np.arange(noise.steps)
    if noise.kind == "tree":
        # X counts the nodes above both of two steps; C is its Cholesky factor from the last step.
        above = [np.equal.outer(steps >> level, steps >> level) for level in range(levels(noise))]
        common = np.sum(above, axis=0) * 1.0
        return np.linalg.cholesky(common[::-1, ::-1])[::-1, ::-1].T
    c, column = np.zeros((noise.steps, noise.steps)), first_column(noise)
    for step in steps:
        c[step:, step] = column[: noise.steps - step]
    return c / np.linalg.norm(c, axis=0) if getattr(noise, "normalized", False) else c


def first_column(noise: Any) -> np.ndarray:
    """The first column of a Toeplitz C, ``[steps]``."""
    steps = noise.steps
    if noise.kind == "buffered":
        powers = np.array(noise.decays)[:, None] ** np.arange(steps - 1)
        return np.append(1.0, np.array(noise.scales) @ powers)
    values = np.array(noise.values)
    if not values[0] > 0:  # noise in its proportion would be none
        raise Unreadable("noise is correlated by a matrix without an inverse: its diagonal has 0.")
    if noise.kind == "toeplitz":
        return np.pad(values, (0, steps - len(values)))
    column = np.eye(1, steps)[0] / values[0]  # of the inverse series, by long division
    for k in range(1, steps):
        reach = values[1 : k + 1]
        column[k] = -(reach @ column[k - len(reach) : k][::-1]) / values[0]
    return column


def saved(run: Run, orders: np.ndarray) -> np.ndarray:
    r"""How far the divergence is below that of a Gaussian, as an example hides among random bins.

    An example in bin b moves row t of $C G$ by at most $m_{tb}$, the sum of $|C_{ts}|$ over the
    steps of the bin. With $K = M^T M$ over the variance, the moment of the mixture of bins against
    none is at most $\prod_j \max_a E_b e^{j K_{ab}}$ for a whole order (Hölder), and that of none
    against the mixture is at most a Gaussian's (Jensen).
    """
    noise: Any = run.noise
    bins, multiplier = run.sampling.cycle, min(run.multiplier_and_steps)[0]
    if run.sampling.place != "random" or noise.steps > LARGEST or multiplier <= 0:
        return 0 * orders
    sizes = np.abs(matrix(noise))
    moves = np.array([sizes[:, first::bins].sum(axis=1) for first in range(bins)])
    shared = moves @ moves.T / noise.sensitivity**2
    shared = np.sort(shared, axis=1).max(axis=0)  # at least the sorted entries of every row
    if np.mean(shared) > 0.75:  # the card does not count what is saved here
        return 0 * orders
    # A bin of 32 random bits, modulo the number of bins, is this much likelier than 1 / bins.
    odds, shared = (1 + bins / 2**32) / bins, shared / multiplier**2
    moments, log_moment = [0.0], 0.0
    for j in range(1, math.ceil(max(orders))):
        top = j * shared[-1]
        log_moment += top + math.log(odds * np.exp(j * shared - top).sum())
        moments.append(log_moment)
    leaves = np.interp(orders, 1 + np.arange(len(moments)), moments) / (orders - 1)
    joins = (shared[-1] + (orders - 1) * odds * shared.sum()) / 2
    return np.minimum(np.maximum(leaves, joins) - orders / (2 * multiplier**2), 0.0)
