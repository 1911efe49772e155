# SPDX-License-Identifier: Apache-2.0
r"""User-level privacy: the cost of example-level training for a user with several examples.

Under Poisson sampling the number of a user's k records that are drawn is binomial. A step is then a
Gaussian whose signal is a mixture over 0 to k, which PLD accounts for exactly. Multiplying epsilon
by k is wrong, because delta grows too.

`sampling.cyclic_poisson` splits the data into parts. Each part is drawn from in one step of every
cycle, and a record joins by a coin. Banded noise is correlated over a few steps, so a record moves
(changes the mean of) several of the outputs that one Gaussian hides. Cycles are separate releases
only for a single record. Records of two parts move common outputs, also from one cycle to the next,
and the composition of one mixture per cycle understates their cost. Given all coins the run is one
Gaussian. The moves of one record in n cycles are orthogonal. Together they are no longer than
$\sqrt{n}$, and the moves of k records no longer than $k \sqrt{n}$. The coins do not depend on
whether the user is present, so the bound also holds without them: n Gaussians with multiplier
z / k.

A run of one cycle is one mixture. The inner product of the moves of two sets of records is at most
the product of their sizes, and by Kahane's inequality a smaller one costs less.
"""

import math
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from scipy import stats

from dpjax import checks
from dpjax.accounting._allocation import known_bins
from dpjax.accounting._calibration import by_bisection, by_secants, calibrate
from dpjax.accounting._event_parts import split
from dpjax.accounting.events import compose, gaussian, subsampled_gaussian
from dpjax.accounting.methods import epsilon


def for_groups(event: DpEvent, records: int) -> DpEvent:
    """The event for a user who owns up to ``records`` of the examples.

    A sampled step with rate ``q`` and multiplier ``z`` becomes ``N(j, z^2)``,
    ``j ~ Binomial(k, q)``, against ``N(0, z^2)``.

    Args:
      event: What was run, as for one example; of Gaussians, Poisson-sampled or not.
      records: ``k``, the most that any one user has; fewer cost less.

    Returns:
      An event whose neighbours differ by all the records of one user. PLD accounts it with
      "add-or-remove" or "zero-out"; RDP has no proof for mixtures.

      | part | becomes |
      |---|---|
      | Gaussians without sampling | one Gaussian with multiplier ``z / k`` |
      | Poisson-sampled with banded noise, of several cycles | likewise: nothing is amplified |
      | random allocation | likewise, with the least multiplier of each epoch |
      | sampled in another way | refused |

    Privacy:
      ``records`` is a promise about the data. To keep it, leave out the examples of a user beyond
      ``records`` before training, by a choice that reads only the data of that user.

    Example:
      >>> for_groups(gaussian(3.0), records=2)
      GaussianDpEvent(noise_multiplier=1.5)

    References:
      Ganesh, *Tight group-level DP guarantees for DP-SGD with sampling via mixture of Gaussians
      mechanisms*, 2024.
    """
    records = checks.whole("accounting.for_groups", "records", records)
    if records == 1:
        return event
    # Two kinds become Gaussians without sampling: samples with banded noise of several cycles, in
    # `split`, and random allocation, because a user may have all records in one random bin.
    parts = known_bins(split(event, records))
    if parts.foreign:
        raise ValueError(
            "accounting.for_groups: Gaussians alone, Poisson-sampled or not, have a proof; the "
            f"event holds {parts.named}. Sample with sampling.poisson."
        )
    if not parts.private:
        return dp_accounting.NonPrivateDpEvent()
    steps = []
    # All records join or leave together, so the signal without sampling is `records` times larger.
    if parts.precision:
        steps.append(gaussian(parts.unsampled_multiplier / records))
    # Each record is drawn independently. The signal of a step is the number of drawn records, which
    # is binomial. The mixture over it is exact and costs far less than the factor of group privacy.
    drawn = np.arange(records + 1.0)
    for (q, z), count in parts.sampled.items():
        odds = stats.binom.pmf(drawn, records, q)
        step = MixtureOfGaussiansDpEvent(
            standard_deviation=z, sensitivities=drawn.tolist(), sampling_probs=odds.tolist()
        )
        steps.append(dp_accounting.SelfComposedDpEvent(step, count))
    return compose(*steps)


def epsilon_for_users(
    event: DpEvent, delta: float, records: int, neighbours: str = "add-or-remove"
) -> float:
    """The epsilon that holds for users with up to ``records`` examples each, by PLD.

    It is `epsilon` of `for_groups`, with ``delta`` below one over the number of *users*, and
    ``neighbours`` "add-or-remove" or "zero-out", of a user; see `Mechanism.relation`. It is
    infinite where the accountant finds no finite bound, which happens beyond 100 records.

    Example:
      >>> from dpjax import accounting
      >>> event = accounting.subsampled_gaussian(1.0, sampling_rate=0.01, steps=200)
      >>> [round(epsilon_for_users(event, 1e-5, records), 3) for records in (1, 2)]
      [0.912, 1.947]
    """
    checks.delta("accounting.epsilon_for_users", delta)
    if neighbours == "replace-one":
        raise ValueError(
            "accounting.epsilon_for_users: 'replace-one' has no proof. Use 'add-or-remove'."
        )
    try:
        return epsilon(for_groups(event, records), delta, "pld", neighbours)
    except ValueError as error:
        # The root finder of dp_accounting 0.6 fails for a mixture that nearly always draws a record
        # and whose noise is far below its signal.
        if "must be greater than b" not in str(error):
            raise
        return math.inf


class PersonsOrRows(NamedTuple):
    """The noise that one plan needs by both ways to protect persons; see `persons_or_rows`."""

    persons: float
    """The noise multiplier with `dpjax.sampling.persons`, relative to the bound of a person."""
    rows: float
    """The noise multiplier with Poisson samples of rows, relative to the bound of a row."""
    ratio: float
    """The noise on the mean with persons, over that with rows."""

    @property
    def less(self) -> str:
        """The way that needs less noise: ``"persons"`` or ``"rows"``."""
        return "persons" if self.ratio <= 1 else "rows"


def persons_or_rows(
    persons: int,
    batch_size: float,
    most_rows: int,
    *,
    steps: int,
    epsilon: float,
    delta: float,
    bound_ratio: float = 1.0,
) -> PersonsOrRows:
    r"""Compares the noise of two ways to protect persons for a plan, by PLD; takes seconds.

    With `dpjax.sampling.persons`, B persons a step, the noise on the mean is $z_p C_p / B$. The
    other way keeps k rows of each person, draws each *row* at the same rate and accounts by
    `for_groups`. Its noise on the mean is $z_r C_r / (kB)$. With one bound the rows win, since a
    binomial number of rows varies less than all or none; but the mean over rows that disagree is
    shorter than a row.

    Args:
      persons: The number of persons; public.
      batch_size: B, the expected number of persons a step.
      most_rows: k.
      steps: The planned steps.
      epsilon: The most that the run may cost one person.
      delta: Below one over the number of persons.
      bound_ratio: $C_p / C_r$, from public data or a guess: 1 where rows of a person agree, and
        $1/\sqrt k$ where they are independent.

    Example:
      >>> plan = {"steps": 200, "epsilon": 1.0, "delta": 1e-4}
      >>> [persons_or_rows(2000, 200, 5, **plan, bound_ratio=r).less for r in (1, 0.5)]
      ['rows', 'persons']

    References:
      Charles et al., "Fine-Tuning Large Language Models with User-Level Differential Privacy",
      2024, which compares both ways.
    """
    call = "accounting.persons_or_rows"
    rate = batch_size / checks.whole(call, "persons", persons)
    records = checks.whole(call, "most_rows", most_rows)

    def event(multiplier: float) -> DpEvent:
        return subsampled_gaussian(multiplier, rate, steps)

    def spent_by_rows(multiplier: float) -> float:
        """The epsilon of a person whose rows are drawn one by one."""
        return epsilon_for_users(event(multiplier), delta, records)

    persons_multiplier = calibrate(event, epsilon, delta, "pld")
    # All k rows of a person in one sample need k times the noise; independent samples need less, so
    # this is a first guess for rows. The grid of mixtures is precise to about 0.1 % of epsilon, and
    # so is the search.
    guess = persons_multiplier * records
    rows_multiplier = by_secants(spent_by_rows, epsilon, guess, tight=1e-3)
    if rows_multiplier is None:
        rows_multiplier = by_bisection(spent_by_rows, epsilon, tight=1e-3)
    # This is (z_p C_p / B) / (z_r C_r / (k B)).
    ratio = persons_multiplier * bound_ratio * records / rows_multiplier
    return PersonsOrRows(persons_multiplier, rows_multiplier, ratio)
