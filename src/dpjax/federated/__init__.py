# SPDX-License-Identifier: Apache-2.0
"""Federated training with differential privacy for clients, each with all of its examples.

One idea: **a client's update is its gradient**. A drawn client trains locally from the server's
parameters. Its update is clipped, weighted, summed and noised by the step of `dpjax.dpsgd`, and
accounted by a ``Mechanism(unit="client")``. Local training cannot break the guarantee.

`Clients` holds the examples of clients of unequal size, `Weights` how much each counts. `fedavg`
and `fedsgd` are the algorithms; `scores` and `evaluate_clients` measure single clients.

All of this is a simulation in one process: the server sees every update. `PrivateStrategy` runs the
same rounds with real clients, over Flower.
"""

from dpjax.federated._rounds import Info
from dpjax.federated.clients import Clients
from dpjax.federated.evaluation import evaluate_clients, scores
from dpjax.federated.fedavg import fedavg, fedsgd
from dpjax.federated.flower import PrivateStrategy
from dpjax.federated.weights import Weights

__all__ = [
    "Clients",
    "Info",
    "PrivateStrategy",
    "Weights",
    "evaluate_clients",
    "fedavg",
    "fedsgd",
    "scores",
]
