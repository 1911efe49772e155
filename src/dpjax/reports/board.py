# SPDX-License-Identifier: Apache-2.0
"""The statement for a board, such as one of ethics: one page in plain words.

Its numbers are on the privacy card. An attack is bounded by the privacy profile of what ran, not by
epsilon at one delta: of two computations with equal epsilon one can reveal less.
"""

from __future__ import annotations

import math
import textwrap
from typing import Any

from dpjax._rounding import downwards, three_digits, upwards
from dpjax.mechanism import Mechanism
from dpjax.reports._claim import Claim, attacks, claim_of, not_covered, percent
from dpjax.types import HeldOut, Neighbours

_INSTEAD = {
    Neighbours.ADD_OR_REMOVE: "",
    Neighbours.ZERO_OUT: ", or an empty record in their place",
    Neighbours.REPLACE_ONE: ", or the data of another one in their place",
}

_PAGE = """\
Statement for a board

What is promised

{promise}

What an attacker could learn at most

{attacker}

  false alarms       true alarms, at most
{rates}

  Guessing blindly gives equal rates, such as 1 % and 1 %.

What is not covered

{uncovered}"""


def board(
    mechanism: Mechanism,
    delta: float | None = None,
    *,
    held_out: HeldOut | None = None,
    settings: str | None = None,
    **more: Any,
) -> str:
    """The statement for a board: what was promised, and what an attacker could learn at most.

    The rates of true positives are `dpjax.accounting.true_positive_rate` of what ran, rounded up;
    `dpjax verify` recomputes them from the card. The arguments are as in `dpjax.statement`:
    ``held_out``, ``settings``, and ``more`` are ``ledger``, ``supplied``, ``methods``.

    Example:
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.full(examples=1000),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=4.0,
      ...     steps=4,
      ... )
      >>> print(board(mechanism, delta=1e-5))  # doctest: +ELLIPSIS
      Statement for a board
      ...
        false alarms       true alarms, at most
        0.1 %              0.48 %
        1 %                3.39 %
        10 %               21.8 %
      ...
    """
    claim = claim_of("reports.board", mechanism, delta, **more)
    promise = _promise(claim)
    if settings is not None:
        promise += f" {settings}"
    rates = [
        f"  {percent(wrong, downwards):<19}{percent(right)}" for wrong, right in attacks(claim)
    ]
    uncovered = [*not_covered(held_out, mechanism.unit), *_never_covered(claim)]
    return _PAGE.format(
        promise=_filled(promise),
        attacker=_filled(_attacker(mechanism)),
        rates="\n".join(rates),
        uncovered="\n".join(f"  - {words}" for words in uncovered),
    )


def _promise(claim: Claim) -> str:
    """The guarantee in plain words, or the reason why there is none."""
    epsilon, method = claim.proven
    if claim.not_private or math.isinf(epsilon):
        reason = claim.not_private or "No guarantee is proved for this computation."
        return f"Nothing is promised. {reason}"
    unit = claim.mechanism.unit
    chosen = ""
    risk = claim.mechanism.risk
    if risk is not None:
        chosen = (
            f" The noise was chosen for a limit of {percent(risk.true_positive_rate)} true alarms "
            f"at {percent(risk.false_positive_rate, downwards)} false ones, as in the table below."
        )
    return (
        f"One {unit} is protected: there is a limit to how much all that was released can depend "
        f"on the data of one {unit}. It holds against everyone, whatever else they know, now or "
        f"later. In numbers: ({three_digits(epsilon)}, {upwards(claim.delta, '.3g')})-differential "
        f"privacy, proved by {method.upper()}.{chosen}"
    )


def _attacker(mechanism: Mechanism) -> str:
    return (
        "Suppose that an attacker knows everything but whether the data of one "
        f"{mechanism.unit} were used{_INSTEAD[mechanism.relation]}, and guesses it from what was "
        "released. An alarm says that they were used. Of the cases without these data, the share "
        "on the left has a false alarm; of the cases with them, at most the share on the right has "
        "a true one:"
    )


def _never_covered(claim: Claim) -> list[str]:
    unit = claim.mechanism.unit
    uncovered = [
        f"what is true of {unit}s in general: it can be learned, and applied to one who took no "
        "part",
        f"several {unit}s that belong together: more can be learned about them than about one",
        "other results from the same data: risks add up",
        "choices made by looking at the data (of settings, or of one result among several)",
        "the data themselves, and files of the run that are not for release: see statement.txt",
    ]
    if unit == "example":
        uncovered.append(
            "people with several examples: one example is protected, and not one person"
        )
    if claim.supplied:
        uncovered.append(
            "who knows the random key of this run, which was supplied, can remove its noise"
        )
    return uncovered


def _filled(words: str) -> str:
    return textwrap.fill(words, 88, initial_indent="  ", subsequent_indent="  ")
