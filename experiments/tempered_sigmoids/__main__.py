# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m experiments.tempered_sigmoids`` runs the rows of the paper."""

from experiments.common import runs
from experiments.tempered_sigmoids.run import PAPER

if __name__ == "__main__":
    runs.main(PAPER)
