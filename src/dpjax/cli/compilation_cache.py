# SPDX-License-Identifier: Apache-2.0
"""Compiled programs on the disk, where the next run of a command finds them."""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform

import jax


def switch_on() -> None:
    """Names a folder for JAX's compilation cache, unless `JAX_COMPILATION_CACHE_DIR` does."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(home, "dpjax", _processor())
    try:
        # Closed to others: a program holds the constants of a loss, which may be data.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # no home, or a read-only one: compile without a cache
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # JAX keeps programs that took a second to compile; a small run has many shorter ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _processor() -> str:
    """A name for the CPU that programs are compiled for: machines may share a home folder."""
    facts = [platform.machine()]
    path = pathlib.Path("/proc/cpuinfo")
    if path.exists():
        lines = path.read_text().splitlines()
        facts += sorted({line for line in lines if line.startswith(("flags", "Features", "CPU "))})
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
