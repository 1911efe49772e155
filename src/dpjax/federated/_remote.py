# SPDX-License-Identifier: Apache-2.0
"""Rounds with clients in other processes: each drawn client is sent the parameters, and replies.

A round is a step on a `Stream` whose rows are the replies of the drawn clients. The step reads its
rows after the ledger has admitted it, so a round is admitted before its messages leave. Draw, clip,
weights, sum, noise and checkpoints are the same as in `dpjax.dpsgd`. This file knows no protocol:
an `Exchange` sends and receives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, Float, Int

from dpjax import checks, ledger, meshes, training, trees
from dpjax._stream import Stream
from dpjax.federated._rounds import with_update
from dpjax.federated.fedavg import scaled
from dpjax.federated.weights import Weights
from dpjax.mechanism import Mechanism
from dpjax.training.assembly import assemble
from dpjax.training.info import Seen, mean_info
from dpjax.training.recipe import Recipe
from dpjax.types import Algorithm, PyTree, State

Exchange = Callable[[int, PyTree, list[int]], Iterable[tuple[int, PyTree]]]
"""``exchange(step, params, drawn)``: sends the parameters to the drawn clients, and yields the
number of a client and the parameters that it replies, as they come."""


class Reply(NamedTuple):
    """One drawn client as a row of the data."""

    update: PyTree
    share: Any
    """How much the client counts, from 0 to 1."""
    usable: Any
    """1 if the client replied with the shapes of the parameters; 0 masks the row."""


@dataclass
class Population:
    """The registered clients, and the parameters that the next round sends."""

    exchange: Exchange
    shares: Float[np.ndarray, " clients"]
    sent: PyTree
    step: int = 0

    def __len__(self) -> int:
        return len(self.shares)

    def __getitem__(self, client: int) -> Reply:
        """The row of a client without a usable reply."""
        nothing = jax.tree.map(np.zeros_like, self.sent)
        return Reply(nothing, self.shares[client], usable=np.int32(0))

    def replies(self, drawn: list[int]) -> Iterator[Reply]:
        """One row for each drawn client, in the order in which they reply."""
        waiting = set(drawn)
        for client, params in self.exchange(self.step, self.sent, drawn):
            # Only the first reply counts. With two, a client moves the sum by two bounds.
            if client not in waiting:
                continue
            waiting.remove(client)
            update = _difference(params, self.sent)
            if update is None:
                yield self[client]  # the row without a usable reply
            else:
                yield Reply(update, self.shares[client], usable=np.int32(1))
        for client in waiting:
            yield self[client]


def _difference(params: PyTree, sent: PyTree) -> PyTree | None:
    """The update of a client; None if the reply has other leaves, shapes or kinds of numbers."""
    if jax.tree.structure(params) != jax.tree.structure(sent):
        return None
    pairs = zip(map(np.asarray, jax.tree.leaves(params)), jax.tree.leaves(sent), strict=True)
    if any(new.shape != old.shape or new.dtype.kind not in "fiu" for new, old in pairs):
        return None
    # Infinity and NaN are left to the clipping rule, which drops the update.
    with np.errstate(all="ignore"):
        return jax.tree.map(lambda new, old: np.asarray(new).astype(old.dtype) - old, params, sent)


@dataclass(frozen=True, eq=False)
class Replies(Stream):
    """The replies of drawn clients as rows; to read them is to send the parameters."""

    source: Population

    @property
    def fingerprint(self) -> str:
        """The number of clients, because nothing may be sent before a round is admitted."""
        return f"{len(self)} clients"

    def batches(
        self, draws: Iterable[Int[np.ndarray, " size"]], ahead: int = 2
    ) -> Generator[Reply, None, None]:
        """The replies of the drawn clients of one round, each as a batch of one."""
        del ahead  # a reply depends on the parameters of its round, so no later one is read
        drawn = [int(client) for draw in draws for client in draw]
        for reply in self.source.replies(drawn):
            yield jax.tree.map(lambda leaf: np.asarray(leaf)[None], reply)


class RemoteInfo(NamedTuple):
    """Measurements of a round, **before** any noise: look at it, do not publish it."""

    examples: Int[Array, ""]
    """How many clients were drawn."""
    missing: Int[Array, ""]
    """How many of them contributed zero because no usable reply came in time."""
    dropped: Int[Array, ""]
    """How many of them contributed zero because their update was not finite."""
    norm: Float[Array, " groups"]
    """Mean norm of an update per group before clipping, over the clients that counted."""
    clipped: Float[Array, " groups"]
    """Fraction of the updates with a norm above the bound, per group."""


def _remote_info(seen: Seen) -> RemoteInfo:
    """The means of rounds, from their sums; `mean_info` for replies."""
    means = mean_info(seen)
    return RemoteInfo(
        examples=means.examples,
        missing=jnp.asarray(seen.drawn - seen.working),
        dropped=means.dropped,
        norm=means.norm,
        clipped=means.clipped,
    )


def check_remote(
    call: str,
    mechanism: Mechanism,
    optimizer: optax.GradientTransformation,
    weights: Weights,
    clients: Sequence[Hashable],
) -> None:
    """Refuses a mechanism that remote rounds do not run, and clients that do not match it."""
    checks.instance(call, "mechanism", mechanism, Mechanism)
    checks.optimizer(f"{call}: optimizer", optimizer)
    checks.instance(call, "weights", weights, Weights)
    sampler = mechanism.sampling
    # The checkpoint of a killed server has no keys, so draws that share a key cannot resume. Draws
    # of persons have several rows for a unit, and a client replies with one.
    if not sampler.independent or sampler.most_rows is not None:
        raise ValueError(
            f"{call}: {sampler.name} draws are not of one client and one round. Use "
            "sampling.poisson."
        )
    if mechanism.unit == "example":
        raise ValueError(f"{call}: the unit is an example. Write Mechanism(unit='client').")
    # Adaptive bounds count the norms below the bound, and this count ignores weights. Estimated
    # norms (projections) save nothing, because an update exists as a whole.
    if mechanism.adaptive is not None or mechanism.clipping.projections is not None:
        raise ValueError(
            f"{call}: rounds have neither adaptive bounds nor estimated norms. Use clipping.flat."
        )
    count = len(clients)
    weight_count = np.size(weights.values)
    if len(set(clients)) != count:
        raise ValueError(f"{call}: a client is twice in the population. Each is one unit.")
    if count != sampler.examples or weight_count != sampler.examples:
        raise ValueError(
            f"{call}: {count} clients and {weight_count} weights; the mechanism's sampler draws "
            f"from {sampler.examples}."
        )


def remote_rounds(
    call: str,
    optimizer: optax.GradientTransformation,
    mechanism: Mechanism,
    weights: Weights,
    exchange: Exchange,
    params: PyTree,
    identity: Mapping[str, Any],
    budget: ledger.Budget | None = None,
) -> Algorithm:
    """Federated averaging over an exchange, with the formula of `dpjax.federated.fedavg`.

    ``params`` are NumPy arrays with the shapes and types of the parameters that `init` is given.
    ``identity`` distinguishes these runs from others, for a checkpoint or a folder.
    """
    population = Population(exchange, weights.shares, params)
    clients = len(population)
    recipe = Recipe(
        name=call,
        # This loss is 0, and its gradient is minus the update.
        loss=lambda params, reply: with_update(params, reply.update),
        # The step divides by q times the number of clients, for the sampling rate q; the mean
        # divides by q times the public total of the shares.
        optimizer=scaled(optimizer, clients / weights.total_share),
        mechanism=mechanism,
        engine="vmap",  # each update exists as a whole, so other engines have nothing to save
        weights=lambda step, params, reply: reply.share,
        # One reply is in memory at a time.
        microbatch_size=1,
        mesh=meshes.of(),  # that of `jax.set_mesh`, or of all processes
        sizes=lambda replies: replies.usable,  # 0 masks a row
    )
    facts = {**identity, "weights": {"total": weights.total_share}}
    algorithm = assemble(recipe, Replies(population), facts, budget=budget, info=_remote_info)

    def run(state: State, count: int) -> tuple[State, RemoteInfo]:
        """`Algorithm.run`, in which each round sends the parameters of the one before."""
        infos = []
        for _ in range(count):
            population.step = int(state.step)
            population.sent = jax.device_get(state.params)
            state, info = algorithm.run(state, 1)
            infos.append(info)
        return state, jax.tree.map(lambda *rounds: np.concatenate(rounds), *infos)

    def step(state: State) -> tuple[State, RemoteInfo]:
        """`Algorithm.step`, which keeps the given state usable; `run` donates its buffers."""
        after, infos = run(trees.copy(state), 1)
        return after, jax.tree.map(lambda rounds: rounds[0], infos)

    # The statement of a run names this factor, because it is not in the mechanism.
    scaled_by = None
    if weights.total_share != clients:
        scaled_by = "the total of weights"
    return replace(algorithm, run=run, step=step, scaled_by=scaled_by)


def run_rounds(
    call: str,
    algorithm: Algorithm,
    params: PyTree,
    rounds: int | None,
    directory: str | os.PathLike[str],
    evaluate: Callable[[State], Mapping[str, Any]],
) -> tuple[State, list[dict[str, Any]]]:
    """The rounds in a folder, as far as the budget allows; a killed run resumes there."""
    mechanism: Any = algorithm.mechanism
    asked = mechanism.steps
    if rounds is not None:
        asked = checks.whole(call, "num_rounds", rounds)
    # `fit` refuses rounds beyond the budget, so they are cut here. Rounds beyond the plan are left
    # for `fit` to refuse, unless the budget ends before the plan.
    granted = asked
    affordable = ledger.affordable(mechanism, algorithm.budget)  # at most the plan
    if affordable < mechanism.steps:
        granted = min(asked, affordable)
    state, rows = training.fit(
        algorithm,
        algorithm.init(params),
        steps=granted,
        evaluate=evaluate,
        # `fit` saves a checkpoint before each evaluation. So parameters are on disk before clients
        # get them.
        evaluate_every=1,
        directory=directory,
    )
    if granted < asked:
        logging.warning(
            "%s: round %d of %d exceeds %r; no further round runs.",
            call,
            granted + 1,
            asked,
            algorithm.budget,
        )
    return state, rows
