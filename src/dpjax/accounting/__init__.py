# SPDX-License-Identifier: Apache-2.0
"""What a private computation costs: events, their composition, epsilon and delta.

An *event* (dp_accounting's `DpEvent`) says which noisy queries run, on which random samples, how
often. `epsilon`, `delta`, `calibrate` and `largest_steps` read events and nothing else: this room
has never heard of gradients, models or data. Four methods answer: RDP (the default), PLD
(tighter, slower), and, so that papers' figures can be printed, RDP with its first conversion and
the CLT estimate of Gaussian DP.

One convention rules: a noise multiplier in an event is relative to the *add-or-remove*
sensitivity (one example joins or leaves). Asking for `neighbours="replace-one"` doubles the
sensitivity, and that is converted here, once. Read `events`, then `leaves`, `rdp`, `pld`, `gdp`,
then `methods` and `search`, which join them, and last what is asked of them: `selection` (to keep
the best of many runs), `groups` (users with several examples) and `filters` (noise that is chosen
on the way).
"""

from dpjax.accounting.event_parts import NEIGHBOURS
from dpjax.accounting.events import (
    compose,
    effective_multiplier,
    gaussian,
    scheduled_gaussian,
    subsampled_gaussian,
)
from dpjax.accounting.filters import Filter, Refused, best_order
from dpjax.accounting.gdp import Estimate
from dpjax.accounting.methods import METHODS, Method, delta, epsilon
from dpjax.accounting.random_projections import ProjectedGaussianDpEvent, with_projections
from dpjax.accounting.rdp_divergence import ORDERS, renyi_divergence
from dpjax.accounting.search import calibrate, largest_steps
from dpjax.accounting.selection import DISTRIBUTIONS, Selection, draw_runs, select_best
from dpjax.accounting.user_level import epsilon_for_users, for_groups

__all__ = [
    "DISTRIBUTIONS",
    "METHODS",
    "NEIGHBOURS",
    "ORDERS",
    "Estimate",
    "Filter",
    "Method",
    "ProjectedGaussianDpEvent",
    "Refused",
    "Selection",
    "best_order",
    "calibrate",
    "compose",
    "delta",
    "draw_runs",
    "effective_multiplier",
    "epsilon",
    "epsilon_for_users",
    "for_groups",
    "gaussian",
    "largest_steps",
    "renyi_divergence",
    "scheduled_gaussian",
    "select_best",
    "subsampled_gaussian",
    "with_projections",
]
