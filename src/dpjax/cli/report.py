# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of the runs that the command line names, each in its own folder."""

from __future__ import annotations

from collections.abc import Sequence

from absl import app, flags

from dpjax import reports


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Writes a page into each folder."""
    if not argv[1:]:
        raise app.UsageError("expected the folder of a run: dpjax report runs/demo")
    for folder in argv[1:]:
        try:
            print(f"To look at: {reports.report(folder)}")
        except (ImportError, OSError, ValueError) as error:
            raise app.UsageError(f"{folder}: {error}") from error
