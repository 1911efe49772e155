# SPDX-License-Identifier: Apache-2.0
"""Wavelet scattering: what an image looks like to filters that nobody trained.

Convolve with wavelets of several scales and angles, take the modulus, average; do the same once
more to what the first average lost. No weight is learned, so the features cost no privacy, and
under noise a linear model on them beats most networks on pixels.

`scatter` is the transform, `paths` says what each of its channels is. Three pages: `filters`
builds the wavelets, once a shape, in NumPy; `fourier` convolves with them, in JAX; `transform`
is the cascade. Nothing here looks at more than one image at a time: that is what makes the
features free.

References:
  Bruna and Mallat, "Invariant Scattering Convolution Networks", 2013.
  Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)",
  2021.
"""

from dpjax.scattering.filters import Bank, filter_bank
from dpjax.scattering.transform import Path, paths, scatter

__all__ = ["Bank", "Path", "filter_bank", "paths", "scatter"]
