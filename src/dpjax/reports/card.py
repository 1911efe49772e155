# SPDX-License-Identifier: Apache-2.0
"""The privacy card: the claim for a computation as a JSON object.

A reader can recompute its epsilon without dpjax, as `dpjax.verify` does: numbers are not rounded.

| field | holds |
|---|---|
| ``format`` | the version of this schema: 5; a card of format 4 has neither it nor the next three |
| ``sources`` | the SHA-256 of the Python files of the dpjax that wrote the card |
| ``parameters`` | the SHA-256 of the released parameters (`dpjax.trees.digest`), or null |
| ``risk`` | the rates of an attack that the noise was chosen for, or null |
| ``mechanism`` | the plan, as `dpjax.mechanism.card` describes it and ``run.json`` holds it |
| ``steps`` | how many planned steps count: the first ones, which ran; all, if results ended it |
| ``claim`` | in words, how batches are drawn and what is proved for them |
| ``delta``, ``epsilon`` | the value by each method, and whether the method proves a bound |
| ``true_positive_rates`` | pairs: a rate of false positives of an attack, of true ones at most |
| ``levels`` | to how many levels "pld" rounds many multipliers, and the smallest; or null |
| ``not_private`` | what was released without noise, in words, or null |
| ``randomness`` | ``"supplied"`` if the caller gave a key, also of an earlier run; or ``"fresh"`` |
| ``versions`` | the versions of the packages that ran and accounted |
"""

from __future__ import annotations

from typing import Any

from dpjax import accounting
from dpjax._files import strict
from dpjax._versions import sources, version
from dpjax.accounting.methods import levels_of
from dpjax.mechanism import Mechanism
from dpjax.reports._claim import attacks, claim_of

FORMAT = 5
_PACKAGES = ("dpjax", "dp-accounting", "jax", "optax", "numpy")


def card(
    mechanism: Mechanism, delta: float | None = None, *, parameters: str | None = None, **more: Any
) -> dict[str, Any]:
    """The facts of a statement as a JSON object, from which epsilon can be recomputed.

    The arguments are as in `dpjax.statement`: ``more`` are ``ledger``, ``supplied``, ``methods``.
    ``parameters`` is the `dpjax.trees.digest` of the parameters that are released with the card.

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
    claim = claim_of("reports.card", mechanism, delta, **more)
    epsilons = {
        method: {"value": float(value), "proven": accounting.METHODS[method].proven}
        for method, value in claim.epsilons.items()
    }
    risk = None
    if mechanism.risk is not None:
        risk = mechanism.risk._asdict()
    facts = {
        "format": FORMAT,
        "sources": sources(),
        "parameters": parameters,
        "risk": risk,
        "mechanism": mechanism.facts,
        "steps": len(claim.ran),
        "claim": mechanism.claim,
        "delta": claim.delta,
        "levels": levels_of(mechanism.event),
        "epsilon": epsilons,
        "true_positive_rates": attacks(claim),
        "not_private": claim.not_private,
        "randomness": "supplied" if claim.supplied else "fresh",
        "versions": {name: version(name) for name in _PACKAGES},
    }
    return strict(facts)
