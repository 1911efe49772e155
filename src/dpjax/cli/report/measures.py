# SPDX-License-Identifier: Apache-2.0
"""The measures of test examples in a log: their names on pages, and what a guess reaches.

A guess always answers with the most frequent class, or with the mean of the targets.
"""

from __future__ import annotations

import math

import numpy as np

from dpjax.cli.report.load_run import SavedRun, number

MEASURES = {
    "accuracy": "test accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "average_precision": "average precision",
    "rmse": "test RMSE",
    "mae": "test MAE",
    "r2": "R2",
}
"""The measures that `dpjax train` logs, and their names on pages and in tables."""
PER_CENT = ("accuracy", "balanced_accuracy")
_IN_UNITS = ("rmse", "mae")  # of the target


def shown(measure: str, value: float, digits: int = 1) -> str:
    """The value of one of `MEASURES`; ``digits`` are for a per cent."""
    if measure in PER_CENT:
        return f"{100 * value:.{digits}f} %"
    if measure in _IN_UNITS:
        return f"{value:.4g}"
    return f"{value:.3f}"


def measured(run: SavedRun) -> dict[str, float]:
    """The `MEASURES` of the last row; balanced accuracy only if classes differ in size."""
    last = {name: number(run.rows[-1].get(name)) for name in MEASURES}
    guess = guessed(run)
    # They differ if the largest class has half as many examples again as an average one.
    differ = guess.get("accuracy", 0) > 1.5 * guess.get("balanced_accuracy", 1)
    if not differ:
        del last["balanced_accuracy"]
    return {name: value for name, value in last.items() if not math.isnan(value)}


def guessed(run: SavedRun) -> dict[str, float]:
    """The measures of a guess; empty if the test labels are unknown."""
    answers = run.evaluation or {}
    if "targets" in answers:
        errors = answers["targets"] - answers["targets"].mean()
        return {"rmse": float(errors.std()), "mae": float(np.abs(errors).mean()), "r2": 0.0}
    labels = answers.get("labels", np.empty(0))
    if not labels.size:
        return {}
    _, counts = np.unique(labels, return_counts=True)
    return {
        # Rounded as `SavedRun.accuracy` is, with which it is compared.
        "accuracy": round(float(counts.max() / labels.size), 6),
        "balanced_accuracy": 1 / counts.size,
        "auroc": 0.5,
        "average_precision": float(np.mean(labels == 1)),
    }


def answer_of_guess(measure: str) -> str:
    """The answer that a guess always gives, in words."""
    if measure == "rmse":
        return "mean of the test targets"
    return "most frequent class"


def first_and_guess(run: SavedRun) -> str:
    """Compares the first measure with that of a guess, in words."""
    name, value = next(iter(measured(run).items()), ("accuracy", math.nan))
    guess = guessed(run).get(name)
    if guess is None:
        return ""
    better = value > guess
    if name == "rmse":
        better = value < guess
    always = "Always" if better else "The model is no better than always"
    return f"{always} guessing the {answer_of_guess(name)}: {shown(name, guess)}."


def others_and_guess(run: SavedRun) -> str:
    """The measures after the first one, each with that of a guess, in words."""
    guess = guessed(run)
    # A run without measures has no others either; the pair is only there to be the first one.
    _, *others = measured(run).items() or [("", 0.0)]
    words = []
    for name, value in others:
        words.append(f"{MEASURES[name]} {shown(name, value)}")
        if name in guess:
            words[-1] += f" (a guess: {shown(name, guess[name])})"
    return ", ".join(words)
