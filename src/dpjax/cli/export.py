# SPDX-License-Identifier: Apache-2.0
"""`dpjax export`: the released model of a run as a program of JAX, which needs no dpjax.

Parameters, and the noised scale of features, are constants of the program. Both were paid for by
the run, so the file may be released as its parameters may.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import export

from dpjax import scattering, training
from dpjax._files import read_json, replace
from dpjax.cli.flag_checks import require
from dpjax.cli.train import build, inputs, run_files

_PLATFORMS = ("cpu", "cuda", "tpu")


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Writes the program of the run that the command line names."""
    if len(argv) != 2:
        raise app.UsageError("expected one run: dpjax export runs/demo")
    require("dpjax export", "flatbuffers")  # `jax.export` writes with it
    folder = pathlib.Path(argv[1])
    path = pathlib.Path(given.out or folder / "model.jax")
    try:
        content = exported(folder)
    except (ImportError, LookupError, OSError, TypeError, ValueError) as error:
        raise app.UsageError(f"{folder}: {error}") from error
    replace(path, content, public=True)  # other users may read the file
    print(f"Wrote {path}, {len(content):,} bytes; `dpjax export --help` shows how to read it.")


def exported(folder: pathlib.Path) -> bytes:
    """The program of the run in a folder, for any number of rows, serialized by `jax.export`.

    It takes rows, ``[rows, *shape of an input]``, and returns the outputs of the network.
    """
    config = read_json(folder / "config.json")
    if "inputs" not in config:
        raise ValueError("config.json has no shape of an input. Train with this dpjax.")
    trained = run_files.flags_of(config)  # the flags of the training
    # The noised mean and variance by which features are scaled; None if the run released none.
    moments = inputs.released_moments(folder / run_files.MOMENTS, trained)
    output_count = config["inputs"]["outputs"]
    model = build.build_model(trained, output_count)

    def network_input(row: Any) -> Any:
        """The row itself, or its features on the run's scale."""
        if trained.features == "none":
            return row
        row_features = scattering.scatter(row[None])  # of a batch of one row
        return inputs.scale(trained, row_features, moments)[0]

    shape = tuple(config["inputs"]["shape"])
    dtype = jnp.dtype(config["inputs"]["dtype"])
    network_input_shape = jax.eval_shape(network_input, jax.ShapeDtypeStruct(shape, dtype))
    param_shapes = jax.eval_shape(model.init, jax.random.key(0), network_input_shape)["params"]
    params = training.released_params(folder, param_shapes)

    def outputs(row: Any) -> Any:
        """The outputs of the network for one row."""
        return model.apply({"params": params}, network_input(row))

    (row_count,) = export.symbolic_shape("rows")  # unknown until the program is called
    rows_shape = jax.ShapeDtypeStruct((row_count, *shape), dtype)
    # `vmap` hides the unknown number of rows from the network.
    program = export.export(jax.jit(jax.vmap(outputs)), platforms=_PLATFORMS)(rows_shape)
    return bytes(program.serialize())
