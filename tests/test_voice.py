# SPDX-License-Identifier: Apache-2.0
"""One voice: words that are hard to read at the first reading occur in no source and no page."""

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


FORBIDDEN = (
    "anew",
    "whoever",
    "nobody",
    "so many",
    "of which",
    "by hand",
    "goes on",
    "go on",
    "in vain",
    "told of",
    "tells of",
    "whatever is",
    "is asked",
    "are asked",
    "those that",
    "those of",
    "at once",
)
WORDS = re.compile(r"\b(" + "|".join(w.replace(" ", r"\s+") for w in FORBIDDEN) + r")\b", re.I)


def test_files_speak_the_language_of_the_field():
    found = []
    for path in FILES:
        text = path.read_text()
        if path.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        for match in WORDS.finditer(text):
            line = text[: match.start()].count("\n") + 1
            found.append(f"{path.relative_to(ROOT)}:{line} {match[0]!r}")
    assert not found


def test_docstrings_are_markdown():
    marks = (".. math::", ":math:`", ".. note::", "+---")
    for path in (ROOT / "src").rglob("*.py"):
        found = [mark for mark in marks if mark in path.read_text()]
        assert not found, f"{path.relative_to(ROOT)} has {found}; docstrings are Markdown"
