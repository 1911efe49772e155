# SPDX-License-Identifier: Apache-2.0
"""Noise: what makes a clipped sum fit to be released.

`gaussian` is the Optax link, its scale a multiplier times the rule's sensitivity; `link`
holds it, and the key that an operating system gives.  It draws from `standard_normal`, in
float32 or wider and with the tails that a normal distribution has; `normal` holds that.
`langevin` is the same link, its multiplier following from a step size.

Privacy: float32 arithmetic and the threefry generator are not a hardened source of
randomness; see README.
"""

from dpjax.noise.langevin import langevin, langevin_multiplier
from dpjax.noise.link import (
    GaussianState,
    check_multiplier,
    gaussian,
    plain_multiplier,
    secret_key,
    standard_deviations,
)
from dpjax.noise.normal import standard_normal

__all__ = [
    "GaussianState",
    "check_multiplier",
    "gaussian",
    "langevin",
    "langevin_multiplier",
    "plain_multiplier",
    "secret_key",
    "standard_deviations",
    "standard_normal",
]
