# SPDX-License-Identifier: Apache-2.0
"""Pages made from other files of the project, formulas as MathML, and links to functions.

mkdocs calls `on_files` before it builds: the reference, the notebooks, the results, the report's
colours, CONTRIBUTING.md and CHANGELOG.md become files of the site, without a second copy in the
repository. Figures of the papers are drawn from the committed results, in 20 seconds.
"""

import base64
import html
import json
import pathlib
import re
import sys
import tomllib

import griffe
import math_core
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
FIRST = "## Other libraries"  # where the front page of the site leaves the README
NEXT = """Next: [a first private model](first_model.md), [your model](your_model.md) and
[your data](your_data.md), [images and augmentation](cifar10.md), a
[guide to settings](settings.md), [noise schedules](noise_schedules.md), the
[concepts](concepts.md), the [sharp edges](sharp_edges.md).
Not sure yet? [Choosing a library](choosing.md)."""
PAGES = {
    "index.md": ROOT / "README.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "security.md": ROOT / "SECURITY.md",
    "conduct.md": ROOT / "CODE_OF_CONDUCT.md",
    "results.md": ROOT / "experiments" / "results" / "README.md",
}
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
REFERENCE_BOOST = 0.5  # in the search: guides stand above functions with a similar name
OPTIONS = "{show_root_heading: true, show_root_toc_entry: true, show_root_full_path: false}"
MATHML = math_core.LatexToMathML(fancy_error=False)
KINDS = ["function", "class", "attribute"]
PUBLIC = {}  # what a table may say, and its anchor


def on_config(config):
    """Puts the version of the project into the address of the site."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_url = f"{config.site_url.rstrip('/')}/{project['version']}/"
    return config


def on_files(files, config):
    """Adds the generated pages to the files of the site."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "docs")]
    import social_card
    from experiments import gallery

    from dpjax.cli.report import style

    def add(name, content):
        files.append(File.generated(config, name, content=content))

    for name, path in PAGES.items():
        text = re.sub(r'(\]\(|")docs/pages/', r"\1", path.read_text())
        for page, source in PAGES.items():
            text = text.replace(f"]({source.name})", f"]({page})")
        if name == "index.md":
            text = text.partition(FIRST)[0] + NEXT
        add(name, NOT_SEARCHED * (name == "changelog.md") + text)
    package = loaded()
    tops = [member for member in map(package.members.get, package.exports) if member.is_alias]
    PUBLIC.update({member.name: member.target_path for member in tops})
    names = public_names(package)
    for room in names:
        PUBLIC.update({f"{room}.{name}": f"dpjax.{room}.{name}" for name in names[room]})
        add(f"reference/{room}.md", room_page(package[room], names[room]))
    table = package.docstring.value.split("\n\n")[1]
    table = re.sub(rf"`({'|'.join(names)})`", r"[`\1`](\1.md)", table)
    add("reference/index.md", f"# Reference\n\n{table}\n")
    for path in sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb")):
        page, pictures = notebook_page(path.stem, json.loads(path.read_text()))
        add(f"notebooks/{path.stem}.md", page)
        for name, picture in pictures.items():
            add(f"notebooks/{name}", picture)
    add("assets/speed.png", gallery.speed_picture())
    add("assets/card.png", social_card.social_card())
    page, pictures = gallery.gallery()
    add("gallery.md", page)
    for name, picture in pictures.items():
        add(f"gallery/{name}", picture)
    schemes = {"default": style.PALETTE, "slate": style.DARK}
    add("stylesheets/colors.css", "\n".join(map(colors, schemes, schemes.values())))
    return files


def on_page_content(content, page, **kwargs):
    """Formulas and names in tables, when Markdown has become HTML."""
    del kwargs
    formula = r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>'
    try:
        content = re.sub(formula, mathml, content, flags=re.DOTALL)
    except math_core.LatexError as error:
        raise PluginError(f"{page.file.src_uri}: a formula is not LaTeX: {error}") from error
    # Tables of arguments have rows of a class, and no links: an argument may be named as a module.
    room = pathlib.PurePath(page.file.src_uri).stem * page.file.src_uri.startswith("reference/")
    # The first column of a page about another library has that library's names.
    row = rf"(?<={'</td>' if page.file.src_uri.startswith('migrate/') else '<tr>'}).*?(?=</tr>)"
    return re.sub(row, lambda row: linked(row[0], room), content, flags=re.DOTALL)


def mathml(formula):
    """The MathML of a formula that arithmatex has found, in the same element."""
    tag, text = formula[1], " ".join(html.unescape(formula[2]).split())
    converted = MATHML.convert_with_local_state(text, displaystyle=tag == "div")
    return f'<{tag} class="arithmatex">{converted}</{tag}>'


def linked(row, room):
    """A row of a table whose public names are links; on the page of a module without its prefix."""

    def link(code):
        name = code[1].removeprefix("dpjax.")
        path = PUBLIC.get(f"{room}.{name}") or PUBLIC.get(name)
        return f'<autoref identifier="{path}">{code[0]}</autoref>' if path else code[0]

    return re.sub(r"<code>([\w.]+)(?:\([^<]*)?</code>(?!</a)", link, row)


def loaded():
    """The package as griffe reads it from the source."""
    extensions = griffe.load_extensions(str(ROOT / "docs" / "griffe_extensions.py"))
    return griffe.load(
        "dpjax", search_paths=[ROOT / "src"], extensions=extensions, resolve_aliases=True
    )


def public_names(package):
    """The modules with their ``__all__``: first what the docstring names, then by use in guides."""
    guides = [*(ROOT / "docs" / "pages").rglob("*.md"), ROOT / "README.md"]
    used = "\n".join(path.read_text() for path in guides)

    def rank(room, name):
        named = re.findall(r"`(\w+)", package[room].docstring.value)
        uses = len(re.findall(rf"\b({room}|dpjax)\.{name}\b", used))
        place = named.index(name) if name in named else len(named)
        return place, -uses, KINDS.index(package[room][name].kind.value)

    rooms = set(map(str, package.exports)) & set(package.modules)
    return {
        room: sorted(map(str, package[room].exports), key=lambda name, room=room: rank(room, name))
        for room in sorted(rooms)
    }


def room_page(room, names):
    """The page of a module: its docstring, the names that this does not list, and each of them."""
    listed = re.findall(r"`(\w+)", "".join(re.findall(r"^\|[^|]*", room.docstring.value, re.M)))
    rest = [f"| `{name}` | {sentence(room[name])} |" for name in names if name not in listed]
    parts = [
        f"---\ntitle: {room.name}\nsearch:\n  boost: {REFERENCE_BOOST}\n---",
        f"# `{room.path}` {{ #{room.path} }}",
        f"::: {room.path}\n    options: {{members: false}}",
        "\n".join(["| name | what it is |", "|---|---|", *rest] * bool(rest)),
        *(f"::: {room.path}.{name}\n    options: {OPTIONS}" for name in names),
    ]
    return "\n\n".join(parts) + "\n"


def sentence(member):
    """The first sentence of a docstring, for a cell of a table."""
    text = member.docstring.value if member.docstring else ""
    return " ".join(re.split(r"(?<=\.)\s|\n\n", text)[0].split()).replace("|", r"\|")


def colors(scheme, values):
    """The colours of the report as variables of CSS, for the light or the dark page."""
    variables = "".join(f"--{name}:{value};" for name, value in values.items())
    return f"[data-md-color-scheme={scheme}]{{{variables}}}"


def notebook_page(stem, notebook):
    """A notebook as Markdown (text, code, and what the code shows), and its images by name."""
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        if source.startswith("# Installs dpjax"):
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            shown = {"text/plain": output.get("text", []), **output.get("data", {})}
            if "image/png" in shown:
                name = f"{stem}-{len(pictures)}.png"
                pictures[name] = base64.b64decode(shown["image/png"])
                parts.append(f"![What the cell draws]({name})")
            elif "text/html" in shown:
                parts.append(f"<div>{''.join(shown['text/html'])}</div>")
            else:
                parts.append(f"```text\n{''.join(shown['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures
