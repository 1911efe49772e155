# SPDX-License-Identifier: Apache-2.0
"""`python -m experiments.calibration`."""

from experiments.calibration.run import PAPER
from experiments.common import runs

if __name__ == "__main__":
    runs.main(PAPER)
