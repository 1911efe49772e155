# SPDX-License-Identifier: Apache-2.0
"""Signals: SIGTERM and Ctrl-C end a run after the current step, with a checkpoint.

Schedulers send SIGTERM before they take a machine away.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from absl import logging


class Stop:
    """A context that records SIGTERM and SIGINT; outside the main thread it does nothing."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        # Python delivers signals only to the main thread, and refuses handlers in other threads.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler: the run reads ``asked`` between steps."""
        # A second signal ends the process immediately, because a step may hang.
        if self.signal is not None:
            self.end_process("a second signal ended the run within a step.")
        self.signal = number

    def end_process(self, words: str) -> None:
        """Ends the process with one sentence: SIGINT as Ctrl-C does, SIGTERM with status 143."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt(words)
        logging.warning("%s", words)
        # The status is not 0, so a scheduler sees that the run is not finished.
        raise SystemExit(128 + signal.SIGTERM)
