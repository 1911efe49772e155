# SPDX-License-Identifier: Apache-2.0
"""The documentation: its code runs, and every room has a page. `make docs` builds it, strictly."""

import inspect
import pathlib
import re
import types

import pytest
import run_binary

import dpjax

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ROOT / "docs" / "pages"
WITH_CODE = sorted(p for p in PAGES.rglob("*.md") if "```python" in p.read_text())


@pytest.mark.sample(3)
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: str(p.relative_to(PAGES)))
def test_the_code_of_a_page_runs(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": page.stem})


def test_every_public_name_is_documented_in_the_reference():
    rooms = {n for n in dpjax.__all__ if isinstance(getattr(dpjax, n), types.ModuleType)}
    config = (PAGES.parent / "mkdocs.yml").read_text()
    assert set(re.findall(r"reference/(\w+)\.md", config)) == rooms
    for room in rooms:
        for name in (found := getattr(dpjax, room)).__all__:
            value = getattr(found, name)
            if inspect.isfunction(value) or inspect.isclass(value):
                assert inspect.getdoc(value), f"dpjax.{room}.{name} is not documented"


def test_the_tables_of_results_are_current():
    """`python experiments/common/result_tables.py` writes them."""
    with run_binary.importing() as import_binary:
        result_tables = import_binary("common.result_tables")
        assert (result_tables.RESULTS / "README.md").read_text() == result_tables.page()
        readme = (ROOT / "README.md").read_text()
        assert readme == result_tables.with_rows(readme)
    assert len(readme.splitlines()) <= 130
