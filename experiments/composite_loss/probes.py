# SPDX-License-Identifier: Apache-2.0
"""Numbers that show a run from inside, epoch by epoch, and panels that draw them.

`Watch` measures parameters after every epoch on a few thousand training examples.  Its numbers
are not private, so it is for public data only.  Each function below it takes a title and, by
name, runs with their logs in ``way``, and returns panels.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import data, diagnostics, losses, metrics, trees, types
from dpjax.diagnostics.vectors import length
from experiments.common.figures import Draw, Runs, logged
from experiments.common.pictures import Panel

accuracy = logged("epsilon", "accuracy", ("epsilon (rdp)", "test accuracy, %"), 100)
"""Test accuracy against epsilon, of all seeds."""


def preactivation_norms(model: Any, params: Any, x: Any) -> dict[str, Any]:
    """The norm of the pre-activations of each hidden layer, on average over a batch."""

    def norms(x: Any) -> dict[str, Any]:
        _, sown = model.apply({"params": params}, x, mutable=["preactivations"])
        lengths = {}
        for name, h in zip(trees.leaf_names(sown), jax.tree.leaves(sown), strict=True):
            lengths[name.removeprefix("preactivations/")] = length(h)
        return lengths

    return jax.tree.map(jnp.mean, jax.vmap(norms)(x))


def asks_epoch(loss: losses.ExampleLoss) -> bool:
    """Whether a loss has the epoch among its arguments."""
    return "epoch" in inspect.signature(loss).parameters


class Watch:
    """Measures parameters after each epoch of ``steps`` steps, and more after a few epochs."""

    CLOSELY = (1, 2, 5, 10, 20, 29, 39)
    EDGES = np.linspace(0, 100, 51)

    def __init__(
        self,
        model: Any,
        loss: losses.ExampleLoss,
        rule: types.Clipping,
        dataset: data.Dataset,
        steps: int,
    ) -> None:
        self.steps = steps
        self.model = model
        self.rule = rule
        self.loss = losses.of(model, loss)
        self.loss_asks_epoch = asks_epoch(loss)
        size = 256 * min(16, dataset.examples // 256)
        indices = np.random.default_rng(0).choice(dataset.examples, size, replace=False)
        self.x, self.y = jax.tree.map(jnp.asarray, dataset.rows(indices))
        self.norms = jax.jit(self._norms)
        self.of_batch = jax.jit(self._of_batch)

    def __call__(self, state: Any) -> Mapping[str, Any]:
        epoch = state.ledger.steps // self.steps
        numbers = dict(self.norms(state.params, self.x[:256]))
        if epoch in self.CLOSELY:
            numbers.update(self._closely(state.params, epoch - 1))
        return numbers

    def _norms(self, params: Any, x: Any) -> Mapping[str, Any]:
        """Norms of weights and pre-activations, by layer."""
        hidden = preactivation_norms(self.model, params, x)
        logits = jnp.linalg.norm(self.model.apply({"params": params}, x), axis=-1)
        weights = {name: optax.tree.norm(layer) for name, layer in params.items()}
        return {"weights": weights, "preactivations": {**hidden, "logits": jnp.mean(logits)}}

    def _closely(self, params: Any, epoch: Any) -> Mapping[str, Any]:
        """Gradients, confusion and sharpness on all examples that are watched."""
        examples = (self.x, self.y)
        if self.loss_asks_epoch:
            examples = (self.x, self.y, jnp.full(len(self.y), epoch))
        batches = jax.tree.map(lambda a: a.reshape(-1, 256, *a.shape[1:]), examples)

        # This loop is not a scan, in which XLA on CPU makes gradients of convolutions slow.
        measured = []
        for index in range(len(self.y) // 256):
            batch = tuple(part[index] for part in batches)
            measured.append(self.of_batch(params, batch))
        norms, cosines, logits = zip(*measured, strict=True)
        limited = jnp.minimum(jnp.stack(norms), self.EDGES[-1])
        counts, _ = jnp.histogram(limited, self.EDGES)
        few = tuple(part[0, :64] for part in batches)
        key = jax.random.key(0)
        sharp = diagnostics.sharpness(self.loss, params, few, key=key, iterations=30)
        return {
            "gradients": counts,
            "cosines": jnp.stack(cosines),
            "confusion": metrics.confusion(jnp.concatenate(logits), self.y),
            "sharpness": sharp.value,
        }

    def _of_batch(self, params: Any, batch: Any) -> Any:
        """Norms of gradients, the cosine of clipped and unclipped means, and logits."""
        bias = diagnostics.clipping_bias(self.loss, self.rule, params, batch, microbatch_size=64)
        return bias.norms, bias.cosine, self.model.apply({"params": params}, batch[0])


def swept(title: str, runs: Runs) -> list[Panel]:
    """Accuracy of all seeds against the value in the names "..., field=value" of runs."""
    fields: dict[str, dict[float, list[float]]] = {}
    for name, seeds in runs.items():
        loss_and_field, _, value = name.partition("=")
        field = loss_and_field.split(" ")[-1]
        accuracies = [run["accuracy"] for run in seeds]
        fields.setdefault(field, {})[float(value)] = accuracies
    return [
        Panel(
            title=title,
            x=field,
            y="test accuracy, %",
            lines={"swept": (list(by_value), list(by_value.values()))},
        )
        for field, by_value in fields.items()
    ]


def layers(what: str, *places: int) -> Draw:
    """Norms of all layers, or of the layers at some places, against the epoch."""

    def draw(title: str, runs: Runs) -> list[Panel]:
        ways = _watched(runs, what)
        if not ways:
            return []
        first_way = next(iter(ways.values()))
        names = list(first_way[0][what])
        shown = [names[place] for place in places] if places else names
        panels = []
        for layer in shown:
            lines = {
                name: (range(1, len(way) + 1), [[row[what][layer]] for row in way])
                for name, way in ways.items()
            }
            panels.append(
                Panel(
                    title=f"{title}\n{layer}",
                    x="epoch",
                    y=f"norm of {what}",
                    lines=lines,
                )
            )
        return panels

    return draw


def _watched(runs: Runs, what: str) -> dict[str, Any]:
    """The log of the first seed that was watched, for each line that has one."""
    logs = {}
    for name, seeds in runs.items():
        for run in seeds:
            way = run.get("way", ())
            if any(what in row for row in way):
                logs.setdefault(name, way)
    return logs


def _looks(runs: Runs) -> dict[str, dict[int, Any]]:
    """The rows of the logs with the closer measurements, by line and epoch."""
    return {
        name: {epoch: row for epoch, row in enumerate(way, 1) if "sharpness" in row}
        for name, way in _watched(runs, "sharpness").items()
    }


def sharpness(title: str, runs: Runs) -> list[Panel]:
    """The largest singular value of the Hessian, against the epoch."""
    lines = {
        name: (list(looks), [[row["sharpness"]] for row in looks.values()])
        for name, looks in _looks(runs).items()
    }
    if not lines:
        return []
    return [Panel(title=title, x="epoch", y="largest singular value", lines=lines)]


def gradients(*epochs: int) -> Draw:
    """Histograms of the norms of gradients, after some epochs."""

    def draw(title: str, runs: Runs) -> list[Panel]:
        by_line = _looks(runs)
        middles = (Watch.EDGES[1:] + Watch.EDGES[:-1]) / 2
        norm = f"norm of gradient (at most {Watch.EDGES[-1]:.0f})"
        panels = []
        for epoch in epochs:
            lines = {}
            for name, looks in by_line.items():
                if epoch in looks:
                    counts = np.reshape(looks[epoch]["gradients"], (-1, 1))
                    lines[name] = (middles, counts)
            if lines and len(lines) == len(by_line):
                panels.append(
                    Panel(
                        title=f"{title}, epoch {epoch}",
                        x=norm,
                        y="examples",
                        lines=lines,
                        scale="symlog",
                    )
                )
        return panels

    return draw


def cosines(title: str, runs: Runs) -> list[Panel]:
    """Histograms of the cosines of clipped and unclipped means, after the first epoch."""
    edges = np.linspace(-1, 1, 41)
    middles = (edges[1:] + edges[:-1]) / 2
    lines = {}
    for name, looks in _looks(runs).items():
        counts, _ = np.histogram(np.asarray(looks[1]["cosines"], float), edges)
        lines[name] = middles, counts[:, None]
    if not lines:
        return []
    return [
        Panel(
            title=title,
            x="cosine of clipped and unclipped",
            y="batches",
            lines=lines,
        )
    ]


def confusion(title: str, runs: Runs) -> list[Panel]:
    """Confusion matrices, early and late, in percent of the right class."""
    panels = []
    for epoch in (2, 20):
        for name, looks in _looks(runs).items():
            if epoch in looks:
                flat = looks[epoch]["confusion"]
                counts = np.reshape(flat, (math.isqrt(len(flat)), -1))
                panels.append(
                    Panel(
                        title=f"{title}\n{name}, epoch {epoch}",
                        x="predicted",
                        y="right",
                        counts=counts,
                    )
                )
    return panels
