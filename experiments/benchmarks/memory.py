# SPDX-License-Identifier: Apache-2.0
"""How far the memory of a process rises while it works: one gauge for everybody.

Each function starts anew and returns a function that says how many bytes the peak has risen
since, above what was held at the start; None on a system that does not say.  On a CPU that is
resident memory as Linux counts it, after the allocator was asked to give back what is free.
Still it keeps small pieces to use them again; a process that starts with `GIVES_BACK` in its
environment keeps none, and is a little slower.  On a GPU it is what the library has allocated.

Nothing here knows what is measured.  PyTorch and JAX are imported where they are asked.
"""

from __future__ import annotations

import ctypes
import gc
import pathlib
from collections.abc import Callable

STATUS, CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # of glibc: larger pieces are never kept

Rise = Callable[[], int | None]


def of_process() -> Rise:
    """The resident memory of this process."""
    gc.collect()
    if not (STATUS.exists() and CLEAR.exists()):
        return lambda: None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)
    CLEAR.write_text("5")  # the peak becomes what is held: proc(5)
    before = _peak()
    return lambda: _peak() - before


def of_torch() -> Rise:
    """What PyTorch holds on its GPU, or this process if there is none."""
    import torch

    if not torch.cuda.is_available():
        return of_process()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return lambda: torch.cuda.max_memory_allocated() - before


def of_jax() -> Rise:
    """What JAX holds on its device, whose peak cannot start anew, or this process on a CPU."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return of_process()
    gc.collect()
    before = (device.memory_stats() or {}).get("bytes_in_use")

    def rise() -> int | None:
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        return None if before is None or peak is None else peak - before

    return rise


def _peak() -> int:
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return next(1024 * int(words[1]) for words in lines if words[0] == "VmHWM:")
