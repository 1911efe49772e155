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
from dpjax.accounting.methods import checked_delta
from dpjax.mechanism import Mechanism
from dpjax.types import Algorithm, Draw, Key, PyTree, Sampler, State

_SEEDS = 2**16  # how many keys are searched for one that draws the canary


class Separation(NamedTuple):
    r"""How far a canary that is drawn moves what one step releases, in units of the noise."""

    measured: Float[np.ndarray, " keys"]
    r"""$\mu$ under each key."""
    lower: Float[np.ndarray, " keys"]
    r"""What $\mu$ is at least, by the confidence limit of the noise's deviation."""
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
        if self.claimed == math.inf:
            return False
        # Not "above": NaN is above nothing, and would be taken for a sound step.
        if self.projections is None:
            return not np.max(self.lower) <= self.claimed
        from scipy.stats import chi2

        at, shares = self._shares()
        with np.errstate(divide="ignore"):
            scales = self.claimed / at
        # An estimated norm lets the contribution exceed the bound by s with P(chi2_r < r / s^2).
        allowed = chi2(self.projections).cdf(self.projections * scales**2)
        return not np.all(shares <= allowed)

    def epsilon(self, delta: float) -> float:
        """The lower bound on the epsilon of one step that draws the canary."""
        delta = checked_delta("Separation.epsilon", delta)
        pairs = [(mu, share) for mu, share in zip(*self._shares(), strict=True) if share > delta]
        refuted = (profiles.gaussian(mu).epsilon(delta / share) for mu, share in pairs)
        return max(refuted, default=0.0)

    def claimed_epsilon(self, delta: float) -> float:
        """The epsilon that the accountant states for such a step."""
        if not 0 < self.claimed < math.inf:
            return self.claimed
        event = accounting.gaussian(1 / self.claimed)
        if self.projections is not None:
            event = accounting.with_projections(event, self.projections)
        return accounting.epsilon(event, delta, "pld")

    def _shares(self) -> tuple[np.ndarray, np.ndarray]:
        """Separations, and the share of keys that reach each of them at least."""
        if self.projections is None:
            return self.lower.max(keepdims=True), np.ones(1)
        keys = len(self.lower)
        # Dvoretzky, Kiefer and Wolfowitz (1956, Massart's constant): for all of them together.
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
    for row in (canary, 0 if instead is None else instead):
        checks.whole(call, "canary or instead", row, least=0, most=sampling.examples - 1)
    confidence = checks.fraction(call, "confidence", confidence, "Such as 0.999, not per cent.")
    base, lacking = sampling, without(sampling, [canary])
    if instead is not None:
        base = without(sampling, [instead])
        lacking = _redrawn(base, lambda draw, _: _renamed(draw, canary, instead))
    # To compile once less, the program without the canary measures the noise as well: under keys
    # that are not searched it draws no row.
    silent = _redrawn(
        lacking,
        lambda draw, key: draw._replace(mask=draw.mask & (jax.random.key_data(key)[-1] < _SEEDS)),
    )
    step, without_it = _FirstStep(build(base), params), _FirstStep(build(silent), params)
    mechanism = step.mechanism
    estimated = mechanism.clipping.projections
    risk = 1 - confidence if estimated is None else (1 - confidence) / 2
    deviations, limits = _deviations(lambda n: without_it(_SEEDS + n), pairs, risk)
    moved, rounding = [], []
    for seed in _seeds_that_draw(base, canary, keys):
        one, other = step(seed), without_it(seed)
        moved.append([float(np.linalg.norm(a - b)) for a, b in zip(one, other, strict=True)])
        rounding.append(step.rounding(one, other))
    # What rounding may have added is no evidence against the mechanism.
    sure = np.maximum(0.0, np.subtract(moved, rounding))
    # Not by the relation of the mechanism: a removal against the claim of a replacement would hide
    # half of the noise.
    claimed = _of_one(mechanism) * (1.0 if instead is None else 2.0)
    measured, lower = in_units(np.asarray(moved), deviations), in_units(sure, limits)
    return Separation(measured, lower, claimed, estimated, confidence)


def _of_one(mechanism: Mechanism) -> float:
    """How far the mechanism lets the gradient of one row move its first step, in units of noise."""
    # Step 0 has the first row of C^-1 Z; the multiplier is that of the whole run.
    row, noise = 1.0, mechanism.noise
    if noise is not None:
        row = float(noise.next(jnp.ones(()), noise.start(jnp.zeros(())), 0)[0])
    with np.errstate(divide="ignore"):
        return float(1.0 / (mechanism.multipliers[0] * mechanism.strategy_sensitivity * row))


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
    gone = jnp.asarray(np.isin(np.arange(sampling.examples), np.asarray(rows)))

    def fewer(drawn: Draw, _: Key) -> Draw:
        stays = drawn.mask & ~gone[drawn.indices]
        order = jnp.argsort(~stays, stable=True)
        return Draw(drawn.indices[order], stays[order])

    return _redrawn(sampling, fewer)


def _redrawn(sampling: Sampler, change: Callable[[Draw, Key], Draw]) -> Sampler:
    """The sampler, with every draw changed by a function of it and of the key."""

    def draw(key: Key, step: Any, *more: Key) -> Draw:
        return change(sampling.draw(key, step, *more), key)

    return dataclasses.replace(sampling, draw=draw)


def _renamed(draw: Draw, row: int, instead: int) -> Draw:
    return draw._replace(indices=jnp.where(draw.indices == row, instead, draw.indices))


class _FirstStep:
    """What the first step of an algorithm releases under the key of a seed, leaf by leaf."""

    def __init__(self, algorithm: Algorithm, params: PyTree) -> None:
        call, named = "auditing.audit_algorithm", "build(sampling).mechanism"
        self.mechanism = checks.instance(call, named, algorithm.mechanism, Mechanism)
        self.step = algorithm.step
        # As of a supplied key: each seed below begins the same run again.
        self.state: State = algorithm.init(params, jax.random.key(0))

    def __call__(self, seed: int) -> list[np.ndarray]:
        key = jax.random.key(seed)
        return self.released(self.step(self.state._replace(key=key, noise_key=key))[0])

    def released(self, state: State) -> list[np.ndarray]:
        """The parameters of a state, and the bound if it is adapted."""
        leaves = [trees.on_host(leaf).astype(np.float64) for leaf in jax.tree.leaves(state.params)]
        adaptive = self.mechanism.adaptive
        if adaptive is None:
            return leaves
        # The next bound follows from the noisy count. Its logarithm is linear in the count.
        bound = np.atleast_1d(np.float64(state.bound_scale))
        return [*leaves, np.log(bound) if adaptive.geometric else bound]

    def rounding(self, one: list[np.ndarray], other: list[np.ndarray]) -> list[float]:
        """For each leaf, how far the roundings of two steps can move them apart."""
        before, leaves = self.released(self.state), jax.tree.leaves(self.state.params)
        digits = [float(jnp.finfo(leaf.dtype).eps) for leaf in [*leaves, jnp.float32(1)]]
        return [
            # Half a last digit of each sum, and of each of the two factors of its update.
            eps * float(np.linalg.norm(np.maximum(abs(a), abs(b)) + abs(a - w) + abs(b - w)))
            for eps, w, a, b in zip(digits, before, one, other, strict=False)
        ]


def _deviations(
    noise_of: Callable[[int], list[np.ndarray]], pairs: int, risk: float
) -> tuple[np.ndarray, np.ndarray]:
    """The deviation of each leaf's noise, and limits that all hold but for the risk."""
    from scipy.stats import chi2

    squares, sizes = np.zeros(1), np.zeros(1)
    for pair in range(pairs):
        both = zip(noise_of(2 * pair), noise_of(2 * pair + 1), strict=True)
        # The difference of two keys has no mean, whatever decays the parameters.
        differences = [(a - b) / math.sqrt(2) for a, b in both]
        squares = squares + np.array([np.sum(d**2) for d in differences])
        sizes = sizes + np.array([d.size for d in differences])
    some = np.maximum(sizes, 1)
    quantiles = chi2(some).ppf(risk / len(some))
    return np.sqrt(squares / some), np.sqrt(squares / quantiles)


def in_units(
    moved: Float[np.ndarray, "keys leaves"], deviations: Float[np.ndarray, " leaves"]
) -> Float[np.ndarray, " keys"]:
    """The separation under each key, from what each leaf moved."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # Without noise: infinity, where anything moved at all.
        shifts = np.where(moved == 0, 0.0, moved / deviations)
    # Independent Gaussians separate by the root of the sum of squares.
    return np.linalg.norm(shifts, axis=1)


def _seeds_that_draw(sampling: Sampler, row: int, count: int) -> list[int]:
    @jax.jit
    def holds(seed: Array) -> Bool[Array, ""]:
        indices, mask = sampling.draw(jax.random.key(seed), jnp.int32(0))
        return jnp.any((indices == row) & mask)

    seeds = list(itertools.islice((seed for seed in range(_SEEDS) if holds(seed)), count))
    if len(seeds) < count:
        raise ValueError(
            f"auditing.audit_algorithm(canary={row}, keys={count}): {len(seeds)} of {_SEEDS} keys "
            "draw it. Audit with dpjax.sampling.full."
        )
    return seeds
