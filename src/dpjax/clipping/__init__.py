# SPDX-License-Identifier: Apache-2.0
"""Rules: how much one example may contribute, and how its gradient is scaled to it.

A rule answers two questions: into which groups are the leaves divided (`partitions`), and
by which factor does each group of an example's gradient get scaled (`rules`).  Each rule is
a `Clipping` that holds both, and whose ``sensitivity`` follows from its bounds.
`clip_and_sum` puts a rule into an Optax chain (`application`).  A bound that is not known
beforehand may follow the gradients that are seen, for a price: `Quantile` (`quantile`).

Bounds and thresholds must not be computed from private data (or must be paid for).
This room must never know how gradients are computed or what an epsilon is.
"""

from dpjax.clipping.application import ClipState, clip, clip_and_sum
from dpjax.clipping.partitions import balanced, by_layer, by_leaf, by_path
from dpjax.clipping.quantile import Quantile
from dpjax.clipping.rules import (
    automatic,
    flat,
    grouped,
    hard_threshold,
    jl,
    normalized,
    per_group,
    psac,
)

__all__ = [
    "ClipState",
    "Quantile",
    "automatic",
    "balanced",
    "by_layer",
    "by_leaf",
    "by_path",
    "clip",
    "clip_and_sum",
    "flat",
    "grouped",
    "hard_threshold",
    "jl",
    "normalized",
    "per_group",
    "psac",
]
