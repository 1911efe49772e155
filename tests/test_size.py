# SPDX-License-Identifier: Apache-2.0
"""Ceilings: what is not needed is not here. `python tests/test_size.py` prints the table.

A ceiling falls with each change that deletes. A new capability raises it by what it needs, in a
commit of its own.
"""

import ast
import pathlib
import statistics

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = ROOT / "src" / "dpjax"

# Lines, of all files of Python (and of notebooks, for experiments).
CEILINGS = {"src": 29_000, "tests": 23_500, "experiments": 10_700}
CODE = 16_480  # lines of src without blank lines, comments and docstrings
RAISES = 0.05  # of the code
MEDIAN_ERROR = 90  # characters


def lines_of(path):
    return path.read_text().count("\n")


def trees_of(folder):
    return [(path, ast.parse(path.read_text())) for path in sorted(folder.rglob("*.py"))]


def code_lines(path, tree):
    """The numbers of the lines that hold code."""
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.update(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(path.read_text().splitlines(), 1)
    return {
        number
        for number, line in lines
        if line.strip() and not line.strip().startswith("#") and number not in docstrings
    }


def raises_of(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc]


def message_of(node):
    """The text of an error; what is formatted counts as three characters."""
    arguments = getattr(node.exc, "args", [])
    parts = arguments[0] if arguments else None
    if isinstance(parts, ast.Constant) and isinstance(parts.value, str):
        return parts.value
    if isinstance(parts, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "..." for v in parts.values)
    return None


def measured(folder):
    """Lines, code, functions, raises, the share of code that they take, and their median text."""
    files = trees_of(folder)
    code = sum(len(code_lines(path, tree)) for path, tree in files)
    raises = [node for _, tree in files for node in raises_of(tree)]
    texts = [len(text) for text in map(message_of, raises) if text]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        "lines": sum(lines_of(path) for path, _ in files),
        "code": code,
        "functions": sum(isinstance(n, functions) for _, tree in files for n in ast.walk(tree)),
        "raises": len(raises),
        "share": sum(node.end_lineno - node.lineno + 1 for node in raises) / max(1, code),
        "median": statistics.median(texts) if texts else 0,
    }


def test_the_sources_are_small():
    found = measured(SOURCES)
    assert found["lines"] <= CEILINGS["src"]
    assert found["code"] <= CODE
    assert found["share"] <= RAISES
    assert found["median"] <= MEDIAN_ERROR


@pytest.mark.parametrize("folder", ["tests", "experiments"])
def test_tests_and_experiments_are_small(folder):
    assert sum(map(lines_of, (ROOT / folder).rglob("*.py"))) <= CEILINGS[folder]


def main():
    folders = [path for path in sorted(SOURCES.iterdir()) if path.is_dir()]
    for folder in [*folders, SOURCES, ROOT / "tests", ROOT / "experiments"]:
        cells = measured(folder)
        if cells["lines"]:
            words = "  ".join(f"{name} {value:.4g}" for name, value in cells.items())
            print(f"{folder.name:12} {words}")


if __name__ == "__main__":
    main()
