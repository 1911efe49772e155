# SPDX-License-Identifier: Apache-2.0
"""Recomputes the epsilon of a privacy card: `dpjax verify`, from a checkout.

command   python experiments/verify.py RUN
result    a verdict for each claim; exit status 1 if the card supports no release
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("dpjax.verify", run_name="__main__")
