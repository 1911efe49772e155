# SPDX-License-Identifier: Apache-2.0
"""Weights of clients, held to [0, 1]. So they do not change the sensitivity.

A sum of weighted updates moves by ``w_max R`` when a client joins, so noise of ``sigma R`` is worth
a multiplier of only ``sigma / w_max``. Papers often weight by the number of examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from dpjax import checks


@dataclass(frozen=True, kw_only=True)
class Weights:
    r"""A weight for each client, and the public numbers that keep them private.

    $$ s_k = \min(w_k / w_{\max},\ 1), \qquad
       \text{mean} = \frac{\sum_k s_k \bar\Delta_k + \text{noise}}{q\, W / w_{\max}} $$

    Args:
      values: $w_k$; each computed only from its own client's data, such as its number of
        examples. Infinity counts as ``largest``; negative numbers and NaN count 0.
      largest: $w_{\max}$, a public constant; larger weights are reduced to it.
      total: $W$, a public constant near the sum of all held weights. A larger one makes steps
        shorter and costs no privacy. By default ``largest`` times the number of clients. The sum
        itself is private, and so is the sum over the drawn clients.

    Sensitivity:
      Shares are in [0, 1], so one client moves the sum by at most the rule's sensitivity.

    Example:
      >>> weights = Weights(values=[3, 50, 700], largest=100)
      >>> weights.shares.tolist()
      [0.029999999329447746, 0.5, 1.0]

    References:
      McMahan et al., "Learning Differentially Private Recurrent Language Models", 2018.
    """

    values: ArrayLike
    largest: float = 1.0
    total: float | None = None

    def __post_init__(self) -> None:
        """Refuses public constants that are not positive."""
        for name in ("largest", "total"):
            value = getattr(self, name)
            if value is not None:
                # The check returns a number of Python, which run.json can hold.
                number = checks.positive("federated.Weights", name, value)
                object.__setattr__(self, name, number)

    @property
    def shares(self) -> Float[np.ndarray, " clients"]:
        """The weights that the step uses, from 0 to 1."""
        # Shares are relative to the largest weight that counts, so a client moves the sum by at
        # most the bound. NaN and negative weights become 0.
        shares = np.asarray(self.values, np.float64) / self.largest
        held = np.where(shares > 0, np.minimum(shares, 1.0), 0.0)
        return held.astype(np.float32)

    @property
    def total_share(self) -> float:
        """The public estimate of the sum of all shares."""
        if self.total is None:
            # The number of clients is public. The true sum of weights is not.
            return np.size(self.values)
        return self.total / self.largest

    def noise_multiplier(self, sigma: float) -> float:
        """The multiplier of noise of ``sigma * bound`` on the sum of *raw* weighted updates.

        Papers state ``sigma``; a `dpjax.Mechanism` needs ``sigma / largest``.

        Example:
          >>> Weights(values=[1, 40], largest=5.0).noise_multiplier(sigma=1.0)
          0.2
        """
        return sigma / self.largest
