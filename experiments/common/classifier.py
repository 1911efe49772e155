# SPDX-License-Identifier: Apache-2.0
"""Training a classifier, and what is looked at while it trains.

`train` joins a model, a loss, a mechanism, an optimizer and data; the binaries call it.
`Looking` evaluates a run on its test examples, whose numbers may be shown as far as the
training data are concerned, and on a few hundred training examples, whose numbers may not:
those go under "private".  At the end it writes what `dpjax.reports.report` draws.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import pathlib
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

import flax.errors
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app

import dpjax
from dpjax import data, diagnostics, losses, metrics, reports, training
from dpjax.reports.figures import PLOTS

LEFT = ("privacy.json", "statement.txt", "config.json", "params.msgpack", "evaluation.npz")
LEFT += ("diagnostics.npz", "report.html", *(f"figures/{plot.name}.png" for plot in PLOTS))


class Looking:
    """Looks at a classifier.

    Args:
      model: A Linen module.
      loss: ``loss(params, (x, y)) -> scalar``, for gradients of single examples; None if the
        loss takes more than that, and gradients are not looked at.
      mechanism: What is run.
      dataset: What it learns and is tested on.
      sample: How many training examples are looked at.
    """

    def __init__(
        self,
        model: Any,
        loss: Callable[..., Any] | None,
        mechanism: dpjax.Mechanism,
        dataset: data.Dataset,
        sample: int = 128,
    ) -> None:
        self.model, self.loss, self.mechanism = model, loss, mechanism
        self.test = jax.tree.map(jnp.asarray, dataset.test)
        size = dataset.examples
        some = np.linspace(0, size - 1, min(sample, size)).astype(int)
        self.sample = jax.tree.map(jnp.asarray, dataset.rows(some))
        self.logits = jax.jit(
            lambda params, x: jax.lax.map(
                lambda x: model.apply({"params": params}, x), x, batch_size=500
            )
        )
        self.bias = jax.jit(
            lambda params, batch: diagnostics.clipping_bias(
                self.loss, mechanism.clipping, params, batch
            )
        )

    def evaluate(self, state: Any) -> dict[str, Any]:
        """The numbers of one evaluation; of averaged parameters, where an average is kept."""
        x, y = self.test
        logits = self.logits(training.averaged(state.optimizer), x)
        row: dict[str, Any] = {
            "accuracy": metrics.accuracy(logits, y),
            "nll": metrics.nll(logits, y),
        }
        if self.loss is not None:
            row["private"] = self._gradients(state.params)
        return row

    def _gradients(self, params: Any) -> dict[str, Any]:
        bias = self.bias(params, self.sample)
        counts = reports.norm_counts(bias.norms, self.mechanism.clipping.bounds)
        return {"cosine": bias.cosine, "norm_histogram": counts}

    def leave(self, folder: pathlib.Path, params: Any) -> None:
        """Writes parameters, predictions and lengths into the folder."""
        (folder / "params.msgpack").write_bytes(flax.serialization.to_bytes(params))
        x, y = self.test
        probabilities = jax.nn.softmax(self.logits(params, x))
        np.savez(folder / "evaluation.npz", labels=y, probabilities=probabilities)
        weights = diagnostics.weight_norms(params)
        try:
            hidden = diagnostics.preactivation_norms(self.model, params, self.sample[0])
        except ValueError:  # a linear model has none
            hidden = {}
        found = {
            "weight_names": list(weights),
            "weight_norms": list(weights.values()),
            "activation_names": list(hidden),
            "activation_norms": list(hidden.values()),
        }
        if self.loss is not None:
            norms = self.bias(params, self.sample).norms
            found |= {"norms": norms, "bounds": self.mechanism.clipping.bounds}
        np.savez(folder / "diagnostics.npz", **{k: np.asarray(v) for k, v in found.items()})


def train(
    dataset: data.Dataset,
    model: Any,
    loss: losses.ExampleLoss,
    mechanism: dpjax.Mechanism,
    optimizer: optax.GradientTransformation,
    *,
    key: Any,
    params: Any = None,
    per_step: Callable[[Any], Any] | None = None,
    bound_schedule: Callable[[Any], Any] | None = None,
    weights: Callable[[Any, Any, Any], Any] | None = None,
    budget: dpjax.ledger.Budget | None = None,
    evaluations: int = 20,
    initial: int = 0,
    gradients: bool = True,
    look: Callable[[Any], Mapping[str, Any]] | None = None,
    **options: Any,
) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Trains a model; returns averaged parameters, the last state and the log.

    ``initial`` is the (public) seed of the first parameters.  ``gradients``: whether those of
    some examples are looked at; ``look`` finds more numbers in the state.  ``options`` are
    those of `dpjax.fit`; with a directory, the run can be looked at there.
    """
    of_example = losses.of(model, loss)
    algorithm = dpjax.dpsgd(
        of_example,
        optimizer,
        mechanism,
        dataset.train,
        per_step=per_step,
        bound_schedule=bound_schedule,
        weights=weights,
        budget=budget,
    )
    (x,), _ = dataset.rows(np.array([0]))
    fresh = jax.jit(model.init)(jax.random.key(initial), jnp.asarray(x))["params"]
    if params is not None:
        fresh = flax.serialization.from_bytes(fresh, params)
    seen = of_example if gradients and per_step is None else None
    looking = Looking(model, seen, mechanism, dataset)

    def evaluate(state: Any) -> dict[str, Any]:
        found = look(state) if look is not None else {}
        return {**looking.evaluate(state), **found}

    state, history = dpjax.fit(
        algorithm,
        algorithm.init(key, fresh),
        evaluate=evaluate,
        evaluate_every=-(-mechanism.steps // evaluations) or None,
        **options,
    )
    average = training.averaged(state.optimizer)
    if options.get("directory") is not None:
        looking.leave(pathlib.Path(options["directory"]), average)
    return average, state, history


def rehearse(
    shape: Callable[[], jax.ShapeDtypeStruct],
    model: Any,
    loss: losses.ExampleLoss,
    mechanism: dpjax.Mechanism,
    params: bytes | None = None,
    *,
    epochs: bool = False,
) -> None:
    """Goes through a step on shapes alone, so that what does not fit is said before it costs.

    ``shape`` finds that of one example's input, ``params`` are those of an earlier run, and
    ``epochs`` says whether the loss is told the epoch.
    """
    number = jax.ShapeDtypeStruct((), jnp.int32)
    try:
        x = shape()
        fresh = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
        example = (x, number, number) if epochs else (x, number)
        jax.eval_shape(jax.grad(losses.of(model, loss)), fresh, example)
        mechanism.clipping.partition.assign(fresh)
        if params is not None:
            empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), fresh)
            found = flax.serialization.from_bytes(empty, params)
            if jax.tree.map(np.shape, found) != jax.tree.map(np.shape, empty):
                raise ValueError("the parameters of the earlier run are of another model.")
    except (ArithmeticError, TypeError, ValueError, flax.errors.FlaxError) as error:
        raise app.UsageError(
            f"these flags do not fit each other, or not these data: {error}\n"
            "Nothing was spent, and nothing in --out was touched."
        ) from error


def describe(folder: pathlib.Path, flags: Mapping[str, Any], **facts: Any) -> None:
    """Writes what the run was made with."""
    names = ("dpjax", "jax", "flax", "optax", "dp-accounting", "numpy")
    device = jax.devices()[0]
    config = {
        "command": " ".join(sys.argv),
        "flags": dict(flags),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in names},
        "released": _digest(folder),
        "hardware": {"device": device.device_kind, "devices": jax.device_count()},
        **facts,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def cleared(folder: pathlib.Path, *more: str) -> None:
    """Removes what a run left in its folder besides what `dpjax.training.forget` removes."""
    for name in (*LEFT, *more):
        (folder / name).unlink(missing_ok=True)


def released(folder: pathlib.Path) -> bytes:
    """The parameters that a run released; those of another run that was here are refused."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config["released"] == _digest(folder):
            return (folder / "params.msgpack").read_bytes()
    except (OSError, ValueError, KeyError):
        pass
    raise app.UsageError(
        f"--continue_from={folder}: expected params.msgpack, run.json and config.json of one run "
        "that has ended. Usually it was interrupted, or another one was begun in its folder, and "
        "then what these parameters cost is counted nowhere. Give the run's own command again, "
        "which ends it and writes all three."
    )


def _digest(folder: pathlib.Path) -> str:
    """What ties parameters to the run by which they are accounted."""
    both = ((folder / name).read_bytes() for name in ("run.json", "params.msgpack"))
    return hashlib.sha256(b"".join(both)).hexdigest()
