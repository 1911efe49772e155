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
HEADS = (
    "model",
    "accuracy, %",
    "attack",
    "AUROC",
    "at 0.1 %",
    "at 1 %",
    "at 10 %",
    "AUROC by class",
)


def command(name, *words):
    """`dpjax NAME WORDS` in this process."""
    flag_set = importlib.import_module(f"dpjax.cli.flag_sets.{name}")
    given = copy.deepcopy(flag_set.FLAGS)
    rest = given([name, *words])
    importlib.import_module(f"dpjax.cli.{name}").run(given, rest)


def attacked(row, seed, folder):
    """A model and the attacks on it: its accuracy, and the results with their limits."""
    words = ROWS[row].replace("RUNS", str(folder.parent)).split()
    words += ["--evaluations=1", f"--seed={seed}", f"--out={folder}"]
    shadows = 32
    if runs.SMOKE.value:
        words.append("--epochs=1")
        shadows = 4
    command("train", *words)
    audit = folder / "audit.json"
    if not audit.exists():
        command("audit", str(folder), "--attacks=loss,lira", f"--shadows={shadows}")
    attacks = json.loads(audit.read_text())["attacks"]
    return {"accuracy": 100 * read(folder).accuracy, "attacks": attacks}


def write_data(folder):
    """The files that `dpjax train` reads."""
    fashion = runs.loaded("fashion_mnist")
    x, y = fashion.train
    x_test, y_test = fashion.test
    np.savez(
        folder / "FashionMNIST",
        x_train=x[:10_000],
        y_train=y[:10_000],
        x_test=x_test,
        y_test=y_test,
    )
    x, y = declared.table("california housing").train
    limit = 180_000 / 500_001 * 2 - 1  # prices are scaled to [-1, 1]
    above = y[:5000] > limit
    np.savez(folder / "housing", x=x[:5000], y=above.astype(int))


def main(results):
    """Runs the rows as far as they are missing."""
    folder = pathlib.Path(runs.RUNS.value or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    results.runs = folder
    rows = list(ROWS)
    if runs.SMOKE.value:
        rows = rows[:2]  # these read digits
    else:
        write_data(folder)
    for row in filter(runs.named, rows):
        results.of(row, 0, functools.partial(attacked, row))


def cells(rows):
    """Each attack: AUROC, members found by the share of others taken for members, and classes."""
    for row in ROWS:
        run = rows[row]["0"]
        for name, attack in run["attacks"].items():
            area, low, high = attack["auroc"]
            rates = [re.sub(LEFT_OUT, "", words) for words in attack["rates"]]
            yield [
                row,
                f"{run['accuracy']:.1f}",
                re.sub(LEFT_OUT, "", name),
                f"{area:.3f} ({low:.3f} to {high:.3f})",
                *rates,
                " ".join(attack["by_class"].values()),
            ]


def tables(rows):
    """The table of the page, without classes and without the offline attack."""
    lines = [line[:-1] for line in cells(rows) if "offline" not in line[2]]
    return {"membership": runs.table(HEADS[:-1], lines)}


if __name__ == "__main__":
    runs.guide("membership", tables, main, "runs", "data_dir", "row")
