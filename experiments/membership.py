# SPDX-License-Identifier: Apache-2.0
"""Membership inference on finished models, at epsilon 3 and without privacy.

claim     LiRA finds members of an overfitted model, and few of a private one
verdict   at 1 % false positives it finds 4 to 9 % of members without privacy, and 1 % with it
time      22 core minutes
hardware  two CPU cores shared with other work
command   python -m experiments.membership --runs=RUNS --out=experiments/results/membership.json

The demo's digits, a CNN on 10,000 images of FashionMNIST, and a network on 4,000 rows of California
Housing that tells houses above 180,000 dollars; plain models have the steps to be overfitted. LiRA
attacks 1,000 members and 1,000 others; of digits 360 each, because the test part has no more.
"""

import copy
import functools
import importlib
import json
import pathlib
import re
import tempfile

import numpy as np

from dpjax.cli.report.load_run import read
from experiments import declared
from experiments.common import runs

PLAIN = "--noise_multiplier=0 --bound=inf --optimizer=adam --learning_rate=0.003 --batch_size=128"
CNN = "--dataset=RUNS/FashionMNIST.npz --model=tempered_cnn"
MLP = "--dataset=RUNS/housing.npz --hidden=256,256 --activation=relu"
ROWS = {
    "digits, epsilon 3": "",
    "digits, not private": f"{PLAIN} --epochs=100",
    "FashionMNIST, epsilon 3": f"{CNN} --epochs=10 --bound=0.1 --learning_rate=4",
    "FashionMNIST, not private": f"{CNN} {PLAIN} --epochs=12",
    "housing, epsilon 3": MLP,
    "housing, not private": f"{MLP} {PLAIN} --epochs=100",
}
LEFT_OUT = r" of the released model|, \d+ shadow models|( of at most 100.0%)? at [\d.]+%$"
HEADS = "model", "accuracy, %", "attack", "AUROC", "at 0.1 %", "at 1 %", "at 10 %", "AUROC by class"


def command(name, *words):
    """`dpjax NAME WORDS` in this process."""
    given = copy.deepcopy(importlib.import_module(f"dpjax.cli.flag_sets.{name}").FLAGS)
    importlib.import_module(f"dpjax.cli.{name}").run(given, given([name, *words]))


def attacked(row, seed, folder):
    """A model and the attacks on it: its accuracy, what was found, and what may be found."""
    words, few = ROWS[row].replace("RUNS", str(folder.parent)).split(), runs.SMOKE.value
    words += ["--evaluations=1", f"--seed={seed}", f"--out={folder}", *["--epochs=1"] * few]
    command("train", *words)
    if not (folder / "audit.json").exists():
        command("audit", str(folder), "--attacks=loss,lira", f"--shadows={4 if few else 32}")
    run, found = read(folder), json.loads((folder / "audit.json").read_text())
    return {"accuracy": 100 * run.accuracy, "attacks": found["attacks"]}


def main(results):
    results.runs = folder = pathlib.Path(runs.RUNS.value or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    if not runs.SMOKE.value:  # files that `dpjax train` reads
        _, (x, y), (x_test, y_test), *_ = runs.loaded("fashion_mnist")
        parts = {"x_train": x[:10_000], "y_train": y[:10_000], "x_test": x_test, "y_test": y_test}
        np.savez(folder / "FashionMNIST", **parts)
        x, y = (part[:5000] for part in declared.table("california housing").train)
        np.savez(folder / "housing", x=x, y=(y > 180_000 / 500_001 * 2 - 1).astype(int))
    for row in filter(runs.named, [*ROWS][: 2 if runs.SMOKE.value else None]):
        results.of(row, 0, functools.partial(attacked, row))


def cells(rows):
    """Each attack: AUROC, members found by the share of others taken for members, and classes."""
    for row, found in ((row, rows[row]["0"]) for row in ROWS):
        for name, of in found["attacks"].items():
            name, *rates = (re.sub(LEFT_OUT, "", words) for words in (name, *of["rates"]))
            area, classes = "{:.3f} ({:.3f} to {:.3f})".format(*of["auroc"]), of["by_class"]
            yield row, f"{found['accuracy']:.1f}", name, area, *rates, " ".join(classes.values())


def tables(rows):
    """The table of the page, without classes."""
    lines = [line[:-1] for line in cells(rows) if "offline" not in line[2]]
    return {"membership": runs.table(HEADS[:-1], lines)}


if __name__ == "__main__":
    runs.guide("membership", tables, main, "runs", "data_dir", "row")
