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
from dpjax._rounding import three_digits

Follow = Callable[[Sequence[Mapping[str, Any]]], object]
"""Gets all rows of the log after each new one."""

# Ends a string that overwrites a longer live line: the terminal clears the rest of the line.
_CLEAR = "\x1b[K"
# Fields that the line shows in words of its own, such as the step, or not at all.
_LEFT_OUT = FIELDS - {"bound"}


class Progress:
    """Shows the progress of a run: in lines, or through a function of the caller.

    A run takes its steps in dispatches: calls of a compiled program, each of several steps. After
    some of them the log gets a row: step, epsilon, and the numbers of an evaluation.

    Args:
      begin: How many steps of the run have run so far.
      end: How many steps have run when the run is over.
      largest_epsilon: The epsilon of the budget, or of all planned steps.
      unit: An ``"example"``, or who else is protected; the line shows how many a second.
      show: Whether to show lines; or a function that gets the rows of the log instead.
      stream: The file of the lines; by default standard error.
    """

    def __init__(
        self,
        begin: int,
        end: int,
        largest_epsilon: float,
        *,
        unit: str = "example",
        show: bool | Follow = True,
        stream: TextIO | None = None,
    ) -> None:
        is_first = processes.first_process()
        self.stream = stream or sys.stderr
        # The first process gives rows to a function of the caller, or writes lines.
        self.follow: Follow | None = None
        if is_first and callable(show):
            self.follow = show
        self.enabled = is_first and bool(show) and self.follow is None
        self.end = end
        self.largest_epsilon = largest_epsilon
        self.units = f"{unit}s"
        # A live line overwrites itself, which only a terminal can show.
        self.live = self.enabled and self.stream.isatty()
        self.step = begin
        self.shown = 0.0  # the time at which the line was last drawn, in seconds
        self.began = 0.0  # the time at which the dispatch began
        # The time at which the first dispatch (which also compiles) ended, and the steps by then.
        self.first: tuple[float, int] | None = None
        # Steps and seconds of dispatches since the last row, without compilation and evaluation.
        self.steps = 0
        self.seconds = 0.0
        self.pieces: list[str] = []  # the numbers of the last row, as the line shows them

    def say(self, words: str) -> None:
        """Shows a sentence in a line of its own, also where a function gets the rows."""
        if self.enabled or self.follow is not None:
            print(words, file=self.stream, flush=True)

    def begin(self) -> None:
        """A dispatch begins; the first one compiles."""
        self.began = time.monotonic()
        if self.live and self.first is None:
            print(f"\rcompiling ...{_CLEAR}", end="", file=self.stream, flush=True)

    def tick(self, step: int) -> None:
        """A dispatch has ended; moves the bar of a live line, at most five times a second."""
        now = time.monotonic()
        if self.first is None:
            self.first = (now, step)
        else:
            self.steps += step - self.step
            self.seconds += now - self.began
        self.step = step
        if self.live and now - self.shown > 0.2:
            self._draw()

    def take_rate(self) -> float:
        """Steps per second since the last call; 0 if only the dispatch that compiled ran."""
        steps_per_second = self.steps / max(1e-9, self.seconds)
        self.steps = 0
        self.seconds = 0.0
        return steps_per_second

    def line(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows the last row of the log, or gives all rows to the function of the caller."""
        if self.follow is not None:
            self.follow(rows)
        if not self.enabled:
            return
        row = rows[-1]
        per_second = f"{self.units}_per_second"
        hidden = {*_LEFT_OUT, per_second}
        fields = {name: value for name, value in row.items() if name not in hidden}
        fields["private loss"] = row.get("private", {}).get("loss")
        nll = fields.pop("nll", None)
        # Rounded up, as every claim is: the line must not show less than was spent.
        epsilon = three_digits(row["epsilon"])
        self.pieces = [f"epsilon {epsilon} of {three_digits(self.largest_epsilon)}"]
        # Lists, which have a number for each group, and None do not fit into a line.
        numbers = {name: value for name, value in fields.items() if isinstance(value, float)}
        self.pieces += [f"{name} {value:.3f}" for name, value in numbers.items()]
        if per_second in row:
            self.pieces.append(f"{rate(row[per_second])} {self.units}/s")
        # The negative log-likelihood comes last, so a narrow terminal leaves it out first.
        if isinstance(nll, float):
            self.pieces.append(f"nll {nll:.3f}")
        self.step = row["step"]
        self._draw()
        if not self.live:
            print(file=self.stream, flush=True)  # ends the line, which stays

    def _draw(self) -> None:
        """Writes the line: step, time left, and the numbers of the last row."""
        self.shown = time.monotonic()
        pieces = [f"step {self.step:,}/{self.end:,}"]
        if self.first is not None:
            # The first dispatch is not timed, because it compiled. Evaluations are.
            first_end, steps_by_then = self.first
            steps = self.step - steps_by_then
            if steps > 0:
                seconds_per_step = (self.shown - first_end) / steps
                seconds_left = round((self.end - self.step) * seconds_per_step)
                pieces.append(f"{datetime.timedelta(seconds=seconds_left)} left")
        pieces += self.pieces
        if not self.live:
            print("  ".join(pieces), end="", file=self.stream, flush=True)
            return
        pieces.insert(0, self._bar())
        # A carriage return cannot overwrite a line that wraps, so the last pieces are left out. The
        # first two, bar and step, always stay.
        width = shutil.get_terminal_size().columns - 1
        while len(pieces) > 2 and len("  ".join(pieces)) > width:
            pieces.pop()
        print(f"\r{'  '.join(pieces)[:width]}{_CLEAR}", end="", file=self.stream, flush=True)

    def _bar(self) -> str:
        """Eight characters; the thick ones show the part of the run that is done."""
        full = round(8 * self.step / max(1, self.end))
        encoding = self.stream.encoding or "utf-8"
        if encoding.lower() in ("utf-8", "utf8"):
            return "\u2501" * full + "\u2500" * (8 - full)
        # A terminal that cannot encode these characters raises, which ends the run.
        return "=" * full + "-" * (8 - full)

    def close(self) -> None:
        """Ends the live line."""
        if self.live:
            print(file=self.stream, flush=True)
