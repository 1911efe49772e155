# SPDX-License-Identifier: Apache-2.0
"""The versions of installed packages, for cards, run folders and `dpjax --version`.

A package that runs from its sources has no version. An exception then ends a run whose privacy is
spent, so the answer is words instead. Imports only the standard library.
"""

from __future__ import annotations

from importlib import metadata


def version(package: str) -> str:
    """The installed version of a package, or words if it has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed: run from its sources"
