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


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=[f"block {i}" for i in range(len(BLOCKS))])
def test_code_blocks_run(block, capsys):
    exec(compile(block, "README.md", "exec"), {})


def test_there_is_code_to_run():
    assert len(BLOCKS) >= 3


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
