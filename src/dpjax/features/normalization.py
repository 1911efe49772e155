# SPDX-License-Identifier: Apache-2.0
"""The means and variances of channels, released privately.

Each example's channel means are a row that is clipped to a norm, the *threshold*, and so are its
mean squares. A threshold is public, or a noisy histogram finds it, at the price of one more query.
An exact median of the private norms is a release that no accountant sees.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpjax import checks, clipping, trees
from dpjax.features.scaling import Moments
from dpjax.noise.link import add_noise
from dpjax.noise.multiplier import checked_multiplier, standard_deviations
from dpjax.types import Key, Purpose

# The number of examples that are summed together in float64, on the host.
_ROWS = 2**16

Features = Float[Array, "examples height width channels"]

# The two queries, with the noise streams 0 and 1. The searches for their thresholds have 2 and 3.
_MEANS = 0
_SQUARES = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """A private search: each threshold is a quantile of a noisy histogram of the norms.

    Args:
      noise_multiplier: The noise multiplier of each histogram.
      quantile: The fraction of norms that should lie below the threshold.
      lowest: Upper edge of the first bin; public.
      highest: Upper edge of the last bin; public.
      bins: The number of bins; their edges are in geometric progression.

    Sensitivity:
      Every example adds 1 to one bin, so a histogram has sensitivity 1.

    Example:
      >>> Search(noise_multiplier=20.0).edges[[0, -1]]
      array([1.e-04, 1.e+02])
    """

    noise_multiplier: float
    quantile: float = 0.5
    lowest: float = 1e-4
    highest: float = 1e2
    bins: int = 121

    def __post_init__(self) -> None:
        checked_multiplier("features.Search", self.noise_multiplier, clipping.flat(1.0))

    @property
    def edges(self) -> np.ndarray:
        """The upper edge of each bin; larger norms are counted in the last bin."""
        return np.geomspace(self.lowest, self.highest, self.bins)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Normalization:
    r"""The private normalisation of channels, for the run and the accountant.

    Per example $i$ with channel means $a_i$ and mean squares $b_i$,

    $$ \mu = \frac1N \Bigl(\sum_i \bar a_i + \mathcal N(0, (z \tau_1)^2)\Bigr), \quad
       \sigma^2 = \max\Bigl(0, \frac1N \Bigl(\sum_i \bar b_i + \mathcal N(0, (z \tau_2)^2)\Bigr)
       - \mu^2\Bigr), $$

    where the bar clips to a norm of $\tau$.

    Args:
      examples: $N$, which is public.
      noise_multiplier: $z$, of each of the two queries, relative to its threshold.
      thresholds: $(\tau_1, \tau_2)$, public; or a `Search` that finds them.

    Privacy:
      ``multipliers`` lists the queries. They run before the first step of training, and its
      sampling does not amplify them: give ``preparation=normalization.multipliers`` to the
      mechanism.

    | given | result |
    |---|---|
    | an example with NaN or infinite features | contributes exactly 0 |
    | multiplier 0, infinite thresholds | moments without noise; accounted as not private |
    | a mean above 1000 deviations | $\sigma^2$ is off by about $10^{-7} \mu^2$: it is float32 |

    Example:
      >>> import dpjax
      >>> normalization = Normalization(
      ...     examples=60_000, noise_multiplier=8.0, thresholds=(0.166, 0.046)
      ... )
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.poisson(examples=60_000, batch_size=4096),
      ...     clipping=dpjax.clipping.flat(bound=0.1),
      ...     noise_multiplier=3.04,
      ...     steps=560,
      ...     preparation=normalization.multipliers,
      ... )
      >>> round(mechanism.epsilon(delta=1e-5), 2)
      2.59

    References:
      Tramèr and Boneh, "Differentially Private Learning Needs Better Features", 2021, appendix B;
      there the thresholds are medians of the private norms, which is not private.
    """

    examples: int
    noise_multiplier: float
    thresholds: tuple[float, float] | Search

    def __post_init__(self) -> None:
        checks.whole("features.Normalization", "examples", self.examples)
        thresholds = self.thresholds
        if isinstance(thresholds, Search):
            thresholds = (1.0,)  # a search finds positive ones
        for bound in thresholds:
            checks.not_negative("features.Normalization", "thresholds", bound)
            checked_multiplier(
                "features.Normalization", self.noise_multiplier, clipping.flat(bound)
            )

    @property
    def multipliers(self) -> tuple[float, ...]:
        """The noise multiplier of every query; each is a Gaussian query on all examples."""
        queries = (float(self.noise_multiplier),) * 2
        if isinstance(self.thresholds, Search):
            return (float(self.thresholds.noise_multiplier),) * 2 + queries
        return queries

    def release(self, key: Key, features: Features) -> Moments:
        """Runs the queries on all examples.

        The key is consumed; the root key of the run may be given. A second release, of other
        features say, needs another key: equal noise on both cancels in their difference. Each row
        of features must be a function of one raw example. The moments may be published.

        Privacy:
          Write the moments before they are used, and read them on resume: each call is a release.
        """
        if features.shape[0] != self.examples:
            raise ValueError(
                f"features.Normalization: got {len(features)} examples; expected {self.examples}."
            )
        means, squares = _statistics(features)
        mean = self._mean(key, _MEANS, means)
        mean_square = self._mean(key, _SQUARES, squares)
        # Noise can make the difference negative.
        return Moments(mean, variance=jnp.maximum(mean_square - mean**2, 0))

    def _mean(self, key: Key, query: int, rows: Array) -> Array:
        """The noisy mean of rows that are clipped to the query's threshold."""
        threshold = self._threshold(key, query, rows)
        return _release(key, query, rows, threshold, self.noise_multiplier) / self.examples

    def _threshold(self, key: Key, query: int, rows: Array) -> float:
        """The given threshold of a query, or the quantile of a noisy histogram of norms.

        ``query`` is 0 for means or 1 for squares, and ``rows`` are ``[examples, channels]``.
        """
        if not isinstance(self.thresholds, Search):
            return self.thresholds[query]
        search = self.thresholds
        norms = trees.group_norms(rows, groups=(0,), size=1)  # one leaf, in group 0: [examples, 1]
        bin_of = jnp.searchsorted(jnp.asarray(search.edges), norms)
        bin_of = jnp.minimum(bin_of, search.bins - 1)  # norms above all edges: the last bin
        # A row of votes has one 1, or none if its norm is not finite. [examples, bins]
        votes = jnp.where(jnp.isfinite(norms), jax.nn.one_hot(bin_of[:, 0], search.bins), 0)
        # Streams 2 and 3 are the searches'. The bound 1 is the norm of a row of votes.
        counts = _release(key, 2 + query, votes, 1.0, search.noise_multiplier)
        # The quantile is of the public number of examples, because the sum of counts has noise.
        wanted_count = search.quantile * self.examples
        sums = np.cumsum(np.asarray(counts, np.float64))  # norms up to the edge of each bin
        is_enough = sums >= wanted_count
        if not is_enough.any():  # noise made the sums too small
            return float(search.edges[-1])
        return float(search.edges[np.argmax(is_enough)])  # argmax finds the first bin


@jax.jit
def _statistics(features: Features) -> tuple[Array, Array]:
    """Channel means and mean squares of each example: ``[examples, channels]``."""
    features = features.astype(trees.wide(features.dtype))
    pixel_axes = (1, 2)  # an example contributes one vector, also from a large image
    return jnp.mean(features, axis=pixel_axes), jnp.mean(features**2, axis=pixel_axes)


def _release(key: Key, query: int, rows: Array, bound: float, multiplier: float) -> Array:
    """The noisy sum of rows that are clipped to a bound: one Gaussian query on all examples."""
    rule = clipping.flat(bound)
    # The rule and the noise link of training, whose tests also cover this query.
    factors = rule.factors(trees.group_norms(rows, (0,), 1))
    total, lost = _summed(rows, factors)
    # The purpose keeps this noise apart from training steps with the same root key.
    stream = trees.step_key(key, Purpose.PREPARATION, query)
    # A query is the only step of its stream.
    deviations = standard_deviations(multiplier, rule, 0)
    released, _ = add_noise(total, rule.partition, deviations, stream, 0, lost=lost)
    return jnp.asarray(released)


def _summed(rows: Array, factors: Array) -> tuple[Array, Array]:
    """The sum of rows times their factors, and its remainder beyond the rows' dtype."""
    # float32 rounds a sum over a million examples by percents of a bound, and one row can move the
    # roundings of all others.
    total = np.zeros(rows.shape[1:], np.float64)
    for start in range(0, rows.shape[0], _ROWS):
        block = np.asarray(rows[start : start + _ROWS])
        scale = np.asarray(factors[start : start + _ROWS], block.dtype)
        # A dropped example must contribute exactly 0, and 0 * NaN is NaN.
        block = np.where(scale != 0, block, 0)
        total += np.sum(block * scale, axis=0, dtype=np.float64)
    high = total.astype(rows.dtype)
    return jnp.asarray(high), jnp.asarray((total - high).astype(rows.dtype))
