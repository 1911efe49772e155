# SPDX-License-Identifier: Apache-2.0
"""How densely Python code is written: the statements, and how much one line of code holds.

Lines are counted in a copy that Ruff formats at 88 columns without magic commas, so no setting of
the formatter changes a number. `python tests/density.py FOLDER...` prints a table, and with
``-n 9`` the nine densest files of each folder. `python tests/density.py --draw` names twenty
functions of src for a reader who did not write them.
"""

import argparse
import ast
import collections
import functools
import io
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize

ROOT = pathlib.Path(__file__).parent.parent
DRAW = 20261203  # the seed of `--draw`; a new number with each new reader
OPTIONS = ["--config", "line-length=88", "--config", "format.skip-magic-trailing-comma=true"]
# Tokens that are no part of the code.
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# Python 3.12 divides an f-string into several tokens, which were one.
OPENS = {"FSTRING_START": 1, "FSTRING_END": -1}
PREPOSITIONS = """
What Of By In On At For From To As With Without Between Behind Beside Before After Under Over Inside
Outside
"""
OPENS_ODDLY = re.compile(rf"#\s*({'|'.join(PREPOSITIONS.split())})\b")


@functools.cache
def measured(folder):
    """The counts of each file of a folder, by its path in it."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = pathlib.Path(temporary) / folder.name
        for path in folder.rglob("*.py"):
            target = copy / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        ruff = [sys.executable, "-m", "ruff", "format", "--quiet", "--isolated", *OPTIONS, copy]
        subprocess.run(ruff, check=True)
        return {path.relative_to(copy): counts(path.read_text()) for path in copy.rglob("*.py")}


def counts(source):
    """What the code of a file holds, without docstrings and blank lines."""
    tree = ast.parse(source)
    count = collections.Counter()
    docstrings = set()
    for node in ast.walk(tree):
        if is_docstring(node):
            docstrings.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.stmt):
            count["statements"] += 1
        count["conditional"] += is_conditional(node)
        count["tuples"] += is_tuple_assignment(node)
        count["products"] += is_product_of_a_flag(node)
        count["unpacked"] += unpacked_literals(node)

    code = set()
    last_comment = 0
    open_f_strings = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            opens = line != last_comment + 1 and "SPDX" not in token.string
            last_comment = line
            count["comments"] += opens
            count["odd comments"] += opens and bool(OPENS_ODDLY.match(token.string))
        if token.type not in LAYOUT and line not in docstrings:
            # Only the end of an f-string counts.
            open_f_strings += OPENS.get(tokenize.tok_name[token.type], 0)
            if not open_f_strings:
                count["tokens"] += 1
            code.update(range(line, token.end[0] + 1))
    count["lines"] = len(code)
    return count


def is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_conditional(node):
    """A conditional expression, `x and y or z`, or an element of a display by a condition."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.List | ast.Tuple):
        return not isinstance(node.slice, ast.Constant)
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        *others, last = node.values
        literal = isinstance(last, ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.JoinedStr)
        joined = (isinstance(x, ast.BoolOp) and isinstance(x.op, ast.And) for x in others)
        return literal and any(joined)
    return isinstance(node, ast.IfExp)


def is_tuple_assignment(node):
    """`a, b = x, y`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple | ast.List):
        return False
    return any(isinstance(target, ast.Tuple | ast.List) for target in node.targets)


def is_product_of_a_flag(node):
    """`" at first" * adaptive`, which hides an `if`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    left, right = node.left, node.right
    return any(
        (is_word(one) and isinstance(other, ast.Name | ast.Attribute))
        or (is_word_or_list(one) and is_flag(other))
        for one, other in ((left, right), (right, left))
    )


def is_word(node):
    if isinstance(node, ast.JoinedStr):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 1


def is_word_or_list(node):
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


def is_flag(node):
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    converted = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "bool"
    return negated or converted or isinstance(node, ast.Compare | ast.BoolOp)


def unpacked_literals(node):
    """How many literals a display unpacks: `[first, *(second, third)]`."""
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return 0
    literals = ast.Tuple | ast.List | ast.GeneratorExp
    return sum(isinstance(x, ast.Starred) and isinstance(x.value, literals) for x in node.elts)


def density(count):
    """Tokens on a line of code."""
    return count["tokens"] / max(1, count["lines"])


def shares(count):
    """Density, rates per 1,000 statements, and the percentage of odd comments."""
    thousands = max(1, count["statements"]) / 1000
    kinds = ("conditional", "tuples", "products", "unpacked")
    rates = {kind: count[kind] / thousands for kind in kinds}
    odd = 100 * count["odd comments"] / max(1, count["comments"])
    return {"density": density(count), **rates, "odd comments": odd}


def total(files):
    return sum(files.values(), collections.Counter())


def functions(folder, statements=10):
    """The functions of a folder with at least that many statements, by file and name."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                inner = [x for x in ast.walk(node) if isinstance(x, ast.stmt)]
                if sum(not is_docstring(x) for x in inner) > statements:
                    yield f"{path.relative_to(folder)}:{node.lineno} {node.name}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    parser.add_argument("-n", type=int, default=0, help="list the densest files")
    parser.add_argument("--draw", action="store_true", help="draw twenty functions of src")
    given = parser.parse_args()
    if given.draw:
        found = list(functions(ROOT / "src" / "dpjax"))
        print("\n".join(sorted(random.Random(DRAW).sample(found, 20))))
        return
    for folder in given.folders or [ROOT / "src" / "dpjax", ROOT / "experiments", ROOT / "tests"]:
        files = measured(folder.resolve())
        long = [path for path, count in files.items() if count["lines"] >= 60]
        densest = sorted(long, key=lambda path, files=files: -density(files[path]))
        rows = {folder: total(files)} | {path: files[path] for path in densest[: given.n]}
        for name, count in rows.items():
            cells = "  ".join(f"{kind} {value:4.1f}" for kind, value in shares(count).items())
            print(f"{name!s:40} statements {count['statements']:6}  {cells}")


if __name__ == "__main__":
    main()
