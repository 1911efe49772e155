# SPDX-License-Identifier: Apache-2.0
"""Features: a fixed transform of a data set, normalised and cached on disk.

Only `Normalization` costs privacy: two Gaussian queries, or four if the clipping thresholds are
found privately too, which a `dpjax.Mechanism` accounts as its ``preparation``.
"""

from dpjax.features.cache import cached, scattered
from dpjax.features.normalization import Normalization, Search
from dpjax.features.scaling import Moments, group_norm, normalize

__all__ = [
    "Moments",
    "Normalization",
    "Search",
    "cached",
    "group_norm",
    "normalize",
    "scattered",
]
