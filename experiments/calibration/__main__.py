# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m experiments.calibration`` runs the rows of the paper."""

from experiments.calibration.run import PAPER
from experiments.common import runs

if __name__ == "__main__":
    runs.main(PAPER)
