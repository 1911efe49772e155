# SPDX-License-Identifier: Apache-2.0
"""The files that `dpjax train` writes into a run's folder, where `dpjax.fit` writes its own."""

from __future__ import annotations

import copy
import json
import pathlib
import platform
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import jax
from absl import flags

from dpjax._files import replace
from dpjax._versions import version
from dpjax.cli.flag_sets.train import FLAGS
from dpjax.cli.report.figures import PLOTS
from dpjax.training import forget

MOMENTS = "moments.npz"

_WRITTEN = ["config.json", "evaluation.npz", "diagnostics.npz", "audit.json", "audit.html", MOMENTS]
_WRITTEN += ["model.jax"]
_WRITTEN += ["report.html", *[f"figures/{plot.name}.png" for plot in PLOTS]]


def describe(folder: pathlib.Path, typed: Mapping[str, Any], **facts: Any) -> None:
    """Writes `config.json`, from which the command can be run and compared elsewhere."""
    names = ("dpjax", "jax", "flax", "optax", "dp-accounting", "numpy")
    device = jax.devices()[0]
    config = {
        "command": f"{sys.argv[0]} {shlex.join(sys.argv[1:])}".strip(),
        "flags": dict(typed),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "hardware": {"device": device.device_kind, "devices": jax.device_count()},
        **facts,
    }
    # JSON has no dates; a declared date is read from a word too.
    text = json.dumps(config, indent=2, default=str)
    replace(folder / "config.json", f"{text}\n", public=True)


def flags_of(config: Mapping[str, Any]) -> flags.FlagValues:
    """The flags of a run, by value: a command line needs quotes around lists in options."""
    if "flags" not in config:
        raise ValueError("config.json holds no flags; expected the folder of a `dpjax train`.")
    given = copy.deepcopy(FLAGS)
    given(["train"])
    for name, value in config["flags"].items():
        if name in given:
            given[name].value = value
    return given


def prepare(folder: pathlib.Path, *, overwrite: bool) -> None:
    """Makes the folder of the run; deletes the run that is there, if asked to."""
    folder.mkdir(parents=True, exist_ok=True)
    if overwrite:
        forget(folder)
        for name in _WRITTEN:
            (folder / name).unlink(missing_ok=True)
