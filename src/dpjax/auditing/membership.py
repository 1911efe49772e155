# SPDX-License-Identifier: Apache-2.0
r"""Membership inference: lower bounds on epsilon from scores of members and of other rows.

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

# The false-positive rates that the field reports.
RATES = (0.001, 0.01, 0.1)
# The thresholds from each end of the scores, which share the risk.
_RANKS = 60
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
    """The membership that thresholds on scores reveal.

    Privacy: computed from private data without noise. Do not publish it.
    """

    auroc: Share
    """The chance that a member has a higher score than another row; a half tells nothing."""
    true_positives: dict[float, Share]
    """The share of members that are found, by the share of other rows that are taken for members.
    It rests on at least one other row: below 1 / others it is NaN, and only its limits count."""
    epsilon: float
    """The lower bound on epsilon at the delta of the claim, for any distribution of scores."""
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
    the place of the rates; all limits share the risk. `Membership.gaussian_epsilon` takes a lower
    confidence limit of the distance of the means, in standard deviations, for the separation of a
    Gaussian mechanism.

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
    ins = _falling(_checked("members", members))
    outs = _falling(_checked("others", others))
    # Four kinds of limits share the risk, a lower and an upper one of both rates, and each kind has
    # limits at `_RANKS` ranks from both ends.
    risk = (1 - confidence) / 4 / _RANKS / 2
    by_members = _lower_bound(ins, outs, delta, risk)
    # The opposite test guesses that rows with low scores are others. Negated scores are reversed,
    # so they fall again.
    by_others = _lower_bound(-outs[::-1], -ins[::-1], delta, risk)
    # The bootstrap: rows of both kinds are drawn again, with replacement.
    draw = np.random.default_rng(seed)
    resampled = []
    for _ in range(_RESAMPLED):
        drawn_ins = _falling(draw.choice(ins, ins.size))
        drawn_outs = _falling(draw.choice(outs, outs.size))
        resampled.append(_measured(drawn_ins, drawn_outs))
    low, high = np.quantile(resampled, ((1 - confidence) / 2, (1 + confidence) / 2), axis=0)
    auroc, *shares = map(Share, _measured(ins, outs).tolist(), low.tolist(), high.tolist())
    true_positives = {}
    for rate, share in zip(RATES, shares, strict=True):
        if rate * outs.size < 1:
            # No other row is a false positive at this rate, so the value rests on only one score,
            # the largest of the others. The limits stay: it varies between the resamples.
            share = share._replace(value=math.nan)
        true_positives[rate] = share
    return Membership(
        auroc=auroc,
        true_positives=true_positives,
        epsilon=max(by_members, by_others),
        gaussian_epsilon=_fitted(ins, outs, delta, confidence),
        confidence=confidence,
    )


def lira(
    target: Float[np.ndarray, " rows"],
    shadows: Float[np.ndarray, "shadows rows"],
    joined: np.ndarray,
    *,
    online: bool = True,
) -> Float[np.ndarray, " rows"]:
    r"""The log likelihood ratio of membership of each row, by shadow models of the attacker.

    $$ \ln \frac{N(s_i;\ \mu_i^{\mathrm{in}}, \sigma_{\mathrm{in}}^2)}
       {N(s_i;\ \mu_i^{\mathrm{out}}, \sigma_{\mathrm{out}}^2)} $$

    with the score $s_i$ under the attacked model, the means $\mu_i$ of the scores under the shadow
    models that row $i$ was in, or was not in, and deviations $\sigma$ over all rows, because one
    row has too few models. Scores should be near to Gaussian: the log odds of the true label.

    Args:
      target: The score of each row under the attacked model.
      shadows: The scores under the shadow models.
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
    enough_out = np.all((~joined).sum(axis=0) >= 2)
    enough_in = np.all(joined.sum(axis=0) >= 2)
    if not enough_out or (online and not enough_in):
        raise ValueError(
            "auditing.lira(joined): expected each row in two shadow models or more, and out of two."
        )
    out_mean, out_deviation = _normal(shadows, ~joined)
    out_shift = (target - out_mean) / out_deviation
    if not online:
        return out_shift
    in_mean, in_deviation = _normal(shadows, joined)
    in_shift = (target - in_mean) / in_deviation
    return np.log(out_deviation / in_deviation) + (out_shift**2 - in_shift**2) / 2


def _normal(shadows: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, float]:
    """The mean of each row over its chosen models, and the deviation over all rows."""
    counts = chosen.sum(axis=0)
    mean = np.where(chosen, shadows, 0).sum(axis=0) / np.maximum(counts, 1)
    squares = np.where(chosen, (shadows - mean) ** 2, 0).sum()
    freedom = max(1, counts.sum() - np.sum(counts > 0))
    return mean, math.sqrt(squares / freedom)


def _falling(scores: np.ndarray) -> np.ndarray:
    """The scores from the largest to the smallest."""
    return np.sort(scores)[::-1]


def _checked(name: str, scores: ArrayLike) -> Float[np.ndarray, " rows"]:
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or scores.size < 4 or np.any(np.isnan(scores)):
        raise ValueError(
            f"auditing.audit_membership({name} of shape {scores.shape}): expected a vector of four "
            "or more, no NaN."
        )
    return scores


def _lower_bound(ins: np.ndarray, outs: np.ndarray, delta: float, risk: float) -> float:
    r"""The largest $\ln((\mathrm{TPR} - \delta) / \mathrm{FPR})$ over thresholds; 0 if negative.

    A threshold is the score of a member at one of `_ranks`, and rows at it or above are guessed to
    be members. The rates are confidence limits: TPR a lower, and FPR an upper one, each wrong with
    the chance ``risk``. ``ins`` and ``outs`` fall from the first score.
    """
    from scipy.stats import beta  # the import takes a second, so only audits of whole runs pay it

    # The ranks do not depend on the scores. So the chance that a new row reaches the k-th of n
    # scores is distributed as beta(k, n - k + 1), and quantiles of it are the limits of Clopper and
    # Pearson.
    ranks = _ranks(ins.size)
    out_ranks = _ranks(outs.size)
    least_true = beta.ppf(risk, ranks, ins.size - ranks + 1)  # of each threshold
    most_false_of_rank = beta.ppf(1 - risk, out_ranks, outs.size - out_ranks + 1)
    # How many others reach each threshold. The other row with the next larger rank does not reach
    # it, so the limit at this rank holds for the threshold. Without a larger rank the limit is 1.
    others_reaching = np.searchsorted(-outs, -ins[ranks - 1], side="right")
    next_rank = np.searchsorted(out_ranks, others_reaching + 1)  # an index of out_ranks
    most_false = np.append(most_false_of_rank, 1.0)[next_rank]  # of each threshold
    with np.errstate(divide="ignore"):
        epsilons = np.log(np.maximum(least_true - delta, 0) / most_false)
    return float(np.max(epsilons, initial=0.0))


def _ranks(size: int) -> np.ndarray:
    """Ranks from both ends, closer together near the ends, where the rates are small."""
    from_top = np.geomspace(1, max(1, size // 2), _RANKS).astype(int)
    return np.unique(np.concatenate([from_top, size + 1 - from_top]))


def _measured(ins: np.ndarray, outs: np.ndarray) -> Float[np.ndarray, " four"]:
    """AUROC, and the true-positive rate at each rate of false positives; scores fall."""
    # AUROC: the pairs that a member wins; a draw counts half.
    below = np.searchsorted(outs[::-1], ins, "left")
    below_or_equal = np.searchsorted(outs[::-1], ins, "right")
    won = np.sum(below + below_or_equal) / 2 / outs.size
    counts = [won]
    for rate in RATES:
        # A member counts strictly above the first other row that the rate does not include.
        place = min(math.floor(rate * outs.size), outs.size - 1)
        counts.append(np.sum(ins > outs[place]))
    return np.array(counts) / ins.size


def _fitted(ins: np.ndarray, outs: np.ndarray, delta: float, confidence: float) -> float:
    r"""The lower bound on epsilon if both kinds of scores are Gaussian with one deviation.

    A lower confidence limit of $\mu$, the distance of the means in deviations, is the separation of
    a Gaussian mechanism. With m and n scores $\mu$ has about the standard error
    $\sqrt{1 / m + 1 / n + \mu^2 / (2 (m + n))}$.
    """
    from scipy.stats import norm

    total = ins.size + outs.size
    squares = ins.var() * ins.size + outs.var() * outs.size
    deviation = math.sqrt(squares / (total - 2))
    if not deviation:  # all scores of a kind are equal, so any difference is certain
        return math.inf if ins[0] > outs[0] else 0.0
    mu = (ins.mean() - outs.mean()) / deviation
    standard_error = math.sqrt(1 / ins.size + 1 / outs.size + mu**2 / (2 * total))
    least_mu = max(0.0, float(mu - norm.ppf(confidence) * standard_error))
    if delta:
        return profiles.gaussian(least_mu).epsilon(delta)
    return math.inf if least_mu else 0.0  # a Gaussian has no pure epsilon
