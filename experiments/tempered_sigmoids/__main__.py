# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m experiments.tempered_sigmoids`` runs the rows of the paper."""

from experiments.common import runs
from experiments.tempered_sigmoids import run

__doc__ = run.__doc__  # --help prints it

if __name__ == "__main__":
    runs.main(run.PAPER)
