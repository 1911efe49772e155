# SPDX-License-Identifier: Apache-2.0
"""Builds a run again from the folder that `dpjax train` wrote: data, plan and parameters.

A unit of privacy is a row, or a person, who may own several rows.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

import dpjax
from dpjax.cli.flag_sets import names
from dpjax.cli.report.load_run import SavedRun, read
from dpjax.cli.train import inputs, run_files
from dpjax.cli.train.command import Planned, plan
from dpjax.cli.train.evaluation import first_parameters
from dpjax.cli.train.run_files import MOMENTS
from dpjax.training import released_params

# The flags that name files of a run.
_FILES = ("dataset", "test", "columns")


class Rebuilt(NamedTuple):
    """A run and its plan, with the parameters before and after its training."""

    run: SavedRun
    planned: Planned
    dataset: dpjax.data.Dataset
    first_params: Any
    released: Any  # parameters


def rebuild(
    folder: pathlib.Path, data_dir: str | None = None, moved_to: str | None = None
) -> Rebuilt:
    """Reads a run's folder and builds the run again: data, plan and both sets of parameters.

    ``data_dir`` is the folder of named data sets, which no run's folder records. ``moved_to`` is
    where the data file is now, if it is elsewhere.
    """
    run = read(folder, arrays=False)
    if run.card is None or "flags" not in (run.config or {}):
        raise app.UsageError(f"{folder}: expected the folder of a finished `dpjax train`.")
    given = flags_of(run)
    given["data_dir"].value = data_dir
    if moved_to is not None:
        given["dataset"].value = moved_to
    find_files(given, run.config or {})
    planned = plan(given)
    # The composite loss, the only one with `per_step`, takes the epoch. The audit of a person uses
    # the loss of all rows of the person, which takes none.
    if planned.per_step is not None and planned.dataset.owners is not None:
        raise app.UsageError(f"{folder}: --loss=composite is audited where the unit is one row.")
    # The planned mechanism differs from that of the run if the data changed. It is compared in the
    # types of JSON, in which a tuple is a list, because run.json holds the mechanism of the run.
    if json.loads(json.dumps(planned.mechanism.facts)) != run.mechanism:
        raise app.UsageError(f"{folder}: expected the mechanism of run.json. Restore its data.")
    dataset = inputs.with_features(given, planned.dataset)
    moments = None  # the private mean and variance by which features are scaled
    if planned.normalization is not None:
        # The run's answers are read, because a second query spends privacy again.
        moments = inputs.read_moments(folder / MOMENTS, planned.normalization)
    dataset = inputs.with_scale(given, dataset, moments)
    # `earlier` holds the parameters of the run that this one continued; None if there is none.
    first_params = first_parameters(planned.model, dataset, planned.earlier)
    released = released_params(folder, like=first_params)
    if dataset.owners is not None:  # the person of each row: the run protects persons
        planned, dataset = of_persons(planned, dataset)
    return Rebuilt(run, planned, dataset, first_params, released)


def flags_of(run: SavedRun) -> flags.FlagValues:
    """The flags of the run, with the number of its steps."""
    given = run_files.flags_of(run.config or {})
    # No file records which flags were typed, and with them how the number of steps was chosen.
    given["steps"].value = sum(steps for _, steps in run.mechanism["multiplier_and_steps"])
    # The folder has all values, planned or given.
    for name in ("steps", "batch_size", "clipping", "optimizer", "average"):
        given[name].present = 1
    return given


def find_files(given: flags.FlagValues, config: Mapping[str, Any]) -> None:
    """Sets the flags that name files to where these are.

    A relative path is looked up in the current folder first, and then where the run was trained.
    """
    # The folder records the declarations themselves, so their file is not needed.
    if given.columns and "declared" in config:
        given["columns"].value = config["declared"]
    trained_in = config.get("trained_in", "")
    for name in _FILES:
        value = given[name].value
        # Other values are None, the declarations, or the name of a data set.
        if not isinstance(value, str) or not names.is_file(value):
            continue
        if pathlib.Path(value).exists():
            continue
        there = pathlib.Path(trained_in, value)
        if not there.exists():
            raise app.UsageError(
                f"the run's --{name} was {value} in {trained_in or 'an unknown folder'}, and no "
                "such file is there or here. Give --dataset=FILE, or run in that folder."
            )
        given[name].value = str(there)


def of_persons(planned: Planned, dataset: dpjax.data.Dataset) -> tuple[Planned, dpjax.data.Dataset]:
    """The run in which the first ``most_rows`` rows of each person are one example.

    ``most_rows`` is the most rows of a person that a step reads. Training draws these rows at each
    step; here they are fixed, so the audit does not cover that draw. Loss, clipping, noise and
    sampling rates stay. The data become ``((x, y), mask)``, each ``[persons, most_rows, ...]``,
    with a mask that is False for padding.
    """
    most_rows = planned.mechanism.sampling.most_rows or 1  # never None for persons
    # Rows sorted by person: row order[i] of the data belongs to person sorted_owners[i], whose row
    # number numbers[i] it is, from 0.
    owners = np.asarray(dataset.owners)
    order = np.argsort(owners, kind="stable")
    sorted_owners = owners[order]
    first_of_person = np.searchsorted(sorted_owners, sorted_owners)
    numbers = np.arange(len(owners)) - first_of_person
    used = numbers < most_rows
    # The rows of each person, [persons, most_rows], with row 0 of the data as padding, and a mask
    # of the rows that are not padding.
    rows = np.zeros((dataset.units, most_rows), int)
    real = np.zeros(rows.shape, bool)
    rows[sorted_owners[used], numbers[used]] = order[used]
    real[sorted_owners[used], numbers[used]] = True
    x, y = dataset.train
    # An example of the new data is a person, so a sampler of examples draws persons. A mechanism
    # with an empty unit takes that of its sampler.
    sampler = dpjax.sampling.poisson(dataset.units, planned.mechanism.batch_size)
    mechanism = dataclasses.replace(planned.mechanism, sampling=sampler, unit="")
    stacked = dataset._replace(train=((x[rows], y[rows]), real), owners=None)
    return planned._replace(mechanism=mechanism, persons=True), stacked
