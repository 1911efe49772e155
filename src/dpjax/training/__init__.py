# SPDX-License-Identifier: Apache-2.0
"""Training: private algorithms as ``(init, step)``, and the loop that drives any of them.

`dpsgd` joins a loss, an Optax optimizer, a `Mechanism` and data into an `Algorithm`.
`fit` drives an algorithm: progress, evaluation, refusal before a budget is passed.
`average_parameters` is an Optax link that keeps a running mean of the parameters, which
is free of privacy cost and worth several points of accuracy under noise.  `earlier` says
what a run in a folder has spent, for one that goes on from it with other settings, and
`forget` removes it.
`dp_adam` is Adam without the noise's part of its second moment, `scaled_rate` the learning
rate for another batch size.
"""

from dpjax.training.averaging import average_parameters, averaged
from dpjax.training.dpsgd import Info, State, dpsgd
from dpjax.training.fit import fit
from dpjax.training.folder import earlier, forget
from dpjax.training.optimizers import dp_adam, scaled_rate

__all__ = [
    "Info",
    "State",
    "average_parameters",
    "averaged",
    "dp_adam",
    "dpsgd",
    "earlier",
    "fit",
    "forget",
    "scaled_rate",
]
