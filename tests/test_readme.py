# SPDX-License-Identifier: Apache-2.0
"""The README's code runs as it stands, and what it says of the project is so."""

import pathlib
import re
import subprocess
import sys

import pytest

import dpjax

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.thorough
def test_the_code_runs_and_prints_accuracy_statement_and_epsilon(capsys):
    assert len(BLOCKS) == 2
    exec(compile("\n".join(BLOCKS), "README.md", "exec"), {})
    accuracy, *_, epsilon = capsys.readouterr().out.splitlines()
    assert float(accuracy) > 0.9
    assert 0 < float(epsilon) < 10


def test_every_room_is_in_the_table():
    for name in dpjax.__all__:
        if hasattr(getattr(dpjax, name), "__path__") or hasattr(getattr(dpjax, name), "__file__"):
            assert f"`{name}`" in README, name


def test_the_test_line_is_what_ci_runs():
    assert re.search(r"^    make test\b", README, re.MULTILINE)
    assert re.search(r"^make test\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def test_the_make_targets_it_names_exist():
    named = set(re.findall(r"(?:`|^    )make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "docs", "test"} <= named
    listed = subprocess.run(
        ["make", "-s", "help", f"PY={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for target in named:
        assert f"make {target} " in listed
