# SPDX-License-Identifier: Apache-2.0
"""Metrics agree with plain counting in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutation import kills
from sklearn import metrics as reference

from dpjax import metrics

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(500, 5)).astype(np.float32) * 3
LABELS = RNG.integers(0, 5, 500).astype(np.int32)
PREDICTED = LOGITS.argmax(-1)
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)


def counted(bins):
    """Counts, confidences and accuracies, one bin after the other."""
    confidence, right = PROBABILITIES.max(-1), PREDICTED == LABELS
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if inside.any():
            yield inside.sum(), confidence[inside].mean(), right[inside].mean()


def test_accuracy_confusion_and_nll_equal_the_reference():
    accuracy = reference.accuracy_score(LABELS, PREDICTED)
    for labels in (LABELS, LABELS[:, None]):
        assert metrics.accuracy(LOGITS, labels) == pytest.approx(accuracy)
    table = metrics.confusion(LOGITS, LABELS)
    assert np.array_equal(table, reference.confusion_matrix(LABELS, PREDICTED))
    nll = reference.log_loss(LABELS, PROBABILITIES)
    assert metrics.nll(LOGITS, LABELS) == pytest.approx(nll, rel=1e-5)
    recall = reference.recall_score(LABELS, PREDICTED, average=None)
    np.testing.assert_allclose(metrics.per_class_accuracy(LOGITS, LABELS), recall, rtol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_equals_counting_counted(bins):
    rows = list(counted(bins))
    gaps = [abs(right - confidence) for _, confidence, right in rows]
    average = sum(count * gap for (count, _, _), gap in zip(rows, gaps, strict=True)) / 500
    assert metrics.ece(LOGITS, LABELS, bins=bins) == pytest.approx(average, rel=1e-4)
    assert metrics.mce(LOGITS, LABELS, bins=bins) == pytest.approx(max(gaps), rel=1e-4)


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


def test_balanced_accuracy_and_brier_equal_the_reference():
    want = reference.balanced_accuracy_score(LABELS, PREDICTED)
    assert metrics.balanced_accuracy(LOGITS, LABELS) == pytest.approx(want, rel=1e-6)
    hot = np.eye(5)[LABELS]
    want = np.mean(np.sum((PROBABILITIES - hot) ** 2, axis=-1))
    assert metrics.brier(LOGITS, LABELS) == pytest.approx(want, rel=1e-5)
    two, labels = LOGITS[:, :2], LABELS % 2
    p = 1 / (1 + np.exp(two[:, 0].astype(float) - two[:, 1]))
    assert metrics.brier(two, labels) == pytest.approx(
        reference.brier_score_loss(labels, p), rel=1e-5
    )


TIED = {
    "distinct": RNG.normal(size=400),
    "ties": RNG.integers(0, 6, 400),
    "float32": RNG.normal(size=400).astype(np.float32),
    "equal": np.zeros(400),
}


@kills(
    "metrics.py",
    "np.flatnonzero(np.diff(scores[order]))",
    "np.arange(len(scores) - 1)",
    case="ties",
)
@kills("metrics.py", "- (counts - 1) / 2", "- (counts - 1)", case="ties", slow=True)
@pytest.mark.parametrize("name", TIED)
def test_areas_under_curves_equal_the_reference(name):
    """Scikit-learn's, to 1e-12, with ties and for few of label 1."""
    for share in (0.5, 0.02):
        labels = (RNG.random(400) < share).astype(int)
        labels[:2] = 0, 1
        given = TIED[name][:, None], labels
        want = reference.roc_auc_score(labels, TIED[name])
        assert metrics.auroc(*given) == pytest.approx(want, abs=1e-12)
        want = reference.average_precision_score(labels, TIED[name])
        assert metrics.average_precision(*given) == pytest.approx(want, abs=1e-12)


def test_scores_of_one_class_or_with_nan_have_no_area():
    for metric in (metrics.auroc, metrics.average_precision):
        for labels in ([0, 0], [1, 1]):
            assert np.isnan(metric([0.1, 0.2], labels))
        assert np.isnan(metric([0.1, np.nan], [0, 1]))
        assert metric([0.2, 0.1], [True, False]) == 1
        with pytest.raises(ValueError, match=r"labels up to 2; expected 0 and 1"):
            metric([0.1, 0.2], [0, 2])


def test_errors_of_quantities_equal_the_reference():
    targets = RNG.normal(size=200) * 7
    predictions = targets + RNG.normal(size=200)
    pair = targets, predictions
    for metric, want in (
        (metrics.rmse, reference.mean_squared_error(*pair) ** 0.5),
        (metrics.mae, reference.mean_absolute_error(*pair)),
        (metrics.r2, reference.r2_score(*pair)),
    ):
        # A column beside a row would broadcast to all pairs.
        assert metric(predictions[:, None], targets) == pytest.approx(want, rel=1e-12)
        for wrong in (predictions[:-1], predictions[:, None].repeat(2, 1), []):
            with pytest.raises(ValueError, match=r"expected \[batch\] twice"):
                metric(wrong, targets)
    assert np.isnan(metrics.r2([1.0, 2.0], [3.0, 3.0]))


def test_a_bootstrap_has_the_width_of_the_law_of_large_numbers():
    targets = RNG.normal(size=1000)
    low, high = metrics.bootstrap(lambda x, y: np.mean(x), targets, targets)
    assert low < targets.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * targets.std() / 1000**0.5, rel=0.1)
    narrow = metrics.bootstrap(lambda x, y: np.mean(x), targets, targets, level=0.5)
    assert low < narrow[0] < narrow[1] < high
    # Draws without label 1 have no AUROC.
    rare = metrics.bootstrap(metrics.auroc, [1.0, 2.0, 3.0], [0, 0, 1], draws=50)
    assert rare == (1.0, 1.0)


NAMES = ["accuracy", "confusion", "per_class_accuracy", "nll", "ece", "mce", "reliability"]
NAMES += ["balanced_accuracy", "brier"]


def test_jit_changes_nothing():
    def every(logits, labels):
        return [getattr(metrics, name)(logits, labels) for name in NAMES]

    plain, compiled = every(LOGITS, LABELS), jax.jit(every)(LOGITS, LABELS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), plain, compiled)


def test_wrong_shapes_and_labels_are_refused():
    one_hot = np.eye(5, dtype=int)[LABELS]
    for labels in (one_hot, LABELS[:-1], LABELS.astype(float), LABELS[:0]):
        with pytest.raises(ValueError, match=r"expected \[batch, classes\] and whole numbers"):
            metrics.nll(LOGITS, labels)
    for labels in (LABELS - 1, LABELS + 1, LABELS.astype(np.int64) + 2**32):
        with pytest.raises(ValueError, match=r"labels from .* of 5 classes; classes are counted"):
            metrics.confusion(LOGITS, labels)


def test_lists_and_whole_numbers_are_logits():
    for name in ("accuracy", "nll", "ece", "mce"):
        want = getattr(metrics, name)(jnp.eye(3), jnp.arange(3))
        for logits in (np.eye(3).tolist(), np.eye(3, dtype=np.int8)):
            assert getattr(metrics, name)(logits, [0, 1, 2]) == want


@pytest.mark.slow
def test_half_precision_counts_beyond_what_it_can_count():
    logits, labels = jnp.zeros((1000, 3), jnp.bfloat16).at[:, 0].set(1), np.zeros(1000, int)
    assert metrics.reliability(logits, labels).counts.sum() == 1000
    for name in ("nll", "ece", "mce"):
        want = getattr(metrics, name)(logits.astype(jnp.float32), labels)
        got = getattr(metrics, name)(logits, labels)
        assert got.dtype == jnp.float32
        assert got == pytest.approx(float(want), rel=1e-6)


def test_nan_is_no_prediction():
    broken = LOGITS.copy()
    broken[:100, 2] = np.nan
    right = (PREDICTED == LABELS)[100:]
    assert metrics.accuracy(broken, LABELS) == pytest.approx(right.sum() / 500)
    rest = reference.confusion_matrix(LABELS[100:], PREDICTED[100:])
    assert np.array_equal(metrics.confusion(broken, LABELS), rest)
    want = np.diagonal(rest) / np.bincount(LABELS)
    np.testing.assert_allclose(metrics.per_class_accuracy(broken, LABELS), want, rtol=1e-6)
    assert metrics.reliability(broken, LABELS).counts.sum() == 500
    for name in ("nll", "ece", "mce"):
        assert np.isnan(getattr(metrics, name)(broken, LABELS))


def test_labels_that_are_known_inside_jit_are_checked_too():
    logits, labels = jnp.eye(3), jnp.arange(3)
    counts = jax.jit(lambda logits: metrics.confusion(logits, labels))(logits)
    np.testing.assert_array_equal(counts, np.eye(3))
    others = labels + 1
    with pytest.raises(ValueError, match="labels from 1 to 3"):
        jax.jit(lambda logits: metrics.accuracy(logits, others))(logits)
