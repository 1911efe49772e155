# SPDX-License-Identifier: Apache-2.0
"""Makes `python -m dpjax` the console command `dpjax`; see `dpjax.cli` for its subcommands."""

from dpjax.cli import main

if __name__ == "__main__":
    main()
