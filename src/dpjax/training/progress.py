# SPDX-License-Identifier: Apache-2.0
"""One live line on a terminal; plain lines, now and then, everywhere else."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

__all__ = ["Progress"]


class Progress:
    """Shows how far a run is.

    Args:
      steps: How many steps there are.
      enabled: Whether to show anything.
      stream: Where to; standard error by default, so that results can be piped.
    """

    def __init__(self, steps: int, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.steps, self.enabled = steps, enabled
        self.live = enabled and self.stream.isatty()
        self.shown = time.monotonic()
        self.mark, self.speed = (0, self.shown), 0.0
        self.text = ""

    def rate(self, step: int) -> float:
        """Steps per second since the last call; the first includes compilation."""
        now = time.monotonic()
        (before, then), self.mark = self.mark, (step, now)
        self.speed = (step - before) / max(1e-9, now - then)
        return self.speed

    def tick(self, step: int) -> None:
        """Moves the step counter of a live line, a few times a second at most."""
        now = time.monotonic()
        if self.live and self.speed and now - self.shown > 0.2:
            self.shown = now
            self._draw(step)

    def line(self, step: int, row: dict[str, Any]) -> None:
        """Shows a row of the log."""
        if not self.enabled:
            return
        private = row.get("private", {})
        fields = {
            "epsilon": row.get("epsilon"),
            "loss": private.get("loss"),
            **{k: v for k, v in row.items() if k not in _QUIET},
        }
        words = [f"{k} {v:.3f}" for k, v in fields.items() if isinstance(v, float)]
        words.append(f"{row['examples_per_second']:,.0f} examples/s")
        self.text = "  ".join(words)
        self._draw(step)
        if not self.live:
            print(file=self.stream, flush=True)

    def _draw(self, step: int) -> None:
        left = (self.steps - step) / max(1e-9, self.speed)
        text = f"step {step}/{self.steps}  {self.text}  {left:.0f} s left"
        start, end = ("\r", "\x1b[K") if self.live else ("", "")
        print(f"{start}{text}{end}", end="", file=self.stream, flush=True)

    def close(self) -> None:
        """Ends the live line."""
        if self.live:
            print(file=self.stream, flush=True)


_QUIET = {"step", "epsilon", "delta", "examples_per_second", "private"}
