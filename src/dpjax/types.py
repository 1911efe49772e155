# SPDX-License-Identifier: Apache-2.0
"""The shapes that flow between the packages of dpjax, and the glossary.

Glossary. *bound*: largest L2 norm that one example may contribute, per group. *sensitivity*: how
far the sum moves when one example joins or leaves. *noise_multiplier*: standard deviation of the
noise on the sum / sensitivity. *batch_size*: the **expected** size of a batch. *mask*: 1 for a
real example, 0 for padding. *norms*, *factors*: arrays ``[batch, groups]``.
"""

from __future__ import annotations

import enum
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from dpjax import checks
from dpjax._display import short, table, veiled

if TYPE_CHECKING:
    from dp_accounting import DpEvent

__all__ = [
    "Algorithm",
    "ClippedSum",
    "Clipping",
    "Draw",
    "Event",
    "HeldOut",
    "Key",
    "Limits",
    "LossFn",
    "Neighbours",
    "NoiseMultiplier",
    "Partition",
    "Place",
    "Plan",
    "Purpose",
    "PyTree",
    "Sampler",
    "Schedule",
    "State",
    "Sum",
]

PyTree: TypeAlias = Any
Key: TypeAlias = Any
LossFn: TypeAlias = Callable[..., Any]
Schedule: TypeAlias = Callable[[Any], Any]
NoiseMultiplier: TypeAlias = float | Schedule | Sequence[float]


# Norm floor: a billion entries below 1e-19, which square to 0, add far less to a norm.
_LEAST = 1e-12
_NOISE_NEXT = "the noise comes next, before any other link"
_SHOWN = 8  # groups of a rule that a notebook shows


class Neighbours(enum.StrEnum):
    """Which two data sets a guarantee compares."""

    ADD_OR_REMOVE = "add-or-remove"
    """One example more or less."""
    ZERO_OUT = "zero-out"
    """One example replaced by an empty one that contributes nothing; their number is public."""
    REPLACE_ONE = "replace-one"
    """One example replaced by any other; the sum moves twice as far."""


class Event(enum.StrEnum):
    """How the batches of a sampler are chosen; cards hold the word."""

    POISSON = "poisson"
    """Each example joins by a coin of its own."""
    SUBSET = "subset"
    """Uniform batches of exactly the batch size."""
    ALLOCATION = "allocation"
    """Each example joins one step of a cycle, drawn afresh in each cycle."""
    NONE = "none"
    """The choice of batches is a release without noise."""


class Place(enum.StrEnum):
    """The step of a cycle in which an example takes part; cards hold the word."""

    ANY = "any"
    """Any step, in each cycle another one."""
    SAME = "same"
    """The same step in all cycles."""
    RANDOM = "random"
    """The same step in all cycles, drawn uniformly for each example."""
    COIN = "coin"
    """The same step in all cycles, and in each cycle a coin decides whether it takes part."""


class HeldOut(NamedTuple):
    """The units that a run holds out for its test, which statement and board name."""

    units: int = 0
    """How many units of the private data were held out; no epsilon covers them."""
    public: bool = False
    """Whether the test data are a file of their own that the user declares public."""


@enum.unique
class Purpose(enum.IntEnum):
    """The purpose of a random stream: the first number that dpjax folds into a caller's key.

    ``jax.random.split(key, n)[i]`` is ``fold_in(key, i)``, and keys of NNX and Equinox count from 0
    too. A purpose is above every int32, so none of these keys is of a stream of dpjax.
    """

    # The first 32 bits of SHA-256 of "dpjax NAME", with the highest bit set. A changed value
    # changes every run of a key.
    NOISE = 0xB537112C
    SAMPLING = 0xA4CF1BA7
    PREPARATION = 0xD6A094E8
    COUNT = 0xB385706C
    PROJECTIONS = 0xA015CAC2
    LOCAL = 0xEB22F6C7
    PARTS = 0xF81BB5AA
    VIEWS = 0xCD5CB16F
    RUNS = 0xC41C13F7
    MEASURES = 0x9DAFB693
    ROWS = 0x9D1BB855


@dataclass(frozen=True)
class Partition:
    """Which group each leaf of a parameter tree belongs to.

    Args:
      names: One word per group.
      assign: Maps a tree of shapes to the group number of each of its leaves, in the order of
        ``jax.tree.leaves``. The tree is that of the parameters, with a `jax.ShapeDtypeStruct` of
        float32 in place of each leaf: neither batch axis, values nor dtypes decide. Every leaf
        needs a group, and every group a leaf.
    """

    names: tuple[str, ...]
    assign: Callable[[PyTree], tuple[int, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))  # the ledger hashes mechanisms
        object.__setattr__(self, "assign", _Assigned(self.assign, self.names))

    def __repr__(self) -> str:
        return short(self, "names")

    @property
    def size(self) -> int:
        """The number of groups."""
        return len(self.names)


@dataclass(frozen=True)
class _Assigned:
    """A partition's assignment, held to its groups: each leaf is in one of them."""

    assign: Callable[[PyTree], Sequence[int]]
    names: tuple[str, ...]

    def __call__(self, tree: PyTree) -> tuple[int, ...]:
        # All leaves have one dtype here. A partition by dtype clips a bfloat16 gradient by one
        # group, and gives its float32 sum the noise of another.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32), tree)
        groups = tuple(self.assign(shapes))
        leaves = len(jax.tree.leaves(tree))
        # No norm includes a leaf without a group; a group without leaves adds useless noise.
        if len(groups) != leaves or set(groups) != set(range(len(self.names))):
            raise ValueError(
                f"Partition.assign: {reprlib.repr(groups)} for {leaves} leaves; every leaf needs a "
                "group, and every group a leaf."
            )
        return tuple(map(int, groups))


@dataclass(frozen=True)
class Clipping:
    r"""A clipping rule: the most that one example may contribute, and how it is scaled.

    A rule *wishes* for a factor for each group of an example's gradient. The `Clipping` holds every
    wish to the bound, so no rule, yours included, can break the guarantee:

    $$ f_{ig} = \min(w_{ig},\ C_g / \lVert g_{ig} \rVert), \qquad w_{ig} \ge 0. $$

    Args:
      partition: Which group each leaf is in.
      bounds: The largest norm that one example may contribute, per group.
      factors: The wish: norms ``[batch, groups]`` -> factors ``[batch, groups]``. It is
        evaluated for one example at a time, in a batch of 1.
      name: How reports call the rule.
      projections: The number of random projections from which norms are estimated, or None if
        norms are exact; see `dpjax.clipping.jl`.
      facts: What else tells it from others of its name, as JSON has it.

    Sensitivity:
      Adding or removing one example moves the sum of scaled gradients by at most
      ``sqrt(sum(bound ** 2 for bound in bounds))``, because groups are orthogonal.  Where
      norms are estimated this is the unit of the noise and no limit: an example moves the
      sum by more, with a chance that accounting knows.

    | one example's norms | its factors |
    |---|---|
    | below 1e-12 in a group | whatever the rule wishes, at most bound / 1e-12 |
    | NaN or infinite in any group (float32 overflow included) | 0 in every group |
    | any, and the wish is NaN | 0 in that group |
    | finite, bound infinite | the wish, unlimited |
    | finite, bound 0 | 0 |
    """

    partition: Partition
    bounds: tuple[float, ...]
    factors: Callable[[Float[Array, "batch groups"]], Float[Array, "batch groups"]]
    name: str = "custom"
    projections: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        call = "types.Clipping" if self.name == "custom" else f"clipping.{self.name}"
        # A NumPy or JAX scalar becomes Python's number, which a privacy card can hold as JSON.
        hint = "It is the most that one example can move the sum."
        bounds = tuple(checks.not_negative(call, "bound", bound, hint) for bound in self.bounds)
        object.__setattr__(self, "bounds", bounds)
        if len(bounds) != self.partition.size:
            raise ValueError(
                f"{call}: {len(bounds)} bounds for {self.partition.size} groups "
                f"({', '.join(self.partition.names)}); expected one per group."
            )
        if self.projections is not None and self.partition.size != 1:
            raise ValueError(f"{call}: norms are estimated for one group alone.")
        # `_Held` limits the wish to the bounds. `dataclasses.replace` passes the `_Held` of the old
        # bounds, so it is unwrapped first.
        wish = self.factors.wish if isinstance(self.factors, _Held) else self.factors
        object.__setattr__(self, "factors", _Held(bounds, wish))

    def __repr__(self) -> str:
        return short(self, "name", "bounds")

    @property
    def sensitivity(self) -> float:
        """How far the clipped sum moves when one example joins or leaves."""
        # Groups are orthogonal, so an example that reaches every bound moves the sum by this.
        return math.hypot(*self.bounds)

    def limits(self, tree: PyTree) -> Limits:
        """The limits of this rule on one example's part of a tree of parameters or sums."""
        return Limits(self.bounds, self.projections, self.partition.assign(tree))

    def _repr_html_(self) -> str:
        named = zip(self.partition.names, self.bounds, strict=True)
        bounds = [(f"bound of {name}", f"{bound:.4g}") for name, bound in named]
        rows = [("sensitivity", f"{self.sensitivity:.4g}"), *bounds[:_SHOWN]]
        if len(bounds) > _SHOWN:
            rows.append(("", f"and {len(bounds) - _SHOWN} more groups"))
        return table(f"Clipping: {self.name}", rows)


@dataclass(frozen=True)
class _Held:
    """A rule's wish, held to the bounds: factor * norm <= bound, and 0 for bad examples."""

    bounds: tuple[float, ...]
    wish: Callable[[Array], Array]

    def __call__(self, norms: Float[Array, "batch groups"]) -> Float[Array, "batch groups"]:
        # The guarantee: factor times norm is at most the bound. The last line clips wishes to it.
        limit = jnp.asarray(self.bounds, norms.dtype)[None] / jnp.maximum(norms, _LEAST)
        # One non-finite group drops the whole example: its other groups are rarely right.
        finite = jnp.all(jnp.isfinite(norms), axis=-1, keepdims=True)
        # The wish sees one example: a mean over the batch moves all others when one leaves.
        wished = jax.vmap(self._alone)(norms)
        return jnp.where(finite & ~jnp.isnan(wished), jnp.clip(wished, 0, limit), 0)

    def _alone(self, norms: Float[Array, " groups"]) -> Float[Array, " groups"]:
        return jnp.broadcast_to(self.wish(norms[None]), (1, *norms.shape))[0]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Limits:
    """The facts of a rule that decide the noise of its sum; they compare, and functions do not."""

    bounds: tuple[float, ...]
    projections: int | None
    """Estimated norms cost more, whatever the bounds are."""
    groups: tuple[int, ...]
    """The group of each leaf."""

    def in_words(self, other: Limits) -> str:
        """The bounds, and what else differs from other limits."""
        words = " and ".join(repr(bound).removesuffix(".0") for bound in self.bounds)
        if self.projections != other.projections:
            words += f" with projections={self.projections}"
        if self.groups != other.groups:
            words += f" in groups {reprlib.repr(self.groups)}"
        return words


class Sum:
    """A clipped sum on its way to the noise: a noise link takes it, and nothing else can.

    It is not a pytree and refuses arithmetic, so a link between clipping and noise (a scale,
    momentum, a mask) fails instead of changing how far one example can move it.
    """

    __slots__ = ("rule", "value")

    def __init__(self, value: PyTree, rule: Limits) -> None:
        self.value = value
        self.rule = rule

    def __repr__(self) -> str:
        return f"<a clipped sum: {_NOISE_NEXT}>"

    # `optax.inject_hyperparams` reads the dtype of leaves, for example.
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a clipped sum has no {name}: {_NOISE_NEXT}")

    def _refused(self, *operands: Any) -> Any:
        raise TypeError(f"a clipped sum has no arithmetic: {_NOISE_NEXT}")

    # Python looks these up on the class, so `__getattr__` does not see them.
    __add__ = __radd__ = __sub__ = __rsub__ = _refused
    __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refused
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refused
    __pow__ = __rpow__ = __mod__ = __rmod__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = _refused
    __neg__ = __pos__ = __abs__ = __getitem__ = _refused


class ClippedSum(NamedTuple):
    """The clipped sum of a batch's gradients, **before** any noise.

    Privacy: none of these fields is private yet.  Only what `dpjax.noise` returns may be released.
    """

    value: PyTree
    """Sum over the batch of scaled gradients, in float32 or wider."""
    losses: Float[Array, " batch"]
    """Loss of each example; 0 for padding."""
    norms: Float[Array, "batch groups"]
    """Gradient norm of each example and group before clipping; 0 for padding."""
    factors: Float[Array, "batch groups"]
    """The factor of each group of each example; 0 for padding."""
    aux: PyTree = None
    """The further outputs of the loss, stacked over the batch."""
    rule: Limits | None = None
    """The limits of the value; static under `jax.jit`."""

    @property
    def sum(self) -> Sum:
        """The value as noise links take it."""
        if self.rule is None:
            raise ValueError("ClippedSum.sum: no rule clipped this value.")
        return Sum(self.value, self.rule)

    @property
    def total(self) -> ClippedSum:
        """Only the value and its rule, for the carry of a loop over microbatches."""
        return self._replace(losses=None, norms=None, factors=None, aux=None)


class Draw(NamedTuple):
    """The examples of one step, and padding behind them: other examples, or drawn ones once more.

    An index without its mask is worth nothing.
    """

    # Pairs of words, high and low, for data sets of more than 2^31 - 1 examples: JAX has no int64
    # by default.
    indices: Int[Array, " capacity"] | UInt[Array, "capacity 2"] | Int[Array, "capacity rows"]
    mask: Bool[Array, " capacity"] | Bool[Array, "capacity rows"]
    """True for the drawn examples, which come first; of people, for their drawn rows."""

    @property
    def units(self) -> Bool[Array, " capacity"]:
        """True for the drawn examples, or people: each of these has a row."""
        return self.mask if self.mask.ndim == 1 else self.mask[:, 0]

    @property
    def size(self) -> Int[Array, ""]:
        """How many examples, or people, were drawn; private."""
        return jnp.sum(self.units, dtype=jnp.int32)

    def on_host(self) -> np.ndarray:
        """All indices, also of the padding, as int64 on the host."""
        indices = np.asarray(self.indices).astype(np.int64)
        if indices.ndim == np.ndim(self.mask):
            return indices
        return (indices[:, 0] << 32) | indices[:, 1]


class Bins(NamedTuple):
    """Batches that are drawn together for several steps, from one key."""

    steps: int
    """How many steps they last."""
    key: Callable[[Key, Any], Key]
    """``(noise_key, step)`` -> the key of the bins. Checkpoints hold it, so it must not reveal the
    noise key: `dpjax.trees.step_key` makes one."""


# Accounting, statements, `dpjax.testing` and `dpjax.verify` read these facts of a sampler.
FACTS = ("event", "rates", "cycle", "place")


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Which examples each step sees, and what that is worth.

    Args:
      name: How reports call it.
      examples: The number of examples in the data set; public.
      batch_size: The expected size of a batch; public; what sums are divided by.
      capacity: The largest size that a draw can have: the number of its indices.
      draw: ``(key, step) -> Draw``; a pure function, whose random numbers follow from
        ``trees.step_key(key, Purpose.SAMPLING, step)``.
      event: Multipliers of the steps that ran, ``[steps]`` -> the privacy event that is
        *proved* for them.  Multipliers are relative to the add-or-remove sensitivity.
      neighbours: The neighbouring relation for which ``event`` holds.
      claim: In words, what is proved.
      facts: What the event follows from: ``event``, ``rates``, ``cycle`` and ``place``, as
        `dpjax.sampling.stated` gives them, and as JSON has it; public, for it stands on cards.
      fingerprint: What else tells it from others of its name.  **Not** public: with a hash
        over the examples an attacker can confirm a guess.
      participation: From a number of steps to the `dpjax.strategies.Participation` of an example
        in them, for correlated noise; None if it can be in any of them.
      independent: Whether each step draws on its own, so a resumed run draws with a new key.
        Otherwise a run keeps its key, its generator and the order of its rows.
      coins: Whether a step draws with two keys, ``draw(key, step, coins)``: a run keeps the numbers
        of the first, and has a new second key at each start.
      bins: For batches that are drawn together for several steps: how long they last, and the key
        from which they follow. A step then draws with it, ``draw(key, step, epoch_key)``; without
        that key a draw follows from ``key``. `dpjax.sampling.events.stated` sets it.
      random_bins: Whether each example has one batch of an epoch, drawn uniformly once for the run
        and independently of all others. Correlated noise then counts that the batch is unknown.
      padded: Whether a draw may hold fewer examples than its capacity.
      unit: Who is drawn: an ``"example"``, which is one row, or a ``"person"``, who may own
        several. ``examples``, ``batch_size`` and ``capacity`` count units.
      most_rows: The most rows of a unit in a draw, whose indices and mask are then
        ``[capacity, most_rows]``; None where a unit is a row.
      rows: The number of rows of the data, where a unit may own several; **not** public.
      paper_name: What papers call its batches, as ``"Poisson"``; by default ``name`` with spaces.
      published_as_poisson: Whether papers publish the epsilon of Poisson batches for it.
      rates_by_bin: Whether examples have different rates, by a public score.
    """

    name: str
    examples: int
    batch_size: float
    capacity: int
    draw: Callable[..., Draw]
    event: Callable[[np.ndarray], DpEvent]
    neighbours: Neighbours = Neighbours.ADD_OR_REMOVE
    claim: str
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)
    fingerprint: str | None = None
    participation: Callable[[int], Any] | None = None
    independent: bool = False
    coins: bool = False
    bins: Bins | None = None
    random_bins: bool = False
    padded: bool = True
    unit: str = "example"
    most_rows: int | None = None
    rows: int | None = None
    paper_name: str | None = None
    published_as_poisson: bool = False
    rates_by_bin: bool = False

    def __post_init__(self) -> None:
        call = f"types.Sampler({self.name!r})"
        # Statements and `dpjax.verify` need each of these facts.
        if set(self.facts) != set(FACTS):
            raise ValueError(
                f"{call}: the facts are {list(self.facts)}, not {list(FACTS)}; write "
                "Sampler(**dpjax.sampling.stated(...), ...)."
            )
        for name, fact in self.facts.items():
            try:
                json.dumps(fact)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"{call}: the fact {name} is {fact!r:.80}; expected numbers, texts or lists of "
                    "Python, which a card holds as JSON."
                ) from error

    def __repr__(self) -> str:
        return short(self, "name", "examples", "batch_size")

    def batch(
        self, data: PyTree, key: Key, step: Any, multiple: int = 64
    ) -> tuple[PyTree, Bool[np.ndarray, " rows"]]:
        """The rows that a step draws, and their mask, on the host; for a loop of one's own.

        A row where the mask is False is padding, which must not count. Where people are drawn,
        rows and mask are ``[people, most_rows]``.

        Args:
          data: Arrays with one row per example.
          key: The key of the draws.
          step: The number of the step.
          multiple: The rows are padded to a multiple of it, so a jitted step sees few shapes.

        Example:
          >>> import dpjax
          >>> sampler, key = dpjax.sampling.poisson(1000, batch_size=20), jax.random.key(0)
          >>> rows, mask = sampler.batch(np.arange(1000), key, step=0)
          >>> rows.shape, int(mask.sum()) == int(sampler.draw(key, 0).size)
          ((64,), True)
        """
        draw = self.draw(key, step)
        drawn = max(int(draw.size), 1)  # an empty draw is a step too
        padded = -(-drawn // multiple) * multiple
        count = min(self.capacity, padded)
        indices = draw.on_host()[:count]
        rows = jax.tree.map(lambda x: np.asarray(x[indices]), data)
        return rows, np.asarray(draw.mask)[:count]

    def _repr_html_(self) -> str:
        rows = {
            f"{self.unit}s": f"{self.examples:,}",
            "expected batch size": f"{self.batch_size:g}",
            "neighbours": self.neighbours.value,
            "claim": self.claim,
        }
        return table(f"Sampler: {self.name}", rows.items())

    def drawn(self, key: Key, noise_key: Key, epoch_key: Key, step: Any) -> tuple[Draw, Key]:
        """The draw of a step of a run with these keys, and the key of its epoch; see `State`."""
        if self.bins is not None:
            # An epoch has a key from its first step. So two runs from one state share the bins of
            # the current epoch, and of no later one.
            begins = step % self.bins.steps == 0
            epoch_key = jnp.where(begins, self.bins.key(noise_key, step), epoch_key)
            return self.draw(key, step, epoch_key), epoch_key
        if self.coins:
            return self.draw(key, step, noise_key), epoch_key
        return self.draw(key, step), epoch_key

    @property
    def sampling_rate(self) -> float:
        """The fraction of the data that a batch is expected to hold."""
        return self.batch_size / self.examples

    @property
    def reveals_data(self) -> bool:
        """Whether the choice of examples is itself a release, which no noise protects."""
        return self.facts.get("event") == Event.NONE

    @property
    def in_parts(self) -> bool:
        """Whether a cycle takes the parts of the data in turn, with a coin for each example."""
        return self.facts.get("place") == Place.COIN

    @property
    def usual_size(self) -> int:
        """A size that nearly every draw stays below, by three standard deviations."""
        mean = self.batch_size
        deviation = 0.0
        if self.capacity > mean:
            deviation = (mean * (1 - self.sampling_rate)) ** 0.5  # of the binomial
        # A multiple of 8 suits the vector units.
        size = -(-int(mean + 3 * deviation) // 8) * 8
        return max(1, min(self.capacity, size))


class State(NamedTuple):
    """The input of the next step of an algorithm.

    Privacy: ``params`` may be released, and so may anything computed from them. The keys and
    ``memory`` may not: with them, batches are known, or noise can be subtracted.
    """

    params: PyTree
    """After the noise."""
    optimizer: PyTree
    """The optimizer's own state."""
    bound_scale: Float[Array, ""]
    """The factor on the rule's bounds that an adapted bound has reached; 1 without one."""
    key: Key
    """The root of the draws, and of what a loss draws for its examples."""
    noise_key: Key
    """The root of the noise. `dpjax.fit` renews it at each start, unless the caller supplied it."""
    step: Int[Array, ""]
    """How many steps ran: the number of the next one. Draw and noise follow from keys and step."""
    ledger: Any
    """The `dpjax.ledger.Ledger` of what was spent; `dpjax.dpsgd` holds it to ``step``."""
    memory: PyTree = ()
    """The noise of earlier steps that correlated noise uses again; empty for white noise."""
    epoch_key: Key = None
    """The root of the bins of the epoch that runs, for a sampler with `Bins`; else None. It follows
    from ``noise_key`` where an epoch begins, and is kept until the epoch ends."""

    def __repr__(self) -> str:
        return veiled(self, "key", "noise_key", "memory", "epoch_key")


class Plan(Protocol):
    """A plan that a ledger can price, such as `dpjax.Mechanism`; hashable and immutable."""

    @property
    def steps(self) -> int:
        """How many steps are planned."""
        ...

    @property
    def multipliers(self) -> np.ndarray:
        """The noise multiplier of each planned step, ``[steps]``."""
        ...

    @property
    def accounted(self) -> str:
        """A hash of all that the cost of a step depends on, except its multiplier."""
        ...

    def stated(self, delta: float | None, method: str | None) -> tuple[float, str]:
        """Delta and method of a statement: as given, or else those the noise was chosen for."""
        ...

    def epsilon_of(self, multipliers: np.ndarray, delta: float, method: str) -> float:
        """The epsilon of steps that ran with these multipliers, in this order."""
        ...


@dataclass(frozen=True)
class Algorithm:
    """An algorithm for `dpjax.fit`: ``state = init(params)``; ``state, info = step(state)``.

    Privacy:
      ``state.params`` is after the noise and may be released.  ``info`` is computed
      before the noise and may not.

    It unpacks: ``init, step = dpjax.dpsgd(...)``.
    """

    init: Callable[..., Any]
    """``init(params, key=None)``. Without a key the operating system's randomness makes one; with
    a key the run can be repeated, and its epsilon holds against those who do not know the key."""
    step: Callable[[Any], tuple[Any, Any]]
    """``step(state) -> (state, info)``."""
    run: Callable[[Any, int], tuple[Any, Any]]
    """``run(state, count)``: several steps in one dispatch, which *uses up* the state it is
    given; infos are stacked."""
    mechanism: Plan
    """The `dpjax.Mechanism` that is both run and accounted."""
    identity: Callable[[Any], Mapping[str, Any]]
    """From a state to the JSON that identifies its run: different runs share no folder."""
    released: Callable[[Any], Mapping[str, Any]]
    """The facts of a state that are released in addition to its params, for the log."""
    budget: Any = None
    """The `dpjax.ledger.Budget` that the run may not pass, if there is one."""
    scaled_by: str | None = None
    """A public factor of sum and noise that is not in the mechanism, as the statement names it."""

    def __repr__(self) -> str:
        return short(self, "mechanism", "budget")

    def _repr_html_(self) -> str:
        planned: Any = self.mechanism
        return table("Algorithm", [("budget", repr(self.budget))]) + planned._repr_html_()

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        yield from (self.init, self.step)
