# SPDX-License-Identifier: Apache-2.0
"""`dpjax predict`: what the released model of a run answers for new rows, in their order."""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dpjax import data, features, training
from dpjax._files import read_json, replace
from dpjax.cli.flag_sets import names
from dpjax.cli.train import build, inputs
from dpjax.cli.train.evaluation import outputs_of, quantities
from dpjax.cli.train.run_files import MOMENTS, flags_of


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Writes the predictions for the rows that the command line names."""
    words = [*argv[1:]]
    if given.dataset is not None:  # in the place of the second word
        words.append(given.dataset)
    if len(words) != 2:
        raise app.UsageError("expected a run and one file of rows: dpjax predict runs/demo new.csv")
    folder = pathlib.Path(words[0])
    try:
        text = predicted(folder, words[1], given.data_dir, given.columns)
    except (ImportError, LookupError, OSError, TypeError, ValueError) as error:
        raise app.UsageError(f"{folder}: {error}") from error
    if given.out is None:
        print(text, end="")
    else:
        replace(pathlib.Path(given.out), text)
        print(f"Wrote {given.out}")


def predicted(
    folder: pathlib.Path,
    rows: str,
    data_dir: str | None = None,
    declarations: str | None = None,
) -> str:
    """The predictions of the run in a folder, as CSV, with a line for each row.

    ``rows`` is a file, or the name of a data set in ``data_dir``. ``declarations`` is the file that
    declares kind and range of each column, for a run of a table whose folder does not have them.
    """
    config = read_json(folder / "config.json")
    trained = flags_of(config)  # the flags of the training
    # A file, or the declarations themselves, which config.json holds; `Columns.read` takes both.
    declared = declarations or config.get("declared")
    if trained.columns and not declared:
        raise ValueError(
            "config.json of this earlier version does not hold the declared columns. Give the file "
            f"with which the run was trained: --columns={trained.columns}."
        )
    columns = None
    if declared:
        columns = data.Columns.read(declared, trained.unit_column)
    row_inputs = rows_of(rows, config, columns, data_dir)
    x = network_inputs(folder, trained, row_inputs)
    # The number of classes, None for a regression. An earlier version wrote only the names.
    number_of_names = len(config.get("class_names", ()))
    classes = config.get("classes", number_of_names or None)
    model = build.build_model(trained, classes or 1)  # a regression has one output
    param_shapes = jax.eval_shape(model.init, jax.random.key(0), x[0])["params"]
    outputs = outputs_of(model, training.released_params(folder, param_shapes), x)
    if classes is None:
        target_range = None if columns is None else columns.target_range
        numbers = quantities(outputs, target_range)  # in units of the target
        return written(["prediction"], [[f"{number:.6g}"] for number in numbers])
    # The keys are labels as text, because all keys of JSON are text.
    name_of = config.get("class_names") or {str(label): str(label) for label in range(classes)}
    class_names = [name_of[str(label)] for label in range(classes)]
    lines = []
    for probabilities in np.asarray(jax.nn.softmax(outputs)):  # [classes], of one row
        cells = [f"{probability:.6g}" for probability in probabilities]
        lines.append([class_names[probabilities.argmax()], *cells])
    return written(["class", *[f"probability_{name}" for name in class_names]], lines)


def rows_of(
    rows: str, config: dict[str, Any], columns: data.Columns | None, data_dir: str | None
) -> np.ndarray:
    """The inputs of the new rows, before features are computed of them."""
    if columns is not None:
        return columns.encode(rows)
    if names.is_file(rows):
        return data.load_inputs(rows, config.get("columns", ()))
    x, _ = data.load(rows, data_dir).test
    return x


def network_inputs(folder: pathlib.Path, trained: flags.FlagValues, x: Any) -> Any:
    """The inputs of the network: the rows, or their features on the run's private scale."""
    if trained.features == "none":
        return jnp.asarray(x)
    moments = inputs.released_moments(folder / MOMENTS, trained)
    return inputs.scale(trained, jnp.asarray(features.scattered(x)), moments)


def written(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    return file.getvalue()
