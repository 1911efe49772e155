# SPDX-License-Identifier: Apache-2.0
"""`dpjax sweep`: draws settings, runs them, ranks them, and prices the search.

`search_space` says what is tried, `child_processes` runs it, `search_cost` prices it, and `command`
is the search.
"""

from dpjax.cli.sweep.command import run

__all__ = ["run"]
