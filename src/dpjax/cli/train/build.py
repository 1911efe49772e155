# SPDX-License-Identifier: Apache-2.0
"""The parts of a run that flags describe: loss, network, mechanism and optimizer.

Each function takes the parsed flags.  Flags that contradict each other raise
`absl.app.UsageError`, whose message names the flags and their values.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import optax
from absl import app, flags

import dpjax
from dpjax import (
    accounting,
    activations,
    clipping,
    losses,
    models,
    processes,
    sampling,
    schedules,
    strategies,
    training,
)
from dpjax.accounting.rounding import upwards
from dpjax.cli.train import names, own_model
from dpjax.mechanism import Spent
from dpjax.mechanism.card import spent_of
from dpjax.strategies import Strategy
from dpjax.training.run_folder import spending
from dpjax.types import Sampler

LOSSES: dict[str, Callable[..., losses.ExampleLoss]] = {
    "cross_entropy": lambda: losses.cross_entropy,
    "focal": losses.focal,
    "composite": losses.composite,
    "squared_error": lambda: losses.one_hot(losses.squared_error),
    "absolute": lambda: losses.one_hot(losses.absolute),
    "huber": lambda: losses.one_hot(losses.huber()),
}

# Fields of models, and the flags that set them: a second value would win or lose silently.
_FLAG_OF = {
    "activation": "--activation",
    "classes": "--classes, which is for a file of yours",
    "features": "--hidden, which is for --model=mlp",
    "torch_init": "--torch_init",
}

_MOST_STEPS = 10_000_000  # that `--max_epsilon` alone plans: weeks of training

# Each takes the parsed flags, the learning rate or its schedule, and the mechanism.
OPTIMIZERS: dict[str, Callable[[flags.FlagValues, Any, Any], optax.GradientTransformation]] = {
    "sgd": lambda given, rate, _: optax.sgd(rate, momentum=given.momentum),
    "nesterov": lambda given, rate, _: optax.sgd(rate, momentum=given.momentum, nesterov=True),
    "adagrad": lambda _, rate, __: optax.adagrad(rate),
    "rmsprop": lambda _, rate, __: optax.rmsprop(rate),
    "adam": lambda _, rate, __: optax.adam(rate),
    "adamw": lambda _, rate, __: optax.adamw(rate),
    "dp_adam": lambda given, rate, mechanism: training.dp_adam(rate, mechanism, floor=given.floor),
}


def read_options(pairs: list[str]) -> dict[str, Any]:
    """Parses ``name=value`` pairs; a value is JSON if it parses, else text."""
    read: dict[str, Any] = {}
    # absl splits at every comma, also within a list: widths=[8,4].
    whole = re.split(r",(?=\s*\w+=)", ",".join(pairs)) if pairs else []
    for pair in whole:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} has no value; expected name=value, as in depth=10.")
        try:
            # JSON covers numbers, truth values and lists; a word that is no JSON is text.
            read[name] = json.loads(value)
        except json.JSONDecodeError:
            # Python's spelling too: the text "False" would count as true.
            read[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return read


def build_loss(given: flags.FlagValues) -> losses.ExampleLoss:
    """The loss of one example."""
    make = LOSSES[given.loss]
    # The signature is the list of options, so a new loss needs no second table.
    known = list(inspect.signature(make).parameters)
    try:
        options = read_options(given.loss_options)
        if not options.keys() <= set(known):
            raise ValueError(f"{given.loss} has {', '.join(known) or 'no options'}.")
        return make(**options)
    except (TypeError, ValueError) as error:
        raise app.UsageError(
            f"--loss={given.loss} --loss_options={','.join(given.loss_options)}: {error} "
            "Expected name=value for an argument of this loss, as in --loss=focal "
            "--loss_options=gamma=2."
        ) from error


def build_model(given: flags.FlagValues, classes: int) -> Any:
    """The network, a Linen module."""
    if names.is_own(given.model):
        return build_own_model(given, classes)
    if given.model.startswith("scatter") and given.features != "scattering":
        raise app.UsageError(
            f"--model={given.model} reads wavelet features, and --features={given.features} "
            "gives it images. Add --features=scattering, or take --model=tempered_cnn."
        )
    of_flags: dict[str, Any] = {"torch_init": given.torch_init}
    try:
        if given.activation is not None:
            of_flags["activation"] = activations.by_name(given.activation)
        if given.model == "mlp":
            of_flags["features"] = tuple(map(int, given.hidden))
        model = models.by_name(given.model, classes, **of_flags)
        return model.clone(**further_fields(given, model))
    except (TypeError, ValueError) as error:
        raise app.UsageError(f"{model_flags(given)}: {error}") from error


def model_flags(given: flags.FlagValues) -> str:
    """The flags of the model, for messages."""
    options = ",".join(given.model_options)
    return f"--model={given.model}" + (f" --model_options={options}" if options else "")


def further_fields(given: flags.FlagValues, model: Any) -> dict[str, Any]:
    """The fields of ``--model_options``; refuses unknown ones, and fields that have flags."""
    options = read_options(given.model_options)
    fields = {field.name for field in dataclasses.fields(model)} - {"parent", "name"}
    # No text is a function, such as kernel_init.
    values = {name for name in fields if not callable(getattr(model, name))} - _FLAG_OF.keys()
    for name in sorted(options.keys() - values):
        known = f"it has {', '.join(sorted(values))}" if values else "all of its fields have flags"
        words = f"this model takes no field {name} here; {known}."
        if name in fields & _FLAG_OF.keys():
            words = f"expected a field without a flag of its own. Give {_FLAG_OF[name]}."
        raise ValueError(words)
    return options


def build_own_model(given: flags.FlagValues, classes: int) -> Any:
    """A model of the user's, from ``--model=module:name``."""
    try:
        return own_model.build(given.model, classes, read_options(given.model_options))
    except ValueError as error:
        raise app.UsageError(f"{model_flags(given)}: {error}") from error


def steps_per_epoch(given: flags.FlagValues, examples: int) -> int:
    """The number of steps that schedules and losses call an epoch."""
    return max(1, round(examples / given.batch_size))


def build_mechanism(
    given: flags.FlagValues, examples: int, queries: tuple[float, ...] = ()
) -> dpjax.Mechanism:
    """The private computation, after ``queries`` with these noise multipliers on all the data."""
    per_epoch = steps_per_epoch(given, examples)
    options: dict[str, Any] = {"groups": given.groups} if given.clipping == "grouped" else {}
    steps = given.steps
    if steps is None:
        steps = round(given.epochs * examples / given.batch_size)
    batches = build_sampler(given, examples)
    mechanism = dpjax.Mechanism(
        sampling=batches,
        clipping=getattr(clipping, given.clipping)(given.bound, **options),
        noise_multiplier=build_noise_schedule(given, steps, per_epoch),
        steps=steps,
        preparation=queries,
        before=earlier_runs(given),
        noise=build_strategy(given, batches, steps),
    )
    if not mechanism.steps:
        raise app.UsageError(
            f"--epochs={given.epochs:g} --steps={given.steps}: expected one step at least, and "
            f"an epoch has {per_epoch} of them. Without a step nothing is trained. Give more."
        )
    if given.noise_multiplier is None:
        # Calibrated last: epochs, schedule and preparation decide what the noise must pay for.
        return mechanism.calibrate(given.target_epsilon, given.delta, accountant(given, mechanism))
    mechanism = mechanism.scaled(given.noise_multiplier)
    if given.max_epsilon is None or given["epochs"].present or given["steps"].present:
        return mechanism
    return dataclasses.replace(mechanism, steps=steps_that_fit(given, mechanism))


def build_noise_schedule(given: flags.FlagValues, steps: int, per_epoch: int) -> Any:
    """The noise multiplier up to a factor: 1, or a curriculum over the steps that run."""
    if given.noise_multiplier == 0:
        return 0.0  # an infinite bound takes no other multiplier, even before it is scaled
    if given.noise_schedule == "constant":
        return 1.0
    # `--steps` may cut the last epoch of the curriculum short.
    epochs = max(1, -(-steps // per_epoch))
    return schedules.CURRICULA[given.noise_schedule](epochs=epochs, steps_per_epoch=per_epoch)


def earlier_runs(given: flags.FlagValues) -> tuple[Spent, ...]:
    """What was spent by the run that this one continues, and before it."""
    if given.continue_from is None:
        return ()
    try:
        facts = processes.from_first(lambda: spending(given.continue_from))
    except FileNotFoundError as error:
        raise app.UsageError(f"--continue_from={given.continue_from}: {error}") from error
    return spent_of(**facts)


def build_sampler(given: flags.FlagValues, examples: int) -> Sampler:
    """How batches are drawn."""
    facts = {"cycle": given.bands} if given.sampling == "cyclic_poisson" else {}
    return sampling.by_name(given.sampling, examples, given.batch_size, **facts)


def build_strategy(given: flags.FlagValues, batches: Sampler, steps: int) -> Strategy | None:
    """How the noise of different steps is correlated; optimised for SGD with this momentum."""
    if given.noise == "white" or not steps:
        return None
    bands = min(given.bands, steps)
    momentum = given.momentum if given.optimizer == "sgd" else 0.0
    taken = None if batches.participation is None else batches.participation(steps)
    build = {
        "banded": lambda: strategies.banded(steps, bands, taken, momentum=momentum),
        "square_root": lambda: strategies.square_root(steps, bands),
        "banded_inverse_square_root": lambda: strategies.banded_inverse_square_root(steps, bands),
        "buffered": lambda: strategies.buffered(steps, participation=taken, momentum=momentum),
        "tree": lambda: strategies.tree(steps),
    }
    return build[given.noise]()


def accountant(given: flags.FlagValues, mechanism: dpjax.Mechanism) -> str:
    """The method by which this run is accounted."""
    if given.accountant != "tightest":
        return given.accountant
    return accounting.tightest(mechanism.event, mechanism.relation)


def steps_that_fit(given: flags.FlagValues, mechanism: dpjax.Mechanism) -> int:
    """The largest number of steps within `--max_epsilon`; raises if none is."""
    if given.noise_schedule != "constant":
        raise app.UsageError(
            f"--noise_schedule={given.noise_schedule} --max_epsilon={given.max_epsilon:g}: a "
            "schedule is spread over the steps that run, and how many fit would depend on the "
            "schedule. Give --steps or --epochs too, or take --target_epsilon in place of "
            "--noise_multiplier."
        )
    if mechanism.noise is not None:
        raise app.UsageError(
            f"--noise={given.noise} --max_epsilon={given.max_epsilon:g}: correlated noise is "
            "designed for a number of steps, and how many fit would depend on the noise. Give "
            "--steps or --epochs too, or take --target_epsilon in place of --noise_multiplier."
        )
    by = given.delta, accountant(given, mechanism)
    found = accounting.largest_steps(
        # Of the whole mechanism, so that preparation and earlier runs are counted.
        lambda n: dataclasses.replace(mechanism, steps=n).event,
        given.max_epsilon,
        *by,
        mechanism.relation,
        _MOST_STEPS,
    )
    if not found:
        none, one = (dataclasses.replace(mechanism, steps=n).epsilon(*by) for n in (0, 1))
        raise app.UsageError(
            f"--max_epsilon={given.max_epsilon:g}: not one step fits. Before the first one "
            f"epsilon is {upwards(none)} at delta={upwards(by[0], '.6g')} ({by[1]}), and it would "
            f"bring it to {upwards(one)}. Usually the noise is too small: raise "
            f"--noise_multiplier={given.noise_multiplier:g} or --max_epsilon, or lower "
            f"--batch_size={given.batch_size}."
        )
    if found == _MOST_STEPS:
        raise app.UsageError(
            f"--noise_multiplier={given.noise_multiplier:g} --max_epsilon={given.max_epsilon:g}: "
            f"even {found:,} steps fit. Usually the noise is far too large: lower it, or give "
            "--steps or --epochs too."
        )
    return found


def build_optimizer(
    given: flags.FlagValues, mechanism: dpjax.Mechanism
) -> optax.GradientTransformation:
    """The optimizer, with an average of the parameters."""
    rate = given.learning_rate
    if given.rate_per_512:
        rate = training.scaled_rate(rate, mechanism.batch_size)
    if given.warmup_steps:
        rate = optax.warmup_constant_schedule(0.0, rate, given.warmup_steps)
    moves = OPTIMIZERS[given.optimizer](given, rate, mechanism)
    # The average follows released parameters, so it is free; it usually gains accuracy under noise.
    return optax.chain(moves, training.average_parameters(given.average))
