# SPDX-License-Identifier: Apache-2.0
"""The run itself: check the flags, rehearse on shapes, train, and write the reports.

All checks come before `--overwrite` deletes a folder and before private data are queried, so a
mistaken flag costs neither files nor privacy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging

import dpjax
from dpjax import data, features, losses, noise, processes, reports, training, trees
from dpjax.accounting.rounding import upwards
from dpjax.cli import compilation_cache, process_flags
from dpjax.cli.flag_checks import require_matplotlib, writable_folder
from dpjax.cli.mesh_flag import mesh_in_force
from dpjax.cli.train import build, inputs, names, run_files
from dpjax.cli.train.classifier import rehearse, train
from dpjax.cli.train.flags import refusal, settings, without_effect
from dpjax.training.run_folder import held


class Checked(NamedTuple):
    """A run that has passed every check, before it has touched anything."""

    dataset: data.Dataset
    model: Any
    loss: losses.ExampleLoss
    normalization: features.Normalization | None
    mechanism: dpjax.Mechanism
    optimizer: optax.GradientTransformation
    method: str  # of accounting
    per_epoch: int | None  # steps, for a loss that takes the epoch
    earlier: bytes | None  # parameters that an earlier run released
    budget: dpjax.ledger.Budget | None

    @property
    def per_step(self) -> Callable[[Any], Any] | None:
        """What the loss takes of the step."""
        epoch = self.per_epoch
        return None if epoch is None else lambda step: step // epoch


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Trains as the flags say; a refusal of the ledger ends the process with its message."""
    del argv  # flags alone
    started = time.time()
    if given.report:
        require_matplotlib(", or give --noreport; `dpjax report RUN` draws them later")
    compilation_cache.switch_on()
    try:
        with mesh_in_force(given.mesh, process_flags.meet(given)):
            execute(given, plan(given), started)
    except dpjax.ledger.Refused as refused:
        sys.exit(
            f"{refused}\nGive another --out, --overwrite to delete the run that is there, or "
            "--continue_from=RUN --out=ANOTHER to continue it with other settings."
        )
    except BrokenPipeError:  # for `dpjax.cli.main`
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = (
            "\nUsually the disk is full. Free it and repeat the command: it resumes the run from "
            "its last checkpoint, if there is one."
        )
        sys.exit(f"--out={given.out}: {error}{cure}" if full else str(error))


def plan(given: flags.FlagValues) -> Checked:
    """Builds all parts of the run, and refuses flags that do not fit each other or the data."""
    require_one_of_each(given)
    for name, needed in without_effect(given):
        raise app.UsageError(refusal(given, name, needed))
    require_another_folder(given)
    if given.features != "none" and given.stream:
        raise app.UsageError(
            f"--features={given.features} --stream: features are computed from all images in "
            "memory. Leave --stream out."
        )
    # Data come before model and mechanism, because classes, sizes and sampling rate follow from
    # them.
    dataset = load(given)
    assert dataset.classes is not None  # names.check_dataset refuses the others
    model = build.build_model(given, dataset.classes)
    loss = build.build_loss(given)
    if given.batch_size > dataset.examples:
        raise app.UsageError(
            f"--batch_size={given.batch_size}: the training part of {dataset.name} has "
            f"{dataset.examples} examples; expected a batch of at most as many. By default it has "
            f"{given['batch_size'].default}: give --batch_size={max(1, dataset.examples // 8)}."
        )
    try:
        normalization = inputs.build_normalization(given, dataset.examples)
        queries = () if normalization is None else normalization.multipliers
        mechanism = build.build_mechanism(given, dataset.examples, queries)
        optimizer = build.build_optimizer(given, mechanism)
    except (MemoryError, ValueError) as error:  # a table of all steps may not fit
        raise app.UsageError(f"these flags describe no private run: {error}") from error
    per_epoch = None
    if given.loss == "composite":
        per_epoch = build.steps_per_epoch(given, dataset.examples)
    earlier = given.continue_from and processes.from_first(
        lambda: run_files.released(pathlib.Path(given.continue_from))
    )
    shape = partial(inputs.input_shape, given, dataset)
    sizes = {"classes": dataset.classes, "epochs": per_epoch is not None}
    # The model alone can refuse a value of an option, such as 'a' for a width.
    options = ",".join(given.model_options)
    rehearse(shape, model, loss, mechanism, earlier, **sizes, options=options)
    try:
        inputs.require_known_tokens(dataset, model)
    except ValueError as error:
        raise app.UsageError(f"{build.model_flags(given)}: {error}") from error
    method = build.accountant(given, mechanism)
    if given.noise_multiplier is not None:  # else the calibration has asked this accountant
        try:
            mechanism.epsilon(given.delta, method)
        except ValueError as error:
            words = f"--accountant={given.accountant} --sampling={given.sampling}"
            raise app.UsageError(f"{words}: {error}") from error
    budget = given.max_epsilon and dpjax.ledger.Budget(
        epsilon=given.max_epsilon, delta=given.delta, method=method
    )
    # Last, because only the whole plan has a price, and still before a file is touched.
    require_affordable(given, mechanism, budget)
    return Checked(
        dataset=dataset,
        model=model,
        loss=loss,
        normalization=normalization,
        mechanism=mechanism,
        optimizer=optimizer,
        method=method,
        per_epoch=per_epoch,
        earlier=earlier,
        budget=budget,
    )


def load(given: flags.FlagValues) -> data.Dataset:
    """The data set of the flags."""
    own = names.is_file(given.dataset)
    for name in ("stream", "data_dir") if own else ("classes", "label"):
        if given[name].value:
            raise app.UsageError(
                f"--dataset={given.dataset} --{name}={given[name].value}: expected one of the two. "
                "A file of yours is read whole, from its own path, and a named data set has its "
                "own labels."
            )
    try:
        if own:
            return data.load_file(given.dataset, given.classes, given.label)
        return (data.stream if given.stream else data.load)(given.dataset, given.data_dir)
    except (ImportError, OSError, ValueError) as error:
        raise app.UsageError(f"--dataset={given.dataset}: {error}") from error


def execute(given: flags.FlagValues, planned: Checked, started: float) -> None:
    """Trains, and writes and prints the reports."""
    folder = pathlib.Path(given.out)
    # Printed before the first step: a user who meant another epsilon can still stop.
    price = price_in_words(given, planned)
    if planned.dataset.columns:  # and one whose label is another column
        say(f"{planned.dataset.name} {planned.dataset.note}")
    say(price)
    dataset = inputs.with_features(given, planned.dataset)
    # The operating system's randomness unless a seed was asked for by its flag.
    key = secret_key() if given.seed is None else jax.random.key(given.seed)
    with contextlib.ExitStack() as stack:
        # Until the run has ended: another process may neither query the data for this folder nor
        # delete the answers.
        processes.from_first(lambda: stack.enter_context(prepared(folder, given.overwrite)))
        dataset = inputs.with_scale(given, dataset, planned.normalization, key, folder)
        run_and_report(given, planned, dataset, key, started)


def price_in_words(given: flags.FlagValues, planned: Checked) -> str:
    """What the run costs, together with the runs before it; warns where they left it little."""
    mechanism, by = planned.mechanism, (given.delta, planned.method)
    words = f"{mechanism.steps} steps with noise multiplier {np.mean(mechanism.multipliers):.4g}"
    if mechanism.before:
        # Without preparation, which is of this run.
        earlier = dataclasses.replace(mechanism, preparation=())
        spent, target = earlier.epsilon_of(mechanism.multipliers[:0], *by), given.target_epsilon
        words += f", together with the earlier runs, which spent {upwards(spent)},"
        if given.noise_multiplier is None and target - spent < target / 10:
            logging.warning(
                "--target_epsilon=%g --continue_from=%s: the earlier runs left less than a tenth "
                "of the target, so these steps are nearly all noise. Usually the target was left "
                "as it was: raise it.",
                target,
                given.continue_from,
            )
    epsilon = upwards(mechanism.epsilon(*by))
    return f"{words} cost epsilon {epsilon} at delta={upwards(by[0], '.6g')} ({by[1]})"


def run_and_report(
    given: flags.FlagValues, planned: Checked, dataset: data.Dataset, key: Any, started: float
) -> None:
    """Trains in a folder that this process holds."""
    folder, mechanism = pathlib.Path(given.out), planned.mechanism
    configuration = configuration_of(settings(given), planned.dataset)
    before = run_files.described(folder) if processes.first_process() else {}
    try:
        trained = train(
            dataset,
            planned.model,
            planned.loss,
            mechanism,
            planned.optimizer,
            key=None if given.seed is None else key,
            params=planned.earlier,
            per_step=planned.per_step,
            budget=planned.budget,
            evaluations=given.evaluations,
            delta=given.delta,
            method=planned.method,
            directory=folder,
            configuration=configuration,
            save_every=given.save_every,
        )
    except (KeyboardInterrupt, SystemExit):
        # The parameters of the last row are released and counted: another run may continue them.
        if processes.first_process() and run_files.has_released(folder, configuration):
            describe(given, dataset, started, before)
        raise
    if processes.first_process():
        report(given, mechanism, dataset, trained, started, before)


def configuration_of(flags_of: Mapping[str, Any], dataset: data.Dataset) -> dict[str, Any]:
    """What identifies a run beside what `fit` compares: its flags and the test part of its data."""
    named = {f"--{name}": value for name, value in flags_of.items()}
    # `fit` compares the training data; accuracies of a folder are of one test part too.
    return {**named, "test data": trees.fingerprint(dataset.test)}


def say(words: str) -> None:
    """Prints once, however many processes run."""
    if processes.first_process():
        print(words, flush=True)


def secret_key() -> Any:
    """A secret root key: the first process makes it, and all of them hold it."""
    data = processes.from_first(lambda: trees.on_host(noise.secret_key()))
    return jax.random.wrap_key_data(jnp.asarray(data), impl="threefry2x32")


@contextlib.contextmanager
def prepared(folder: pathlib.Path, overwrite: bool) -> Iterator[None]:
    """Makes and locks the folder of the run; deletes the run that is there, if asked to."""
    writable_folder(folder, folder)
    with held(folder, "command.lock"):
        if overwrite:
            training.forget(folder)
            run_files.clear(folder, inputs.MOMENTS)
        yield


def report(
    given: flags.FlagValues,
    mechanism: dpjax.Mechanism,
    dataset: data.Dataset,
    trained: tuple[Any, Any, list[dict[str, Any]]],
    started: float,
    before: Mapping[str, Any],
) -> None:
    """Writes and prints what a run that has ended leaves; ``trained`` is what `train` returned."""
    folder, (params, state, history) = pathlib.Path(given.out), trained
    quoted = shlex.quote(str(folder))  # in commands, to be copied
    # What ran, and not what was planned: a budget may have ended the run earlier.
    words = dpjax.statement(mechanism, given.delta, ledger=state.ledger, seed=given.seed)
    size = sum(x.size for x in jax.tree.leaves(params))
    describe(given, dataset, started, before, parameters=size)
    print(words.partition("\n\nReferences\n")[0])  # which statement.txt has
    accuracy = history[-1]["accuracy"] if history else float("nan")
    print(f"\nTest accuracy {accuracy:.1%} on {dataset.name} {dataset.note}")
    if given.report:
        try:
            print(f"To look at: {reports.report(folder)}")
        except OSError as error:
            print(f"The report was not drawn: {error}; `dpjax report {quoted}` draws it later.")
    print(f"{time.time() - started:.1f} s on {jax.devices()[0].device_kind}")
    print(f"Files in {folder}: " + ", ".join(run_files.present(folder)))
    print(f"Recompute epsilon: dpjax verify {quoted}")


def describe(
    given: flags.FlagValues,
    dataset: data.Dataset,
    started: float,
    before: Mapping[str, Any],
    **facts: Any,
) -> None:
    """Writes `digest` and `config.json`, with the names of classes and columns where there are any.

    ``before`` is what an earlier process of this run wrote: its start stays, and its time counts
    unless it was killed. A run that has ended keeps all of it, since no step ran.
    """
    folder = pathlib.Path(given.out)
    run_files.tie(folder)
    if "parameters" in before:
        return
    if dataset.class_names:
        facts["class_names"] = dict(enumerate(dataset.class_names))
    if dataset.columns:
        facts["columns"] = list(dataset.columns)
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))
    run_files.describe(
        folder,
        {**settings(given), "out": given.out},
        started=before.get("started", now),
        seconds=round(before.get("seconds", 0) + time.time() - started, 1),
        dataset=f"{dataset.name} {dataset.note}".strip(),
        model=given.model,
        **facts,
    )


def require_one_of_each(given: flags.FlagValues) -> None:
    """Refuses two flags that set one quantity, since one of the two would have no effect."""
    for one, other in (("noise_multiplier", "target_epsilon"), ("steps", "epochs")):
        if given[one].value is not None and given[other].present:
            raise app.UsageError(
                f"--{one}={given[one].value} --{other}={given[other].value}: expected one of the "
                "two, since they set the same quantity. To hold a given noise to a budget, add "
                "--max_epsilon to --noise_multiplier."
            )


def require_affordable(
    given: flags.FlagValues, mechanism: dpjax.Mechanism, budget: dpjax.ledger.Budget | None
) -> None:
    """Refuses a plan that costs more than the budget."""
    try:
        dpjax.ledger.require(dpjax.ledger.empty(), mechanism, mechanism.steps, budget)
    except dpjax.ledger.Refused as refused:
        raise app.UsageError(
            f"--max_epsilon={given.max_epsilon}: {refused}\nRaise it, give fewer --steps or "
            "--epochs, or more noise: a larger --noise_multiplier, or a lower --target_epsilon. "
            "Nothing was spent, and nothing in --out was touched."
        ) from refused


def require_another_folder(given: flags.FlagValues) -> None:
    """Refuses to continue a run in its own folder, where its spending would be overwritten."""
    folder, earlier = pathlib.Path(given.out), given.continue_from
    if earlier is not None and folder.resolve() == pathlib.Path(earlier).resolve():
        raise app.UsageError(
            f"--continue_from={earlier} --out={folder}: both are {folder.resolve()}. That folder "
            "records what the earlier run spent, which counts for this one too: give another "
            "--out. If that run was only interrupted, repeat its own command without "
            "--continue_from."
        )
