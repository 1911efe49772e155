# SPDX-License-Identifier: Apache-2.0
"""Noise: turns a clipped sum into one that may be released.

`gaussian` is the Optax link; its scale is a multiplier times the rule's sensitivity. It draws from
`standard_normal`, in float32 or wider, with the full tails of a normal distribution. `correlated`
lets the noise of later steps cancel some of the earlier noise, `langevin` is `gaussian` with the
multiplier of a step size, `renew` gives a state fresh keys, and `secret_key` reads the operating
system's randomness.

Privacy: float32 arithmetic and the threefry generator are not a hardened source of
randomness; see "Floating point" in docs/pages/sharp_edges.md.
"""

from dpjax.noise.correlated import correlated
from dpjax.noise.langevin import langevin, langevin_multiplier
from dpjax.noise.link import gaussian
from dpjax.noise.normal import standard_normal
from dpjax.noise.state import GaussianState, renew, secret_key

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
