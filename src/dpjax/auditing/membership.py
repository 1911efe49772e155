# SPDX-License-Identifier: Apache-2.0
r"""Membership inference from the losses of a released model.

If a run is $(\epsilon, \delta)$-private, the rates of true and false positives of every test obey
$\mathrm{TPR} \le e^\epsilon\,\mathrm{FPR} + \delta$, and so do the rates of the opposite guess.
Half of the rows choose the threshold; the others, which it has not seen, bound the two rates.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike

from dpjax import checks

Limits: TypeAlias = tuple[float, float]


class Membership(NamedTuple):
    """What a threshold on scores says about membership.

    Privacy: computed from private data without noise. Do not publish it.
    """

    threshold: float
    """Rows with at least this score are guessed to be members."""
    true_positives: float
    """The share of members that are guessed to be members."""
    false_positives: float
    """The share of other rows that are guessed to be members."""
    limits: tuple[Limits, Limits]
    """The confidence limits of the two shares: (low, high) of each."""
    auc: float
    """The chance that a member has a higher score than another row; a half tells nothing."""
    epsilon: float
    """The lower bound on epsilon at the delta of the claim."""
    confidence: float
    """The confidence of the limits together, and so of epsilon."""

    @property
    def advantage(self) -> float:
        """True minus false positives."""
        return self.true_positives - self.false_positives


def audit_membership(
    members: ArrayLike, others: ArrayLike, *, delta: float, confidence: float = 0.95, seed: int = 0
) -> Membership:
    r"""Audits a released model by a threshold on scores, such as minus the loss.

    $$ \epsilon \ge \max\Bigl(\ln \frac{\mathrm{TPR} - \delta}{\mathrm{FPR}},\
       \ln \frac{1 - \mathrm{FPR} - \delta}{1 - \mathrm{TPR}}\Bigr) $$

    with the limits of Clopper and Pearson in the place of the rates.

    Args:
      members: Scores of rows that the model was trained on, higher where membership is likelier.
      others: Scores of rows of the same distribution that it was not trained on: the audit measures
        a difference of distributions too.
      delta: The delta of the claim.
      confidence: The confidence of the result, over rows that are independent draws.
      seed: The seed that splits the rows in two halves.

    Example:
      >>> draw = np.random.default_rng(0)
      >>> audit = audit_membership(draw.normal(3, 1, 2000), draw.normal(0, 1, 2000), delta=1e-5)
      >>> 2 < audit.epsilon < 6, audit.auc > 0.97
      (True, True)

    References:
      Yeom et al., "Privacy Risk in Machine Learning", 2018; Jagielski, Ullman and Oprea,
      "Auditing Differentially Private Machine Learning", 2020, for the limits.
    """
    scores = [_checked(name, x) for name, x in (("members", members), ("others", others))]
    call = "auditing.audit_membership"
    confidence = checks.fraction(call, "confidence", confidence, "Such as 0.95, not per cent.")
    draw = np.random.default_rng(seed)
    first, second = zip(*(np.array_split(draw.permutation(x), 2) for x in scores), strict=True)
    # Each rate has two limits, and all of them hold together.
    risk = (1 - confidence) / 4
    thresholds = np.unique(np.concatenate(first))
    places = np.linspace(0, len(thresholds) - 1, min(500, len(thresholds)))  # at equal ranks

    def told(at: float) -> tuple[float, float]:
        true, false = _rates(first, at)
        return _epsilon(_limits(first, at, risk), delta), true - false

    threshold = float(max(thresholds[places.astype(int)], key=told))
    limits, (true, false) = _limits(second, threshold, risk), _rates(second, threshold)
    epsilon = _epsilon(limits, delta)
    return Membership(threshold, true, false, limits, _auc(*scores), epsilon, confidence)


def _checked(name: str, scores: ArrayLike) -> Float[np.ndarray, " rows"]:
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or scores.size < 4 or np.any(np.isnan(scores)):
        raise ValueError(
            f"auditing.audit_membership({name} of shape {scores.shape}): expected a vector of four "
            "or more, no NaN."
        )
    return scores


def _rates(scores: tuple[np.ndarray, ...], threshold: float) -> tuple[float, ...]:
    return tuple(float(np.mean(x >= threshold)) for x in scores)


def _limits(scores: tuple[np.ndarray, ...], threshold: float, risk: float) -> tuple[Limits, Limits]:
    """The limits of Clopper and Pearson of both rates; each fails with at most this chance."""
    from scipy.stats import beta  # a second that only audits of whole runs cost

    def limits(guessed: Bool[np.ndarray, " rows"]) -> Limits:
        count, right = len(guessed), int(np.sum(guessed))
        low = float(beta.ppf(risk, right, count - right + 1)) if right else 0.0
        high = float(beta.ppf(1 - risk, right + 1, count - right)) if right < count else 1.0
        return low, high

    true, false = (limits(x >= threshold) for x in scores)
    return true, false


def _epsilon(limits: tuple[Limits, Limits], delta: float) -> float:
    """The largest epsilon that the limits of both rates refute."""
    true, false = limits
    # The opposite guess is bounded alike.
    pairs = ((true[0], false[1]), (1 - false[1], 1 - true[0]))
    ratios = [(more - delta) / less for more, less in pairs if more > delta]
    return max([0.0, *map(math.log, ratios)])


def _auc(members: np.ndarray, others: np.ndarray) -> float:
    """The chance that a member has the higher score; ties count one half."""
    ordered = np.sort(others)
    below, most = (np.searchsorted(ordered, members, side) for side in ("left", "right"))
    return float(np.mean(below + most) / (2 * len(others)))
