# SPDX-License-Identifier: Apache-2.0
"""`kills`: the edit of a source line that a test must notice, written above that test.

`test_mutants.py` reads these decorators from the test files without importing them, applies
each edit to a copy of the sources and runs the test against the copy.
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
    """Declares that the decorated test fails when ``before`` becomes ``after`` in a source file.

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
    """All mutants of all test files, in the order of the files."""
    for path in sorted(TESTS.glob("test_*.py")):
        if "@kills(" in (text := path.read_text()):
            yield from _of(ast.parse(text).body, f"{path.name}::")


def _of(statements, prefix):
    for node in statements:
        if isinstance(node, ast.ClassDef):
            yield from _of(node.body, f"{prefix}{node.name}::")
        calls = [d for d in getattr(node, "decorator_list", ()) if isinstance(d, ast.Call)]
        for number, call in enumerate(d for d in calls if ast.unparse(d.func) == "kills"):
            edit = [ast.literal_eval(argument) for argument in call.args]
            options = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
            case = options.get("case")
            killer = f"{prefix}{node.name}" + (f"[{case}]" if case is not None else "")
            name = f"{prefix.removeprefix('test_')}{node.name}-{number}".replace(".py::test", "")
            yield Mutant(name, *edit, killer, options.get("slow", False))
