# SPDX-License-Identifier: Apache-2.0
"""Rows of a paper: trained once a seed, kept in a JSON file, shown with the printed numbers.

A row's numbers go to the file as soon as they are known, so an interrupted table resumes; with
``--runs`` an interrupted row resumes too. Each row shows the paper's epsilon, by the paper's
convention, and the sound ones of what ran.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags, logging

import dpjax
from dpjax import accounting, clipping, data, losses, metrics, sampling
from dpjax._rounding import upwards
from experiments.common import markdown
from experiments.common.paper import Paper

SEEDS = flags.DEFINE_integer("seeds", 5, "Runs of each row; seeds count from 0.", 1)
SMOKE = flags.DEFINE_bool("smoke", False, "Seconds instead of hours: digits, few steps, one seed.")
OUT = flags.DEFINE_string("out", None, "JSON file of results; rows in it do not run again.")
RUNS = flags.DEFINE_string("runs", None, "Folder for checkpoints, from which a killed run resumes.")
DATA_DIR = flags.DEFINE_string("data_dir", None, "Where the data are.")
CACHE_DIR = flags.DEFINE_string("cache_dir", None, "Folder for features; as secret as the data.")
TABLE = flags.DEFINE_string("table", None, "Which table; by default the first.")
FIGURE = flags.DEFINE_string("figure", None, "Which figure, in place of a table.")
ROW = flags.DEFINE_multi_string("row", None, "Rows with this in their names, or with this name.")
PAGE = flags.DEFINE_string("page", None, "Of a guide: run nothing, write its tables into this.")

DELTA = 1e-5
MEAN = (0.485, 0.456, 0.406)  # of ImageNet's colours, which are public
DEVIATION = (0.229, 0.224, 0.225)
_LEFT_OUT = {"examples_per_second", "delta", "method", "private"}

Run = Callable[[int, pathlib.Path | None], Mapping[str, Any]]  # takes a seed and its folder


class Results:
    """Numbers by row and seed, in a file that is written after each run.

    Args:
      path: The file.
      runs: Folder with the checkpoints of unfinished runs.
      mark: Prefix of row names; a smoke run never counts as a result.
    """

    def __init__(self, path: str | None, runs: str | None = None, mark: str = "") -> None:
        self.mark = mark
        self.path = None if path is None else pathlib.Path(path)
        self.runs = None if runs is None else pathlib.Path(runs)
        self.content: dict[str, Any] = {"rows": {}}
        if self.path is not None and self.path.exists():
            self.content = _with_nan(json.loads(self.path.read_text()))

    def of(self, row: str, seed: int, run: Run) -> Mapping[str, Any]:
        """The numbers of a row and a seed, from the file or from a run."""
        row = self.mark + row
        seeds = self.content["rows"].setdefault(row, {})
        if str(seed) not in seeds:
            seeds[str(seed)] = self._measured(row, seed, run)
            self._write()
        return seeds[str(seed)]

    def _measured(self, row: str, seed: int, run: Run) -> dict[str, Any]:
        """The numbers of a run, with its core seconds or its device."""
        folder = None
        if self.runs is not None:
            folder = self.runs / re.sub(r"[^\w=.]+", "-", f"{row}, seed {seed}")
        resumes = folder is not None and folder.exists()
        started = time.process_time()
        numbers = dict(run(seed, folder))
        device = jax.devices()[0]
        if device.platform != "cpu":
            numbers["device"] = f"{device.device_kind}, JAX {jax.__version__}"
        elif not resumes:  # a resumed run took longer than this process measured
            # Seconds of the cores do not depend on other programs, and the wall clock does.
            numbers["core_seconds"] = round(time.process_time() - started, 1)
            self.content["date"] = time.strftime("%Y-%m-%d")
            self.content["device"] = f"{os.cpu_count()} x {device.device_kind}"
            self.content["python"] = platform.python_version()
            for package in ("jax", "flax", "optax"):
                self.content[package] = importlib.metadata.version(package)
        return numbers

    def _write(self) -> None:
        """Replaces the file by one with all numbers so far."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(written(self.content))
            temporary.replace(self.path)


def results() -> Results:
    """The results file and run folder that the flags name."""
    mark = "smoke: " if SMOKE.value else ""
    return Results(OUT.value, RUNS.value, mark)


def seeds() -> range:
    """The seeds of each row."""
    return range(1 if SMOKE.value else SEEDS.value)


def written(content: Mapping[str, Any]) -> str:
    """Results as strict JSON, a line per run, floats with five digits."""
    facts = [
        f"  {json.dumps(name)}: {json.dumps(value)},"
        for name, value in content.items()
        if name != "rows"
    ]
    rows = []
    for row, seeds in content["rows"].items():
        runs = [
            f'      "{seed}": {json.dumps(_short(run), allow_nan=False)}'
            for seed, run in seeds.items()
        ]
        lines = ",\n".join(runs)
        rows.append(f"    {json.dumps(row)}: {{\n{lines}\n    }}")
    return "\n".join(["{", *facts, '  "rows": {', ",\n".join(rows), "  }", "}", ""])


def _short(value: Any) -> Any:
    """Floats with five digits, without a point if whole; one that is not finite becomes null."""
    if isinstance(value, Mapping):
        return {name: _short(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_short(inner) for inner in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return json.loads(f"{value:.5g}")


def _with_nan(value: Any) -> Any:
    """Reads null, which stands for a number that was not finite, as NaN."""
    if isinstance(value, Mapping):
        return {name: _with_nan(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_nan(inner) for inner in value]
    return math.nan if value is None else value


def loaded(name: str) -> data.Dataset:
    """A data set from the folder that the flags name."""
    return data.load(name, DATA_DIR.value)


def standardized(dataset: data.Dataset) -> data.Dataset:
    """Standardises colours by public moments; grey images stay in [0, 1]."""
    x, y = dataset.train
    x_test, y_test = dataset.test
    if x.shape[-1] != len(MEAN):
        return dataset
    x = data.standardize(x, MEAN, DEVIATION)
    x_test = data.standardize(x_test, MEAN, DEVIATION)
    return dataset._replace(train=(x, y), test=(x_test, y_test))


def logits_on(model: Any, x: Any, batch_size: int = 500) -> Callable[[Any], Any]:
    """A compiled function of parameters to the logits of examples."""

    @jax.jit
    def logits(params: Any) -> Any:
        def of_example(x: Any) -> Any:
            return model.apply({"params": params}, x)

        return jax.lax.map(of_example, x, batch_size=batch_size)

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
    **options: Any,
) -> dict[str, Any]:
    """One run as the papers report it: the accuracy of the last parameters, and the log.

    ``deviation`` is the standard deviation over classes of their accuracies.  ``look`` takes the
    state at each evaluation; its numbers join the log in ``way``, as do the log's private numbers,
    since these data are public.  A killed run resumes from its ``directory``.  ``options`` are
    further arguments of `dpjax.dpsgd`.
    """
    x, y = jax.tree.map(jnp.asarray, dataset.test)
    params = jax.jit(model.init)(jax.random.key(seed), x[0])["params"]
    logits = logits_on(model, x)

    def evaluate(state: Any) -> dict[str, Any]:
        outputs = logits(state.params)
        row = {"accuracy": metrics.accuracy(outputs, y), "nll": metrics.nll(outputs, y)}
        if look is not None:
            row.update(look(state))
        return row

    algorithm = dpjax.dpsgd(losses.of(model, loss), optimizer, mechanism, dataset.train, **options)
    state = algorithm.init(params, key=jax.random.key(seed))
    state, history = dpjax.fit(
        algorithm,
        state,
        evaluate=evaluate,
        evaluate_every=-(-mechanism.steps // evaluations) or None,
        directory=directory,
        progress=False,
    )
    of_classes = metrics.per_class_accuracy(logits(state.params), y)
    return {
        "accuracy": 100 * history[-1]["accuracy"],
        "deviation": float(jnp.nanstd(100 * of_classes)),
        "way": [_public(row) for row in history] if evaluations > 1 else [],
    }


def _public(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the log with its private numbers, and without numbers that results do not need."""
    flat = {**row, **row.get("private", {})}
    return {name: value for name, value in flat.items() if name not in _LEFT_OUT}


@functools.cache
def calibrated(examples: int, batch: int, steps: int, epsilon: float, bound: float) -> Any:
    """Poisson batches with the noise of an epsilon by PLD; no noise and no bound at infinity."""
    planned = dpjax.Mechanism(
        sampling=sampling.poisson(examples, batch),
        clipping=clipping.flat(bound),
        noise_multiplier=1.0,
        steps=steps,
    )
    if math.isinf(epsilon):
        unbounded = clipping.flat(math.inf)
        return dataclasses.replace(planned, clipping=unbounded, noise_multiplier=0.0)
    return planned.calibrate(epsilon, DELTA, "pld")


def spread(numbers: Sequence[float]) -> str:
    """The mean, with the range of several seeds."""
    if not numbers:
        return "not run"
    if len(numbers) == 1:
        return f"{numbers[0]:.1f} (1 seed)"
    low = min(numbers)
    high = max(numbers)
    return f"{statistics.mean(numbers):.1f} ({low:.1f} to {high:.1f}, {len(numbers)} seeds)"


def epsilons(
    mechanism: dpjax.Mechanism, claimed: Any, convention: str = "rdp-classic", delta: float = DELTA
) -> list[str]:
    """The paper's figure for its own event, as papers round; bounds by RDP and PLD, rounded up."""
    paper = accounting.epsilon(claimed, delta, convention)
    rdp = mechanism.epsilon(delta)
    pld = mechanism.epsilon(delta, "pld")
    return [f"{paper:.4g}", upwards(rdp, ".4g"), upwards(pld, ".4g")]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, from the cells of its head and rows."""
    rule = ["---"] * len(head)
    return "\n".join(markdown.line(*cells) for cells in (head, rule, *rows))


def named(row: str) -> bool:
    """Whether --row names this row; without the flag, all rows are named."""
    if not ROW.value:
        return True
    return any(word in row for word in ROW.value)


def start(main: Callable[[list[str]], None], *shared: str) -> None:
    """Runs a binary; --help lists its own flags and these shared ones, given by their names."""
    flags.disclaim_key_flags()  # absl lists what the calling module declares
    for name in shared:
        flags.declare_key_flag(name)
    app.run(main)


def guide(
    name: str, tables: Callable[..., dict[str, str]], main: Callable[[Results], None], *shared: str
) -> None:
    """Runs the rows of a guide; with --page writes its tables, of the committed results."""

    def run(argv: list[str]) -> None:
        only_flags(argv)
        logging.set_verbosity(logging.ERROR)
        if PAGE.value is None:
            main(results())
        else:
            committed = pathlib.Path(__file__).parents[1] / "results" / f"{name}.json"
            rows = json.loads(committed.read_text())["rows"]
            markdown.rewrite(PAGE.value, tables(rows))

    start(run, "seeds", "smoke", "out", "page", *shared)


def only_flags(argv: Sequence[str]) -> None:
    """Refuses words that no flag reads."""
    if argv[1:]:
        raise app.UsageError(f"{argv[1]!r}: expected flags alone; see --help.")
    logging.set_verbosity(logging.WARNING)


def chosen(paper: Paper) -> list[str]:
    """The keys of the rows that the flags name."""
    if SMOKE.value:
        return list(paper.small)
    if ROW.value:
        exact = [key for key in paper.rows if key in ROW.value]
        return exact or [key for key in paper.rows if named(key)]
    if FIGURE.value:
        return paper.figures[FIGURE.value].row_keys()
    if TABLE.value:
        return list(paper.tables[TABLE.value])
    first_table = next(iter(paper.tables.values()))
    return list(first_table)


HEAD = ("row", "here", "ECE %", "paper", "epsilon, paper's", "rdp", "pld")


def measured(done: Sequence[Mapping[str, Any]]) -> list[str]:
    """Accuracy, or the squared error of a regression; and calibration where it was measured."""
    if "accuracy" in done[0]:
        numbers = spread([run["accuracy"] for run in done])
    elif "mse" in done[0]:
        numbers = spread([run["mse"] for run in done])
    else:
        numbers = str(dict(done[0]))
    errors = [100 * run["ece"] for run in done if "ece" in run]
    if not errors:
        return [numbers, ""]
    return [numbers, spread(errors)]


def has_no_training(run: Mapping[str, Any]) -> bool:
    """Whether a run counts networks, or solves the problems of a theorem."""
    return "networks" in run or "problems" in run


def cost(paper: Paper, row: Any, run: Mapping[str, Any]) -> list[str]:
    """The epsilons of a row; epsilons that a run records are not computed again."""
    if has_no_training(run):
        return ["", "", ""]
    if "pld" not in run:
        return epsilons(*paper.epsilons(row))
    rdp = ""
    # RDP has no bound for norms from projections: None in a run, NaN from the file.
    if run["rdp"] and not math.isnan(run["rdp"]):
        rdp = upwards(run["rdp"], ".4g")
    return ["", rdp, upwards(run["pld"], ".4g")]


def show(paper: Paper) -> str:
    """Runs rows as far as they are missing, and returns them as a table."""
    file = results()
    rows = paper.small if SMOKE.value else paper.rows
    lines = []
    for key in chosen(paper):
        row = rows[key]
        done = [file.of(key, seed, partial(paper.train, row)) for seed in seeds()]
        printed = f"{paper.printed[key]:g}" if key in paper.printed else ""
        lines.append([key, *measured(done), printed, *cost(paper, row, done[0])])
        print(*lines[-1], sep="  ", flush=True)
    return table(HEAD, lines)


def main(paper: Paper, *own: str) -> None:
    """Runs a paper; ``own`` are the flags of its package."""

    def run(argv: list[str]) -> None:
        known = {"table": paper.tables, "figure": paper.figures}
        for name, values in known.items():
            given = flags.FLAGS[name].value
            if given is not None and given not in values:
                raise app.UsageError(f"--{name}={given}: expected one of {', '.join(values)}.")
        only_flags(argv)
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser("~/.cache/dpjax"))
        print(f"\n{show(paper)}\n{paper.note}".rstrip())

    shared = ("seeds", "smoke", "out", "runs", "data_dir", "cache_dir")
    start(run, *shared, "table", "figure", "row", *own)
