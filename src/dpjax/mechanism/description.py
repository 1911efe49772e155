# SPDX-License-Identifier: Apache-2.0
"""The mechanism: the private computation, described once.

The link that runs, the event that is accounted, the noise that meets a budget, the printed words
and the JSON description all derive from a `Mechanism`, so no number is given twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import dp_accounting as dp
import numpy as np
import optax
from absl import logging

from dpjax import accounting, checks, clipping, schedules
from dpjax._display import brief, short, table
from dpjax.mechanism import card, link
from dpjax.mechanism.correlated import (
    check_strategy,
    correlated_claim,
    is_amplified,
    sensitivity_of,
)
from dpjax.mechanism.multipliers import growth, left_for_gradients, scaled
from dpjax.mechanism.spent import (
    Risk,
    Spent,
    Target,
    checked_queries,
    checked_unit,
    steps_event,
)
from dpjax.noise.multiplier import checked_multiplier, standard_deviations
from dpjax.schedules import Planned
from dpjax.strategies import Strategy
from dpjax.types import Clipping, Key, Neighbours, NoiseMultiplier, Sampler

# A proof for one relation implies a proof for the later ones, by the conversion of `accounting`.
_STRENGTH = (Neighbours.ADD_OR_REMOVE, Neighbours.ZERO_OUT, Neighbours.REPLACE_ONE)


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    r"""A private computation: ``steps`` times sample, clip, sum, add noise, divide.

    Args:
      sampling: Which examples each step sees; a `dpjax.sampling` sampler.
      clipping: How much each may contribute; a `dpjax.clipping` rule.
      noise_multiplier: Noise standard deviation / sensitivity: a number, an Optax
        schedule of the step, or one number per group of the rule. It is the total that is
        accounted. A schedule is evaluated once, here, for all planned steps.
      steps: The number of planned steps; no step runs beyond them.
      neighbours: ``"replace-one"`` selects the stronger relation. The default is the relation
        for which the sampler's event is proved (add-or-remove for Poisson).
      preparation: Noise multipliers of Gaussian queries that were made on all the data
        before the first step, such as `dpjax.features.Normalization.multipliers`. They
        are paid for in full, and no sampling amplifies them.
      adaptive: A `dpjax.clipping.Quantile` that the bounds follow; they start at the rule's
        bounds. Gradients and its noised count together cost what ``noise_multiplier`` does.
      before: What earlier runs on the same data have spent, if this run starts from what they
        released; see `dpjax.training.earlier`.
      unit: Whose data are protected; by default the sampler's ``unit``. With
        `dpjax.sampling.persons` it is any word for one person with all rows, such as
        ``"patient"``; with another sampler, any word for one client of `dpjax.federated` with all
        of its examples, such as ``"client"`` or ``"user"``. `dpjax.dpsgd` refuses the latter.
      noise: A `dpjax.strategies` strategy for noise that is correlated over the steps.
        ``noise_multiplier`` is then no schedule. It is relative to what one example moves in all
        steps that the sampler lets it be in, or, where the sampler amplifies, to one participation.
      target: What `calibrate` chose the noise for: epsilon, delta and method, or the rates of an
        attack. Statements, cards and `dpjax.fit` take delta and method from it.

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
    unit: str = ""
    noise: Strategy | None = None
    # Not compared: two mechanisms of equal noise run and cost the same, however it was chosen.
    target: Target | Risk | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # Checked values replace those given, by `object.__setattr__`, because the class is frozen.
        hint = "Such as sampling.poisson(examples, batch_size)."
        checks.instance("Mechanism", "sampling", self.sampling, Sampler, hint)
        hint = "Such as clipping.flat(bound)."
        checks.instance("Mechanism", "clipping", self.clipping, Clipping, hint)
        hint = "For epochs: round(epochs * examples / batch_size)."
        steps = checks.whole("Mechanism", "steps", self.steps, hint, least=0)
        multiplier = checked_multiplier("Mechanism", self.noise_multiplier, self.clipping)
        if callable(multiplier):
            multiplier = Planned.of(multiplier, steps)  # the schedule, evaluated at each step
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "noise_multiplier", multiplier)
        # Queries are kept as multipliers and not as an event, because a card holds multipliers, and
        # dpjax.verify recomputes the event from them.
        object.__setattr__(self, "preparation", checked_queries("Mechanism", self.preparation))
        object.__setattr__(self, "before", tuple(self.before))
        # The proof of each sampler must be for the stated relation, or for one that implies it.
        for sampler in [self.sampling, *[spent.sampling for spent in self.before]]:
            if _STRENGTH.index(self.relation) < _STRENGTH.index(sampler.neighbours):
                raise ValueError(
                    f"Mechanism(neighbours={self.relation.value!r}): {sampler.name} batches are "
                    f"proved for {sampler.neighbours.value!r} neighbours only."
                )
        self._check_unit()
        if not np.all(self.multipliers >= 0):
            raise ValueError(
                "Mechanism(noise_multiplier=schedule): negative or NaN at step "
                f"{int(np.argmin(self.multipliers >= 0))}."
            )
        if self.noise is not None:
            check_strategy(self)
        if self.adaptive is not None:
            _check_adaptive(self.clipping, self.multipliers, self.count_multiplier)

    def _check_unit(self) -> None:
        """Sets the unit; raises if parts of the mechanism protect different units."""
        sampler = self.sampling
        unit = checked_unit("Mechanism", self.unit or sampler.unit)
        object.__setattr__(self, "unit", unit)
        if sampler.unit != "example" and unit == "example":
            raise ValueError(
                f"Mechanism(unit={unit!r}): {sampler.name} draws {sampler.unit}s. Draw with "
                "sampling.persons for people, and with another sampler for rows or clients."
            )
        if self.preparation and unit != "example":
            raise ValueError(
                f"Mechanism(unit={unit!r}, preparation=...): these queries bound what one example "
                f"moves, and one {unit} may have many."
            )
        if any(spent.unit != unit for spent in self.before):
            raise ValueError(
                f"Mechanism(unit={unit!r}, before=...): an earlier run protects another unit, "
                "and epsilons of different units do not add."
            )

    def __repr__(self) -> str:
        return short(self, "sampling", "clipping", "noise_multiplier", "steps", *self._options)

    def _repr_html_(self) -> str:
        sampling = self.sampling
        rule = self.clipping
        batch = f"{self.batch_size:g} of {sampling.examples:,} {self.unit}s"
        rows = {
            "unit": f"one {self.unit}; {self.relation.value} neighbours",
            "sampling": f"{sampling.name}: {batch}",
            "clipping": f"{rule.name}: sensitivity {rule.sensitivity:.4g}",
            "noise multiplier": brief(self.noise_multiplier),
            "steps": f"{self.steps:,}",
        }
        for name in self._options:
            if name not in ("unit", "neighbours"):  # of the first row
                rows[name] = brief(getattr(self, name))
        return table("Mechanism", rows.items())

    @property
    def _options(self) -> list[str]:
        """The names of the fields that do not have their default."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        defaults["unit"] = self.sampling.unit
        return [
            name
            for name, default in defaults.items()
            if default is not dataclasses.MISSING and getattr(self, name) != default
        ]

    @property
    def of_clients(self) -> bool:
        """Whether the unit is a client with all of its examples, as in `dpjax.federated`."""
        return self.unit != "example" and self.sampling.unit == "example"

    @property
    def relation(self) -> Neighbours:
        """The neighbouring relation for which the guarantee is stated."""
        return Neighbours(self.neighbours or self.sampling.neighbours)

    @property
    def claim(self) -> str:
        """In words, how the batches are drawn, and what is proved and counted for them."""
        if self.noise is None:
            return self.sampling.claim
        return correlated_claim(self.noise, self.sampling)

    @property
    def multipliers(self) -> np.ndarray:
        r"""The effective noise multiplier of each planned step, ``[steps]``.

        Multipliers $m_g$ of groups are worth $(\sum_g m_g^{-2})^{-1/2}$ together.
        """
        multiplier = self.noise_multiplier
        if isinstance(multiplier, Sequence):
            multiplier = accounting.effective_multiplier(multiplier)
        if isinstance(multiplier, Planned):
            return multiplier.values.astype(np.float64)
        # Accountants compute in float64; a NumPy float32 rounds the claim.
        return np.full(self.steps, multiplier, np.float64)

    @property
    def count_multiplier(self) -> float:
        """The noise multiplier of the count that the bound follows; infinite without one."""
        if self.adaptive is None:
            return np.inf
        if self.adaptive.count_multiplier is not None:
            return self.adaptive.count_multiplier
        # Noise of deviation batch / 20 costs almost nothing (Andrew et al., 2021). The total may be
        # larger for few examples; a count with four times the total leaves sums 3 % more noise.
        largest = float(np.max(self.multipliers, initial=0.0))
        return max(self.batch_size / 10, 4 * largest)

    @property
    def gradient_multiplier(self) -> NoiseMultiplier:
        """The noise multiplier of the sums; together with the count's it gives the total."""
        # It is derived and not a field, so no caller can overwrite the total that is accounted.
        if self.adaptive is None:
            return self.noise_multiplier
        return left_for_gradients(self.noise_multiplier, self.count_multiplier)

    def multipliers_on_sum(self, multipliers: np.ndarray) -> np.ndarray:
        """The multipliers of only the sums, at steps of these multipliers."""
        if self.adaptive is None:
            return multipliers
        return multipliers * growth(multipliers, self.count_multiplier)

    @property
    def is_amplified(self) -> bool:
        """Whether sampling amplifies each participation, also under correlated noise."""
        return self.noise is None or is_amplified(self.noise, self.sampling)

    @property
    def strategy_sensitivity(self) -> float:
        """The factor of the noise: how far one example moves what correlated noise hides."""
        return 1.0 if self.noise is None else sensitivity_of(self.noise, self.sampling)

    def deviations_on_sum(self, step: Any) -> list[Any]:
        """The standard deviation of the fresh noise of a step on the sum, in each group."""
        deviations = standard_deviations(self.gradient_multiplier, self.clipping, step)
        return [deviation * self.strategy_sensitivity for deviation in deviations]

    def deviations_on_mean(self, step: Any) -> list[Any]:
        """`deviations_on_sum`, on the mean; relative to the scale of adapted bounds."""
        return [deviation / self.batch_size for deviation in self.deviations_on_sum(step)]

    @property
    def batch_size(self) -> float:
        """The expected number of examples a step: what sums are divided by."""
        return self.sampling.batch_size

    @property
    def facts(self) -> dict[str, Any]:
        """The JSON description of the plan, with the fields of `dpjax.mechanism.card`; public."""
        return card.described(self)

    @property
    def identity(self) -> dict[str, Any]:
        """The content of ``run.json``; secret: a fingerprint confirms who is in which bin."""
        return {"mechanism": self.facts, "drawn by": self.sampling.fingerprint}

    @property
    def accounted(self) -> str:
        """A hash of all that the cost of a step depends on, except its multiplier."""
        return card.accounted(self)

    def spent(self, multipliers: np.ndarray) -> Spent:
        """The cost of this run without earlier ones, after steps with these multipliers, in order.

        A mechanism knows no key: of a run with a supplied key, ``dataclasses.replace`` makes it
        ``supplied``.
        """
        # Run-length encoded: a card of a million equal steps holds one pair.
        values, counts = schedules.runs_of(multipliers)
        return Spent(
            sampling=self.sampling,
            runs=tuple(zip(values.tolist(), counts.tolist(), strict=True)),
            preparation=self.preparation,
            unit=self.unit,
            projections=self.clipping.projections,
            noise=self.noise,
        )

    @property
    def prepared(self) -> dp.DpEvent:
        """The privacy event of earlier runs and of the queries before the first step."""
        # No sampling amplifies a query on all examples.
        queries = map(accounting.gaussian, self.preparation)
        return accounting.compose(*(spent.event for spent in self.before), *queries)

    @property
    def event(self) -> dp.DpEvent:
        """The privacy event of `prepared` and all planned steps, as proved for this sampler."""
        return self.event_of(self.multipliers)

    def event_of(self, multipliers: np.ndarray) -> dp.DpEvent:
        """The privacy event of `prepared` and of steps with these multipliers, in this order."""
        # No noise hides an unbounded example, at any multiplier of a ledger.
        if np.isinf(self.clipping.sensitivity) and len(multipliers):
            return dp.NonPrivateDpEvent()
        steps = steps_event(self.sampling, multipliers, self.clipping.projections, self.noise)
        return accounting.compose(self.prepared, steps)

    def stated(self, delta: float | None, method: str | None) -> tuple[float, str]:
        """The delta and the method of a statement: as given, or else as in `target`."""
        if delta is None and self.target is not None:
            delta = self.target.delta
        if delta is None:
            raise TypeError("Mechanism: delta is missing. Calibrate, or give delta=.")
        return delta, self._method(method)

    @property
    def risk(self) -> Risk | None:
        """The rates of an attack that the noise was chosen for, if it was not an epsilon."""
        if isinstance(self.target, Risk):
            return self.target
        return None

    def _warn_of_delta(self, delta: float) -> None:
        if delta >= 1 / self.sampling.examples:
            text = "delta %g is not below 1/%d: publishing one whole record would satisfy it."
            logging.warning(text, delta, self.sampling.examples)

    def _method(self, given: str | None) -> str:
        if given:
            return given
        if self.target is not None:
            return self.target.method
        return self._usual_method

    @functools.cached_property  # a ledger asks before each step
    def _usual_method(self) -> str:
        return accounting.default_method(self.event, self.relation)

    def epsilon(self, delta: float | None = None, method: str | None = None) -> float:
        """The epsilon of the whole computation at ``delta``.

        Args:
          delta: Choose it below 1 / examples. By default that of `target`.
          method: A `dpjax.accounting` method: "rdp", "pld", "rdp-classic" or "gdp". By default
            that of `target`, or `dpjax.accounting.default_method`.
        """
        delta, method = self.stated(delta, method)
        self._warn_of_delta(delta)
        return self.epsilon_of(self.multipliers, delta, method)

    def epsilon_of(self, multipliers: np.ndarray, delta: float, method: str = "rdp") -> float:
        """The epsilon of steps that ran with these multipliers, in this order."""
        event = self.event_of(multipliers)
        plan = self.event if method == "pld" else None
        return accounting.epsilon(event, delta, method, self.relation, plan=plan)

    def delta(self, epsilon: float, method: str | None = None) -> float:
        """The delta of the whole computation at ``epsilon``; methods as in `Mechanism.epsilon`."""
        return accounting.delta(self.event, epsilon, self._method(method), self.relation)

    def calibrate(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        method: str | None = None,
        *,
        true_positive_rate: float | None = None,
        false_positive_rate: float | None = None,
    ) -> Mechanism:
        """This mechanism with all its noise scaled to cost at most ``epsilon``.

        Args:
          epsilon: The most that all planned steps may cost.
          delta: Choose it below 1 / examples.
          true_positive_rate: In place of epsilon and delta: the most true positives that any
            membership attack may have, by `dpjax.accounting.calibrate_risk` and so by "pld".
          false_positive_rate: The attack's rate of false positives, such as 0.01.
          method: A proven `dpjax.accounting` method; by default `dpjax.accounting.tightest`.
            "pld" takes seconds and finds the least noise: for one epoch of MNIST in batches of
            256 at epsilon 3, a multiplier of 0.59 where "rdp" needs 0.65.

        Returns:
          A new mechanism whose cost is at most ``epsilon``, and within about 1e-4 of it (relative).
          ``target.method`` names the accountant.

        Example:
          >>> from dpjax import clipping, sampling
          >>> mechanism = Mechanism(
          ...     sampling=sampling.poisson(examples=60_000, batch_size=256),
          ...     clipping=clipping.flat(bound=1.0),
          ...     noise_multiplier=1.0,
          ...     steps=1000,
          ... )
          >>> calibrated = mechanism.calibrate(epsilon=3.0, delta=1e-5, method="rdp")
          >>> round(calibrated.noise_multiplier, 2), round(calibrated.epsilon(1e-5, "rdp"), 2)
          (0.7, 3.0)
        """
        by_epsilon = epsilon is not None or delta is not None or method is not None
        by_risk = true_positive_rate is not None or false_positive_rate is not None
        # The search is for a factor on all noise. No factor changes 0.
        if not np.all(self.multipliers > 0):
            raise ValueError(
                "Mechanism.calibrate: a noise multiplier is 0, and no factor makes that private."
            )
        # The search tries factors for which the check of adapted bounds raises. The event does not
        # depend on adapted bounds, because the multiplier is the total.
        unadapted = dataclasses.replace(self, adaptive=None)

        # One factor for the whole schedule keeps its shape, and epsilon is monotone in it.
        def make_event(factor: float) -> dp.DpEvent:
            return unadapted.scaled(factor).event

        target: Target | Risk
        if epsilon is not None and delta is not None and not by_risk:
            delta = checks.delta("Mechanism.calibrate", delta)
            self._warn_of_delta(delta)
            method = method or accounting.tightest(self.event, self.relation)
            factor = accounting.calibrate(make_event, epsilon, delta, method, self.relation)
            target = Target(float(epsilon), float(delta), method)
        elif true_positive_rate is not None and false_positive_rate is not None and not by_epsilon:
            target = Risk(float(true_positive_rate), float(false_positive_rate))
            factor = accounting.calibrate_risk(
                make_event, target.true_positive_rate, target.false_positive_rate, self.relation
            )
        else:
            raise TypeError(
                "Mechanism.calibrate: expected epsilon and delta, or true_positive_rate and "
                "false_positive_rate."
            )
        logging.info("Mechanism.calibrate: %s.", target)
        return dataclasses.replace(self.scaled(factor), target=target)

    def scaled(self, factor: float) -> Mechanism:
        """This mechanism with all its noise multiplied by ``factor``."""
        multiplier = scaled(self.noise_multiplier, factor)
        return dataclasses.replace(self, noise_multiplier=multiplier, target=None)

    def privatize(self, key: Key | None = None) -> optax.GradientTransformationExtraArgs:
        """The Optax link from a clipped sum to a private mean.

        Adds the noise of the step to the *sum*, then divides by the expected batch size, a
        public constant. The size of the drawn batch is never used. The key is as for `private`.

        Returns:
          A link on sums, as `dpjax.noise.gaussian`. Where the sampler draws persons, the sum is
          that of `dpjax.losses.of_person`. A step beyond the plan raises, or inside
          ``jit`` returns NaN. With ``adaptive``, sum and mean are relative to the ``scale`` of the
          state, and ``update`` needs ``below=``, from `dpjax.clipping.Quantile.below`.

        Example:
          >>> import dpjax, jax.numpy as jnp
          >>> mechanism = Mechanism(
          ...     sampling=dpjax.sampling.poisson(examples=100, batch_size=10),
          ...     clipping=dpjax.clipping.flat(bound=1.0),
          ...     noise_multiplier=1.1,
          ...     steps=5,
          ... )
          >>> clipped = dpjax.clipped_grad(
          ...     lambda w, x: 0.5 * jnp.sum((w - x) ** 2), mechanism.clipping
          ... )
          >>> params, batch = jnp.zeros(3), jnp.ones((12, 3))  # 12 were drawn
          >>> link = mechanism.privatize()
          >>> state = link.init(params)
          >>> mean, state = link.update(clipped(params, batch).sum, state)
          >>> mean.shape, int(state.step)
          ((3,), 1)
        """
        return link.privatize(self, key)

    def private(self, key: Key | None = None) -> optax.GradientTransformationExtraArgs:
        """The Optax link from per-example gradients to a private mean: the whole private part.

        It clips by the mechanism's rule, sums, adds the noise of the step and divides by the
        expected batch size.

        Args:
          key: As for `dpjax.noise.gaussian`.

        Returns:
          A link whose ``update(gradients, state, params=None, mask=mask)`` takes gradients with a
          leading axis of examples. The mask tells which of them were drawn: True where all were. It
          is required where the sampler pads its draws. Where the sampler draws persons, the
          gradients have a leading axis of persons, as of `dpjax.losses.of_person`, and the mask is
          as drawn, ``[persons, most_rows]``.

        Privacy:
          What comes out may be released: `epsilon` covers the planned steps, if ``sampling`` draws
          the rows.

        Example:
          >>> import dpjax, jax, jax.numpy as jnp
          >>> mechanism = dpjax.Mechanism(
          ...     sampling=dpjax.sampling.poisson(examples=100, batch_size=10),
          ...     clipping=dpjax.clipping.flat(bound=1.0),
          ...     noise_multiplier=1.0,
          ...     steps=10,
          ... )
          >>> optimizer, key = optax.chain(mechanism.private(), optax.sgd(0.1)), jax.random.key(0)
          >>> params, data = jnp.zeros(3), np.ones((100, 3), np.float32)
          >>> state = optimizer.init(params)
          >>> rows, mask = mechanism.sampling.batch(data, key, step=0)
          >>> gradients = jax.vmap(jax.grad(lambda w, x: w @ x), (None, 0))(params, rows)
          >>> updates, state = optimizer.update(gradients, state, params, mask=mask)
        """
        return link.private(self, key)


def _check_adaptive(rule: Clipping, multipliers: np.ndarray, count: float) -> None:
    """Refuses a bound that cannot move, and a count that costs more than the total."""
    bound = rule.sensitivity
    if not 0 < bound < np.inf:
        raise ValueError(
            f"Mechanism(adaptive=...): the bound is {bound}; expected a positive, finite bound."
        )
    if rule.projections is not None:
        raise ValueError("Mechanism(adaptive=...): norms are estimated; expected exact ones.")
    largest = float(np.max(multipliers, initial=0.0))
    if not (largest < count or largest == count == 0):
        raise ValueError(
            f"Mechanism(adaptive=...): the total multiplier is {largest:.4g} and that of the count "
            f"{count:.4g}. Give clipping.Quantile a count_multiplier above {largest:.4g}."
        )
