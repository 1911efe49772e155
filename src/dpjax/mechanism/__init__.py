# SPDX-License-Identifier: Apache-2.0
"""The mechanism: the private computation, described once.

`Mechanism` holds the sampler, the rule, the noise multiplier and the number of steps, and
from it comes all that is run, accounted, calibrated and printed.  `Spent` is what earlier
runs on the same data have cost, `AdaptiveState` what noise needs to go on where the bound
is adapted.

This room must never know a model, a loss or a data set.
"""

from dpjax.mechanism.adaptive import AdaptiveState
from dpjax.mechanism.description import Mechanism
from dpjax.mechanism.spent import Spent

__all__ = ["AdaptiveState", "Mechanism", "Spent"]
