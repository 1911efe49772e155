# SPDX-License-Identifier: Apache-2.0
"""The commands that fill the results of the papers, in order of value.

A command names the rows that it fills, so that `reproduce.py` counts what is missing without
running anything; a test compares these names with the binary's.  Claims that are cheap to check
come first, then CIFAR-10, then sweeps.  Not listed: of bu2023, rows on ViT and BERT, figures 1
and 10 and table 1; of liu2021, table 4; of losing_less2022, CIFAR-10 in figures 8, 9, 10 and 13,
and MNIST in figure 10; of papernot2021, CIFAR-10 in figure 2.  All other figures draw listed rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

BINARIES = {
    "tramer2021": "tramer2021_scatternet.py",
    "papernot2021": "papernot2021_tempered_sigmoids.py",
    "an2021": "an2021_noise_curricula.py",
    "losing_less2022": "losing_less2022_loss.py",
    "liu2021": "liu2021_grouped_clipping.py",
    "bu2023": "bu2023_calibration.py",
}


class Command(NamedTuple):
    """A command, and the rows that it fills: in ``rows``, ``{a|b}`` stands for either word."""

    paper: str
    flags: str
    rows: str
    minutes: float  # of one core, a run
    seeds: int = 3
    other: str = ""  # binary than the paper's first

    @property
    def binary(self) -> str:
        return self.other or BINARIES[self.paper]

    def names(self) -> list[str]:
        return list(dict.fromkeys(_expanded(self.rows)))

    def missing(self, rows: Mapping[str, Any]) -> int:
        """How many of its runs the paper's rows do not have."""
        return sum(
            str(seed) not in rows.get(name, {})
            for name in self.names()
            for seed in range(self.seeds)
        )


def _expanded(row: str) -> list[str]:
    """All names of a pattern, some of them repeatedly: the innermost braces first."""
    if not (braces := re.search(r"\{([^{}]*)\}", row)):
        return [row]
    before, after = row[: braces.start()], row[braces.end() :]
    return [name for word in braces[1].split("|") for name in _expanded(before + word + after)]


_GREY = "{mnist|fashion}"
_PARTS = "{CE|SSE|SSE+CE|SSE+focal|all}"
_FALLING = "{exponential|piecewise|linear|quadratic}-down"
_OWN_RATES = "{flat|equal, 8 groups}{|, rate 0.15|, rate 0.35|, rate 0.5}"
_PRINTED_RATE = (
    "{paper, 8 groups{{|, momentum 0.9}{|, relu}|, rate 0.5{|, relu}}|flat, momentum 0.9}"
)
_SWEEP = "{s={1|4} T={1|2|4} o={0.5|1|2}|s=2 T={1|4} o={0.5|1|2}|s=2 T=2 o={0.5|1 (tanh)|2}}"
_ALGORITHMS = (
    "{{SGD|heavy ball|NAG|Adam|AdaGrad|RMSprop}, {flat, {small|large} R|global|automatic|layerwise}"
    "|SGLD|{SGD|Adam}{, exact norms|-JL, r = {10|30|100}}|FedAvg|FedSGD}"
)
_MOVES = ", batch 1024, momentum 0.9"
COMMANDS = (
    Command("losing_less2022", "--figure=3 --rows=mnist,fashion",
            f"{_GREY} pixels cnn {{CE|all}}", 3.5),
    Command("losing_less2022", "--figure=4 --rows=mnist,fashion",
            f"{_GREY} wavelets cnn {{CE|all}}", 2),
    Command("liu2021", "--table=rates --datasets=mnist",
            f"mnist {{{_OWN_RATES}|{_PRINTED_RATE}}}, {{12646|1324}} steps", 4.5),
    Command("an2021", "--table=2", "{exponential|piecewise|linear|quadratic}-{down|up}", 3),
    Command("an2021", "--table=3", f"{{{_FALLING}|constant {{1.0472|1.3806|1.5390|1.6042}}}}", 3),
    Command("an2021", "--table=4",
            "{constant {0|1|2|3|4|5}|{linear|piecewise|quadratic}-down}{|, easy first}", 3),
    Command("an2021", "--table=sound", "{constant 1.38|1.38, {weights"
            "|public scorer, {growing|full} batches|private scorer, growing batches}}", 3),
    Command("bu2023", "--table=2", "mnist {not private|{small|large|mixed} R}", 8),
    Command("bu2023", "", f"algorithms {_ALGORITHMS}", 1, other="bu2023_algorithms.py"),
    Command("tramer2021", "--rows=mnist,fashion",
            f"{_GREY} {{pixels cnn|wavelets {{linear|cnn}}}}", 8),
    Command("papernot2021", "--table=3 --datasets=mnist",
            "mnist {ReLU, not private|ReLU|tanh}, 14100 steps", 15),
    Command("papernot2021", "--table=3 --datasets=fashion_mnist",
            "fashion_mnist {ReLU, not private|ReLU|tanh}, 9400 steps", 12),
    Command("tramer2021", "--rows='cifar wavelets linear'", "cifar wavelets linear", 6),
    Command("losing_less2022", "--figure=9 --rows='mnist pixels,fashion pixels'",
            f"{_GREY} pixels cnn {_PARTS}", 3.5),
    Command("liu2021", "--table=rates --datasets=fashion_mnist",
            f"fashion_mnist {{{_OWN_RATES}|{_PRINTED_RATE}}}, {{10546|4901}} steps", 7),
    Command("bu2023", "--figure=6-right", "mnist {R = {0.1|10|50|100|500}|{small|large} R}", 8),
    Command("bu2023", "--table=clippings", "mnist {{|layerwise, }{small|large} R|global, large R"
            "|automatic|normalised|layerwise, the paper's noise}", 8),
    Command("losing_less2022", "--figure=9 --rows='mnist wavelets,fashion wavelets'",
            f"{_GREY} wavelets cnn {_PARTS}", 2),
    Command("tramer2021", "--rows='cifar wavelets cnn'", "cifar wavelets cnn", 16),
    Command("tramer2021", "--rows='cifar pixels'", "cifar pixels cnn", 46),
    Command("losing_less2022", "--figure=4 --rows=cifar", "cifar wavelets cnn {CE|all}", 16),
    Command("losing_less2022", "--figure=3 --rows=cifar", "cifar pixels cnn {CE|all}", 48),
    Command("papernot2021",
            "--table=3 --datasets=cifar10 --kind=ReLU --kind=tanh --rates=0.8",
            "cifar10 {ReLU|tanh}, batch 4096, rate 0.8, momentum 0.9, 780 steps", 200),
    Command("liu2021", "--table=rates --datasets=cifar10",
            f"cifar10 {{{{flat|{{paper|equal}}, 16 groups}}{_MOVES}|paper, 16 groups{_MOVES}, relu"
            "}, {1430|1625} steps", 26),
    Command("papernot2021", "--table=4 --datasets=fashion_mnist", "fashion_mnist {tanh|"
            "adam at 0.00132|{sgd at 0.107|adam at 0.00106}, not private}, 9400 steps", 12),
    Command("papernot2021", "--figure=4 --datasets=mnist", "mnist {ReLU|tanh}{|, not private}, "
            "14100 steps", 15),
    Command("papernot2021",
            "--table=3 --datasets=fashion_mnist --kind='ReLU, not private' --rates=0.107",
            "fashion_mnist ReLU, not private, batch 256, rate 0.107, 9400 steps", 4),
    Command("papernot2021",
            "--table=3 --datasets=mnist --kind='ReLU, not private' --rates=0.05",
            "mnist ReLU, not private, batch 256, rate 0.05, 14100 steps", 5),
    Command("losing_less2022", "--figure=13 --rows=mnist,fashion",
            f"{_GREY} pixels cnn {{CE|all|CE without privacy}}", 3.5),
    Command("losing_less2022", "--figure=15 --rows=mnist", "mnist pixels cnn {SSE|SAE"
            "|Huber {0.1|0.2|0.3|0.4|0.5|0.6|0.7|0.8|0.9|1.0}}", 3.5, 1),
    Command("losing_less2022", "--figure=4 --rows=mnist,fashion --as_printed",
            f"{_GREY} wavelets cnn, as printed {{CE|all}}", 2),
    Command("losing_less2022", "--figure=10 --rows=fashion", "fashion pixels cnn all, {threshold="
            "{0|2|4|6|8|10}|beta={1|11|51|101|191}|gamma={0|1|2|5|10}}", 3.5, 1),
    Command("papernot2021", "--figure=2 --datasets=fashion_mnist",
            f"fashion_mnist {_SWEEP}, 9400 steps", 4, 1),
    Command("papernot2021", "--figure=2 --datasets=mnist", f"mnist {_SWEEP}, 14100 steps", 6, 1),
)  # fmt: skip
