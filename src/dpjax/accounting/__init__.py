# SPDX-License-Identifier: Apache-2.0
"""The cost of a private computation: events, their composition, epsilon and delta.

An *event* (dp_accounting's `DpEvent`) records which noisy queries ran, on which random samples and
how often. `epsilon`, `delta`, `calibrate` and `largest_steps` read only events. There are four
methods: RDP (the default; a mechanism's is `default_method`), PLD (tighter, slower), RDP with the
conversion that older papers print, and the CLT estimate of Gaussian DP.

A noise multiplier in an event is relative to the *add-or-remove* sensitivity (one example joins or
leaves). ``neighbours="replace-one"`` doubles the sensitivity, and only this package converts it.
"""

from dpjax.accounting._calibration import calibrate, calibrate_risk, largest_steps
from dpjax.accounting._loss_distributions import levels
from dpjax.accounting._random_projections import with_projections
from dpjax.accounting._selection import Selection, draw_runs, select_best
from dpjax.accounting._user_level import (
    PersonsOrRows,
    epsilon_for_users,
    for_groups,
    persons_or_rows,
)
from dpjax.accounting.events import (
    RandomAllocationDpEvent,
    compose,
    effective_multiplier,
    gaussian,
    scheduled_gaussian,
    subsampled_gaussian,
)
from dpjax.accounting.methods import (
    METHODS,
    Method,
    default_method,
    delta,
    epsilon,
    levels_of,
    tightest,
    true_positive_rate,
)
from dpjax.accounting.profiles import Estimate

__all__ = [
    "METHODS",
    "Estimate",
    "Method",
    "PersonsOrRows",
    "RandomAllocationDpEvent",
    "Selection",
    "calibrate",
    "calibrate_risk",
    "compose",
    "default_method",
    "delta",
    "draw_runs",
    "effective_multiplier",
    "epsilon",
    "epsilon_for_users",
    "for_groups",
    "gaussian",
    "largest_steps",
    "levels",
    "levels_of",
    "persons_or_rows",
    "scheduled_gaussian",
    "select_best",
    "subsampled_gaussian",
    "tightest",
    "true_positive_rate",
    "with_projections",
]
