# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation that are made from other files of the project.

mkdocs calls `on_files` before it builds: the public names of each room, the notebooks, the results,
CONTRIBUTING.md and CHANGELOG.md become pages without a second copy in the repository.  Figures of
the papers are drawn from the committed results, in 20 seconds.
"""

import ast
import base64
import json
import pathlib
import sys

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "results.md": ROOT / "experiments" / "results" / "README.md",
}


def on_files(files, config):
    """Adds the generated pages to the files of the site."""
    for name, path in PAGES.items():
        files.append(File.generated(config, name, content=path.read_text()))
    for room, names in public_names().items():
        page = f"# `dpjax.{room}`\n\n::: dpjax.{room}\n    options:\n      members: {names}\n"
        files.append(File.generated(config, f"reference/{room}.md", content=page))
    for path in sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb")):
        page, pictures = notebook_page(path.stem, json.loads(path.read_text()))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    sys.path.insert(0, str(ROOT))
    from experiments import gallery

    page, pictures = gallery.gallery()
    files.append(File.generated(config, "gallery.md", content=page))
    for name, picture in pictures.items():
        files.append(File.generated(config, f"gallery/{name}", content=picture))
    return files


def public_names():
    """The rooms with their ``__all__``, read from the source."""
    src = ROOT / "src" / "dpjax"
    doors = [*src.glob("[a-z]*.py"), *src.glob("[a-z]*/__init__.py")]
    public = exported((src / "__init__.py").read_text())
    rooms = {p.stem if p.parent == src else p.parent.name: p.read_text() for p in sorted(doors)}
    return {room: exported(text) for room, text in rooms.items() if room in public}


def exported(source):
    """``__all__`` of a module, or an empty list."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def notebook_page(stem, notebook):
    """A notebook as Markdown (text, code, and what the code shows), and its images by name."""
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
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
