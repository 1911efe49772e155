# SPDX-License-Identifier: Apache-2.0
"""Training: private algorithms as ``(init, step)``, and the loop that drives any of them.

| name | what it is |
|---|---|
| `dpsgd` | a loss, an Optax optimizer, a `Mechanism` and data, as an `Algorithm` |
| `fit` | drives an algorithm: progress, evaluation, checkpoints, refusal before overspending |
| `earlier`, `forget` | what the run in a folder has spent; removes a run |
| `Checkpoints` | saves and restores a state, bit for bit |
| `released_params` | the parameters that the run in a folder has released |
| `average_parameters`, `averaged` | an Optax link that keeps a running mean, free of privacy cost |
| `dp_adam`, `scaled_rate` | Adam without the noise in its second moment; a rate for a batch size |
| `lookahead` | `optax.lookahead` for parameters as the loss takes them |
| `dp_sgld` | Langevin dynamics |
| `keep_samples`, `samples`, `predictive` | keeps samples, reads them, averages predictions |
"""

from dpjax.training.averaging import average_parameters, averaged
from dpjax.training.checkpoints import Checkpoints
from dpjax.training.dpsgd import dpsgd
from dpjax.training.fit import fit
from dpjax.training.info import Info
from dpjax.training.optimizers import dp_adam, lookahead, scaled_rate
from dpjax.training.released import released_params
from dpjax.training.run_folder import earlier, forget
from dpjax.training.samples import keep_samples, predictive, samples
from dpjax.training.sgld import dp_sgld

__all__ = [
    "Checkpoints",
    "Info",
    "average_parameters",
    "averaged",
    "dp_adam",
    "dp_sgld",
    "dpsgd",
    "earlier",
    "fit",
    "forget",
    "keep_samples",
    "lookahead",
    "predictive",
    "released_params",
    "samples",
    "scaled_rate",
]
