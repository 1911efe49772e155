# SPDX-License-Identifier: Apache-2.0
"""A run, built again from the folder that `dpjax train` wrote, before and after training."""

import copy
import json
import pathlib
from typing import Any, NamedTuple

from absl import app, flags

import dpjax
from dpjax.cli.flag_sets.train import FLAGS
from dpjax.cli.report.load_run import SavedRun, read
from dpjax.cli.train import inputs
from dpjax.cli.train.command import Planned, plan
from dpjax.cli.train.evaluation import first_parameters
from dpjax.cli.train.run_files import MOMENTS
from dpjax.training import released_params


class Rebuilt(NamedTuple):
    """A run and its plan, with the parameters before and after its training."""

    run: SavedRun
    planned: Planned
    dataset: dpjax.data.Dataset
    first: Any
    released: Any


def rebuild(folder: pathlib.Path, data_dir: str | None = None) -> Rebuilt:
    """Reads a run's folder and builds the run again; no folder records ``data_dir``."""
    run = read(folder, arrays=False)
    if run.card is None or "flags" not in (run.config or {}):
        raise app.UsageError(f"{folder}: expected the folder of a finished `dpjax train`.")
    given = flags_of(run)
    given["data_dir"].value = data_dir
    planned = plan(given)
    # Canaries have labels, and a sampler of persons does not draw a single row.
    if planned.dataset.classes is None or planned.dataset.owners is not None:
        raise app.UsageError(f"{folder}: expected a classifier whose unit is one example.")
    if json.loads(json.dumps(planned.mechanism.facts)) != run.mechanism:
        raise app.UsageError(f"{folder}: expected the mechanism of run.json. Restore its data.")
    dataset = inputs.with_features(given, planned.dataset)
    moments = None
    if planned.normalization is not None:
        # The run's answers are read, because a second query spends privacy again.
        moments = inputs.read_moments(folder / MOMENTS, planned.normalization)
    dataset = inputs.with_scale(given, dataset, moments)
    first = first_parameters(planned.model, dataset, planned.earlier)
    return Rebuilt(run, planned, dataset, first, released_params(folder, first))


def flags_of(run: SavedRun) -> flags.FlagValues:
    """The flags of the run, by value: a command line needs quotes around lists in options."""
    given = copy.deepcopy(FLAGS)
    given(["train"])
    for name, value in (run.config or {})["flags"].items():
        if name in given:
            given[name].value = value
    # No file records which flags were typed, and with them how the number of steps was chosen.
    given["steps"].value = sum(steps for _, steps in run.mechanism["multiplier_and_steps"])
    # The folder has all values, planned or given.
    for name in ("steps", "batch_size", "clipping", "optimizer", "average"):
        given[name].present = 1
    return given
