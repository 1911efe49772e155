# SPDX-License-Identifier: Apache-2.0
"""Diagnostics of private training: clipping bias, norms by layer, curvature, kernels.

`bias` compares the clipped with the unclipped mean gradient. `layers` measures the weights and
pre-activations of each layer, which bounded activations and the penalty of losing_less_2022 keep
small. `curvature` has the largest singular value of the Hessian, `kernel` the matrices of
convergence_calibration_2023; `vectors` reads trees as vectors.

All functions except `weight_norms` read gradients or data without noise: their results are
private.
"""

from dpjax.diagnostics.bias import Bias, clipping_bias
from dpjax.diagnostics.curvature import Sharpness, sharpness
from dpjax.diagnostics.kernel import Definiteness, definiteness, ntk
from dpjax.diagnostics.layers import preactivation_norms, weight_norms
from dpjax.diagnostics.vectors import cosine

__all__ = [
    "Bias",
    "Definiteness",
    "Sharpness",
    "clipping_bias",
    "cosine",
    "definiteness",
    "ntk",
    "preactivation_norms",
    "sharpness",
    "weight_norms",
]
