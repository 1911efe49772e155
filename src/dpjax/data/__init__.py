# SPDX-License-Identifier: Apache-2.0
"""Data sets by name, as plain arrays in memory or read from the disk as they are needed.

`load` looks in a folder (``data_dir``, or the environment variable ``DPJAX_DATA_DIR``),
then asks TensorFlow Datasets if that is installed; ``"digits"`` comes with scikit-learn
and needs neither.  Images are float32 in [0, 1], channels last; labels are int32; tables
are float32 in their own units.  `hold_out` splits a validation part off.  `stream` leaves
the training part on the disk, and `Stream` reads any source of examples by index.

`sources` is the table of names; `files` (with `jpeg`), `tfds` and `streaming` (with `records`)
read; `dataset` says what comes out.  Nothing here looks at the data to decide anything: a mean
or a scale that is computed from private examples is itself a release.  This room must never
know how data is sampled.
"""

from dpjax.data.dataset import Dataset, Split, hold_out, standardize
from dpjax.data.loading import NAMES, load, stream
from dpjax.data.records import RandomAccess
from dpjax.data.streaming import Stream

__all__ = [
    "NAMES",
    "Dataset",
    "RandomAccess",
    "Split",
    "Stream",
    "hold_out",
    "load",
    "standardize",
    "stream",
]
