# SPDX-License-Identifier: Apache-2.0
"""A classifier or a regression before, during and after its training.

Gradients of training examples may not be published, and are logged under "private".
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax import data, diagnostics, losses, metrics, training, trees
from dpjax._files import read_json, replace, replacing

_SAMPLE = 128  # training examples whose gradients are measured


class Evaluation:
    """Measures a model during and after a run.

    Args:
      model: Maps inputs to logits, or to one number in a regression.
      loss: ``loss(params, example)``, whose gradients are measured; None measures no gradients.
      rule: How the run clips gradients.
      dataset: Has the test rows, and the training rows whose gradients are measured.
    """

    def __init__(
        self, model: nn.Module, loss: Any, rule: dpjax.types.Clipping, dataset: data.Dataset
    ) -> None:
        self.loss = loss
        self.rule = rule
        self.classes = dataset.classes
        self.target_range = dataset.target_range
        _, test_targets = dataset.test
        self.has_test = len(test_targets) > 0
        # Test labels are public in a public data set, or in a file that its user declares public.
        self.is_public = dataset.held_out is None or dataset.held_out.public
        # Test rows are put on the device once, because every evaluation reads all of them.
        self.test = jax.tree.map(jnp.asarray, dataset.test)
        # The sample of training rows is fixed, so gradients of the same examples are compared.
        rows = dataset.rows(spread(dataset.examples, _SAMPLE))
        self.sample = jax.tree.map(jnp.asarray, rows)
        self.outputs = jax.jit(functools.partial(outputs_of, model))

        @jax.jit
        def bias(params: Any, rows: Any, scale: Any) -> diagnostics.Bias:
            """Norms relative to ``scale``, and the cosine of means with and without clipping.

            As in a step, losses are divided by the scale of adapted bounds, so the rule applies.
            """

            def scaled_loss(params: Any, example: Any) -> Any:
                return loss(params, example) / scale

            return diagnostics.clipping_bias(scaled_loss, rule, params, rows)

        self.bias = bias

    def evaluate(self, state: Any) -> dict[str, Any]:
        """One row of the log, from averaged parameters if the optimizer keeps an average."""
        row: dict[str, Any] = {}
        if self.has_test:
            x, y = self.test
            # The averaged parameters are released at the end, so they are measured.
            outputs = self.outputs(held(training.averaged(state.optimizer)), x)
            row = self.measured(outputs, y)
        if self.loss is not None:
            # The next step differentiates at the current parameters, not at the averaged ones.
            bias = self.bias(held(state.params), self.sample, held(state.bound_scale))
            row["private"] = {"cosine": bias.cosine}
        return row

    def measured(self, outputs: Any, y: Any) -> dict[str, Any]:
        """The metrics of the model's outputs, by their names in the log.

        ``outputs`` are logits ``[rows, classes]``, or ``[rows, 1]`` in a regression; ``y [rows]``
        are the labels, or the targets.
        """
        if self.classes is None:
            # Errors are logged in the units of the target; the model learns a range as [-1, 1].
            outputs = quantities(outputs, self.target_range)
            y = quantities(y, self.target_range)
            names = ("rmse", "mae", "r2")
        else:
            names = ("accuracy", "nll", "balanced_accuracy")
        row = {name: getattr(metrics, name)(outputs, y) for name in names}
        if self.classes == 2:
            # The difference of logits ranks rows as the probability of class 1 does, and also those
            # whose probabilities round to 0 or 1.
            scores = outputs[:, 1] - outputs[:, 0]
            row["auroc"] = metrics.auroc(scores, y)
            row["average_precision"] = metrics.average_precision(scores, y)
        return row

    def predictions(self, params: Any) -> dict[str, Any]:
        """Predictions on the test rows, next to their labels or targets."""
        x, y = self.test
        outputs = self.outputs(params, x)
        if self.classes is None:
            return {
                "targets": quantities(y, self.target_range),
                "predictions": quantities(outputs, self.target_range),
            }
        return {"labels": y, "probabilities": jax.nn.softmax(outputs)}

    def write(self, folder: pathlib.Path, params: Any, scale: Any) -> None:
        """Writes averaged parameters, test predictions and gradient norms into the folder.

        ``scale`` is the factor on the rule's bounds after the last step.
        """
        # `fit` wrote the digest of the last parameters into the card. The averaged parameters are
        # released instead, so the card receives their digest.
        card = read_json(folder / "privacy.json")
        card["parameters"] = trees.digest(params)
        replace(folder / "privacy.json", json.dumps(card, indent=2) + "\n", public=True)
        replace(folder / "params.msgpack", trees.serialized(params), public=True)
        if self.has_test:
            with replacing(folder / "evaluation.npz", public=self.is_public) as file:
                np.savez(file, **self.predictions(params))
        if self.loss is not None:
            norms = scale * self.bias(params, self.sample, scale).norms
            bounds = scale * np.array(self.rule.bounds)
            with replacing(folder / "diagnostics.npz") as file:  # private: no noise protects norms
                np.savez(file, norms=norms, bounds=bounds)


def spread(examples: int, most: int) -> np.ndarray:
    """The numbers of at most ``most`` rows at equal distances, from the first to the last one."""
    return np.linspace(0, examples - 1, min(most, examples)).astype(int)


def outputs_of(model: nn.Module, params: Any, x: Any) -> Any:
    """The outputs of the model for each row."""
    # 500 rows at a time: the activations of all test rows may not fit into memory.
    return jax.lax.map(lambda row: model.apply({"params": params}, row), x, batch_size=500)


def quantities(values: Any, target_range: tuple[float, float] | None) -> np.ndarray:
    """Predictions or targets in the units of the file."""
    values = np.asarray(values, np.float64).reshape(len(values))  # [rows]; outputs are [rows, 1]
    # The model learns a declared range as [-1, 1]. Without a range numbers stay as they are.
    low, high = target_range or (-1, 1)
    return low + (values + 1) / 2 * (high - low)


def first_parameters(model: Any, dataset: data.Dataset, params: bytes | None) -> Any:
    """The parameters before the first step: of an earlier run, or from a public seed."""
    (x,), _ = dataset.rows(np.array([0]))
    # Initial parameters are not secret, and an equal start makes runs comparable.
    fresh = jax.jit(model.init)(jax.random.key(0), jnp.asarray(x))["params"]
    if params is None:
        return fresh
    return trees.restored(params, fresh, "--continue_from")


def held(params: Any) -> Any:
    """Parameters as this process can read them; where several run, each collects all shards."""
    if jax.process_count() == 1:
        return params
    return jax.tree.map(trees.on_host, params)


def rehearse(
    x: jax.ShapeDtypeStruct,
    model: Any,
    loss: losses.ExampleLoss,
    mechanism: dpjax.Mechanism,
    params: bytes | None,
    *,
    outputs: int,
    takes_epoch: bool,
) -> None:
    """Raises if the parts of a run do not fit each other; traces shapes, and needs no data.

    ``x`` is the shape of an input, and ``params`` are the serialized parameters of an earlier run.
    The model must return ``outputs`` numbers: one for each class, or 1 in a regression.
    ``takes_epoch`` is whether the loss takes the epoch too.
    """
    # A model without parameters has no such entry.
    params_shape = jax.eval_shape(model.init, jax.random.key(0), x).get("params", {})
    found = jax.eval_shape(model.apply, {"params": params_shape}, x)
    # No later check finds too few outputs: JAX clamps a label beyond the last output to the last
    # one, without an error. The result has no `shape` if the model returns several arrays.
    if getattr(found, "shape", None) != (outputs,):
        raise ValueError(f"the model returns {found} for an example; expected {outputs} numbers.")
    scalar = jax.ShapeDtypeStruct((), jnp.int32)  # the shape of a label or target, and of an epoch
    example = (x, scalar, scalar) if takes_epoch else (x, scalar)
    # Raises if the loss does not take these outputs, or does not return a single number.
    jax.eval_shape(jax.grad(losses.of(model, loss)), params_shape, example)
    # Raises if the groups of parameters that are clipped were made for another model.
    mechanism.clipping.partition.assign(params_shape)
    if params is not None:
        trees.restored(params, params_shape, "--continue_from")  # raises for another model
