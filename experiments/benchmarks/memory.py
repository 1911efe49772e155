# SPDX-License-Identifier: Apache-2.0
"""The rise of a process's peak memory while it works, for JAX, PyTorch and plain processes.

Each function resets the peak and returns a function that reads how many bytes it has risen since;
the latter returns None on a system without that number.  On a CPU the memory is resident memory
as Linux counts it, after the allocator has returned free memory.  The allocator keeps small
pieces; a process with `GIVES_BACK` in its environment keeps none and is slightly slower.  On a
GPU the memory is what the library has allocated.
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
    """Memory of PyTorch on its GPU, or of this process without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return of_process()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return lambda: torch.cuda.max_memory_allocated() - before


def of_jax() -> Rise:
    """Memory of JAX on its device, whose peak cannot be reset, or of this process on a CPU."""
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
