# SPDX-License-Identifier: Apache-2.0
"""The mechanism: the private computation, described once.

`Mechanism` holds the sampler, the rule, the noise multiplier and the number of steps.
From that one description comes the Optax link that is run (`privatize`), the event that
is accounted (`event`, `epsilon`), the scale that meets a budget (`calibrate`) and the
words that are printed (`dpjax.statement`).  There is no second place to type a number.

This file must never know a model, a loss or a data set.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import dp_accounting as dp
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from dpjax import accounting, clipping, noise, trees
from dpjax.mechanism import card
from dpjax.mechanism.adaptive import AdaptiveState, check_adaptive, followed
from dpjax.mechanism.multipliers import Planned, growth, left_for_gradients, planned, scaled
from dpjax.mechanism.spent import Spent, checked_queries, steps_event
from dpjax.noise.link import add_noise
from dpjax.types import Clipping, Key, Neighbours, NoiseMultiplier, PyTree, Sampler

# A proof for one of these holds, with the conversion that accounting makes, for those after it.
_STRENGTH = (Neighbours.ADD_OR_REMOVE, Neighbours.ZERO_OUT, Neighbours.REPLACE_ONE)
_UNITS = ("example", "client")
_PARTS = (
    ("sampling", Sampler, "a Sampler, such as sampling.poisson(examples, batch_size)"),
    ("clipping", Clipping, "a Clipping, such as clipping.flat(bound)"),
    ("adaptive", clipping.Quantile | None, "a Quantile, such as clipping.Quantile(), or None"),
)


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    r"""A private computation: ``steps`` times sample, clip, sum, add noise, divide.

    Args:
      sampling: Which examples each step sees; a `dpjax.sampling` sampler.
      clipping: How much each may contribute; a `dpjax.clipping` rule.
      noise_multiplier: Noise standard deviation / sensitivity: a number, an Optax
        schedule of the step, or one number per group of the rule.  Always the total: what
        is accounted.  A schedule is asked once, here, for all planned steps.
      steps: How many steps are planned; none runs beyond them.
      neighbours: ``"replace-one"`` asks for the stronger relation.  By default the one
        for which the sampler's event is proved (add-or-remove for Poisson).
      preparation: Noise multipliers of Gaussian queries that were made on all the data
        before the first step, such as `dpjax.features.Normalization.multipliers`.  They
        are paid for in full, however few steps run, and no sampling amplifies them.  They
        bound what one example moves, so they do not go with ``unit="client"``.
      adaptive: A `dpjax.clipping.Quantile` that the bounds follow, beginning at those of the
        rule.  Its count takes a share of the noise multiplier, so that gradients get more
        noise and the two together cost what ``noise_multiplier`` says.
      before: What earlier runs have spent on these data, if this one goes on from what they
        released; see `dpjax.training.earlier`.
      unit: Whose data are protected.  With ``"client"``, as `dpjax.federated` asks for,
        whatever is said of one example here holds for one client with all of its examples:
        sampling, bound, noise, neighbours and epsilon.

    Example:
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.poisson(examples=60_000, batch_size=256),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=1.1,
      ...     steps=14_063,
      ... )
      >>> round(mechanism.epsilon(delta=1e-5), 2)
      2.6
    """

    sampling: Sampler
    clipping: Clipping
    noise_multiplier: NoiseMultiplier
    steps: int
    neighbours: str | None = None
    preparation: Sequence[float] = ()
    adaptive: clipping.Quantile | None = None
    before: Sequence[Spent] = ()
    unit: str = "example"

    def __post_init__(self) -> None:
        """Refuses descriptions that mean nothing or claim too much."""
        for name, wanted, words in _PARTS:
            if not isinstance(given := getattr(self, name), wanted):
                raise TypeError(f"Mechanism({name}={reprlib.repr(given)}): expected {words}.")
        if self.neighbours not in (None, *Neighbours):
            raise ValueError(
                f"Mechanism(neighbours={self.neighbours!r}): expected one of "
                f"{', '.join(Neighbours)}, or None for what the sampler is proved for."
            )
        steps = trees.number(self.steps, "Mechanism(steps")
        if not steps >= 0 or steps % 1:
            raise ValueError(
                f"Mechanism(steps={steps}): expected a whole number of steps. For epochs: "
                "round(epochs * examples / batch_size)."
            )
        object.__setattr__(self, "steps", int(steps))
        multiplier = planned(noise.plain_multiplier(self.noise_multiplier), self.steps)
        object.__setattr__(self, "noise_multiplier", multiplier)
        queries = checked_queries(self.preparation, "Mechanism")
        object.__setattr__(self, "preparation", tuple(map(float, queries)))
        object.__setattr__(self, "before", _checked_before(self.before))
        for sampler in (self.sampling, *(spent.sampling for spent in self.before)):
            if _STRENGTH.index(self.relation) < _STRENGTH.index(sampler.neighbours):
                raise ValueError(
                    f"Mechanism(neighbours={self.relation.value!r}): {sampler.name} batches are "
                    f"proved for {sampler.neighbours.value!r} neighbours only. Leave neighbours "
                    "out or ask for that relation, or sample with sampling.poisson."
                )
        _check_unit(self.unit, self.preparation, [spent.unit for spent in self.before])
        noise.check_multiplier(self.noise_multiplier, self.clipping)
        if not np.all(self.multipliers >= 0):
            raise ValueError(
                "Mechanism(noise_multiplier=schedule): the schedule is negative or NaN at "
                f"step {int(np.argmin(self.multipliers >= 0))} of {self.steps}; it must be "
                "at least 0 at every planned step."
            )
        if self.adaptive is not None:
            check_adaptive(self.clipping, self.multipliers, self.count_multiplier)

    @property
    def relation(self) -> Neighbours:
        """The neighbouring relation for which the guarantee is stated."""
        return Neighbours(self.neighbours or self.sampling.neighbours)

    @property
    def multipliers(self) -> np.ndarray:
        """The (effective) noise multiplier of each planned step, ``[steps]``.

        One multiplier per group is worth ``(sum m_g^-2)^-1/2``, before any sampling.
        """
        multiplier = self.noise_multiplier
        if isinstance(multiplier, Sequence):
            multiplier = accounting.effective_multiplier(multiplier)
        if isinstance(multiplier, Planned):
            return multiplier.values.astype(np.float64)
        return np.full(self.steps, multiplier, np.float64)

    @property
    def count_multiplier(self) -> float:
        """The noise multiplier of the count that the bound follows; infinite without one."""
        if self.adaptive is None:
            return np.inf
        given = self.adaptive.count_multiplier
        return self.batch_size / 10 if given is None else given

    def gradient_multipliers(self, totals: np.ndarray) -> np.ndarray:
        """What is left for the sums of steps with these (effective) multipliers."""
        return totals * growth(totals, self.count_multiplier)

    @property
    def gradient_multiplier(self) -> NoiseMultiplier:
        """The noise multiplier of the sums alone: with what the count takes, the total."""
        if self.adaptive is None:
            return self.noise_multiplier
        return left_for_gradients(self.noise_multiplier, self.count_multiplier)

    def deviations(self, step: Any) -> list[Any]:
        """The noise's standard deviation on the mean, in each group, at a step.

        Where bounds are adapted, relative to their scale.
        """
        each = noise.standard_deviations(self.gradient_multiplier, self.clipping, step)
        return [deviation / self.batch_size for deviation in each]

    @property
    def batch_size(self) -> float:
        """The expected number of examples a step: what sums are divided by."""
        return self.sampling.batch_size

    @property
    def facts(self) -> dict[str, Any]:
        """The JSON description of the plan, as cards and run folders hold it.

        See `dpjax.mechanism.card` for its fields. It may be published.
        """
        return card.described(self)

    @property
    def identity(self) -> dict[str, Any]:
        """What ``run.json`` holds of the mechanism: runs with different ones share no folder.

        Privacy:
          Not for publication. A sampler's fingerprint confirms a guess of who is in which bin.
        """
        return {"mechanism": self.facts, "drawn by": self.sampling.fingerprint}

    @property
    def accounted(self) -> str:
        """A hash of what a step costs by, except multipliers: which examples are drawn, and how."""
        return card.accounted(self)

    def spent(self, multipliers: np.ndarray) -> Spent:
        """What this run alone has spent after steps with these multipliers, in this order."""
        starts = np.flatnonzero(np.diff(multipliers, prepend=np.nan))
        counts = np.diff(starts, append=len(multipliers))
        runs = [(float(multipliers[i]), int(n)) for i, n in zip(starts, counts, strict=True)]
        return Spent(
            sampling=self.sampling,
            runs=tuple(runs),
            preparation=tuple(self.preparation),
            unit=self.unit,
            projections=self.clipping.projections,
        )

    @property
    def prepared(self) -> dp.DpEvent:
        """The privacy event of all that came before the first step."""
        queries = map(accounting.gaussian, self.preparation)
        return accounting.compose(*(spent.event for spent in self.before), *queries)

    @property
    def event(self) -> dp.DpEvent:
        """The privacy event of preparation and all planned steps, as proved for this sampler."""
        return self.event_of(self.multipliers)

    def event_of(self, multipliers: np.ndarray) -> dp.DpEvent:
        """The privacy event of preparation and of steps with these multipliers, in this order."""
        if np.isinf(self.clipping.sensitivity) and len(multipliers):
            return dp.NonPrivateDpEvent()
        steps = steps_event(self.sampling, multipliers, self.clipping.projections)
        return accounting.compose(self.prepared, steps)

    def epsilon(self, delta: float, method: str = "rdp") -> float:
        """The epsilon of the whole computation at ``delta``.

        Args:
          delta: The probability of more; smaller than 1 / examples.
          method: A `dpjax.accounting` method: "rdp", "pld", "rdp-classic" or "gdp".
        """
        return self.epsilon_of(self.multipliers, delta, method)

    def epsilon_of(self, multipliers: np.ndarray, delta: float, method: str = "rdp") -> float:
        """The epsilon of steps that ran with these multipliers, in this order."""
        return accounting.epsilon(self.event_of(multipliers), delta, method, self.relation)

    def delta(self, epsilon: float, method: str = "rdp") -> float:
        """The delta of the whole computation at ``epsilon``."""
        return accounting.delta(self.event, epsilon, method, self.relation)

    def calibrate(self, epsilon: float, delta: float, method: str = "rdp") -> Mechanism:
        """This mechanism with its noise scaled so that it costs at most ``epsilon``.

        A number is scaled, and so is a whole schedule or every group's multiplier: its
        shape stays and one factor is found.

        Args:
          epsilon: The most that all planned steps may cost.
          delta: Below one over the number of examples.
          method: "pld" takes seconds, and finds the least noise: for one epoch of MNIST in
            batches of 256 at epsilon 3 a multiplier of 0.59, where "rdp" wants 0.65.

        Returns:
          A new mechanism; its epsilon is at most the target and within about 1e-4 of it.
        """
        if not np.all(self.multipliers > 0):
            raise ValueError(
                "Mechanism.calibrate: the noise multiplier is 0 at some step, and no "
                "factor makes that private. Start from any positive multiplier or schedule."
            )
        if delta >= 1 / self.sampling.examples:
            logging.warning(
                "Mechanism.calibrate(delta=%g): not below 1/%d. A mechanism that publishes one "
                "whole record would satisfy it; choose delta well below one over the number of "
                "examples.",
                delta,
                self.sampling.examples,
            )

        # On the way, factors may be tried that leave nothing for the count.
        bare = dataclasses.replace(self, adaptive=None)

        def event(factor: float) -> dp.DpEvent:
            return bare.scaled(factor).event

        factor = accounting.calibrate(event, epsilon, delta, method, self.relation)
        return self.scaled(factor)

    def scaled(self, factor: float) -> Mechanism:
        """This mechanism with all its noise multiplied by ``factor``."""
        return dataclasses.replace(self, noise_multiplier=scaled(self.noise_multiplier, factor))

    def privatize(self, key: Key) -> optax.GradientTransformationExtraArgs:
        """The Optax link from a clipped sum to a private mean.

        Adds the noise of the step to the *sum*, then divides by the expected batch size,
        a public constant; the size of the batch that was drawn is never used.

        Args:
          key: The root key of the run, consumed by it; see `dpjax.noise.secret_key`.

        Returns:
          A link whose state counts the steps.  Past the planned steps it raises, or,
          inside ``jit`` where nothing can be raised, returns NaN: a step that was not
          accounted releases nothing.  Where bounds are adapted, its state is an
          `AdaptiveState`, sum and mean are relative to the scale, and ``update`` wants
          ``below=``, from `dpjax.clipping.Quantile.below`.
        """
        noise.check_multiplier(self.gradient_multiplier, self.clipping)
        trees.check_key(key, "Mechanism.privatize")

        def init(params: PyTree) -> Any:
            del params
            step = jnp.zeros((), jnp.int32)
            if self.adaptive is None:
                return noise.GaussianState(key, step)
            return AdaptiveState(key, step, jnp.ones((), jnp.float32))

        def update(
            updates: PyTree,
            state: Any,
            params: PyTree | None = None,
            *,
            below: Float[Array, ""] | None = None,
            **extra: Any,
        ) -> tuple[PyTree, Any]:
            del params, extra
            scale = getattr(state, "scale", None)
            mean, scale = self.private_mean(
                updates, state.key, state.step, bound_scale=scale, below=below
            )
            if self.adaptive is None:
                return mean, noise.GaussianState(state.key, state.step + 1)
            return mean, AdaptiveState(state.key, state.step + 1, scale)

        return optax.GradientTransformationExtraArgs(init, update)

    def private_mean(
        self,
        total: PyTree,
        key: Key,
        step: Int[Array, ""],
        *,
        bound_scale: Any = None,
        below: Float[Array, ""] | None = None,
    ) -> tuple[PyTree, Any]:
        """The private mean of one step, from its clipped sum: a pure function of its arguments.

        Args:
          total: The clipped sum.
          key: The root key of the run.
          step: The number of the step, from 0.
          bound_scale: The scale of an adapted bound at this step.
          below: The count that an adapted bound follows.

        Returns:
          The mean, and the scale of the next step. `privatize` says what happens past the
          planned steps.
        """
        beyond = step >= self.steps
        if not isinstance(beyond, Tracer) and beyond:
            raise ValueError(
                f"Mechanism.privatize: step {int(step) + 1} of {self.steps} planned steps; the "
                "accounting does not cover this step. Plan more steps in the Mechanism."
            )
        deviations = noise.standard_deviations(self.gradient_multiplier, self.clipping, step)
        noisy = add_noise(total, self.clipping.partition, deviations, key, step)
        share = jnp.where(step < self.steps, 1 / self.batch_size, jnp.nan)
        mean = jax.tree.map(lambda x: x * share.astype(x.dtype), noisy)
        if self.adaptive is None:
            return mean, bound_scale
        count = self.count_multiplier
        return mean, followed(self.adaptive, count, below, share, bound_scale, key, step)


def _checked_before(before: Any) -> tuple[Spent, ...]:
    each: tuple[Any, ...] = tuple(before) if isinstance(before, Iterable) else (None,)
    if not all(isinstance(spent, Spent) for spent in each):
        raise TypeError(
            f"Mechanism(before={reprlib.repr(before)}): expected a list of mechanism.Spent. "
            "Usually: before=training.earlier(folder), of the run that this one goes on from. Of "
            "a Mechanism m that ran to its end: before=[*m.before, m.spent(m.multipliers)]."
        )
    return each


def _check_unit(unit: str, preparation: Sequence[float], before: Sequence[str]) -> None:
    if unit not in _UNITS:
        raise ValueError(
            f"Mechanism(unit={unit!r}): expected one of {', '.join(_UNITS)}: whose data one row "
            "of what is sampled holds."
        )
    if preparation and unit != "example":
        raise ValueError(
            f"Mechanism(unit={unit!r}, preparation={preparation}): these queries bound what one "
            f"example moves, and one {unit} may have many. Leave them out, or ask queries that "
            f"bound each {unit}'s, and count them: before=[Spent(unit={unit!r}, ...)]."
        )
    if set(before) - {unit}:
        raise ValueError(
            f"Mechanism(unit={unit!r}, before=...): what was spent before protects one "
            f"{', one '.join(sorted(set(before)))}, and epsilons of different units do not add. "
            "Account for both runs in one unit."
        )
