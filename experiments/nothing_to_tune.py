# SPDX-License-Identifier: Apache-2.0
"""One run without a search, next to the best of a search at equal and at equal total epsilon.

claim     `dpjax.plan` is at most 0.5 points (2 % of RMSE) behind a searched row at equal epsilon
verdict   docs/pages/nothing_to_tune.md has the tables and a verdict, which ``--page`` writes
time      3 to 10 core seconds a run of a table, up to 7 core minutes of images and text
hardware  CPU cores
command   python -m experiments.nothing_to_tune --seeds=5 --cache_dir=FOLDER
              --out=experiments/results/nothing_to_tune.json

The file follows the comparison: the tasks, a run by a plan, the baseline, the rows, and the tables.

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
from flax.traverse_util import flatten_dict, unflatten_dict

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
    # The tasks below were added after the first version of the plan.
    "mnist pixels linear",
    "mnist pixels mlp",
    "wine quality mlp",
)
SMALL = {"breast cancer linear", "diabetes linear"}  # fewer than 1,000 rows
# `experiments.accuracy` has the searched rows of these tasks.
SEARCHED = {"mnist linear", "mnist cnn", "cifar10 linear", "cifar10 patches"}
# Bounds, and rates times bounds. Fixed before the first held-out run.
GRID = tuple(itertools.product((0.1, 1.0), (0.02, 0.1, 0.5, 2.5)))

Run = Mapping[str, Any]  # its numbers
Rows = Mapping[str, Any]  # runs by row and seed


# Tasks


class Task(NamedTuple):
    """Data, a loss, first parameters by seed, and the outputs that are measured."""

    train: Any
    test: Any
    loss: Callable[..., Any]
    start: Callable[[int], Any]
    outputs: Callable[[Any, Any], Any]  # of parameters and one input
    frozen: Any = None  # public leaves that are not trained
    range: tuple[float, float] | None = None  # of a target


@functools.lru_cache(maxsize=1)
def task_of(name: str) -> Task:
    """A task by its name, which ends with its model."""
    dataset, _, kind = name.rpartition(" ")
    if kind == "embeddings":
        return of_text(dataset)
    if dataset in declared.NAMES:
        return of_table(dataset, kind)
    if dataset == "digits" or dataset.endswith("pixels"):
        return of_pixels(dataset.split()[0], kind)
    return of_features(dataset, kind)


def of_model(model: Any, train: Any, test: Any, loss: Any, **options: Any) -> Task:
    """A task of a Flax model, all of whose parameters are trained."""
    initialize = jax.jit(model.init)

    def start(seed: int) -> Any:
        return initialize(jax.random.key(seed), jnp.asarray(train[0][0]))["params"]

    def outputs(params: Any, x: Any) -> Any:
        return model.apply({"params": params}, x)

    return Task(train, test, losses.of(model, loss), start, outputs, **options)


def of_table(name: str, kind: str) -> Task:
    """A table with declared columns, and a label or a target."""
    table = declared.table(name)
    model = models.by_name(kind, classes=table.classes or 1, **declared.MODELS[kind])
    loss = losses.squared_error
    if table.classes:
        loss = losses.cross_entropy
    return of_model(model, table.train, table.test, loss, range=table.target_range)


def of_pixels(name: str, kind: str) -> Task:
    """Images as vectors whose length is about 4."""
    dataset = runs.loaded(name)

    def vectors(images: Any) -> Any:
        pixels = (np.asarray(images, np.float32) - 0.3) / 0.35
        x = pixels.reshape(len(pixels), -1)
        return x * 4 / x.shape[1] ** 0.5

    train, test = ((vectors(x), y) for x, y in (dataset.train, dataset.test))
    return of_model(models.by_name(kind, 10), train, test, losses.cross_entropy)


def of_features(name: str, kind: str) -> Task:
    """Images on the features of their searched row in `experiments.accuracy`."""
    recipe = accuracy.Recipe(name, kind, **accuracy.STARTS[name, kind])
    if name == "cifar10":  # the features of the searched row are not settings of training
        recipe = recipe._replace(mirrored="mean", opponent=True, standard=kind == "patches")
    train, test = ((x[:, 0], y) for x, y in accuracy.prepared(recipe, 0, 0))
    network = "scatter_linear"
    if kind == "cnn":  # with cross entropy: the other loss has settings that were searched
        network, _ = accuracy.CNNS[name]
    model = models.by_name(network, 10, torch_init=True)
    return of_model(model, train, test, losses.cross_entropy)


def of_text(name: str) -> Task:
    """Phrases of SST-2 from the base of `experiments.text`, or questions of TREC from nothing."""
    if name == "sst2":
        train = text.phrases_of("train")
        test = text.phrases_of("test")
        return of_embeddings(text.MODEL, text.base(0), train, test)
    train = questions_of("train")
    test = questions_of("test")
    model = text.MODEL.clone(classes=6)
    leaves = jax.jit(model.init)(jax.random.key(0), jnp.asarray(train[0][0]))["params"]
    return of_embeddings(model, flatten_dict(leaves, sep="/"), train, test)


def questions_of(part: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of questions, and their kinds; each kind is in both parts."""
    lines = text.text_of(f"trec_{part}.tsv").splitlines()[1:]
    kinds, _, questions = zip(*[line.split("\t") for line in lines], strict=True)
    x = np.stack([text.tokens(question) for question in questions])
    _, y = np.unique(kinds, return_inverse=True)
    return x, y.astype(np.int32)


def of_embeddings(model: Any, leaves: Mapping[str, Any], train: Any, test: Any) -> Task:
    """Embeddings and the head of a network are trained; a seed is one of noise and draws."""
    pattern = re.compile(text.TRAINED["embeddings and head"])
    trained = {name: leaf for name, leaf in leaves.items() if pattern.search(name)}
    frozen = {name: leaf for name, leaf in leaves.items() if name not in trained}

    def start(seed: int) -> Any:
        del seed
        return trained

    def outputs(params: Any, x: Any) -> Any:
        return model.apply({"params": unflatten_dict(params, sep="/")}, x)

    def loss(params: Any, example: Any, frozen: Any) -> Any:
        x, y = example
        return losses.cross_entropy(outputs({**frozen, **params}, x), y)

    return Task(train, test, loss, start, outputs, frozen)


# A run by a plan


@functools.cache
def plan_of(examples: int, epsilon: float, **pace: float) -> planning.Planned:
    """The plan for as many examples; parameters only enter its printed reasons."""
    return dpjax.plan(examples, jnp.zeros(()), epsilon=epsilon, delta=runs.DELTA, **pace)


def algorithm_of(task: Task, optimizer: Any, mechanism: dpjax.Mechanism) -> Any:
    """The training of a task."""
    return dpjax.dpsgd(task.loss, optimizer, mechanism, task.train, frozen=task.frozen)


@functools.lru_cache(maxsize=1)
def planned(name: str, epsilon: float) -> Any:
    """The training by a plan, which is made of public numbers."""
    task = task_of(name)
    pace = {}
    if task.range is not None:  # a target, whose squared error needs another drift
        pace["drift"] = 1.0
    plan = plan_of(len(task.train[1]), epsilon, **pace)
    return algorithm_of(task, plan.optimizer, plan.mechanism)


def trained(task: Task, algorithm: Any, seed: int) -> Run:
    """One run: the measure of its averaged parameters on the test rows."""
    state = algorithm.init(task.start(seed), key=jax.random.key(seed))
    steps = algorithm.mechanism.steps
    state, _ = dpjax.fit(algorithm, state, evaluate_every=steps, progress=False)
    params = training.averaged(state.optimizer)
    return measured(task, {**(task.frozen or {}), **params})


def measured(task: Task, params: Any) -> Run:
    """Accuracy in per cent, or the root of the mean squared error in the units of the target."""
    x, y = jax.tree.map(jnp.asarray, task.test)
    outputs = jax.lax.map(partial(task.outputs, params), x, batch_size=500)
    if task.range is None:
        return {"accuracy": 100 * float(metrics.accuracy(outputs, y))}
    low, high = task.range
    return {"rmse": (high - low) / 2 * float(metrics.rmse(outputs.reshape(-1), y.reshape(-1)))}


def untuned(name: str, epsilon: float, seed: int, _: Any) -> Run:
    """A run without a search."""
    algorithm = planned(name, epsilon)
    return {
        **trained(task_of(name), algorithm, seed),
        "batch": algorithm.mechanism.batch_size,
        "steps": algorithm.mechanism.steps,
        "epsilon": epsilon,
    }


# The baseline: the best of a search


def of_grid(task: Task, setting: tuple[float, float], epsilon: float) -> Any:
    """The training with a setting of the grid, on the batch, steps and noise of the plan."""
    bound, step = setting
    plan = plan_of(len(task.train[1]), epsilon)
    mechanism = dataclasses.replace(plan.mechanism, clipping=clipping.flat(bound), adaptive=None)
    sgd = optax.sgd(step / bound, momentum=0.9)
    average = training.average_parameters(planning.decay_for(mechanism.steps))
    return algorithm_of(task, optax.chain(sgd, average), mechanism)


@functools.lru_cache(maxsize=1)
def chosen(name: str, epsilon: float) -> tuple[tuple[float, float], Any]:
    """The best setting of the grid on a fifth of the training data, and its training on all."""
    task = task_of(name)
    order = np.random.default_rng(0).permutation(len(task.train[1]))
    cut = len(order) // 5
    rest = jax.tree.map(lambda array: array[order[cut:]], task.train)
    held_out = jax.tree.map(lambda array: array[order[:cut]], task.train)
    split = task._replace(train=rest, test=held_out)  # no test row is read
    scores = {}
    for setting in GRID:
        run = trained(split, of_grid(split, setting, epsilon), 0)
        scores[setting] = score(run)
    best = max(scores, key=scores.__getitem__)
    return best, of_grid(task, best, epsilon)


def score(run: Run) -> float:
    """Accuracy or minus the error: the larger, the better. A diverged run is the worst."""
    value = run.get("accuracy")
    if value is None:
        value = -run["rmse"]
    return value if np.isfinite(value) else -np.inf


def searched(name: str, epsilon: float, seed: int, _: Any) -> Run:
    """A run with the best setting of the grid, and the cost of its search."""
    setting, algorithm = chosen(name, epsilon)
    best = accounting.select_best(algorithm.mechanism.event, runs.DELTA, runs=len(GRID))
    return {
        **trained(task_of(name), algorithm, seed),
        "setting": list(setting),
        "best_of": best.epsilon_best,
    }


# Rows


def walk(results: Any, name: str, epsilon: float) -> None:
    """The rows of a task at one epsilon, as far as they are missing."""
    row = f"{name} at epsilon {epsilon:g}"
    if not runs.named(row):
        return
    for seed in runs.seeds():
        results.of(row, seed, partial(untuned, name, epsilon))
    if name not in SEARCHED:
        for seed in runs.seeds():
            results.of(f"{row}, searched", seed, partial(searched, name, epsilon))
    _, best, _ = rows_of(results.content["rows"], name, epsilon, results.mark)
    if best:
        total = best[0]["best_of"]
        for seed in runs.seeds():
            results.of(f"{row}, in total", seed, partial(untuned, name, total))
    print(*line_of(results.content["rows"], name, epsilon, results.mark), sep="  ", flush=True)


def rows_of(rows: Rows, name: str, epsilon: float, mark: str = "") -> list[list[Run]]:
    """The runs without a search, the searched ones, and those at an equal total epsilon."""
    row = f"{mark}{name} at epsilon {epsilon:g}"
    best = rows.get(f"{row}, searched", {})
    if name in SEARCHED:
        file = pathlib.Path(__file__).parent / "results" / "accuracy.json"
        best = json.loads(file.read_text())["rows"].get(row, {})
    by_seed = (rows.get(row, {}), best, rows.get(f"{row}, in total", {}))
    return [list(seeds.values()) for seeds in by_seed]


def main(results: Any) -> None:
    """Runs the rows of the tasks that the flags name."""
    names = HELD_OUT
    if PART.value == "development":
        names = DEVELOPMENT
    if runs.SMOKE.value:
        names = ("breast cancer linear",)
    for name, epsilon in itertools.product(names, EPSILONS):
        walk(results, name, epsilon)


# Tables and verdicts


def tables(rows: Rows) -> dict[str, str]:
    """The texts of the page, by marker."""
    head = [
        "task",
        "epsilon",
        "no search",
        "searched",
        "cost of the search",
        "no search, in total",
        "core seconds",
    ]
    texts = {}
    for part, names in (("held-out", HELD_OUT), ("development", DEVELOPMENT)):
        lines = [line_of(rows, name, e) for name, e in itertools.product(names, EPSILONS)]
        texts[part] = runs.table(head, lines)
        verdicts = [verdict(rows, names, epsilon) for epsilon in EPSILONS]
        texts[f"{part} verdict"] = "\n".join(verdicts)
    return texts


def line_of(rows: Rows, name: str, epsilon: float, mark: str = "") -> list[str]:
    """The line of a task at one epsilon, with the core seconds of its first run and of others."""
    plain, best, total = rows_of(rows, name, epsilon, mark)
    cost = ""
    if best:
        cost = f"{best[0]['best_of']:.3g}"
    seconds = [run["core_seconds"] for run in plain]
    times = ""
    if seconds[1:]:
        times = f"{seconds[0]:.0f}, then {np.median(seconds[1:]):.1f}"
    return [name, f"{epsilon:g}", spread(plain), spread(best), cost, spread(total), times]


def spread(done: list[Run]) -> str:
    """Mean and range over seeds; an error has three digits."""
    values = [abs(score(run)) for run in done]
    if not values or "accuracy" in done[0]:
        return runs.spread(values)
    return f"RMSE {np.mean(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def verdict(rows: Rows, names: tuple[str, ...], epsilon: float) -> str:
    """How many tasks meet the goal at one epsilon, and by how much the others miss it."""
    compared = 0
    behind = []
    behind_in_total = []
    for name in names:
        plain, best, total = ([score(run) for run in d] for d in rows_of(rows, name, epsilon))
        if not total:
            continue
        compared += 1
        gap = np.mean(best) - np.mean(plain)
        if gap > tolerance(name, plain, best):
            behind.append(f"{name} by {gap:.2g}")
        if np.mean(total) <= np.mean(best):
            behind_in_total.append(name)
    if not compared:
        return f"* Epsilon {epsilon:g}: not run."
    return (
        f"* Epsilon {epsilon:g}: {compared - len(behind)} of {compared} tasks are within the "
        f"tolerance at equal epsilon, and {compared - len(behind_in_total)} of {compared} are "
        f"ahead at equal total epsilon. Behind by more: {', '.join(behind) or 'none'}. "
        f"Behind in total: {', '.join(behind_in_total) or 'none'}. "
        f"Not run: {len(names) - compared} of {len(names)}."
    )


def tolerance(name: str, plain: list[float], best: list[float]) -> float:
    """0.5 points or 2 % of RMSE; for few rows two standard errors of the difference of means."""
    if name in SMALL:
        variances = [np.var(scores, ddof=1) / len(scores) for scores in (plain, best)]
        return 2 * float(sum(variances)) ** 0.5
    if best[0] < 0:  # minus an error
        return -0.02 * float(np.mean(best))
    return 0.5


if __name__ == "__main__":
    runs.guide("nothing_to_tune", tables, main, "data_dir", "cache_dir", "row", "part")
