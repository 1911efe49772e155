# SPDX-License-Identifier: Apache-2.0
"""Rows of private fine-tuning: networks, the part that is trained, bounds, epsilons 1 and 3.

  linear     a linear layer on features of the frozen network, each example's features centred and
             scaled by itself to length 1
  bias-only  biases and the head
  lora       adapters of rank 8 on queries and values, and the head
  full       all weights

A private example is one image or one phrase of SST-2, and neighbours differ in one.  The phrases
are parts of sentences and contain one another, and 371 of the 67,349 occur a second time: for an
author, all of whose k phrases are private, epsilon is more than k times as large
(`dpjax.accounting.epsilon_for_users`).  Noise is calibrated with PLD for Poisson batches.  Rates of
linear layers were chosen on 3,000 training examples with the noise of a full run, whose epsilon a
user with private data has to count.  The other rates are the paper's (5e-4 for BERT) and multiples
of it, not searched.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from experiments.calibration.settings import CALIBRATES, LARGE, MIXED, PLAIN, WORDS
from experiments.calibration.settings import SMALL as SMALL_R
from experiments.common.claims import Claim


class Row(NamedTuple):
    """A run of one network: its data, the part that is trained, and its optimizer.

    For SGD ``rate`` is the rate at a bound of 1.
    """

    data: str
    part: str  # of the network
    batch: int
    steps: int
    optimizer: str
    rate: float
    small: float
    large: float
    epsilon: float = math.inf
    way: str = PLAIN


LINEAR = "linear"
# The trained leaves, as a regular expression of their names.
PARTS = {"bias-only": r"bias$|^head/", "lora": r"^lora/|^head/", "full": r"^(?!lora/)"}
SWITCH = 0.9  # the part of a mixed run before its bound is large
EPSILONS = (1.0, 3.0)
# A linear layer's gradient is at most 2 for inputs of length 1, so a bound of 2 clips nothing.
_IMAGES = Row(
    data="cifar10",
    part=LINEAR,
    batch=4096,
    steps=200,
    optimizer="sgd",
    rate=32.0,
    small=0.1,
    large=2.0,
)
_PHRASES = Row(
    data="sst2",
    part="full",
    batch=256,
    steps=300,
    optimizer="adamw",
    rate=5e-4,
    small=0.1,
    large=20.0,
)
NETWORKS = {
    "cifar10 linear": _IMAGES,
    "sst2 linear": _IMAGES._replace(data="sst2", rate=8.0),
    "sst2 bias-only": _PHRASES._replace(part="bias-only", rate=5e-3),
    "sst2 lora": _PHRASES._replace(part="lora", rate=1e-3),
    "sst2 full": _PHRASES,
}


def key_of(network: str, epsilon: float, way: str) -> str:
    """The key of a row."""
    if epsilon == math.inf:
        return f"{network} {way}"
    return f"{network} {way} at epsilon {epsilon:g}"


ROWS = {
    key_of(name, epsilon, way): row._replace(epsilon=epsilon, way=way)
    for name, row in NETWORKS.items()
    for epsilon in EPSILONS
    for way in (SMALL_R, LARGE, MIXED)
}
ROWS |= {key_of(name, math.inf, PLAIN): row for name, row in NETWORKS.items()}
SMALL = {
    f"digits {name}": NETWORKS[name]._replace(epsilon=3.0, way=SMALL_R)
    for name in ("cifar10 linear", "sst2 lora")
}

TABLES = {"all": list(ROWS)}


def _claims() -> list[Claim]:
    claims = []
    for network, epsilon in itertools.product(NETWORKS, EPSILONS):
        dataset, part = network.split(" ", 1)
        words = f"{WORDS[dataset]}, {part}, epsilon {epsilon:g}"
        large = [key_of(network, epsilon, LARGE)]
        small = [key_of(network, epsilon, SMALL_R)]
        claims += [
            Claim(
                f"{words}: {CALIBRATES}",
                large,
                "below",
                than=small,
                measure="ece",
                own=True,
            ),
            Claim(
                f"{words}: accuracy with a large bound level with that with a small one",
                large,
                "level",
                than=small,
                own=True,
            ),
        ]
    return claims


CLAIMS = _claims()
