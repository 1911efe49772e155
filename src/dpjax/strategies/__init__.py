# SPDX-License-Identifier: Apache-2.0
r"""Correlated noise: how the noise of one step depends on the noise of the steps before it.

A `Strategy` is a lower-triangular matrix $C$ with a row for each step of a run. The noise of step t
is row t of $C^{-1} Z$, where the rows of $Z$ are independent standard normal numbers. Releasing
$G + C^{-1} Z$ for the clipped sums $G$ is the Gaussian mechanism on $C G$, so a strategy with a
larger `sensitivity` needs a larger multiplier, and its errors partly cancel in the sums over many
steps that an optimizer forms.

| constructor | matrix | memory, in copies of the parameters |
|---|---|---|
| `white` | the identity: independent noise, as in DP-SGD | 0 |
| `tree` | binary tree of sums, Honaker's full estimator | $\log_2 T$ |
| `square_root` | square root of the prefix sums, possibly cut off | bands - 1 |
| `banded` | optimised banded Toeplitz (BandMF) | bands - 1 |
| `banded_inverse_square_root` | its inverse is the cut-off inverse square root | bands - 1 |
| `buffered` | optimised buffered linear Toeplitz (BLT) | buffers |
| `toeplitz` | given coefficients | bands - 1 |

The sensitivity depends on how often, and how far apart, one example takes part: `once`, `apart`,
`cycles`. A strategy knows nothing of samplers, keys, multipliers or accountants.
"""

from dpjax.strategies.banded import banded, banded_inverse_square_root, square_root
from dpjax.strategies.buffered import buffered
from dpjax.strategies.participation import Participation, apart, cycles, once
from dpjax.strategies.sensitivity import sensitivity
from dpjax.strategies.strategy import Errors, Strategy, from_facts
from dpjax.strategies.toeplitz import toeplitz, white
from dpjax.strategies.tree import tree

__all__ = [
    "Errors",
    "Participation",
    "Strategy",
    "apart",
    "banded",
    "banded_inverse_square_root",
    "buffered",
    "cycles",
    "from_facts",
    "once",
    "sensitivity",
    "square_root",
    "toeplitz",
    "tree",
    "white",
]
