# SPDX-License-Identifier: Apache-2.0
"""The versions of installed packages, for cards, run folders and `dpjax --version`.

A package that runs from its sources has no version. An exception then ends a run whose privacy is
spent, so the answer is words instead. One version covers many commits, so cards also hold a digest
of the sources. Imports only the standard library.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
from importlib import metadata


def version(package: str) -> str:
    """The installed version of a package, or words if it has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed: run from its sources"


@functools.cache
def sources() -> str:
    """The SHA-256 of the Python files of dpjax: each name and size, and then the file's bytes."""
    package = pathlib.Path(__file__).parent
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    total = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        total.update(f"{name} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()
