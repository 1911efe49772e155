# SPDX-License-Identifier: Apache-2.0
"""`python -m experiments.calibration`."""

from experiments.calibration.run import PAPER, __doc__  # noqa: F401 (--help prints it)
from experiments.common import runs

if __name__ == "__main__":
    runs.main(PAPER, "vit", "bert", "snli")
