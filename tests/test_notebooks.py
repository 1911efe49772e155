# SPDX-License-Identifier: Apache-2.0
"""The notebooks run as they stand, and show what stands below their cells."""

import json
import re

import notebooks
import pytest

NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.mark.slow
@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_show_what_stands_below_their_cells(path):
    for ran in notebooks.run(json.loads(path.read_text())):
        (text, images), (expected, drawn) = ran.shown, ran.expected
        assert NUMBER.sub("0", text) == NUMBER.sub("0", expected)
        assert images == drawn
        found, stood = ([float(x) for x in NUMBER.findall(each)] for each in (text, expected))
        assert found == pytest.approx(stood, rel=0.05), text


def test_there_are_notebooks_to_run():
    stems = [path.stem for path in notebooks.NOTEBOOKS]
    assert stems == ["chain", "epsilons", "links", "llm", "own_data", "papers"]


def test_the_statement_that_a_notebook_shows_has_the_epsilon_that_its_cell_asks_for():
    """Results choose where that run stops, so all planned steps count."""
    (path,) = (path for path in notebooks.NOTEBOOKS if path.stem == "own_data")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if "outputs" in cell]
    source = "".join(line for cell in cells for line in cell["source"])
    asked = re.findall(r"calibrate\(epsilon=([\d.]+), delta", source)
    shown = "".join(notebooks._shown(cell["outputs"])[0] for cell in cells)
    headlines = re.findall(r"\(([\d.]+), 1e-05\)-differentially private", shown)
    assert [float(epsilon) for epsilon in headlines] == 2 * [float(*asked)]  # as text and as HTML


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_complete(path):
    """As Jupyter reads them, with an install cell first, and with a figure."""
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    install = "".join(code[0]["source"])
    # Names on an index can belong to others: the source is a folder, a wheel or a repository.
    assert re.search(r'SOURCE = .*"dpjax-\*.whl".*"../.."', install)
    assert re.search(r'"dpjax", "sklearn".*\n.*"install", "-q", f"{SOURCE}\[data,plots\]"', install)
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any(notebooks.PNG in output.get("data", {}) for output in outputs)
    assert " at 0x" not in json.dumps(outputs)
