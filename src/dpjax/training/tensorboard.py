# SPDX-License-Identifier: Apache-2.0
"""The log's rows as TensorBoard events, where the extra is installed.

What was computed from private data without noise is under ``private/``.  The board shows
what `metrics.jsonl` holds, and nothing else reads it: it may be deleted at any time.
"""

from __future__ import annotations

import importlib.util
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any


class Board:
    """Writes events into a folder; does nothing without ``pip install 'dpjax[tensorboard]'``.

    Args:
      directory: Where to.
      done: The step from which the run goes on; younger events are taken back.
    """

    def __init__(self, directory: pathlib.Path, done: int) -> None:
        self.writer = None
        if importlib.util.find_spec("tensorboardX") is not None:
            from tensorboardX import SummaryWriter

            self.writer = SummaryWriter(str(directory), purge_step=done + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes the numbers of a row."""
        if self.writer is None:
            return
        for name, value in _numbers(row):
            self.writer.add_scalar(name, value, row["step"])
        self.writer.flush()

    def close(self) -> None:
        """Ends the file."""
        if self.writer is not None:
            self.writer.close()


def _numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a row with its name.

    Lists are histograms or groups, and left out; so is infinity (the epsilon of a run without
    noise), for which a board has no place and at every row a warning.
    """
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step" and not math.isinf(value):
            yield prefix + name, value
