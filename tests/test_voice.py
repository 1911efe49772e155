# SPDX-License-Identifier: Apache-2.0
"""One voice: the words that CONTRIBUTING.md rules out occur in no source and on no page."""

import json
import pathlib
import re

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


def test_files_speak_the_language_of_the_field():
    found = []
    for path in FILES:
        text = path.read_text()
        if path.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        for match in WORDS.finditer(text):
            line = text[: match.start()].count("\n") + 1
            found.append(f"{path.relative_to(ROOT)}:{line} {match[0]!r}")
    assert not found, "see CONTRIBUTING.md, Words"


def test_docstrings_are_markdown():
    marks = (".. math::", ":math:`", ".. note::", "+---")
    for path in (ROOT / "src").rglob("*.py"):
        found = [mark for mark in marks if mark in path.read_text()]
        assert not found, f"{path.relative_to(ROOT)} has {found}; docstrings are Markdown"
