# SPDX-License-Identifier: Apache-2.0
"""Metrics of one number an example: a score for label 1, or a predicted quantity.

Computed by NumPy in float64, so not inside `jax.jit`. NaN among the numbers makes the metric NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Num
from numpy.typing import ArrayLike
from scipy import stats

from dpjax import checks

Numbers: TypeAlias = Num[ArrayLike, " batch"]


def auroc(scores: Numbers, labels: Numbers) -> float:
    r"""The area under the ROC curve: how often an example of label 1 has the higher score.

    $$ \Pr(s_1 > s_0) + \tfrac12 \Pr(s_1 = s_0) $$

    Args:
      scores: Higher for label 1, ``[batch]`` or a column ``[batch, 1]``; of two logits, the second
        less the first.
      labels: 0 and 1, as many.

    A guess has 0.5, and scores of one class alone have NaN.

    Example:
      >>> auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
      0.75
    """
    scores, right = _scored("auroc", scores, labels)
    ones, zeros = right.sum(), (~right).sum()
    if not ones * zeros or np.isnan(scores).any():
        return float("nan")
    # Equal scores share the mean of their ranks, which counts a tie half (Mann and Whitney, 1947).
    above = stats.rankdata(scores)[right].sum() - ones * (ones + 1) / 2
    return float(above / (ones * zeros))


def average_precision(scores: Numbers, labels: Numbers) -> float:
    r"""The average precision: the area under the curve of precision by recall, in steps.

    $$ \sum_t (\text{recall}_t - \text{recall}_{t-1}) \, \text{precision}_t $$

    over falling thresholds t. The arguments are as in `auroc`. A guess has the share of label 1,
    and scores of one class alone have NaN.

    Example:
      >>> round(average_precision([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]), 4)
      0.8333
    """
    scores, right = _scored("average_precision", scores, labels)
    if right.all() or not right.any() or np.isnan(scores).any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    # A threshold takes all examples of one score at once.
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(right[order])[ends]
    return float(np.diff(hits, prepend=0) @ (hits / (ends + 1)) / hits[-1])


def bootstrap(
    metric: Callable[[Any, Any], Any],
    scores: ArrayLike,
    labels: ArrayLike,
    *,
    level: float = 0.95,
    draws: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """An interval for a metric, from draws of the examples with replacement.

    Args:
      metric: Such as `auroc`, or any function of ``(scores, labels)``.
      scores: ``[batch]``, or logits ``[batch, classes]``.
      labels: ``[batch]``, or the true quantities.
      level: The share of the draws that is inside, as many below as above.
      draws: How many draws. Those for which the metric is NaN, such as of one class, do not count.
      seed: Of the draws.

    Returns:
      The ends of the interval. It is about these test examples alone: another training has
      another noise.

    Example:
      >>> scores = np.linspace(0, 1, 200)
      >>> labels = (scores + np.sin(37 * np.arange(200)) / 2 > 0.5).astype(int)
      >>> low, high = bootstrap(auroc, scores, labels)
      >>> low < auroc(scores, labels) < high
      True
    """
    level = checks.fraction("metrics.bootstrap", "level", level, "0.95 is usual.")
    draws = checks.whole("metrics.bootstrap", "draws", draws, "1000 is usual.")
    scores, labels = np.asarray(scores), np.asarray(labels)
    random = np.random.default_rng(seed)
    rows = (random.integers(0, len(labels), len(labels)) for _ in range(draws))
    values = [float(metric(scores[row], labels[row])) for row in rows]
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def rmse(predictions: Numbers, targets: Numbers) -> float:
    """The root of the mean squared error, in units of the target.

    Args:
      predictions: ``[batch]`` or a column ``[batch, 1]``.
      targets: The true quantities, as many.

    Example:
      >>> rmse([1.0, 2.0], [1.0, 4.0])
      1.4142135623730951
    """
    predictions, targets = _columns("rmse", predictions, targets)
    return float(np.sqrt(np.mean((predictions - targets) ** 2)))


def mae(predictions: Numbers, targets: Numbers) -> float:
    """The mean absolute error, in units of the target; the arguments are as in `rmse`.

    Example:
      >>> mae([1.0, 2.0], [1.0, 4.0])
      1.0
    """
    predictions, targets = _columns("mae", predictions, targets)
    return float(np.mean(np.abs(predictions - targets)))


def r2(predictions: Numbers, targets: Numbers) -> float:
    """The share of the variance of the targets that is predicted; NaN if they are all equal.

    The arguments are as in `rmse`. To predict the mean of these targets has 0; worse is negative.

    Example:
      >>> round(r2([1.0, 2.0, 3.0], [1.0, 2.0, 4.0]), 4)
      0.7857
    """
    predictions, targets = _columns("r2", predictions, targets)
    total = np.sum((targets - targets.mean()) ** 2)
    return float(1 - np.sum((predictions - targets) ** 2) / total) if total else float("nan")


def _scored(name: str, scores: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Scores, and which of them are of label 1."""
    scores, labels = _columns(name, scores, labels)
    if not np.isin(labels, (0, 1)).all():
        raise ValueError(
            f"metrics.{name}: got labels from {labels.min():g} to {labels.max():g}; expected 0 and "
            "1. Of several classes, compare one with the rest: labels == 2."
        )
    return scores, labels == 1


def _columns(name: str, first: Any, second: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two columns of equal length, in float64."""
    shapes = [list(np.shape(column)) for column in (first, second)]
    first, second = (np.asarray(column, np.float64) for column in (first, second))
    first, second = (x[:, 0] if x.ndim == 2 and x.shape[1] == 1 else x for x in (first, second))
    if first.ndim != 1 or first.shape != second.shape or not first.size:
        raise ValueError(f"metrics.{name}: got {shapes[0]} and {shapes[1]}; expected two [batch].")
    return first, second
