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
        sown = model.apply({"params": params}, x, mutable=["preactivations"])[1]
        named = zip(trees.leaf_names(sown), jax.tree.leaves(sown), strict=True)
        return {name.removeprefix("preactivations/"): length(h) for name, h in named}

    return jax.tree.map(jnp.mean, jax.vmap(norms)(x))


def asks_epoch(loss: losses.ExampleLoss) -> bool:
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
        self.steps, self.model, self.rule = steps, model, rule
        self.loss = losses.of(model, loss)
        self.tells = asks_epoch(loss)
        size = 256 * min(16, dataset.examples // 256)
        some = np.random.default_rng(0).choice(dataset.examples, size, replace=False)
        self.rows = jax.tree.map(jnp.asarray, dataset.rows(some))
        self.norms, self.together = jax.jit(self._norms), jax.jit(self._together)

    def __call__(self, state: Any) -> Mapping[str, Any]:
        params, epoch = state.params, state.ledger.steps // self.steps
        close = self._closely(params, self.rows, epoch - 1) if epoch in self.CLOSELY else {}
        return {**self.norms(params, self.rows[0][:256]), **close}

    def _norms(self, params: Any, x: Any) -> Mapping[str, Any]:
        hidden = preactivation_norms(self.model, params, x)
        logits = jnp.linalg.norm(self.model.apply({"params": params}, x), axis=-1)
        weights = {name: optax.tree.norm(layer) for name, layer in params.items()}
        return {"weights": weights, "preactivations": {**hidden, "logits": jnp.mean(logits)}}

    def _closely(self, params: Any, rows: Any, epoch: Any) -> Mapping[str, Any]:
        told = (jnp.full(len(rows[1]), epoch),) if self.tells else ()
        batches = jax.tree.map(lambda a: a.reshape(-1, 256, *a.shape[1:]), (*rows, *told))
        few = jax.tree.map(lambda a: a[0, :64], batches)

        # A loop in Python: XLA on CPU compiles gradients of convolutions badly inside its own.
        parts = [
            self.together(params, jax.tree.map(lambda a, at=at: a[at], batches))
            for at in range(len(batches[0]))
        ]
        norms, cosines, logits = (jnp.stack(each) for each in zip(*parts, strict=True))
        sharp = diagnostics.sharpness(self.loss, params, few, key=jax.random.key(0), iterations=30)
        return {
            "gradients": jnp.histogram(jnp.minimum(norms, self.EDGES[-1]), self.EDGES)[0],
            "cosines": cosines,
            "confusion": metrics.confusion(logits.reshape(norms.size, -1), rows[1]),
            "sharpness": sharp.value,
        }

    def _together(self, params: Any, batch: Any) -> Any:
        bias = diagnostics.clipping_bias(self.loss, self.rule, params, batch, microbatch_size=64)
        return bias.norms, bias.cosine, self.model.apply({"params": params}, batch[0])


def swept(title: str, runs: Runs) -> list[Panel]:
    """Accuracy of all seeds against the value in the names "..., field=value" of runs."""
    fields: dict[str, dict[float, list[float]]] = {}
    for name, seeds in runs.items():
        loss_and_field, _, value = name.partition("=")
        field = fields.setdefault(loss_and_field.rpartition(" ")[2], {})
        field[float(value)] = [run["accuracy"] for run in seeds]
    return [
        Panel(title, field, "test accuracy, %", {"swept": (list(of), list(of.values()))})
        for field, of in fields.items()
    ]


def layers(what: str, *places: int) -> Draw:
    """Norms of all layers, or of the layers at some places, against the epoch."""

    def draw(title: str, runs: Runs) -> list[Panel]:
        ways = _watched(runs, what)
        names = list(next(iter(ways.values()))[0][what]) if ways else []
        return [
            Panel(
                f"{title}\n{layer}",
                "epoch",
                f"norm of {what}",
                {
                    name: (range(1, len(way) + 1), [[row[what][layer]] for row in way])
                    for name, way in ways.items()
                },
            )
            for layer in ([names[place] for place in places] or names)
        ]

    return draw


def _watched(runs: Runs, what: str) -> dict[str, Any]:
    """The log of the first seed that was watched, for each line that has one."""
    logs = {
        name: [run["way"] for run in seeds if any(what in row for row in run.get("way", ()))]
        for name, seeds in runs.items()
    }
    return {name: ways[0] for name, ways in logs.items() if ways}


def _looks(runs: Runs) -> dict[str, dict[int, Any]]:
    """The rows of the logs with the closer measurements, by line and epoch."""
    return {
        name: {at: row for at, row in enumerate(way, 1) if "sharpness" in row}
        for name, way in _watched(runs, "sharpness").items()
    }


def sharpness(title: str, runs: Runs) -> list[Panel]:
    """The largest singular value of the Hessian, against the epoch."""
    lines = {
        name: (list(looks), [[row["sharpness"]] for row in looks.values()])
        for name, looks in _looks(runs).items()
    }
    return [Panel(title, "epoch", "largest singular value", lines)] if lines else []


def gradients(*epochs: int) -> Draw:
    """Histograms of the norms of gradients, after some epochs."""

    def draw(title: str, runs: Runs) -> list[Panel]:
        looks = _looks(runs)
        middles = (Watch.EDGES[1:] + Watch.EDGES[:-1]) / 2
        return [
            Panel(
                f"{title}, epoch {epoch}",
                f"norm of gradient (at most {Watch.EDGES[-1]:.0f})",
                "examples",
                {
                    name: (middles, np.reshape(of[epoch]["gradients"], (-1, 1)))
                    for name, of in looks.items()
                },
                scale="symlog",
            )
            for epoch in epochs
            if looks and all(epoch in of for of in looks.values())
        ]

    return draw


def cosines(title: str, runs: Runs) -> list[Panel]:
    """Histograms of the cosines of clipped and unclipped means, after the first epoch."""
    edges, lines = np.linspace(-1, 1, 41), {}
    for name, looks in _looks(runs).items():
        counts, _ = np.histogram(np.asarray(looks[1]["cosines"], float), edges)
        lines[name] = (edges[1:] + edges[:-1]) / 2, counts[:, None]
    return [Panel(title, "cosine of clipped and unclipped", "batches", lines)] if lines else []


def confusion(title: str, runs: Runs) -> list[Panel]:
    """Confusion matrices, early and late, in percent of the right class."""
    return [
        Panel(
            f"{title}\n{name}, epoch {epoch}",
            "predicted",
            "right",
            counts=np.reshape(row["confusion"], (math.isqrt(len(row["confusion"])), -1)),
        )
        for epoch in (2, 20)
        for name, looks in _looks(runs).items()
        for at, row in looks.items()
        if at == epoch
    ]
