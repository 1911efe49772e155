# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that removes every `if ...: raise` of dpjax in turn: a test must fail.

`pytest -p tests.guards` loads dpjax with a switch in each such condition. A test with
`pytest.raises` that passes runs again for each guard that it reached, with that guard switched
off, until one test has failed without it. `.ci/run` requires this of every guard that the quick
tests reach, `make test-all` of every guard and every other `raise`. Nothing is kept between runs,
so new guards and renamed tests need no upkeep.
"""

import ast
import importlib.abc
import importlib.machinery
import inspect
import pathlib
import re
import signal
import sys

import beartype
import jaxtyping
import pytest
from _pytest.runner import runtestprotocol

SOURCES = pathlib.Path(__file__).parent.parent / "src" / "dpjax"
# Where shapes are checked, too: these rooms take arrays alone, others also what becomes one.
SHAPED = ("clipping/", "gradients/", "mechanism/", "noise/", "sampling", "training/", "trees")
# Raised in processes that a test starts, which load dpjax without switches; so is all of `cli`.
ELSEWHERE = {
    ("gradients/nan_isolation.py", "not sharding.is_fully_replicated"),
    ("meshes.py", "len(places) > 1"),
}
reached, killed = set(), set()
off = None


class _Switches(ast.NodeTransformer):
    """`if c: raise` becomes `if c and _guard(name): raise`; other raises are only recorded."""

    def __init__(self, file):
        self.file, self.guards, self.raises = file, {}, {}

    def visit_If(self, node):
        *before, last = node.body
        if not isinstance(last, ast.Raise):
            return self.generic_visit(node)
        name = f"{self.file}:{last.lineno}"
        self.guards[name] = ast.unparse(node.test)
        node.test = ast.BoolOp(ast.And(), [self.visit(node.test), _ask(name)])
        node.body = [*self._all(before), last]
        node.orelse = self._all(node.orelse)
        return node

    def visit_Raise(self, node):
        if node.exc is None:  # What is raised again is decided elsewhere.
            return node
        name = f"{self.file}:{node.lineno}"
        self.raises[name] = ast.unparse(node.exc).partition("(")[0]
        return [ast.Expr(_ask(name)), node]

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        if self.file.startswith(SHAPED) and "[Array" in ast.unparse(node).partition('"""')[0]:
            node.decorator_list.append(ast.Name("_shaped", ast.Load()))
        return node

    def _all(self, statements):
        return self.generic_visit(ast.Module(statements, [])).body


def _ask(name):
    return ast.Call(ast.Name("_guard", ast.Load()), [ast.Constant(name)], [])


def _switched(path):
    switches = _Switches(path.relative_to(SOURCES).as_posix())
    tree = switches.visit(ast.parse(path.read_text()))
    return ast.fix_missing_locations(tree), switches


def _guard(name):
    reached.add(name)
    return name != off


def _shaped(function):
    """Checks annotated dtypes and shapes of arrays, and nothing else that is annotated."""
    kinds = function.__annotations__
    function.__annotations__ = {
        name: kind
        for name, kind in kinds.items()
        if re.search(r"\[Array(Like)?, ", str(kind)) and "Callable" not in str(kind)
    }
    return jaxtyping.jaxtyped(function, typechecker=beartype.beartype)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        return compile(_switched(pathlib.Path(self.path))[0], self.path, "exec")

    def exec_module(self, module):
        module.__dict__.update(_guard=_guard, _shaped=_shaped)
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] != "dpjax":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        spec.loader = _Loader(fullname, spec.origin)
        return spec


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Comes before `conftest.py`, which imports dpjax."""
    signal.signal(signal.SIGALRM, _late)
    sys.meta_path.insert(0, _Finder())


def _expects_errors(item):
    return "raises(" in inspect.getsource(getattr(item, "function", _late))


def _late(*_):
    raise TimeoutError("without its guard, a test may wait for ever")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Repeats a test that passed without each of the guards that it reached."""
    global off
    before = set(reached)
    reached.clear()
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    passed = all(report.passed for report in runtestprotocol(item, nextitem=item))
    if not _expects_errors(item):
        reached.clear()
    mine = sorted(reached - killed) if passed else ()
    reached.update(before)
    for off in mine:
        signal.alarm(60)
        for report in runtestprotocol(item, log=False, nextitem=item):
            late = "TimeoutError" in str(report.longrepr)
            if report.when == "call" and report.failed and not late:
                killed.add(off)
        signal.alarm(0)
    off = None
    item.session._setupstate.teardown_exact(nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish(session):
    """Fails where a guard can go unnoticed; workers only hand on what they found."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput.update(reached=list(reached), killed=list(killed))
    elif any(_left(session.config)) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    found = getattr(node, "workeroutput", {})  # A worker that crashed has none.
    reached.update(found.get("reached", ()))
    killed.update(found.get("killed", ()))


def pytest_terminal_summary(terminalreporter, config):
    if not hasattr(config, "workerinput"):
        terminalreporter.section(f"{len(killed)} guards made a test fail when they were removed")
        for line in _left(config):
            terminalreporter.line(line, red=True)


def _left(config):
    """The raises that no test covers: of all if all tests ran, else of the reached ones."""
    if config.args_source is not config.ArgsSource.TESTPATHS or config.option.keyword:
        return  # The test that fails without a guard may not have been selected.
    every = not config.option.markexpr
    for path in sorted(set(SOURCES.rglob("*.py")) - set(SOURCES.glob("cli/**/*.py"))):
        _, found = _switched(path)
        for at, what in found.raises.items():
            if every and at not in reached:
                yield f"{at}: no test raises this {what}"
        for at, what in found.guards.items():
            asked = every or at in reached
            if asked and at not in killed and (found.file, what) not in ELSEWHERE:
                yield f"{at}: no test fails without `if {what}: raise`"
