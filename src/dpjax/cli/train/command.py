# SPDX-License-Identifier: Apache-2.0
"""The run itself: all checks, before a file or private data are touched; training; reports."""

from __future__ import annotations

import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.errors
import jax
import numpy as np
import optax
from absl import app, flags

import dpjax
from dpjax import data, features, losses, processes, training
from dpjax._display import duration
from dpjax._files import read_json
from dpjax._rounding import three_digits, upwards
from dpjax.cli import compilation_cache
from dpjax.cli.flag_checks import require_matplotlib
from dpjax.cli.flag_sets import names, presets
from dpjax.cli.flag_sets.train import settings
from dpjax.cli.machine_flags import meet, mesh_in_force
from dpjax.cli.report import report as page_of
from dpjax.cli.report.load_run import read, speed_of
from dpjax.cli.report.measures import (
    MEASURES,
    first_and_guess,
    measured,
    others_and_guess,
    shown,
)
from dpjax.cli.train import build, inputs, run_files
from dpjax.cli.train.evaluation import Evaluation, first_parameters, held, rehearse

# What the library and the user's model raise for flags that describe no run.
_MISTAKES = (ArithmeticError, MemoryError, TypeError, ValueError)
_MISTAKES += (flax.errors.FlaxError, dpjax.ledger.Refused)


class Planned(NamedTuple):
    """A run that has passed every check, before it has touched anything."""

    dataset: data.Dataset
    model: Any
    loss: losses.ExampleLoss
    normalization: features.Normalization | None
    mechanism: dpjax.Mechanism
    optimizer: optax.GradientTransformation
    method: str  # of accounting
    epsilon: float
    per_epoch: int | None  # steps, for a loss that takes the epoch
    earlier: bytes | None  # parameters that an earlier run released
    budget: dpjax.ledger.Budget | None

    @property
    def per_step(self) -> Callable[[Any], Any] | None:
        """What the loss takes of the step."""
        epoch = self.per_epoch
        return None if epoch is None else lambda step: step // epoch

    @property
    def of_example(self) -> Callable[..., Any]:
        """The loss of one example, as the step takes it."""
        return losses.of(self.model, self.loss)

    def algorithm(self, mechanism: dpjax.Mechanism, rows: Any, **changes: Any) -> Any:
        """DP-SGD with this run's loss, and its optimizer unless another one is given."""
        options = {"optimizer": self.optimizer, "per_step": self.per_step, **changes}
        return dpjax.dpsgd(self.of_example, mechanism=mechanism, data=rows, **options)


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Trains as the flags say; a refusal of the ledger ends the process with its message."""
    presets.apply(given)
    if given.report:
        require_matplotlib(", or give --noreport")
    compilation_cache.switch_on()
    try:
        with mesh_in_force(given.mesh, meet(given)):
            execute(given, plan(given))
    except dpjax.ledger.Refused as refused:
        sys.exit(
            f"{refused}\nGive another --out, or --overwrite to delete the run that is there. "
            "--continue_from=RUN --out=ANOTHER continues it with other settings."
        )
    except OSError as error:
        sys.exit(str(error))


def plan(given: flags.FlagValues) -> Planned:
    """Builds all parts of the run, and refuses flags that do not fit each other or the data."""
    # Of two flags for one quantity one would have no effect.
    for one, other in (("noise_multiplier", "target_epsilon"), ("steps", "epochs")):
        if given[one].value is not None and given[other].present:
            raise app.UsageError(f"--{one} --{other}: expected one of the two, or --max_epsilon.")
    for name, declared in (("label", False), ("classes", False), ("unit_column", True)):
        if given[name].value and bool(given.columns) != declared:
            need = "with" if declared else "without"
            raise app.UsageError(f"--{name}: expected {need} --columns, which declares the label.")
    try:
        # Data come first, because classes, sizes and sampling rate follow from them.
        dataset = load(given)
        # A number that is learnt is the one output of the model.
        classes, examples = dataset.classes or 1, dataset.units
        # Before calibration, which can take minutes at such a delta.
        if given.delta * examples >= 1:
            raise ValueError(
                f"--delta={given.delta:g}: expected less than 1/{examples}, since publishing one "
                f"whole record would satisfy it. Give --delta={0.1 / examples:.1g}."
            )
        model = build.build_model(given, classes)
        loss = build.build_loss(given, dataset.classes)
        normalization = inputs.build_normalization(given, examples)
        queries = () if normalization is None else normalization.multipliers
        mechanism = build.build_mechanism(given, examples, queries, dataset.owners)
        optimizer = build.build_optimizer(given, mechanism)
        method = build.accountant(given, mechanism)
        epsilon = mechanism.epsilon(given.delta, method)
        composite = given.loss == "composite"
        per_epoch = build.steps_per_epoch(given, examples) if composite else None
        earlier = given.continue_from and processes.from_first(
            pathlib.Path(given.continue_from, "params.msgpack").read_bytes
        )
        x = inputs.input_shape(given, dataset)
        rehearse(x, model, loss, mechanism, earlier, classes=classes, epochs=composite)
        # Last, because only the whole plan has a price, and still before a file is touched.
        budget, most = None, given.max_epsilon
        if most is not None:
            budget = dpjax.ledger.Budget(epsilon=most, delta=given.delta, method=method)
        dpjax.ledger.require(dpjax.ledger.empty(), mechanism, mechanism.steps, budget)
    except _MISTAKES as error:
        raise app.UsageError(f"{error}\nNothing was spent, nothing in --out touched.") from error
    made = dataset, model, loss, normalization, mechanism, optimizer
    return Planned(*made, method, epsilon, per_epoch, earlier, budget)


def load(given: flags.FlagValues) -> data.Dataset:
    """The data set of the flags."""
    split: dict[str, Any] = {"test": given.test, "holdout": given.holdout}
    try:
        if given.columns:
            return data.table(given.dataset, given.columns, given.unit_column or None, **split)
        if names.is_file(given.dataset):
            return data.load_file(given.dataset, given.classes, given.label, **split)
        for name, value in split.items():
            if value is not None:
                raise ValueError(f"--{name}: expected with a file of yours; this has a test set.")
        return (data.stream if given.stream else data.load)(given.dataset, given.data_dir)
    except (ImportError, OSError, ValueError) as error:
        raise app.UsageError(f"--dataset={given.dataset}: {error}") from error


def execute(given: flags.FlagValues, planned: Planned) -> None:
    """Trains, and writes and prints the reports."""
    folder, mechanism = pathlib.Path(given.out), planned.mechanism
    announce(given, planned)  # first: a user who meant another epsilon can still stop
    dataset, moments = inputs.with_features(given, planned.dataset), None
    processes.from_first(lambda: run_files.prepare(folder, overwrite=given.overwrite))
    if planned.normalization is not None:
        # One release, in the first process, which alone writes files.
        asked = folder / run_files.MOMENTS, planned.normalization, dataset.train[0], given.seed
        moments = processes.from_first(lambda: inputs.release_once(*asked))
    dataset = inputs.with_scale(given, dataset, moments)
    algorithm = planned.algorithm(mechanism, dataset.train, budget=planned.budget)
    # No single row has the gradient of a loss that changes with the step, or of a person.
    of_rows = planned.per_epoch is None and dataset.owners is None
    observed = planned.of_example if of_rows else None
    evaluation = Evaluation(planned.model, observed, mechanism.clipping, dataset)
    describe = describing(given, dataset)

    def evaluate(state: Any) -> dict[str, Any]:
        describe(state.params)
        return evaluation.evaluate(state)

    first = first_parameters(planned.model, dataset, planned.earlier)
    key = None if given.seed is None else jax.random.key(given.seed)
    state, _ = dpjax.fit(
        algorithm,
        algorithm.init(first, key),
        evaluate=evaluate,
        evaluate_every=-(-mechanism.steps // given.evaluations),
        delta=given.delta,
        method=planned.method,
        directory=folder,
        configuration=configuration(given),
        save_every=given.save_every,
        held_out=dataset.held_out,
    )
    average = held(training.averaged(state.optimizer))
    if processes.first_process():
        evaluation.write(folder, average)
        report(given, dataset)


def configuration(given: flags.FlagValues) -> dict[str, Any]:
    """What identifies the run: its flags, and the declarations in the file that a flag names."""
    named = {f"--{name}": value for name, value in settings(given).items()}
    declared = pathlib.Path(given.columns).read_text("utf-8-sig") if given.columns else None
    return named | ({"columns": declared} if declared else {})


def announce(given: flags.FlagValues, planned: Planned) -> None:
    """Prints what the run costs, together with the runs before it."""
    if not processes.first_process():
        return
    mechanism, dataset = planned.mechanism, planned.dataset
    if given.preset:
        result, *_ = presets.ROWS[given.preset]
        print(f"{given.preset}, as it stands, reaches a test accuracy of {result} %.")
    if dataset.columns:  # which column is the label
        print(dataset.name, dataset.note)
    words = f"{mechanism.steps} steps with noise multiplier {np.mean(mechanism.multipliers):.4g}"
    if mechanism.before:
        words += ", together with the earlier runs,"
    at = f"{three_digits(planned.epsilon)} at delta={upwards(given.delta, '.3g')}"
    print(f"{words} cost epsilon {at}, by {planned.method}", flush=True)
    if given.seed is not None:
        print(f"--seed={given.seed} is no secret: epsilon holds against those who do not know it.")


def describing(given: flags.FlagValues, dataset: data.Dataset) -> Callable[[Any], None]:
    """What writes `config.json` at each evaluation, so that a stopped run has one too."""
    folder, began = pathlib.Path(given.out), time.time()
    # Earlier processes of the run count: `fit` refuses another run before it evaluates.
    resumed = (folder / "run.json").exists() and (folder / "config.json").exists()
    before = read_json(folder / "config.json") if resumed else {}
    facts: dict[str, Any] = {"dataset": f"{dataset.name} {dataset.note}".strip()}
    facts |= {"model": given.model, "class_names": dict(enumerate(dataset.class_names))}
    facts |= {"columns": list(dataset.columns)}
    facts["started"] = before.get("started", time.strftime("%Y-%m-%d %H:%M:%S"))
    facts = {name: fact for name, fact in facts.items() if fact}

    def describe(params: Any) -> None:
        size = sum(x.size for x in jax.tree.leaves(params))
        took = round(before.get("seconds", 0) + time.time() - began, 1)
        if processes.first_process():
            typed = {**settings(given), "out": given.out}
            run_files.describe(folder, typed, **facts, seconds=took, parameters=size)

    return describe


def report(given: flags.FlagValues, dataset: data.Dataset) -> None:
    """Writes and prints what a run that has ended leaves."""
    folder = pathlib.Path(given.out)
    print((folder / "statement.txt").read_text().partition("\n\nReferences\n")[0])
    run = read(folder)
    config = read_json(folder / "config.json")
    for name, value in list(measured(run).items())[:1]:
        reached = f"{MEASURES[name]} {shown(name, value)} on {dataset.name} {dataset.note}"
        print(f"\n{_sentence(reached)} {first_and_guess(run)}")
    others = others_and_guess(run)
    if others:
        print(_sentence(others))
    speed = speed_of(run)
    if speed:
        speed = f", {speed} {run.unit}s/s in steps alone"
    print(f"Trained in {duration(config['seconds'])} on {config['hardware']['device']}{speed}")
    if given.report:
        print(f"To look at: {page_of(folder)}")
    print(f"All files are in {folder}. Recompute epsilon: dpjax verify {shlex.quote(str(folder))}")


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:].rstrip()}."
