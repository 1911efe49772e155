# SPDX-License-Identifier: Apache-2.0
"""The rows of the log as TensorBoard events, if tensorboardX is installed.

Numbers computed from private data without noise are under ``private/``. The events repeat
`metrics.jsonl` and no code reads them: the folder may be deleted at any time.
"""

from __future__ import annotations

import importlib.util
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any


class Board:
    """Writes events into a folder; does nothing if tensorboardX is not installed."""

    def __init__(self, directory: pathlib.Path, done: int) -> None:
        self.writer = None
        if importlib.util.find_spec("tensorboardX") is not None:
            from tensorboardX import SummaryWriter

            directory.mkdir(mode=0o700, exist_ok=True)  # rows hold private numbers
            # TensorBoard drops the events after the checkpoint, whose steps run again.
            self.writer = SummaryWriter(str(directory), purge_step=done + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes the numbers of a row."""
        if self.writer is not None:
            for name, value in _numbers(row):
                self.writer.add_scalar(name, value, row["step"])
            # Every row is flushed, so a killed run keeps its curves.
            self.writer.flush()

    def close(self) -> None:
        """Closes the file."""
        if self.writer is not None:
            self.writer.close()


def _numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row with their names, without lists."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        # TensorBoard warns of infinity, which is the epsilon of a run without noise.
        elif isinstance(value, int | float) and name != "step" and not math.isinf(value):
            yield prefix + name, value
