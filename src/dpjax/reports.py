# SPDX-License-Identifier: Apache-2.0
"""What a private computation promises, in words and in a file that machines can check.

`statement` says who is protected, against which neighbours, by which sampler, rule and
noise, for how many steps, at which epsilon by each accountant, and what is *not* covered.
`card` holds the same facts as a JSON object, complete enough that somebody else can
recompute the epsilon without dpjax.

Both read the mechanism that ran and the ledger of what was spent; neither takes a number
from its caller except the delta.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import numpy as np

from dpjax import accounting
from dpjax.ledger import Ledger
from dpjax.mechanism import Mechanism
from dpjax.types import Neighbours

__all__ = ["card", "statement"]

_NEIGHBOURS = {
    Neighbours.ADD_OR_REMOVE: "data sets that differ by one example added or removed",
    Neighbours.ZERO_OUT: "data sets in which one example is replaced by an empty one",
    Neighbours.REPLACE_ONE: "data sets in which one example is replaced by any other",
}

_NOT_COVERED = """\
  - choosing hyper-parameters or a checkpoint by looking at the private data
  - per-step info (losses, norms, clipped fractions): computed before the noise
  - examples that belong together: the unit is one example, not one person
  - models or data in which examples see each other (batch statistics)
  - attacks on float32 arithmetic or on the pseudo-random generator"""

_REFERENCES = {
    "dpsgd": """\
@inproceedings{abadi2016deep,
  title     = {Deep Learning with Differential Privacy},
  author    = {Abadi, Martin and Chu, Andy and Goodfellow, Ian and McMahan, H. Brendan
               and Mironov, Ilya and Talwar, Kunal and Zhang, Li},
  booktitle = {ACM Conference on Computer and Communications Security},
  year      = {2016}
}""",
    "rdp": """\
@inproceedings{mironov2017renyi,
  title     = {R{\\'e}nyi Differential Privacy},
  author    = {Mironov, Ilya},
  booktitle = {IEEE Computer Security Foundations Symposium},
  year      = {2017}
}""",
    "pld": """\
@article{doroshenko2022connect,
  title   = {Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions},
  author  = {Doroshenko, Vadym and Ghazi, Badih and Kamath, Pritish and Kumar, Ravi
             and Manurangsi, Pasin},
  journal = {Proceedings on Privacy Enhancing Technologies},
  year    = {2022}
}""",
    "grouped": """\
@article{liu2021grouped,
  title  = {Differentially Private Learning with Grouped Gradient Clipping},
  author = {Liu, Haolin and others},
  year   = {2021}
}""",
    "preparation": """\
@inproceedings{tramer2021differentially,
  title     = {Differentially Private Learning Needs Better Features (or Much More Data)},
  author    = {Tram{\\`e}r, Florian and Boneh, Dan},
  booktitle = {International Conference on Learning Representations},
  year      = {2021}
}""",
    "automatic": """\
@inproceedings{bu2023automatic,
  title     = {Automatic Clipping: Differentially Private Deep Learning Made Easier and
               Stronger},
  author    = {Bu, Zhiqi and Wang, Yu-Xiang and Zha, Sheng and Karypis, George},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2023}
}""",
}


def statement(
    mechanism: Mechanism,
    delta: float,
    *,
    ledger: Ledger | None = None,
    seed: int | None = None,
) -> str:
    """The privacy statement of a computation, in words.

    Args:
      mechanism: What is (or was) run.
      delta: The delta at which epsilon is stated.
      ledger: What really ran; by default all planned steps.
      seed: The fixed seed of the run, if it had one instead of a secret key.

    Returns:
      A text to print, and to publish beside the model.

    Example:
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.poisson(examples=1000, batch_size=10),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=1.0,
      ...     steps=100,
      ... )
      >>> print(statement(mechanism, delta=1e-5))  # doctest: +ELLIPSIS
      Privacy statement
      ...
        unit          one example
      ...
    """
    multipliers = _multipliers(mechanism, ledger)
    epsilons = dict(_epsilons(mechanism, multipliers, delta))
    lines = [
        "Privacy statement",
        "",
        *_verdict(mechanism, epsilons, delta, seed),
        "",
        *_facts(mechanism, multipliers, ledger, delta),
        "",
        *_figures(mechanism, multipliers, epsilons, delta),
        "",
        "Not covered",
        _NOT_COVERED,
        "",
        "References",
        *_references(mechanism, epsilons),
    ]
    return "\n".join(lines)


def _references(mechanism: Mechanism, epsilons: dict[str, float]) -> Iterator[str]:
    """BibTeX of what was used: the algorithm, the accountants, the rule."""
    prepared = ["preparation"] * bool(mechanism.preparation)
    for key in ("dpsgd", *epsilons, mechanism.clipping.name, *prepared):
        if key in _REFERENCES:
            yield _REFERENCES[key]


def _verdict(
    mechanism: Mechanism, epsilons: dict[str, float], delta: float, seed: int | None
) -> Iterator[str]:
    best = min((e for m, e in epsilons.items() if accounting.METHODS[m].proven), default=math.inf)
    if math.isinf(best):
        yield "  This computation is NOT differentially private (epsilon is infinite)."
        yield f"  {_why_infinite(mechanism)}"
    else:
        yield f"  ({best:.4g}, {delta:g})-differentially private, as proved by the best accountant."
    if seed is not None:
        yield (
            f"  Seed published ({seed}): not for release. Whoever knows the seed can "
            "subtract the noise."
        )
    examples = mechanism.sampling.examples
    if delta * examples >= 1:
        yield (
            f"  delta={delta:g} is not below 1/examples={1 / examples:.2g}: publishing one "
            "example outright would satisfy it. Choose a smaller delta."
        )


def _why_infinite(mechanism: Mechanism) -> str:
    if math.isinf(mechanism.clipping.sensitivity):
        return "The rule's bound is infinite: one example can move the sum by any amount."
    if not np.all(mechanism.multipliers > 0):
        return "The noise multiplier is 0 at some step."
    if not all(mechanism.preparation):
        return "A query before the first step had no noise."
    return mechanism.sampling.claim


def _facts(
    mechanism: Mechanism, multipliers: np.ndarray, ledger: Ledger | None, delta: float
) -> Iterator[str]:
    sampling, rule = mechanism.sampling, mechanism.clipping
    neighbours = mechanism.relation
    groups = rule.partition.size
    yield "  unit          one example"
    yield f"  neighbours    {neighbours.value}: {_NEIGHBOURS[neighbours]}"
    yield (
        f"  sampler       {sampling.name}: {sampling.batch_size:g} of "
        f"{sampling.examples:,} examples a step (rate {sampling.sampling_rate:.3g})"
    )
    yield f"                {sampling.claim}"
    yield (
        f"  clipping      {rule.name}, {groups} group{'s' * (groups > 1)}: one example "
        f"moves the sum by at most {rule.sensitivity:.4g}"
    )
    yield f"  noise         multiplier {_range(multipliers)} x sensitivity, on the sum"
    if len(multipliers) and not math.isinf(rule.sensitivity):
        on_mean = multipliers * rule.sensitivity / sampling.batch_size
        yield f"                = standard deviation {_range(on_mean)} on the mean"
    if mechanism.preparation:
        each = ", ".join(f"{multiplier:.4g}" for multiplier in mechanism.preparation)
        yield "  preparation   Gaussian queries on all the data before the first step, with"
        yield f"                multiplier {each}"
    ran = len(multipliers)
    planned = "" if ledger is None else f" (of {mechanism.steps:,} planned)"
    yield f"  steps         {ran:,}{planned}"
    yield f"  delta         {delta:g}"


def _figures(
    mechanism: Mechanism,
    multipliers: np.ndarray,
    epsilons: dict[str, float],
    delta: float,
) -> Iterator[str]:
    for method, value in epsilons.items():
        yield f"  epsilon       {value:8.4g}   {method}: {accounting.METHODS[method].words}"
    if mechanism.sampling.name in ("shuffled", "curriculum"):
        rate = mechanism.sampling.sampling_rate
        steps = accounting.scheduled_gaussian(multipliers, rate)
        event = accounting.compose(mechanism.prepared, steps)
        value = accounting.epsilon(event, delta, "rdp-classic")
        yield (
            f"  as if Poisson {value:8.4g}   rdp-classic: the papers' figure for such "
            "batches. It does not hold for them: nothing proves amplification here."
        )


def card(
    mechanism: Mechanism,
    delta: float,
    *,
    ledger: Ledger | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """The facts of a statement as a JSON object, from which epsilon can be recomputed.

    Args:
      mechanism: What is (or was) run.
      delta: The delta at which epsilon is stated.
      ledger: What really ran; by default all planned steps.
      seed: The fixed seed of the run, if it had one instead of a secret key.
    """
    multipliers = _multipliers(mechanism, ledger)
    sampling, rule = mechanism.sampling, mechanism.clipping
    starts = np.flatnonzero(np.diff(multipliers, prepend=np.nan))
    counts = np.diff(np.append(starts, len(multipliers)))
    return {
        "format": "dpjax privacy card 1",
        "unit": "example",
        "neighbours": mechanism.relation.value,
        "sampling": {
            "name": sampling.name,
            "examples": sampling.examples,
            "batch_size": sampling.batch_size,
            "sampling_rate": sampling.sampling_rate,
            "claim": sampling.claim,
        },
        "clipping": {
            "name": rule.name,
            "groups": list(rule.partition.names),
            "bounds": [_number(bound) for bound in rule.bounds],
            "sensitivity": _number(rule.sensitivity),
        },
        "noise": {
            "distribution": "gaussian",
            "multiplier_and_steps": [
                [float(multipliers[start]), int(count)]
                for start, count in zip(starts, counts, strict=True)
            ],
        },
        "preparation": {"gaussian_multipliers": list(mechanism.preparation)},
        "steps": len(multipliers),
        "planned_steps": mechanism.steps,
        "delta": delta,
        "epsilon": {
            method: {"value": _number(value), "proven": accounting.METHODS[method].proven}
            for method, value in _epsilons(mechanism, multipliers, delta)
        },
        "seed_published": seed,
        "versions": {
            name: _version(name) for name in ("dpjax", "dp-accounting", "jax", "optax", "numpy")
        },
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed: run from its sources"


def _multipliers(mechanism: Mechanism, ledger: Ledger | None) -> np.ndarray:
    return mechanism.multipliers if ledger is None else ledger.expand()


def _epsilons(
    mechanism: Mechanism, multipliers: np.ndarray, delta: float
) -> Iterator[tuple[str, float]]:
    """Epsilon by every method that has an answer for this sampler and relation."""
    accounting.epsilon(accounting.compose(), delta)  # a bad delta is the caller's mistake
    event = mechanism.event_of(multipliers)
    for method in accounting.METHODS:
        try:
            value = accounting.epsilon(event, delta, method, mechanism.relation)
        except ValueError:  # this method proves nothing for this sampler and relation
            continue
        yield method, value


def _number(value: float) -> float | str:
    """A number as strict JSON knows it: infinity is a word."""
    return float(value) if math.isfinite(value) else "inf"


def _range(values: np.ndarray) -> str:
    """One number, or the first and last of several."""
    if not len(values):
        return "none"
    if np.all(values == values[0]):
        return f"{values[0]:.4g}"
    distinct = len(np.unique(values))
    return f"{values[0]:.4g} to {values[-1]:.4g} ({distinct} values, by a schedule)"
