# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m experiments.grouped_clipping`` runs the rows of the paper."""

from experiments.common import runs
from experiments.grouped_clipping.run import PAPER

if __name__ == "__main__":
    runs.main(PAPER)
