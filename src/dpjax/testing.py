# SPDX-License-Identifier: Apache-2.0
"""The laws of private training, as assertions on your own rules, losses and chains.

The composition of correct parts can still break the guarantee. `dpjax.auditing` measures runs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import accounting, checks, clipping, trees
from dpjax.gradients import ENGINES, clipped_grad
from dpjax.noise import GaussianState
from dpjax.noise.state import LinkNoise
from dpjax.types import (
    ClippedSum,
    Clipping,
    Event,
    Limits,
    LossFn,
    NoiseMultiplier,
    PyTree,
    Sampler,
    Sum,
)

__all__ = [
    "LawBroken",
    "assert_engines_agree",
    "assert_noise",
    "assert_private",
    "assert_sampling",
    "assert_sensitivity",
    "influence",
]


class LawBroken(AssertionError):
    """A measurement contradicts a guarantee."""


class Batch(NamedTuple):
    """The gradients of a step, and which of their rows are drawn examples."""

    gradients: PyTree
    mask: np.ndarray


class Measurement(NamedTuple):
    """The clipped sum of one step that reaches the noise link, and the noise that it receives."""

    total: PyTree
    deviations: list[Any]  # of each leaf
    multiplier: NoiseMultiplier
    strategy: Any  # None for white noise
    below: Any = None  # the count that an adapted bound follows


def influence(rule: Clipping, gradients: PyTree) -> float:
    """The largest change of the clipped sum when one of these examples is removed.

    Gradients are per example, ``(batch, ...)``; try zero, infinite and NaN rows too.

    Example:
      >>> influence(clipping.flat(2.0), {"w": jnp.array([[3.0, 0.0], [0.0, 1.0]])})
      2.0
    """
    size = trees.leading_size(gradients)
    every = np.arange(size)

    def summed(rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
        taken = jax.tree.map(lambda x: jnp.asarray(x)[rows], gradients)
        clipped_sum, _, _ = clipping.clip(rule, taken, mask)
        return _vector(clipped_sum)

    total = summed(every, np.ones(size, bool))
    moved = []
    for example in every:
        # A removed example may be a masked row, or its row may be absent: both sums are compared.
        others = every != example
        masked = summed(every, others)
        absent = summed(every[others], np.ones(size - 1, bool))
        moved += [np.linalg.norm(total - masked), np.linalg.norm(total - absent)]
    return float(np.max(moved, initial=0.0))


def assert_sensitivity(rule: Clipping, gradients: PyTree) -> None:
    """Raises if one of these examples moves the sum by more than ``rule.sensitivity``.

    The tolerance for float32 is 2e-6 of the sensitivity plus the norm of the sum.

    Example:
      >>> gradients = {"w": jnp.array([[3.0, 0.0], [jnp.nan, 1.0]])}
      >>> assert_sensitivity(clipping.automatic(bound=0.5), gradients)
    """
    moved = influence(rule, gradients)
    total = _vector(clipping.clip(rule, gradients)[0])
    rounding = 2e-6 * (rule.sensitivity + float(np.linalg.norm(total)))
    if not moved <= rule.sensitivity + rounding:
        raise LawBroken(
            f"{rule.name}: one example moved the sum by {moved:.6g}, above {rule.sensitivity:.6g}."
        )


def assert_engines_agree(
    loss: LossFn,
    rule: Clipping,
    params: PyTree,
    batch: PyTree,
    *,
    mask: Any = None,
    engines: Sequence[str] = tuple(ENGINES),
    microbatch_sizes: Sequence[int] = (3,),
    tolerance: float = 1e-5,
) -> None:
    """Raises unless every engine gives the sum, losses, norms and factors of ``"vmap"``.

    The arguments are as for `dpjax.clipped_grad`. "vmap" runs on the whole batch, and every other
    engine in microbatches of each size. The tolerance is relative to the largest number and to 1.

    Example:
      >>> def loss(w, example):
      ...     x, y = example
      ...     return (jnp.dot(x, w) - y) ** 2
      >>> batch = jnp.ones((4, 2)), jnp.arange(4.0)
      >>> assert_engines_agree(loss, clipping.flat(1.0), jnp.zeros(2), batch)
    """

    def run(engine: str, size: int | None) -> ClippedSum:
        return jax.jit(clipped_grad(loss, rule, engine, size))(params, batch, mask)

    # "vmap" is the definition, with which every engine is compared.
    expected = run("vmap", None)
    for engine, size in itertools.product(set(engines) - {"vmap"}, microbatch_sizes):
        computed = run(engine, size)
        for name in ("value", "losses", "norms", "factors"):
            want = _vector(getattr(expected, name))
            got = _vector(getattr(computed, name))
            # Engines sum in other orders, so rounding is relative to the largest number.
            scale = max(1.0, float(np.max(np.abs(want[np.isfinite(want)]), initial=0.0)))
            if not np.allclose(want, got, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
                raise LawBroken(
                    f"engine {engine!r} with microbatches of {size} and 'vmap' differ in {name} "
                    f"by {np.max(np.abs(want - got)):.3g}."
                )


def assert_noise(
    link: optax.GradientTransformation,
    params: PyTree,
    deviation: float,
    *,
    tolerance: float = 0.005,
) -> None:
    """Raises unless the output of a link (or a whole chain) has noise of this standard deviation.

    The chain runs for three updates on the sum over no examples, zeros of the shapes of
    ``params``, so its output is pure noise. It begins with the noise link: `assert_private`
    measures chains that begin with `dpjax.clip_and_sum`.

    The deviation of all numbers of the first update together may differ by ``tolerance``, relative
    to ``deviation``; the default needs 1e6 numbers or more. That of each leaf may differ by as much
    as chance allows for its size, and by ``tolerance`` at least: by a seventh for 1,000 numbers, by
    half a per cent for 1e6.

    It raises too if the chain has no noise link, two of them, or another link before the noise
    link; if groups have noise of different deviations; and if two steps in turn have the same
    noise. It does not find equal keys of two runs, or a wrong deviation in later steps. If the
    chain divides by the expected batch size or multiplies by a learning rate, so must
    ``deviation``.

    Example:
      >>> from dpjax import noise
      >>> link = noise.gaussian(2.0, clipping.flat(3.0))
      >>> assert_noise(link, jnp.zeros(1_000_000), deviation=6.0)
    """
    from scipy.stats import chi2

    # A noise link compares the limits of a sum with its own rule's, which are not known here.
    limits = _LimitsOfAnyRule(bounds=(), projections=None, groups=())
    zeros: Any = Sum(jax.tree.map(jnp.zeros_like, params), limits)
    state = link.init(params)
    released = []
    try:
        for _ in range(3):
            noise, state = link.update(zeros, state, params)
            released.append(noise)
    except (AttributeError, TypeError, ValueError) as error:
        raise LawBroken(f"the chain refuses to run: {error}") from error
    noise = released[0]
    if isinstance(noise, Sum):
        raise LawBroken("the chain adds no noise: a clipped sum comes out.")
    # One entry for all leaves together, then one for each leaf: the name in the error, the measured
    # deviation, and the least and the most that is allowed, relative to the expected deviation.
    measured = [("", float(np.std(_vector(noise))), 1 - tolerance, 1 + tolerance)]
    for name, leaf in zip(trees.leaf_names(noise), jax.tree.leaves(noise), strict=True):
        size = np.size(leaf)
        if size:
            # The mean of the noise is 0, so the sum of its squares over the expected variance has a
            # chi-square law with ``size`` degrees of freedom. A correct leaf is outside these
            # limits with a probability of 2e-9. For large leaves the tolerance is wider.
            least, most = np.sqrt(chi2(size).ppf([1e-9, 1 - 1e-9]) / size)
            least = min(least, 1 - tolerance)
            most = max(most, 1 + tolerance)
            of_leaf = float(np.sqrt(np.mean(_vector(leaf) ** 2)))
            measured.append((f" of {name or 'the array'}", of_leaf, least, most))
    for name, found, least, most in measured:
        if not least * deviation <= found <= most * deviation:
            raise LawBroken(f"the noise{name} has deviation {found:.6g}, expected {deviation:.6g}.")
    for step, (one, other) in enumerate(itertools.pairwise(map(_vector, released))):
        # The difference of two such releases shows the examples without any noise. At deviation 0
        # all are zeros.
        if deviation and np.array_equal(one, other):
            raise LawBroken(f"steps {step} and {step + 1} have the same noise.")


def assert_sampling(sampler: Sampler, *, steps: int = 400, seed: int = 0) -> None:
    """Raises unless draws are as likely as the sampler states to the accountant.

    No draw holds an example twice or a row that does not exist, and no example is drawn more often
    than its stated rate allows by chance, nor twice in a cycle. Batches of a sampler that states
    Poisson sampling must vary in size as such batches do; equal sizes are the common mistake.

    Args:
      sampler: A sampler, of your own too, which states its draws by `dpjax.sampling.stated`.
      steps: How many steps are drawn; a wrong rate shows the better the more there are.
      seed: The seed of the draws.

    Example:
      >>> from dpjax import sampling
      >>> assert_sampling(sampling.poisson(examples=100, batch_size=20))
    """
    from scipy.stats import binom, chi2

    key = jax.random.key(seed)

    @jax.jit
    def counts(step: Any) -> Any:
        """How often a step draws each example, ``[examples]``, and whether all indices exist."""
        indices, mask = sampler.draw(key, step)
        exists = (indices >= 0) & (indices < sampler.examples)
        times = jnp.zeros(sampler.examples, jnp.int32).at[indices].add(mask)
        return times, jnp.all(exists | ~mask)

    # [steps, examples] and [steps].
    times, all_exist = map(np.asarray, jax.lax.map(counts, jnp.arange(steps)))
    if not all_exist.all() or times.max(initial=0) > 1:
        raise LawBroken(f"{sampler.name}: a draw holds an example twice, or one that is not there.")
    # The sampler states in how many steps in turn an example is drawn at most once. Whole cycles
    # are counted, [cycles, examples].
    cycle = sampler.facts["cycle"]
    by_cycle = times[: steps - steps % cycle].reshape(-1, cycle, sampler.examples).sum(axis=1)
    if cycle > 1 and by_cycle.max(initial=0) > 1:
        raise LawBroken(f"{sampler.name}: an example is drawn twice in a cycle of {cycle} steps.")
    # The checks below hold for independent coins; samplers with another event do not draw by them.
    if sampler.facts["event"] != Event.POISSON:
        return
    rates = sampler.facts["rates"]  # pairs: a rate, and the number of cycles in turn that have it
    # One coin in each cycle draws an example, so the number of its draws is binomial. The most
    # drawn one of a correct sampler exceeds this quantile with a probability below 1e-9.
    largest_rate = max(rate for rate, _ in rates)
    drawn = int(by_cycle.sum(axis=0).max())
    if drawn > binom.ppf(1 - 1e-9 / sampler.examples, len(by_cycle), largest_rate):
        raise LawBroken(
            f"{sampler.name}: an example is in {drawn} of {len(by_cycle)} draws; expected a rate "
            f"of {largest_rate:.4g}."
        )
    # Sizes have one binomial law only if each step draws every example by a coin of one rate. At
    # rate 1 all sizes are equal.
    if len(rates) > 1 or cycle > 1 or largest_rate == 1:
        return
    # The sum of the squared deviations of sizes, over the binomial variance, is about chi-square
    # with steps - 1 degrees of freedom. Below its quantile of 1e-9, sizes vary too little. At rate
    # 0 the variance is 0, and nothing is divided.
    sizes = times.sum(axis=1)
    variance = sampler.examples * largest_rate * (1 - largest_rate)
    scaled_squares = (steps - 1) * float(np.var(sizes, ddof=1)) / (variance or 1)
    if scaled_squares < chi2(steps - 1).ppf(1e-9):
        raise LawBroken(
            f"{sampler.name}: batch sizes from {sizes.min()} to {sizes.max()} vary less than those "
            "of Poisson sampling."
        )


def assert_private(
    chain: optax.GradientTransformation,
    params: PyTree,
    *,
    canary: PyTree | None = None,
    steps: int = 3,
    tolerance: float = 0.02,
    most_rows: int | None = None,
) -> None:
    r"""Raises unless one example moves a chain's releases just as far as its multiplier allows.

    The chain runs on a batch with and without one example, outside ``jit``. At each step the noise
    link releases $s + \Sigma^{1/2} z$, where $s$ is the clipped sum and $z$ is standard normal.
    Without the example the sum is $s'$, so the example moves the release by
    $\mu = \lVert \Sigma^{-1/2} (s - s') \rVert$. A step with the multiplier $m$ has
    $\mu = 1 / m$ if it draws the example, and $\mu = 0$ if not; here every second step does. With
    correlated noise only the first step draws it, and $\mu$ of the whole run is at most $1 / m$.
    The upper limits hold for an example of NaN and for one of infinities too.

    The updates must follow only from the releases. So the chain runs on two wholly different
    batches, one of them with NaN, and of other sizes, while its noise link adds the noise to the
    sums of the first run: the updates must have the bits of the first run.

    It refuses a link between clipping and noise, noise that is missing, added twice or for
    another bound, and a link before the clipping that mixes examples (`optax.clip_by_global_norm`),
    drops a batch for one (`optax.apply_if_finite`), or keeps earlier gradients (`optax.trace`). It
    also refuses a link that divides by the drawn size, ``mask.sum()``.

    Args:
      chain: From per-example gradients ``(batch, ...)`` to updates, such as
        ``optax.chain(mechanism.private(), optax.adam(1e-3))``.
      params: Parameters.
      canary: The gradient of the example, without batch axis; by default far longer than any bound.
        A rule that drops long gradients needs one that just reaches its bound.
      steps: How many steps run; the first, third, ... draw the example.
      tolerance: The largest distance of $\mu m$ from 1, or from 0.
      most_rows: For the link of a mechanism over persons, the ``most_rows`` of its sampler: masks
        are then ``[persons, most_rows]``.

    Example:
      >>> import dpjax
      >>> rule = dpjax.clipping.flat(1.0)
      >>> link = dpjax.noise.gaussian(1.3, rule)
      >>> chain = optax.chain(dpjax.clip_and_sum(rule), link, optax.scale_by_adam())
      >>> assert_private(chain, {"w": jnp.zeros(5)})
    """
    steps = checks.whole("testing.assert_private", "steps", steps)
    # One gradient, a million times as long as the gradients of the other examples.
    long_gradient = jax.tree.map(lambda x: 1e6 * x[0], _others(params, 1))
    if canary is None:
        canary = long_gradient
    # All runs begin with one state, because a chain may draw its key in `init`. The first run calls
    # it, and reports its errors.
    begin = functools.cache(lambda: chain.init(params))
    run = functools.partial(_measured_run, chain, begin, params, most_rows)
    # First law: an example moves the releases as far as the multiplier allows.
    without, updates = run(_batches(params, canary, [0] * steps))
    draws = [1 - step % 2 for step in range(steps)]  # 1 if a step draws the example, or else 0
    # The multiplier of correlated noise is for all steps of an example together. How often an
    # example may take part is not known here, but once is always allowed.
    is_correlated = without[0].strategy is not None
    if is_correlated:
        draws = [1] + [0] * (steps - 1)
    examples = {
        "one example": canary,
        "an example of NaN": jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), long_gradient),
        "an example of infinities": jax.tree.map(
            lambda x: jnp.full_like(x, jnp.inf), long_gradient
        ),
    }
    for name, example in examples.items():
        with_it, _ = run(_batches(params, example, draws))
        for step, (ratio, drawn) in enumerate(zip(_ratios(with_it, without), draws, strict=True)):
            # An example that is not finite is dropped, so it moves nothing. If an example may take
            # part again, one step moves the release less than the multiplier allows.
            least = drawn if example is canary and not is_correlated else 0
            if not least - tolerance <= ratio <= drawn + tolerance:
                raise LawBroken(
                    f"at step {step} {name} moves the release by {ratio:.4g} times what the "
                    f"multiplier says; expected {drawn}. A link before the clipping may see "
                    "several examples, or gradients of earlier batches."
                )
    # Second law: equal releases give equal updates. Here the noise is added to the sums of the run
    # without the example, whichever batch the chain receives. It receives two batches of four
    # gradients: gradient i is multiplied by factors[i], and the first ``size`` are drawn. So the
    # values differ, and so do the numbers of clipped and of drawn examples.
    for factors, size in (([1e6, 1.0, 0.0, 0.0], 4), ([1e-6, jnp.nan, 0.0, 0.0], 2)):
        scaled = functools.partial(jnp.einsum, "i,i...->i...", jnp.float32(factors))
        batch = Batch(jax.tree.map(scaled, _others(params, 4)), np.arange(4) < size)
        _, again = run([batch] * steps, instead=without)
        if trees.fingerprint(updates) != trees.fingerprint(again):
            raise LawBroken(
                "two batches with one release differ in updates: gradients or the drawn size pass "
                "beside the noise."
            )


class _LimitsOfAnyRule(Limits):
    """Limits that equal every rule's limits: the sum over no examples is a clipped sum of each."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Limits)

    def __hash__(self) -> int:
        return 0


def _ratios(with_it: Sequence[Measurement], without: Sequence[Measurement]) -> Iterator[float]:
    r"""At each step, how far an example moves the release, over how far the multiplier allows.

    This is $\mu m$, where $\mu^2$ is the sum over leaves of (distance / deviation)$^2$, and $m$ is
    the multiplier. With a multiplier for each group, it is $(\sum_g m_g^{-2})^{-1/2}$.
    """
    for step, (present, absent) in enumerate(zip(with_it, without, strict=True)):
        moved = []  # of each leaf, relative to the standard deviation of its noise
        leaves = zip(
            jax.tree.leaves(present.total),
            jax.tree.leaves(absent.total),
            present.deviations,
            strict=True,
        )
        for leaf, leaf_without, deviation in leaves:
            distance = np.linalg.norm(
                np.asarray(leaf, np.float64) - np.asarray(leaf_without, np.float64)
            )
            # This is infinite or NaN without noise, and the caller then raises.
            with np.errstate(divide="ignore", invalid="ignore"):
                moved.append(distance / deviation)
        multiplier = present.multiplier
        if callable(multiplier):
            multiplier = multiplier(jnp.int32(step))  # links pass this dtype to a schedule
        ratio = float(np.linalg.norm(moved)) * accounting.effective_multiplier(multiplier)
        if present.strategy is not None:
            # The noise of all steps is C^-1 z for the strategy's matrix C, where z has these
            # deviations. So C times the releases is C times the sums plus z, and a change of one
            # step's sum moves it by the norm of a column of C.
            ratio *= float(present.strategy.column_norms()[step])
        yield ratio


def _measured_run(
    chain: optax.GradientTransformation,
    begin: Callable[[], PyTree],
    params: PyTree,
    most_rows: int | None,
    batches: Sequence[Batch],
    instead: Sequence[Measurement] = (),
) -> tuple[list[Measurement], list[PyTree]]:
    """Runs a chain; returns the measurement of each step at the noise link, and its update.

    ``begin`` returns the first state of the chain; ``most_rows`` is as for `assert_private`. If
    measurements of an earlier run are given as ``instead``, the noise is added to their sums.
    """
    measurements = list[Measurement]()
    replacements = iter(instead)

    class RecordingState(GaussianState):
        """The state of a noise link that records each sum, and replaces it if there is another.

        The link calls `meeting` in each update, and adds its noise to the sum that this returns.
        ``below`` is a count that a link with an adapted bound adds noise to as well.
        """

        def meeting(self, clipped: Sum, below: Any, noise: LinkNoise) -> tuple[PyTree, Any]:
            deviation_of_group = noise.deviations(self.step)
            measurement = Measurement(
                total=clipped.value,
                # ``rule.groups`` has the group of each leaf.
                deviations=[deviation_of_group[group] for group in clipped.rule.groups],
                multiplier=noise.multiplier,
                strategy=noise.strategy,
                below=below,
            )
            measurements.append(measurement)
            before_noise = next(replacements, measurement)
            return before_noise.total, before_noise.below

    def recording(node: Any) -> Any:
        return RecordingState(*node) if isinstance(node, GaussianState) else node

    update_with = optax.with_extra_args_support(chain).update
    try:
        # The state of the chain, in which the state of each noise link records.
        state = jax.tree.map(recording, begin(), is_leaf=lambda x: isinstance(x, GaussianState))
        updates = list[PyTree]()
        for gradients, mask in batches:
            # The link of a mechanism over persons takes a mask of each person's rows.
            if most_rows is not None:
                mask = np.repeat(mask[:, None], most_rows, axis=1)
            update, state = update_with(gradients, state, params, mask=mask)
            updates.append(update)
    except (AttributeError, TypeError, ValueError) as error:
        raise LawBroken(f"the chain refuses to run: {error}") from error
    if len(measurements) != len(batches):
        raise LawBroken(f"the chain added noise {len(measurements)} times in {len(batches)} steps.")
    return measurements, updates


def _batches(params: PyTree, canary: PyTree, draws: Sequence[int]) -> list[Batch]:
    """For each step the gradients of three examples, and of the canary or padding in its place."""
    # Rows that are not zero show a link before the clipping that lets the canary change them.
    others = _others(params, 3)

    def batch(step: int, drawn: int) -> Batch:
        # 0 times NaN is NaN, and an example that is not drawn is a row of zeros.
        row = jax.tree.map(lambda c: jnp.where(drawn, jnp.asarray(c)[None], 0), canary)
        # The places move, because a link that remembers each place hides a canary behind zeros.
        # Steps that draw the canary have it at odd and at even places in turn, because a link that
        # joins pairs of rows keeps one of them.
        places = 1 + step + step // 2
        gradients = jax.tree.map(
            lambda *rows: jnp.roll(jnp.concatenate(rows), places, axis=0), row, others
        )
        mask = np.array([drawn, 1, 1, 1], bool)
        return Batch(gradients, np.roll(mask, places))

    return [batch(step, drawn) for step, drawn in enumerate(draws)]


def _others(params: PyTree, count: int) -> PyTree:
    """Gradients of ``count`` examples, of length about one per parameter."""
    rng = np.random.default_rng(count)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=(count, *jnp.shape(p))), jnp.float32), params
    )


def _vector(tree: PyTree) -> np.ndarray:
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves) if leaves else np.zeros(0)
