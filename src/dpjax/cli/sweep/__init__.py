# SPDX-License-Identifier: Apache-2.0
"""`dpjax sweep`: draws settings, runs them, ranks them, and prices the search."""

from dpjax.cli.sweep.command import run

__all__ = ["run"]
