# SPDX-License-Identifier: Apache-2.0
"""Clipping gradients in groups: the tables and figures of grouped_gradient_clipping_2021.

  result    groups win only while their noise is undercounted; epsilon here is by PLD.  MNIST at
            rate 0.5, printed as 0.94: flat 96.4 % at 0.688, 8 groups 97.5 % at 18.55, and 95.6 %
            at 0.688 (FashionMNIST, printed as 1.81: 84.1 and 82.0 % at 1.351).  Of longer runs,
            printed as 2.85 and 2.60, flat has 97.9 and 84.9 %, 8 groups 97.6 and 83.1 %.  With the
            implied ReLU 8 groups have 96.3, 89.2 and 76.2 % at the printed rate and 96.8, 96.6 and
            81.8 % at 0.5, for 98.23, 97.05 and 86.28 in print (2.85, 0.94 and FashionMNIST's
            2.60).  CIFAR-10 at one rate, three seeds, printed as 3.19: flat 61.1 % at 2.525, 16
            groups 69.7 % at 74.16, and 57.4 % at 2.525
  time      one to ten minutes a run on a shared CPU core; 50 on CIFAR-10
  command   python experiments/papers/liu2021_grouped_clipping.py --table=rates --seeds=3
  figures   experiments/results/liu2021.json; --table=1 to 4 run one rate for all ways

With k groups, each clipped to the bound, one example moves the sum by sqrt(k) times the bound.
The paper's noise does not grow with k.  Four ways are compared:

  flat     the whole gradient clipped to the bound; noise multiplier as printed
  paper    each group clipped to the bound, the paper's noise: a larger epsilon than printed
  equal    each group clipped to bound / sqrt(k): the sensitivity and epsilon of flat
  full     each group clipped to the bound, noise sqrt(k) times as large: the epsilon of flat

A rate that suits one way does not suit another, so table "rates" has a few for each.  The paper
claims more accuracy than flat clipping at the printed epsilon; at equal epsilon that is "equal"
against "flat", each at its best rate.  On MNIST and FashionMNIST "equal" ran at 0.05, 0.15, 0.35
and 0.5, and "flat" at two or three rates from 0.05 to 0.5.  "full" adds two rates, since it is
"equal" at sqrt(k) times the rate: 0.1414 from 0.05, and 1.41 from 0.5, which is too large (93.9 %).
On CIFAR-10 it ran at 1 alone.  The text sets its network apart from tempered sigmoids, which
implies ReLU; tanh is the default here, because it is better.

Rows run the most steps within the printed epsilon by the older conversion, and for 0.94 by the
improved one.  CIFAR-10 prints batches of 256, with the noise, rate and bound of tramer2021's
batches of 1,024, which cost the printed 3.00 after its 30 epochs; these and its momentum run here.
The text has delta 1e-6 there and table 3 1e-5, which is what gives the steps here: by the same
conversion 1,625 steps cost 3.49 at 1e-6.
The CIFAR-10 row of 1,430 steps is the beginning of the run of 1,625, whose moves and noise are the
same.
Noise by "smooth sensitivity" is refused; --smooth says why.
"""

from __future__ import annotations

import itertools
import math
import pathlib
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import optax
from absl import app, flags, logging

import dpjax
from dpjax import clipping, data, models, sampling

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import liu2021_pictures as pictures
from common import multi_panel_figure, paper_runs

from dpjax.cli.flag_checks import only_flags

_TABLE = flags.DEFINE_enum(
    "table", None, ["1", "2", "3", "4", "rates"], "Which table; rates has `TRIALS`. 1 by default."
)
_FIGURE = flags.DEFINE_enum("figure", None, ["2", "3", "4"], "Loss, accuracy by step; by epsilon.")
_GROUPS = flags.DEFINE_list("groups", None, "Numbers of groups, in place of the paper's.")
_WAYS = flags.DEFINE_list("ways", ["flat", "paper", "equal", "full"], "Ways to compare.")
_EPSILONS = flags.DEFINE_list("epsilons", None, "Printed epsilons to run; all by default.")
_RATE = flags.DEFINE_float("rate", None, "Learning rate, in place of the printed one.")
_MOMENTUM = flags.DEFINE_float("momentum", None, "Momentum; 0.9 on CIFAR-10, 0 otherwise.")
_ACTIVATION = flags.DEFINE_enum("activation", "tanh", ["relu", "tanh"], "Of hidden layers.")
_DATASETS = flags.DEFINE_list("datasets", None, "Data sets of --table=rates; all by default.")
_SMOOTH = flags.DEFINE_bool("smooth", False, "Noise by smooth sensitivity; refused with a reason.")


class Setting(NamedTuple):
    """A data set's published run; steps are the most within each printed epsilon (`METHODS`)."""

    model: Any
    batch: int
    bound: float
    noise: float
    rate: float
    groups: int
    steps: Mapping[float, int]
    printed: Mapping[float, float]  # accuracy
    momentum: float = 0.0
    differs: str = ""  # from the print, for the names of rows
    evaluations: int = 20


_MED = {"model": models.TemperedCNN, "batch": 512, "bound": 1.0, "noise": 1.1, "rate": 0.05}
_MNIST = {**_MED, "batch": 256, "groups": 8}
SETTINGS = {
    "mnist": Setting(
        **_MNIST, steps={2.85: 12_646, 0.94: 1_324}, printed={2.85: 98.23, 0.94: 97.05}
    ),
    "fashion_mnist": Setting(
        **_MNIST, steps={2.60: 10_546, 1.81: 4_901}, printed={2.60: 86.28, 1.81: 84.76}
    ),
    "cifar10": Setting(
        models.CIFARDenseCNN, 1024, 0.1, 1.54, 1.0, 16,
        # 1,438 steps are within 3.00; an evaluation of the longer run falls on step 1,430.
        {3.19: 1_625, 3.00: 1_430}, {3.19: 67.11, 3.00: 65.91}, 0.9, ", batch 1024", 25,
    ),
    "pathmnist": Setting(**_MED, groups=8, steps={4.27: 15_337}, printed={4.27: 59.10}),
    "organamnist": Setting(**_MED, groups=8, steps={7.65: 6_437}, printed={7.65: 48.22}),
    "organcmnist": Setting(**_MED, groups=8, steps={10.0: 1_388}, printed={10.0: 36.91}),
    "organsmnist": Setting(**_MED, groups=8, steps={12.5: 2_433}, printed={12.5: 35.93}),
    "digits": Setting(models.MLP, 256, 0.5, 3.0, 0.4, 4, {3.0: 81}, {}, momentum=0.9),
}  # fmt: skip
# Accuracies that are printed for flat clipping at an epsilon of the groups.
FLAT = {("cifar10", 3.19): 60.65, ("pathmnist", 4.27): 52.78, ("organamnist", 7.65): 39.88}
FLAT |= {("organcmnist", 10.0): 33.11, ("organsmnist", 12.5): 29.51}
METHODS = {0.94: "rdp"}  # conversion of a printed epsilon; others take the older one
TABLES = {"1": ["mnist"], "2": ["fashion_mnist"], "3": ["cifar10"]}
TABLES["4"] = ["pathmnist", "organamnist", "organcmnist", "organsmnist"]


class Trial(NamedTuple):
    """Rows that matter: every combination of the values of one line."""

    dataset: str
    ways: tuple[str, ...]
    rates: tuple[float, ...]
    momenta: tuple[float, ...] = (0.0,)
    activations: tuple[str, ...] = ("tanh",)


_TWO, _SOUND = ("tanh", "relu"), ("flat", "equal")
TRIALS = (
    # The printed rate: with the momentum of the neighbouring recipe, and with the implied ReLU.
    Trial("mnist", ("paper",), (0.05,), (0.0, 0.9), _TWO),
    Trial("fashion_mnist", ("paper",), (0.05,), (0.0, 0.9), _TWO),
    Trial("mnist", ("paper",), (0.5,), (0.0,), _TWO),
    Trial("fashion_mnist", ("paper",), (0.5,), (0.0,), _TWO),
    # The two ways of equal sensitivity, each at its own best rate.
    Trial("mnist", _SOUND, (0.05, 0.15, 0.35, 0.5)),
    Trial("fashion_mnist", _SOUND, (0.05, 0.15, 0.35, 0.5)),
    Trial("mnist", ("flat",), (0.05,), (0.9,)),
    Trial("fashion_mnist", ("flat",), (0.05,), (0.9,)),
    Trial("cifar10", ("flat", "paper", "equal"), (1.0,), (0.9,)),
    Trial("cifar10", ("paper",), (1.0,), (0.9,), ("relu",)),
    Trial("digits", ("flat", "paper", "equal"), (0.1, 0.4), (0.9,)),
)


def mechanism_of(
    setting: Setting, way: str, groups: int, examples: int, steps: int
) -> dpjax.Mechanism:
    """The mechanism that runs; multipliers are relative to its true sensitivity."""
    root = math.sqrt(groups)
    rules = {
        "flat": (clipping.flat(setting.bound), setting.noise),
        "paper": (clipping.grouped(setting.bound, groups), setting.noise / root),
        "equal": (clipping.grouped(total=setting.bound, groups=groups), setting.noise),
        "full": (clipping.grouped(setting.bound, groups), setting.noise),
    }
    rule, noise = rules[way]
    sampler = sampling.poisson(examples, setting.batch)
    return dpjax.Mechanism(sampling=sampler, clipping=rule, noise_multiplier=noise, steps=steps)


def trials() -> list[Trial]:
    """What the flags choose: `TRIALS`, or a table at one rate."""
    small = paper_runs.SMOKE.value
    if _TABLE.value == "rates":
        names = ["digits"] if small else _DATASETS.value or set(SETTINGS) - {"digits"}
        return [trial for trial in TRIALS if trial.dataset in names]
    names = ["digits"] if small else TABLES[_TABLE.value or "1"]
    if small and _TABLE.value == "4":
        names = ["digits", "organsmnist"]  # organsmnist is absent, to show how that is reported
    found = []
    for name in names:
        setting, act = SETTINGS[name], (_ACTIVATION.value,)
        rate = setting.rate if _RATE.value is None else _RATE.value
        momentum = setting.momentum if _MOMENTUM.value is None else _MOMENTUM.value
        found.append(Trial(name, tuple(_WAYS.value), (rate,), (momentum,), act))
    return found


def rows_of(trial: Trial, results: paper_runs.Results) -> Iterable[dict[str, Any]]:
    """Every row of a trial, for each number of groups and printed epsilon, run with all seeds."""
    name = trial.dataset
    setting, dataset = SETTINGS[name], data.load(name, paper_runs.DATA_DIR.value)
    dataset = paper_runs.standardized(dataset)
    seeds = paper_runs.seeds()
    sweep = [int(k) for k in _GROUPS.value or [setting.groups]]
    asked = [float(epsilon) for epsilon in _EPSILONS.value or setting.steps]
    lengths = [(epsilon, steps) for epsilon, steps in setting.steps.items() if epsilon in asked]
    moves = itertools.product(trial.rates, trial.momenta, trial.activations)
    for (printed, steps), way, k, (rate, momentum, act) in itertools.product(
        lengths, trial.ways, sweep, moves
    ):
        if way == "flat" and k != sweep[0]:
            continue
        mechanism = mechanism_of(setting, way, k, dataset.examples, steps)
        words = f"{name}{paper_runs.copied(dataset)} {way}" + f", {k} groups" * (way != "flat")
        # Settings as printed have no words, so rows keep their names when a setting joins.
        words += setting.differs + f", rate {rate:g}" * (rate != setting.rate)
        words += f", momentum {momentum:g}" * (momentum > 0) + f", {act}" * (act != "tanh")

        model = setting.model(classes=dataset.classes, activation=getattr(nn, act))
        optimizer = optax.sgd(rate, momentum or None)
        longer = results.content["rows"].get(f"{words}, {max(setting.steps.values())} steps", {})
        often = setting.evaluations
        own = partial(paper_runs.trained, dataset, model, mechanism, optimizer, evaluations=often)
        run = partial(beginning_of, longer, steps, own)
        found = [results.of(f"{words}, {steps} steps", seed, run) for seed in seeds]
        nominal = mechanism_of(setting, "flat", 1, dataset.examples, steps).event
        two = paper_runs.epsilons(mechanism, nominal)
        yield {"words": words, "printed": printed, "found": found, **two, "way": way}


def beginning_of(
    longer: Mapping[str, Any], steps: int, own: paper_runs.Run, seed: int, folder: Any
) -> Mapping[str, Any]:
    """The first steps of a longer run, if an evaluation falls on the last of them; else a run."""
    way = longer.get(str(seed), {}).get("way", [])
    begun = [row for row in way if row["step"] <= steps]
    if begun and begun[-1]["step"] == steps:
        return {"accuracy": 100 * begun[-1]["accuracy"], "way": begun}
    return own(seed, folder)


def line(row: Mapping[str, Any], setting: Setting) -> list[str]:
    """A row of a table."""
    accuracy = paper_runs.spread([each["accuracy"] for each in row["found"]])
    published = setting.printed.get(row["printed"]) if row["way"] == "paper" else None
    published = "" if published is None else f"{published:.2f}"
    return [row["words"], accuracy, published, *paper_runs.figures(row)]


def main(argv: list[str]) -> None:
    only_flags(argv)
    logging.set_verbosity(logging.WARNING)
    if _SMOOTH.value:
        raise app.UsageError(
            "--smooth: refused. A sum's local sensitivity is its global one on every data set, so "
            "smoothing takes nothing away; with what is observed instead, the scale of the noise "
            "itself depends on the data, and epsilon is infinite. The paper's figure is the "
            'column "epsilon, paper\'s"; --ways=equal is what holds at it.'
        )
    fixed = _TABLE.value == "rates"
    unread = (_WAYS, _RATE, _MOMENTUM, _ACTIVATION) if fixed else (_DATASETS,)
    if given := ", ".join(f"--{flag.name}" for flag in unread if flag.present):
        why = "--table=rates has its own" if fixed else "only --table=rates reads it"
        raise app.UsageError(f"{given}: {why}; it would have no effect.")
    results, lines, shown = paper_runs.results(), [], {}
    for trial in trials():
        try:
            rows = list(rows_of(trial, results))
        except FileNotFoundError as missing:
            print(f"{trial.dataset}: skipped. {missing}")
            continue
        lines += [line(row, SETTINGS[trial.dataset]) for row in rows]
        for row in rows:  # trials of one data set and length share a panel
            title, way = f"{trial.dataset} at {row['printed']:g}", row["words"].partition(" ")[2]
            shown.setdefault(title, {})[way] = row["found"]
    lines.append(["any, smooth noise", "refused, see --smooth", "", "", "inf", "inf"])
    print(paper_runs.table(["way", "here", "paper", "epsilon, paper's", "rdp", "pld"], lines))
    print(
        "The paper's epsilon takes one example to move the sum by the bound, as for flat clipping; "
        "rdp and pld are bounds for what ran, with sqrt(groups) counted. The printed 0.94 is by "
        "the improved conversion; this table has it by the older one, as all others."
    )
    if _FIGURE.value and paper_runs.PLOT.value:
        figure = pictures.FIGURES[_FIGURE.value]
        drawn = [panel for title, found in shown.items() for panel in figure.panels(title, found)]
        multi_panel_figure.draw(paper_runs.PLOT.value, drawn)


if __name__ == "__main__":
    app.run(main)
