# SPDX-License-Identifier: Apache-2.0
"""Sizes of data sets and batches: what samplers accept, and which batches are drawn sparsely."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpjax import checks
from dpjax.sampling.sparse import LARGEST

# Up to this size a draw takes half a millisecond by either way, and runs keep their batches.
_FEW = 2**16
# Beyond a sixteenth of the data, a list of a batch is no shorter than a mask of the data.
_SPARSE = 1 / 16
MOST = 2**44
"""The most examples of a sampler that is not held to int32."""


def is_sparse(examples: int, batch_size: float) -> bool:
    """Whether batches are drawn in time of the batch."""
    return examples > _FEW and batch_size <= _SPARSE * examples


def checked_count(who: str, what: str, value: Any, most: int = LARGEST) -> int:
    """A whole number among the arguments of a sampler."""
    # The default is that of int32, because a step is one and cannot be divided by more.
    return checks.whole(f"sampling.{who}", what, value, "Round a quotient, as with //.", most=most)


def checked_sizes(
    name: str, examples: int, batch_size: float, most: int = MOST
) -> tuple[int, float]:
    """Both sizes as Python numbers: arithmetic on narrow NumPy types rounds or overflows."""
    examples = checked_count(name, "examples", examples, most)
    checks.number(f"sampling.{name}", "batch_size", batch_size)
    batch_size = np.asarray(batch_size).item()  # 256 stays an int, also on the privacy card
    if not 0 < batch_size <= examples:
        raise ValueError(
            f"sampling.{name}(examples={examples}, batch_size={batch_size}): expected a batch_size "
            "above 0 and at most the number of examples."
        )
    return examples, batch_size


def checked_whole_sizes(
    name: str, examples: int, batch_size: int, most: int = MOST
) -> tuple[int, int]:
    """Both sizes, for a sampler whose batches all have that size."""
    examples, _ = checked_sizes(name, examples, batch_size, most)
    return examples, checked_count(name, "batch_size", batch_size)
