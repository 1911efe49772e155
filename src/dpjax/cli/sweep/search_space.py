# SPDX-License-Identifier: Apache-2.0
"""The settings that a search tries: candidates for flags, and runs drawn from them.

learning_rate=0.2,0.4;hidden=64|128,64 has two values each; learning_rate=log:0.05:1 has numbers to
draw, as have momentum=uniform:0:1 and epochs=whole:5:9.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from absl import app

SCALES: dict[str, Callable[[np.random.Generator, float, float], float]] = {
    "log": lambda draw, low, high: float(np.exp(draw.uniform(np.log(low), np.log(high)))),
    "uniform": lambda draw, low, high: float(draw.uniform(low, high)),
    "whole": lambda draw, low, high: int(draw.integers(int(low), int(high), endpoint=True)),
}


class Range(NamedTuple):
    """Numbers from ``low`` to ``high``, both included."""

    scale: str
    low: float
    high: float

    def text(self, number: float) -> str:
        """A number of this range, as a flag takes it."""
        return str(int(number)) if self.scale == "whole" else f"{number:.6g}"

    def drawn(self, draw: np.random.Generator) -> str:
        """A random number of this range."""
        return self.text(SCALES[self.scale](draw, self.low, self.high))


OURS = ("out", "seed", "overwrite")  # flags that only the search itself may set
Candidates = dict[str, list[str] | Range]


class Trial(NamedTuple):
    """One run of a search: values of the searched flags, and its seed if it has one."""

    settings: dict[str, str]
    seed: int | None
    repeat: int

    @property
    def name(self) -> str:
        """The name of its folder, from its settings."""
        text = f"repeat={self.repeat}" if self.seed is None else f"seed={self.seed}"
        if self.settings:
            text = f"{words(self.settings)},{text}"
        safe = re.sub(r"[^\w.,=+-]", "_", text)[:120]
        if safe == text:
            return text
        # A file system refuses other characters and long names; the hash keeps names distinct.
        return f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def words(settings: dict[str, str]) -> str:
    """Settings as a text; equal settings have equal texts."""
    return ",".join(f"{name}={value}" for name, value in sorted(settings.items()))


def pairs(text: str, flag: str) -> dict[str, str]:
    """Reads ``name=value;name=value``."""
    settings: dict[str, str] = {}
    for pair in filter(None, map(str.strip, text.split(";"))):
        name, equals, value = (word.strip() for word in pair.partition("="))
        if not (name and equals and value) or name in (*settings, *OURS):
            raise app.UsageError(
                f"--{flag}: {pair!r}: expected each flag once, none of {', '.join(OURS)}, as in "
                "learning_rate=0.2,0.4;bound=1."
            )
        settings[name] = value
    return settings


def candidates(text: str, flag: str) -> Candidates:
    """Parses the candidates of each flag."""
    return {name: _values(name, value, flag) for name, value in pairs(text, flag).items()}


def _values(name: str, text: str, flag: str) -> list[str] | Range:
    """A range, or the list of values, which ``|`` separates where a value has commas."""
    scale, *ends = text.split(":")
    if scale not in SCALES or len(ends) != 2:
        separator = "|" if "|" in text else ","
        return [value.strip() for value in text.split(separator)]
    low, high = map(float, ends)
    if flag == "grid" or not (-math.inf < low <= high < math.inf) or (scale == "log" and low <= 0):
        raise app.UsageError(
            f"--{flag}: {name}={text}: expected log:LOW:HIGH, uniform:LOW:HIGH or whole:LOW:HIGH, "
            "LOW below HIGH, in --ranges."
        )
    return Range(scale, low, high)


def every(tried: Candidates) -> list[dict[str, str]]:
    """All combinations of values; ranges have no list of values and are left out."""
    lists = {name: values for name, values in tried.items() if isinstance(values, list)}
    return [dict(zip(lists, chosen, strict=True)) for chosen in itertools.product(*lists.values())]


def drawn(tried: Candidates, count: int, draw: np.random.Generator) -> list[dict[str, str]]:
    """``count`` settings, drawn independently, so some may be equal."""

    def one(values: list[str] | Range) -> str:
        return values.drawn(draw) if isinstance(values, Range) else str(draw.choice(values))

    return [{name: one(values) for name, values in tried.items()} for _ in range(count)]


def trials(settings: Iterable[dict[str, str]], seed: int | None) -> list[Trial]:
    """The runs of a search; equal settings are repeats with different seeds."""
    repeats: Counter[str] = Counter()
    runs = []
    for chosen in settings:
        text = words(chosen)
        run_seed = None if seed is None else seed + repeats[text]
        runs.append(Trial(chosen, run_seed, repeats[text]))
        repeats[text] += 1
    return runs
