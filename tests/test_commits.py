# SPDX-License-Identifier: Apache-2.0
"""The subjects of commits are short. A reader judges whether they are imperative."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# A date instead of a commit, because a shallow clone does not hold the commit.
SINCE = "2026-11-29T13:30:00+00:00"
LONGEST = 72


def too_long(subjects):
    return [subject for subject in subjects if len(subject) > LONGEST]


def test_subjects_of_commits_are_short():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no commits are here, or no git that reads them")
    log = ["git", "-C", str(ROOT), "log", f"--since={SINCE}", "--format=%s"]
    done = subprocess.run(log, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"git does not read the commits: {done.stderr.strip()}")
    assert not too_long(done.stdout.splitlines())


def test_a_long_subject_is_found():
    assert too_long(["x" * 72, "y" * 73]) == ["y" * 73]
