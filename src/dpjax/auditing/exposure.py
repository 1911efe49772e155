# SPDX-License-Identifier: Apache-2.0
"""Exposure: how well a language model knows a secret that was planted in its texts."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def exposure(losses: ArrayLike, secret: int) -> float:
    r"""How many bits of a secret a model gives away, by the rank of the secret's loss.

    $$ \log_2 R - \log_2 \mathrm{rank} $$

    for $R$ candidates. The secret is drawn evenly from them. If its text is one example, it has $b$
    bits or more with a chance of at most $e^\varepsilon 2^{-b} + \delta$, or of
    `accounting.true_positive_rate` at $2^{-b}$. Secrets that join by fair coins bound epsilon from
    below: `guess_members` takes their exposures as scores.

    Args:
      losses: ``[candidates]``, of the text with each candidate in the place of the secret, summed
        over its tokens: candidates may differ in how many they have.
      secret: The index of the secret. Candidates with an equal loss count as preferred.

    Example:
      >>> exposure([3.0, 1.0, 2.0, 4.0], secret=1)
      2.0

    References:
      Carlini et al., "The Secret Sharer", 2019.
    """
    losses = np.asarray(losses)
    # The rank counts the losses above. NaN is above none, so a model that fails knows nothing.
    rank = losses.size - np.sum(losses > losses[secret])
    return float(np.log2(losses.size / rank))
