# SPDX-License-Identifier: Apache-2.0
"""The lines of an audit: each a lower bound next to a claim; and the verdict on all of them."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax

from dpjax._rounding import downwards, three_digits

OF_A_RUN = 0.95  # the confidence of a bound
ASSUMED = "a bound only if train and test rows are of one distribution"
HEAD = f"{'audit':<40}{'epsilon >':>9}{'claimed':>9}{'':>8}  measured"


class Line(NamedTuple):
    """One audit: what it measured, and its lower bound next to the claim."""

    audit: str
    measured: str
    bound: float
    claimed: float
    confidence: float
    refutes: bool

    def __str__(self) -> str:
        bound = three_digits(self.bound, downwards)
        claimed = three_digits(self.claimed)
        return f"{self.audit:<40}{bound:>9}{claimed:>9}{self.confidence:>8.1%}  {self.measured}"


def conclude(lines: Sequence[Line], seconds: float) -> None:
    """Prints the verdict; ends the process with status 1 if an audit refutes its claim."""
    print(f"{seconds:.0f} s on {jax.devices()[0].device_kind}")
    refuted = [line.audit for line in lines if line.refutes]
    if refuted:
        sys.exit(f"A LOWER BOUND EXCEEDS ITS CLAIM: {'; '.join(refuted)}")
    above = [line.audit for line in lines if line.bound > line.claimed]
    if above:
        print(f"Above the claim, and no verdict: {'; '.join(above)}. It is {ASSUMED}.")
    print("No audit contradicts its claim. An audit can refute a claim, never prove one.")
