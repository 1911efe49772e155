# SPDX-License-Identifier: Apache-2.0
"""Clients of Flower in the process of the server, for experiments on its strategies.

`Grid` has the methods of Flower's ``Grid`` that a strategy calls. Messages, records and strategies
belong to the installed ``flwr``; nothing is sent.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Train = Callable[[int, Arrays], tuple[Arrays, int]]
"""From the number of a client and the model to the trained model and a number of examples."""


def keys(count: int) -> list[bytes]:
    """Public keys of new clients, as PEM."""
    curves = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ec")
    forms = importlib.import_module("cryptography.hazmat.primitives.serialization")
    made = []
    for _ in range(count):
        public = curves.generate_private_key(curves.SECP384R1()).public_key()
        form = forms.PublicFormat.SubjectPublicKeyInfo
        made.append(public.public_bytes(forms.Encoding.PEM, form))
    return made


def record(arrays: Arrays) -> Any:
    """Arrays as Flower sends them."""
    flower = importlib.import_module("flwr.app")
    return flower.ArrayRecord({name: flower.Array(array) for name, array in arrays.items()})


class Grid:
    """Nodes that are always online; node ``i + 1`` is client ``i``."""

    def __init__(self, population: Sequence[bytes], train: Train) -> None:
        self.flower = importlib.import_module("flwr.app")
        self.population = population
        self.train = train
        self.messages: dict[str, Any] = {}
        # Flower makes no message outside a task.
        task = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
        task.run_id = task.node_id = task.task_id = 1

    def get_node_ids(self) -> list[int]:
        """The nodes, for Flower's own strategies."""
        return [client + 1 for client in range(len(self.population))]

    def get_nodes(self) -> list[Any]:
        """The nodes with their keys."""
        node = importlib.import_module("flwr.proto.node_pb2").NodeInfo
        pairs = zip(self.get_node_ids(), self.population, strict=True)
        return [node(node_id=number, public_key=key) for number, key in pairs]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Keeps messages until their replies are pulled."""
        sent = {message.object_id: message for message in messages}
        self.messages.update(sent)
        return list(sent)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        """The replies to messages."""
        return [self._reply(self.messages.pop(name)) for name in message_ids]

    def send_and_receive(self, messages: Iterable[Any], *, timeout: Any = None) -> list[Any]:
        """The replies to messages, as Flower's own strategies ask for them."""
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def _reply(self, message: Any) -> Any:
        message.metadata.__dict__["_message_id"] = message.object_id
        sent = {name: array.numpy() for name, array in message.content["arrays"].items()}
        trained, examples = self.train(message.metadata.dst_node_id - 1, sent)
        metrics = self.flower.MetricRecord({"num-examples": examples})
        content = {"arrays": record(trained), "metrics": metrics}
        return self.flower.Message(self.flower.RecordDict(content), reply_to=message)
