# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m experiments.noise_curricula`` runs the rows of the paper."""

from experiments.common import runs
from experiments.noise_curricula.run import PAPER

if __name__ == "__main__":
    runs.main(PAPER)
