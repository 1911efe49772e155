# SPDX-License-Identifier: Apache-2.0
"""The settings of a run that no flag gives: planned from sizes, epsilon and delta."""

from __future__ import annotations

from typing import Any

from absl import flags

from dpjax import planning

# Who types one of these wants the optimizer of the flags.
_RATES = ("optimizer", "learning_rate", "rate_per_512", "warmup_steps", "momentum", "floor")
_BOUNDS = ("clipping", "bound", "groups", "quantile")
_LENGTHS = ("batch_size", "epochs", "steps")


def is_planned(given: flags.FlagValues) -> bool:
    """Whether settings are planned: for a target epsilon, Poisson sampling and white noise."""
    usual = given.sampling == "poisson" and given.noise == "white"
    return usual and not given.preset and given.noise_multiplier is None


def is_whole(given: flags.FlagValues) -> bool:
    """Whether no setting was given."""
    typed = [name for name in (*_RATES, *_BOUNDS, *_LENGTHS, "average") if given[name].present]
    return is_planned(given) and not typed


def apply(given: flags.FlagValues, examples: int) -> None:
    """Sets the flags that were not typed as `dpjax.plan` chooses them, if settings are planned.

    A typed flag is kept. One typed flag of `_BOUNDS`, or of `_RATES`, also keeps the defaults of
    the others. ``examples`` is the number of examples, or of persons.
    """
    if not is_planned(given):
        return
    size = planning.size_for(examples, given.target_epsilon, given.delta)
    values: dict[str, Any] = {}
    if not given["batch_size"].present:
        values["batch_size"] = size.batch
    batch = values.get("batch_size", given.batch_size)
    steps = given.steps  # None if `--epochs` was typed
    if not given["steps"].present and not given["epochs"].present:
        steps = size.steps
        values["epochs"] = steps * batch / examples  # `build_mechanism` computes steps from it
    if not any(given[name].present for name in _BOUNDS):
        # The bound starts at 1 and follows this quantile of the norms, as in `dpjax.plan`.
        values.update(clipping="automatic", bound=1.0)
        if size.adaptive is not None:
            values["quantile"] = size.adaptive.target
    if not any(given[name].present for name in _RATES):
        values["optimizer"] = "paced"
    if not given["average"].present:
        steps = steps or round(given.epochs * examples / batch)
        values["average"] = planning.decay_for(steps)  # of the averaged parameters
    for name, value in values.items():
        # `present` stays 0, as for a flag that was not typed: `is_whole` reads it after this call.
        given[name].value = value
