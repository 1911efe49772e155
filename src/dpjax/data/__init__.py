# SPDX-License-Identifier: Apache-2.0
"""Data sets by name, as arrays in memory or as streams that are read from the disk.

Images are float32 in [0, 1], channels last; labels are int32; tables are float32 in their own
units. No statistic of the data is computed here: a mean or a scale of private examples is a
release that the accountant does not see.
"""

from dpjax._stream import RandomAccess, Stream
from dpjax.data.dataset import Dataset, Split, hold_out, standardize
from dpjax.data.encoding import Columns
from dpjax.data.loading import NAMES, load, stream
from dpjax.data.own_file import load_file, load_inputs
from dpjax.data.tables import table

__all__ = [
    "NAMES",
    "Columns",
    "Dataset",
    "RandomAccess",
    "Split",
    "Stream",
    "hold_out",
    "load",
    "load_file",
    "load_inputs",
    "standardize",
    "stream",
    "table",
]
