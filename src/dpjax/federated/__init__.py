# SPDX-License-Identifier: Apache-2.0
"""Federated training with differential privacy for clients, each with all of its examples.

One idea: **a client's update is its gradient**.  A drawn client trains for itself from the
server's parameters; what it moved is clipped, weighted, summed and noised as one example's
gradient is by `dpjax.dpsgd`, by the same rules, and accounted by the same mechanism, with
``Mechanism(unit="client")``.  Nothing that a client does at home can break the guarantee.

`clients` holds the examples of clients of unequal size, `weights` says how much each counts,
`local` is what one client does, `rounds` is what one step does, `fedavg` puts them together,
and `evaluation` looks at clients one by one.

All of it is a simulation in one process: the server here sees each update.  Nothing in this
room knows how an epsilon is computed.
"""

from dpjax.federated.clients import Clients
from dpjax.federated.evaluation import evaluate_clients, scores
from dpjax.federated.fedavg import fedavg, fedsgd
from dpjax.federated.rounds import Info
from dpjax.federated.weights import Weights
from dpjax.types import State

__all__ = [
    "Clients",
    "Info",
    "State",
    "Weights",
    "evaluate_clients",
    "fedavg",
    "fedsgd",
    "scores",
]
