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
`dp_sgld` draws from a posterior: its noise follows from the step size, `keep_samples` keeps
parameters on the way, `samples` reads them and `predictive` averages over them;
`on_mean_gradient` is the reading that papers print.
"""

from dpjax.training.averaging import average_parameters, averaged
from dpjax.training.dpsgd import dpsgd
from dpjax.training.fit import fit
from dpjax.training.optimizers import dp_adam, scaled_rate
from dpjax.training.run_folder import earlier, forget
from dpjax.training.samples import keep_samples, predictive, samples
from dpjax.training.sgld import dp_sgld, on_mean_gradient
from dpjax.training.step import Info
from dpjax.types import State

__all__ = [
    "Info",
    "State",
    "average_parameters",
    "averaged",
    "dp_adam",
    "dp_sgld",
    "dpsgd",
    "earlier",
    "fit",
    "forget",
    "keep_samples",
    "on_mean_gradient",
    "predictive",
    "samples",
    "scaled_rate",
]
