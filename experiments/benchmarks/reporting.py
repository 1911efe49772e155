# SPDX-License-Identifier: Apache-2.0
"""Settings, machine and results of a benchmark, printed and kept in a JSON file.

`keep` writes the file after every finished part, so an interrupted run keeps its results.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import jax
from absl import app, flags, logging


def run(
    main: Callable[[Any], None],
    smoke: str,
    rounds: int | None = None,
    out: str = "JSON file for the figures, rewritten after each part.",
) -> None:
    """Runs a benchmark with its flags, and first defines the flags that most benchmarks have.

    Args:
      main: Takes the values of the flags.
      smoke: What --smoke makes small.
      rounds: The default of --rounds; None leaves the flag out.
      out: What --out is.
    """
    flags.disclaim_key_flags()  # --help lists the flags of the benchmark's own module
    flags.DEFINE_bool("smoke", False, f"{smoke}: does it run?")
    flags.DEFINE_string("out", None, out)
    if rounds:
        flags.DEFINE_integer("rounds", rounds, "How many turns each contestant takes.", 1)

    def started(argv: list[str]) -> None:
        if argv[1:]:
            raise app.UsageError(f"{argv[1]!r}: expected flags alone; see --help.")
        main(flags.FLAGS)

    app.run(started)


def begin(packages: tuple[str, ...], **settings: Any) -> dict[str, Any]:
    """A report of its settings and the machine, printed."""
    logging.set_verbosity(logging.WARNING)  # JAX reports the accelerators it did not find
    device = jax.devices()[0]
    report = {
        **settings,
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "cpu": f"{os.cpu_count()} cores of {_processor()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }
    print("; ".join(f"{key} {value}" for key, value in report.items()), flush=True)
    return report


def keep(report: dict[str, Any], out: str | None) -> None:
    """Writes the report if there is a file for it."""
    if out:
        path = pathlib.Path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")


def chosen(
    flag: str, names: list[str], words: list[str] | None, always: tuple[str, ...] = ()
) -> list[str]:
    """The names that ``words`` select, whole or by prefix, in order; all without words."""
    if words is None:
        return names
    selected = set(always)
    for word in words:
        matches = {word} & set(names)
        if not matches:
            matches = {name for name in names if name.startswith(word)}
        if not matches:
            raise app.UsageError(f"--{flag}: {word!r}; there are {', '.join(names)}.")
        selected |= matches
    return [name for name in names if name in selected]


def _processor() -> str:
    """The name of the processor, which Linux has in a file."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.machine()
