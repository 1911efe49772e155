# SPDX-License-Identifier: Apache-2.0
"""How much a client counts, and what that costs: at most 1, whatever the weights are.

A sum of weighted updates moves by ``w_max R`` when a client joins, so noise of ``sigma R`` is
worth a multiplier of ``sigma / w_max`` only.  Papers weight by the number of examples, and
then a client with 100 of them gets a hundredth of the noise that was stated.  Here weights
are divided by a public largest one and held to it, so that the sensitivity is the rule's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class Weights:
    r"""A weight for each client, and the public numbers that keep them private.

    $$ s_k = \min(w_k / w_{\max},\ 1), \qquad
       \text{mean} = \frac{\sum_k s_k \bar\Delta_k + \text{noise}}{q\, W / w_{\max}} $$

    Args:
      values: $w_k$; each from its own client's data alone, such as the number of its examples.
      largest: $w_{\max}$, a public constant; heavier clients count as much as this.
      total: $W$, a public constant near the sum of all held weights; too large makes steps
        shorter, and costs no privacy.  By default ``largest`` times the number of clients.
        The sum itself is private, and so is that of the clients which were drawn.

    Sensitivity:
      Shares are in [0, 1], so one client moves the sum by at most the rule's sensitivity.

    | weight | share |
    |---|---|
    | above ``largest``, infinite included | 1 |
    | 0, negative, NaN | 0 |

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
        """Refuses public constants that mean nothing."""
        if not 0 < self.largest < np.inf or not (self.total is None or 0 < self.total < np.inf):
            raise ValueError(
                f"federated.Weights(largest={self.largest}, total={self.total}): both must be "
                "positive numbers, fixed without a look at the data: the weight at which a client "
                "is cut off, and about the sum of all weights after that."
            )
        if np.ndim(self.values) != 1:
            raise ValueError(
                f"federated.Weights(values=...): shape {np.shape(self.values)}; expected one "
                "weight per client."
            )

    @property
    def shares(self) -> Float[np.ndarray, " clients"]:
        """The weights as they are used: from 0 to 1."""
        shares = np.asarray(self.values, np.float64) / self.largest
        return np.where(shares > 0, np.minimum(shares, 1.0), 0.0).astype(np.float32)

    @property
    def total_share(self) -> float:
        """The sum of all shares as far as it is public."""
        return np.size(self.values) if self.total is None else self.total / self.largest

    def noise_multiplier(self, sigma: float) -> float:
        """What noise of ``sigma * bound`` on the sum of *raw* weighted updates is worth.

        Args:
          sigma: As papers state it.

        Returns:
          ``sigma / largest``: the noise multiplier for a `dpjax.Mechanism`.

        Example:
          >>> Weights(values=[1, 40], largest=5.0).noise_multiplier(sigma=1.0)
          0.2
        """
        return sigma / self.largest
