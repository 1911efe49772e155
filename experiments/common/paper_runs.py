# SPDX-License-Identifier: Apache-2.0
"""Runs of the papers' binaries: two epsilons, several seeds, results kept in a file.

Each row of a table is trained once per seed.  Its numbers go to a JSON file as soon as they are
known, so an interrupted table resumes; with ``--runs`` an interrupted row resumes too.  Every row
shows two epsilons: the paper's, by the paper's convention, and the sound one of what really ran.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags

import dpjax
from dpjax import accounting, data, losses, metrics, training
from dpjax._files import replace
from dpjax.accounting.rounding import upwards
from dpjax.cli import compilation_cache
from dpjax.cli.sweep.search_space import file_name
from dpjax.cli.train.classifier import train

SEEDS = flags.DEFINE_integer("seeds", 5, "Runs of each row; seeds count from 0.", 1)
SMOKE = flags.DEFINE_bool("smoke", False, "Seconds instead of hours: digits, few steps, one seed.")
OUT = flags.DEFINE_string("out", None, "JSON file of results; rows in it do not run again.")
RUNS = flags.DEFINE_string("runs", None, "Folder for checkpoints, from which a killed run resumes.")
DATA_DIR = flags.DEFINE_string("data_dir", None, "Where the data are.")
MINUTES = flags.DEFINE_float("minutes", None, "End before the first run that starts this late.", 0)

PLOT = flags.DEFINE_string("plot", None, "With --figure: the PNG file that it is drawn to.")

DELTA = 1e-5
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours: public
_STARTED = time.monotonic()
_LEFT_OUT = {"examples_per_second", "delta", "method", "private"}

Run = Callable[[int, pathlib.Path | None], Mapping[str, Any]]  # of a seed, in its folder


def define_rows() -> None:
    """Defines --rows, for binaries that call `chosen`; the others would ignore it."""
    words = "Rows whose names contain one of these words; all by default."
    flags.DEFINE_list("rows", None, words)


def chosen(row: str) -> bool:
    """Whether --rows names this row."""
    return any(word in row for word in flags.FLAGS.rows or [""])


def define_cache(folder: str | None = None) -> flags.FlagHolder[str | None]:
    """Defines --cache_dir, for binaries that compute features."""
    words = "Folder that keeps features; as secret as the data."
    return flags.DEFINE_string("cache_dir", folder, words)


class Results:
    """Numbers by row and seed, in a file that several processes may share.

    Args:
      path: The file.
      runs: Folder with the checkpoints of unfinished runs.
      mark: Prefix of row names, so that a smoke run never counts as a result.
    """

    def __init__(self, path: str | None, runs: str | None = None, mark: str = "") -> None:
        self.mark = mark
        self.path = None if path is None else pathlib.Path(path)
        self.runs = None if runs is None else pathlib.Path(runs)
        self.content: dict[str, Any] = {"rows": {}}
        self._read()

    def of(self, row: str, seed: int, run: Run) -> Mapping[str, Any]:
        """The numbers of a row and a seed, from the file or from a run."""
        row = self.mark + row
        self._read()
        if str(seed) not in self.content["rows"].get(row, {}):
            if MINUTES.value is not None and time.monotonic() - _STARTED >= 60 * MINUTES.value:
                print(f"--minutes={MINUTES.value:g} are over; {row}, seed {seed}, waits.")
                raise SystemExit(0)
            folder = None if self.runs is None else self.runs / file_name(f"{row}, seed {seed}")
            started, fresh = time.process_time(), folder is None or not folder.exists()
            found = _numbers(run(seed, folder))
            if (device := jax.devices()[0]).platform != "cpu":
                # The facts of the file tell of CPUs, on which almost all rows ran.
                found["device"] = f"{device.device_kind}, JAX {jax.__version__}"
            elif fresh:  # a resumed run took longer than this process measured
                # Of the cores, not of the wall clock: long runs share their machine.
                found["core_seconds"] = round(time.process_time() - started, 1)
            self._keep(row, seed, found)
        return self.content["rows"][row][str(seed)]

    def _read(self) -> None:
        """Reads the file again, since another process may have added rows."""
        if self.path is not None and self.path.exists():
            self.content = json.loads(self.path.read_text())
            self.content["rows"] = _numbers(self.content["rows"])

    def _keep(self, row: str, seed: int, found: Mapping[str, Any]) -> None:
        """Adds a row to the file, under a lock."""
        with _held(self.path):
            self._read()
            if "device" not in found:
                self.content |= {
                    "date": time.strftime("%Y-%m-%d"),
                    "device": f"{os.cpu_count()} x {jax.devices()[0].device_kind}",
                    "python": platform.python_version(),
                    **{name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
                }
            self.content["rows"].setdefault(row, {})[str(seed)] = found
            if self.path is not None:
                replace(self.path, written(self.content), public=True)


@contextlib.contextmanager
def _held(path: pathlib.Path | None) -> Iterator[None]:
    """Holds the lock of the file's folder, which it creates."""
    with contextlib.ExitStack() as stack:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield


def results() -> Results:
    """The results file and run folder that the flags name; each binary begins with it."""
    compilation_cache.switch_on()
    return Results(OUT.value, RUNS.value, "smoke: " if SMOKE.value else "")


def seeds() -> range:
    """The seeds of each row, by the flags."""
    return range(1 if SMOKE.value else SEEDS.value)


def written(content: Mapping[str, Any]) -> str:
    """Results as strict JSON, a line per run, floats with five digits."""
    facts = {name: value for name, value in content.items() if name != "rows"}
    rows = [
        f"    {json.dumps(row)}: {{\n"
        + ",\n".join(
            f'      "{seed}": {json.dumps(_short(run), allow_nan=False)}'
            for seed, run in runs.items()
        )
        + "\n    }"
        for row, runs in content["rows"].items()
    ]
    head = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in facts.items())
    return f'{{\n{head}  "rows": {{\n' + ",\n".join(rows) + "\n  }\n}\n"


def _short(found: Any) -> Any:
    """Rounds every float to five digits; a float that is not finite becomes null."""
    if isinstance(found, Mapping):
        return {name: _short(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_short(value) for value in found]
    if not isinstance(found, float):
        return found
    return float(f"{found:.5g}") if math.isfinite(found) else None


def _numbers(found: Any) -> Any:
    """Reads null, which stands for a number that was not finite, as NaN."""
    if isinstance(found, Mapping):
        return {name: _numbers(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_numbers(value) for value in found]
    return math.nan if found is None else found


def copied(dataset: data.Dataset) -> str:
    """A suffix for rows of images that were decoded from lossy copies; else empty."""
    return " (JPEG copy)" if "JPEG" in dataset.note else ""


def standardized(dataset: data.Dataset) -> data.Dataset:
    """Standardises colours by public moments; grey images stay in [0, 1]."""
    (x, y), (x_test, y_test) = dataset.train, dataset.test
    if x.shape[-1] != len(MEAN):
        return dataset
    x, x_test = (data.standardize(part, MEAN, DEVIATION) for part in (x, x_test))
    return dataset._replace(train=(x, y), test=(x_test, y_test))


def logits_on(model: Any, x: Any, batch_size: int = 500) -> Callable[[Any], Any]:
    """A compiled function of parameters to the logits of examples."""

    @jax.jit
    def logits(params: Any) -> Any:
        return jax.lax.map(lambda x: model.apply({"params": params}, x), x, batch_size=batch_size)

    return logits


def trained(
    dataset: data.Dataset,
    model: Any,
    mechanism: dpjax.Mechanism,
    optimizer: optax.GradientTransformation,
    seed: int,
    directory: pathlib.Path | None = None,
    *,
    loss: losses.ExampleLoss = losses.cross_entropy,
    evaluations: int = 1,
    look: Callable[[Any], Mapping[str, Any]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One run as the papers report it, of the last parameters: accuracy, and the way there.

    ``deviation`` is the standard deviation over classes of their accuracies.  ``look`` takes the
    state at each evaluation; its numbers join the log in ``way``, as do the log's private numbers,
    since these data are public.  A killed run resumes from its ``directory``.  ``more`` holds
    further arguments of `dpjax.cli.train.classifier.train`.
    """
    kept_last = optax.chain(optimizer, training.average_parameters(0.0))
    key = jax.random.key(seed)
    options: dict[str, Any] = {"initial": seed, "gradients": False, "progress": False}
    options |= {"evaluations": evaluations, "look": look, "directory": directory, **more}
    last, _, history = train(dataset, model, loss, mechanism, kept_last, key=key, **options)
    flat = [{**row, **row.get("private", {})} for row in history]
    way = [{k: v for k, v in row.items() if k not in _LEFT_OUT} for row in flat]
    x, y = jax.tree.map(jnp.asarray, dataset.test)
    logits = logits_on(model, x)(last)
    by_class = 100 * metrics.per_class_accuracy(logits, y)
    return {
        "accuracy": 100 * history[-1]["accuracy"],
        "deviation": float(jnp.nanstd(by_class)),
        "way": way if evaluations > 1 else [],
    }


def spread(numbers: Sequence[float]) -> str:
    """Mean, and the spread over seeds where there is one."""
    if not numbers:
        return "not run"
    if len(numbers) == 1:
        return f"{numbers[0]:.1f} (1 seed)"
    low, high = min(numbers), max(numbers)
    return f"{statistics.mean(numbers):.1f} ({low:.1f} to {high:.1f}, {len(numbers)} seeds)"


def epsilons(
    mechanism: dpjax.Mechanism,
    claimed: Any = None,
    delta: float = DELTA,
    convention: str = "rdp-classic",
) -> dict[str, float]:
    """The paper's figure for its own event, and the sound ones for what runs here."""
    event = mechanism.event if claimed is None else claimed
    return {
        "paper": accounting.epsilon(event, delta, convention),
        "rdp": mechanism.epsilon(delta),
        "pld": mechanism.epsilon(delta, "pld"),
    }


def figures(found: Mapping[str, float], form: str = ".4g") -> list[str]:
    """For a table: the paper's own figure as papers round, and the bounds rounded up."""
    return [f"{found['paper']:{form}}", *(upwards(found[way], form) for way in ("rdp", "pld"))]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as Markdown, in columns."""
    lines = [head, ["---"] * len(head), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )
