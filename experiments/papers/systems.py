# SPDX-License-Identifier: Apache-2.0
"""The claims of the papers and the epsilons of their rows, from the binaries' own settings.

  result    experiments/results/systems.json, from which `common/result_tables.py` makes its first
            tables: what each paper claims, what ran here, and whether the claim holds
  time      two minutes on a CPU core
  command   python experiments/papers/systems.py; run it when settings or names of rows change

Every number that a binary has as printed is a claim, whether its rows ran or not.  A claim names
rows by patterns, the preferred pattern first; `common/claims.py` decides whether it holds.  Every
binary defines a flag --table, so each paper has a process of its own.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import paper_runs
from common.claims import Claim
from common.paper_figures import COPY

from dpjax.accounting.rounding import upwards
from dpjax.cli.flag_checks import only_flags

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"
SIZES = {"mnist": 60_000, "fashion_mnist": 60_000, "cifar10": 50_000}
SIZES |= {"pathmnist": 89_996, "organamnist": 34_561, "organcmnist": 12_975}
SIZES |= {"organsmnist": 13_932}
WORDS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "fashion": "FashionMNIST"}
WORDS |= {"cifar10": "CIFAR-10", "cifar": "CIFAR-10", "california_housing": "California housing"}
WORDS |= {"wine_quality": "wine quality", "snli": "SNLI", "pathmnist": "PathMNIST"}
WORDS |= {f"organ{view}mnist": f"Organ{view.upper()}MNIST" for view in "acs"}
WORDS |= {"sst2": "SST-2"}
_CALIBRATES = "ECE with a large bound below that with a small one"
Costs = dict[str, list[str]]  # of rows: the paper's epsilon, by RDP, by PLD
Found = tuple[Costs, list[Claim]]


def both(name: str, rest: str = "") -> list[str]:
    """Patterns of a row on lossless images, and on a JPEG copy where there are no others."""
    return [re.escape(name) + rest, re.escape(name) + r" \(JPEG copy\)" + rest]


def any_of(patterns: Iterable[str]) -> str:
    """One pattern for whole names that match one of several."""
    return "|".join(patterns)


def tramer2021(rows: Mapping[str, Any]) -> Found:
    """Accuracies of nine models, and that wavelets beat learnt features."""
    import tramer2021_scatternet as paper

    costs, claims = {}, []
    for name, row in paper.ROWS.items():
        size, (dataset, rest) = SIZES[row.dataset], name.split(" ", 1)
        two = paper_runs.epsilons(paper.mechanism_of(row, size), paper.claimed(row, size))
        costs |= {of: paper_runs.figures(two) for of in rows if matches(both(name), of)}
        claims.append(Claim(f"{WORDS[dataset]}: {rest}", both(name), row.published))
    for dataset in ("mnist", "fashion", "cifar"):
        ours, than = (both(f"{dataset} {rest}") for rest in ("wavelets linear", "pixels cnn"))
        system = f"{WORDS[dataset]}: linear on wavelets above a CNN on pixels"
        claims.append(Claim(system, ours, "above", than=than))
    return costs, claims


def papernot2021(rows: Mapping[str, Any]) -> Found:
    """Accuracies of activations and optimizers, and that tanh is better than ReLU."""
    import papernot2021_tempered_sigmoids as paper

    costs: Costs = {}
    claims, patterns = [], {}
    searched = {
        f"{name} at {rate:g}" + ", not private" * (not private): accuracy
        for name, sides in paper.TABLE_4.items()
        for private, (rate, accuracy) in enumerate(sides)
        if (name, private) != ("sgd", 1)  # tanh of table 3
    }
    for name, setting in paper.SETTINGS.items():
        dataset = re.sub(r"_\d+$", "", name)
        if dataset not in SIZES:
            continue
        mechanism = paper.mechanism_of(setting, SIZES[dataset])
        two = paper_runs.figures(paper_runs.epsilons(mechanism))
        rest = rf" {{}}(?!, not private)(, .*)?, {mechanism.steps} steps"
        for of in rows:
            if "not private" not in of and matches(both(dataset, rest.format(".*?")), of):
                costs[of] = two
        for kind in (*paper.KINDS, *searched):
            of = both(dataset, rest.format(re.escape(kind)))
            patterns.setdefault((dataset, kind), []).extend(of)
    sets = ("mnist", "fashion_mnist", "cifar10")
    printed = {
        (dataset, kind): accuracy
        for dataset in sets
        for kind, accuracy in paper.SETTINGS[dataset].printed.items()
    }
    printed |= {(of, "tanh, not private"): accuracy for of, accuracy in paper.PRINTED_TANH.items()}
    for (dataset, kind), accuracy in printed.items():
        claims.append(Claim(f"{WORDS[dataset]}: {kind}", patterns[dataset, kind], accuracy))
    for kind, accuracy in searched.items():
        claims.append(Claim(f"FashionMNIST, {kind}", patterns["fashion_mnist", kind], accuracy))
    for dataset in sets:
        ours, than = patterns[dataset, "tanh"], patterns[dataset, "ReLU"]
        claims.append(Claim(f"{WORDS[dataset]}: tanh above ReLU", ours, "above", than=than))
    for dataset in sets:
        setting = paper.SETTINGS[dataset]
        average = ", ".join(f"{part:.2f}" for part in setting.average or ())
        system = f"{WORDS[dataset]}: average s, T, o of the best tenth of figure 2"
        steps = paper.mechanism_of(setting, SIZES[dataset]).steps
        end = f"{paper.words_of(setting)}, {steps} steps"
        sweep = [f"{dataset} {paper.member(*triplet)}{end}" for triplet in paper.FAMILY]
        claims.append(Claim(system, (), average, why="27 runs of two hours", sweep=sweep))
    return costs, claims


def losing_less2022(rows: Mapping[str, Any]) -> Found:
    """Accuracies of losses at the end and early, and what each part of the composite adds."""
    import losing_less2022_settings as paper
    import tramer2021_scatternet as baseline

    costs: Costs = {}
    claims, compared, ablation = [], [], []
    for name, row in paper.ROWS.items():
        size, (dataset, rest) = SIZES[row.dataset], name.split(" ", 1)
        words = f"{WORDS[dataset]}, {rest}"
        two = paper_runs.epsilons(baseline.mechanism_of(row, size), paper.claimed(row, size))
        costs |= {
            of: paper_runs.figures(two)
            for of in rows
            if matches([rf"{name}(, as printed)?{COPY} .*"], of) and "without privacy" not in of
        }
        most, epochs = paper.early(name, row, size)
        start = row._replace(epochs=epochs)
        two = paper_runs.epsilons(baseline.mechanism_of(start, size), paper.claimed(start, size))
        for of in rows:
            if matches(both(name, " .*"), of) and "without privacy" not in of:
                costs[f"{of}, {epochs} epochs"] = paper_runs.figures(two)
        kinds = ("all", "CE", "SSE+CE", "SSE+focal")
        sides = {kind: both(name, f" {re.escape(kind)}") for kind in kinds}
        early = f", below {most:g}"
        for kind in ("all", "CE"):
            last, _, first = paper.PRINTED.get((name, kind), "").partition(";")
            for published, when, at in ((last, "", 0), (first, early, epochs)):
                if published.strip():
                    claim = Claim(f"{words}: {kind}{when}", sides[kind], float(published), at=at)
                    claims.append(claim)
        for (kind, of), (when, at) in itertools.product(
            (("CE", compared), ("SSE+focal", ablation)), (("", 0), (early, epochs))
        ):
            claim = Claim(f"{words}: all above {kind}{when}", sides["all"], "above", at=at)
            of.append(claim._replace(than=sides[kind]))
        claim = Claim(f"{words}: SSE+focal above CE{early}", sides["SSE+focal"], "above")
        ablation.append(claim._replace(than=sides["CE"], at=epochs))
        minutes = {"cifar wavelets cnn": 16, "cifar pixels cnn": 46}.get(name)
        why = f"{minutes} minutes a run of SSE+CE" if minutes else ""
        claim = Claim(f"{words}: SSE+focal above SSE+CE", sides["SSE+focal"], "above", why=why)
        ablation.append(claim._replace(than=sides["SSE+CE"]))
    for better, worse in (("SSE", "SAE"), ("SSE", "Huber 1.0"), ("Huber 1.0", "Huber 0.1")):
        ours, than = (both("mnist pixels cnn", f" {re.escape(of)}") for of in (better, worse))
        system = f"MNIST, pixels cnn: {better} above {worse}"
        ablation.append(Claim(system, ours, "above", than=than))
    return costs, claims + compared + ablation


def liu2021(rows: Mapping[str, Any]) -> Found:
    """Groups with the paper's noise, flat clipping, and groups of the same true epsilon."""
    import liu2021_grouped_clipping as paper

    costs, claims, compared = {}, [], []
    for of in rows:
        match = re.match(rf"(\w+){COPY} (flat|(\w+), (\d+) groups)(?:, .*)?, (\d+) steps", of)
        if match and match[1] in SIZES:
            setting, size, steps = paper.SETTINGS[match[1]], SIZES[match[1]], int(match[5])
            way, groups = match[3] or "flat", int(match[4] or 1)
            nominal = paper.mechanism_of(setting, "flat", 1, size, steps).event
            ran = paper.mechanism_of(setting, way, groups, size, steps)
            printed = next((p for p, length in setting.steps.items() if length == steps), 0.0)
            method = paper.METHODS.get(printed, "rdp-classic")
            costs[of] = paper_runs.figures(paper_runs.epsilons(ran, nominal, convention=method))
    for name, setting in paper.SETTINGS.items():
        if name not in SIZES:
            continue
        why = "MedMNIST is not at hand" if name not in ("mnist", "fashion_mnist", "cifar10") else ""
        for printed, steps in setting.steps.items():
            words = f"{WORDS[name]} at {printed:.2f}"
            of = partial(_grouped, name, setting, steps)
            # The paper names no activation; what it says of its network implies ReLU.
            for kind, act in (("ReLU", ", relu"), ("tanh", ""))[bool(why) :]:
                system = f"{words}: {setting.groups} groups with the paper's noise, {kind}"
                claim = Claim(system, of("paper", act=act), setting.printed[printed], why=why)
                need = f"{setting.rate:g}", any_of(of("paper", rate="", act=act))
                claims.append(claim._replace(needs=[need]))
            flat = paper.FLAT.get((name, printed), "")
            claims.append(Claim(f"{words}: flat clipping", of("flat"), flat, why=why))
            system = f"{words}: groups above flat at equal true epsilon"
            claim = Claim(system, of("equal") + of("full"), "above", of("flat"), pooled=True)
            trials = (trial for trial in paper.TRIALS if trial.dataset == name)
            rates = next((trial.rates for trial in trials if "equal" in trial.ways), ())
            needs = []
            for rate in rates:
                told = f", rate {rate:g}" * (rate != setting.rate)
                needs.append((f"{rate:g}", any_of(of("equal", rate=told))))
            compared += [claim._replace(needs=needs)] * (not why)
    return costs, claims + compared


def _grouped(
    name: str, setting: Any, steps: int, way: str, *, rate: str = r"(, rate [\d.]+)?", act: str = ""
) -> list[str]:
    """Patterns of liu2021's rows of one way and activation, at any rate or at one."""
    groups = f", {setting.groups} groups" * (way != "flat")
    momentum = f", momentum {setting.momentum:g}" * (setting.momentum > 0)
    return both(name, f" {way}{groups}{setting.differs}{rate}{momentum}{act}, {steps} steps")


def an2021(rows: Mapping[str, Any]) -> Found:
    """Accuracies under schedules and orders, and that falling noise beats rising and constant."""
    import an2021_noise_curricula as paper

    costs: Costs = {}
    claims, compared = [], []
    for name, row in itertools.chain(paper.rows_of("2"), paper.rows_of("3")):
        two = paper_runs.epsilons(row.mechanism) | {"paper": row.epsilon}
        costs[name] = paper_runs.figures(two)
    for name, (_, accuracy) in paper.PRINTED.items():
        claims.append(Claim(f"noise {name}", [re.escape(name)], accuracy))
    constants = dict(
        zip(paper.CONSTANT, (of for of in costs if of.startswith("constant")), strict=True)
    )
    for name, accuracy in paper.CONSTANT.items():
        down, up = [f"{name}-down"], [f"{name}-up"]
        constant = [re.escape(constants[name])]
        claims.append(Claim(f"constant noise beside {name}", constant, accuracy))
        compared.append(Claim(f"{name}: falling above rising noise", down, "above", than=up))
        if name != "piecewise":  # where the paper has constant noise ahead, as ours
            system = f"{name}: falling above constant noise, epsilon equal by RDP as in the paper"
            compared.append(Claim(system, down, "above", than=constant))
    for noise, (plain, ordered) in paper.ORDERED.items():
        claims.append(Claim(f"constant noise {noise:g}", [f"constant {noise}"], plain))
        row = f"constant {noise}, easy first"
        costs[row] = ["", "inf", "inf"]
        claims.append(Claim(f"noise {noise:g}, easy examples first", [re.escape(row)], ordered))
        if f"constant {noise}" in rows and noise:
            # The figures of this paper follow the improved conversion.
            two = paper_runs.epsilons(paper.mechanism_of(float(noise)), convention="rdp")
            costs[f"constant {noise}"] = paper_runs.figures(two)
    for name, (plain, ordered) in paper.COMBINED.items():
        if plain != paper.PRINTED[name][1]:
            claims.append(Claim(f"noise {name}, in table 4", [re.escape(name)], plain))
        row = f"{name}, easy first"
        costs[row] = ["", "inf", "inf"]
        claims.append(Claim(f"noise {name}, easy examples first", [re.escape(row)], ordered))
    return costs, claims + compared


def bu2023(rows: Mapping[str, Any]) -> Found:
    """Calibration errors under small and large bounds, and errors of the regressions."""
    import bu2023_algorithms as algorithms
    import bu2023_calibration as paper
    import bu2023_settings as settings

    costs: Costs = {}
    for of, runs in rows.items():
        known = next(iter(runs.values())).get("epsilons")
        if known and "not private" not in of:
            costs[of] = [known[0], *known[2:]]
    claims, compared = [], []
    for task, ways in paper.PRINTED.items():
        why = {"cifar10": "the weights of ViT are not at hand", "mnist": ""}
        why["snli"] = "the weights of BERT and SNLI are not at hand"
        for way, printed in ways.items():
            for published, measure in zip(printed, ("ECE", "MCE"), strict=True):
                claim = Claim(f"{WORDS[task]}: {measure}, {way}", [f"{task} {way}"], published)
                claims.append(claim._replace(measure=measure.lower(), why=why[task]))
    for way, published in ((settings.SMALL, 96), (settings.LARGE, 95)):  # in section 5.4
        claims.append(Claim(f"MNIST: accuracy, {way}", [f"mnist {way}"], published))
    ours, than = ["mnist large R"], ["mnist small R"]
    claim = Claim(f"MNIST: {_CALIBRATES}", ours, "below")
    compared.append(claim._replace(than=than, measure="ece"))
    shape = {"layer": {"kernel": jnp.zeros(1)}}  # bounds of layers are not read
    for name in ("california_housing", "wine_quality"):
        for way in (settings.SMALL, settings.LARGE):
            printed, _, *sound = settings.epsilons(settings.SETTINGS[name], way, shape)
            costs[f"{name} {way} squared_error"] = [printed, *sound]
        ours, than = ([f"{name} {way} squared_error"] for way in (settings.LARGE, settings.SMALL))
        claim = Claim(f"{WORDS[name]}: large R level with small R", ours, "level", than=than)
        compared.append(claim._replace(measure="mse"))
    for optimizer in algorithms.OPTIMIZERS:
        ours, than = ([f"algorithms {optimizer}, flat, {way} R"] for way in ("large", "small"))
        words = f"MNIST, 10 epochs of {optimizer}: {_CALIBRATES}"
        compared.append(Claim(words, ours, "below", than=than, measure="ece", own=True))
    return costs | _stated(rows), claims + compared


def finetuning(rows: Mapping[str, Any]) -> Found:
    """Calibration and accuracy of pretrained networks, which the paper does not have."""
    import bu2023_finetuning as paper

    compared = []
    for name, epsilon in itertools.product(paper.ROWS, paper.EPSILONS):
        ours, than = ([paper.titled(name, epsilon, way)] for way in (paper.LARGE, paper.SMALL))
        dataset, part = name.split(" ", 1)
        words = f"{WORDS[dataset]}, {part}, epsilon {epsilon:g}"
        claim = Claim(f"{words}: {_CALIBRATES}", ours, "below", than=than, own=True)
        compared.append(claim._replace(measure="ece"))
        system = f"{words}: accuracy with a large bound level with that with a small one"
        compared.append(Claim(system, ours, "level", than=than, own=True))
    return _stated(rows), compared


def _stated(rows: Mapping[str, Any]) -> Costs:
    """Epsilons of rows whose runs hold them; the paper prints none for these."""
    costs: Costs = {}
    for of, runs in rows.items():
        run = next(iter(runs.values()))
        if "pld" in run and "not private" not in of:
            bounds = (run["rdp"], run["pld"])  # RDP has none for norms from projections
            costs[of] = ["", *("" if bound is None else upwards(bound, ".4g") for bound in bounds)]
    return costs


def matches(patterns: list[str], row: str) -> bool:
    """Whether one of some patterns is that of a whole name."""
    return any(re.fullmatch(pattern, row) for pattern in patterns)


PAPERS: dict[str, Callable[[Mapping[str, Any]], Found]] = {
    of.__name__: of
    for of in (tramer2021, papernot2021, losing_less2022, liu2021, an2021, bu2023, finetuning)
}


def collected(paper: str) -> dict[str, Any]:
    """Epsilons and claims of one paper, as JSON holds them."""
    flags.FLAGS.mark_as_parsed()
    rows = json.loads((RESULTS / f"{paper}.json").read_text())["rows"]
    costs, claims = PAPERS[paper](rows)
    ran = {of: cost for of, cost in costs.items() if re.sub(r", \d+ epochs$", "", of) in rows}
    return {"epsilons": ran, "claims": [claim._asdict() for claim in claims]}


def lines_of(content: Mapping[str, Any]) -> Iterator[str]:
    """JSON with a line for each row and claim, so that a difference is read by line."""
    for paper, parts in content.items():
        costs = [f"{json.dumps(of)}: {json.dumps(cost)}" for of, cost in parts["epsilons"].items()]
        claims = [json.dumps(claim, ensure_ascii=False) for claim in parts["claims"]]
        yield (
            f'{json.dumps(paper)}: {{\n"epsilons": {{\n'
            + ",\n".join(costs)
            + '\n},\n"claims": [\n'
            + ",\n".join(claims)
            + "\n]\n}"
        )


def main(argv: list[str]) -> None:
    only_flags(argv)
    spawned = multiprocessing.get_context("spawn")
    with spawned.Pool(1, maxtasksperchild=1) as pool:
        content = dict(zip(PAPERS, pool.map(collected, PAPERS, chunksize=1), strict=True))
    (RESULTS / "systems.json").write_text("{\n" + ",\n".join(lines_of(content)) + "\n}\n")


if __name__ == "__main__":
    app.run(main)
