# SPDX-License-Identifier: Apache-2.0
"""A deprecated name warns once, at the line of its user; the page lists experimental names."""

import importlib
import inspect
import pathlib
import re
import types
import warnings

import pytest

import dpjax
from dpjax import _deprecated

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "pages" / "stability.md"


def old_name():
    _deprecated.warn_once("old_name", "new_name", "9.9")
    return 1


def test_a_deprecated_name_warns_once_at_the_line_of_its_user():
    _deprecated.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [old_name(), old_name()] == [1, 1]
    (warning,) = caught
    assert warning.filename == __file__
    assert warning.category is FutureWarning
    assert str(warning.message) == (
        "dpjax.old_name will be removed in version 9.9. Use dpjax.new_name."
    )


def described():
    """Each public module and name, with its docstring."""
    modules = {name: getattr(dpjax, name) for name in dpjax.__all__}
    modules = {n: room for n, room in modules.items() if isinstance(room, types.ModuleType)}
    pytest.importorskip("sklearn", reason="optional")
    modules["sklearn"] = importlib.import_module("dpjax.sklearn")
    for module, room in modules.items():
        yield module, inspect.getdoc(room) or ""
        for name in room.__all__:
            yield f"{module}.{name}", inspect.getdoc(getattr(room, name)) or ""


def test_the_page_lists_each_name_whose_docstring_calls_it_experimental():
    marked = {name for name, words in described() if re.search(r"^Experimental: ", words, re.M)}
    table = PAGE.read_text().partition("## Experimental")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `dpjax\.([\w.]+)`", table, re.M)) == marked
