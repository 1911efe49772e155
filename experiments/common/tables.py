# SPDX-License-Identifier: Apache-2.0
"""The page of results, made from the JSON files in `experiments/results`.

``python -m experiments.common.tables`` writes ``experiments/results/README.md`` and the rows
between the markers in README.md. Claims stand in the packages of the papers, `claims` has the rule
of verdicts, and `experiments.epsilons` computes what rows cost.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import pathlib
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dpjax import accounting
from dpjax._rounding import upwards
from experiments import accuracy, faults, membership
from experiments.common import markdown, runs
from experiments.common.claims import (
    CHANCE,
    FEWEST,
    INFINITE,
    NOT_RUN,
    OPEN,
    REPRODUCED,
    RULE,
    VERDICTS,
    Judged,
    judged,
    line_of,
    number,
)
from experiments.common.paper import Paper

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
PACKAGES = (
    "scatternet",
    "tempered_sigmoids",
    "noise_curricula",
    "composite_loss",
    "grouped_clipping",
    "calibration",
    "finetuning",
)
EPSILONS = """\
Each epsilon is of the noise, batch size and steps that the paper prints, with Poisson batches. That
is not all that the papers ran: most shuffle batches, for which no bound as small is proved, and
Tramèr and Boneh take medians of private norms. The paper's accounting is rdp-classic (An and Shi:
rdp; Bu et al.: gdp)."""
CLAIMS = """\
The published epsilon is by the paper's accounting for what it says that it ran; rdp and pld bound
what ran here, at delta 1e-5 except for SNLI and the regressions; two epsilons belong to the two
sides. ECE and MCE are calibration errors, in per cent. Of curves the means of points are shown."""
WORDS = """\
*Reproduced*: found here too. *Baseline stronger here*: better than printed, which weakens the \
paper's lead over it. *Refuted*: shown to be false. *Not reached*: worse here, perhaps by our \
settings. *Within noise*: too close for these runs. *Seen once*: a curve of one run. *Open*: too \
few runs. *Cannot be recomputed*: the paper does not print what it depends on. *Not run*: data, \
weights or time are missing. p is that of a two-sided t-test."""
UNTESTABLE = {"bu2023": "its ViT and BERT parts cannot be tested here"}
ACCURACY = """\
Test accuracy in per cent, as mean and range over seeds, at delta 1e-5 by PLD, without outside data.
Settings were chosen on a split of the training set; the test set was read once a run. README's
table chooses among the models of a data set too, so "trials" counts the trials of all of them. With
private data the choice would cost: "best of" is the epsilon that `accounting.select_best` charges
for a geometric number of trials with this mean. Features are wavelets; the CNN has the composite
loss; "patches" are linear on wavelets joined with the features of `experiments/common/patches.py`,
a prior that a random process gives and no data; "whitened" are these after half-whitening by the
covariance that they have over that process. Times are core seconds. A row runs by
`python -m experiments.accuracy --seeds=10 --row="NAME"`; its card is in `cards`.

The trials have four gaps. The 46 short trials of CIFAR-10 on 5,000 examples, three trials of
MNIST at 1, and the probes of whitening (at most 123 on CIFAR-10, nine each on the others) left no
rows, only their number. The CNN of MNIST takes loss, network and start from the
papers, which tuned them on test data. Keys are 0 to 9 and published, so the rows are benchmarks.
The filters of "patches" have a fixed seed, so those ranges do not cover the choice of filters;
"whitened" draws new filters in each run.

Published numbers are by their own accounting, of settings that their authors chose. On MNIST and
FashionMNIST: Fu et al. (DPSUR, 2024, table 2, also for DPIS and wavelets with a CNN), and Tramèr
and Boneh (2021) themselves at 2 and 3. On CIFAR-10 DPSUR and DPIS likewise; wavelets with a CNN, De
et al. (2022) and DP-Mix as reproduced by Bao and Bindschaedler (2024, tables 6 and 11), wavelets at
3 by Fu et al.; De et al. themselves at 8; Tang et al. (DP-RandP, 2023), whose prior is learnt from
a random process. Tang et al. also train at 2, 3 and 8, and those accuracies could not be read here.

Whitened features had goals of their own, which were fixed before their rows, at 1, 2, 3 and 8: on
CIFAR-10 73.3, 76, 77.2 and 79, on FashionMNIST 90.2, 91, 91.3 and 92, on MNIST 98.5, 98.7, 98.9 and
99.1. Means of ten seeds miss these by 0.5 to 0.9 on CIFAR-10 and by 0.2 to 0.6 on FashionMNIST; on
MNIST they reach the first two, and miss the others by 0.1.

Whitened features and patches reach the targets of FashionMNIST and CIFAR-10. MNIST reaches its own
at 1 and misses the others by 0.03 to 0.2. For wavelets alone the model is the limit there: on the
split the linear model has 98.4 at epsilon 3 and 98.6 without noise, the CNN 98.5 and 98.8. The
gallery has the curves.

Rows that did not run are in [not run](#not-run)."""
UNRUN_HEAD = """\
Times are minutes of one core, by the runs of the same kind that stand here; "GPU" needs one. Each
command resumes: runs that stand in the file do not run again. A claim that is open or not run has
its command at its verdict."""
UNRUN = (  # what, core minutes, and the command or why there is none
    (
        "CIFAR-10: curves of what was chosen at 3, with and without noise",
        "15",
        '`python -m experiments.accuracy --curves --row="cifar10 whitened" --cache_dir=FOLDER '
        '{accuracy}`, likewise "cifar10 patches"',
    ),
    (
        "Patches on MNIST above epsilon 1, where the split has them below the CNN",
        "15",
        '`python -m experiments.accuracy --row="mnist patches" --seeds=5 {accuracy}`',
    ),
    (
        "Linear models on CIFAR-10's wavelets: a fifth seed at 1, and 2, 3 and 8",
        "40",
        '`python -m experiments.accuracy --row="cifar10 linear" --seeds=5 {accuracy}`',
    ),
    (
        "CNNs on FashionMNIST and CIFAR-10, where patches lead",
        "not timed",
        '`python -m experiments.accuracy --row="cifar10 cnn" --seeds=5 {accuracy}`, likewise '
        '"fashion cnn"',
    ),
    (
        "Seeds up to 9 of rows that have fewer than ten",
        "90",
        '`python -m experiments.accuracy --row="NAME" --seeds=10 {accuracy}`',
    ),
    (
        "A WideResNet-16-4 from pixels at 8 and 3",
        "GPU",
        "the script of `docs/pages/cifar10.md` with `models.WideResNet()` and batches of 4,096",
    ),
    (
        "Papernot et al.: CIFAR-10, a search over batch, filters, decay and averages",
        "GPU",
        "no rows: `experiments/tempered_sigmoids/settings.py` has batches of 4,096 at five rates",
    ),
    (
        "Papernot et al.: CIFAR-10 without privacy in batches of 256",
        "GPU",
        "`dpjax train --dataset=cifar10 --model=cifar_cnn --bound=inf --noise_multiplier=0 "
        "--batch_size=256 --epochs=60 --learning_rate=0.05 --momentum=0.9`",
    ),
    (
        "Papernot et al.: figure 2, 27 activations on CIFAR-10",
        "GPU",
        "`python -m experiments.tempered_sigmoids --figure=2 --seeds=3 {papernot2021}`",
    ),
    (
        "Losing Less: best of five on CIFAR-10, pixels and wavelets",
        "187 and 58",
        '`python -m experiments.composite_loss --row="cifar pixels cnn CE" '
        '--row="cifar pixels cnn all" --seeds=5 {losing_less2022}`, likewise "wavelets"',
    ),
    (
        "Losing Less: SSE and SSE+CE on CIFAR-10, pixels and wavelets",
        "276 and 96",
        '`python -m experiments.composite_loss --row="cifar pixels cnn SSE" '
        '--row="cifar pixels cnn SSE+CE" --seeds=3 {losing_less2022}`, likewise "wavelets"',
    ),
    (
        "Losing Less: the third run of SSE+focal on CIFAR-10, pixels and wavelets",
        "45 and 15",
        '`python -m experiments.composite_loss --row="cifar pixels cnn SSE+focal" '
        '--row="cifar wavelets cnn SSE+focal" --seeds=3 {losing_less2022}`',
    ),
    (
        "Bu et al.: seeds of the other bounds",
        "44",
        "`python -m experiments.calibration --table=bounds --seeds=3 {bu2023}`",
    ),
    (
        "Bu et al.: option 2 of algorithm 2, global clipping by estimated norms",
        "",
        "no row: `clipping.jl` clips to a bound, and has no global rule",
    ),
    (
        "SST-2: the third run of twelve rows",
        "204",
        '`python -m experiments.finetuning --row="small R" --row="large R" --seeds=3 {finetuning}`',
    ),
    (
        "Tramèr and Boneh: the third run of a CNN on shuffled wavelets",
        "28",
        '`python -m experiments.scatternet --row="cifar wavelets cnn, shuffled" --seeds=3 '
        "{tramer2021}`",
    ),
)
MOST_NAMED = 3  # rows in a command; beyond that it names a figure
HEADLINES = (  # claims of the README, one of each paper
    ("tramer2021", "CIFAR-10: linear on wavelets above a CNN on pixels"),
    ("papernot2021", "FashionMNIST: tanh above ReLU"),
    ("losing_less2022", "CIFAR-10, pixels cnn: all above CE, below 1.5"),
    ("an2021", "linear: falling above constant noise, epsilon equal by RDP as in the paper"),
    ("liu2021", "MNIST at 2.85: groups above flat at equal true epsilon"),
    ("bu2023", "MNIST: ECE with a large bound below that with a small one"),
)


def papers() -> list[Paper]:
    """All papers, in the order of the page."""
    return [importlib.import_module(f"experiments.{name}.run").PAPER for name in PACKAGES]


@functools.cache
def load(name: str) -> dict[str, Any]:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def summary(seeds: dict[str, dict[str, Any]], figure: str) -> str:
    """Mean, range and number of seeds of one row."""
    values = [number(run[figure]) for run in seeds.values() if figure in run]
    words = f"{statistics.mean(values):.4g}"
    if len(values) > 1:
        words += f" ({min(values):.4g} to {max(values):.4g})"
    return f"{words} | {len(values)}"


def judged_claims(paper: Paper) -> Iterator[tuple[Judged, list[str]]]:
    """The claims of one paper, each with its verdict and the epsilons of its sides."""
    costs = load("epsilons")[paper.name]
    rows = load(paper.name)["rows"]
    line = line_of(chances())
    for claim in paper.claims:
        result = judged(claim, rows, costs, line)
        ours = costs.get(claim.spent(result.row), ["", "", ""])
        theirs = costs.get(claim.spent(result.other), ["", "", ""])
        yield result, [against(a, b) for a, b in zip(ours, theirs, strict=True)]


@functools.cache
def chances() -> list[float]:
    """The p-values of all comparisons that a test decides."""
    found = []
    for paper in papers():
        costs = load("epsilons")[paper.name]
        rows = load(paper.name)["rows"]
        for claim in paper.claims:
            verdict = judged(claim, rows, costs).verdict
            if verdict.chance is not None:
                found.append(verdict.chance)
    return found


def tests_in_words() -> str:
    """How many tests there are, and where their line is."""
    line = line_of(chances())
    beyond = sum(chance <= line for chance in chances())
    between = sum(line < chance <= CHANCE for chance in chances())
    return (
        f"Of {len(chances())} t-tests {beyond} are beyond chance: the line of Benjamini and "
        f"Hochberg at {CHANCE:g} is at p = {line:.3f}. Between it and {CHANCE:g} are {between}, "
        "which are *within noise*."
    )


def command_of(paper: Paper, result: Judged) -> str:
    """The command that runs what a claim lacks; empty if it has no rows or lacks none."""
    claim = result.claim
    ran = load(paper.name)["rows"]
    fewest = claim.best or FEWEST
    keys = dict.fromkeys((*claim.rows, *claim.than))
    missing = [key for key in keys if key not in ran]
    if result.verdict.word == OPEN:
        judged_by = [key for key in (result.row, result.other) if key is not None]
        missing = [key for key in judged_by if len(ran[key]) < fewest]
    if not missing:
        return ""
    rows = " ".join(f'--row="{key}"' for key in missing)
    if len(missing) > MOST_NAMED:
        rows = f"--figure={claim.figures[0]}"
    out = f"--out=experiments/results/{paper.name}.json"
    return f"`{paper.command} {rows} --seeds={fewest} {out}`"


def verdict_cell(paper: Paper, result: Judged) -> str:
    """The verdict, and the command that runs what it lacks."""
    words = str(result.verdict)
    if result.verdict.word not in (NOT_RUN, OPEN):
        return words
    command = command_of(paper, result)
    if not command:
        return words
    mark = "; " if result.verdict.fact else ": "
    return f"{words}{mark}{command}"


def against(ours: str, theirs: str) -> str:
    """Two epsilons, or one if the other is the same or unknown."""
    if theirs in ("", ours):
        return ours
    return f"{ours} against {theirs}"


def claim_rows(paper: Paper) -> Iterator[str]:
    """A line for each claim: published, here, three epsilons, the verdict, the row."""
    for result, epsilons in judged_claims(paper):
        if result.claim.measure != "epsilon":
            yield markdown.line(
                result.claim.system,
                f"{result.claim.published}",
                here(result),
                *epsilons,
                verdict_cell(paper, result),
                f"`{result.row}`" if result.row else "",
            )


def epsilon_rows() -> Iterator[str]:
    """A line for each printed epsilon: the epsilons by three accountants, and the verdict."""
    for paper in papers():
        authors, _, _ = paper.title.partition(":")
        for result, epsilons in judged_claims(paper):
            claim = result.claim
            if claim.measure == "epsilon":
                words = f"{authors}, {claim.system}"
                yield markdown.line(words, f"{claim.published}", *epsilons, str(result.verdict))


def here(result: Judged) -> str:
    """The numbers that ran: one, or two that are compared."""
    digits = 1
    if callable(result.claim.measure):
        digits = 2
    elif result.claim.measure in ("mse", "nll"):
        digits = 3
    if not result.ours:
        return ""
    words = spread(result.ours, digits)
    if result.theirs:
        words += f" against {spread(result.theirs, digits)}"
    return words


def spread(numbers: list[float], digits: int) -> str:
    """The mean of numbers, their range, and how many they are."""
    mean = f"{statistics.mean(numbers):.{digits}f}"
    if len(numbers) == 1:
        return f"{mean} (1)"
    low = f"{min(numbers):.{digits}f}"
    high = f"{max(numbers):.{digits}f}"
    return f"{mean} ({low} to {high}; {len(numbers)})"


def verdicts() -> str:
    """How many claims have each verdict."""
    groups: dict[str, list[Judged]] = {}
    for paper in papers():
        for result, _ in judged_claims(paper):
            words = "other printed numbers"
            if result.claim.measure == "epsilon":
                words = "printed epsilons, bounded with Poisson batches"
            elif result.claim.own:
                words = "comparisons of this repository"
            elif result.claim.compares:
                words = "comparisons and theorems of the papers"
            groups.setdefault(words, []).append(result)
    sentences = [
        f"Of {len(results)} {words}: {counted(results)}." for words, results in groups.items()
    ]
    return " ".join(sentences)


def counted(results: Iterable[Judged]) -> str:
    """How many results have each verdict."""
    verdicts = [result.verdict for result in results]
    count = Counter(verdict.word for verdict in verdicts)
    infinite = sum(verdict.word == REPRODUCED and INFINITE in verdict.fact for verdict in verdicts)
    parts = {word: f"{count[word]} {word}" for word in VERDICTS if count[word]}
    if infinite:
        parts[REPRODUCED] += f" ({infinite} of them {INFINITE})"
    return ", ".join(parts.values())


def rows_of(paper: str) -> Iterator[str]:
    """A line for each row that ran."""
    for name, seeds in sorted(load(paper)["rows"].items()):
        for figure in ("accuracy", "mse"):
            if all(figure in run for run in seeds.values()):
                yield f"| {name} | {summary(seeds, figure)} |"
                break


def unrun_rows() -> Iterator[str]:
    """A line for each part that did not run, with its core minutes and its command."""
    names = [path.stem for path in RESULTS.glob("*.json")]
    files = {name: f"--out=experiments/results/{name}.json" for name in names}
    for what, minutes, command in UNRUN:
        yield markdown.line(what, minutes, command.format(**files))


def few_runs(paper: Paper) -> Iterator[str]:
    """A line for each row of a paper with fewer runs than a claim needs."""
    ran = load(paper.name)["rows"]
    for key in paper.rows:
        count = len(ran.get(key, {}))
        if count < FEWEST:
            yield markdown.line(key, str(count))


def allocation_rows() -> Iterator[str]:
    """Epsilon of random allocation, with a bound from below, Poisson batches and Monte Carlo."""
    for row in load("allocation")["rows"]:
        bins, epochs, z = row["row"]
        yield markdown.line(
            f"{bins}, {epochs}, {z:g}",
            f"{row['epsilon']:.4f}",
            f"{row['below']:.4f}",
            f"{row['poisson']:.4f}",
            *(f"{value:.3f} ± {error:.3f}" for value, error in row["monte_carlo"]),
        )


SIDES = ("plain JAX", "dpjax", "jax_privacy", "Opacus", "PyTorch, plain")


def sides(workload: Mapping[str, Any]) -> dict[str, Any]:
    """The contestants of one model that a table shows, Opacus in its fastest mode."""
    ran = {who: figure for who, figure in workload["contestants"].items() if "median_ms" in figure}
    modes = [figure for who, figure in ran.items() if who.startswith("opacus")]
    return {
        "plain JAX": ran["plain"],
        "dpjax": ran["dpjax auto"],
        "jax_privacy": ran.get("jax_privacy"),
        "Opacus": min(modes, key=lambda figure: figure["median_ms"], default=None),
        "PyTorch, plain": ran.get("torch plain"),
    }


def digits(value: float) -> str:
    """Three digits, without powers of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def step_tables(name: str) -> str:
    """Time and memory of a step of plain JAX, dpjax and the peers, one row for each model."""
    times = []
    memory = []
    for model, workload in load(name)["workloads"].items():
        row = f"{model}, batch {workload['batch_size']:,}"
        found = sides(workload).values()
        times.append(markdown.line(row, *(time_cell(figure) for figure in found)))
        memory.append(markdown.line(row, *(memory_cell(figure) for figure in found)))
    names = " | ".join(SIDES)
    time_table = markdown.table(f"| ms | {names} |", times)
    memory_table = markdown.table(f"| MiB | {names} |", memory)
    return f"{time_table}\n\n{memory_table}"


def time_cell(figure: Mapping[str, Any] | None) -> str:
    """Milliseconds, and in brackets their ratio to plain JAX."""
    if figure is None:
        return "-"
    return f"{digits(figure['median_ms'])} ({digits(figure['ratio'])})"


def memory_cell(figure: Mapping[str, Any] | None) -> str:
    """MiB that are planned, or at the peak."""
    if figure is None:
        return "-"
    count = figure.get("planned_bytes", figure.get("peak_bytes"))
    return "-" if count is None else mib(count)


def frozen_rows() -> Iterator[str]:
    """A first step with frozen weights as an argument, and as constants, one row per size."""
    for size, row in load("frozen")["rows"].items():
        argument = row["argument"]
        closure = row["closure"]
        yield markdown.line(
            size,
            f"{argument['first_s']:.1f} s, {mib(argument['bytes'])}",
            f"{closure['first_s']:.1f} s, {mib(closure['bytes'])}",
            f"{argument['folder']:,}",
            f"{closure['folder']:,}",
            f"{row['split']['MiB of a device']:,.0f}",
        )


def planned_rows() -> Iterator[str]:
    """XLA's plans for steps of decoders, and the private one over the plain one."""
    for name, row in load("llm_bench")["planned"].items():
        plain = row["plain"]
        private = row["dpjax auto"]
        temporaries = private["temporary_bytes"] / plain["temporary_bytes"]
        all_bytes = private["bytes"] / plain["bytes"]
        yield markdown.line(
            name,
            *(f"{mib(plan['temporary_bytes'])} ({mib(plan['bytes'])})" for plan in row.values()),
            f"{temporaries:.2f} ({all_bytes:.2f})",
        )


def decoder_rows() -> Iterator[str]:
    """Speed and memory of each decoder and contestant on a GPU, or why there is none."""
    for name, row in load("llm_bench")["rows"].items():
        plain = row["plain"].get("step_s")
        for who, found in row.items():
            if "refused" in found:
                yield markdown.line(name, who, found["refused"], "", "", "")
                continue
            gibibytes = found.get("planned_bytes", found.get("peak_bytes")) / 2**30
            yield markdown.line(
                name,
                who,
                f"{found['tokens_s']:,.0f}",
                f"{found['step_s'] / plain:.2f}" if plain else "",
                f"{gibibytes:.1f}",
                f"{found['first_s']:.0f}",
            )


def mib(count: float) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:,.0f}"


def strategy_rows() -> Iterator[str]:
    """Error, seconds and their ratio of both libraries, one row per search."""
    for name, row in load("strategies")["rows"].items():
        ours = row["dpjax"]
        theirs = row["jax_privacy"]
        # A search that was stopped, "> 300 s", takes longer.
        stopped = "seconds" not in theirs
        seconds = float(theirs["refused"].split()[1]) if stopped else theirs["seconds"]
        ratio = seconds / ours["seconds"]
        words = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}"
        if stopped:
            words = f"> {words}"
        yield markdown.line(name, *search_cells(ours), *search_cells(theirs), words)


def search_cells(found: Mapping[str, Any]) -> list[str]:
    """Error and seconds of a search, or why it has none."""
    if "refused" in found:
        return [found["refused"], ""]
    return [f"{found['error']:.5f}", f"{found['seconds']:.2f}"]


def method_rows(methods: tuple[str, str, str], number: str) -> Iterator[str]:
    """Accuracy and one number of three methods, one row per data set and epsilon."""
    rows = load("correlated")["rows"]
    settings = []
    for row in rows:
        words, _, epsilon = row.partition(" at epsilon ")
        dataset, method = words.split()
        if method == methods[1]:
            settings.append((dataset, float(epsilon), epsilon))
    for dataset, _, epsilon in sorted(settings):
        cells = []
        for method in methods:
            seeds = list(rows.get(f"{dataset} {method} at epsilon {epsilon}", {}).values())
            if seeds:
                accuracies = [run["accuracy"] for run in seeds]
                cells += [spread(accuracies, 1), f"{seeds[0][number]:.3g}"]
            else:
                cells += ["not run", ""]
        yield markdown.line(dataset, epsilon, *cells)


TITLES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR-10"}
PUBLISHED = {  # test accuracies at epsilon 1, 2, 3 and 8, without outside data
    "mnist": {
        "DPSUR": (97.9, 98.7, 98.9, 0),
        "DPIS": (97.8, 98.5, 98.6, 0),
        "wavelets": (97.8, 98.4, 98.3, 0),
        "Tramèr and Boneh": (0, 98.5, 98.7, 0),
    },
    "fashion_mnist": {
        "DPSUR": (88.4, 89.3, 89.7, 0),
        "DPIS": (86.3, 88.2, 88.8, 0),
        "wavelets": (85.5, 88.0, 89.0, 0),
        "Tramèr and Boneh": (0, 0, 89.7, 0),
    },
    "cifar10": {
        "DPSUR": (64.4, 69.4, 70.8, 0),
        "DPIS": (63.2, 67.9, 69.6, 0),
        "wavelets": (60.9, 67.0, 69.4, 72.4),
        "De et al., reproduced": (56.8, 62.9, 0, 78.7),
        "De et al.": (0, 0, 0, 81.4),
        "DP-Mix": (57.2, 0, 0, 78.5),
        "DP-RandP": (72.3, 0, 0, 0),
    },
}


def best_table() -> str:
    """The accuracies of the README, and how many seeds and trials they took."""
    shown = {
        (title, epsilon): chosen_row(dataset, epsilon)
        for dataset, title in TITLES.items()
        for epsilon in accuracy.EPSILONS
    }
    rows = load("accuracy")["rows"]
    lines = []
    for dataset, title in TITLES.items():
        cells = []
        for place, epsilon in enumerate(accuracy.EPSILONS):
            seeds = rows.get(shown[title, epsilon], {})
            here = [run["accuracy"] for run in seeds.values()]
            known, carried = published_at(dataset, place)
            cells.append(compared(here, known, carried))
        lines.append(markdown.line(title, *cells))
    trials = [f"{trials_on(dataset)} on {title}" for dataset, title in TITLES.items()]
    fewest = min(len(rows.get(name, {})) for name in shown.values())
    note = f"Means of at least {fewest} seeds. Trials: {', '.join(trials)}."
    head = "| here; best published | epsilon 1 | 2 | 3 | 8 |"
    return markdown.table(head, [*lines, "", note])


def compared(here: Sequence[float], known: float, carried: bool) -> str:
    """An accuracy next to the best published one; the leader is bold.

    A ``carried`` number was published at a smaller epsilon. To exceed it is not a lead at this one.
    """
    theirs = f"{known:.1f}"
    if not here:
        return f"not run; {theirs}"
    ours = f"{statistics.mean(here):.1f}"
    lead = float(ours) - float(theirs)
    if lead > 0 and not carried:
        ours = f"**{ours}**"
    if lead < 0:
        theirs = f"**{theirs}**"
    if carried:
        theirs = f"at least {theirs}"
    return f"{ours}; {theirs}"


def published_at(dataset: str, place: int) -> tuple[float, bool]:
    """The best published accuracy, and whether only a smaller epsilon has it.

    A model that is private at an epsilon is private at every larger one.
    """
    best = [max(of[at] for of in PUBLISHED[dataset].values()) for at in range(place + 1)]
    known = max(best)
    return known, known > best[place]


def chosen_row(dataset: str, epsilon: float) -> str:
    """The row of the model that was best on the split, of models with three runs or more."""
    rows = load("accuracy")["rows"]
    names = [accuracy.named(dataset, model, epsilon) for model in accuracy.MODELS]
    complete = [name for name in names if len(rows.get(name, {})) >= FEWEST]
    return max(complete, key=on_split, default="")


def trials_on(dataset: str) -> int:
    """How many trials chose models and settings of a data set."""
    mark = f"split: {dataset.removesuffix('_mnist')} "
    kept = sum(name.startswith(mark) for name in load("accuracy")["rows"])
    return kept + sum(count for (of, _), count in accuracy.EARLIER.items() if of == dataset)


def best_of(name: str, trials: int) -> float:
    """The epsilon of a row as the best of this many trials of its cost, in the mean."""
    path = RESULTS / "cards" / f"{name.replace(' ', '_')}.json"
    facts = json.loads(path.read_text())["mechanism"]
    ((rate, _),) = facts["sampling"]["rates"]
    ((multiplier, steps),) = facts["multiplier_and_steps"]
    event = accounting.subsampled_gaussian(multiplier, sampling_rate=rate, steps=steps)
    return accounting.select_best(event, runs.DELTA, runs=trials).epsilon_best


def on_split(name: str) -> float:
    """The accuracy on the split that chose the settings of a row; rows at 2 took those at 3."""
    prefix = f"split: {name.replace('epsilon 2', 'epsilon 3')}:"
    rows = load("accuracy")["rows"]
    return max(seeds["0"]["accuracy"] for row, seeds in rows.items() if row.startswith(prefix))


def accuracy_rows() -> Iterator[str]:
    """A line for each data set, model and epsilon: here, its search, and published numbers."""
    rows = load("accuracy")["rows"]
    for dataset, model in itertools.product(accuracy.TARGETS, accuracy.MODELS):
        for place, epsilon in enumerate(accuracy.EPSILONS):
            name = accuracy.named(dataset, model, epsilon)
            target = f"{accuracy.TARGETS[dataset][place]:g}"
            published = ", ".join(
                f"{who} {numbers[place]}"
                for who, numbers in PUBLISHED[dataset].items()
                if numbers[place]
            )
            seeds = list(rows.get(name, {}).values())
            if not seeds:
                yield markdown.line(name, "not run", target, "", "", "", "", "", published)
                continue
            first = seeds[0]
            seconds = [run["core_seconds"] for run in seeds if "core_seconds" in run]
            trials = trials_on(dataset)
            _, _, settings = first["recipe"].partition(": ")
            yield markdown.line(
                name,
                spread([run["accuracy"] for run in seeds], 2),
                target,
                upwards(first["epsilon"], ".4g"),
                str(trials),
                upwards(best_of(name, trials), ".2g"),
                f"{statistics.median(seconds):.0f} s",
                settings,
                published,
            )


def audit_rows() -> Iterator[str]:
    """Lower bounds and claims, one row per algorithm."""
    for name, found in load("audits")["rows"].items():
        step = found["step"]
        yield markdown.line(name, step["measured"], audit_cells(step), audit_cells(found["run"]))


def audit_cells(audit: Mapping[str, Any]) -> str:
    """A bound, rounded down, and a claim, rounded up: rounding refutes nothing."""
    bound = math.floor(1000 * audit["bound"]) / 1000
    claimed = math.ceil(1000 * audit["claimed"]) / 1000
    return f"{bound:.3f} | {claimed:.3f}"


def optimizer_rows() -> Iterator[str]:
    """How many of Optax's optimizers run on private means, and each of the others."""
    rows = load("optimizers")["rows"]
    counts = [
        str(sum(row[way] == "runs" for row in rows.values())) for way in ("optax", "dpsgd", "chain")
    ]
    yield f"| run, of {len(rows)} | {' | '.join(counts)} | |"
    for name, row in rows.items():
        errors = [outcome for outcome in row.values() if outcome != "runs"]
        if errors:
            # The error is printed as code, since it may hold the signs of a table or of HTML.
            error = errors[0].translate(str.maketrans("|`", "/'"))
            cells = ["runs" if outcome == "runs" else "refused" for outcome in row.values()]
            yield markdown.line(name, *cells, f"`{error:.150}`")


def zoo_rows() -> Iterator[str]:
    """The cost and the disagreement of each model of the zoo."""
    for name, found in load("zoo")["models"].items():
        yield markdown.line(
            name,
            f"{found['parameters']:,}",
            f"{found['plain_ms']:.3g}",
            f"{found['private_ms']:.3g}",
            f"{found['ratio']:.2f}",
            f"{found['disagreement']:.1e}",
        )


def page() -> str:
    """The page of results."""
    sections = [
        *head_of_page(),
        *papers_of_page(),
        *accuracies_of_page(),
        *unrun_of_page(),
        *noise_of_page(),
        *cost_of_page(),
        *audits_of_page(),
    ]
    return "\n\n".join(sections) + "\n"


def head_of_page() -> list[str]:
    """The verdicts, their rule, and the printed epsilons."""
    return [
        "# Results",
        "Made by `python -m experiments.common.tables` from the JSON files in\n"
        "`experiments/results`, which also hold date, versions and hardware. Accuracies are test\n"
        "accuracies in per cent (mse: mean squared error), as mean and range over seeds. Rows that"
        "\nare missing were not run.",
        "## Verdicts",
        verdicts(),
        tests_in_words(),
        RULE,
        "## Printed epsilons",
        EPSILONS,
        markdown.table(
            "| epsilon | printed | the paper's accounting | rdp | pld | verdict |", epsilon_rows()
        ),
    ]


def papers_of_page() -> list[str]:
    """The claims and the rows of each paper."""
    head = (
        "| system | published | here (range; seeds) | epsilon, the paper's | rdp | pld | verdict "
        "| row |"
    )
    parts = ["## Other claims of the papers", CLAIMS]
    for paper in papers():
        parts.append(f"### {paper.title}")
        if paper.note:
            parts.append(paper.note)
        parts.append(markdown.table(head, claim_rows(paper)))
    parts.append("## All rows")
    for paper in papers():
        rows = markdown.table("| row | mean (range) | seeds |", rows_of(paper.name))
        parts += [f"### {paper.title}: rows", rows]
    return parts


def accuracies_of_page() -> list[str]:
    """The best accuracies, and the time of a step."""
    return [
        "## The best accuracy at a true epsilon",
        ACCURACY,
        markdown.table(
            "| row | test accuracy | target | true epsilon | trials | best of | time of a run "
            "| settings | published |",
            accuracy_rows(),
        ),
        "## One step, forward to update, in milliseconds on two CPU cores",
        step_tables("steps"),
        "Medians of alternated rounds in one run, by\n"
        '`make bench-peers ARGS="--rounds 15 --seconds 8 --host_devices 2"`.',
    ]


def unrun_of_page() -> list[str]:
    """What did not run, with the commands."""
    head = "| not run | core minutes | command |"
    parts = ["## Not run", UNRUN_HEAD, markdown.table(head, unrun_rows())]
    for paper in papers():
        rows = [*few_runs(paper)]
        if rows:
            command = f'{paper.command} --row="ROW" --seeds={FEWEST}'
            parts.append(f"### {paper.title}: rows with fewer than {FEWEST} runs")
            parts.append(f"`{command} --out=experiments/results/{paper.name}.json` runs one.")
            parts.append(markdown.table("| row | runs |", rows))
    return parts


def noise_of_page() -> list[str]:
    """Correlated noise, batches of epochs, and strategies."""
    return [
        "## DP-SGD beside correlated noise, at equal epsilon",
        "Linear models on wavelets: accuracy, and the error that noise leaves in a parameter, in\n"
        "clipping bounds; by `python -m experiments.correlated --seeds=3`. Epsilon by PLD at 1e-5.",
        markdown.table(
            "| data | epsilon | Poisson, fresh noise | error | 16 bands, cyclic Poisson | error "
            "| buffered, balls in bins | error |",
            method_rows(("poisson", "banded", "buffered"), "error"),
        ),
        "## Epochs at equal epsilon",
        "Linear models on wavelets, 15 epochs of batches of 1,024 with fresh noise: accuracy, and\n"
        "the noise multiplier; by `python -m experiments.correlated --seeds=5`. Epsilon by PLD at\n"
        "1e-5, of shuffled batches for zero-out neighbours, without amplification.",
        markdown.table(
            "| data | epsilon | Poisson | noise | random allocation | noise | shuffled | noise |",
            method_rows(("poisson", "allocation", "shuffled"), "noise_multiplier"),
        ),
        "## Epsilon of random allocation at delta 1e-5",
        markdown.table(
            "| bins, epochs, multiplier | PLD | at least | Poisson | Monte Carlo, with against "
            "without | reversed |",
            allocation_rows(),
        ),
        "The bound from below is that of `dpjax verify`; errors of Monte Carlo are one standard\n"
        "deviation. `make bench BENCH=allocation`.",
        "## Strategies of correlated noise",
        "Root mean squared error of prefix sums at multiplier 1, and seconds of the search, one\n"
        "after the other on two cores that a dozen other programs shared: ratios mean more than\n"
        "seconds. Some searches of jax_privacy were stopped. `make bench-peers BENCH=strategies`.",
        markdown.table("| | dpjax | s | jax_privacy | s | ratio |", strategy_rows()),
    ]


def cost_of_page() -> list[str]:
    """The zoo, frozen weights, decoders, and a GPU."""
    ratios = [found["ratio"] for found in load("zoo")["models"].values()]
    return [
        "## Models of many kinds: the private sum beside a plain gradient",
        "CPU time in milliseconds of JAX's gradient of the mean loss and of the clipped sum, and\n"
        "the relative difference from the definition; by `make bench BENCH=zoo`. Ratio: median\n"
        f"{statistics.median(ratios):.2f}, largest {max(ratios):.2f}.",
        markdown.table(
            "| model | parameters | plain | private | ratio | disagreement |", zoo_rows()
        ),
        "## Frozen weights as an argument, and as constants of the program",
        "Time and rise of memory in a first step; bytes of a run's folder; and what each of four\n"
        "devices holds of them on a mesh `data:2,model:2`, all by `make bench BENCH=frozen`.",
        markdown.table(
            "| frozen | argument, MiB | closure, MiB | folder, argument | folder, closure "
            "| MiB of a device |",
            frozen_rows(),
        ),
        "## Memory of long texts and large vocabularies",
        "MiB that XLA plans on a CPU for a step of a decoder of two layers with tied embeddings,\n"
        "batch 4: temporaries, and in brackets with arguments and results. By\n"
        "`make bench BENCH=llm`.",
        markdown.table(
            "| decoder | plain JAX | dpjax | dpjax, `vmap` | dpjax over plain |", planned_rows()
        ),
        "## Decoders on a GPU",
        "Texts of 512 tokens, random weights. A machine with a GPU fills this table in nine\n"
        "minutes, without a network: "
        '`make bench-peers BENCH=llm ARGS="--out experiments/results/llm_bench.json"`.',
        markdown.table(
            "| decoder | contestant | tokens a second | step over plain | GiB | first step, s |",
            decoder_rows(),
        ),
        "## One step on an H100",
        step_tables("h100"),
        f"Milliseconds, and in brackets over plain JAX, with JAX {load('h100')['jax']}, "
        f"{load('h100')['note']}.",
    ]


def audits_of_page() -> list[str]:
    """Audits, attacks, faults, and Optax's optimizers."""
    audits = load("audits")
    above = sum(audit["refutes"] for row in audits["rows"].values() for audit in row.values())
    return [
        f"## Audits: lower bounds on epsilon at delta {audits['delta']:g}",
        markdown.table(
            "| | one step | epsilon above | claimed | a run: epsilon above | claimed |",
            audit_rows(),
        ),
        f"{above} of {2 * len(audits['rows'])} bounds exceed their claims. The bound of a step has"
        "\na confidence of 99.9 % (with jl, mu is the median over projections), that of a run 95 %."
        f"\nBy `{audits['command']}`.",
        "## Membership inference on finished models",
        "AUROC, and members found by the share of others that are taken for members, with limits\n"
        "of 95 %, beside the most that the claim allows. By `python -m experiments.membership`.",
        runs.table(membership.HEADS, [*membership.cells(load("membership")["rows"])]),
        "## Wrong mechanisms: core seconds until they are found, and accusations of right twins",
        faults.tables(load("faults")["rows"])["faults"],
        "By `python -m experiments.faults --out=experiments/results/faults.json`.",
        "## Optax's optimizers on private means",
        "Two steps each, by `make bench BENCH=optimizers`: in Optax itself, through `dpjax.dpsgd`,"
        "\nand behind `mechanism.private` under `testing.assert_private`. Rows that are missing run"
        "\nin all three.",
        markdown.table(
            "| optimizer | Optax itself | `dpsgd` | chain | the first error |", optimizer_rows()
        ),
    ]


def readme_rows() -> str:
    """A line for each paper: its first claim, and how many of all its claims hold."""
    known = {paper.name: paper for paper in papers()}
    lines = []
    for name, system in HEADLINES:
        paper = known[name]
        results = list(judged_claims(paper))
        headline = next(pair for pair in results if pair[0].claim.system == system)
        result, (_, _, pld) = headline
        authors, _, _ = paper.title.partition(":")
        of_paper = [result for result, _ in results if not result.claim.own]
        lines.append(
            markdown.line(
                authors,
                system,
                here(result),
                pld,
                str(result.verdict),
                "; ".join(filter(None, [counted(of_paper), UNTESTABLE.get(name, "")])),
            )
        )
    head = "| paper | claim | here (range; seeds) | true epsilon | verdict | all of its claims |"
    return markdown.table(head, [*lines, "", f"{verdicts()} {WORDS}"])


def main(argv: list[str]) -> None:
    """Writes the page of results, and the tables of README.md and of the page on speed."""
    runs.only_flags(argv)
    (RESULTS / "README.md").write_text(page())
    readme = {"accuracies": best_table(), "results": readme_rows()}
    markdown.rewrite(str(ROOT / "README.md"), readme)
    speed = {"steps": step_tables("steps"), "h100": step_tables("h100")}
    markdown.rewrite(str(ROOT / "docs" / "pages" / "speed.md"), speed)


if __name__ == "__main__":
    runs.start(main)
