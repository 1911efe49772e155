# SPDX-License-Identifier: Apache-2.0
"""The plan of the house, held by tests: floors, public names, documentation."""

import ast
import collections
import importlib
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import dpjax

ROOT = pathlib.Path(dpjax.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# A file imports from its own storey and from those before it in this table; rooms form no circle.
FLOORS = {
    "core": """
        checks types trees meshes processes schedules _arrays _deprecated _display _files
        _rounding _stream _versions verify clipping noise sampling strategies accounting mechanism
        ledger gradients training planning reports data losses
    """,
    "shelf": """
        models metrics scattering features diagnostics federated auditing testing sklearn
    """,
    "commands": """
        cli __main__
    """,
}
FLOOR = {room: n for n, rooms in enumerate(FLOORS.values()) for room in rooms.split()}

ROOMS = {module.name for module in pkgutil.iter_modules([str(ROOT)])}


def room(module):
    return module.split(".")[1]


def imports(path):
    """The dpjax rooms that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dpjax":
            if node.module == "dpjax":
                yield from (alias.name for alias in node.names)
            else:
                yield room(node.module)
        elif isinstance(node, ast.Import):
            yield from (room(a.name) for a in node.names if a.name.startswith("dpjax."))


def test_every_room_has_a_floor_and_there_are_three():
    assert set(FLOOR) == ROOMS
    assert len(FLOORS) == 3


def test_imports_come_from_floors_above():
    for path in set(FILES) - {ROOT / "__init__.py"}:
        here = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for imported in set(imports(path)) - {here}:
            assert FLOOR[imported] <= FLOOR[here], f"{path}: {here} imports {imported}"


def without_types(tree):
    """A module without what only type checkers read."""
    tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.unparse(node)[:20]]
    return tree


def circle(edges):
    """A circle in a graph, or None."""
    left = {node: set(others) & set(edges) for node, others in edges.items()}
    while free := [node for node, others in left.items() if not others]:
        for node in free:
            del left[node]
        left = {node: others - set(free) for node, others in left.items()}
    return sorted(left) or None


def test_neither_rooms_nor_the_files_of_a_room_import_each_other_in_a_circle():
    rooms, files = {room: set() for room in ROOMS}, {}
    for path in set(FILES) - {ROOT / "__init__.py"}:
        here = path.relative_to(ROOT).parts[0].removesuffix(".py")
        rooms[here] |= set(imports(path)) - {here}
        files[path] = set()
        for node in ast.walk(without_types(ast.parse(path.read_text()))):
            if isinstance(node, ast.ImportFrom) and node.module and "dpjax" in node.module:
                base = ROOT.joinpath(*node.module.split(".")[1:])
                for name in (base / alias.name for alias in node.names):
                    files[path].add(name.with_suffix(".py"))
                files[path].add(base.with_suffix(".py"))
    assert circle(rooms) is None
    assert circle(files) is None


# How many names packages take from another, and how many of these it does not export. Both only
# fall.
CROSSING = 48
NOT_EXPORTED = 31


def crossing():
    """The package and the name of each import from one package into another part of dpjax."""
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    for path in set(FILES) - {ROOT / "__init__.py"}:
        here = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpjax."):
                package = room(node.module)
                if package in packages - {here}:
                    yield from ((package, alias.name) for alias in node.names)


def test_few_names_cross_packages_and_fewer_are_not_exported():
    crossed = set(crossing())
    exported = {name: importlib.import_module(f"dpjax.{name}").__all__ for name, _ in crossed}
    inner = sorted(pair for pair in crossed if pair[1] not in exported[pair[0]])
    assert len(crossed) <= CROSSING, sorted(crossed)
    assert len(inner) <= NOT_EXPORTED, inner


def test_no_name_of_a_file_occurs_three_times():
    # A subcommand has its name twice: its flags, and what it runs.
    names = collections.Counter(path.stem for path in FILES if path.parent.name != "flag_sets")
    assert {name for name, count in names.items() if count > 2} <= {"__init__", "__main__"}


def test_no_private_part_of_jax_is_read_and_no_frame_or_module_is_searched():
    private = r"jax\._src|\._trace\b|parent_trace|sys\.modules|inspect\.stack"
    found = {path.name for path in FILES if re.search(private, path.read_text())}
    assert not found


def test_no_module_holds_what_changes():
    """A table is a tuple, a frozen mapping or a literal that no function writes to."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        tables = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                assert not any(isinstance(n, ast.Global) for n in ast.walk(function)), path
                for node in ast.walk(function):
                    for target in getattr(node, "targets", [getattr(node, "target", None)]):
                        written = isinstance(target, ast.Subscript) and target.value
                        assert getattr(written, "id", None) not in tables, f"{path}: {written.id}"


def test_a_room_exports_each_name_once():
    for module in ["dpjax", *[f"dpjax.{name}" for name in sorted(ROOMS) if name[0] != "_"]]:
        loaded = importlib.import_module(module)
        assert len(set(loaded.__all__)) == len(loaded.__all__), module
        missing = [name for name in loaded.__all__ if not hasattr(loaded, name)]
        assert not missing, f"{module}.__all__ names {missing}, which do not exist"


def test_public_functions_are_documented_and_annotated():
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert len(ast.get_docstring(tree) or "") > 60, f"{path}: a file opens with an essay"
        door = path.parent == ROOT or path.name == "__init__.py"
        targets = [t for node in tree.body for t in getattr(node, "targets", ())]
        names = [getattr(target, "id", None) for target in targets]
        assert door or "__all__" not in names, f"{path}: only doors export"
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}: {node.name} is not documented"
                if isinstance(node, ast.FunctionDef):
                    arguments = [*node.args.args, *node.args.kwonlyargs]
                    annotated = all(a.annotation is not None for a in arguments)
                    assert annotated, f"{path}: {node.name}"
                    assert node.returns is not None, f"{path}: {node.name}"


def test_the_six_names():
    for name in ("Mechanism", "clipped_grad", "clip_and_sum", "dpsgd", "fit", "statement"):
        assert name in dpjax.__all__


def test_files_are_licensed_and_silence_no_tool():
    for path in FILES:
        text = path.read_text()
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
        found = [word for word in ("type: ignore", "pyright: ignore", "noqa") if word in text]
        assert not found, f"{path} silences a tool with {found}"


def test_optional_packages_are_not_imported_at_the_top():
    optional = {"sklearn", "matplotlib", "orbax", "tensorflow_datasets", "PIL", "tqdm", "rich"}
    # An estimator is a subclass of scikit-learn's; a program imports this file by its name.
    for path in set(FILES) - {ROOT / "sklearn.py"}:
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not optional & {name.split(".")[0] for name in names}, path


SHELF = ["auditing", "data", "diagnostics", "features", "federated", "losses"]
SHELF += ["metrics", "models", "reports", "scattering", "schedules", "testing"]
HEAVY = ["dp_accounting", "scipy.stats", "orbax", "sklearn", "matplotlib"]


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import dpjax", [*[f"dpjax.{name}" for name in ROOMS], *HEAVY, "jax"]),
        (
            "from dpjax import clip_and_sum, clipped_grad, noise, sampling",
            [*[f"dpjax.{name}" for name in SHELF], "dpjax.accounting", *HEAVY],
        ),
        (
            "import dpjax; dpjax.dpsgd, dpjax.fit",
            ["dpjax.models", "dpjax.scattering", "dpjax.auditing"],
        ),
    ],
)
@pytest.mark.sample(1)
def test_what_a_script_does_not_use_is_not_imported(program, absent):
    check = f"import sys; print([name for name in {absent} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", f"{program}\n{check}"], capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n", f"{program!r} imports {found.stdout}"


def test_the_top_has_its_names_and_no_others():
    assert set(dpjax.__all__) <= set(dir(dpjax))
    with pytest.raises(AttributeError, match="module 'dpjax' has no attribute 'clipings'"):
        getattr(dpjax, "clip" + "ings")


def test_each_room_has_its_tests():
    here = pathlib.Path(__file__).parent
    for name in ROOMS - {"__main__"}:
        assert list(here.glob(f"test_{name}*.py")), f"tests/test_{name}.py is missing"


def test_no_message_installs_this_project_from_an_index():
    """The name may be anybody's there; a message names the package that is missing."""
    for path in FILES:
        assert not re.search(r"pip install '?dpjax", path.read_text()), path
