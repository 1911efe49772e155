# SPDX-License-Identifier: Apache-2.0
"""Recomputes the epsilon of a privacy card without the rest of dpjax.

    python -m dpjax.verify RUN

The facts of the card are rates, multipliers and counts. Epsilon follows from them by one formula
for each kind of event, or by Google's dp-accounting; nothing else of dpjax is imported.

A card proves no more than its facts: its author can state other facts. The verdicts are

| the card | verdict |
|---|---|
| claims a bound that the recomputed epsilon confirms | holds |
| claims less than its own facts cost, or far more | DOES NOT HOLD; IS OF OTHER FACTS |
| claims less at a delta below 1e-12, which dp-accounting cannot resolve | cannot be confirmed |
| claims an infinite epsilon, or no proven one | promises nothing |
| reports a release without noise | not for release |
| is of a dpjax with a mistake that made claims too small (`advisories`) | AFFECTED |
| has a SHA-256 that its parameters do not have | DOES NOT HOLD |
| scales correlated noise to less than one example moves | not read further |
| has another format, other fields, or a value that no such field has | not read further |
"""

from dpjax.verify.cards import findings, main
from dpjax.verify.facts import Unreadable

__all__ = ["Unreadable", "findings", "main"]
