# SPDX-License-Identifier: Apache-2.0
r"""How far one example moves a run with correlated noise, from the facts on a card alone.

The noise of step t is row t of $C^{-1} Z$. One example with gradients of norm 1 at the steps $P$
moves $C G$ by at most $(\sum_{i, j \in P} |X_{ij}|)^{1/2}$, with $X = C^T C$. This file finds the
steps that an example can be in, and the largest such sum over them, or a bound on it.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

LARGEST = 4_096  # steps for which the whole of X, or as many numbers of it, is written down


class Unreadable(Exception):
    """The card cannot be checked, with the reason in one sentence."""


def epoch(sampling: dict[str, Any]) -> int:
    """In how many steps in turn an example is at most once."""
    if sampling["name"] == "cyclic_poisson":
        return int(sampling["cycle"])
    once = sampling["name"] in ("shuffled", "curriculum", "balls_in_bins")
    return int(sampling["examples"] // sampling["batch_size"]) if once else 1


def is_amplified(noise: dict[str, Any], sampling: dict[str, Any]) -> bool:
    """Whether the columns of two steps of one example have no row in common."""
    # An example takes part at every ``cycle``-th step alone, and step t moves rows t to
    # t + bands - 1. No matrix has more bands than steps: a run of one cycle is always amplified.
    return sampling["name"] == "cyclic_poisson" and bands(noise) <= sampling["cycle"]


def bands(noise: dict[str, Any]) -> int:
    """How many diagonals of C, from the main one on, hold all its numbers; or at least as many."""
    steps, kind = int(noise["steps"]), noise["kind"]
    if kind == "dense":
        rows, columns = np.nonzero(strategy(noise))
        return int(np.max(rows - columns)) + 1
    if kind == "toeplitz" or (kind == "inverse_toeplitz" and len(noise["values"]) == 1):
        return len(noise["values"])
    return steps


def sensitivity(noise: dict[str, Any], sampling: dict[str, Any]) -> float:
    """What the noise must be scaled to, in bounds of one step."""
    steps, name = int(noise["steps"]), sampling["name"]
    if is_amplified(noise, sampling):
        return math.sqrt(largest(noise, steps, steps, even=True))
    if name in ("cyclic_poisson", "balls_in_bins") or (name == "curriculum" and sampling["public"]):
        return math.sqrt(largest(noise, steps, epoch(sampling), even=True))
    if name == "shuffled":  # the end of an epoch and the start of the next can meet
        return math.sqrt(largest(noise, -(-steps // epoch(sampling)), 1, even=False))
    if name == "full":
        return math.sqrt(largest(noise, steps, 1, even=False))
    raise Unreadable(
        f"noise is correlated, and {name} batches can hold one example at any step: no sensitivity "
        "is known for that."
    )


def largest(noise: dict[str, Any], most: int, apart: int, *, even: bool) -> float:
    """The largest sum of |X| over ``most`` steps that are ``apart``, or more steps apart."""
    steps, kind = int(noise["steps"]), noise["kind"]
    most = min(most, -(-steps // apart))
    plain = kind in ("toeplitz", "inverse_toeplitz", "buffered") and not noise.get("normalized")
    distances, known = range(0, bands(noise), apart), math.inf
    if plain and (steps > LARGEST or not even):
        # Of columns that fall, the first pattern is the worst; others are below such columns.
        column = np.abs(first_column(noise))
        falling = np.maximum.accumulate(column[::-1])[::-1]
        total = np.zeros(steps)
        for number in range(most):
            total[number * apart :] += falling[: steps - number * apart]
        lengths = np.sqrt(np.cumsum(column**2))[::-1][::apart][:most]  # the longest columns
        known = float(min(total @ total, lengths.sum() ** 2))
        if np.all(falling == column) or steps * len(distances) > LARGEST**2:
            return known
    if kind == "tree":  # as many of the example's steps as fit below a node, for each step
        sizes = [min(2**level, steps) for level in range((steps - 1).bit_length() + 1)]
        known = float(sum(most * min(most, -(-size // apart)) for size in sizes))
        if steps > LARGEST:
            return known
    if steps * len(distances) > LARGEST**2:
        raise Unreadable(
            f"noise is correlated over {steps} steps by a {kind} strategy, whose columns of "
            f"{len(distances)} steps meet, and this file computes the sensitivity of up to "
            f"{LARGEST**2:,} pairs."
        )
    own, *others = diagonals(noise, distances)
    if even:
        sums = own + 2 * np.sum(others, axis=0)
        return float(np.bincount(np.arange(steps) % apart, sums).max())
    if apart > 1:
        raise Unreadable("this file knows no batches whose examples are apart, and not evenly so.")
    # A step collects at most its own entry and the largest others of its row, on both its sides.
    rows = np.array([own * 0, *others, *(np.roll(x, d) for d, x in enumerate(others, 1))])
    rows = own + np.sort(rows, axis=0)[::-1][: most - 1].sum(axis=0)
    norms = np.sort(np.sqrt(own))[steps - most :].sum()
    return float(min(np.sort(rows)[steps - most :].sum(), norms**2, known))


def diagonals(noise: dict[str, Any], distances: range) -> np.ndarray:
    """|X| of each step and the one that is so far after it, or 0: ``[distances, steps]``."""
    steps, kind = int(noise["steps"]), noise["kind"]
    found = np.zeros((len(distances), steps))
    if kind in ("tree", "dense"):
        whole = products(noise)
        for row, apart in zip(found, distances, strict=True):
            row[: steps - apart] = np.diagonal(whole, apart)
        return np.abs(found)
    column = first_column(noise)[: bands(noise)]
    # The last columns end with the run: how many terms each column has.
    left = np.minimum(len(column), steps - np.arange(steps))
    for row, apart in zip(found, distances, strict=True):
        sums = np.cumsum(column[apart:] * column[: len(column) - apart])
        row[: steps - apart] = sums[left[: steps - apart] - 1 - apart]
    if noise.get("normalized"):
        norms = np.sqrt(np.cumsum(column**2)[left - 1])
        for row, apart in zip(found, distances, strict=True):
            row[: steps - apart] /= norms[: steps - apart] * norms[apart:]
    return np.abs(found)


def products(noise: dict[str, Any]) -> np.ndarray:
    """X: the products of all pairs of columns."""
    if noise["kind"] == "tree":  # how many nodes of a binary tree are above both
        places = np.arange(int(noise["steps"]))
        levels = range((len(places) - 1).bit_length() + 1)
        return np.sum([np.equal.outer(places >> n, places >> n) for n in levels], axis=0) * 1.0
    matrix = strategy(noise)
    return matrix.T @ matrix


def strategy(noise: dict[str, Any]) -> np.ndarray:
    """C itself."""
    steps, kind = int(noise["steps"]), noise["kind"]
    if kind == "tree":  # the lower triangle of this product: a Cholesky factor from the last step
        return np.linalg.cholesky(products(noise)[::-1, ::-1])[::-1, ::-1].T
    matrix = np.zeros((steps, steps))
    if kind == "dense":
        matrix[np.tril_indices(steps)] = np.frombuffer(base64.b64decode(noise["rows"]), "<f4")
        require_inverse(np.diag(matrix))
        return matrix
    column = first_column(noise)
    for step in range(steps):
        matrix[step:, step] = column[: steps - step]
    return matrix / np.linalg.norm(matrix, axis=0) if noise.get("normalized") else matrix


def saved(
    noise: dict[str, Any], sampling: dict[str, Any], multiplier: float, orders: np.ndarray
) -> np.ndarray:
    r"""How far the divergence is below that of a Gaussian, as an example hides among random bins.

    An example in bin b moves row t of $C G$ by at most $m_{tb}$, the sum of $|C_{ts}|$ over the
    steps of the bin. With $K = M^T M$ over the variance, the moment of the mixture of bins against
    none is at most $\prod_j \max_a E_b e^{j K_{ab}}$ for a whole order (Hölder), and that of none
    against the mixture is at most a Gaussian's (Jensen).
    """
    if sampling["name"] != "balls_in_bins" or int(noise["steps"]) > LARGEST or multiplier <= 0:
        return 0 * orders
    bins = int(sampling["examples"] // sampling["batch_size"])
    sizes = np.abs(strategy(noise))
    moves = np.array([sizes[:, first::bins].sum(axis=1) for first in range(bins)])
    shared = moves @ moves.T / float(noise["sensitivity"]) ** 2
    shared = np.sort(shared, axis=1).max(axis=0)  # at least the sorted entries of every row
    if np.mean(shared) > 0.75:  # the card does not count what is saved here
        return 0 * orders
    # A bin of 32 random bits, modulo the number of bins, is this much likelier than 1 / bins.
    odds, shared = (1 + bins / 2**32) / bins, shared / multiplier**2
    whole, log_moment = [0.0], 0.0
    for j in range(1, math.ceil(max(orders))):
        top = j * shared[-1]
        log_moment += top + math.log(odds * np.exp(j * shared - top).sum())
        whole.append(log_moment)
    leaves = np.interp(orders, 1 + np.arange(len(whole)), whole) / (orders - 1)
    joins = (shared[-1] + (orders - 1) * odds * shared.sum()) / 2
    return np.minimum(np.maximum(leaves, joins) - orders / (2 * multiplier**2), 0.0)


def require_inverse(diagonal: np.ndarray) -> None:
    """Refuses a matrix without an inverse: noise in its proportion would be none."""
    if not diagonal.size or not np.all(diagonal > 0):
        raise Unreadable("noise is correlated by a matrix without an inverse: its diagonal has 0.")


def first_column(noise: dict[str, Any]) -> np.ndarray:
    """The first column of a Toeplitz C, ``[steps]``."""
    steps, kind = int(noise["steps"]), noise["kind"]
    if kind == "buffered":
        powers = np.array(noise["decays"])[:, None] ** np.arange(steps - 1)
        return np.append(1.0, np.array(noise["scales"]) @ powers)
    values = np.array(noise["values"], np.float64)
    require_inverse(values[:1])
    if kind == "toeplitz":
        return np.pad(values, (0, steps - len(values)))
    column = np.zeros(steps)  # of the inverse series, by long division
    column[0] = 1 / values[0]
    for k in range(1, steps):
        reach = values[1 : k + 1]
        column[k] = -(reach @ column[k - len(reach) : k][::-1]) / values[0]
    return column
