# SPDX-License-Identifier: Apache-2.0
"""Rules: how much one example may contribute, and how its gradient is scaled to that.

Bounds and thresholds must not be computed from private data without paying for it.
"""

from dpjax.clipping.application import ClipState, clip, clip_and_sum, empty_sum, trusted_sum
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
    "empty_sum",
    "flat",
    "grouped",
    "hard_threshold",
    "jl",
    "normalized",
    "per_group",
    "psac",
    "trusted_sum",
]
