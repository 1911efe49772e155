# SPDX-License-Identifier: Apache-2.0
"""The mechanism: the private computation, described once.

`Mechanism` holds the sampler, the rule, the noise multiplier and the number of steps; it runs,
accounts, calibrates and describes them. `Spent` is the cost of an earlier run on the same
data. `Target` is what a mechanism was calibrated for. `mechanism/card.py` documents the JSON
description that run folders and privacy cards share.
"""

from dpjax.mechanism.description import Mechanism
from dpjax.mechanism.spent import Spent, Target

__all__ = ["Mechanism", "Spent", "Target"]
