# SPDX-License-Identifier: Apache-2.0
"""Figures of tempered_sigmoids_2021: activations, a sweep of them, and logs of runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from common.multi_panel_figure import Panel
from common.paper_figures import COPY, Figure, Found, logged, one_of

from dpjax import activations

BINARY = "papernot2021_tempered_sigmoids.py"
DATASETS = ("mnist", "fashion_mnist", "cifar10")
FAMILY = ((2, 2, 1), (1, 1, 0.5), (1, 4, 0.5), (4, 2, 2))  # of figure 1; the first is tanh
# Names may say more before the steps, as of an optimizer, but kinds without privacy are lines.
_LENGTH = r"(?!, not private), (?P<length>.*\d+ steps)"


def family(title: str, found: Found) -> list[Panel]:
    """The activations, by their formula."""
    del found
    z = np.linspace(-4, 4, 81)
    lines = {
        f"s={s:g} T={t:g} o={o:g}": (
            z,
            np.asarray(activations.tempered_sigmoid(s, t, o)(z))[:, None],
        )
        for s, t, o in FAMILY
    }
    return [Panel(title, "z", "activation", lines, measured=False)]


def swept(title: str, found: Found) -> list[Panel]:
    """Accuracy of every triplet against its scale, its temperature and its offset."""
    triplets = {name: dict(part.split("=") for part in name.split()) for name in found}
    accuracies = [[each["accuracy"] for each in runs] for runs in found.values()]
    return [
        Panel(
            title,
            field,
            "test accuracy, %",
            {"a triplet": ([float(of[letter]) for of in triplets.values()], accuracies)},
            joined=False,
        )
        for field, letter in (("scale s", "s"), ("temperature T", "T"), ("offset o", "o"))
    ]


def _kinds(*kinds: str) -> Mapping[str, Any]:
    line = f"(?P<line>(?:{'|'.join(map(re.escape, kinds))}))"
    return {
        "titles": DATASETS,
        "lines": kinds,
        "rows": f"{one_of('title', DATASETS, COPY)} {line}{_LENGTH}",
    }


_FOUR = _kinds("ReLU, not private", "tanh, not private", "ReLU", "tanh")
FIGURES = {
    "1": Figure("Tempered sigmoids; s=2, T=2, o=1 is tanh.", [family]),
    "2": Figure(
        "Accuracy of tempered sigmoids by scale, temperature and offset, at one epsilon: the best "
        "are near tanh. On average the best tenth has s, T, o = 1.97, 2.27, 1.15 (MNIST), 2.27, "
        "2.61, 1.28 (FashionMNIST) and 1.58, 3.00, 0.71 (CIFAR-10). Here, of 27 triplets "
        "with one seed, it has 2.33, 2.33, 1.17 on MNIST and on FashionMNIST, and tanh is the "
        "best of both.",
        [swept],
        DATASETS,
        rows=one_of("title", DATASETS, COPY)
        + r" (?P<line>s=\S+ T=\S+ o=[^ ,]+)(?: \(tanh\))?"
        + _LENGTH,
        command="--figure=2 --seeds=1",
        claims="of figure 2$",
    ),
    "3": Figure(
        "Accuracy by epsilon under DP-SGD: tanh is above ReLU throughout, and ends at 98.0 % "
        "(MNIST), 85.5 (FashionMNIST) and 63.84 (CIFAR-10), where ReLU has 96.6, 81.9 and 61.6. "
        "Verdicts are on table 3, whose 98.1, 86.1 and 66.2 follow a search of all settings.",
        [logged("epsilon", "accuracy", ("epsilon (rdp)", "test accuracy, %"), 100)],
        **_kinds("ReLU", "tanh"),
        command="--figure=3 --seeds=3",
        claims=": (tanh|ReLU)( above ReLU)?$",
    ),
    "4": Figure(
        "Norms of gradients before clipping, on MNIST: with ReLU they are more than 5 times as "
        "large with privacy as without; with tanh and privacy about as large as with ReLU and no "
        "privacy. Here one of three seeds of ReLU without privacy collapsed "
        "to 11.35 %, and its band holds it.",
        [logged("step", "norm", ("step", "norm of gradient"))],
        **_FOUR,
        command="--figure=4 --seeds=1",
    ),
    "5": Figure(
        "Norms of the first convolution's activations: with ReLU the norms grow under DP-SGD, with "
        "tanh they stay bounded. Older rows have norms of pre-activations alone, which tanh does "
        "not bound, and one of three seeds of ReLU without privacy collapsed to 11.35 %.",
        [
            logged("step", "first activations", ("step", "norm of activations")),
            logged("step", "first layer", ("step", "norm of pre-activations")),
        ],
        **_FOUR,
        command="--figure=5 --seeds=1",
    ),
}
