# SPDX-License-Identifier: Apache-2.0
"""The privacy card: the facts of a computation as a JSON object.

A reader of the card can recompute its epsilon without dpjax, as `dpjax.verify` does.
Numbers are the accounted ones, never rounded.

| field | holds |
|---|---|
| ``mechanism`` | the plan, as `dpjax.mechanism.card` describes it and ``run.json`` holds it |
| ``steps`` | how many planned steps count: the first ones, which ran; all, if results ended it |
| ``claim`` | in words, how batches are drawn and what is proved for them |
| ``delta``, ``epsilon`` | the value by each method, and whether the method proves a bound |
| ``levels`` | to how many levels "pld" rounds many multipliers, and the smallest; or null |
| ``not_private`` | what was released without noise, in words, or null |
| ``randomness`` | ``"supplied"`` if the caller gave a key, also of an earlier run; or ``"fresh"`` |
| ``versions`` | the versions of the packages that ran and accounted |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpjax import accounting
from dpjax._versions import version
from dpjax.ledger import Ledger
from dpjax.mechanism import Mechanism
from dpjax.mechanism.card import randomness, strict
from dpjax.reports.claims import claim_of


def card(
    mechanism: Mechanism,
    delta: float | None = None,
    *,
    ledger: Ledger | None = None,
    supplied: bool = False,
    methods: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The facts of a statement as a JSON object, from which epsilon can be recomputed.

    The arguments are as in `dpjax.statement`.

    Returns:
      An object for ``json.dumps``; an infinite number is the word ``"inf"``.

    Example:
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.full(examples=1000),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=4.0,
      ...     steps=2,
      ... )
      >>> card(mechanism, delta=1e-5)["mechanism"]["multiplier_and_steps"]
      [[4.0, 2]]
    """
    claim = claim_of("reports.card", mechanism, delta, ledger, supplied, methods)
    facts = {
        # The schema of the run's folder: `verify`, `report` and `resume` read one description.
        "mechanism": mechanism.facts,
        "steps": len(claim.ran),
        "claim": mechanism.claim,
        "delta": claim.delta,
        "levels": accounting.levels_of(mechanism.event),
        "epsilon": {
            # Not rounded: `verify` compares the number with the one that it recomputes.
            method: {"value": float(value), "proven": accounting.METHODS[method].proven}
            for method, value in claim.epsilons.items()
        },
        "not_private": claim.not_private,
        "randomness": randomness(claim.supplied),
        "versions": {
            name: version(name) for name in ("dpjax", "dp-accounting", "jax", "optax", "numpy")
        },
    }
    # JSON has no infinity, and a card must be readable by every parser.
    return strict(facts)
