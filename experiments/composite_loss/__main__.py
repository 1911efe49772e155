# SPDX-License-Identifier: Apache-2.0
"""`python -m experiments.composite_loss`."""

from experiments.common import runs
from experiments.composite_loss.run import PAPER, __doc__  # noqa: F401 (--help prints it)

if __name__ == "__main__":
    runs.main(PAPER)
