# SPDX-License-Identifier: Apache-2.0
"""`python -m experiments.noise_curricula`."""

from experiments.common import runs
from experiments.noise_curricula.run import PAPER, __doc__  # noqa: F401 (--help prints it)

if __name__ == "__main__":
    runs.main(PAPER)
