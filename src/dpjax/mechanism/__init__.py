# SPDX-License-Identifier: Apache-2.0
"""The mechanism: the private computation, described once.

`mechanism/card.py` documents the JSON description that run folders and privacy cards share.
"""

from dpjax.mechanism.description import Mechanism
from dpjax.mechanism.spent import Risk, Spent, Target

__all__ = ["Mechanism", "Risk", "Spent", "Target"]
