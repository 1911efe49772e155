# SPDX-License-Identifier: Apache-2.0
"""Runs notebooks without Jupyter: their code, cell by cell, and what each cell shows.

`python tests/notebooks.py` runs all of them and writes down what they showed, for those who
read without running.  The tests run them too, and compare.  As in Jupyter, a cell shows what it
prints, what it displays, the value of its last line, and the figures that it has drawn.
"""

import ast
import base64
import contextlib
import importlib
import io
import json
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from matplotlib import pyplot

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "experiments/notebooks").glob("*.ipynb"))
PNG = "image/png"
importlib.import_module("flax.nnx")  # before the shell below: it would take that for IPython
pyplot.switch_backend("agg")  # before a cell runs: it would ask the shell below for its events


class Ran(NamedTuple):
    """A cell of code that ran, and its outputs in the format of notebooks."""

    cell: dict[str, Any]
    outputs: list[dict[str, Any]]

    @property
    def shown(self) -> tuple[str, int]:
        """Its text, HTML included, and the number of its images."""
        return _shown(self.outputs)

    @property
    def expected(self) -> tuple[str, int]:
        """What it showed when that was written down."""
        return _shown(self.cell["outputs"])


def _shown(outputs: list[dict[str, Any]]) -> tuple[str, int]:
    data = [{"text/plain": output.get("text", []), **output.get("data", {})} for output in outputs]
    text = [line for each in data for kind in each if kind != PNG for line in each[kind]]
    return "".join(text), sum(PNG in each for each in data)


def run(notebook: dict[str, Any]) -> Iterator[Ran]:
    """Runs all cells, one after the other, in one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            yield Ran(cell, list(_outputs("".join(cell["source"]), f"cell {number}", names)))


def _outputs(source: str, name: str, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    value, printed, images = None, io.StringIO(), []
    with contextlib.redirect_stdout(printed), _shell(images.append):
        exec(compile(ast.Module(body, []), name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    if lines := printed.getvalue().splitlines(keepends=True):
        yield {"name": "stdout", "output_type": "stream", "text": lines}
    yield from (_display({PNG: image.data}) for image in images)
    if value is not None:
        data = {"text/plain": repr(value)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_()
        yield {**_display(data), "output_type": "execute_result"}
    for number in pyplot.get_fignums():
        file = io.BytesIO()
        # Without the version of Matplotlib: an equal figure gives an equal file.
        pyplot.figure(number).savefig(file, dpi=80, metadata={"Software": None})
        yield _display({PNG: file.getvalue()})
    pyplot.close("all")


def _display(data: dict[str, Any]) -> dict[str, Any]:
    def plain(value: str | bytes) -> Any:
        encoded = isinstance(value, bytes)
        return base64.b64encode(value).decode() if encoded else value.splitlines(keepends=True)

    shown = {kind: plain(value) for kind, value in data.items()}
    return {"data": shown, "metadata": {}, "output_type": "display_data"}


@contextlib.contextmanager
def _shell(show: Callable[[Any], None]) -> Iterator[None]:
    """As much of IPython as `dpjax.cli.report.live_plot` needs; an image can be replaced."""

    def display(image: Any, display_id: bool) -> Any:
        del display_id
        show(image)
        return types.SimpleNamespace(update=lambda other: image.__dict__.update(other.__dict__))

    module: Any = types.ModuleType("IPython")
    module.get_ipython, module.version_info = object, (9, 0)
    parts: Any = types.ModuleType("IPython.display")
    parts.display, parts.Image = display, lambda data, width: types.SimpleNamespace(data=data)
    sys.modules |= {"IPython": module, "IPython.display": parts}
    try:
        yield
    finally:
        del sys.modules["IPython"], sys.modules["IPython.display"]


def _write(path: pathlib.Path) -> None:
    notebook = json.loads(path.read_text())
    for number, ran in enumerate(run(notebook), 1):
        outputs = [
            {**each, **({"execution_count": number} if _is_result(each) else {})}
            for each in ran.outputs
        ]
        ran.cell.update(execution_count=number, outputs=outputs)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def _is_result(output: dict[str, Any]) -> bool:
    return output["output_type"] == "execute_result"


if __name__ == "__main__":
    for path in NOTEBOOKS:
        _write(path)
