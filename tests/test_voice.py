# SPDX-License-Identifier: Apache-2.0
"""One voice: the words that CONTRIBUTING.md rules out occur in no source and on no page."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.md", "BUILD_NOTES.md", "CHANGELOG.md", "Makefile"]
FILES = sorted(
    [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "experiments").rglob("*.py"),
        *(ROOT / "experiments").rglob("*.ipynb"),
        *(
            path
            for path in (ROOT / "tests").glob("*.py")
            if path.name != pathlib.Path(__file__).name
        ),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name for name in PAGES),
    ]
)


def forbidden():
    """The left column of the table under "Words"."""
    page = (ROOT / "CONTRIBUTING.md").read_text().split("## Words")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    return [word.strip() for row in rows[1:] for word in row.split(",")]


WORDS = re.compile(r"\b(" + "|".join(w.replace(" ", r"\s+") for w in forbidden()) + r")\b", re.I)


def test_the_table_is_read():
    assert {"anew", "so many", "goes on", "go on", "those of"} <= set(forbidden())
    assert WORDS.search("It goes\n    on.")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_speaks_the_language_of_the_field(path):
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    found = [f"{text[: m.start()].count(chr(10)) + 1}: {m[0]!r}" for m in WORDS.finditer(text)]
    assert not found, f"{path.relative_to(ROOT)}, {', '.join(found)}: see CONTRIBUTING.md, Words"


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda p: p.stem)
def test_docstrings_are_markdown(path):
    text = path.read_text()
    for mark in (".. math::", ":math:`", ".. note::", "+---"):
        assert mark not in text, f"{path.relative_to(ROOT)} has {mark!r}; docstrings are Markdown"
