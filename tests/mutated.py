# SPDX-License-Identifier: Apache-2.0
"""Runs one test against other sources, in a process that begins with everything but dpjax.

The server has imported what a test needs besides, so that a mutant does not pay for it.  This
file must never import dpjax: the process that it begins imports the edited copy.
"""

import multiprocessing
import os
import pathlib
import sys

import pytest

OPTIONS = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
LIBRARIES = ["jax", "optax", "flax.linen", "dp_accounting", "scipy.stats", "pytest"]


def _test(sources, killer, report):
    with open(report, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ["DPJAX_TESTED_SOURCES"] = str(sources)
    os.chdir(sources)
    sys.path.insert(0, str(sources))
    tests = pathlib.Path(__file__).parent
    sys.exit(int(pytest.main([*OPTIONS, f"--rootdir={tests.parent}", str(tests / killer)])))


def outcome(sources, killer):
    """The status of pytest, and what it wrote."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    report = sources / "report.txt"
    process = context.Process(target=_test, args=(sources, killer, report))
    process.start()
    process.join()
    return process.exitcode, report.read_text()
