# SPDX-License-Identifier: Apache-2.0
"""Federated averaging over Flower: clients are other processes, on other machines.

The server draws registered clients, sends them the model, and clips, weights, sums and noises what
they reply. Everything that decides the guarantee is in `_remote` and in `dpjax.training`; this file
only turns parameters into messages of Flower and back. Flower is imported when a strategy is made.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import logging

from dpjax import ledger
from dpjax._files import FIELDS
from dpjax.federated._remote import check_remote, remote_rounds, run_rounds
from dpjax.federated.weights import Weights
from dpjax.mechanism import Mechanism
from dpjax.types import Algorithm, PyTree, State

_CALL = "federated.PrivateStrategy"
_POLL = 0.5  # seconds between two passes over the replies that are missing
# The mean of a metric of clients, in a row's "private".
_OF_CLIENTS = "clients' "

# Flower's objects, whose package this file does not import.
Grid = Any
ArrayRecord = Any
ConfigRecord = Any
MetricRecord = Any


class PrivateStrategy:
    r"""Federated averaging with differential privacy for clients, as a strategy of Flower.

    Experimental: it follows the messages of Flower, and was tried on one machine.

    The formula of a round is that of `fedavg`. A client is any Flower `ClientApp` that replies with
    the model it has trained, as for Flower's own ``FedAvg``; it may use NumPy, PyTorch or JAX.

    Args:
      mechanism: The mechanism that runs and is accounted. Its sampler draws from the population,
        also who is offline; it draws each round independently, as `dpjax.sampling.poisson` does.
        ``unit`` is a word for one client.
      optimizer: The server's optimizer; ``optax.sgd(1.0)`` is plain averaging.
      population: The public keys of all clients, in OpenSSH's format or as PEM, registered and
        public before the first round. A unit is a key: start the SuperLink with
        ``--enable-supernode-auth``, since otherwise a client that restarts has another one.
      weights: How much each client counts, in the order of the population; by default all equally.
        The number of examples that a client reports is not used.
      budget: A `dpjax.ledger.Budget`. The run ends before the first round that exceeds it.
      directory: The folder of the run, as for `dpjax.fit`: a server that was killed resumes there.

    Privacy:
      For each client with all of its examples, against everyone who sees released models. The
      server sees every update. It must keep the draws secret, and with them the folder, the log and
      the database of the SuperLink.

      A round is admitted by the ledger before its messages leave, and its checkpoint is on disk
      before the next model leaves. A round of a killed server was not released: it is drawn again
      from new randomness, and counts once.

    | a drawn client | what it contributes |
    |---|---|
    | is offline, replies late or with an error | 0 |
    | replies with other names, shapes or kinds of numbers | 0 |
    | replies with NaN or infinity | 0 |
    | replies twice | its first reply |
    | is not in the population | is never drawn |

    How many of them contributed 0 is secret; the log has it under ``"private"``.

    Example:
      On the server, in a `ServerApp` of Flower::

        strategy = PrivateStrategy(
            mechanism, optax.sgd(1.0), population=keys, budget=budget, directory="runs/hospitals"
        )
        result = strategy.start(grid, ArrayRecord(weights), timeout=600)

    References:
      McMahan et al., "Learning Differentially Private Recurrent Language Models", 2018,
      algorithm 1.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        optimizer: optax.GradientTransformation,
        *,
        population: Sequence[str | bytes],
        weights: Weights | None = None,
        budget: ledger.Budget | None = None,
        directory: str | os.PathLike[str],
    ) -> None:
        # Flower tests for its class. Its methods release means without noise, so none of them
        # is inherited.
        importlib.import_module("flwr.serverapp.strategy").Strategy.register(type(self))
        self.mechanism = mechanism
        self.optimizer = optimizer
        self.budget = budget
        self.directory = directory
        self.keys = [_key(text) for text in population]
        self.weights = weights or Weights(values=np.ones(len(self.keys)))
        check_remote(_CALL, mechanism, optimizer, self.weights, self.keys)

    def summary(self) -> None:
        """Logs the mechanism."""
        logging.info("%s: %r", _CALL, self.mechanism)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Any:
        """Runs the rounds, and resumes the run in the folder; as ``Strategy.start`` of Flower.

        Args:
          grid: The grid of Flower's ``main(grid, context)``.
          initial_arrays: The model before the first round; floating-point arrays.
          num_rounds: How many rounds, with the ones that the folder holds; by default all that the
            mechanism plans. The run ends earlier where the budget does.
          timeout: Seconds after which a reply is late.
          train_config: Sent to clients with the model and ``"server-round"``.
          evaluate_config: If given, all clients that are online evaluate each model. Their metrics
            are **not private**: no noise is added to them. They are in the log under ``"private"``,
            and in the result under ``evaluate_metrics_clientapp``; do not publish either.
          evaluate_fn: ``(round, arrays) -> MetricRecord``, on data of the server, after each round.

        Returns:
          A ``Result`` of Flower, with the last model, and the metrics of all rounds of the folder.
        """
        params = {name: _canonical(array.numpy()) for name, array in initial_arrays.items()}
        link = _Link(grid, self.keys, list(params), timeout)

        def exchange(step: int, sent: PyTree, drawn: list[int]) -> Iterator[tuple[int, PyTree]]:
            """Sends a round's parameters to the drawn clients, and yields their replies."""
            return link.trained(step, sent, drawn, train_config or {})

        algorithm = self.algorithm(exchange, params)
        if evaluate_config is not None:
            logging.warning("%s: the metrics of clients are not private: no noise.", _CALL)

        def evaluate(state: State) -> dict[str, Any]:
            """The metrics of the model after a round, for its row of the log."""
            number = int(state.step)
            metrics = {}
            if evaluate_fn is not None:
                metrics.update(evaluate_fn(number, link.record(state.params)) or {})
            if evaluate_config is not None:
                means = link.evaluated(number, jax.device_get(state.params), evaluate_config)
                metrics["private"] = means
            return metrics

        state, rows = run_rounds(_CALL, algorithm, params, num_rounds, self.directory, evaluate)
        # The unit names a field of the log, which the result leaves out.
        return link.result(state.params, rows, self.mechanism.unit)

    def algorithm(
        self, exchange: Callable[[int, PyTree, list[int]], Any], params: PyTree
    ) -> Algorithm:
        """The rounds of this strategy over any exchange, as `dpjax.fit` takes them."""
        # Another population is another run, because its units are others.
        population = hashlib.sha256(b"".join(self.keys)).hexdigest()
        return remote_rounds(
            _CALL,
            self.optimizer,
            self.mechanism,
            self.weights,
            exchange,
            params,
            {"algorithm": "flower", "population": population},
            self.budget,
        )


class _Link:
    """The messages of one run of Flower."""

    def __init__(
        self, grid: Grid, keys: Sequence[bytes], names: Sequence[str], timeout: float
    ) -> None:
        self.flower = importlib.import_module("flwr.app")
        self.grid = grid
        self.clients = {key: client for client, key in enumerate(keys)}
        # Clients read a list of arrays in the first order of the names, and JAX sorts names.
        self.names = names
        self.timeout = timeout

    def record(self, params: PyTree) -> ArrayRecord:
        """The parameters as arrays of Flower."""
        arrays = {name: self.flower.Array(np.asarray(params[name])) for name in self.names}
        return self.flower.ArrayRecord(arrays)

    def trained(
        self, step: int, params: PyTree, drawn: list[int], config: Mapping[str, Any]
    ) -> Iterator[tuple[int, PyTree]]:
        """The exchange of a round: the drawn clients that replied, and their parameters."""
        # Flower counts rounds from 1, and steps count from 0.
        for client, content in self._replies("train", step + 1, params, drawn, config):
            yield client, _arrays(content)

    def evaluated(self, number: int, params: PyTree, config: Mapping[str, Any]) -> dict[str, float]:
        """The mean of each metric over all clients that are online; not private."""
        values: dict[str, list[float]] = {}
        everyone = list(self.clients.values())
        for _, content in self._replies("evaluate", number, params, everyone, config):
            for record in content.metric_records.values():
                for name, value in record.items():
                    if not isinstance(value, list):  # Flower's lists may differ in length
                        values.setdefault(f"{_OF_CLIENTS}{name}", []).append(value)
        return {name: float(np.mean(of_clients)) for name, of_clients in values.items()}

    def _replies(
        self,
        kind: str,
        number: int,
        params: PyTree,
        clients: list[int],
        config: Mapping[str, Any],
    ) -> Iterator[tuple[int, Any]]:
        """Sends the parameters to each client that is online, and yields replies as they come.

        ``kind`` is ``"train"`` or ``"evaluate"``, and ``number`` is that of the round. A reply is
        the number of a client, and the content of its message. A client that is late or replies
        with an error is left out.
        """
        settings = self.flower.ConfigRecord({**config, "server-round": number})
        content = self.flower.RecordDict({"arrays": self.record(params), "config": settings})
        waiting = self._pushed(kind, number, content, clients)  # clients by the ids of messages
        deadline = time.monotonic() + self.timeout
        while waiting and time.monotonic() < deadline:
            for identifier in list(waiting):
                replies = list(self.grid.pull_messages([identifier]))
                for reply in replies:
                    if reply.has_content():  # otherwise it reports an error
                        yield waiting[identifier], reply.content
                if replies:
                    del waiting[identifier]
            if waiting:
                time.sleep(_POLL)

    def _pushed(self, kind: str, number: int, content: Any, clients: list[int]) -> dict[str, int]:
        """Sends a message to each client that is online: the client of each message, by its id."""
        nodes = self._online()
        client_of = {}
        for client in set(clients) & set(nodes):
            # The id of a message is its hash, and a node that knew it could reply in the place of
            # another one. A random group makes ids unknown.
            group = f"{number} {secrets.token_hex(16)}"
            message = self.flower.Message(
                content, nodes[client], kind, ttl=self.timeout, group_id=group
            )
            # One message at a time, because a link refuses large requests.
            for identifier in self.grid.push_messages([message]):
                if identifier:  # a message that the link refused has none
                    client_of[identifier] = client
        return client_of

    def _online(self) -> dict[int, int]:
        """The node of each registered client that is online."""
        nodes = {}
        for node in self.grid.get_nodes():
            client = self.clients.get(_key(node.public_key))
            if client is not None:
                nodes[client] = node.node_id
        return nodes

    def result(self, params: PyTree, rows: list[dict[str, Any]], unit: str) -> Any:
        """The model and the rows of the log, as Flower has them."""
        of_fit = {*FIELDS, f"{unit}s_per_second"}
        result = importlib.import_module("flwr.serverapp.strategy").Result(self.record(params))
        for row in rows:
            released = {name: value for name, value in row.items() if name not in of_fit}
            of_clients = {
                name.removeprefix(_OF_CLIENTS): value
                for name, value in row["private"].items()
                if name.startswith(_OF_CLIENTS)
            }
            self._put(result.evaluate_metrics_serverapp, row["step"], released)
            self._put(result.evaluate_metrics_clientapp, row["step"], of_clients)
        return result

    def _put(
        self, metrics: dict[int, MetricRecord], number: int, values: Mapping[str, Any]
    ) -> None:
        """Adds the metrics of a round; None, which stands for NaN, is left out."""
        known = {name: value for name, value in values.items() if value is not None}
        if known:
            metrics[number] = self.flower.MetricRecord(known)


def _arrays(content: Any) -> PyTree:
    """The arrays of a reply by name; None unless it has one readable record of them."""
    try:
        (record,) = content.array_records.values()
        return {name: array.numpy() for name, array in record.items()}
    except Exception:  # a client writes these bytes, and NumPy raises many unrelated kinds
        return None


def _canonical(array: np.ndarray) -> np.ndarray:
    """The array in the type that JAX computes with."""
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def _key(text: str | bytes) -> bytes:
    """The bytes of a public key, from OpenSSH's format or PEM; they are equal for equal keys."""
    if not text:
        return b""  # a node of a link that does not authenticate
    serialization = importlib.import_module("cryptography.hazmat.primitives.serialization")
    encoded = text.encode() if isinstance(text, str) else text
    if b"-----BEGIN" in encoded:
        key = serialization.load_pem_public_key(encoded)
    else:
        key = serialization.load_ssh_public_key(encoded)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.DER, form)
