# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m experiments.calibration`` runs the rows of the paper."""

from experiments.calibration import run
from experiments.common import runs

__doc__ = run.__doc__  # --help prints it

if __name__ == "__main__":
    runs.main(run.PAPER)
