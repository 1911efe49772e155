# SPDX-License-Identifier: Apache-2.0
"""Data sets by name, as arrays in memory or as streams that are read from the disk.

`load` looks in a folder (``data_dir``, or the environment variable ``DPJAX_DATA_DIR``), then
tries TensorFlow Datasets; ``"digits"`` comes with scikit-learn. Images are float32 in [0, 1],
channels last; labels are int32; tables are float32 in their own units. `hold_out` splits off a
validation part. `load_file` reads an ``.npz`` or ``.csv`` of your own. `stream` leaves the training
part on the disk; `Stream` reads any source by index.

`sources` is the table of names, and `arrays` makes arrays of what a user passes to an algorithm. No
statistic of the data is computed here: a mean or a scale of private examples would be a release
that the accountant does not see.
"""

from dpjax.data.dataset import Dataset, Split, hold_out, standardize
from dpjax.data.loading import NAMES, load, stream
from dpjax.data.own_file import load_file
from dpjax.data.streaming import RandomAccess, Stream

__all__ = [
    "NAMES",
    "Dataset",
    "RandomAccess",
    "Split",
    "Stream",
    "hold_out",
    "load",
    "load_file",
    "standardize",
    "stream",
]
