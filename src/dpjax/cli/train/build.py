# SPDX-License-Identifier: Apache-2.0
"""The parts of a run that flags describe: loss, network, mechanism and optimizer."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import numpy as np
import optax
from absl import app, flags

import dpjax
from dpjax import accounting, losses, models, planning, processes, strategies, training
from dpjax._rounding import three_digits
from dpjax.cli.flag_sets import names
from dpjax.mechanism import Spent
from dpjax.models.activations import by_name as activation_by_name
from dpjax.training.run_folder import spending
from dpjax.types import Sampler

# Each makes the loss of a target that is a label, from `--loss_options`.
LOSSES: dict[str, Callable[..., losses.ExampleLoss]] = {
    "cross_entropy": lambda: losses.cross_entropy,
    "focal": losses.focal,
    "composite": losses.composite,
    "squared_error": lambda: losses.one_hot(losses.squared_error),
    "absolute": lambda: losses.one_hot(losses.absolute),
    "huber": lambda **options: losses.one_hot(losses.huber(**options)),
}
# The same for a target that is a number.
REGRESSIONS: dict[str, Callable[..., losses.ExampleLoss]] = {
    "squared_error": lambda: losses.squared_error,
    "absolute": lambda: losses.absolute,
    "huber": losses.huber,
}

# Each takes the flags, the learning rate or its schedule, and the mechanism.
OPTIMIZERS: dict[str, Callable[[flags.FlagValues, Any, Any], optax.GradientTransformation]] = {
    "sgd": lambda given, rate, _: optax.sgd(rate, momentum=given.momentum),
    "nesterov": lambda given, rate, _: optax.sgd(rate, momentum=given.momentum, nesterov=True),
    "adagrad": lambda _, rate, __: optax.adagrad(rate),
    "rmsprop": lambda _, rate, __: optax.rmsprop(rate),
    "adam": lambda _, rate, __: optax.adam(rate),
    "adamw": lambda _, rate, __: optax.adamw(rate),
    "dp_adam": lambda given, rate, mechanism: training.dp_adam(rate, mechanism, floor=given.floor),
    "paced": lambda given, _, mechanism: planning.paced(mechanism, **pace_of(given)),
}


def pace_of(given: flags.FlagValues) -> dict[str, float]:
    """The ``drift`` of `dpjax.plan` for losses of a distance; other losses have its default."""
    if given.loss in REGRESSIONS:
        return {"drift": 1.0}
    return {}


def read_options(pairs: list[str]) -> dict[str, Any]:
    """Parses ``name=value`` pairs; a value is JSON, True, False, None, or else text."""
    options: dict[str, Any] = {}
    if not pairs:  # `re.split` returns one empty pair then
        return options
    # absl splits a flag at every comma, also within a list: widths=[8,4]. So the pieces are joined,
    # and split only at commas that stand before a name and an equals sign.
    for pair in re.split(r",(?=\s*\w+=)", ",".join(pairs)):
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r}: expected name=value, as in depth=10.")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            # Python's spelling too. Otherwise "False" is a text, which counts as true.
            options[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return options


def build_loss(given: flags.FlagValues, classes: int | None) -> losses.ExampleLoss:
    """The loss that the flags name, with the weights of classes that they give.

    ``classes`` is the number of labels, or None if the target is a number.
    """
    table = LOSSES
    if classes is None:
        table = REGRESSIONS
    if given.loss not in table:
        raise ValueError(f"--loss={given.loss}: expected one of {', '.join(table)} for a target.")
    loss = table[given.loss](**read_options(given.loss_options))
    weights = given.class_weights
    if not weights:
        return loss
    if len(weights) != classes:
        raise ValueError(f"--class_weights={','.join(weights)}: expected one for each class.")
    return losses.weighted(loss, list(map(float, weights)))


def build_model(given: flags.FlagValues, classes: int) -> Any:
    """The network, a Linen module."""
    options = read_options(given.model_options)
    if names.is_own(given.model):
        return own_model(given.model, classes, options)
    of_flags: dict[str, Any] = {"torch_init": given.torch_init}
    if given.activation is not None:
        of_flags["activation"] = activation_by_name(given.activation)
    if given.model == "mlp":
        of_flags["features"] = tuple(map(int, given.hidden))
    return models.by_name(given.model, classes, **of_flags, **options)


def own_model(word: str, classes: int, options: dict[str, Any]) -> nn.Module:
    """The network of the user; ``word`` is ``networks:CNN`` for the name CNN in networks.py.

    The name is that of a Flax module (an instance or a class), or of a function that returns one.
    ``options`` are fields of the module, or arguments of the function.
    """
    python_module, _, name = word.partition(":")
    # Python looks for modules in the folder of the script; the user's module is in the folder where
    # the command runs.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        model = getattr(importlib.import_module(python_module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--model={word}: {error}. Write networks:CNN for class CNN in networks.py here."
        ) from error
    if not isinstance(model, nn.Module):  # a class, or a function
        parameters = inspect.signature(model).parameters
        takes_any_name = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        # A function without `classes` is valid too, if its model has that many outputs.
        arguments = {}
        if "classes" in parameters or takes_any_name:
            arguments["classes"] = classes
        model = model(**arguments, **options)
    elif options:  # an instance
        model = model.clone(**options)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"--model={word}: expected a Flax module (flax.linen), not {type(model).__name__}. "
            "Train others by dpjax.fit in a script."
        )
    return model


def steps_per_epoch(given: flags.FlagValues, examples: int) -> int:
    """The number of steps that schedules and losses call an epoch."""
    return max(1, round(examples / given.batch_size))


def build_mechanism(
    given: flags.FlagValues,
    examples: int,
    queries: tuple[float, ...] = (),
    owners: np.ndarray | None = None,
) -> dpjax.Mechanism:
    """The mechanism that the flags describe, with the noise that they ask for.

    Args:
      given: The flags.
      examples: The number of training examples, or of persons.
      queries: Noise multipliers of queries on all training data before the first step.
      owners: The person of each row, from 0; None if each row is of another person.
    """
    rule = getattr(dpjax.clipping, given.clipping)
    if given.clipping == "grouped":
        rule = partial(rule, groups=given.groups)
    sampler = build_sampler(given, examples, owners)
    unit = ""  # stands for the unit of the sampler
    if owners is not None:
        # The unit is a noun in statements: "one patient" where the column is "Patient ID".
        noun = re.sub(r"[\W_]+id$", "", given.unit_column.lower())
        unit = re.sub(r"\W+", "_", noun).strip("_")
    steps = given.steps
    if steps is None:
        # The batches of random_allocation may be larger than the flag, so the sampler has the size.
        steps = round(given.epochs * examples / sampler.batch_size)
    if not steps:
        raise ValueError(f"--epochs={given.epochs:g} --steps={given.steps}: expected a step.")
    before = ()
    if given.continue_from is not None:
        # The first process reads that run's folder, and sends these arguments to the others.
        arguments = processes.from_first(lambda: spending(given.continue_from))
        before = Spent.of_run(**arguments)  # what that run and the runs before it have spent
    adaptive = None
    if given.quantile is not None:
        adaptive = dpjax.clipping.Quantile(target=given.quantile, rate=0.5)  # that of `dpjax.plan`
    mechanism = dpjax.Mechanism(
        sampling=sampler,
        clipping=rule(given.bound),
        # Its shape over the steps; `with_noise` scales it.
        noise_multiplier=build_noise_schedule(given, steps, steps_per_epoch(given, examples)),
        steps=steps,
        preparation=queries,
        adaptive=adaptive,
        before=before,
        noise=build_strategy(given, sampler, steps),
        unit=unit,
    )
    return with_noise(given, mechanism)


def build_sampler(
    given: flags.FlagValues, examples: int, owners: np.ndarray | None = None
) -> Sampler:
    """The sampler of rows; or of persons, if ``owners`` has the person of each row."""
    if owners is not None:
        if given.sampling != "poisson":
            raise ValueError(f"--sampling={given.sampling}: expected poisson with --unit_column.")
        return dpjax.sampling.persons(owners, given.batch_size, given.most_rows)
    options = {}
    if given.sampling == "cyclic_poisson":
        options["cycle"] = given.bands
    return dpjax.sampling.by_name(given.sampling, examples, given.batch_size, **options)


def with_noise(given: flags.FlagValues, mechanism: dpjax.Mechanism) -> dpjax.Mechanism:
    """The mechanism with its noise scaled to the flag that is given: a risk, a multiplier, epsilon.

    With a multiplier and only ``--max_epsilon`` it has as many steps as fit.
    """
    if given.risk is not None:
        true_alarms, false_alarms = map(float, given.risk.split("@"))
        return mechanism.calibrate(true_positive_rate=true_alarms, false_positive_rate=false_alarms)
    if given.noise_multiplier is None:
        # Calibration comes last, because epochs, schedule and preparation have a price too.
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
    return dpjax.schedules.CURRICULA[given.noise_schedule](epochs=epochs, steps_per_epoch=per_epoch)


def build_strategy(
    given: flags.FlagValues, sampler: Sampler, steps: int
) -> strategies.Strategy | None:
    """How the noise of different steps is correlated; optimised for SGD with this momentum."""
    if given.noise == "white":
        return None
    bands = min(given.bands, steps)
    momentum = given.momentum if given.optimizer == "sgd" else 0.0
    # In which steps an example takes part, if the sampler bounds it.
    taken = None if sampler.participation is None else sampler.participation(steps)
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
    """The largest number of steps within `--max_epsilon`."""
    if given.noise_schedule != "constant" or mechanism.noise is not None:
        raise app.UsageError(
            "--max_epsilon alone plans constant, independent noise. Give --steps or --epochs too."
        )
    steps = accounting.largest_steps(
        # The event of the whole mechanism counts preparation and earlier runs too.
        lambda n: dataclasses.replace(mechanism, steps=n).event,
        given.max_epsilon,
        given.delta,
        accountant(given, mechanism),
        mechanism.relation,
    )
    if not steps:
        first = dataclasses.replace(mechanism, steps=1).epsilon(given.delta)
        raise app.UsageError(
            f"--max_epsilon={given.max_epsilon:g}: not one step fits, which costs epsilon "
            f"{three_digits(first)}. Raise --noise_multiplier."
        )
    return steps


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
