# SPDX-License-Identifier: Apache-2.0
"""FedAvg and FedSGD: recipes of `dpjax.training` whose rows are clients.

The gradient of a client's loss is minus its update.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import checks, ledger, meshes, trees
from dpjax.federated._local import Local
from dpjax.federated._rounds import Row, by_size, client_loss, round_info
from dpjax.federated.clients import Clients
from dpjax.federated.weights import Weights
from dpjax.mechanism import Mechanism
from dpjax.training.assembly import assemble
from dpjax.training.recipe import Recipe, extra_arguments
from dpjax.types import Algorithm, LossFn, Purpose, PyTree


def fedavg(
    loss: LossFn,
    server_optimizer: optax.GradientTransformation,
    mechanism: Mechanism,
    clients: Clients,
    *,
    client_optimizer: optax.GradientTransformation,
    local_batch_size: int | None = None,
    local_epochs: int,
    project: bool = False,
    weights: Weights | None = None,
    microbatch_size: int | None = None,
    budget: ledger.Budget | None = None,
) -> Algorithm:
    r"""Federated averaging with differential privacy for clients.

    $$ \theta \leftarrow \mathrm{server}\Bigl(\theta,\ -\frac{w_{\max}}{qW}
       \Bigl(\sum_{k \in C} s_k \,\mathrm{clip}(\theta_k - \theta) + \mathrm{noise}\Bigr)\Bigr) $$

    with the drawn clients $C$, the parameters $\theta_k$ of client k after its training, the
    sampling rate $q$, and the shares $s_k$ and the constants $W$ and $w_{\max}$ of `Weights`.

    Args:
      loss: As for `dpjax.dpsgd`.
      server_optimizer: Any Optax optimizer; ``optax.sgd(1.0)`` is plain averaging, with momentum
        FedAvgM, and ``optax.adam`` FedAdam.
      mechanism: The mechanism that runs and is accounted: its sampler draws clients, its rule
        clips whole updates. ``unit`` is a word for one client, such as ``"client"`` or ``"user"``.
        With ``adaptive`` all clients must count equally.
      clients: The examples, of ``mechanism.sampling.examples`` clients.
      client_optimizer: The optimizer of each client; it starts from its initial state each round.
      local_batch_size: Examples in a client's batch; its loss is their mean. By default all.
      local_epochs: Epochs of a drawn client over its own examples.
      project: Whether a client projects its update onto the bounds of the rule after each batch.
        The update is clipped at the end in either case.
      weights: How much each client counts; by default all count equally.
      microbatch_size: How many clients train simultaneously. Speed only.
      budget: A `dpjax.ledger.Budget` that no round may pass.

    Returns:
      An `Algorithm` for `dpjax.fit`.

    Privacy:
      For each client with all of its examples. A round is one step of the mechanism however long
      clients train: their updates are clipped to the rule's bounds, weighted by at most 1, and
      divided by a public constant, never by the size of the draw.

      A client without examples contributes exactly 0, and so does one that ends with NaN or
      infinity anywhere, which ``info.dropped`` counts.

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
      >>> state = algorithm.init(jnp.zeros(3))
      >>> state, info = algorithm.step(state)
      >>> state.ledger.steps
      1

    References:
      McMahan et al., "Learning Differentially Private Recurrent Language Models", 2018,
      algorithm 1; Reddi et al., "Adaptive Federated Optimization", 2021, for the server.
    """
    call = "federated.fedavg"
    hint = "Write federated.Clients.of(list) or federated.Clients.split(data, owners, clients)."
    checks.instance(call, "clients", clients, Clients, hint)
    checks.instance(call, "mechanism", mechanism, Mechanism)
    checks.optimizer(f"{call}: server_optimizer", server_optimizer)
    checks.optimizer(f"{call}: client_optimizer", client_optimizer)
    if weights is None:
        weights = Weights(values=np.ones(len(clients)))
    checks.instance(call, "weights", weights, Weights)
    _check_rounds(call, mechanism, clients, weights, project)
    batch_size = checks.whole_or_none(call, "local_batch_size", local_batch_size)
    # An update that each local step projects onto the bounds is hardly clipped at the end.
    within = None  # no projection
    if project:
        within = mechanism.clipping
    local = Local(
        loss=loss,
        optimizer=client_optimizer,
        batch_size=batch_size or clients.capacity,
        epochs=checks.whole(call, "local_epochs", local_epochs),
        within=within,
    )
    # The step divides by q times the number of clients, for the sampling rate q; the mean divides
    # by q times the public total of the shares. The total of the drawn ones is private.
    scale = len(clients) / weights.total_share
    recipe = recipe_of(call, local, server_optimizer, mechanism, clients, scale, microbatch_size)
    rows = Row(
        client=jnp.arange(len(clients)),
        share=jnp.asarray(weights.shares),
        size=clients.counts,
    )
    identity = {"algorithm": "fedavg", "weights": {"total": weights.total_share}}
    algorithm = assemble(
        recipe,
        rows,
        identity,
        shared=clients,  # the examples, which the loss of each row reads
        budget=budget,
        info=round_info,
        # `init` checks the loss of one example by these: the step sees only the loss of a client.
        of_one=(loss, trees.one_row(clients.examples)),
    )
    # The statement of a run names this factor, because it is not in the mechanism.
    scaled_by = None
    if weights.total_share != len(clients):
        scaled_by = "the total of weights"
    # The sampler of the recipe also orders drawn clients by size, which changes nothing that is
    # accounted. Users see the mechanism that they gave.
    return replace(algorithm, mechanism=mechanism, scaled_by=scaled_by)


def _check_rounds(
    call: str, mechanism: Mechanism, clients: Clients, weights: Weights, project: bool
) -> None:
    """Refuses a mechanism that rounds do not run, and clients that are not its units."""
    if not mechanism.of_clients:
        raise ValueError(
            f"{call}: the unit is one {mechanism.unit}, and {mechanism.sampling.name} draws "
            f"{mechanism.sampling.unit}s. Write Mechanism(unit='client') and sampling.poisson."
        )
    # A client's exact norm is free, so estimated norms save nothing here.
    if mechanism.clipping.projections is not None:
        raise ValueError(f"{call}: rounds have no estimated norms. Use clipping.flat.")
    # Adaptive bounds count the norms below the bound, and this count ignores weights. Local steps
    # project onto the initial bounds, and do not know adapted ones.
    if mechanism.adaptive is not None and (project or np.ptp(weights.shares) > 0):
        raise ValueError(
            f"{call}: adaptive bounds with project=True or with unequal weights. Leave these out."
        )
    expected = mechanism.sampling.examples
    count = len(clients)
    weight_count = np.size(weights.values)
    if count != expected or weight_count != expected:
        raise ValueError(
            f"{call}: {count} clients and {weight_count} weights; the mechanism's sampler draws "
            f"from {expected}."
        )


def fedsgd(
    loss: LossFn,
    server_optimizer: optax.GradientTransformation,
    mechanism: Mechanism,
    clients: Clients,
    **options: Any,
) -> Algorithm:
    """Federated SGD with differential privacy for clients: an update is one gradient.

    Each drawn client returns the gradient of the mean loss of all its examples. With one example
    per client this is `dpjax.dpsgd`. The arguments are as in `fedavg`, with ``weights``,
    ``microbatch_size`` and ``budget`` as options: the server's optimizer has the learning rate, and
    the mechanism's rule clips the gradient of a client's mean loss.

    Privacy:
      As for `fedavg`.

    Example:
      >>> import dpjax
      >>> clients = dpjax.federated.Clients.of([jnp.ones((n, 3)) for n in (5, 30, 8, 12)])
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.poisson(examples=4, batch_size=2),
      ...     clipping=dpjax.clipping.flat(bound=0.5),
      ...     noise_multiplier=1.0,
      ...     steps=10,
      ...     unit="client",
      ... )
      >>> loss = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
      >>> algorithm = fedsgd(loss, optax.sgd(0.1), mechanism, clients)
      >>> algorithm.mechanism.unit  # init and step are as in the example of `fedavg`
      'client'
    """
    # The update of one step of rate 1 on the mean of all examples is minus the gradient.
    work: dict[str, Any] = {"client_optimizer": optax.sgd(1.0), "local_epochs": 1}
    return fedavg(loss, server_optimizer, mechanism, clients, **work, **options)


def recipe_of(
    call: str,
    local: Local,
    server: optax.GradientTransformation,
    mechanism: Mechanism,
    clients: Clients,
    scale: float,
    microbatch_size: int | None = None,
) -> Recipe:
    """One round as a private step, on `Row`s; ``scale`` is the clients over the sum of shares."""
    return Recipe(
        name=call,
        loss=client_loss(local),
        optimizer=scaled(server, scale),
        mechanism=replace(mechanism, sampling=by_size(mechanism.sampling, clients)),
        # The update of a client exists as a whole, so book-keeping has nothing to save.
        engine="vmap",
        # Each client orders its rows by this key.
        entry=lambda key, step: trees.mappable(trees.step_key(key, Purpose.LOCAL, step)),
        weights=lambda step, params, example: example[1],  # the share of a `Row`
        microbatch_size=microbatch_size,
        mesh=meshes.of(),  # that of `jax.set_mesh`, or of all processes
        sizes=lambda rows: rows.size,
    )


def scaled(
    server: optax.GradientTransformation, scale: float
) -> optax.GradientTransformationExtraArgs:
    """The server's optimizer on means over shares: the mean over clients, times ``scale``."""

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        # The factor is a public constant. One of the drawn clients or weights reveals them.
        mean = jax.tree.map(lambda x: x * jnp.asarray(scale, x.dtype), updates)
        # The noise of the mean is relative to both factors.
        bound_scale = scale * extra.get("bound_scale", 1.0)
        return server.update(mean, state, params, **extra_arguments(server, bound_scale))

    return optax.GradientTransformationExtraArgs(server.init, update)
