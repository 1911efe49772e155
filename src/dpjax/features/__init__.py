# SPDX-License-Identifier: Apache-2.0
"""Features: a fixed transform of a data set, normalised and cached on disk.

`scattered` transforms all images once; `cached` stores the result of any transform under a hash
of its inputs. `group_norm` scales each example by itself and costs no privacy. `Normalization`
scales channels by statistics of the whole data set, which are private only with noise: two
Gaussian queries (four if the clipping thresholds are found privately too), which a
`dpjax.Mechanism` accounts as its ``preparation``.
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
