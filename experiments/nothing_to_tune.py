# SPDX-License-Identifier: Apache-2.0
"""One run without a search, next to the best of a search at equal and at equal total epsilon.

claim     `dpjax.plan` is at most 0.5 points (2 % of RMSE) behind a searched row at equal epsilon
verdict   docs/pages/nothing_to_tune.md has the table, which ``--page`` writes, and what did not run
time      3 to 10 core seconds a run of a table, 1 to 3 core minutes of images
hardware  CPU cores
command   python -m experiments.nothing_to_tune --seeds=5 --cache_dir=FOLDER
              --out=experiments/results/nothing_to_tune.json

Development tasks chose `planning.pace.DRIFT` and the defaults of `planning.sizes`; held-out tasks
ran after the method was fixed. Rows of MNIST and CIFAR-10 compare to the rows of
`experiments.accuracy`, with their features. The other baselines are the best of `GRID` on a split
of the training data, trained again on all of it, with the batch, steps and noise of the plan.
``--row="wine"`` runs some tasks.

A row "in total" is the run without a search at the epsilon that `accounting.select_best` charges
for the search.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from flax.traverse_util import unflatten_dict

import dpjax
from dpjax import accounting, clipping, losses, metrics, models, planning, training
from experiments import accuracy, declared, text
from experiments.common import runs

PART = flags.DEFINE_enum("part", "held out", ["development", "held out"], "Which tasks run.")

EPSILONS = (1.0, 3.0, 8.0)
DEVELOPMENT = (
    "digits linear",
    "digits mlp",
    "california housing mlp",
    "fashion_mnist pixels linear",
    "fashion_mnist pixels mlp",
    "trec embeddings",
    "fashion_mnist linear",
    "fashion_mnist cnn",
)
HELD_OUT = (
    "breast cancer linear",
    "diabetes linear",
    "wine quality linear",
    "sst2 embeddings",
    "mnist linear",
    "mnist cnn",
    "cifar10 linear",
    "cifar10 patches",
)
# Bounds, and rates times bounds. Fixed before the first held-out run.
GRID = tuple(itertools.product((0.1, 1.0), (0.02, 0.1, 0.5, 2.5)))
SEARCHED = {"mnist linear", "mnist cnn", "cifar10 linear", "cifar10 patches"}


class Task(NamedTuple):
    """Data, a loss, first parameters by seed, and what is measured on parameters."""

    train: Any
    test: Any
    loss: Callable[..., Any]
    start: Callable[[int], Any]
    outputs: Callable[[Any, Any], Any]  # of parameters and one input
    frozen: Any = None  # public leaves that are not trained
    range: tuple[float, float] | None = None  # of a target


def of_model(model: Any, train: Any, test: Any, loss: Any, **options: Any) -> Task:
    """A task of a Flax model."""

    initialize = jax.jit(model.init)

    def start(seed: int) -> Any:
        return initialize(jax.random.key(seed), jnp.asarray(train[0][0]))["params"]

    def outputs(params: Any, x: Any) -> Any:
        return model.apply({"params": params}, x)

    return Task(train, test, losses.of(model, loss), start, outputs, **options)


def of_text(name: str) -> Task:
    """Phrases of SST-2 from the base of `experiments.text`, or questions of TREC from nothing."""
    if name == "sst2":
        train = text.phrases_of("train")
        test = text.phrases_of("test")
        base = text.base
        model = text.MODEL
    else:
        lines = {p: text.text_of(f"trec_{p}.tsv").splitlines()[1:] for p in ("train", "test")}
        kinds = sorted({line.split("\t")[0] for line in lines["train"]})
        parts = {}
        for part, rows in lines.items():
            cells = [row.split("\t") for row in rows]
            x = np.stack([text.tokens(question) for _, _, question in cells])
            parts[part] = x, np.array([kinds.index(kind) for kind, *_ in cells], np.int32)
        train = parts["train"]
        test = parts["test"]
        model = text.MODEL.clone(classes=len(kinds))

        def base(seed: int) -> Any:
            tree = jax.jit(model.init)(jax.random.key(seed), jnp.asarray(train[0][0]))["params"]
            return text.flatten_dict(tree, sep="/")

    pattern = re.compile(text.TRAINED["embeddings and head"])

    leaves = base(0)
    trained = {leaf: value for leaf, value in leaves.items() if pattern.search(leaf)}
    frozen = {leaf: value for leaf, value in leaves.items() if leaf not in trained}

    def start(seed: int) -> Any:
        del seed  # a seed is one of noise and draws
        return trained

    def outputs(params: Any, x: Any) -> Any:
        return model.apply({"params": unflatten_dict(params, sep="/")}, x)

    def loss(params: Any, example: Any, frozen: Any) -> Any:
        x, y = example
        return losses.cross_entropy(outputs({**frozen, **params}, x), y)

    return Task(train, test, loss, start, outputs, frozen)


def of_images(name: str, kind: str) -> Task:
    """Images as vectors, or on the features of `experiments.accuracy`."""
    if kind == "mlp" or name.endswith("pixels") or name == "digits":
        data = runs.loaded(name.split()[0])
        model = models.by_name(kind, 10)
        scaled = [((np.asarray(x, np.float32) - 0.3) / 0.35, y) for x, y in (data.train, data.test)]
        scaled = [(x.reshape(len(x), -1) * 4 / x[0].size ** 0.5, y) for x, y in scaled]
        return of_model(model, *scaled, losses.cross_entropy)
    recipe = accuracy.Recipe(name, kind, **accuracy.STARTS[name, kind])
    if name == "cifar10":  # the features of the searched row are not settings of training
        recipe = recipe._replace(mirrored="mean", opponent=True, standard=kind == "patches")
    train, test = ((x[:, 0], y) for x, y in accuracy.prepared(recipe, 0, 0))
    network = "scatter_linear"
    if kind == "cnn":  # with cross entropy: the other loss has settings that were searched
        network, _ = accuracy.CNNS[name]
    model = models.by_name(network, 10, torch_init=True)
    return of_model(model, train, test, losses.cross_entropy)


@functools.lru_cache(maxsize=1)
def task_of(name: str) -> Task:
    """A task by its name."""
    where, _, kind = name.rpartition(" ")
    if kind == "embeddings":
        return of_text(where)
    if where in declared.NAMES:
        table = declared.table(where)
        model = models.by_name(kind, classes=table.classes or 1, **declared.MODELS[kind])
        loss = losses.squared_error
        if table.classes:
            loss = losses.cross_entropy
        return of_model(model, table.train, table.test, loss, range=table.target_range)
    return of_images(where, kind)


def measured(task: Task, params: Any) -> dict[str, float]:
    """Accuracy in per cent, or the root of the mean squared error in the units of the target."""
    x, y = jax.tree.map(jnp.asarray, task.test)
    outputs = jax.lax.map(partial(task.outputs, params), x, batch_size=500)
    if task.range is None:
        return {"accuracy": 100 * float(metrics.accuracy(outputs, y))}
    low, high = task.range
    return {"rmse": (high - low) / 2 * float(metrics.rmse(outputs.reshape(-1), y.reshape(-1)))}


def algorithm_of(task: Task, optimizer: Any, mechanism: Any) -> Any:
    """The training of a task."""
    return dpjax.dpsgd(task.loss, optimizer, mechanism, task.train, frozen=task.frozen)


def trained(task: Task, algorithm: Any, seed: int) -> dict[str, Any]:
    """One run."""
    state = algorithm.init(task.start(seed), key=jax.random.key(seed))
    steps = algorithm.mechanism.steps
    state, _ = dpjax.fit(algorithm, state, evaluate_every=steps, progress=False)
    return measured(task, {**(task.frozen or {}), **training.averaged(state.optimizer)})


@functools.cache
def plan_of(examples: int, epsilon: float) -> planning.Planned:
    """The plan for as many examples; parameters only enter its printed reasons."""
    return dpjax.plan(examples, jnp.zeros(()), epsilon=epsilon, delta=runs.DELTA)


@functools.lru_cache(maxsize=1)
def planned(name: str, epsilon: float) -> Any:
    """The run without a search: its plan is made of public numbers."""
    task = task_of(name)
    plan = plan_of(len(task.train[1]), epsilon)
    return algorithm_of(task, plan.optimizer, plan.mechanism)


def untuned(name: str, epsilon: float, seed: int, folder: Any = None) -> dict[str, Any]:
    """A run without a search."""
    del folder
    algorithm = planned(name, epsilon)
    return {
        **trained(task_of(name), algorithm, seed),
        "batch": algorithm.mechanism.batch_size,
        "steps": algorithm.mechanism.steps,
        "epsilon": epsilon,
    }


def of_grid(task: Task, setting: tuple[float, float], epsilon: float) -> Any:
    """The training with a setting of the grid, on the batch, steps and noise of the plan."""
    bound, step = setting
    plan = plan_of(len(task.train[1]), epsilon)
    mechanism = dataclasses.replace(plan.mechanism, clipping=clipping.flat(bound))
    sgd = optax.sgd(step / bound, momentum=0.9)
    average = training.average_parameters(planning.decay_for(mechanism.steps))
    return algorithm_of(task, optax.chain(sgd, average), mechanism)


def better(run: Mapping[str, Any]) -> float:
    """The larger, the better; a diverged run is the worst."""
    value = run["accuracy"] if "accuracy" in run else -run["rmse"]
    return value if np.isfinite(value) else -np.inf


@functools.lru_cache(maxsize=1)
def chosen(name: str, epsilon: float) -> tuple[tuple[float, float], Any]:
    """The best setting of the grid on a fifth of the training data, and its training on all."""
    task = task_of(name)
    order = np.random.default_rng(0).permutation(len(task.train[1]))
    cut = len(order) // 5
    kept = jax.tree.map(lambda array: array[order[cut:]], task.train)
    held = jax.tree.map(lambda array: array[order[:cut]], task.train)
    split = task._replace(train=kept, test=held)  # no test row is read
    scores = {s: better(trained(split, of_grid(split, s, epsilon), 0)) for s in GRID}
    best = max(scores, key=scores.__getitem__)
    return best, of_grid(task, best, epsilon)


def searched(name: str, epsilon: float, seed: int, folder: Any = None) -> dict[str, Any]:
    """A run with the best setting of the grid, and the cost of its search."""
    del folder
    setting, algorithm = chosen(name, epsilon)
    event = algorithm.mechanism.event
    best = accounting.select_best(event, runs.DELTA, runs=len(GRID))
    return {
        **trained(task_of(name), algorithm, seed),
        "setting": list(setting),
        "best_of": best.epsilon_best,
    }


def rows_of_search(results: Any, name: str, epsilon: float) -> list[Mapping[str, Any]]:
    """The searched runs, from this file of results or that of `experiments.accuracy`."""
    if name in SEARCHED:
        file = pathlib.Path(__file__).parent / "results" / "accuracy.json"
        rows = json.loads(file.read_text())["rows"]
        return list(rows.get(f"{name} at epsilon {epsilon:g}", {}).values())
    run = partial(searched, name, epsilon)
    return [results.of(f"{name} at epsilon {epsilon:g}, searched", s, run) for s in runs.seeds()]


def walk(results: Any, name: str, epsilon: float) -> None:
    """The rows of a task at one epsilon."""
    label = f"{name} at epsilon {epsilon:g}"
    if not runs.named(label):
        return
    run = partial(untuned, name, epsilon)
    done = [results.of(label, seed, run) for seed in runs.seeds()]
    print(label, [abs(better(row)) for row in done], flush=True)
    found = rows_of_search(results, name, epsilon)
    print("  searched", [abs(better(row)) for row in found], flush=True)
    if found and name in HELD_OUT:
        run = partial(untuned, name, found[0]["best_of"])
        done = [results.of(f"{label}, in total", seed, run) for seed in runs.seeds()]
        print("  in total", [abs(better(row)) for row in done], flush=True)


def tables(rows: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the page."""
    written = {}
    head = ["task", "epsilon", "no search", "searched", "cost of the search", "no search, in total"]
    for part, names in (("held-out", HELD_OUT), ("development", DEVELOPMENT)):
        lines = []
        for name, epsilon in itertools.product(names, EPSILONS):
            label = f"{name} at epsilon {epsilon:g}"
            found = list(rows.get(f"{label}, searched", {}).values())
            if name in SEARCHED:
                found = rows_of_search(None, name, epsilon)
            total = list(rows.get(f"{label}, in total", {}).values())
            cost = f"{found[0]['best_of']:.3g}" if found else ""
            here = list(rows.get(label, {}).values())
            lines.append([name, f"{epsilon:g}", *map(cell, (here, found)), cost, cell(total)])
        written[part] = runs.table(head, lines)
    return written


def cell(done: list[Mapping[str, Any]]) -> str:
    """Mean and range; an error has three digits."""
    values = [abs(better(row)) for row in done]
    if not values or "accuracy" in done[0]:
        return runs.spread(values)
    return f"RMSE {np.mean(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main(results: Any) -> None:
    """Runs the rows as far as they are missing."""
    names = DEVELOPMENT if PART.value == "development" else HELD_OUT
    if runs.SMOKE.value:
        names = ("breast cancer linear",)
    for name, epsilon in itertools.product(names, EPSILONS):
        walk(results, name, epsilon)


if __name__ == "__main__":
    runs.guide("nothing_to_tune", tables, main, "data_dir", "cache_dir", "row", "part")
