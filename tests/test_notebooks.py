# SPDX-License-Identifier: Apache-2.0
"""The notebooks run as they stand, and print what stands below their cells."""

import json
import re

import notebooks
import pytest

NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.mark.slow
@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_print_what_stands_below_their_cells(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    for ran in notebooks.run(notebook):
        assert NUMBER.sub("0", ran.printed) == NUMBER.sub("0", ran.expected)
        found, expected = (
            [float(x) for x in NUMBER.findall(text)] for text in (ran.printed, ran.expected)
        )
        assert found == pytest.approx(expected, rel=0.05), ran.printed


def test_there_are_notebooks_to_run():
    assert [path.stem for path in notebooks.NOTEBOOKS] == ["epsilons", "links"]
