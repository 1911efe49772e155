# SPDX-License-Identifier: Apache-2.0
"""All forms by their kind: from the facts of a strategy back to the strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpjax import checks
from dpjax.strategies.buffered import Buffered
from dpjax.strategies.dense import Dense
from dpjax.strategies.strategy import Form, Strategy
from dpjax.strategies.toeplitz import InverseToeplitz, Toeplitz
from dpjax.strategies.tree import Tree

FORMS: dict[str, Callable[..., Form]] = {
    form.kind: form for form in (Toeplitz, InverseToeplitz, Buffered, Tree, Dense)
}


def from_facts(facts: dict[str, Any]) -> Strategy:
    """The strategy that these facts describe.

    Args:
      facts: ``strategy.facts``, or what JSON made of them.

    Example:
      >>> from dpjax import strategies
      >>> strategies.from_facts({"kind": "tree", "name": "tree", "steps": 4}).remembers
      2
    """
    call = "strategies.from_facts"
    given = dict(checks.instance(call, "facts", facts, dict, "They are strategy.facts."))
    kind = checks.one_of(call, "kind", given.pop("kind", None), list(FORMS))
    name = checks.instance(call, "name", given.pop("name", kind), str)
    try:
        return Strategy(name=name, form=FORMS[kind](**given))
    except TypeError as error:
        raise ValueError(
            f"{call}(keys {sorted(facts)}): expected the keys of a {kind} strategy, and no others "
            f"({error}). Usually the facts come from another version."
        ) from error
