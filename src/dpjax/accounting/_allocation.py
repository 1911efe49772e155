# SPDX-License-Identifier: Apache-2.0
r"""Random allocation: an example is in the steps of one random bin, and one Gaussian hides it.

Let P be a run with one example more than Q. In the coordinates $C Y$ of the released rows $Y$ the
noise is $\mathcal{N}(0, \sigma^2 I)$. If the example is in bin b, the mean of row t moves by a
vector $\mu_{tb}$ that depends on earlier rows. Relative to the bound it is no longer than
$m_{tb} = \sum_{s \in b} |C_{ts}|$. Write $K = M^T M / \sigma^2$ with $M = (m_{tb})$, and $L_b$ for
the likelihood ratio of bin b to Q. Then $P / Q = \sum_b p_b L_b$. Bins of other examples are
independent of b. The bounds below hold given these bins, and therefore in all, because both
moments are jointly convex in P and Q.

**The example leaves.** For a whole order $\alpha$, $\mathbb{E}_Q (P / Q)^\alpha$ is the mean of
$\mathbb{E}_Q \prod_i L_{b_i}$ over independent bins $b_1, \dots, b_\alpha$. Given the rows before
it, row t contributes $\exp(\sum_{i<j} \langle \mu_{t b_i}, \mu_{t b_j} \rangle / \sigma^2)$, which
is at most the constant $\exp(\sum_{i<j} m_{t b_i} m_{t b_j} / \sigma^2)$: first the last row, then
the row before it, down to the first. The moment is therefore at most
$A_\alpha = \mathbb{E} \exp \sum_{i<j} K_{b_i b_j}$. The last bin $b_\alpha$ is in $\alpha - 1$
factors, and Hölder's inequality over it, given the other bins, yields

$$ A_\alpha \le A_{\alpha - 1} \max_a \mathbb{E}_b\, e^{(\alpha - 1) K_{ab}}, \qquad
   \log A_\alpha \le \sum_{j=1}^{\alpha - 1} \log \max_a \mathbb{E}_b\, e^{j K_{ab}} . $$

**The example joins.** $P / Q \ge \prod_b L_b^{p_b}$, because the logarithm is concave. A power of
this product is one Gaussian moment, row by row as above:

$$ \mathbb{E}_P (Q / P)^\alpha = \mathbb{E}_Q (P / Q)^{1 - \alpha} \le \exp \tfrac{\alpha - 1}{2}
   \big( \mathbb{E}_b K_{bb} + (\alpha - 1)\, \mathbb{E}_{ab} K_{ab} \big) . $$

An event holds one number for each bin, $u_1 \ge u_2 \ge \dots$, which are at least the sorted
entries of every row of $\sigma^2 K$. A mean over b is then at most the mean over u.

References:
  Feldman and Shenfeld, "Privacy amplification by random allocation", 2025: independent noise.
  Schuchardt and Kalinin, "Sampling-free privacy accounting for matrix mechanisms under random
  allocation", 2026: $A_\alpha$ for correlated noise.
"""

import functools
import math

import numpy as np
from scipy.special import logsumexp

from dpjax.accounting._event_parts import Parts, squared
from dpjax.accounting._rdp_divergence import ORDERS
from dpjax.accounting.events import AllocatedGaussianDpEvent, RandomAllocationDpEvent

# A bin is 32 random bits modulo the number of bins. Its probability is at most 2^-32 more than one
# over the number.
_WORD = 2.0**-32


def divergence(event: AllocatedGaussianDpEvent, orders: np.ndarray) -> np.ndarray:
    """Rényi divergence for an example that joins or leaves, ``[orders]``."""
    precision = event.noise_multiplier**-2
    overlaps = np.asarray(event.overlaps) * precision  # bounds on K_1b, for each bin b
    j = np.arange(1, math.ceil(orders.max()))
    sums = np.asarray(logsumexp(np.multiply.outer(j, overlaps), axis=1))
    rises = sums - math.log(overlaps.size)
    return _bound(rises, orders, overlaps.max(), overlaps.mean(), overlaps.size)


def divergence_of_epoch(event: RandomAllocationDpEvent, orders: np.ndarray) -> np.ndarray:
    """As `divergence`, for fresh bins and independent noise, where the bins do not overlap."""
    least = event.noise_multipliers[0][0]  # counted for all bins
    precision = least**-2
    bins = event.batches
    j = np.arange(1, math.ceil(orders.max()))
    other_bins = math.log1p(-1 / bins)
    same_bin = j * precision - math.log(bins)
    rises = np.logaddexp(other_bins, same_bin)
    return _bound(rises, orders, precision, precision / bins, bins)


def _bound(
    rises: np.ndarray, orders: np.ndarray, largest: float, mean: float, bins: int
) -> np.ndarray:
    """The divergence at ``orders``, from ``rises``: ``log E_b exp(j K_1b)`` for j = 1, 2, ...

    ``largest`` and ``mean`` are the maximum and the mean of ``K_1b`` over the bins b. The rise of j
    is the difference of ``log A`` from order j to j + 1.
    """
    above = math.log1p(bins * _WORD)
    # log A is convex in the order, so it is below the chord between two whole orders.
    whole_orders = np.arange(rises.size + 1) + 1
    log_a_whole = np.append(0.0, np.cumsum(rises + above))
    log_a = np.interp(orders, whole_orders, log_a_whole)
    leaves = log_a / (orders - 1)
    joins = (largest + (orders - 1) * mean * math.exp(above)) / 2
    # An example whose bin is known is still hidden by the whole Gaussian.
    known = orders * largest / 2
    return np.minimum(np.maximum(leaves, joins), known)


@functools.lru_cache(maxsize=64)
def curve(event: AllocatedGaussianDpEvent | RandomAllocationDpEvent) -> np.ndarray:
    """The divergence on `ORDERS`, cached because a ledger asks for it at every step."""
    if isinstance(event, RandomAllocationDpEvent):
        return divergence_of_epoch(event, ORDERS)
    return divergence(event, ORDERS)


def known_bins(parts: Parts) -> Parts:
    """The parts with every bin known. Events become plain Gaussians, which cost no less."""
    others = []
    precisions = [parts.precision]
    for event, count in parts.foreign:
        if isinstance(event, AllocatedGaussianDpEvent):
            precisions.append(count / squared(event.noise_multiplier))
        elif isinstance(event, RandomAllocationDpEvent):
            # The bin with the least noise costs most, and all records of one user can be in it.
            precisions.append(count / squared(event.noise_multipliers[0][0]))
        else:
            others.append((event, count))
    return parts._replace(foreign=tuple(others), precision=math.fsum(precisions))
