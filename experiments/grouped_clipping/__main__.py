# SPDX-License-Identifier: Apache-2.0
"""`python -m experiments.grouped_clipping`."""

from experiments.common import runs
from experiments.grouped_clipping.run import PAPER, __doc__  # noqa: F401 (--help prints it)

if __name__ == "__main__":
    runs.main(PAPER)
