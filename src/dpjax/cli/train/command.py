# SPDX-License-Identifier: Apache-2.0
"""The run itself: all checks, before a file or private data are touched; training; reports."""

from __future__ import annotations

import os
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
from dpjax import data, features, losses, planning, processes, training
from dpjax._display import duration
from dpjax._files import read_json
from dpjax._rounding import three_digits, upwards
from dpjax.cli import compilation_cache
from dpjax.cli.flag_checks import require
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
from dpjax.cli.train import build, inputs, run_files, unsearched
from dpjax.cli.train.evaluation import Evaluation, first_parameters, held, rehearse

# The library and the user's model raise these for flags that describe no run.
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
    persons: bool = False  # whether an example holds the rows of a person, as in an audit

    @property
    def per_step(self) -> Callable[[Any], Any] | None:
        """The epoch of a step, for a loss that takes it."""
        steps = self.per_epoch
        if steps is None:
            return None
        return lambda step: step // steps

    @property
    def of_example(self) -> Callable[..., Any]:
        """The loss of one example, as the step takes it."""
        of_row = losses.of(self.model, self.loss)
        if self.persons:
            return losses.of_person(of_row)
        return of_row

    def algorithm(self, mechanism: dpjax.Mechanism, rows: Any, **changes: Any) -> Any:
        """DP-SGD with this run's loss, and its optimizer unless another one is given."""
        options = {"optimizer": self.optimizer, "per_step": self.per_step, **changes}
        return dpjax.dpsgd(self.of_example, mechanism=mechanism, data=rows, **options)


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Trains a model; a refusal of the ledger ends the process with its message."""
    presets.apply(given)
    require_extras(given)
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


def require_extras(given: flags.FlagValues) -> None:
    """Refuses a run whose optional packages are not installed, all in one message."""
    modules = []
    otherwise = ""  # the end of the message: how to run without a package
    if given.dataset == "digits":
        modules.append("sklearn")
    if given.dataset.endswith(names.OF_ARROW):  # suffixes of files that pyarrow reads
        modules.append("pyarrow")
    if given.report:
        modules.append("matplotlib.figure")
        otherwise = ", or give --noreport"
    require("dpjax train", *modules, otherwise=otherwise)


def require_consistent(given: flags.FlagValues) -> None:
    """Refuses flags that contradict each other."""
    # Two flags for one quantity: one of them has no effect.
    several = [("noise_multiplier", "target_epsilon"), ("steps", "epochs")]
    several += [("risk", "target_epsilon"), ("risk", "noise_multiplier")]
    for one, other in several:
        if given[one].value is not None and given[other].present:
            raise app.UsageError(f"--{one} --{other}: expected one of the two, or --max_epsilon.")
    for name, need in (("label", "without"), ("classes", "without"), ("unit_column", "with")):
        if given[name].value and bool(given.columns) != (need == "with"):
            raise app.UsageError(f"--{name}: expected {need} --columns, which declares the label.")


def plan(given: flags.FlagValues) -> Planned:
    """Builds all parts of the run, and refuses flags that do not fit each other or the data."""
    require_consistent(given)
    try:
        # Data come first, because classes, sizes and sampling rate follow from them.
        dataset = load(given)
        outputs = dataset.classes or 1  # a regression has one output
        examples = dataset.units  # persons, if one can have several rows
        unsearched.apply(given, examples)  # sets flags that were not typed
        # This check comes before calibration, which can take minutes at such a delta.
        if given.delta * examples >= 1:
            raise ValueError(
                f"--delta={given.delta:g}: expected less than 1/{examples}, since publishing one "
                f"whole record would satisfy it. Give --delta={0.1 / examples:.1g}."
            )
        model = build.build_model(given, outputs)
        loss = build.build_loss(given, dataset.classes)
        # Features may be scaled by moments, which noisy queries on private data release. The
        # mechanism accounts these queries by their noise multipliers.
        normalization = inputs.build_normalization(given, examples)
        queries = () if normalization is None else normalization.multipliers
        mechanism = build.build_mechanism(given, examples, queries, dataset.owners)
        optimizer = build.build_optimizer(given, mechanism)
        method = build.accountant(given, mechanism)
        epsilon = mechanism.epsilon(given.delta, method)
        per_epoch = None
        if given.loss == "composite":  # changes with the epoch
            per_epoch = build.steps_per_epoch(given, examples)
        # The parameters of an earlier run, serialized, if this run begins there. The first process
        # reads them, and sends them to the others.
        earlier = given.continue_from and processes.from_first(
            pathlib.Path(given.continue_from, "params.msgpack").read_bytes
        )
        # Traces the loss on shapes, and raises if the parts do not fit each other.
        input_shape = inputs.input_shape(given, dataset)
        takes_epoch = per_epoch is not None
        rehearse(
            input_shape, model, loss, mechanism, earlier, outputs=outputs, takes_epoch=takes_epoch
        )
        # The budget comes last, because only the whole plan has a price.
        budget = None
        if given.max_epsilon is not None:
            budget = dpjax.ledger.Budget(
                epsilon=given.max_epsilon, delta=given.delta, method=method
            )
        # All steps must fit into the budget. None has run, so the ledger is empty.
        dpjax.ledger.require(dpjax.ledger.empty(), mechanism, mechanism.steps, budget)
    except _MISTAKES as error:
        raise app.UsageError(f"{error}\nNothing was spent, nothing in --out touched.") from error
    return Planned(
        dataset=dataset,
        model=model,
        loss=loss,
        normalization=normalization,
        mechanism=mechanism,
        optimizer=optimizer,
        method=method,
        epsilon=epsilon,
        per_epoch=per_epoch,
        earlier=earlier,
        budget=budget,
    )


def load(given: flags.FlagValues) -> data.Dataset:
    """Reads the data set: a table with declared columns, another file, or a public one by name."""
    # Test rows of a file are in another file, or held out of it. A public data set has its own.
    split: dict[str, Any] = {"test": given.test, "holdout": given.holdout}
    try:
        if given.columns:
            return data.table(given.dataset, given.columns, given.unit_column or None, **split)
        if names.is_file(given.dataset):
            return data.load_file(given.dataset, given.classes, given.label, **split)
        for name, value in split.items():
            if value is not None:
                raise ValueError(f"--{name}: expected with a file of yours; this has a test set.")
        if given.stream:
            return data.stream(given.dataset, given.data_dir)
        return data.load(given.dataset, given.data_dir)
    except (ImportError, OSError, ValueError) as error:
        raise app.UsageError(f"--dataset={given.dataset}: {error}") from error


def execute(given: flags.FlagValues, planned: Planned) -> None:
    """Trains the planned run in its folder, and writes and prints the reports."""
    folder = pathlib.Path(given.out)
    mechanism = planned.mechanism
    announce(given, planned)  # first: a user who meant another epsilon can still stop
    dataset = inputs.with_features(given, planned.dataset)
    # The first process prepares the folder; the others wait for it.
    processes.from_first(lambda: run_files.prepare(folder, overwrite=given.overwrite))
    moments = None  # of the features: noisy mean and variance of each channel
    normalization = planned.normalization
    if normalization is not None:
        features_of_rows, _ = dataset.train
        path = folder / run_files.MOMENTS
        # The first process releases the moments, because only it writes files.
        moments = processes.from_first(
            lambda: inputs.release_once(path, normalization, features_of_rows, given.seed)
        )
    dataset = inputs.with_scale(given, dataset, moments)
    algorithm = planned.algorithm(mechanism, dataset.train, budget=planned.budget)
    # The evaluation measures the gradients of this loss, row by row. It measures none if the loss
    # also needs the epoch, or if the run clips gradients of persons, who have several rows.
    loss_of_row = None
    if planned.per_epoch is None and dataset.owners is None:
        loss_of_row = planned.of_example
    evaluation = Evaluation(planned.model, loss_of_row, mechanism.clipping, dataset)
    # config.json describes the rows as they were read, before features are computed from them.
    describe = describing(given, planned.dataset)

    def evaluate(state: Any) -> dict[str, Any]:
        describe(state.params)  # writes config.json, so a stopped run has the file too
        return evaluation.evaluate(state)

    first_params = first_parameters(planned.model, dataset, planned.earlier)
    key = None if given.seed is None else jax.random.key(given.seed)  # None draws a secret key
    how_chosen = None  # the sentence of the statement about the choice of settings
    if unsearched.is_whole(given):
        how_chosen = planning.NO_SETTING
    state, _ = dpjax.fit(
        algorithm,
        algorithm.init(first_params, key),
        evaluate=evaluate,
        evaluate_every=-(-mechanism.steps // given.evaluations),  # rounded up
        delta=given.delta,
        method=planned.method,
        directory=folder,
        configuration=configuration(given),
        save_every=given.save_every,
        held_out=dataset.held_out,
        settings=how_chosen,
    )
    # Every process takes part in collecting the shards; only the first one writes.
    average = held(training.averaged(state.optimizer))
    scale = held(state.bound_scale)
    if processes.first_process():
        evaluation.write(folder, average, scale)
        report(given, dataset)


def configuration(given: flags.FlagValues) -> dict[str, Any]:
    """The identity of the run: its flags, and the declarations in the file that a flag names."""
    identity = {f"--{name}": value for name, value in settings(given).items()}
    if given.columns:
        declared = pathlib.Path(given.columns).read_text("utf-8-sig")
        if declared:
            identity["columns"] = declared
    return identity


def announce(given: flags.FlagValues, planned: Planned) -> None:
    """Prints the cost of the run, together with the runs before it."""
    if not processes.first_process():  # one process prints for all
        return
    mechanism = planned.mechanism
    dataset = planned.dataset
    if given.preset:
        accuracy, *_ = presets.ROWS[given.preset]
        print(f"{given.preset}, as it stands, reaches a test accuracy of {accuracy} %.")
    if dataset.columns:  # then the note tells which column is the label
        print(dataset.name, dataset.note)
    if unsearched.is_whole(given):
        print(f"{planning.NO_SETTING} For the reasons of the plan: dpjax plan")
    words = f"{mechanism.steps} steps with noise multiplier {np.mean(mechanism.multipliers):.4g}"
    if mechanism.before:
        words += ", together with the earlier runs,"
    epsilon = f"epsilon {three_digits(planned.epsilon)} at delta={upwards(given.delta, '.3g')}"
    print(f"{words} cost {epsilon}, by {planned.method}", flush=True)
    if given.risk is not None:
        print(f"Noise is scaled to --risk={given.risk}: true alarms of an attack at false ones.")
    if given.seed is not None:
        print(f"--seed={given.seed} is no secret: epsilon holds against those who do not know it.")


def describing(given: flags.FlagValues, dataset: data.Dataset) -> Callable[[Any], None]:
    """Returns ``describe(params)``, which writes `config.json`.

    It runs at each evaluation, so a stopped run has the file too. A command that resumes the run
    keeps the time at which the run started, and adds to its seconds.
    """
    folder = pathlib.Path(given.out)
    began = time.time()
    # With run.json the file is of this run, because `fit` refuses the folder of another run before
    # it evaluates. Without run.json it is a remainder of a run that was deleted.
    config_so_far = {}
    if (folder / "run.json").exists() and (folder / "config.json").exists():
        config_so_far = read_json(folder / "config.json")
    row = inputs.row_of(dataset)
    facts = {
        "inputs": {"shape": row.shape, "dtype": row.dtype.name, "outputs": dataset.classes or 1},
        "dataset": f"{dataset.name} {dataset.note}".strip(),
        "model": given.model,
        "class_names": dict(enumerate(dataset.class_names)),
        "classes": dataset.classes,
        "columns": list(dataset.columns),
        "trained_in": os.getcwd(),
        "started": config_so_far.get("started", time.strftime("%Y-%m-%d %H:%M:%S")),
    }
    if given.columns:  # `dpjax predict` reads new rows by them
        facts["declared"] = data.Columns.read(given.columns).declared
    if unsearched.is_whole(given):
        facts["settings"] = planning.NO_SETTING
    # A fact that this run does not have is left out: a target has no classes.
    facts = {name: fact for name, fact in facts.items() if fact}

    def describe(params: Any) -> None:
        parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        seconds = round(config_so_far.get("seconds", 0) + time.time() - began, 1)
        if processes.first_process():
            typed = {**settings(given), "out": given.out}  # `settings` leaves the folder out
            run_files.describe(folder, typed, **facts, seconds=seconds, parameters=parameters)

    return describe


def report(given: flags.FlagValues, dataset: data.Dataset) -> None:
    """Prints the results of a run that has ended, and writes its page."""
    folder = pathlib.Path(given.out)
    # The part before the references is printed; they are long, and stay in the file.
    print((folder / "statement.txt").read_text().partition("\n\nReferences\n")[0])
    run = read(folder)
    config = read_json(folder / "config.json")
    # The first measure has a sentence of its own, and one that compares it with guessing the most
    # frequent class, or the mean. A run without test rows has no measure.
    for name, value in list(measured(run).items())[:1]:
        reached = f"{MEASURES[name]} {shown(name, value)} on {dataset.name} {dataset.note}"
        print(f"\n{_sentence(reached)} {first_and_guess(run)}")
    others = others_and_guess(run)
    if others:
        print(_sentence(others))
    ending = ""
    speed = speed_of(run)  # empty if the log has none
    if speed:
        ending = f", {speed} {run.unit}s/s in steps alone"
    print(f"Trained in {duration(config['seconds'])} on {config['hardware']['device']}{ending}")
    if given.report:
        print(f"To look at: {page_of(folder)}")
    print(f"All files are in {folder}. Recompute epsilon: dpjax verify {shlex.quote(str(folder))}")


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:].rstrip()}."
