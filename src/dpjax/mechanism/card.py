# SPDX-License-Identifier: Apache-2.0
"""The one JSON description of a mechanism.

`described` gives the object that stands under ``"mechanism"`` in a run's ``run.json`` and on
its privacy card (``privacy.json``), so a card belongs to a run if the two objects are equal.
The object describes the *plan*. It is strict JSON: an infinite number is the word ``"inf"``.

| field | holds | in ``before`` |
|---|---|---|
| ``format`` | the version of this schema, `FORMAT` | |
| ``unit`` | whose data are protected: ``"example"``; a word for an owner of rows, where the \
sampling is ``"persons"``; or a word for a client with all of its examples | yes |
| ``neighbours`` | the neighbouring relation, such as ``"add-or-remove"`` | |
| ``sampling`` | name, sizes, neighbours and `dpjax.types.Sampler.facts` | yes |
| ``multiplier_and_steps`` | pairs: a noise multiplier and how many steps in turn have it | yes |
| ``multipliers_by_group`` | one noise multiplier per group, or null | |
| ``preparation`` | noise multipliers of the queries before the first step | yes |
| ``projections`` | how many random projections estimate a norm, or null | yes |
| ``noise`` | the strategy of correlated noise and its ``sensitivity``, or null | yes |
| ``clipping`` | ``name``, ``groups``, ``bounds``, and the rule's own facts | |
| ``adaptive`` | the fields of the `dpjax.clipping.Quantile` that the bounds follow, or null | |
| ``before`` | what each earlier run on the same data spent: the fields marked above | |
| ``randomness`` | of an earlier run: ``"supplied"`` by the caller, or ``"fresh"`` | only there |

The sensitivity is the Euclidean norm of ``bounds``: what follows from other fields has no field.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dpjax._files import strict
from dpjax.mechanism.correlated import sensitivity_of
from dpjax.mechanism.spent import Spent

if TYPE_CHECKING:
    from dpjax.mechanism.description import Mechanism

FORMAT = 4

# The fields on which the cost of a step depends, in addition to its multiplier.
_COUNTED = ("unit", "sampling", "preparation", "projections", "noise", "before")


def described(mechanism: Mechanism) -> dict[str, Any]:
    """The description of a mechanism; public, and equal for mechanisms that run and cost the same.

    The sampler's fingerprint, which may reveal something of each example, is not in it.
    """
    rule = mechanism.clipping
    by_group = None
    if isinstance(mechanism.noise_multiplier, tuple):
        by_group = mechanism.noise_multiplier
    adaptive = None
    if mechanism.adaptive is not None:
        adaptive = {**vars(mechanism.adaptive), "count_multiplier": mechanism.count_multiplier}
    return strict(
        {
            "format": FORMAT,
            # These are the fields of a finished run, which `before` of a later mechanism reads.
            **_spent(mechanism.spent(mechanism.multipliers)),
            "neighbours": mechanism.relation.value,
            "multipliers_by_group": by_group,
            "clipping": {
                **rule.facts,
                "name": rule.name,
                # Two partitions with equal names and bounds cost the same, whatever their leaves.
                "groups": rule.partition.names,
                "bounds": [float(bound) for bound in rule.bounds],
            },
            "adaptive": adaptive,
            "before": [
                {**_spent(spent), "randomness": "supplied" if spent.supplied else "fresh"}
                for spent in mechanism.before
            ],
        }
    )


def accounted(mechanism: Mechanism) -> str:
    """A hash of all that the cost of a step depends on, except multipliers."""
    # Neighbours and steps are left out: a ledger may be read under a stronger relation, and a plan
    # may grow. The fingerprint tells samplers of equal name and price apart.
    counted = {
        **{name: value for name, value in described(mechanism).items() if name in _COUNTED},
        "drawn by": mechanism.sampling.fingerprint,
        "clipped": math.isfinite(mechanism.clipping.sensitivity),
    }
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()


def check_format(facts: Any, where: str) -> None:
    """Refuses a description that another version of dpjax wrote; ``where`` is the file or call."""
    version = facts.get("format") if isinstance(facts, Mapping) else 1
    if version != FORMAT:
        raise ValueError(
            f"{where}: the mechanism is described in format {version}; expected {FORMAT}. Read it "
            "with the dpjax that wrote it, or give what it spent: Mechanism(before=[Spent(...)])."
        )


def _spent(spent: Spent) -> dict[str, Any]:
    sampler = spent.sampling
    noise = None
    if spent.noise is not None:
        # `dpjax.verify` compares the sensitivity with its own answer.
        sensitivity = sensitivity_of(spent.noise, sampler)
        noise = {**spent.noise.facts, "sensitivity": sensitivity}
    return {
        "unit": spent.unit,
        "sampling": {
            **sampler.facts,
            "name": sampler.name,
            "examples": sampler.examples,
            "batch_size": sampler.batch_size,
            "neighbours": sampler.neighbours.value,
        },
        # 2 and 2.0 are written and hashed alike.
        "multiplier_and_steps": [[float(multiplier), steps] for multiplier, steps in spent.runs],
        "preparation": [float(multiplier) for multiplier in spent.preparation],
        "projections": spent.projections,
        "noise": noise,
    }
