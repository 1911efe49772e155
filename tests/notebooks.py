# SPDX-License-Identifier: Apache-2.0
"""Runs notebooks without Jupyter: their code, cell by cell, and what each cell prints.

`python tests/notebooks.py` runs all of them and writes down what they printed, for those who
read without running.  The tests run them too, and compare.
"""

import contextlib
import io
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "experiments/notebooks").glob("*.ipynb"))


class Ran(NamedTuple):
    """A cell of code that ran."""

    cell: dict[str, Any]
    printed: str

    @property
    def expected(self) -> str:
        """What it printed when that was written down."""
        return "".join(line for output in self.cell["outputs"] for line in output["text"])


def run(notebook: dict[str, Any]) -> Iterator[Ran]:
    """Runs all cells, one after the other, in one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
            yield Ran(cell, out.getvalue())


def _write(path: pathlib.Path) -> None:
    notebook = json.loads(path.read_text())
    for number, ran in enumerate(run(notebook), 1):
        lines = ran.printed.splitlines(keepends=True)
        output = {"name": "stdout", "output_type": "stream", "text": lines}
        ran.cell.update(execution_count=number, outputs=[output] if lines else [])
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for path in NOTEBOOKS:
        _write(path)
