# SPDX-License-Identifier: Apache-2.0
"""Wavelet scattering: image features from fixed filters, without training.

The transform convolves with wavelets of several scales and angles, takes the modulus and
averages; it repeats this once for the detail that the first average removes. No weight is
learned and each image's features depend on that image alone, so the features cost no privacy.
Under noise a linear model on them beats most networks on pixels.

`scatter` is the transform and `paths` lists its channels. `filters` builds the wavelets in
NumPy, once for each shape; `fourier` convolves with them in JAX; `transform` is the cascade.

References:
  Bruna and Mallat, "Invariant Scattering Convolution Networks", 2013.
  Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)",
  2021.
"""

from dpjax.scattering.filters import Bank, filter_bank
from dpjax.scattering.transform import Path, paths, scatter

__all__ = ["Bank", "Path", "filter_bank", "paths", "scatter"]
