# SPDX-License-Identifier: Apache-2.0
"""FedAvg and FedSGD: what clients move, averaged privately, moves the server.

Read `fedavg` from top to bottom: the ledger admits, then a round is played.  The server's
optimizer is any of Optax; it receives the private mean of minus the updates, so that
``optax.sgd(1.0)`` is FedAvg, with momentum FedAvgM, and ``optax.adam`` FedAdam.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import ledger, trees
from dpjax.federated.clients import Clients
from dpjax.federated.local import Local, ball
from dpjax.federated.rounds import Info, Recipe, observed, played
from dpjax.federated.weights import Weights
from dpjax.gradients.clipped_grad import check_sizes
from dpjax.mechanism import Mechanism
from dpjax.mechanism.check_sampler import check_draw
from dpjax.types import Algorithm, Key, LossFn, PyTree, State


def fedavg(
    loss: LossFn,
    server_optimizer: optax.GradientTransformation,
    mechanism: Mechanism,
    clients: Clients,
    *,
    client_optimizer: optax.GradientTransformation,
    local_batch_size: int,
    local_epochs: int | None = None,
    local_steps: int | None = None,
    project: bool = False,
    weights: Weights | None = None,
    microbatch_size: int | None = None,
    budget: ledger.Budget | None = None,
) -> Algorithm:
    r"""Federated averaging with differential privacy for clients.

    $$ \theta \leftarrow \mathrm{server}\Bigl(\theta,\ -\frac{1}{qW}
       \Bigl(\sum_{k \in C} s_k \,\mathrm{clip}(\theta_k - \theta) + \mathrm{noise}\Bigr)\Bigr) $$

    Args:
      loss: ``loss(params, example) -> scalar`` for one example.
      server_optimizer: Any Optax optimizer; ``optax.sgd(1.0)`` is plain averaging.
      mechanism: What is run and accounted, with ``unit="client"``: its sampler draws clients,
        its rule clips updates, whole.
      clients: Whose examples they are; as many as ``mechanism.sampling.examples``.
      client_optimizer: What each client trains with; it begins anew each round.
      local_batch_size: Examples in a client's batch; its loss is their mean.
      local_epochs: How often a drawn client goes through its own examples; or
      local_steps: how many batches it takes, of as many epochs as that needs.
      project: Whether a client returns into the bounds of the rule after each of its batches,
        by which its update never leaves them.  The update is clipped at the end all the same.
      weights: How much each client counts; by default all alike.
      microbatch_size: How many clients train at once.  Speed only.
      budget: A `dpjax.ledger.Budget` that no round may pass.

    Returns:
      An `Algorithm` for `dpjax.fit`.  It has no ``run``: a round is long as it is.

    Privacy:
      Of each client with all of its examples.  A round is one step of the mechanism, however
      long clients train, because what they return is clipped to the rule's bounds, weighted
      by at most 1, and divided by a public constant, never by what was drawn.

    | a client | its contribution |
    |---|---|
    | has no examples | exactly 0 |
    | ends with NaN or infinity anywhere | exactly 0, and ``info.dropped`` counts it |
    | has any number of examples | at most the rule's sensitivity |

    Example:
      >>> import dpjax
      >>> clients = Clients.of([jnp.ones((size, 3)) for size in (0, 1, 7, 30)])
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.poisson(examples=4, batch_size=2),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=1.0,
      ...     steps=5,
      ...     unit="client",
      ... )
      >>> algorithm = fedavg(
      ...     lambda w, x: 0.5 * jnp.sum((w - x) ** 2),
      ...     optax.sgd(1.0),
      ...     mechanism,
      ...     clients,
      ...     client_optimizer=optax.sgd(0.1),
      ...     local_batch_size=10,
      ...     local_epochs=2,
      ... )
      >>> state = algorithm.init(dpjax.noise.secret_key(), jnp.zeros(3))
      >>> state, info = algorithm.step(state)
      >>> state.ledger.steps
      1

    References:
      McMahan et al., "Learning Differentially Private Recurrent Language Models", 2018,
      algorithm 1; Reddi et al., "Adaptive Federated Optimization", 2021, for the server.
    """
    _check_kinds(clients, server_optimizer=server_optimizer, client_optimizer=client_optimizer)
    _check_work(local_batch_size, local_epochs, local_steps)
    if not isinstance(project, bool):
        raise ValueError(
            f"fedavg(project={project!r}): expected True or False, whether clients return into the "
            "rule's bounds. Usually a flag was read as text, which counts as True whatever it says."
        )
    epochs, steps = (None if x is None else int(x) for x in (local_epochs, local_steps))
    within = ball(mechanism.clipping) if project else None
    local = Local(loss, client_optimizer, int(local_batch_size), epochs, steps, within)
    work = {"batch_size": local.batch_size, "epochs": epochs, "steps": steps, "project": project}
    name = {"algorithm": "fedavg", "local": work}
    options = (weights, microbatch_size, budget)
    return _algorithm(local, server_optimizer, mechanism, clients, name, *options)


def fedsgd(
    loss: LossFn,
    server_optimizer: optax.GradientTransformation,
    mechanism: Mechanism,
    clients: Clients,
    *,
    weights: Weights | None = None,
    microbatch_size: int | None = None,
    budget: ledger.Budget | None = None,
) -> Algorithm:
    """Federated SGD with differential privacy for clients: an update is one gradient.

    Each drawn client returns the gradient of the mean loss of all its examples.  With one
    example a client this is `dpjax.dpsgd`.

    Args:
      loss: ``loss(params, example) -> scalar`` for one example.
      server_optimizer: Any Optax optimizer; the learning rate is its own.
      mechanism: As for `fedavg`; its rule clips the gradient of a client's mean loss.
      clients: Whose examples they are.
      weights: How much each client counts; by default all alike.
      microbatch_size: How many clients are differentiated at once.  Speed only.
      budget: A `dpjax.ledger.Budget` that no round may pass.

    Returns:
      An `Algorithm` for `dpjax.fit`.

    Privacy:
      As for `fedavg`.
    """
    _check_kinds(clients, server_optimizer=server_optimizer)
    local = Local(loss, optax.sgd(1.0), clients.capacity, epochs=None, steps=1, ball=None)
    options = (weights, microbatch_size, budget)
    name = {"algorithm": "fedsgd"}
    return _algorithm(local, server_optimizer, mechanism, clients, name, *options)


def _algorithm(
    local: Local,
    server: optax.GradientTransformation,
    mechanism: Mechanism,
    clients: Clients,
    name: Mapping[str, Any],
    weights: Weights | None,
    microbatch_size: int | None,
    budget: ledger.Budget | None,
) -> Algorithm:
    """Rounds of what clients do, as something that runs."""
    weights = Weights(values=np.ones(len(clients))) if weights is None else weights
    _check_clients(mechanism, clients, weights)
    check_draw(mechanism.sampling)
    check_sizes("federated", microbatch_size=microbatch_size)
    shares, scale = jnp.asarray(weights.shares), len(clients) / weights.total_share
    recipe = Recipe(local, server, mechanism, shares, scale, microbatch_size)
    compiled = jax.jit(lambda *state: played(recipe, *state))

    def init(key: Key, params: PyTree) -> State:
        trees.check_key(key, "federated: init")
        trees.check_params(params)
        noise_state = mechanism.privatize(key).init(params)
        moved = (noise_state, server.init(trees.widened(params)))
        return State(params, moved, key, ledger.empty())

    def step(state: State) -> tuple[State, Info]:
        ledger.require_untraced(state, "fedavg")
        spent = ledger.admit(state.ledger, mechanism, budget)
        params, moved, sums = compiled(state.params, state.optimizer, state.key, clients)
        return State(params, moved, state.key, spent), observed(sums)

    def identity() -> dict[str, Any]:
        held = {"shares": trees.fingerprint(weights.shares), "total": weights.total_share}
        data = {"weights": held, "data": trees.fingerprint(clients)}
        size = None if microbatch_size is None else int(microbatch_size)
        return {**name, **mechanism.identity, **data, "numerics": {"microbatch_size": size}}

    return Algorithm(init, step, mechanism, budget, identity=identity)


def _check_kinds(clients: Clients, **optimizers: Any) -> None:
    if not isinstance(clients, Clients):
        raise TypeError(
            f"federated: clients is a {type(clients).__name__}; expected federated.Clients, which "
            "knows whose each example is. Write federated.Clients.of(...) around a list of each "
            "client's arrays, or federated.Clients.split(data, owners=..., clients=...)."
        )
    for name, given in optimizers.items():
        if not (hasattr(given, "init") and hasattr(given, "update")):
            raise TypeError(
                f"federated: {name} is a {type(given).__name__}; expected an Optax optimizer, such "
                "as optax.sgd(0.1). Usually the learning rate alone was given, or the function "
                "optax.sgd without one."
            )


def _check_work(batch_size: int, epochs: int | None, steps: int | None) -> None:
    given = [x for x in (epochs, steps) if x is not None]
    if len(given) != 1 or not all(map(_whole, (*given, batch_size))):
        raise ValueError(
            f"fedavg(local_batch_size={batch_size}, local_epochs={epochs}, local_steps={steps}): "
            "expected a batch size of at least 1, and at least 1 of either epochs or steps, not "
            "both, in whole numbers: how long a drawn client trains before it answers."
        )


def _whole(number: Any) -> bool:
    """Whether so many can be counted, and there is one."""
    whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
    return whole and bool(number >= 1)


def _check_clients(mechanism: Mechanism, clients: Clients, weights: Weights) -> None:
    if not isinstance(weights, Weights):
        raise TypeError(
            f"federated: weights is a {type(weights).__name__}; expected federated.Weights(values="
            "one a client, largest=the weight at which a client is cut off), for the largest is "
            "what the noise is measured by, and must be public."
        )
    if mechanism.unit != "client":
        raise ValueError(
            f"federated: the mechanism protects one {mechanism.unit}, and what is drawn and "
            "clipped here is a client with all of its examples. Write Mechanism(unit='client', "
            f"sampling=dpjax.sampling.poisson(examples={len(clients)}, batch_size=...)): rates "
            "and sizes then count clients."
        )
    if mechanism.adaptive is not None:
        raise ValueError(
            "federated: this mechanism's bound follows a quantile, and rounds count no updates "
            "below it. Leave adaptive= out, and choose the bound by what is public."
        )
    if mechanism.clipping.projections is not None:
        raise ValueError(
            "federated: this rule estimates norms from random projections (clipping.jl), to spare "
            "the memory of single gradients. A client's update is at hand whole, so its exact norm "
            "is free, and costs less epsilon: take clipping.flat."
        )
    expected, sizes = mechanism.sampling.examples, (len(clients), np.size(weights.values))
    if sizes != (expected, expected):
        raise ValueError(
            f"federated: {sizes[0]} clients and {sizes[1]} weights, and the mechanism's sampler "
            f"draws from {expected}; the sampling rate would not be what is accounted. Usually "
            "examples were counted instead of clients: "
            f"dpjax.sampling.poisson(examples={sizes[0]}, batch_size=...)."
        )
