# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m experiments.composite_loss`` runs the rows of the paper."""

from experiments.common import runs
from experiments.composite_loss.run import PAPER

if __name__ == "__main__":
    runs.main(PAPER)
