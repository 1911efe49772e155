# SPDX-License-Identifier: Apache-2.0
"""Features: what a fixed transform makes of a data set, brought to one scale and kept on disk.

`scattered` transforms all images once; `cached` remembers what any transform made of any data,
by content. `group_norm` scales each example by itself and costs nothing; `Normalization` scales
channels by statistics of the whole data set, and these are private only with noise: two Gaussian
queries (four if the clipping thresholds are found privately too), which a `dpjax.Mechanism`
accounts as its ``preparation``.

This room must never know what is trained on the features.
"""

from dpjax.features.cache import cached, scattered
from dpjax.features.normalization import Normalization, Search, channel_norms
from dpjax.features.scaling import Moments, group_norm, normalize

__all__ = [
    "Moments",
    "Normalization",
    "Search",
    "cached",
    "channel_norms",
    "group_norm",
    "normalize",
    "scattered",
]
