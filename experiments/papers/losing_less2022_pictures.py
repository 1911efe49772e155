# SPDX-License-Identifier: Apache-2.0
"""Figures of losing_less_2022: which rows and losses each shows, and the panels to draw."""

from __future__ import annotations

from common.epoch_probes import accuracy, confusion, cosines, gradients, layers, sharpness, swept
from common.paper_figures import Figure
from losing_less2022_settings import BOTH, ERRORS, PARTS, SWEPT, UNPRIVATE

BINARY = "losing_less2022_loss.py"
MNIST, FASHION, CIFAR = PIXELS = tuple(
    f"{name} pixels cnn" for name in ("mnist", "fashion", "cifar")
)
WAVELETS = tuple(name.replace("pixels", "wavelets") for name in PIXELS)
WEIGHTS, HIDDEN = "weights", "preactivations"
ENDS = (layers(HIDDEN, -1), layers(WEIGHTS, -1), gradients(1), cosines)
INNER = (layers(WEIGHTS, 1, -1), layers(HIDDEN, 1, -1))
NORMS = (gradients(1, 5, 10, 29, 39),)
THREE = (*BOTH, UNPRIVATE)

FIGURES = {
    "": Figure("Accuracy by epsilon.", [accuracy], PIXELS + WAVELETS, BOTH),
    "1": Figure(
        "CIFAR-10: the composite loss keeps logits, last weights and gradients smaller than "
        "cross-entropy does, and clipping turns the mean gradient less.",
        ENDS,
        [CIFAR],
        BOTH,
    ),
    "2": Figure(
        "MNIST: the composite loss is smoother, since its Hessian has the smaller singular values.",
        [sharpness],
        [MNIST],
        BOTH,
    ),
    "3": Figure(
        "From pixels, the composite loss reaches 63.2 % on CIFAR-10 where cross-entropy has 59.8, "
        "and 55.4 against 45.9 while epsilon is below 1.5.",
        [accuracy],
        PIXELS,
        BOTH,
        claims="pixels cnn: (all|CE)(?! above SSE)",
    ),
    "4": Figure(
        "From wavelets, the composite loss has 66.8 % on CIFAR-10 against 64.5 while epsilon is "
        "below 2.",
        [accuracy],
        WAVELETS,
        BOTH,
        claims="wavelets cnn: (all|CE)(?! above SSE)",
    ),
    "5": Figure(
        "Weights and pre-activations of a hidden and of the last layer: the composite loss keeps "
        "them smaller.",
        INNER,
        (FASHION, CIFAR),
        BOTH,
    ),
    "6": Figure(
        "CIFAR-10: norms of gradients are smaller under the composite loss, at all epochs.",
        NORMS,
        [CIFAR],
        BOTH,
    ),
    "7": Figure(
        "Clipped and unclipped mean gradients point closer to each other under the composite loss.",
        [cosines],
        PIXELS,
        BOTH,
    ),
    "8": Figure(
        "CIFAR-10: early in training the composite loss confuses classes less than cross-entropy.",
        [confusion],
        [CIFAR],
        THREE,
    ),
    "9": Figure(
        "Ablation: the squared error adds accuracy in the first epochs, the focal loss in later "
        "ones, and the penalty adds more.",
        [accuracy],
        PIXELS + WAVELETS,
        PARTS,
        claims=r"SSE\+focal",
    ),
    "10": Figure(
        "Accuracy over threshold, beta and gamma of the composite loss: beta has little influence.",
        [swept],
        PIXELS,
        SWEPT,
    ),
    "11": Figure(
        "Norms of the weights of all layers: smaller under the composite loss.",
        [layers(WEIGHTS)],
        PIXELS,
        BOTH,
    ),
    "12": Figure(
        "Norms of the pre-activations of all layers: smaller under the composite loss.",
        [layers(HIDDEN)],
        PIXELS,
        BOTH,
    ),
    "13": Figure(
        "Confusion matrices, early and late, beside SGD without privacy.",
        [confusion],
        PIXELS,
        THREE,
    ),
    "14": Figure(
        "Norms of gradients, for all data sets: smaller under the composite loss.",
        NORMS,
        PIXELS,
        BOTH,
    ),
    "15": Figure(
        "Other errors of the logits: squared error is best and absolute error worst, with Huber's "
        "between.",
        [accuracy],
        PIXELS,
        ERRORS,
        claims="SAE|Huber",
    ),
}
FIGURES = {
    name: figure._replace(command=f"--figure={name} --seeds={1 if name == '15' else 3}")
    for name, figure in FIGURES.items()
}
