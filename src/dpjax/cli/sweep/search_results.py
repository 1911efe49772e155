# SPDX-License-Identifier: Apache-2.0
"""Ranks the settings of a search by test accuracy, from the folders of its runs."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpjax.accounting.rounding import upwards
from dpjax.cli.sweep import search_space
from dpjax.reports.load_run import read


def results(
    trials: Mapping[pathlib.Path, search_space.Trial], *, single: bool = False
) -> list[dict[str, Any]]:
    """A row for each setting, the best mean first; with ``single`` a row for each run."""
    groups: dict[str, list[pathlib.Path]] = {}
    for folder, trial in trials.items():
        name = folder.name if single else search_space.words(trial.settings)
        groups.setdefault(name, []).append(folder)
    rows = [row(folders, trials[folders[0]].settings) for folders in groups.values()]
    return sorted(rows, key=lambda row: math.inf if row["mean"] is None else -row["mean"])


def row(folders: list[pathlib.Path], settings: dict[str, str]) -> dict[str, Any]:
    """One setting: the mean of its runs, and their standard deviation if there are several."""
    runs = [read(folder, arrays=False) for folder in folders]
    seen = [100 * run.accuracy for run in runs]
    return {
        "settings": settings,
        "runs": len(runs),
        "mean": known(float(np.mean(seen))),
        "deviation": known(float(np.std(seen, ddof=1))) if len(seen) > 1 else None,
        "accuracies": list(map(known, seen)),
        "epsilon": max(run.epsilon for run in runs),
        "folders": [folder.name for folder in folders],
    }


def known(value: float) -> float | None:
    """A number, or None for NaN: a run without an accuracy."""
    return None if math.isnan(value) else value


def table(rows: list[dict[str, Any]]) -> str:
    """The results as lines of text."""
    lines = [f"{'test accuracy':>17}  {'runs':>4}  {'epsilon':>7}  settings"]
    for row in rows:
        spread = "" if row["deviation"] is None else f" ± {row['deviation']:.2f}"
        mean = "none" if row["mean"] is None else f"{row['mean']:.2f} %{spread}"
        spent, name = row["epsilon"], search_space.words(row["settings"])
        lines.append(f"{mean:>17}  {row['runs']:>4}  {upwards(spent, '.3f'):>7}  {name}")
    return "\n".join(lines)
