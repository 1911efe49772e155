# SPDX-License-Identifier: Apache-2.0
"""Figures of tempered_sigmoids_2021: activations, a sweep of them, and logs of runs."""

from __future__ import annotations

import numpy as np

from dpjax import models
from experiments.common.figures import Figure, Runs, logged
from experiments.common.pictures import Panel
from experiments.tempered_sigmoids.settings import SWEEPS, WORDS, keys_of, member

FAMILY = ((2, 2, 1), (1, 1, 0.5), (1, 4, 0.5), (4, 2, 2))  # of figure 1; the first is tanh


def family(title: str, runs: Runs) -> list[Panel]:
    """The activations of figure 1, from their formula."""
    del runs
    z = np.linspace(-4, 4, 81)
    lines = {}
    for s, t, o in FAMILY:
        values = np.asarray(models.tempered_sigmoid(s, t, o)(z))
        lines[f"s={s:g} T={t:g} o={o:g}"] = (z, values[:, None])
    return [
        Panel(
            title=title,
            x="z",
            y="activation",
            lines=lines,
            measured=False,
        )
    ]


def swept(title: str, runs: Runs) -> list[Panel]:
    """Accuracy of every triplet against its scale, its temperature and its offset."""
    triplets = []
    accuracies = []
    for name, seeds in runs.items():
        words = name.split()[:3]  # such as "s=2 T=2 o=1"
        triplets.append([float(word.split("=")[1]) for word in words])
        accuracies.append([run["accuracy"] for run in seeds])
    return [
        Panel(
            title=title,
            x=field,
            y="test accuracy, %",
            lines={"a triplet": ([triplet[place] for triplet in triplets], accuracies)},
            joined=False,
        )
        for place, field in enumerate(("scale s", "temperature T", "offset o"))
    ]


def _kinds(*kinds: str) -> dict[str, dict[str, list[str]]]:
    """The rows of each kind, by data set."""
    return {dataset: {kind: keys_of(dataset, kind) for kind in kinds} for dataset in WORDS}


_FOUR = _kinds("ReLU, not private", "tanh, not private", "ReLU", "tanh")
FIGURES = {
    "1": Figure("Tempered sigmoids", "Tempered sigmoids; s=2, T=2, o=1 is tanh.", [family]),
    "2": Figure(
        "Accuracy by scale, temperature and offset",
        "Accuracy of tempered sigmoids by scale, temperature and offset, at one epsilon: the best "
        "are near tanh. On average the best tenth has s, T, o = 1.97, 2.27, 1.15 (MNIST), 2.27, "
        "2.61, 1.28 (FashionMNIST) and 1.58, 3.00, 0.71 (CIFAR-10). No verdict: the average of all "
        "triplets that run here is 2.33, 2.33, 1.17, as near to these as that of the best tenth.",
        [swept],
        {
            dataset: {member(*settings): [key] for key, settings in sweep.items()}
            for dataset, sweep in SWEEPS.items()
        },
    ),
    "3": Figure(
        "Accuracy by epsilon, with tanh and with ReLU",
        "Accuracy by epsilon under DP-SGD: tanh is above ReLU throughout, and ends at 98.0 % "
        "(MNIST), 85.5 (FashionMNIST) and 63.84 (CIFAR-10), where ReLU has 96.6, 81.9 and 61.6. "
        "Verdicts are on table 3, whose 98.1, 86.1 and 66.2 follow a search of all settings.",
        [logged("epsilon", "accuracy", ("epsilon (rdp)", "test accuracy, %"), 100)],
        _kinds("ReLU", "tanh"),
        judged=True,
    ),
    "4": Figure(
        "Gradient norms before clipping, with tanh and with ReLU",
        "Norms of gradients before clipping: with ReLU they are more than 5 times as large with "
        "privacy as without; with tanh and privacy about as large as with ReLU and no privacy.",
        [logged("step", "norm", ("step", "norm of gradient"))],
        _FOUR,
    ),
    "5": Figure(
        "Norms of the first activations, with tanh and with ReLU",
        "Norms of the first convolution's activations: with ReLU the norms grow under DP-SGD, with "
        "tanh they stay bounded. Older rows have norms of pre-activations alone, which tanh does "
        "not bound.",
        [
            logged("step", "first activations", ("step", "norm of activations")),
            logged("step", "first layer", ("step", "norm of pre-activations")),
        ],
        _FOUR,
    ),
}
