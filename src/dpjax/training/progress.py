# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: one live line on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import datetime
import shutil
import sys
import time
from typing import Any, TextIO

from dpjax.accounting.rounding import upwards

# Fields that the line shows in words of its own, or not at all.
_QUIET = {"step", "epsilon", "delta", "stop", "private"}


class Progress:
    """Shows the progress of a run.

    Args:
      begin: The current step.
      end: The last step.
      most: The largest epsilon: that of the budget, or of the plan.
      unit: What the rate in a row counts: ``f"{unit}s_per_second"``.
      enabled: Whether to show anything.
      stream: Standard error by default, so that results can be piped.
    """

    def __init__(
        self,
        begin: int,
        end: int,
        most: float,
        *,
        unit: str = "example",
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self.stream = stream or sys.stderr
        self.end, self.most, self.units, self.enabled = end, most, f"{unit}s", enabled
        # A live line overwrites itself; in a file or a pipe every update would stay.
        self.live = enabled and self.stream.isatty()
        self.shown = time.monotonic()
        self.mark, self.now, self.speed = (begin, self.shown), (begin, self.shown), 0.0
        self.text = self.pace = ""

    def rate(self, step: int) -> float:
        """Steps per second since the last call; the first includes compilation."""
        now = time.monotonic()
        (before, then), self.mark = self.mark, (step, now)
        return (step - before) / max(1e-9, now - then)

    def tick(self, step: int) -> None:
        """Moves the bar of a live line, at most five times a second."""
        now = time.monotonic()
        (before, then), self.now = self.now, (step, now)
        fresh = (step - before) / max(1e-9, now - then)
        # Smoothed, so that the remaining time does not jump with each evaluation.
        self.speed = 0.9 * self.speed + 0.1 * fresh if self.speed else fresh
        if self.live and now - self.shown > 0.2:
            self._draw(step)

    def line(self, step: int, row: dict[str, Any]) -> None:
        """Shows a row of the log."""
        if not self.enabled:
            return
        speed = f"{self.units}_per_second"
        fields = {
            "loss": row.get("private", {}).get("loss"),
            **{k: v for k, v in row.items() if k not in {*_QUIET, speed}},
        }
        # Rounded up, like every claim: the terminal must not show less than was spent.
        words = [f"epsilon {upwards(row['epsilon'], '.2f')} of {upwards(self.most, '.2f')}"]
        words += [f"{k} {v:.3f}" for k, v in fields.items() if isinstance(v, float)]
        self.text, self.pace = "  ".join(words), f"{row[speed]:,.0f} {self.units}/s"
        self._draw(step)
        if not self.live:
            print(file=self.stream, flush=True)

    def _draw(self, step: int) -> None:
        self.shown = time.monotonic()
        left = datetime.timedelta(seconds=round((self.end - step) / max(1e-9, self.speed)))
        text = f"step {step}/{self.end}  {self.text}  {left} left  {self.pace}"
        if self.live:
            full = round(10 * step / max(1, self.end))
            bar = "\u2501" * full + "\u2500" * (10 - full)
            # A terminal that cannot encode the bar would end the run with an exception.
            if (self.stream.encoding or "utf-8").lower() not in ("utf-8", "utf8"):
                bar = "=" * full + "-" * (10 - full)
            # A line that wraps could not be overwritten by a carriage return.
            width = shutil.get_terminal_size().columns - 1
            text = f"\r{f'{bar} {text}'[:width]}\x1b[K"
        print(text, end="", file=self.stream, flush=True)

    def close(self) -> None:
        """Ends the live line."""
        if self.live:
            print(file=self.stream, flush=True)
