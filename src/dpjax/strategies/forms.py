# SPDX-License-Identifier: Apache-2.0
"""From the facts of a strategy, as a card holds them, back to the strategy."""

from __future__ import annotations

from typing import Any

from dpjax import checks
from dpjax.strategies.buffered import Buffered
from dpjax.strategies.strategy import Strategy
from dpjax.strategies.toeplitz import InverseToeplitz, Toeplitz
from dpjax.strategies.tree import Tree

_KINDS: dict[str, Any] = {each.kind: each for each in (Toeplitz, InverseToeplitz, Buffered, Tree)}


def from_facts(facts: dict[str, Any]) -> Strategy:
    """The strategy that these facts describe.

    Args:
      facts: ``strategy.facts``, or what JSON made of them.

    Example:
      >>> from dpjax import strategies
      >>> strategies.from_facts({"kind": "tree", "name": "tree", "steps": 4}).remembers
      2
    """
    kind = checks.one_of("strategies.from_facts", "kind", facts.get("kind"), list(_KINDS))
    return _KINDS[kind](**{name: value for name, value in facts.items() if name != "kind"})
