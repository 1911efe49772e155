# SPDX-License-Identifier: Apache-2.0
"""What a private computation costs: events, their composition, epsilon and delta.

An *event* (dp_accounting's `DpEvent`) says which noisy queries ran, on which random samples and how
often. `epsilon`, `delta`, `calibrate` and `largest_steps` read events alone. Four methods answer:
RDP (the default; a mechanism's is `default_method`), PLD (tighter, slower), RDP with the conversion
that older papers print, and the CLT estimate of Gaussian DP.

A noise multiplier in an event is relative to the *add-or-remove* sensitivity (one example joins or
leaves). ``neighbours="replace-one"`` doubles the sensitivity, and this room alone converts it.
"""

from dpjax.accounting.calibration import calibrate, largest_steps
from dpjax.accounting.events import (
    RandomAllocationDpEvent,
    compose,
    effective_multiplier,
    gaussian,
    scheduled_gaussian,
    subsampled_gaussian,
)
from dpjax.accounting.filters import Filter, best_order
from dpjax.accounting.loss_distributions import levels
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
from dpjax.accounting.random_projections import with_projections
from dpjax.accounting.rdp_divergence import ORDERS, renyi_divergence
from dpjax.accounting.selection import DISTRIBUTIONS, Selection, draw_runs, select_best
from dpjax.accounting.user_level import (
    PersonsOrRows,
    epsilon_for_users,
    for_groups,
    persons_or_rows,
)

__all__ = [
    "DISTRIBUTIONS",
    "METHODS",
    "ORDERS",
    "Estimate",
    "Filter",
    "Method",
    "PersonsOrRows",
    "RandomAllocationDpEvent",
    "Selection",
    "best_order",
    "calibrate",
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
    "renyi_divergence",
    "scheduled_gaussian",
    "select_best",
    "subsampled_gaussian",
    "tightest",
    "true_positive_rate",
    "with_projections",
]
