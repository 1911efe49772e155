# SPDX-License-Identifier: Apache-2.0
"""Looking into a private training: what clipping cuts, what grows, how the loss bends.

`bias` compares the clipped with the unclipped mean gradient and summarises norms;
`layers` shows the weights and pre-activations of each layer, which the bounded
activations and the penalty of the papers hold down; `curvature` has the largest singular
value of the Hessian; `kernel` the matrices from which convergence_calibration_2023
reasons; `vectors` reads trees as vectors.

All of it but `weight_norms` sees gradients or data without any noise: look, but do not
publish. This room must never know of noise, sampling or epsilon.
"""

from dpjax.diagnostics.bias import (
    Bias,
    Histogram,
    clipped_fraction,
    clipping_bias,
    norm_histogram,
)
from dpjax.diagnostics.curvature import Sharpness, sharpness
from dpjax.diagnostics.kernel import Definiteness, definiteness, ntk
from dpjax.diagnostics.layers import preactivation_norms, weight_norms
from dpjax.diagnostics.vectors import cosine

__all__ = [
    "Bias",
    "Definiteness",
    "Histogram",
    "Sharpness",
    "clipped_fraction",
    "clipping_bias",
    "cosine",
    "definiteness",
    "norm_histogram",
    "ntk",
    "preactivation_norms",
    "sharpness",
    "weight_norms",
]
