# SPDX-License-Identifier: Apache-2.0
"""The documentation: its code runs, and every room has a page. `make docs` builds it, strictly."""

import inspect
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pytest
from experiments.benchmarks import workers
from experiments.common import markdown, tables

import dpjax

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ROOT / "docs" / "pages"
WITH_CODE = sorted(p for p in PAGES.rglob("*.md") if "```python" in p.read_text())


# Libraries of users that dpjax does not need, and so may be missing where the tests run. The last
# one downloads its data sets.
OTHERS = ("haiku", "opacus", "torch", "grain", "datasets", "pandas", "wandb", "tunix", "keras")
OTHERS += ("flwr", "tensorflow_datasets")


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def other_of(block):
    """The library, of those above, that a block imports."""
    return next(
        (name for name in OTHERS if re.search(rf"^(?:import|from) {name}\b", block, re.M)), None
    )


def run(page, blocks):
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": page.stem})


# `make test` runs these pages; most of the time of the others is compilation.
QUICK = dict.fromkeys(("concepts.md", "tf_privacy.md", "own_loop.md", "llm.md"), ())
MARKS = QUICK | dict.fromkeys(("opacus.md", "table.md", "own_parts.md"), pytest.mark.thorough)
CASES = [
    pytest.param(p, id=str(p.relative_to(PAGES)), marks=MARKS.get(p.name, pytest.mark.slow))
    for p in WITH_CODE
]


@pytest.mark.parametrize("page", CASES)
def test_the_code_of_a_page_runs(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page, [block for block in blocks_of(page) if other_of(block) is None])


WITH_OTHERS = [(p, b) for p in WITH_CODE for b in blocks_of(p) if other_of(b)]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the libraries' own warnings are not ours
@pytest.mark.parametrize(("page", "block"), WITH_OTHERS, ids=[other_of(b) for _, b in WITH_OTHERS])
def test_the_code_of_another_library_runs(page, block, tmp_path, monkeypatch):
    name = other_of(block) or ""
    if name == "opacus" and workers.PEERS.exists():  # `make bench-peers` makes it
        subprocess.run([workers.PEERS, "-W", "ignore", "-c", block], check=True, cwd=tmp_path)
        return
    library = pytest.importorskip(name, reason="optional; the block runs where it is")
    if library.__name__ == "tensorflow_datasets":
        records = [{"image": np.zeros((28, 28, 1), "uint8"), "label": i % 10} for i in range(200)]
        monkeypatch.setattr(library, "data_source", lambda name, split: records)
    monkeypatch.chdir(tmp_path)
    # A model of Tunix takes the place of that of its page, which then trains it.
    run(page, blocks_of(page) if name == "tunix" else [blocks_of(page)[0], block])


def test_a_page_for_each_library():
    assert {other_of(block) for _, block in WITH_OTHERS} == set(OTHERS)


def public_names():
    """The modules of dpjax, with their ``__all__``."""
    rooms = {name: getattr(dpjax, name) for name in dpjax.__all__}
    return {n: room.__all__ for n, room in rooms.items() if isinstance(room, types.ModuleType)}


def test_every_module_has_a_page_and_every_function_a_docstring():
    config = (PAGES.parent / "mkdocs.yml").read_text()
    assert set(re.findall(r"reference/(\w+)\.md", config)) == {"index", *public_names()}
    for room, names in public_names().items():
        for name in names:
            value = getattr(getattr(dpjax, room), name)
            if inspect.isfunction(value) or inspect.isclass(value):
                assert inspect.getdoc(value), f"dpjax.{room}.{name} is not documented"


@pytest.mark.thorough
def test_the_site_has_every_public_name_and_needs_no_network(tmp_path):
    pytest.importorskip("mkdocs", reason="`make docs` installs it")
    config = str(PAGES.parent / "mkdocs.yml")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", config]
    subprocess.run([*build, "-d", str(tmp_path)], check=True, cwd=ROOT)
    for room, names in public_names().items():
        page = (tmp_path / "reference" / f"{room}.html").read_text()
        anchors = set(re.findall(r'id="dpjax\.([\w.]+)"', page))
        assert {room, *(f"{room}.{name}" for name in names)} <= anchors
    for page in tmp_path.rglob("*.html"):
        assert not re.search(r'(src|rel="stylesheet" href)="(https?:)?//', page.read_text()), page
        assert not re.search(r'class="arithmatex">\\', page.read_text()), page


PROSE = [ROOT / name for name in ("README.md", "BUILD_NOTES.md", "CONTRIBUTING.md")]
PROSE += sorted(PAGES.rglob("*.md"))


def test_names_in_prose_exist():
    """Such as `accounting.levels`, and the constants that CONTRIBUTING.md and the notes name."""
    # A mechanism of a user is often called as its module is.
    rooms = {name: [getattr(dpjax, name)] for name in public_names()}
    rooms["mechanism"].append(dpjax.Mechanism)
    sources = "\n".join(
        path.read_text()
        for folder in ("src", "tests", "experiments")
        for path in (ROOT / folder).rglob("*.py")
    )
    files = {"py", "md", "txt", "json", "jsonl", "npz"}
    missing = []
    for path in PROSE:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for room, name in re.findall(r"`(?:dpjax\.)?([a-z_]+)\.([a-z_]\w*)[^`./]*`", text):
            known = name in files or any(hasattr(place, name) for place in rooms.get(room, ()))
            if room in rooms and not known:
                missing.append(f"{path.name}: {room}.{name}")
        if path.parent == ROOT:
            names = re.findall(r"`(?:\w+\.)*(_?[A-Z][A-Z_]{2,})`", text)
            missing += [n for n in names if not re.search(rf"^ *{n}\b", sources, re.MULTILINE)]
    assert not missing


def test_the_ratios_in_prose_are_those_of_the_benchmark():
    """README.md, the FAQ and the page of speed, of `experiments/results/steps.json`."""
    steps = [tables.sides(of) for of in tables.load("steps")["workloads"].values()]

    def range_of(side, other, digits):
        ratios = sorted(of[side]["median_ms"] / of[other]["median_ms"] for of in steps)
        return f"{ratios[0]:{digits}} to {ratios[-1]:{digits}}"

    plain = range_of("dpjax", "plain JAX", ".2f")
    opacus = range_of("Opacus", "dpjax", ".1f")
    others = [opacus, range_of("jax_privacy", "dpjax", ".2g")]
    for page, ranges in [
        (ROOT / "README.md", [plain, *others]),
        (PAGES / "speed.md", [plain, *others]),
        (ROOT / "paper" / "paper.md", [plain, *others]),
        (PAGES / "faq.md", [plain]),
    ]:
        for of in ranges:
            assert of in page.read_text(), (page.name, of)


def test_the_tables_of_results_are_current():
    """`python -m experiments.common.tables` writes them."""
    assert (tables.RESULTS / "README.md").read_text() == tables.page()
    readme = (ROOT / "README.md").read_text()
    texts = {"accuracies": tables.best_table(), "results": tables.readme_rows()}
    assert readme == markdown.filled(readme, texts)
    assert len(readme.splitlines()) <= 130
