# SPDX-License-Identifier: Apache-2.0
"""Diagnostics of private training: clipping bias, curvature, kernels.

All functions read gradients or data without noise: their results are private.
"""

from dpjax.diagnostics.bias import Bias, clipping_bias
from dpjax.diagnostics.curvature import Sharpness, sharpness
from dpjax.diagnostics.kernel import Definiteness, definiteness, ntk
from dpjax.diagnostics.vectors import cosine

__all__ = [
    "Bias",
    "Definiteness",
    "Sharpness",
    "clipping_bias",
    "cosine",
    "definiteness",
    "ntk",
    "sharpness",
]
