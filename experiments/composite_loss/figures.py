# SPDX-License-Identifier: Apache-2.0
"""Figures of losing_less_2022: which rows and losses each shows, and the panels to draw."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.common.figures import Figure
from experiments.composite_loss.probes import (
    accuracy,
    confusion,
    cosines,
    gradients,
    layers,
    sharpness,
    swept,
)
from experiments.composite_loss.settings import (
    BOTH,
    ERRORS,
    PARTS,
    PIXELS,
    SWEPT,
    THREE,
    WAVELETS,
    key_of,
)

MNIST, FASHION, CIFAR = PIXELS
WEIGHTS = "weights"
HIDDEN = "preactivations"
ENDS = (layers(HIDDEN, -1), layers(WEIGHTS, -1), gradients(1), cosines)
INNER = (layers(WEIGHTS, 1, -1), layers(HIDDEN, 1, -1))
NORMS = (gradients(1, 5, 10, 29, 39),)


TITLES = {  # the headings
    "1": "Logits, last weights and gradients under the composite loss and cross-entropy",
    "2": "Sharpness of the loss",
    "3": "Accuracy by epsilon, from pixels",
    "4": "Accuracy by epsilon, from wavelets",
    "5": "Weights and pre-activations of a hidden and of the last layer",
    "6": "Gradient norms by epoch on CIFAR-10",
    "7": "Cosine of the clipped and the unclipped mean gradient",
    "8": "Confusion of classes early in training",
    "9": "Accuracy with parts of the composite loss",
    "10": "Accuracy by threshold, beta and gamma of the composite loss",
    "11": "Norms of the weights of all layers",
    "12": "Norms of the pre-activations of all layers",
    "13": "Confusion of classes, early and late",
    "14": "Gradient norms by epoch on all data sets",
    "15": "Accuracy with other errors of the logits",
}
SHOWS = {  # the captions
    "1": "CIFAR-10: the composite loss keeps logits, last weights and gradients smaller than "
    "cross-entropy does, and clipping turns the mean gradient less.",
    "2": "MNIST: the composite loss is smoother, since its Hessian has the smaller singular "
    "values.",
    "3": "From pixels, the composite loss reaches 63.2 % on CIFAR-10 where cross-entropy has "
    "59.8, and 55.4 against 45.9 while epsilon is below 1.5.",
    "4": "From wavelets, the composite loss has 66.8 % on CIFAR-10 against 64.5 while epsilon is "
    "below 2.",
    "5": "Weights and pre-activations of a hidden and of the last layer: the composite loss "
    "keeps them smaller.",
    "6": "CIFAR-10: norms of gradients are smaller under the composite loss, at all epochs.",
    "7": "Clipped and unclipped mean gradients point closer to each other under the composite "
    "loss.",
    "8": "CIFAR-10: early in training the composite loss confuses classes less than cross- "
    "entropy.",
    "9": "Ablation: the squared error adds accuracy in the first epochs, the focal loss in later "
    "ones, and the penalty adds more.",
    "10": "Accuracy over threshold, beta and gamma of the composite loss: their impact is "
    "negligible.",
    "11": "Norms of the weights of all layers: smaller under the composite loss.",
    "12": "Norms of the pre-activations of all layers: smaller under the composite loss.",
    "13": "Confusion matrices, early and late, beside SGD without privacy.",
    "14": "Norms of gradients, for all data sets: smaller under the composite loss.",
    "15": "Other errors of the logits: squared error is best and absolute error worst, with "
    "Huber's between.",
}
DRAWN = {  # panels, networks and losses
    "1": (ENDS, [CIFAR], BOTH),
    "2": ([sharpness], [MNIST], BOTH),
    "3": ([accuracy], PIXELS, BOTH),
    "4": ([accuracy], WAVELETS, BOTH),
    "5": (INNER, (FASHION, CIFAR), BOTH),
    "6": (NORMS, [CIFAR], BOTH),
    "7": ([cosines], PIXELS, BOTH),
    "8": ([confusion], [CIFAR], THREE),
    "9": ([accuracy], PIXELS + WAVELETS, PARTS),
    "10": ([swept], PIXELS, SWEPT),
    "11": ([layers(WEIGHTS)], PIXELS, BOTH),
    "12": ([layers(HIDDEN)], PIXELS, BOTH),
    "13": ([confusion], PIXELS, THREE),
    "14": (NORMS, PIXELS, BOTH),
    "15": ([accuracy], PIXELS, ERRORS),
}
JUDGED = ("3", "4", "9")  # with the verdicts on their rows


def _lines(networks: Sequence[str], losses: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """The row of each network and loss."""
    return {network: {loss: [key_of(network, loss)] for loss in losses} for network in networks}


FIGURES = {
    name: Figure(TITLES[name], SHOWS[name], draws, _lines(networks, losses), name in JUDGED)
    for name, (draws, networks, losses) in DRAWN.items()
}
