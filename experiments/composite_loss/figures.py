# SPDX-License-Identifier: Apache-2.0
"""Figures of losing_less_2022: which rows and losses each shows, and the panels to draw."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.common.figures import Draw, Figure
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
WEIGHTS, HIDDEN = "weights", "preactivations"
ENDS = (layers(HIDDEN, -1), layers(WEIGHTS, -1), gradients(1), cosines)
INNER = (layers(WEIGHTS, 1, -1), layers(HIDDEN, 1, -1))
NORMS = (gradients(1, 5, 10, 29, 39),)


def _figure(
    shows: str,
    draws: Sequence[Draw],
    networks: Sequence[str],
    losses: Sequence[str],
    judged: bool = False,
) -> Figure:
    lines = {network: {loss: [key_of(network, loss)] for loss in losses} for network in networks}
    return Figure(shows, draws, lines, judged)


FIGURES = {
    "1": _figure(
        "CIFAR-10: the composite loss keeps logits, last weights and gradients smaller than "
        "cross-entropy does, and clipping turns the mean gradient less.",
        ENDS,
        [CIFAR],
        BOTH,
    ),
    "2": _figure(
        "MNIST: the composite loss is smoother, since its Hessian has the smaller singular values.",
        [sharpness],
        [MNIST],
        BOTH,
    ),
    "3": _figure(
        "From pixels, the composite loss reaches 63.2 % on CIFAR-10 where cross-entropy has 59.8, "
        "and 55.4 against 45.9 while epsilon is below 1.5.",
        [accuracy],
        PIXELS,
        BOTH,
        True,
    ),
    "4": _figure(
        "From wavelets, the composite loss has 66.8 % on CIFAR-10 against 64.5 while epsilon is "
        "below 2.",
        [accuracy],
        WAVELETS,
        BOTH,
        True,
    ),
    "5": _figure(
        "Weights and pre-activations of a hidden and of the last layer: the composite loss keeps "
        "them smaller.",
        INNER,
        (FASHION, CIFAR),
        BOTH,
    ),
    "6": _figure(
        "CIFAR-10: norms of gradients are smaller under the composite loss, at all epochs.",
        NORMS,
        [CIFAR],
        BOTH,
    ),
    "7": _figure(
        "Clipped and unclipped mean gradients point closer to each other under the composite loss.",
        [cosines],
        PIXELS,
        BOTH,
    ),
    "8": _figure(
        "CIFAR-10: early in training the composite loss confuses classes less than cross-entropy.",
        [confusion],
        [CIFAR],
        THREE,
    ),
    "9": _figure(
        "Ablation: the squared error adds accuracy in the first epochs, the focal loss in later "
        "ones, and the penalty adds more.",
        [accuracy],
        PIXELS + WAVELETS,
        PARTS,
        True,
    ),
    "10": _figure(
        "Accuracy over threshold, beta and gamma of the composite loss: beta has little influence.",
        [swept],
        PIXELS,
        SWEPT,
    ),
    "11": _figure(
        "Norms of the weights of all layers: smaller under the composite loss.",
        [layers(WEIGHTS)],
        PIXELS,
        BOTH,
    ),
    "12": _figure(
        "Norms of the pre-activations of all layers: smaller under the composite loss.",
        [layers(HIDDEN)],
        PIXELS,
        BOTH,
    ),
    "13": _figure(
        "Confusion matrices, early and late, beside SGD without privacy.",
        [confusion],
        PIXELS,
        THREE,
    ),
    "14": _figure(
        "Norms of gradients, for all data sets: smaller under the composite loss.",
        NORMS,
        PIXELS,
        BOTH,
    ),
    "15": _figure(
        "Other errors of the logits: squared error is best and absolute error worst, with Huber's "
        "between.",
        [accuracy],
        PIXELS,
        ERRORS,
        True,
    ),
}
