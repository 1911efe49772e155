# SPDX-License-Identifier: Apache-2.0
"""Compares runs: `dpjax compare`, from a checkout.

  result    one HTML page without external files, and its figure as a PNG of the same name
  command   python experiments/compare.py RUN RUN ... [--out comparison.html]

`dpjax.cli.compare` holds the code.
"""

from dpjax.cli import run_command

if __name__ == "__main__":
    run_command("compare")
