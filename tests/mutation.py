# SPDX-License-Identifier: Apache-2.0
"""Mutants: edits of a source line that a test must notice, declared in the file of that test.

One or two stand above the test as decorators `kills`. A test with more of them has a row in the
table `KILLS` at the end of its file. `test_mutants.py` reads both from the test files without
importing them, applies each edit to a copy of the sources and runs the test against the copy.
"""

import ast
import pathlib
from typing import NamedTuple

TESTS = pathlib.Path(__file__).parent


class Mutant(NamedTuple):
    """In ``file``, ``before`` becomes ``after``; the test ``killer`` must fail then."""

    name: str
    file: str
    before: str
    after: str
    killer: str
    slow: bool


def kills(file, before, after, *, case=None, slow=False):
    """Declares that a test fails when ``before`` becomes ``after`` in a source file.

    The test is the decorated one, or the one whose row of ``KILLS`` holds this call: ``KILLS``
    maps ``"test_name"`` or ``"TestClass::test_name"`` to a list of calls.

    Args:
      file: Path below ``src/dpjax``.
      before: Text that occurs in the file exactly once.
      after: What replaces it.
      case: The parametrisation that fails, for example ``"0.5-flat"``; by default all are run.
      slow: Whether only ``make test-all`` tries it.
    """
    del file, before, after, case, slow
    return lambda test: test


def mutants():
    """All mutants of all test files, in the order of the files and of the tests."""
    for path in sorted(TESTS.glob("test_*.py")):
        statements = ast.parse(path.read_text()).body
        table = _table(statements)
        for test, calls in _tests(statements):
            for number, call in enumerate(calls + table.pop(test, [])):
                yield _mutant(f"{path.name}::{test}", number, call)
        assert not table, f"{path.name} has no test of the name {' or '.join(table)}"


def _table(statements):
    """The table `KILLS` of a file: the calls of `kills` by the names of the tests."""
    for node in statements:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "KILLS":
            rows = zip(node.value.keys, node.value.values, strict=True)
            return {test.value: calls.elts for test, calls in rows}
    return {}


def _tests(statements, prefix=""):
    """The name of each test and the calls of `kills` above it."""
    for node in statements:
        if isinstance(node, ast.ClassDef):
            yield from _tests(node.body, f"{prefix}{node.name}::")
        elif isinstance(node, ast.FunctionDef):
            decorators = node.decorator_list
            yield prefix + node.name, [d for d in decorators if ast.unparse(d).startswith("kills(")]


def _mutant(test, number, call):
    edit = [ast.literal_eval(argument) for argument in call.args]
    options = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    case = f"[{options['case']}]" if "case" in options else ""
    name = f"{test.removeprefix('test_')}-{number}".replace(".py::test", "")
    return Mutant(name, *edit, test + case, options.get("slow", False))
