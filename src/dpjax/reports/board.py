# SPDX-License-Identifier: Apache-2.0
"""The statement for a board, such as one of ethics: one page in plain words.

Its numbers are those of the privacy card. An attack is bounded by the privacy profile of what ran,
not by epsilon at one delta: of two computations with equal epsilon one can reveal less.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from dpjax.accounting.rounding import three_digits, upwards
from dpjax.ledger import Ledger
from dpjax.mechanism import Mechanism
from dpjax.reports.card import Claim, claim_of
from dpjax.reports.page import board_html
from dpjax.reports.statement import Statement
from dpjax.types import Neighbours

_INSTEAD = {
    Neighbours.ADD_OR_REMOVE: "",
    Neighbours.ZERO_OUT: ", or an empty record in their place",
    Neighbours.REPLACE_ONE: ", or those of another one in their place",
}

_NOT_COVERED = """\
  - what is true of {unit}s in general: it can be learned, and applied to one who took no part
  - several {unit}s that belong together: more can be learned about them than about one
  - other results from the same data: risks add up
  - choices made by looking at the data (of settings, or of one result among several)
  - the data themselves, and files of the run that are not for release: see statement.txt"""

_KEY = (
    "\n  - those who know the random key of this run, which was supplied: they can remove its noise"
)
_PERSONS = (
    "\n  - people with several examples: the promise is made to one example, not to one person"
)


class Board(Statement):
    """The text of a statement for a board; a notebook shows it as HTML."""

    def _repr_html_(self) -> str:
        return f"<p><strong>{self.partition(chr(10))[0]}</strong></p>\n{board_html(self)}"


def board(
    mechanism: Mechanism,
    delta: float | None = None,
    *,
    ledger: Ledger | None = None,
    supplied: bool = False,
    methods: Sequence[str] | None = None,
) -> Board:
    """The statement for a board: what was promised, and what an attacker could learn at most.

    The rates of true positives are `dpjax.accounting.true_positive_rate` of what ran, rounded up;
    `dpjax verify` recomputes them from the card. The arguments are as in `dpjax.statement`.

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
    claim = claim_of("reports.board", mechanism, delta, ledger, supplied, methods)
    unit = mechanism.unit
    lines = [
        "Statement for a board",
        "",
        "What is promised",
        "",
        *_filled(_promise(claim)),
        "",
        "What an attacker could learn at most",
        "",
        *_attack(claim),
        "",
        "What is not covered",
        "",
        _NOT_COVERED.format(unit=unit) + _PERSONS * (unit == "example") + _KEY * claim.supplied,
    ]
    return Board("\n".join(lines))


def _promise(claim: Claim) -> str:
    unit, (epsilon, method) = claim.mechanism.unit, claim.proven
    if claim.not_private or math.isinf(epsilon):
        reason = claim.not_private or "No guarantee is proved for this computation."
        return f"Nothing is promised. {reason}"
    return (
        f"One {unit} is protected: there is a limit to how much all that was released can depend "
        f"on the data of one {unit}. It holds against everyone, whatever else they know, now or "
        f"later. In numbers: ({three_digits(epsilon)}, {upwards(claim.delta, '.3g')})-differential "
        f"privacy, proved by {method.upper()}."
    )


def _attack(claim: Claim) -> Iterator[str]:
    mechanism = claim.mechanism
    yield from _filled(
        f"Suppose that an attacker knows everything but whether the data of one {mechanism.unit} "
        f"were used{_INSTEAD[mechanism.relation]}, and guesses it from what was released. An alarm "
        "says that they were used. Of the cases without these data, the share on the left has a "
        "false alarm; of the cases with them, at most the share on the right has a true one:"
    )
    yield from ("", "  false alarms       true alarms, at most")
    for wrong, right in claim.true_positive_rates:
        yield f"  {_percent(wrong):<19}{_percent(right)}"
    yield from ("", *_filled("Who guesses without looking has as many true as false alarms."))


def _percent(rate: float) -> str:
    # Rounded up before it is a percentage: 100 * 0.07 is above 7.
    return f"{100 * float(upwards(rate, '.3g')):.3g} %"


def _filled(words: str) -> list[str]:
    return textwrap.wrap(words, 88, initial_indent="  ", subsequent_indent="  ")
