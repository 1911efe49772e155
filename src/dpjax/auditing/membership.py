# SPDX-License-Identifier: Apache-2.0
r"""Membership inference: what scores of members and of other rows say about epsilon.

If a run is $(\epsilon, \delta)$-private, the rates of true and false positives of every test obey
$\mathrm{TPR} \le e^\epsilon\,\mathrm{FPR} + \delta$, and so do the rates of the opposite guess.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from dpjax import checks
from dpjax.accounting import profiles

RATES = (0.001, 0.01, 0.1)  # false-positive rates, as the field reports them
_RANKS = 60  # thresholds from each end of the scores, which share the risk
_RESAMPLED = 1000


class Share(NamedTuple):
    """A share, and its confidence limits."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        limits = f"({self.low:.1%} to {self.high:.1%})"
        return limits if math.isnan(self.value) else f"{self.value:.1%} {limits}"


class Membership(NamedTuple):
    """What thresholds on scores say about membership.

    Privacy: computed from private data without noise. Do not publish it.
    """

    auroc: Share
    """The chance that a member has a higher score than another row; a half tells nothing."""
    true_positives: dict[float, Share]
    """The share of members that are found, by the share of other rows that are taken for members.
    It rests on at least one other row: below 1 / others it is NaN, and its limits alone count."""
    epsilon: float
    """The lower bound on epsilon at the delta of the claim, whatever the scores' distribution."""
    gaussian_epsilon: float
    """The lower bound if the scores of both kinds of rows are Gaussian with one deviation."""
    confidence: float
    """The confidence of each bound and of all limits, each by itself."""


def audit_membership(
    members: ArrayLike, others: ArrayLike, *, delta: float, confidence: float = 0.95, seed: int = 0
) -> Membership:
    r"""Audits a released model, or many runs, by thresholds on scores.

    $$ \epsilon \ge \max\Bigl(\ln \frac{\mathrm{TPR} - \delta}{\mathrm{FPR}},\
       \ln \frac{1 - \mathrm{FPR} - \delta}{1 - \mathrm{TPR}}\Bigr) $$

    over thresholds at 60 ranks from each end of the scores, with limits of Clopper and Pearson in
    the place of the rates; all limits share the risk. The fit takes the distance of the means in
    standard deviations, less its standard error, for the separation of a Gaussian mechanism.

    Args:
      members: Scores of rows that the model was trained on, higher where membership is likelier:
        minus the loss, `lira`; or what a released step shows of a row, over many runs with it.
      others: Scores of rows of the same distribution that it was not trained on: the audit measures
        a difference of distributions too. Or of the same row, over many runs without it.
      delta: The delta of the claim.
      confidence: The confidence of the results, over rows or runs that are independent draws.
      seed: The seed of the bootstrap, which gives the limits of `Membership.auroc` and of
        `Membership.true_positives`.

    Example:
      >>> draw = np.random.default_rng(0)
      >>> audit = audit_membership(draw.normal(3, 1, 2000), draw.normal(0, 1, 2000), delta=1e-5)
      >>> 2 < audit.epsilon < 6 < audit.gaussian_epsilon, audit.auroc.low > 0.97
      (True, True)

    References:
      Yeom et al., "Privacy Risk in Machine Learning", 2018; Jagielski, Ullman and Oprea,
      "Auditing Differentially Private Machine Learning", 2020, for the limits; Carlini et al.,
      "Membership Inference Attacks From First Principles", 2022, for rates at low false positives.
    """
    call = "auditing.audit_membership"
    confidence = checks.fraction(call, "confidence", confidence, "Such as 0.95, not per cent.")
    named = ("members", members), ("others", others)
    ins, outs = (np.sort(_checked(name, scores))[::-1] for name, scores in named)
    # Both limits of both rates, at every rank.
    risk = (1 - confidence) / 4 / _RANKS / 2
    epsilon = max(_refuted(ins, outs, delta, risk), _refuted(-outs[::-1], -ins[::-1], delta, risk))
    draw = np.random.default_rng(seed)
    again = [
        _measured(*(np.sort(draw.choice(x, x.size))[::-1] for x in (ins, outs)))
        for _ in range(_RESAMPLED)
    ]
    low, high = np.quantile(again, ((1 - confidence) / 2, (1 + confidence) / 2), axis=0)
    auroc, *rates = map(Share, _measured(ins, outs).tolist(), low.tolist(), high.tolist())
    found = {
        at: share if at * outs.size >= 1 else share._replace(value=math.nan)
        for at, share in zip(RATES, rates, strict=True)
    }
    return Membership(auroc, found, epsilon, _fitted(ins, outs, delta, confidence), confidence)


def lira(
    target: Float[np.ndarray, " rows"],
    shadows: Float[np.ndarray, "shadows rows"],
    joined: np.ndarray,
    *,
    online: bool = True,
) -> Float[np.ndarray, " rows"]:
    r"""The likelihood ratio of membership of each row, from models that others trained.

    $$ \ln \frac{N(s_i;\ \mu_i^{\mathrm{in}}, \sigma_{\mathrm{in}}^2)}
       {N(s_i;\ \mu_i^{\mathrm{out}}, \sigma_{\mathrm{out}}^2)} $$

    with the means over shadow models that row $i$ was in, or was not in, and deviations over all
    rows, because one row has too few models. Scores should be near to Gaussian: the log odds of
    the true label.

    Args:
      target: What the attacked model says of each row.
      shadows: What the shadow models say.
      joined: ``[shadows, rows]``, whether a row was in the training data of a shadow model.
      online: Whether the attacker trains models with each row. Otherwise the score is how far the
        target is above the models without the row, in standard deviations.

    Example:
      >>> joined = np.tile([[True, False], [False, True]], (2, 1))
      >>> shadows = 2.0 * joined + np.array([[0.1], [0.1], [-0.1], [-0.1]])
      >>> lira(np.array([2.0, 0.0]), shadows, joined).round().tolist()
      [100.0, -100.0]

    References:
      Carlini et al., "Membership Inference Attacks From First Principles", 2022.
    """
    joined = np.asarray(joined, bool)
    parts = (joined, ~joined)
    if not all(np.all(part.sum(axis=0) >= 2) for part in parts[not online :]):
        raise ValueError(
            "auditing.lira(joined): expected each row in two shadow models or more, and out of two."
        )
    (inside, spread), (outside, wide) = (_normal(shadows, part) for part in parts)
    above = (target - outside) / wide
    if not online:
        return above
    return np.log(wide / spread) + (above**2 - ((target - inside) / spread) ** 2) / 2


def _normal(shadows: np.ndarray, part: np.ndarray) -> tuple[np.ndarray, float]:
    """The mean of each row over the models of its part, and the deviation over all rows."""
    counts = part.sum(axis=0)
    mean = np.where(part, shadows, 0).sum(axis=0) / np.maximum(counts, 1)
    squares = np.where(part, (shadows - mean) ** 2, 0).sum()
    return mean, math.sqrt(squares / max(1, counts.sum() - np.sum(counts > 0)))


def _checked(name: str, scores: ArrayLike) -> Float[np.ndarray, " rows"]:
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or scores.size < 4 or np.any(np.isnan(scores)):
        raise ValueError(
            f"auditing.audit_membership({name} of shape {scores.shape}): expected a vector of four "
            "or more, no NaN."
        )
    return scores


def _refuted(ins: np.ndarray, outs: np.ndarray, delta: float, risk: float) -> float:
    """The largest epsilon that the limits of both rates refute; scores fall from the first."""
    from scipy.stats import beta  # a second that only audits of whole runs cost

    # Ranks are chosen without looking, so the share of all members above the k-th score is beta
    # distributed, and its quantile is the limit of Clopper and Pearson.
    ranks, places = (_ranks(x.size) for x in (ins, outs))
    true = beta.ppf(risk, ranks, ins.size - ranks + 1)
    most = np.append(beta.ppf(1 - risk, places, outs.size - places + 1), 1.0)
    # Fewer others than the next rank are at the threshold or above it.
    reached = np.searchsorted(-outs, -ins[ranks - 1], side="right")
    false = most[np.searchsorted(places, reached + 1)]
    with np.errstate(divide="ignore"):
        return float(np.max(np.log(np.maximum(true - delta, 0) / false), initial=0.0))


def _ranks(size: int) -> np.ndarray:
    """Ranks from both ends, closer together near the ends, where the rates are small."""
    first = np.geomspace(1, max(1, size // 2), _RANKS).astype(int)
    return np.unique(np.concatenate([first, size + 1 - first]))


def _measured(ins: np.ndarray, outs: np.ndarray) -> Float[np.ndarray, " four"]:
    """AUROC, and the true-positive rate at each rate of false positives; scores fall."""
    below, most = (np.searchsorted(outs[::-1], ins, side) for side in ("left", "right"))
    places = np.floor(np.multiply(RATES, outs.size)).astype(int)
    # Strictly above the first score of another row that may not be taken for a member.
    found = [np.sum(ins > outs[min(place, outs.size - 1)]) for place in places]
    return np.array([np.sum(below + most) / 2 / outs.size, *found]) / ins.size


def _fitted(ins: np.ndarray, outs: np.ndarray, delta: float, confidence: float) -> float:
    from scipy.stats import norm

    counts = ins.size, outs.size
    pooled = math.sqrt((ins.var() * counts[0] + outs.var() * counts[1]) / (sum(counts) - 2))
    if not pooled:
        return math.inf if ins[0] > outs[0] else 0.0
    mu = (ins.mean() - outs.mean()) / pooled
    error = math.sqrt(1 / counts[0] + 1 / counts[1] + mu**2 / (2 * sum(counts)))
    least = max(0.0, float(mu - norm.ppf(confidence) * error))
    return profiles.gaussian(least).epsilon(delta) if delta else math.inf if least else 0.0
