# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: one live line on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import datetime
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from dpjax import processes
from dpjax._display import rate
from dpjax._files import FIELDS
from dpjax.accounting.rounding import three_digits

Follow = Callable[[Sequence[Mapping[str, Any]]], object]
"""Gets all rows of the log after each new one."""

# Fields that the line shows in words of its own, or not at all.
_QUIET = FIELDS - {"bound"}


class Progress:
    """Shows the progress of a run: as lines, or by a function of the caller's."""

    def __init__(
        self,
        begin: int,
        end: int,
        most: float,
        *,
        unit: str = "example",
        show: bool | Follow = True,
        stream: TextIO | None = None,
    ) -> None:
        first = processes.first_process()
        self.stream = stream or sys.stderr
        self.follow = show if first and callable(show) else None
        self.enabled = first and bool(show) and not callable(show)
        self.end, self.most, self.units = end, most, f"{unit}s"
        # A live line overwrites itself; in a file or a pipe every update would stay.
        self.live = self.enabled and self.stream.isatty()
        self.step, self.shown, self.began = begin, 0.0, 0.0
        # When the first dispatch, which compiled, ended, and at which step.
        self.first: tuple[float, int] | None = None
        # Since the last row, in dispatches alone: neither compilation nor evaluations.
        self.steps, self.seconds = 0, 0.0
        self.pieces: list[str] = []

    def say(self, words: str) -> None:
        """Shows a sentence in a line of its own, also where a function gets the rows."""
        if self.enabled or self.follow is not None:
            print(words, file=self.stream, flush=True)

    def begin(self) -> None:
        """A dispatch begins; the first one compiles."""
        self.began = time.monotonic()
        if self.live and self.first is None:
            print("\rcompiling ...\x1b[K", end="", file=self.stream, flush=True)

    def tick(self, step: int) -> None:
        """A dispatch has ended; moves the bar of a live line, at most five times a second."""
        now = time.monotonic()
        if self.first is None:
            self.first = now, step
        else:
            self.steps += step - self.step
            self.seconds += now - self.began
        self.step = step
        if self.live and now - self.shown > 0.2:
            self._draw()

    def take_rate(self) -> float:
        """Steps per second since the last call; 0 if none ran but the one that compiled."""
        pace = self.steps / max(1e-9, self.seconds)
        self.steps, self.seconds = 0, 0.0
        return pace

    def line(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows the last row of the log."""
        if self.follow is not None:
            self.follow(rows)
        if not self.enabled:
            return
        row, speed = rows[-1], f"{self.units}_per_second"
        fields = {k: v for k, v in row.items() if k not in {*_QUIET, speed}}
        fields["private loss"] = row.get("private", {}).get("loss")
        # What stands last is left out first where a terminal is narrow.
        nll = fields.pop("nll", None)
        # Rounded up, like every claim: the terminal must not show less than was spent.
        self.pieces = [f"epsilon {three_digits(row['epsilon'])} of {three_digits(self.most)}"]
        self.pieces += [f"{k} {v:.3f}" for k, v in fields.items() if isinstance(v, float)]
        self.pieces += [f"{rate(row[speed])} {self.units}/s"] if speed in row else []
        self.pieces += [f"nll {nll:.3f}"] if isinstance(nll, float) else []
        self.step = row["step"]
        self._draw()
        if not self.live:
            print(file=self.stream, flush=True)

    def _draw(self) -> None:
        self.shown = time.monotonic()
        pieces = [f"step {self.step:,}/{self.end:,}"]
        if self.first and (more := self.step - self.first[1]):
            pace = (self.shown - self.first[0]) / more  # with the time of evaluations
            left = datetime.timedelta(seconds=round((self.end - self.step) * pace))
            pieces.append(f"{left} left")
        pieces += self.pieces
        if not self.live:
            print("  ".join(pieces), end="", file=self.stream, flush=True)
            return
        full = round(8 * self.step / max(1, self.end))
        # A terminal that cannot encode the bar would end the run with an exception.
        plain = (self.stream.encoding or "utf-8").lower() not in ("utf-8", "utf8")
        done, open_ = "=-" if plain else "\u2501\u2500"
        pieces.insert(0, done * full + open_ * (8 - full))
        # A carriage return cannot overwrite a line that wraps, so pieces are left out.
        width = shutil.get_terminal_size().columns - 1
        while len(pieces) > 2 and len("  ".join(pieces)) > width:
            pieces.pop()
        print(f"\r{'  '.join(pieces)[:width]}\x1b[K", end="", file=self.stream, flush=True)

    def close(self) -> None:
        """Ends the live line."""
        if self.live:
            print(file=self.stream, flush=True)
