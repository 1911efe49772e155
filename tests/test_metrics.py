# SPDX-License-Identifier: Apache-2.0
"""Metrics: against counting by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as reference

from dpjax import metrics

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(500, 5)).astype(np.float32) * 3
LABELS = RNG.integers(0, 5, 500).astype(np.int32)
PREDICTED = LOGITS.argmax(-1)
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)


def by_hand(bins):
    """Counts, confidences and accuracies, one bin after the other."""
    confidence, right = PROBABILITIES.max(-1), PREDICTED == LABELS
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if inside.any():
            yield inside.sum(), confidence[inside].mean(), right[inside].mean()


def test_accuracy_confusion_and_nll_equal_the_reference():
    assert metrics.accuracy(LOGITS, LABELS) == pytest.approx(
        reference.accuracy_score(LABELS, PREDICTED)
    )
    table = metrics.confusion(LOGITS, LABELS)
    assert np.array_equal(table, reference.confusion_matrix(LABELS, PREDICTED))
    assert metrics.nll(LOGITS, LABELS) == pytest.approx(
        reference.log_loss(LABELS, PROBABILITIES), rel=1e-5
    )
    recall = reference.recall_score(LABELS, PREDICTED, average=None)
    np.testing.assert_allclose(metrics.per_class_accuracy(LOGITS, LABELS), recall, rtol=1e-6)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_equals_counting_by_hand(bins):
    rows = list(by_hand(bins))
    gaps = [abs(right - confidence) for _, confidence, right in rows]
    average = sum(count * gap for (count, _, _), gap in zip(rows, gaps, strict=True)) / 500
    assert metrics.ece(LOGITS, LABELS, bins=bins) == pytest.approx(average, rel=1e-4)
    assert metrics.mce(LOGITS, LABELS, bins=bins) == pytest.approx(max(gaps), rel=1e-4)


def test_fifteen_bins_are_the_default():
    assert metrics.reliability(LOGITS, LABELS).counts.shape == (15,)
    assert metrics.ece(LOGITS, LABELS) == metrics.ece(LOGITS, LABELS, bins=15)
    assert metrics.mce(LOGITS, LABELS) == metrics.mce(LOGITS, LABELS, bins=15)


def test_reliability_counts_everything_once():
    table = metrics.reliability(LOGITS, LABELS)
    assert table.counts.sum() == 500
    right = jnp.sum(table.counts * table.accuracy) / 500
    assert right == pytest.approx(float(metrics.accuracy(LOGITS, LABELS)), rel=1e-6)
    assert not table.confidence[table.counts == 0].any()


def test_certain_and_right_is_calibrated_certain_and_wrong_is_not():
    logits = 1e4 * jnp.eye(3)
    assert metrics.ece(logits, jnp.arange(3)) == 0
    assert metrics.mce(logits, (jnp.arange(3) + 1) % 3) == 1


def test_a_class_without_examples_has_no_accuracy():
    got = metrics.per_class_accuracy(jnp.eye(3), jnp.array([0, 0, 2]))
    assert np.isnan(got[1])
    assert got[0] == 0.5


NAMES = ["accuracy", "confusion", "per_class_accuracy", "nll", "ece", "mce", "reliability"]


@pytest.mark.parametrize("name", NAMES)
def test_jit_changes_nothing(name):
    function = getattr(metrics, name)
    plain, compiled = function(LOGITS, LABELS), jax.jit(function)(LOGITS, LABELS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), plain, compiled)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("labels", [np.eye(5, dtype=int)[LABELS], LABELS[:-1]])
def test_wrong_shapes_are_refused(name, labels):
    with pytest.raises(ValueError, match=r"expected \[batch, classes\] and \[batch\]"):
        getattr(metrics, name)(LOGITS, labels)


def test_no_bins_are_refused():
    with pytest.raises(ValueError, match="at least one bin"):
        metrics.ece(LOGITS, LABELS, bins=0)
