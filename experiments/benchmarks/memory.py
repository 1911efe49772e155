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

STATUS = pathlib.Path("/proc/self/status")
CLEAR = pathlib.Path("/proc/self/clear_refs")

Rise = Callable[[], int | None]


def of_process() -> Rise:
    """Resident memory of this process."""
    gc.collect()
    if not (STATUS.exists() and CLEAR.exists()):
        return lambda: None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)
    CLEAR.write_text("5")  # resets the peak to the current size: proc(5)
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
    """The largest resident memory since the last reset, in bytes."""
    lines = STATUS.read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(peak.split()[1])  # printed in KiB
