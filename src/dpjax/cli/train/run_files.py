# SPDX-License-Identifier: Apache-2.0
"""The files that `dpjax train` writes into a run's folder, where `dpjax.fit` writes its own.

`config.json` records command, flags, versions and hardware. `digest` ties `params.msgpack` to
`run.json`. `--continue_from` accepts parameters only with that digest: without it their privacy
cost would be counted nowhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import platform
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import jax
from absl import app

from dpjax._files import read_json, replace
from dpjax._versions import version
from dpjax.cli.train.inputs import MOMENTS
from dpjax.reports.figures import PLOTS
from dpjax.training.run_folder import PRIVATE, RELEASED

WRITTEN = (*RELEASED, "config.json", "digest", "evaluation.npz")
WRITTEN += ("diagnostics.npz", "audit.json", "audit.png")
WRITTEN += ("report.html", *(f"figures/{plot.name}.png" for plot in PLOTS))


def describe(folder: pathlib.Path, flags: Mapping[str, Any], **facts: Any) -> None:
    """Writes `config.json`, with the command, the flags, versions and hardware."""
    names = ("dpjax", "jax", "flax", "optax", "dp-accounting", "numpy")
    device = jax.devices()[0]
    # Enough to run the command again elsewhere, and to see why another machine differs.
    config = {
        "command": f"{sys.argv[0]} {shlex.join(sys.argv[1:])}".strip(),
        "flags": dict(flags),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "hardware": {"device": device.device_kind, "devices": jax.device_count()},
        **facts,
    }
    replace(folder / "config.json", json.dumps(config, indent=2) + "\n", public=True)


def described(folder: pathlib.Path) -> dict[str, Any]:
    """The `config.json` of the run that is there, with ``parameters`` if that run has ended."""
    if not (folder / "run.json").exists():
        return {}  # what `dpjax.training.forget` left
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return {}
    if not _tied(folder):
        config.pop("parameters", None)
    return config


def tie(folder: pathlib.Path) -> None:
    """Writes `digest`, by which `run.json` says what the parameters cost."""
    # As private as run.json, which holds a hash of the data: with a public digest of both, anyone
    # could test a guess of all the data.
    replace(folder / "digest", _digest(folder))


def _tied(folder: pathlib.Path) -> bool:
    """Whether `run.json` says what the parameters cost."""
    # A later run in this folder may have left the parameters of the first: then run.json does not
    # say what they cost.
    with contextlib.suppress(OSError):
        return (folder / "digest").read_text() == _digest(folder)
    return False


def clear(folder: pathlib.Path, *more: str) -> None:
    """Deletes the files that `dpjax.training.forget` leaves in a run's folder."""
    for name in (*WRITTEN, *more):
        (folder / name).unlink(missing_ok=True)


def present(folder: pathlib.Path) -> list[str]:
    """The names of the run's files and folders; files of others stay unnamed."""
    names = {pathlib.Path(name).parts[0] for name in (*WRITTEN, *PRIVATE, MOMENTS)}
    return sorted(name for name in names if (folder / name).exists())


def has_released(folder: pathlib.Path, configuration: Mapping[str, Any]) -> bool:
    """Whether the run with this configuration has left parameters in the folder."""
    try:
        run = read_json(folder / "run.json")
    except (OSError, ValueError):
        return False
    # An interrupt may come before `dpjax.fit` has compared the folder's run with this one.
    same = all(run.get(name) == value for name, value in configuration.items())
    return same and (folder / "params.msgpack").exists()


def released(folder: pathlib.Path) -> bytes:
    """The parameters that a run released; refuses parameters of another run."""
    if _tied(folder):
        return (folder / "params.msgpack").read_bytes()
    if _of_a_script(folder):
        raise app.UsageError(
            f"--continue_from={folder}: a script wrote this folder by dpjax.fit, so its model, "
            "loss and data follow from no flags; expected a run of dpjax train. Continue it in a "
            "script, from the released parameters and in another folder: "
            f"dpjax.Mechanism(..., before=dpjax.training.earlier({str(folder)!r}))."
        )
    raise app.UsageError(
        f"--continue_from={folder}: expected params.msgpack, run.json and digest of one run that "
        "has ended or was stopped by Ctrl-C. Usually the run was killed before it wrote digest, or "
        "another run was started in its folder, and then nothing says whether run.json counts the "
        "cost of these parameters. Repeat the run's own command, which ends it and writes all "
        "three files."
    )


def _of_a_script(folder: pathlib.Path) -> bool:
    """Whether the run is one of `dpjax.fit` alone."""
    try:
        return "--continue_from" not in read_json(folder / "run.json")  # a flag of every run here
    except (OSError, ValueError):
        return False


def _digest(folder: pathlib.Path) -> str:
    """A hash of `run.json` and `params.msgpack` together."""
    both = ((folder / name).read_bytes() for name in ("run.json", "params.msgpack"))
    return hashlib.sha256(b"".join(both)).hexdigest()
