# SPDX-License-Identifier: Apache-2.0
"""Training without a search: batch, steps, noise and step sizes from public numbers.

`plan` chooses them from the number of examples, epsilon, delta and the parameters. It reads neither
the data nor a loss, so nothing that it chooses costs privacy.

Experimental: constants of a plan follow measurements that are not complete.
"""

from dpjax.planning.pace import paced
from dpjax.planning.plans import NO_SETTING, Planned, decay_for, plan
from dpjax.planning.sizes import Size, other_sizes, size_for

__all__ = ["NO_SETTING", "Planned", "Size", "decay_for", "other_sizes", "paced", "plan", "size_for"]
