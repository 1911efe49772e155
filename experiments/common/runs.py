# SPDX-License-Identifier: Apache-2.0
"""Rows of a paper: trained once a seed, kept in a JSON file, shown beside what was printed.

A row's numbers go to the file as soon as they are known, so an interrupted table resumes; with
``--runs`` an interrupted row resumes too. Each row shows the paper's epsilon, by the paper's
convention, and the sound ones of what ran.
"""

from __future__ import annotations

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
from dpjax.accounting.rounding import upwards
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
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours: public
_LEFT_OUT = {"examples_per_second", "delta", "method", "private"}

Run = Callable[[int, pathlib.Path | None], Mapping[str, Any]]  # of a seed, in its folder


class Results:
    """Numbers by row and seed, in a file that is written after each run.

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
        if self.path is not None and self.path.exists():
            self.content = _with_nan(json.loads(self.path.read_text()))

    def of(self, row: str, seed: int, run: Run) -> Mapping[str, Any]:
        """The numbers of a row and a seed, from the file or from a run."""
        row = self.mark + row
        if str(seed) not in self.content["rows"].get(row, {}):
            name = re.sub(r"[^\w=.]+", "-", f"{row}, seed {seed}")
            folder = None if self.runs is None else self.runs / name
            started, fresh = time.process_time(), folder is None or not folder.exists()
            numbers = dict(run(seed, folder))
            if (device := jax.devices()[0]).platform != "cpu":
                numbers["device"] = f"{device.device_kind}, JAX {jax.__version__}"
            elif fresh:  # a resumed run took longer than this process measured
                # Of the cores, not of the wall clock: long runs share their machine.
                numbers["core_seconds"] = round(time.process_time() - started, 1)
                self.content |= {
                    "date": time.strftime("%Y-%m-%d"),
                    "device": f"{os.cpu_count()} x {device.device_kind}",
                    "python": platform.python_version(),
                    **{name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
                }
            self.content["rows"].setdefault(row, {})[str(seed)] = numbers
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                temporary = self.path.with_suffix(".tmp")
                temporary.write_text(written(self.content))
                temporary.replace(self.path)
        return self.content["rows"][row][str(seed)]


def results() -> Results:
    """The results file and run folder that the flags name."""
    return Results(OUT.value, RUNS.value, "smoke: " if SMOKE.value else "")


def seeds() -> range:
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


def _short(value: Any) -> Any:
    """Floats with five digits, without a point if whole; one that is not finite becomes null."""
    if isinstance(value, Mapping):
        return {name: _short(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_short(inner) for inner in value]
    if not isinstance(value, float):
        return value
    return json.loads(f"{value:.5g}") if math.isfinite(value) else None


def _with_nan(value: Any) -> Any:
    """Reads null, which stands for a number that was not finite, as NaN."""
    if isinstance(value, Mapping):
        return {name: _with_nan(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_nan(inner) for inner in value]
    return math.nan if value is None else value


def loaded(name: str) -> data.Dataset:
    return data.load(name, DATA_DIR.value)


def standardized(dataset: data.Dataset) -> data.Dataset:
    """Standardises colours by public moments; grey images stay in [0, 1]."""
    (x, y), (x_test, y_test) = dataset.train, dataset.test
    if x.shape[-1] != len(MEAN):
        return dataset
    x, x_test = (data.standardize(images, MEAN, DEVIATION) for images in (x, x_test))
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
    **options: Any,
) -> dict[str, Any]:
    """One run as the papers report it, of the last parameters: accuracy, and the way there.

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
        return row if look is None else {**row, **look(state)}

    algorithm = dpjax.dpsgd(losses.of(model, loss), optimizer, mechanism, dataset.train, **options)
    state, history = dpjax.fit(
        algorithm,
        algorithm.init(params, key=jax.random.key(seed)),
        evaluate=evaluate,
        evaluate_every=-(-mechanism.steps // evaluations) or None,
        directory=directory,
        progress=False,
    )
    flat = [{**row, **row.get("private", {})} for row in history]
    way = [{k: v for k, v in row.items() if k not in _LEFT_OUT} for row in flat]
    return {
        "accuracy": 100 * history[-1]["accuracy"],
        "deviation": float(jnp.nanstd(100 * metrics.per_class_accuracy(logits(state.params), y))),
        "way": way if evaluations > 1 else [],
    }


@functools.cache
def calibrated(examples: int, batch: int, steps: int, epsilon: float, bound: float) -> Any:
    """Poisson batches with the noise of an epsilon by PLD; no noise and no bound at infinity."""
    private = math.isfinite(epsilon)
    planned = dpjax.Mechanism(
        sampling=sampling.poisson(examples, batch),
        clipping=clipping.flat(bound if private else math.inf),
        noise_multiplier=1.0 if private else 0.0,
        steps=steps,
    )
    return planned.calibrate(epsilon, DELTA, "pld") if private else planned


def spread(numbers: Sequence[float]) -> str:
    """Mean, and the spread over seeds where there is one."""
    if not numbers:
        return "not run"
    if len(numbers) == 1:
        return f"{numbers[0]:.1f} (1 seed)"
    low, high = min(numbers), max(numbers)
    return f"{statistics.mean(numbers):.1f} ({low:.1f} to {high:.1f}, {len(numbers)} seeds)"


def epsilons(
    mechanism: dpjax.Mechanism, claimed: Any, convention: str = "rdp-classic", delta: float = DELTA
) -> list[str]:
    """The paper's figure for its own event, as papers round; bounds by RDP and PLD, rounded up."""
    paper = accounting.epsilon(claimed, delta, convention)
    bounds = (mechanism.epsilon(delta), mechanism.epsilon(delta, "pld"))
    return [f"{paper:.4g}", *(upwards(bound, ".4g") for bound in bounds)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown.line(*cells) for cells in (head, ["---"] * len(head), *rows))


def named(row: str) -> bool:
    """Whether --row names this row, as without the flag all."""
    return any(word in row for word in ROW.value or [""])


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
            kept = pathlib.Path(__file__).parents[1] / f"results/{name}.json"
            markdown.rewrite(PAGE.value, tables(json.loads(kept.read_text())["rows"]))

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
        whole = [key for key in paper.rows if key in ROW.value]
        return whole or [key for key in paper.rows if named(key)]
    if FIGURE.value:
        return paper.figures[FIGURE.value].row_keys()
    return list(paper.tables[TABLE.value or next(iter(paper.tables))])


HEAD = ("row", "here", "ECE %", "paper", "epsilon, paper's", "rdp", "pld")


def measured(done: Sequence[Mapping[str, Any]]) -> list[str]:
    """Accuracy, or the squared error of a regression; and calibration where it was measured."""
    measure = next((name for name in ("accuracy", "mse") if name in done[0]), "")
    errors = [100 * run["ece"] for run in done if "ece" in run]
    return [
        spread([run[measure] for run in done]) if measure else str(dict(done[0])),
        spread(errors) if errors else "",
    ]


def cost(paper: Paper, row: Any, run: Mapping[str, Any]) -> list[str]:
    """The epsilons of a row; epsilons that a run states itself are not computed again."""
    if "pld" in run:
        bounds = (run["rdp"], run["pld"])  # RDP has none for norms from projections
        return [
            "",
            *("" if not bound or bound != bound else upwards(bound, ".4g") for bound in bounds),
        ]
    if "networks" in run:  # counts of table 1 in `experiments.calibration`
        return ["", "", ""]
    return epsilons(*paper.epsilons(row))


def show(paper: Paper) -> str:
    """Runs rows as far as they are missing, and returns them as a table."""
    file, lines = results(), []
    for key in chosen(paper):
        row = (paper.small if SMOKE.value else paper.rows)[key]
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
