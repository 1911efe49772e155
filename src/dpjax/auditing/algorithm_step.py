# SPDX-License-Identifier: Apache-2.0
r"""White-box audit of one step of an algorithm as it runs.

With one key the noise cancels in the difference of a step with and without a canary. Its norm in
standard deviations of the noise, $\mu$, is all that an attacker who knows everything else can use.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy.typing import ArrayLike

from dpjax import accounting, checks, trees
from dpjax.accounting import profiles
from dpjax.mechanism import Mechanism
from dpjax.types import Algorithm, Draw, Key, PyTree, Sampler, State

# The number of keys that are searched for one that draws the canary.
_SEEDS = 2**16


class Separation(NamedTuple):
    r"""How far a canary that is drawn moves what one step releases, in units of the noise."""

    measured: Float[np.ndarray, " keys"]
    r"""$\mu$ under each key."""
    lower: Float[np.ndarray, " keys"]
    r"""The least $\mu$, by the confidence limit of the noise's deviation."""
    claimed: float
    r"""The largest $\mu$ that the mechanism allows: 1 / multiplier; twice that with `instead`, and
    $C_{00} / \mathrm{sens}(C)$ times that with noise that is correlated by $C$."""
    projections: int | None
    r"""The number of random projections, where norms are estimated and $\mu$ differs by key."""
    confidence: float
    """The confidence of `lower`, `refutes` and `epsilon`, for noise that is Gaussian."""

    @property
    def refutes(self) -> bool:
        """Whether the canary moves more than the mechanism allows, or by NaN."""
        if self.claimed == math.inf:  # a mechanism without noise allows any move
            return False
        # The negated comparisons also refute a step by NaN, which is not above anything.
        if self.projections is None:
            return not np.max(self.lower) <= self.claimed
        from scipy.stats import chi2

        # A contribution whose norm is estimated from r projections moves the sum by s bounds or
        # more with the probability P(chi2_r < r / s^2). So at most this share of the keys may reach
        # s times the claimed separation.
        separations, least_shares = self._least_shares()
        with np.errstate(divide="ignore"):
            inverse_s = self.claimed / separations
        allowed_shares = chi2(self.projections).cdf(self.projections * inverse_s**2)
        return not np.all(least_shares <= allowed_shares)

    def epsilon(self, delta: float) -> float:
        """The lower bound on the epsilon of one step that draws the canary."""
        delta = checks.delta("Separation.epsilon", delta)
        refuted = []
        for mu, least_share in zip(*self._least_shares(), strict=True):
            if least_share > delta:
                refuted.append(profiles.gaussian(mu).epsilon(delta / least_share))
        return max(refuted, default=0.0)

    def claimed_epsilon(self, delta: float) -> float:
        """The epsilon that the accountant states for such a step."""
        if not 0 < self.claimed < math.inf:
            return self.claimed
        event = accounting.gaussian(1 / self.claimed)
        if self.projections is not None:
            event = accounting.with_projections(event, self.projections)
        return accounting.epsilon(event, delta, "pld")

    def _least_shares(self) -> tuple[np.ndarray, np.ndarray]:
        """Separations, and the lower confidence limit of the share of keys that reach each."""
        if self.projections is None:
            return self.lower.max(keepdims=True), np.ones(1)
        keys = len(self.lower)
        # The bound of Dvoretzky, Kiefer and Wolfowitz (1956, Massart's constant) holds for all
        # shares together.
        slack = math.sqrt(math.log(2 / (1 - self.confidence)) / (2 * keys))
        return np.sort(self.lower), 1 - np.arange(keys) / keys - slack


def audit_algorithm(
    build: Callable[[Sampler], Algorithm],
    sampling: Sampler,
    params: PyTree,
    canary: int,
    *,
    instead: int | None = None,
    keys: int = 1,
    pairs: int = 32,
    confidence: float = 0.999,
) -> Separation:
    r"""White-box audit of the first step of an algorithm, as it runs.

    $$ \mu^2 = \sum_l \lVert \theta_l(D) - \theta_l(D \setminus \{c\}) \rVert^2 / \sigma_l^2 $$

    over the leaves $l$ of the released parameters, and of the bound if it is adapted, under one
    key. $\sigma_l$ is the standard deviation of steps that draw no row; `lower` takes its upper
    confidence limit.

    Args:
      build: From a sampler to the algorithm, as in the example. The optimizer must be linear;
        others hide what the step releases.
      sampling: The sampler of the algorithm.
      params: The parameters at which the step is taken.
      canary: The row of the data that is left out. One whose clipped gradient reaches the bound
        shows most.
      instead: The row that takes the canary's place, and takes part nowhere else. Name only a row
        whose clipped gradient is opposite to the canary's: others move less.
      keys: The number of keys, 200 or more where norms are estimated (`dpjax.clipping.jl`): the
        projections follow from the key.
      pairs: The number of pairs of steps that measure the noise. A leaf of few numbers needs many.
      confidence: The confidence of the result.

    Returns:
      The separation, under the keys of the first seeds 0, 1, ... that draw the canary.

    Privacy:
      Computed from private data without noise. Do not publish it.

    Example:
      >>> import dataclasses, dpjax, optax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.full(examples=3),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=2.0,
      ...     steps=1,
      ... )
      >>> data = jnp.array([[0.1], [0.2], [9.0]]) * jnp.ones(500)
      >>> audit = audit_algorithm(
      ...     lambda sampling: dpjax.dpsgd(
      ...         lambda w, x: -jnp.vdot(w, x),
      ...         optax.sgd(1.0),
      ...         dataclasses.replace(mechanism, sampling=sampling),
      ...         data,
      ...     ),
      ...     mechanism.sampling,
      ...     params=jnp.zeros(500),
      ...     canary=2,
      ... )
      >>> round(float(audit.measured[0]), 1), audit.claimed, audit.refutes
      (0.5, 0.5, False)

    References:
      Nasr et al., "Tight Auditing of Differentially Private Machine Learning", 2023.
    """
    call = "auditing.audit_algorithm"
    for row in (canary, instead):
        if row is not None:
            checks.whole(call, "canary or instead", row, least=0, most=sampling.examples - 1)
    confidence = checks.fraction(call, "confidence", confidence, "Such as 0.999, not per cent.")
    # Samplers of two neighbouring data sets: `present` draws the canary, and `absent` lacks it, or
    # draws the row `instead` in its place.
    if instead is None:
        present = sampling
        absent = without(sampling, [canary])
    else:
        present = without(sampling, [instead])
        absent = _redrawn(present, lambda draw, _: _renamed(draw, canary, instead))
    # Each takes a seed, and returns the leaves that the first step releases under its key.
    step_with = _FirstStep(build(present), params)
    step_without = _FirstStep(build(_empty_beyond_seeds(absent)), params)
    mechanism = step_with.mechanism
    projections = mechanism.clipping.projections
    risk = 1 - confidence
    if projections is not None:
        risk = risk / 2  # the other half is for the shares of keys in `Separation`
    # Beyond the seeds that are searched, draws are empty and a step releases only noise. So these
    # are each leaf's deviation of the noise and its upper confidence limit, [leaves].
    deviations, limits = _deviations(lambda n: step_without(_SEEDS + n), pairs, risk)
    moved = []  # the distance between the two steps, [keys, leaves]
    rounding = []  # the most of it that rounding explains, [keys, leaves]
    for seed in _seeds_that_draw(present, canary, keys):
        leaves_with = step_with(seed)
        leaves_without = step_without(seed)
        pairs_of_leaves = zip(leaves_with, leaves_without, strict=True)
        moved.append([float(np.linalg.norm(a - b)) for a, b in pairs_of_leaves])
        rounding.append(step_with.rounding(leaves_with, leaves_without))
    # A difference that rounding can explain is not evidence against the mechanism.
    least_moved = np.maximum(0.0, np.subtract(moved, rounding))
    # A canary that is left out moves the sum by one bound, and a replaced one by two. This follows
    # from `instead`, not from the mechanism's relation: with twice the claim, an audit that leaves
    # the canary out does not refute a step with half of the noise.
    claimed = _of_one_row(mechanism)
    if instead is not None:
        claimed = 2.0 * claimed
    return Separation(
        measured=in_units(np.asarray(moved), deviations),
        lower=in_units(least_moved, limits),
        claimed=claimed,
        projections=projections,
        confidence=confidence,
    )


def _empty_beyond_seeds(sampling: Sampler) -> Sampler:
    """The sampler, with empty draws under keys that are not searched.

    So one compiled program takes the steps without the canary and the steps that measure the
    noise.
    """

    def emptied(draw: Draw, key: Key) -> Draw:
        is_searched = jax.random.key_data(key)[-1] < _SEEDS
        return draw._replace(mask=draw.mask & is_searched)

    return _redrawn(sampling, emptied)


def _of_one_row(mechanism: Mechanism) -> float:
    """The most that the gradient of one row may move the first step, in units of its noise."""
    # The noise of step 0 is the first row of C^-1 Z; the multiplier is that of the whole run.
    scale = 1.0
    if mechanism.noise is not None:
        memory = mechanism.noise.start(jnp.zeros(()))
        noise, _ = mechanism.noise.next(jnp.ones(()), memory, 0)
        scale = float(noise)
    with np.errstate(divide="ignore"):
        return float(1.0 / (mechanism.multipliers[0] * mechanism.strategy_sensitivity * scale))


def without(sampling: Sampler, rows: ArrayLike) -> Sampler:
    """The sampler of a data set that lacks these rows: they are taken out of every draw.

    It draws all other rows as ``sampling`` does with the same key. So it stands for the neighbour
    of every guarantee that compares a row with an empty one.

    Example:
      >>> import dpjax
      >>> without(dpjax.sampling.full(4), [0, 2]).draw(jax.random.key(0), 0).size.item()
      2
    """
    if sampling.most_rows is not None:
        raise ValueError(
            f"auditing.without: {sampling.name} draws {sampling.unit}s; expected a sampler of "
            "rows. Audit with sampling.poisson on one row a person."
        )
    removed = jnp.asarray(np.isin(np.arange(sampling.examples), np.asarray(rows)))

    def reduced(drawn: Draw, _: Key) -> Draw:
        mask = drawn.mask & ~removed[drawn.indices]
        order = jnp.argsort(~mask, stable=True)
        return Draw(drawn.indices[order], mask[order])

    return _redrawn(sampling, reduced)


def _redrawn(sampling: Sampler, change: Callable[[Draw, Key], Draw]) -> Sampler:
    """The sampler, with every draw changed by a function of it and of the key."""

    def draw(key: Key, step: Any, *more: Key) -> Draw:
        return change(sampling.draw(key, step, *more), key)

    return dataclasses.replace(sampling, draw=draw)


def _renamed(draw: Draw, row: int, instead: int) -> Draw:
    """The draw with another row in the place of ``row``."""
    return draw._replace(indices=jnp.where(draw.indices == row, instead, draw.indices))


class _FirstStep:
    """The leaves that the first step of an algorithm releases under the key of a seed."""

    def __init__(self, algorithm: Algorithm, params: PyTree) -> None:
        self.mechanism = checks.instance(
            "auditing.audit_algorithm",
            "build(sampling).mechanism",
            algorithm.mechanism,
            Mechanism,
        )
        self.step = algorithm.step
        # The key is supplied, because each seed below begins the same run again.
        self.state: State = algorithm.init(params, jax.random.key(0))

    def __call__(self, seed: int) -> list[np.ndarray]:
        key = jax.random.key(seed)
        state, _ = self.step(self.state._replace(key=key, noise_key=key))
        return self.released(state)

    def released(self, state: State) -> list[np.ndarray]:
        """The parameters of a state, and the bound if it is adapted."""
        leaves = [trees.on_host(leaf).astype(np.float64) for leaf in jax.tree.leaves(state.params)]
        adaptive = self.mechanism.adaptive
        if adaptive is None:
            return leaves
        bound = np.atleast_1d(np.float64(state.bound_scale))
        if adaptive.geometric:
            bound = np.log(bound)  # linear in the noisy count that the next bound follows
        return [*leaves, bound]

    def rounding(self, first: list[np.ndarray], second: list[np.ndarray]) -> list[float]:
        """The distance by which rounding can move the leaves of two steps apart."""
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(self.state.params)]
        dtypes.append(jnp.dtype(jnp.float32))  # of the bound
        distances = []
        for dtype, w, a, b in zip(dtypes, self.released(self.state), first, second, strict=False):
            # Half a last digit of each sum, and of each of the two factors of its update.
            rounded = np.maximum(abs(a), abs(b)) + abs(a - w) + abs(b - w)
            distances.append(float(jnp.finfo(dtype).eps) * float(np.linalg.norm(rounded)))
        return distances


def _deviations(
    noise_of: Callable[[int], list[np.ndarray]], pairs: int, risk: float
) -> tuple[np.ndarray, np.ndarray]:
    r"""The deviation of each leaf's noise, and its upper confidence limit, ``[leaves]``.

    ``noise_of(n)`` are the leaves after the n-th step of only noise. The squares of d numbers of a
    leaf sum to S, and $S / \sigma^2$ has the distribution $\chi^2_d$. So the deviation is
    $\sqrt{S / d}$, and the limit is $\sqrt{S / q}$ with a low quantile q of $\chi^2_d$. The chance
    that any limit is too low is at most ``risk``.
    """
    from scipy.stats import chi2

    squares = np.zeros(1)  # S of each leaf: broadcast to [leaves] by the first pair
    counts = np.zeros(1)  # d of each leaf, likewise
    for pair in range(pairs):
        leaves = zip(noise_of(2 * pair), noise_of(2 * pair + 1), strict=True)
        # The difference of two keys has mean 0, also where the optimizer decays the parameters, and
        # sqrt(2) times the deviation.
        differences = [(a - b) / math.sqrt(2) for a, b in leaves]
        squares = squares + np.array([np.sum(leaf**2) for leaf in differences])
        counts = counts + np.array([leaf.size for leaf in differences])
    counts = np.maximum(counts, 1)  # an empty leaf has no number, and chi2 needs a degree
    # Each leaf has an equal share of the risk.
    quantiles = chi2(counts).ppf(risk / len(counts))
    return np.sqrt(squares / counts), np.sqrt(squares / quantiles)


def in_units(
    moved: Float[np.ndarray, "keys leaves"], deviations: Float[np.ndarray, " leaves"]
) -> Float[np.ndarray, " keys"]:
    """The separation under each key, from the distance that each leaf moved."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # A leaf that moved at all without noise has an infinite shift.
        shifts = np.where(moved == 0, 0.0, moved / deviations)
    # Independent Gaussians separate by the root of the sum of squares.
    return np.linalg.norm(shifts, axis=1)


def _seeds_that_draw(sampling: Sampler, row: int, count: int) -> list[int]:
    """The first seeds whose keys draw the row."""

    @jax.jit
    def holds(seed: Array) -> Bool[Array, ""]:
        indices, mask = sampling.draw(jax.random.key(seed), jnp.int32(0))
        return jnp.any((indices == row) & mask)

    drawing = (seed for seed in range(_SEEDS) if holds(seed))
    seeds = list(itertools.islice(drawing, count))
    if len(seeds) < count:
        raise ValueError(
            f"auditing.audit_algorithm(canary={row}, keys={count}): {len(seeds)} of {_SEEDS} keys "
            "draw it. Audit with dpjax.sampling.full."
        )
    return seeds
