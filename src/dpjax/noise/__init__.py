# SPDX-License-Identifier: Apache-2.0
"""Noise: turns a clipped sum into one that may be released.

Privacy: float32 arithmetic and the threefry generator are not a hardened source of
randomness; see "Floating point" in docs/pages/sharp_edges.md.
"""

from dpjax.noise.correlated import correlated
from dpjax.noise.langevin import langevin, langevin_multiplier
from dpjax.noise.link import gaussian
from dpjax.noise.normal import standard_normal
from dpjax.noise.state import GaussianState, renew
from dpjax.processes import secret_key

__all__ = [
    "GaussianState",
    "correlated",
    "gaussian",
    "langevin",
    "langevin_multiplier",
    "renew",
    "secret_key",
    "standard_normal",
]
