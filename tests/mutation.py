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
        text = path.read_text()
        if "kills(" not in text:
            continue
        statements = ast.parse(text).body
        table = _table(statements)
        for test, decorators in _tests(statements):
            calls = decorators + table.pop(test, [])
            for number, call in enumerate(calls):
                yield _mutant(path.name, test, number, call)
        assert not table, f"{path.name} has no test of the name {' or '.join(table)}"


def _table(statements):
    """The table `KILLS` of a file: the calls of `kills` by the names of the tests."""
    for node in statements:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KILLS":
            rows = zip(node.value.keys, node.value.values, strict=True)
            return {test.value: calls.elts for test, calls in rows}
    return {}


def _tests(statements, prefix=""):
    """The name of each test and the calls of `kills` above it."""
    for node in statements:
        if isinstance(node, ast.ClassDef):
            yield from _tests(node.body, f"{prefix}{node.name}::")
        elif isinstance(node, ast.FunctionDef):
            calls = [d for d in node.decorator_list if isinstance(d, ast.Call)]
            yield prefix + node.name, [c for c in calls if ast.unparse(c.func) == "kills"]


def _mutant(file, test, number, call):
    edit = [ast.literal_eval(argument) for argument in call.args]
    options = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    killer = f"{file}::{test}"
    name = f"{killer.removeprefix('test_')}-{number}".replace(".py::test", "")
    if options.get("case") is not None:
        killer += f"[{options['case']}]"
    return Mutant(name, *edit, killer, options.get("slow", False))
