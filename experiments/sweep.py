# SPDX-License-Identifier: Apache-2.0
"""Trains with many settings: `dpjax sweep`, from a checkout.

  result    digits, 12 runs: accuracy from 45.3 to 76.4 %; one run costs epsilon 3.0, all 12 11.7
  time      2 to 3 minutes on two busy CPU cores
  command   python experiments/sweep.py --grid "learning_rate=0.2,0.4;bound=0.5,1" --seeds 3 \\
                --fixed "dataset=digits;epochs=5" --jobs 2 --out runs/sweep

`dpjax.cli.sweep` holds the code.
"""

from dpjax.cli import run_command

if __name__ == "__main__":
    run_command("sweep")
