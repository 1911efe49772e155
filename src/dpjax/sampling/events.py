# SPDX-License-Identifier: Apache-2.0
"""A sampler describes its batches once, and its privacy event follows from this description.

The description is plain JSON, `Sampler.facts`. Accounting reads it, privacy cards hold it, and
`dpjax.verify` recomputes epsilon from it. So a new sampler describes itself here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax import checks, strategies, trees
from dpjax.sampling.sparse import LARGEST
from dpjax.types import Bins, Draw, Event, Key, Neighbours, Place, Purpose, Sampler

if TYPE_CHECKING:
    from dp_accounting import DpEvent


def stated(
    examples: int,
    batch_size: float,
    *,
    event: str = "poisson",
    rates: Sequence[Sequence[Any]] = ((1.0, 1),),
    cycle: int = 1,
    place: str | None = None,
) -> dict[str, Any]:
    """The fields of a `dpjax.types.Sampler` that follow from how it draws, for one of your own.

    They are ``examples``, ``batch_size``, ``event``, ``facts``, ``participation``, ``bins`` and
    ``random_bins``. `dpjax.testing.assert_sampling` compares draws with them. A sampler with
    ``bins`` draws by ``draw(key, step, epoch_key=None)``; see `dpjax.types.Sampler`.

    Args:
      examples: As for `Sampler`.
      batch_size: As for `Sampler`.
      event: ``"poisson"``: each example joins by a coin of its own; ``"subset"``: uniform batches
        of exactly ``batch_size``; ``"allocation"``: each example joins one step of a cycle,
        drawn afresh in each; ``"none"``: the choice of batches is a release without noise.
      rates: Pairs: a sampling rate, and how many cycles in turn have it; a cycle is one step by
        default. The last one stays.
      cycle: In how many steps in turn an example is in one batch at most, at an unknown place. The
        event of a cycle is one step with the cycle's least multiplier.
      place: Where that step is in each cycle, for correlated noise: ``"any"``, or the ``"same"`` in
        all of them; ``"random"``: the same, drawn uniformly for each example; ``"coin"``: the same,
        and a coin decides each time. None: no sensitivity of correlated noise is proved.

    Privacy:
      The caller proves that draws are as stated: `dpjax.verify` recomputes epsilon from ``facts``.

    Example:
      >>> from dpjax import sampling
      >>> uniform = sampling.fixed(examples=100, batch_size=10)
      >>> sampler = Sampler(
      ...     name="mine",
      ...     capacity=10,
      ...     draw=uniform.draw,
      ...     neighbours=uniform.neighbours,
      ...     claim="uniform batches of a fixed size",
      ...     **sampling.stated(examples=100, batch_size=10, event="subset"),
      ... )
      >>> sampler.facts["event"], sampler.facts["cycle"]
      ('subset', 1)
    """
    checks.one_of("sampling.stated", "event", event, tuple(Event))
    checks.one_of("sampling.stated", "place", place, (None, *Place))
    kind = Event(event)
    facts = {
        "event": kind.value,
        "rates": [list(row) for row in rates],
        "cycle": cycle,
        "place": place,
    }

    def event_of(multipliers: np.ndarray) -> DpEvent:
        # Imported here: draws of batches do not need this package, which loads most of SciPy.
        from dpjax.accounting.events import sampled_gaussian

        return sampled_gaussian(
            kind,
            multipliers,
            examples=examples,
            batch_size=batch_size,
            rates=rates,
            cycle=cycle,
        )

    def participation(steps: int) -> strategies.Participation:
        if place == Place.ANY:
            # The last step of a cycle can share an example with the first one of the next cycle, so
            # two steps of an example may be 1 apart.
            number_of_cycles = -(-steps // cycle)
            return strategies.apart(1, number_of_cycles)
        # The other places are the same in all cycles, so an example returns after whole cycles.
        return strategies.cycles(cycle)

    def key_of_cycle(key: Key, step: Any) -> Key:
        return trees.step_key(key, Purpose.SAMPLING, step // cycle)

    def key_of_run(key: Key, step: Any) -> Key:
        return trees.step_key(key, Purpose.PARTS, 0)

    # The bin of an example is its step of a cycle. One key decides all bins, for ``steps`` steps.
    bins = None
    if kind is Event.ALLOCATION:
        bins = Bins(steps=cycle, key=key_of_cycle)
    elif place == Place.RANDOM:
        bins = Bins(steps=LARGEST, key=key_of_run)  # more steps than a run can have

    return {
        "examples": examples,
        "batch_size": batch_size,
        "event": event_of,
        "facts": facts,
        "participation": None if place is None else participation,
        "bins": bins,
        "random_bins": place == Place.RANDOM,
    }


def from_facts(facts: Mapping[str, Any]) -> Sampler:
    """The sampler under ``"sampling"`` of a privacy card: it costs what it did, and cannot draw."""
    named = dict(facts)
    name = named.pop("name")
    neighbours = named.pop("neighbours")
    if "event" not in named:
        raise ValueError(
            f"sampling.from_facts: the sampler {name!r} states no event. Give what the run spent "
            "as mechanism.Spent."
        )
    return Sampler(
        name=name,
        capacity=named["examples"],
        draw=_not_on_a_card,
        neighbours=Neighbours(neighbours),
        claim=f"{name} batches, as a card describes them",
        **stated(**named),
    )


def _not_on_a_card(key: Key, step: Any) -> Draw:
    raise ValueError("sampling.from_facts: a sampler of a privacy card cannot draw.")
