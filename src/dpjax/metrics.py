# SPDX-License-Identifier: Apache-2.0
"""Measures of a model on examples with known answers.

Metrics of logits and labels may be called inside `jax.jit`, which does not detect labels out of
range. Metrics of one number an example, a score or a predicted quantity, are NumPy's, in float64.

| edge case | value |
|---|---|
| NaN among the logits | no prediction: wrong, and in no column of the table; the rest is NaN |
| NaN among scores or quantities; scores of only one class | NaN |
| no example of a class | NaN for that class |
| bfloat16, float16, whole numbers | probabilities, sums and counts are float32 |

These numbers have no noise: on training data they are as private as the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Integer, Num

from dpjax import checks

__all__ = [
    "Reliability",
    "accuracy",
    "auroc",
    "average_precision",
    "balanced_accuracy",
    "bootstrap",
    "brier",
    "confusion",
    "ece",
    "mae",
    "mce",
    "nll",
    "per_class_accuracy",
    "r2",
    "reliability",
    "rmse",
]

Numbers: TypeAlias = Num[ArrayLike, " batch"]
Logits: TypeAlias = Float[ArrayLike, "batch classes"]
Labels: TypeAlias = Integer[ArrayLike, " batch"]


class Reliability(NamedTuple):
    """Predictions sorted into bins of confidence: a reliability diagram as numbers."""

    counts: Int[Array, " bins"]
    """The number of predictions in each bin."""
    confidence: Float[Array, " bins"]
    """Their mean confidence; 0 in an empty bin."""
    accuracy: Float[Array, " bins"]
    """The fraction of them that is right; 0 in an empty bin."""


def accuracy(logits: Logits, labels: Labels) -> Float[Array, ""]:
    """The fraction of the examples with the largest logit at their label.

    Args:
      logits: Scores of each class, ``[batch, classes]``.
      labels: The right classes, ``[batch]`` or a column ``[batch, 1]``.

    The first of equal logits counts.

    Example:
      >>> float(accuracy(jnp.eye(4), jnp.array([0, 1, 2, 0])))
      0.75
    """
    logits, labels = _batch("accuracy", logits, labels)
    return jnp.mean(_predicted(logits) == labels)


def confusion(logits: Logits, labels: Labels) -> Int[Array, "classes classes"]:
    """Counts how often the class of each row was predicted as the class of each column.

    The arguments are as in `accuracy`.

    Example:
      >>> confusion(jnp.eye(2), jnp.array([0, 0]))
      Array([[1, 1],
             [0, 0]], dtype=int32)
    """
    logits, labels = _batch("confusion", logits, labels)
    classes = logits.shape[-1]
    counts = jnp.zeros((classes, classes), jnp.int32)
    # "drop" leaves out predictions from NaN logits, which have a class that does not exist.
    return counts.at[labels, _predicted(logits)].add(1, mode="drop")


def per_class_accuracy(logits: Logits, labels: Labels) -> Float[Array, " classes"]:
    """The accuracy among the examples of each class; NaN for a class without examples.

    The arguments are as in `accuracy`.

    Example:
      >>> per_class_accuracy(jnp.eye(2), jnp.array([0, 0]))
      Array([0.5, nan], dtype=float32)
    """
    logits, labels = _batch("per_class_accuracy", logits, labels)
    counts, rights = _counted(_predicted(logits) == labels, labels, logits.shape[-1])
    return rights / counts


def balanced_accuracy(logits: Logits, labels: Labels) -> Float[Array, ""]:
    """The mean of `per_class_accuracy` over the classes that have examples.

    The arguments are as in `accuracy`. A model that always guesses one class has 1 / classes,
    however frequent that class is.

    Example:
      >>> logits = jnp.array([[1.0, 0.0]] * 4)
      >>> float(balanced_accuracy(logits, jnp.array([0, 0, 0, 1])))
      0.5
    """
    return jnp.nanmean(per_class_accuracy(logits, labels))


def brier(logits: Logits, labels: Labels) -> Float[Array, ""]:
    r"""The Brier score: the mean squared error of the probabilities.

    $$ \frac1n \sum_i \sum_c (p_i[c] - [c = y_i])^2 $$

    and half of that for two classes, which is the mean of $(p_i[1] - y_i)^2$. The arguments are as
    in `accuracy`.

    Example:
      >>> float(brier(jnp.zeros((2, 2)), jnp.array([0, 1])))
      0.25

    References:
      Brier, "Verification of forecasts expressed in terms of probability", 1950.
    """
    logits, labels = _batch("brier", logits, labels)
    classes = logits.shape[-1]
    errors = jax.nn.softmax(_wide(logits)) - jax.nn.one_hot(labels, classes)
    score = jnp.mean(jnp.sum(errors**2, axis=-1))
    return score / 2 if classes == 2 else score


def nll(logits: Logits, labels: Labels) -> Float[Array, ""]:
    r"""The mean negative log-likelihood, $-\frac1n \sum_i \log p_i[y_i]$, in nats.

    The arguments are as in `accuracy`. Guessing gives log(classes).

    Example:
      >>> round(float(nll(jnp.zeros((3, 10)), jnp.array([0, 1, 2]))), 4)
      2.3026
    """
    logits, labels = _batch("nll", logits, labels)
    # Logarithms of probabilities are infinite where a probability underflows to 0.
    log_probabilities = jax.nn.log_softmax(_wide(logits))
    of_labels = jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1)
    return -jnp.mean(of_labels)


def reliability(logits: Logits, labels: Labels, *, bins: int = 15) -> Reliability:
    """Sorts predictions by their confidence, the largest probability, into equal bins.

    Bin b of n holds the confidences in (b/n, (b+1)/n].

    Args:
      logits: As for `accuracy`.
      labels: As for `accuracy`.
      bins: The number of bins.

    Example:
      >>> logits = jnp.log(jnp.array([[0.9, 0.1], [0.3, 0.7]]))
      >>> reliability(logits, jnp.array([0, 0]), bins=2).accuracy
      Array([0. , 0.5], dtype=float32)
    """
    logits, labels = _batch("reliability", logits, labels)
    bins = checks.whole("metrics.reliability", "bins", bins, "15 is usual.")
    # `_wide`, because bfloat16 has only 128 values between 1/2 and 1, where confidences lie.
    confidence = jax.nn.softmax(_wide(logits)).max(axis=-1)
    bin_of = jnp.ceil(jnp.nan_to_num(confidence) * bins).astype(jnp.int32) - 1  # [batch]
    # NaN is at -1 here, and rounding may put a confidence of 1 beyond the last bin.
    bin_of = jnp.clip(bin_of, 0, bins - 1)
    counts, rights = _counted(_predicted(logits) == labels, bin_of, bins)
    # Sums over buckets: one float32 sum over a million confidences loses a per cent.
    total = jax.ops.segment_sum(confidence, bin_of, num_segments=bins, bucket_size=4096)
    # Empty bins divide 0 by 1 and stay 0; a NaN there reaches sums over bins.
    divisors = jnp.maximum(counts, 1)
    return Reliability(counts, confidence=total / divisors, accuracy=rights / divisors)


def ece(logits: Logits, labels: Labels, *, bins: int = 15) -> Float[Array, ""]:
    r"""The expected calibration error: the mean distance of confidence from accuracy.

    $$ \sum_b \frac{n_b}{n} \, | \text{accuracy}_b - \text{confidence}_b | $$

    The arguments are as in `reliability`.

    Example:
      >>> logits = jnp.log(jnp.array([[0.75, 0.25]] * 4))
      >>> round(float(ece(logits, jnp.array([0, 0, 0, 1]))), 4)
      0.0

    References:
      Guo, Pleiss, Sun and Weinberger, "On Calibration of Modern Neural Networks", 2017,
      equation 3.
    """
    table = reliability(logits, labels, bins=bins)
    gaps = table.counts * jnp.abs(table.accuracy - table.confidence)
    return jnp.sum(gaps) / jnp.sum(table.counts)


def mce(logits: Logits, labels: Labels, *, bins: int = 15) -> Float[Array, ""]:
    """The maximum calibration error: the gap of `ece` in the worst bin that is not empty.

    The arguments are as in `reliability`, and the paper is that of `ece`, equation 5.

    Example:
      >>> logits = jnp.log(jnp.array([[0.75, 0.25]] * 4))
      >>> round(float(mce(logits, jnp.array([0, 0, 1, 1]))), 4)
      0.25
    """
    table = reliability(logits, labels, bins=bins)
    return jnp.max(jnp.abs(table.accuracy - table.confidence))


def auroc(scores: Numbers, labels: Numbers) -> float:
    r"""The area under the ROC curve: how often an example of label 1 has the higher score.

    $$ \Pr(s_1 > s_0) + \tfrac12 \Pr(s_1 = s_0) $$

    Args:
      scores: Higher for label 1, ``[batch]`` or a column ``[batch, 1]``; of two logits, the second
        less the first.
      labels: 0 and 1, as many.

    A guess has 0.5.

    Example:
      >>> auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
      0.75
    """
    scores, is_one = _scored("auroc", scores, labels)
    ones = is_one.sum()
    zeros = (~is_one).sum()
    if ones == 0 or zeros == 0 or np.isnan(scores).any():
        return np.nan
    # Equal scores share the mean of their ranks, which counts a tie half (Mann and Whitney, 1947).
    # ``score_of`` has for each example the number of its score among the distinct ones.
    _, score_of, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # of the distinct scores, from 1
    # The rank sum of label 1, less its smallest possible value: the pairs that label 1 wins.
    won = ranks[score_of][is_one].sum() - ones * (ones + 1) / 2
    return float(won / (ones * zeros))


def average_precision(scores: Numbers, labels: Numbers) -> float:
    r"""The mean precision over all thresholds t, each weighted by the recall that it adds.

    $$ \sum_t (\text{recall}_t - \text{recall}_{t-1}) \, \text{precision}_t $$

    The arguments are as in `auroc`. A guess has the share of label 1.

    Example:
      >>> round(average_precision([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]), 4)
      0.8333
    """
    scores, is_one = _scored("average_precision", scores, labels)
    if is_one.all() or not is_one.any() or np.isnan(scores).any():
        return np.nan
    order = np.argsort(-scores, kind="stable")
    # A threshold takes all examples of one score together.
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(is_one[order])[ends]
    precisions = hits / (ends + 1)
    return float(np.diff(hits, prepend=0) @ precisions / hits[-1])


def bootstrap(
    metric: Callable[[Any, Any], Any],
    scores: ArrayLike,
    labels: ArrayLike,
    *,
    level: float = 0.95,
    draws: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """The ends of an interval for ``metric(scores, labels)``, from draws with replacement.

    Args:
      metric: Such as `auroc`; draws for which it is NaN, such as of one class, do not count.
      scores: The first argument of the metric: an example a row.
      labels: The second one.
      level: The share of the draws inside; as many are below as above.
      draws: The number of draws.
      seed: The seed of the draws.

    The interval covers only the choice of test examples, not the noise of training.

    Example:
      >>> scores = np.linspace(0, 1, 200)
      >>> bootstrap(auroc, scores, scores + np.sin(37 * np.arange(200)) / 2 > 0.5, draws=100)
      (0.69..., 0.80...)
    """
    scores = np.asarray(scores)
    labels = np.asarray(labels)
    random = np.random.default_rng(seed)
    values = []
    for _ in range(draws):
        rows = random.integers(0, len(labels), len(labels))
        values.append(float(metric(scores[rows], labels[rows])))
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def rmse(predictions: Numbers, targets: Numbers) -> float:
    """The root of the mean squared error of ``[batch]`` quantities, in their units.

    Example:
      >>> round(rmse([1.0, 2.0], [1.0, 4.0]), 4)
      1.4142
    """
    predictions, targets = _columns("rmse", predictions, targets)
    return float(np.sqrt(np.mean((predictions - targets) ** 2)))


def mae(predictions: Numbers, targets: Numbers) -> float:
    """The mean absolute error of ``[batch]`` quantities, in their units.

    Example:
      >>> mae([1.0, 2.0], [1.0, 4.0])
      1.0
    """
    predictions, targets = _columns("mae", predictions, targets)
    return float(np.mean(np.abs(predictions - targets)))


def r2(predictions: Numbers, targets: Numbers) -> float:
    """The share of the variance of ``[batch]`` targets that is predicted; NaN if the variance is 0.

    A prediction of the mean of these targets has 0, and a worse one is negative.

    Example:
      >>> round(r2([1.0, 2.0, 3.0], [1.0, 2.0, 4.0]), 4)
      0.7857
    """
    predictions, targets = _columns("r2", predictions, targets)
    variance = targets.var()
    if variance == 0:
        return np.nan
    return float(1 - np.mean((predictions - targets) ** 2) / variance)


def _scored(name: str, scores: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Scores, and which of them are of label 1."""
    scores, labels = _columns(name, scores, labels)
    if not np.isin(labels, (0, 1)).all():
        raise ValueError(f"metrics.{name}: got labels up to {labels.max():g}; expected 0 and 1.")
    return scores, labels == 1


def _columns(name: str, first: Any, second: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two arguments as vectors of one length."""
    first = np.asarray(first, np.float64)
    second = np.asarray(second, np.float64)
    first_vector = _without_column_axis(first)
    second_vector = _without_column_axis(second)
    if first_vector.ndim != 1 or first_vector.shape != second_vector.shape or not first_vector.size:
        raise ValueError(
            f"metrics.{name}: got {list(first.shape)} and {list(second.shape)}; expected [batch] "
            "twice."
        )
    return first_vector, second_vector


def _without_column_axis(array: Any) -> Any:
    """A column ``[batch, 1]`` as a vector; other arrays as they are."""
    if array.ndim == 2 and array.shape[1] == 1:
        return array[:, 0]
    return array


def _counted(right: Array, places: Array, number: int) -> tuple[Array, Array]:
    """The predictions at each place, and the right ones among them."""
    # int32, because float32 stops counting at 2**24.
    rows = jnp.stack([jnp.ones_like(right), right], axis=-1).astype(jnp.int32)
    counts, rights = jax.ops.segment_sum(rows, places, num_segments=number).T
    return counts, rights


def _predicted(logits: Array) -> Int[Array, " batch"]:
    """The class of the largest logit; a class that does not exist where any logit is NaN."""
    classes = logits.shape[-1]
    is_nan = jnp.isnan(logits).any(axis=-1)
    return jnp.where(is_nan, classes, logits.argmax(axis=-1))


def _wide(logits: Array) -> Array:
    """The logits in float32 or wider."""
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _batch(name: str, logits: Any, labels: Any) -> tuple[Array, Array]:
    """Logits and labels as JAX arrays; raises unless they belong to one batch."""
    logits = jnp.asarray(logits)
    # NumPy keeps 64 bits of a label. JAX takes the last 32, which may be in range.
    if not isinstance(labels, jax.Array):
        labels = np.asarray(labels)
    labels = _without_column_axis(labels)
    are_whole = jnp.issubdtype(labels.dtype, jnp.integer)
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not labels.size or not are_whole:
        raise ValueError(
            f"metrics.{name}: got logits {list(logits.shape)} and labels {labels.dtype}"
            f"{list(labels.shape)}; expected [batch, classes] and whole numbers [batch]. For "
            "one-hot rows, pass labels.argmax(-1)."
        )
    # A traced label has no value yet, so only shapes and dtypes are checked inside jit.
    if not isinstance(labels, Tracer):
        # NumPy compares them, because inside jit JAX traces comparisons of concrete arrays too.
        values = np.asarray(labels)
        if values.min() < 0 or values.max() >= logits.shape[-1]:
            raise ValueError(
                f"metrics.{name}: got labels from {values.min()} to {values.max()} for logits of "
                f"{logits.shape[-1]} classes; classes are counted from 0."
            )
    return logits, jnp.asarray(labels)
