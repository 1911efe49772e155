# SPDX-License-Identifier: Apache-2.0
"""The privacy card: the facts of a computation as a JSON object.

Whoever has the card can recompute its epsilon without dpjax, as `experiments/verify.py`
does.  It is strict JSON, where infinity is a word wherever it stands, and holds numbers as
they were accounted, never rounded.
"""

from __future__ import annotations

import math
from importlib import metadata
from typing import Any

from dpjax import accounting
from dpjax.ledger import Ledger
from dpjax.mechanism import Mechanism, Spent
from dpjax.reports.epsilons import epsilons, multipliers
from dpjax.reports.statement import why_infinite


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

    Returns:
      What ``json.dumps`` takes as it is; an infinite number is the word ``"inf"``.

    Example:
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.full(examples=1000),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=4.0,
      ...     steps=2,
      ... )
      >>> card(mechanism, delta=1e-5)["noise"]["multiplier_and_steps"]
      [[4.0, 2]]
    """
    ran = multipliers(mechanism, ledger)
    rule = mechanism.clipping
    facts = {
        "format": "dpjax privacy card 1",
        "unit": mechanism.unit,
        "neighbours": mechanism.relation.value,
        **_spent(mechanism.spent(ran)),
        "clipping": {
            **rule.facts,
            "name": rule.name,
            "groups": list(rule.partition.names),
            "bounds": [float(bound) for bound in rule.bounds],
            "sensitivity": float(rule.sensitivity),
            "adaptive": mechanism.facts.get("adaptive"),
        },
        "before": [_spent(spent) for spent in mechanism.before],
        "steps": len(ran),
        "planned_steps": mechanism.steps,
        "delta": delta,
        "epsilon": {
            method: {"value": float(value), "proven": accounting.METHODS[method].proven}
            for method, value in epsilons(mechanism, ran, delta)
        },
        "not_private": why_infinite(mechanism, ran),
        "seed_published": seed,
        "versions": {
            name: _version(name) for name in ("dpjax", "dp-accounting", "jax", "optax", "numpy")
        },
    }
    return _strict(facts)


def _spent(spent: Spent) -> dict[str, Any]:
    """What is needed to account for steps and for the queries before them."""
    sampling = spent.sampling
    return {
        "sampling": {
            **sampling.facts,
            "name": sampling.name,
            "examples": sampling.examples,
            "batch_size": sampling.batch_size,
            "sampling_rate": sampling.sampling_rate,
            "claim": sampling.claim,
        },
        "noise": {
            "distribution": "gaussian",
            "multiplier_and_steps": [list(run) for run in spent.runs],
        },
        "preparation": {"gaussian_multipliers": list(spent.preparation)},
        "projections": spent.projections,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed: run from its sources"


def _strict(value: Any) -> Any:
    """The same as strict JSON knows it: infinity is a word."""
    if isinstance(value, dict):
        return {name: _strict(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return "inf" if isinstance(value, float) and not math.isfinite(value) else value
