# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m experiments.grouped_clipping`` runs the rows of the paper."""

from experiments.common import runs
from experiments.grouped_clipping import run

__doc__ = run.__doc__  # --help prints it

if __name__ == "__main__":
    runs.main(run.PAPER)
