# SPDX-License-Identifier: Apache-2.0
"""Ceilings: what is not needed is not here, and a line does one thing.

Size is counted in statements and in density (`tests/density.py`), never in lines. A ceiling falls
with each change that deletes. A new capability raises it by what it needs, in a commit of its own.
"""

import ast
import pathlib
import statistics

import density
import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = ROOT / "src" / "dpjax"
FOLDERS = {"src": SOURCES, "experiments": ROOT / "experiments", "tests": ROOT / "tests"}

STATEMENTS = {"src": 17_500, "experiments": 7_800, "tests": 14_930}
# Tokens on a line of code; per 1,000 statements; per cent.
SHARES = {
    "src": {
        "density": 8.5,
        "conditional": 10.0,
        "tuples": 0.5,
        "products": 0.1,
        "unpacked": 0.2,
        "odd comments": 2.0,
    },
    "experiments": {
        "density": 8.4,
        "conditional": 13.5,
        "tuples": 0.2,
        "products": 0.1,
        "unpacked": 0.2,
        "odd comments": 1.0,
    },
    "tests": {
        "density": 10.1,
        "conditional": 11.5,
        "tuples": 23.5,
        "products": 0.1,
        "unpacked": 1.5,
        "odd comments": 12.4,
    },
}
# Files of 60 lines of code and more stay below this density, unless they are formulas.
DENSEST = 11.6
FORMULAS = {
    "_bookkeeping/patches.py",
    "_estimated_norms/jl.py",
    "accounting/_rdp_divergence.py",
    "benchmarks/zoo_models.py",
    "noise/normal.py",
    "sampling/sparse.py",
    "scattering/_fourier.py",
    "scattering/filters.py",
    "strategies/_powers.py",
}
RAISES = 0.05  # of the lines of code
MEDIAN_ERROR = 90  # characters


def raises_in(folder):
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc:
                yield node


def message_of(node):
    """The text of an error; what is formatted counts as three characters."""
    arguments = getattr(node.exc, "args", [])
    first = arguments[0] if arguments else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return first.value
    if isinstance(first, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "..." for v in first.values)
    return ""


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_small_and_a_line_does_one_thing(name):
    count = density.total(density.measured(FOLDERS[name]))
    assert count["statements"] <= STATEMENTS[name]
    shares = density.shares(count)
    over = {kind: share for kind, share in shares.items() if share > SHARES[name][kind]}
    assert not over


@pytest.mark.parametrize("name", ["src", "experiments"])
def test_only_formulas_are_dense(name):
    dense = {
        "/".join(path.parts[-2:])
        for path, count in density.measured(FOLDERS[name]).items()
        if count["lines"] >= 60 and density.density(count) > DENSEST
    }
    assert dense <= FORMULAS


def test_errors_are_short():
    raises = list(raises_in(SOURCES))
    lines = sum(node.end_lineno - node.lineno + 1 for node in raises)
    assert lines <= RAISES * density.total(density.measured(SOURCES))["lines"]
    texts = [message_of(node) for node in raises]
    assert statistics.median(len(text) for text in texts if text) <= MEDIAN_ERROR
