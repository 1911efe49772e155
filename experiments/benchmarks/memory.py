# SPDX-License-Identifier: Apache-2.0
"""The rise of a process's peak memory while it works.

Each function resets the peak and returns a function that reads how many bytes it has risen since;
the latter returns None on a system without that number. On a CPU the memory is resident memory as
Linux counts it, after the allocator has returned free memory; on a GPU what the library allocated.
"""

from __future__ import annotations

import ctypes
import gc
import pathlib
from collections.abc import Callable

STATUS, CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")

Rise = Callable[[], int | None]


def of_process() -> Rise:
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
    """Memory of PyTorch on its GPU, or of this process without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return of_process()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return lambda: torch.cuda.max_memory_allocated() - before


def _peak() -> int:
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return next(1024 * int(words[1]) for words in lines if words[0] == "VmHWM:")
