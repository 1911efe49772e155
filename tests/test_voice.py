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
PAGES = ["README.md", "BUILD_NOTES.md", "CONTRIBUTING.md", "CHANGELOG.md"]
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
        *(ROOT / name for name in [*PAGES, "Makefile"]),
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
# The most in 1,000 words of src, and of pages. A ceiling may only fall; 0 forbids the pattern.
SENTENCE = r"(?:\A|(?<=[.:!?]\s)|(?<=\n\n)|(?<=\n\* )|(?<=\n- ))"
CEILINGS = {
    "alone": (r"\balone\b", 0.05, 0),  # only
    "What ...": (SENTENCE + r"What\b(?![^.?]*\?)", 0.03, 0),  # name the thing
    "Of ...": (SENTENCE + r"Of\b", 0.02, 0),  # the subject first
    "would": (r"\bwould\b", 0, 0),  # state the failure
    "so that": (r"\bso\s+that\b", 0, 0),  # so, to
    "says": (r"\b(?:says|said)\b", 0.05, 0),  # returns, records, reports
    "beside": (r"\bbeside\b", 0.02, 0),  # next to, in addition to
    "is no ...": (r"(?<!there )\b(?:is|are)\s+no\s(?!\w+er\b)", 0.03, 0),  # is not a
}
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


def prose_of_source(text):
    """The docstrings and comments of a file, without examples; lines of a comment are joined."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstring = ast.get_docstring(node) or ""
            # The text of an argument opens no sentence: "event: What ran."
            yield re.sub(r"(?m)^ *(?:\w+: |>>>.*|\.\.\. .*)", "| ", docstring)
    comments, last = [], -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                comments.append("")
            comments[-1] += " " + token.string.lstrip("# ")
            last = token.start[0]
    yield from (comment.strip() for comment in comments)


def prose_of_page(text):
    """A page without code and without tables that experiments write."""
    text = re.sub(r"<!-- ([\w ]+): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


SOURCES = sorted((ROOT / "src").rglob("*.py"))
MARKDOWN = [*sorted((ROOT / "docs" / "pages").rglob("*.md")), *(ROOT / name for name in PAGES)]
PROSE = {
    "src": [(path, text) for path in SOURCES for text in prose_of_source(path.read_text())],
    "pages": [(path, prose_of_page(path.read_text())) for path in MARKDOWN],
}


@pytest.mark.parametrize("where", PROSE)
@pytest.mark.parametrize("name", CEILINGS)
def test_patterns_that_need_a_second_reading_are_rare(name, where):
    pattern, in_src, in_pages = CEILINGS[name]
    ceiling = in_src if where == "src" else in_pages
    words = sum(len(text.split()) for _, text in PROSE[where])
    found = [
        f"{path.relative_to(ROOT)}: {text[max(0, match.start() - 30) : match.end() + 30]!r}"
        for path, text in PROSE[where]
        for match in re.finditer(pattern, text)
    ]
    assert len(found) <= ceiling * words / 1000, "\n".join(found)
