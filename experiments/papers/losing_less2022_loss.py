# SPDX-License-Identifier: Apache-2.0
"""A loss made for clipping and noise: the tables and figures of losing_less_2022.

  result    ahead of cross-entropy early, as claimed: from pixels below epsilon 1.5, MNIST 97.4
            against 96.2 %, FashionMNIST 84.1 against 80.6; from wavelets below 2, 98.4 against
            97.9, 88.3 against 87.9.  At the end, 98.2 against 98.1 and 86.4 against 86.0 from
            pixels, 98.7 against 98.4 and 88.5 against 88.7 (level) from wavelets, of 3 seeds.
            CIFAR-10: from pixels 62.9 against 58.9 % (paper: 63.2, 59.8), from wavelets 66.7
            against 64.3 below 2 (66.8, 64.5), and 69.0 against 68.7 at the end
            SSE + focal alone, two seeds: 62.1 from pixels; 66.4 and 68.9 from wavelets.  The focal
            loss itself adds nothing at the end: 86.1 against 86.6 of SSE + CE on FashionMNIST
            beta from 1 to 191 hardly matters: 85.9 to 86.4 on FashionMNIST's pixels, one seed;
            gamma 0 to 2 has 86.6 to 86.7, and gamma 10 85.1
  time      two to four minutes of a CPU core a run; CIFAR-10 48 from pixels, 16 from wavelets
  command   python experiments/papers/losing_less2022_loss.py --figure=3 --plot=curves.png
  figures   experiments/results/losing_less2022.json; --table=5 and --figure=1 to 15 for others

All but the loss is Tramèr and Boneh's: networks, rates, batches, noise and features come from
tramer2021_scatternet, with its flags --rows and --cache_dir.  The CNN on grey pixels pads by 2, as
their code does; there it pads by "SAME".  The paper prints the best of five
runs, which is above their mean; figures here are means over seeds.  Losses of the ablation keep
the threshold and gamma of the whole, and SGD without privacy takes rate 0.1, since the paper
prints neither.  Figures of norms, angles, sharpness and confusion show training examples of
seed 0 and are not private.  The paper's curves end at epsilon 3 if private moments of wavelets are
paid for on CIFAR-10 and not on MNIST (3.13 with them); its epsilons here follow that convention.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from absl import app, flags, logging

from dpjax import clipping, data, models

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import losing_less2022_pictures as pictures
import losing_less2022_settings as settings
import tramer2021_scatternet as baseline
from common import epoch_probes, multi_panel_figure, paper_runs
from losing_less2022_pictures import THREE
from losing_less2022_settings import ROWS, UNPRIVATE, Choice, claimed

from dpjax.cli.flag_checks import only_flags

_TABLE = flags.DEFINE_enum("table", None, ["5"], "All settings (tables 5, 6) and their costs.")

_FIGURE = flags.DEFINE_enum("figure", None, list(pictures.FIGURES)[1:], "Which figure.")
_LOSS = flags.DEFINE_multi_string(
    "loss", None, "A loss in place of the figure's, such as 'all, 1/beta'; several may be given."
)
_AS_PRINTED = flags.DEFINE_bool(
    "as_printed", False, "Wavelet networks of tables 3 and 4, which the published code changes."
)


class Job:
    """A row, its data, and its runs."""

    def __init__(self, name: str, row: baseline.Row, results: paper_runs.Results) -> None:
        # The networks on pixels, tables 1 and 2, do not differ from the code.
        self.as_printed = _AS_PRINTED.value and row.model in ("scatter_cnn", "scatter_cifar_cnn")
        self.name, self.row, self.results = name, row, results
        self.title = name + ", as printed" * self.as_printed
        self.dataset = data.load(row.dataset, paper_runs.DATA_DIR.value)
        self.mechanism = baseline.mechanism_of(row, self.dataset.examples)
        self.ready = functools.lru_cache(maxsize=1)(
            lambda seed: baseline.prepared(row, self.dataset, jax.random.key(seed))
        )

    def found(self, kinds: Sequence[str]) -> epoch_probes.Found:
        """The results of all kinds and seeds; a seed's features serve all kinds."""
        seeds = paper_runs.seeds()
        found: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in kinds}
        for seed, kind in itertools.product(seeds, kinds):
            words = f"{self.title}{paper_runs.copied(self.dataset)} {kind}"
            run = functools.partial(self.run, kind)
            found[kind].append(self.results.of(words, seed, run))
        return found

    def run(self, kind: str, seed: int, folder: Any) -> Mapping[str, Any]:
        """One training run; `Watch` measures the first seed."""
        row, dataset = self.row, self.ready(seed)
        loss = settings.by_name(kind, settings.CHOSEN.get(self.name, Choice()))
        mechanism, moves = self.mechanism, optax.sgd(row.rate, momentum=0.9)
        if kind == UNPRIVATE:
            rule = clipping.flat(math.inf)
            mechanism = dataclasses.replace(mechanism, clipping=rule, noise_multiplier=0.0)
            moves = optax.sgd(0.1, momentum=0.9)
        options: Any = {"padding": 2} if row.model == "tempered_cnn" else {}
        options |= {"as_printed": True} if self.as_printed else {}
        model = models.by_name(row.model, dataset.classes or 10, torch_init=True, **options)
        watched = seed == 0 and not row.scaled and kind in THREE
        epoch = mechanism.steps // row.epochs
        parts = (model, loss, mechanism.clipping, dataset, epoch)
        return paper_runs.trained(
            dataset,
            model,
            mechanism,
            moves,
            seed,
            folder,
            loss=loss,
            evaluations=row.epochs,
            look=epoch_probes.Watch(*parts) if watched else None,
            per_step=(lambda step: step // epoch) if epoch_probes.asks_epoch(loss) else None,
        )

    def early(self) -> tuple[float, int]:
        """A small epsilon that the paper names, and the epochs within it."""
        return settings.early(self.name, self.row, self.dataset.examples)

    def lines(self, found: epoch_probes.Found) -> Iterator[list[str]]:
        """Rows of the table that is printed with every figure."""
        costs = paper_runs.epsilons(self.mechanism, claimed(self.row, self.dataset.examples))
        most, epochs = self.early()
        for kind, runs in found.items():
            free = kind == UNPRIVATE
            early = [100 * each["way"][max(0, epochs - 1)]["accuracy"] for each in runs]
            yield [
                self.title + paper_runs.copied(self.dataset),
                kind,
                paper_runs.spread([each["accuracy"] for each in runs]),
                "" if free or not epochs else f"{paper_runs.spread(early)} below {most:g}",
                settings.PRINTED.get((self.name, kind), ""),
                *(["inf"] * 3 if free else paper_runs.figures(costs, ".3f")),
            ]


COSTS = ["epsilon, paper's", "rdp", "pld"]


def table_5() -> str:
    """Tables 5 and 6: settings, and two epsilons for each."""
    lines = []
    for name, row in ROWS.items():
        size = settings.EXAMPLES[row.dataset]
        costs = paper_runs.epsilons(baseline.mechanism_of(row, size), claimed(row, size))
        facts = (row.batch, row.rate, row.epochs, row.noise, *settings.CHOSEN[name])
        figures = paper_runs.figures(costs, ".4f")
        lines.append([name, *map(str, facts), *figures])
    head = ["row", "batch", "rate", "epochs", "noise", *Choice._fields, *COSTS]
    return paper_runs.table(head, lines)


def show(figure: str) -> str:
    """Runs the rows of a figure, draws it, and returns its accuracies."""
    drawing, results = pictures.FIGURES[figure], paper_runs.results()
    rows, kinds, titles = ROWS, list(_LOSS.value or drawing.lines), drawing.titles
    if paper_runs.SMOKE.value:  # one row of digits, and the first of each swept family
        rows, titles = baseline.SMALL, [re.sub(r"\w+ (\w+) cnn", r"digits \1", titles[0])]
        kinds = [next(of) for _, of in itertools.groupby(kinds, lambda k: k.rstrip(".0123456789"))]
    lines, drawn = [], []
    for name, row in rows.items():
        if name in titles and any(w in name for w in flags.FLAGS.rows or [""]):
            job = Job(name, row, results)
            found = job.found(kinds)
            lines += job.lines(found)
            drawn += drawing.panels(job.title, found)
    if paper_runs.PLOT.value:
        multi_panel_figure.draw(paper_runs.PLOT.value, drawn)
    return paper_runs.table(["row", "loss", "here", "here, early", "paper", *COSTS], lines)


def main(argv: list[str]) -> None:
    only_flags(argv)
    logging.set_verbosity(logging.WARNING)
    print(table_5() if _TABLE.value else show(_FIGURE.value or ""))
    print(
        "The paper's epsilon is of shuffled batches accounted as Poisson, by the older conversion, "
        "without the thresholds of wavelet features; rdp and pld are bounds for all that runs here."
    )


if __name__ == "__main__":
    app.run(main)
