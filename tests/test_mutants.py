# SPDX-License-Identifier: Apache-2.0
"""Mutants: single edits that break the guarantee. A named test must kill each of them.

A library whose parts are all tested can still leak where they meet. Every `kills(...)`, above a
test or in the table `KILLS` of its file, edits a copy of the sources and runs that test against the
copy; a mutant that survives is a hole in the tests.
"""

import os
import pathlib
import time

import mutation_server
import pytest
from mutation import mutants

import dpjax

SOURCES = pathlib.Path(dpjax.__file__).parent
# Where time is short, as on a machine that others use too, mutants are left out after so long.
ENDS = time.monotonic() + 60 * float(os.environ.get("DPJAX_TEST_MINUTES", "inf"))
MUTANTS = list(mutants())
FIRST = {m.killer.partition("::")[0]: m for m in reversed(MUTANTS) if not m.slow}.values()


def test_there_are_enough_and_no_two_alike():
    assert sum(not m.slow for m in MUTANTS) >= 100
    assert len({m[1:] for m in MUTANTS}) == len(MUTANTS)


def test_each_line_to_edit_stands_once():
    """Slow mutants too: a change of their line must be noticed where it is made."""
    lost = [m.name for m in MUTANTS if (SOURCES / m.file).read_text().count(m.before) != 1]
    assert not lost


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    with mutation_server.Server(SOURCES, tmp_path_factory.mktemp("mutants")) as server:
        yield server


def mark(mutant):
    """`make test` runs one mutant of each file of tests."""
    when = pytest.mark.slow if mutant.slow else () if mutant in FIRST else pytest.mark.thorough
    return pytest.param(mutant, id=mutant.name, marks=when)


@pytest.mark.parametrize("mutant", [mark(m) for m in MUTANTS])
def test_mutant_is_killed(mutant, judge):
    if time.monotonic() > ENDS:
        pytest.skip("DPJAX_TEST_MINUTES are over")
    with judge.edited(mutant.file, mutant.before, mutant.after):
        status, report = judge.outcome(mutant.killer)
    # 1: tests ran and failed.  Anything else (no such test, a crash) proves nothing.
    assert status == 1, report[-3000:]
    assert " failed" in report, report[-3000:]
    assert "NameError: name" not in report, "the edit reads a name that is not there"
