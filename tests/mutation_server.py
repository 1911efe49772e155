# SPDX-License-Identifier: Apache-2.0
"""Runs one test against edited sources, in a process that begins with everything but dpjax.

This file is also the program of that server. The server imports what tests need except dpjax, and
forks once for each mutant, so a mutant pays for no import but that of dpjax. A fork shares no
state with the tests that ran before. The server must never import dpjax: the fork imports the
edited copy.
"""

import compileall
import contextlib
import importlib
import json
import os
import pathlib
import py_compile
import shutil
import subprocess
import sys
import traceback

# What makes reports good to read, and looks for leaks at the end, costs more than most killers.
OPTIONS = ["-q", "-x", "-m", "", "--no-header", "--assert=plain", "-p", "no:cacheprovider"]
OPTIONS += ["-p", "no:unraisableexception", "-p", "no:threadexception"]
# A mutant that hangs ends before the test that waits for it, and is not taken for killed.
OPTIONS += ["-o", "faulthandler_timeout=400"]
LIBRARIES = ["jax", "optax", "flax.linen", "dp_accounting", "scipy.stats", "hypothesis", "pytest"]


class Server:
    """A process that judges mutants, one after the other, in one copy of the sources."""

    def __init__(self, sources, folder):
        """Copies the package ``sources`` into an empty ``folder``."""
        self._folder, self._copy = folder, folder / sources.name
        shutil.copytree(sources, self._copy, ignore=shutil.ignore_patterns("__pycache__"))
        # Compiled once for all mutants. A checked hash knows an edited file from the original.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self._copy, quiet=1, invalidation_mode=mode)

    def __enter__(self):
        """Begins it."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, __file__], **pipes)
        return self

    def __exit__(self, *_):
        """Ends it, by the end of its input."""
        self._process.communicate()

    @contextlib.contextmanager
    def edited(self, file, before, after):
        """In ``file``, ``before`` is ``after`` while the context lasts."""
        path = self._copy / file
        source = path.read_text()
        assert source.count(before) == 1, "the line to edit must be there, once"
        path.write_text(source.replace(before, after))
        try:
            yield
        finally:
            path.write_text(source)

    def outcome(self, killer):
        """The status of pytest, and what it wrote."""
        print(json.dumps([str(self._folder), killer]), file=self._process.stdin, flush=True)
        status = self._process.stdout.readline()
        return int(status), (self._folder / "report.txt").read_text()


def _serve():
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _test(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _test(sources, killer):
    """Never returns."""
    import pytest

    with open(os.devnull) as nothing, open(f"{sources}/report.txt", "w") as report:
        os.dup2(nothing.fileno(), 0)
        for stream in (1, 2):
            os.dup2(report.fileno(), stream)
    # Also for programs that a test starts.
    os.environ["DPJAX_TESTED_SOURCES"] = os.environ["PYTHONPATH"] = sources
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they would import hypothesis again
    os.chdir(sources)
    sys.path.insert(0, sources)
    tests = pathlib.Path(__file__).parent
    status = 70  # a crash
    try:
        status = int(pytest.main([*OPTIONS, f"--rootdir={tests.parent}", str(tests / killer)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
