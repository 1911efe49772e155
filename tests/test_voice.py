# SPDX-License-Identifier: Apache-2.0
"""One voice: words that are hard to read at the first reading occur in no source and no page."""

import ast
import io
import json
import pathlib
import re
import tokenize

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


# Patterns that Optax and JAX hardly have: "only" for "alone", a subject for "What ...", and so on.
DIALECT = {
    "alone": r"\balone\b",
    "What ...": r"(?:^|[.:;]\s+)What\b",
    "would": r"\bwould\b",
    "so that": r"\bso that\b",
    "Of ...": r"(?:^|[.]\s+)Of\b",
    "says": r"\b(says|said)\b",
    "beside": r"\bbeside\b",
    "is no": r"\b(is|are) no\b",
}
# How often each may occur in 1,000 words of prose; these numbers only fall.
MOST = {"src": 0.25, "experiments": 0.2, "pages": 0.4}


def prose(name):
    """The comments and docstrings of a folder, or the text of the pages."""
    if name == "pages":
        yield from (path.read_text() for path in FILES if path.suffix == ".md")
        return
    for path in (ROOT / name).rglob("*.py"):
        source = path.read_text()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.string.lstrip("# ")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                yield str(node.value.value)


@pytest.mark.parametrize("name", MOST)
def test_prose_has_subjects_and_plain_words(name):
    texts = list(prose(name))
    words = sum(len(text.split()) for text in texts)
    counts = {
        pattern: sum(len(re.findall(form, text, re.MULTILINE)) for text in texts)
        for pattern, form in DIALECT.items()
    }
    over = {pattern: n for pattern, n in counts.items() if 1000 * n / words > MOST[name]}
    assert not over


def test_docstrings_are_markdown():
    marks = (".. math::", ":math:`", ".. note::", "+---")
    for path in (ROOT / "src").rglob("*.py"):
        found = [mark for mark in marks if mark in path.read_text()]
        assert not found, f"{path.relative_to(ROOT)} has {found}; docstrings are Markdown"
