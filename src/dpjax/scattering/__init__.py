# SPDX-License-Identifier: Apache-2.0
"""Wavelet scattering: image features from fixed filters, without training.

Each image's features depend only on that image, so they cost no privacy. Under noise a linear
model on them beats most networks on pixels.

References:
  Bruna and Mallat, "Invariant Scattering Convolution Networks", 2013.
  Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)",
  2021.
"""

from dpjax.scattering.filters import Bank, filter_bank
from dpjax.scattering.transform import scatter

__all__ = ["Bank", "filter_bank", "scatter"]
