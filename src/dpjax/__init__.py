# SPDX-License-Identifier: Apache-2.0
"""dpjax: training with differential privacy in JAX, where what is accounted is what runs.

A map of the house; every room is a module, every module a word:

  `clipping`    how much one example may contribute        `clip_and_sum`
  `noise`       what makes a sum releasable
  `schedules`   noise that changes over time
  `sampling`    which examples a step sees
  `accounting`  from events to epsilon and delta
  `mechanism`   the private computation, described once    `Mechanism`
  `ledger`      what was really spent; refusal
  `gradients`   the clipped sum, by several engines        `clipped_grad`
  `training`    algorithms, and the loop that drives them  `dpsgd`, `fit`
  `federated`   the same where the unit is a client        `fedavg`, `fedsgd`
  `checkpoints` any state on disk, and back to the last bit
  `reports`     the promise in words, as a file, as a page `statement`
  `testing`     the laws, to run on your own rules and losses
  `auditing`    what an attacker can really tell, measured
  `diagnostics` what clipping cuts, what grows, how the loss bends
  `models`, `activations`, `losses`, `metrics`, `data`     what to train, and on what
  `scattering`, `features`                                 what images are made of, for free
  `types`, `trees`, `checks`                               the words and the arithmetic

Read in this order: `types`, `clipping`, `noise`, `mechanism`, `training.dpsgd`.
"""

from dpjax import (
    accounting,
    activations,
    auditing,
    checkpoints,
    checks,
    clipping,
    data,
    diagnostics,
    features,
    federated,
    gradients,
    ledger,
    losses,
    mechanism,
    metrics,
    models,
    noise,
    reports,
    sampling,
    scattering,
    schedules,
    testing,
    training,
    trees,
    types,
)
from dpjax.clipping import clip_and_sum
from dpjax.gradients import clipped_grad
from dpjax.mechanism import Mechanism
from dpjax.reports import statement
from dpjax.training import dpsgd, fit

__all__ = [
    "Mechanism",
    "accounting",
    "activations",
    "auditing",
    "checkpoints",
    "checks",
    "clip_and_sum",
    "clipped_grad",
    "clipping",
    "data",
    "diagnostics",
    "dpsgd",
    "features",
    "federated",
    "fit",
    "gradients",
    "ledger",
    "losses",
    "mechanism",
    "metrics",
    "models",
    "noise",
    "reports",
    "sampling",
    "scattering",
    "schedules",
    "statement",
    "testing",
    "training",
    "trees",
    "types",
]
