# SPDX-License-Identifier: Apache-2.0
"""The link after which a gradient may be released.

Its scale is a *multiplier* times the rule's sensitivity, so the number that is accounted
is the number that is drawn.

Keys are explicit. There is no default key: `secret_key` reads the operating system's randomness.
The noise of step t comes from ``fold_in(fold_in(root, NOISE), t)``.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Int

from dpjax import checks, trees
from dpjax._display import veiled
from dpjax._marks import require_clipped_sum
from dpjax.noise.normal import normal_in_parts, standard_normal
from dpjax.noise.seals import Release, seal, seal_outside_jit
from dpjax.strategies import Strategy
from dpjax.types import Clipping, Key, NoiseMultiplier, Partition, Purpose, PyTree


class GaussianState(NamedTuple):
    """The root key, the number of steps taken, and what correlated noise remembers of them.

    Privacy: the key and the memory are secrets. Checkpoints hold them; releases never do.
    """

    key: Key
    step: Int[Array, ""]
    memory: PyTree = ()

    def __repr__(self) -> str:
        return veiled(self, "key", "memory")


def gaussian(
    noise_multiplier: NoiseMultiplier,
    rule: Clipping,
    *,
    key: Key,
    replay: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""The Optax link that adds Gaussian noise to a clipped sum.

    $$ s + \mathcal{N}\bigl(0,\ (m_t \, \Delta)^2 I\bigr) $$

    Args:
      noise_multiplier: $m_t$: a number, an Optax schedule of the step, or a tuple with one number
        per group. A tuple is relative to each group's own bound (standard deviation $m_g C_g$ in
        group $g$); its effective multiplier is $(\sum_g m_g^{-2})^{-1/2}$.
      rule: The rule that clipped the sum; $\Delta$ is its sensitivity.
      key: The root key of this run, consumed by it.
      replay: Without effect, for scripts that name it: every ``init`` replays the noise of the key.

    Returns:
      A link on sums (not means) whose state holds the key and counts the steps.

      It accepts the sum of `dpjax.clip_and_sum` or `dpjax.clipped_grad` by an equal rule, with
      nothing in between, and refuses other trees. Inside ``jit`` it returns NaN for a `ClippedSum`
      whose value was changed, and, without ``params``, for other trees.
      `dpjax.clipping.trusted_sum` declares a sum that was made by other means.

      Every ``init`` starts the same noise again: build a link with a new key for each run. Outside
      ``jit`` a second sum for a key and a step is refused (`dpjax.noise.seals`).

    Privacy:
      With add-or-remove neighbours, one step is the Gaussian mechanism with multiplier $m_t$.
      Release the output of this link, never its input.

    | multiplier | bound | noise |
    |---|---|---|
    | 0 | any | none: the identity, not private |
    | positive | infinite | refused |
    | negative or NaN | | refused |

    Example:
      >>> import dpjax
      >>> rule = dpjax.clipping.flat(bound=1.0)
      >>> link = gaussian(1.1, rule, key=secret_key())
      >>> noisy, state = link.update({"w": jnp.zeros(3)}, link.init({"w": jnp.zeros(3)}))
    """
    del replay
    return noise_link("noise.gaussian", noise_multiplier, rule, key)


def noise_link(
    name: str,
    noise_multiplier: NoiseMultiplier,
    rule: Clipping,
    key: Key,
    strategy: Strategy | None = None,
    scale: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """The link of `gaussian` and of `correlated`.

    Args:
      name: How errors call the link.
      noise_multiplier: As in `gaussian`.
      rule: As in `gaussian`.
      key: As in `gaussian`.
      strategy: How the noise of different steps is correlated; None for white noise.
      scale: What else the standard deviation is multiplied by: the strategy's sensitivity.
    """
    hint = "The noise is scaled to the sensitivity of a rule: write dpjax.clipping.flat(bound)."
    checks.instance(name, "rule", rule, Clipping, hint)
    noise_multiplier = plain_multiplier(name, noise_multiplier)
    sealed = sealed_sums(name, rule, noise_multiplier, key, strategy)

    def init(params: PyTree) -> GaussianState:
        return begin(name, key, params, strategy)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        del extra
        silent = isinstance(noise_multiplier, float) and not noise_multiplier
        if not silent:
            alone = params is None
            updates = require_clipped_sum(updates, rule, name, alone=alone)
        deviations = standard_deviations(noise_multiplier, rule, state.step)
        deviations = [x * scale for x in deviations]
        updates = sealed(updates, state, deviations)
        noisy, memory = add_noise(
            updates, rule.partition, deviations, state.key, state.step, strategy, state.memory
        )
        return noisy, GaussianState(state.key, state.step + 1, memory)

    return optax.GradientTransformationExtraArgs(init, update)


def begin(name: str, key: Key, params: PyTree, strategy: Strategy | None) -> GaussianState:
    """The state of a link before the first step; refuses several states that share one key.

    Args:
      name: How errors call the link.
      key: The root key of the link.
      params: The parameters.
      strategy: How the noise of different steps is correlated; None for white noise.
    """
    _in_one_run(jax.random.key_data(key), [x for x in jax.tree.leaves(params) if _traced(x)])
    step = jnp.zeros((), jnp.int32)
    if any(map(_repeats, set(_programs(step)) - set(_programs(key)))):
        raise ValueError(
            f"{name}: init runs in the body of a loop, and the key of the link is a constant "
            "there; expected one init for each key. Every round would add the same noise to "
            "another sum, and differences of two results would have none. Usually jax.lax.map "
            "trains an ensemble: map over keys too, and build the link from each in the body. For "
            "one run, call init before the loop, and carry the state."
        )
    # A copy: a step that donates the state would delete the key of the caller.
    return GaussianState(jnp.copy(key), step, start(strategy, params))


def start(strategy: Strategy | None, params: PyTree) -> PyTree:
    """The memory of correlated noise before the first step; empty for white noise."""
    return () if strategy is None else strategy.start(trees.zeros_wide(params))


def sealed_sums(
    name: str,
    rule: Clipping,
    noise_multiplier: NoiseMultiplier,
    key: Key,
    strategy: Strategy | None,
) -> Callable[..., PyTree]:
    """Checks the arguments of a link, and returns what each of its steps does before the noise.

    Args:
      name: How errors call the link.
      rule: The rule that clipped the sums.
      noise_multiplier: As in `gaussian`.
      key: The root key of the link.
      strategy: How the noise of different steps is correlated; None for white noise.

    Returns:
      ``sealed(total, state, deviations, more=None) -> total``. It refuses a sum that would share
      its noise with another one. ``deviations`` has one number per group, and ``more`` holds
      further numbers that the step releases.
    """
    check_multiplier(name, noise_multiplier, rule)
    checks.key(name, key)
    trees.tell_of_seed(key, name)
    # A traced key cannot be read, so it may be the key of zeros.
    key_of_zeros = _traced(key) or not np.any(trees.on_host(key))

    def sealed(total: PyTree, state: Any, deviations: Sequence[Any], more: Any = None) -> PyTree:
        total = _one_run(total, state, name)
        total = total if key_of_zeros else _unless_reset(total, state.key, name)
        each = [deviations[group] for group in rule.partition.assign(total)]
        release = Release(total, each, _effective(noise_multiplier, state.step), more, strategy)
        seal_outside_jit(state.key, state.step, release, name)
        return total

    return sealed


def _effective(noise_multiplier: NoiseMultiplier, step: Any) -> Any:
    """The multiplier of one Gaussian that is worth the multipliers of all groups together."""
    if callable(noise_multiplier):
        return noise_multiplier(step)
    each = np.ravel(noise_multiplier)
    return float(np.sum(each**-2.0) ** -0.5) if np.all(each > 0) else 0.0


def _one_run(total: PyTree, state: Any, name: str) -> PyTree:
    """The total; refuses functions in which several totals share the noise of one state.

    Args:
      total: The clipped sum.
      state: The state of the link.
      name: How errors call the link.
    """
    if not any(map(_traced, jax.tree.leaves(total))):
        return total
    words = jax.random.key_data(state.key)
    total = _in_one_run(words, _on_all_shards(words, total))
    # A state that is an argument, is carried or begins here has a step traced where the sum is.
    around = _programs(state.step)
    inner = [programs[0] for leaf in jax.tree.leaves(total) if (programs := _programs(leaf))]
    if not _traced(state.step) or not set(inner) <= set(around):
        raise ValueError(
            f"{name}: the sum is computed inside a traced function, and the state of the link "
            f"(step {state.step}) comes from outside of it, as a constant; expected both among the "
            "arguments of the traced function. Every call or round would add the same noise to "
            "another sum, and differences of two results would have none. Usually a jitted step, "
            "the body of jax.lax.map or a branch of jax.lax.cond closes over the state: take it as "
            "an argument, or in the carry of the loop, and return the next one. Or "
            "optax.apply_if_finite or optax.conditionally_mask stands around the link: put it "
            "behind the noise."
        )
    return total


def _traced(x: Any) -> bool:
    return isinstance(x, Tracer)


def _programs(x: Any) -> list[Any]:
    """The traced programs around an array, innermost first: a jitted function, a loop's body."""
    trace, found = getattr(x, "_trace", None), []
    while trace is not None:
        # `jax.vmap` and derivatives make no program: their arrays belong to the one around them.
        if hasattr(trace, "frame"):
            found.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return found


def _repeats(program: Any) -> bool:
    """Whether a traced program is the body of a loop; False where JAX does not say."""
    made_for = getattr(getattr(program.frame, "debug_info", None), "traced_for", None)
    return made_for in ("scan", "fori_loop", "while_body")


@jax.custom_batching.custom_vmap
def _in_one_run(words: Array, total: PyTree) -> PyTree:
    """The total of the key of these words; of many under `jax.vmap`, ``[..., words]``."""
    del words
    return total


@_in_one_run.def_vmap
def _refuse_shared_noise(size: int, batched: Any, words: Array, total: PyTree) -> Any:
    several, total_batched = batched[0], any(jax.tree.leaves(batched[1]))
    if total_batched and not several:
        raise ValueError(
            f"noise: jax.vmap maps the link over {size} sums or runs, and its state has one key; "
            "expected a key for each. All sums would have equal noise, and their differences none. "
            "Make a state for each, jax.vmap(lambda key, p: link_of(key).init(p))(keys, params), "
            "and map over states too."
        )
    if total_batched:
        rows = words.reshape(-1, words.shape[-1])
        shared = _shared(rows, jnp.arange(len(rows))[:, None])
        if not _traced(shared) and shared:
            raise ValueError(
                f"noise: jax.vmap maps the link over {size} states, and some have equal keys; "
                "expected a key for each. Their sums would have equal noise, and the differences "
                "none. Usually one state was stacked or broadcast. Make a state for each: "
                "jax.vmap(lambda key, p: link_of(key).init(p))(keys, params)."
            )
        total = _nan_if(shared, total)
    # Again, with the words of all rows: another `jax.vmap` may stand around this one.
    return _in_one_run(words, total), batched[1]


def _on_all_shards(words: Array, total: PyTree) -> PyTree:
    """The total; NaN where shards of `jax.shard_map` or `jax.pmap` add one noise to several sums.

    Args:
      words: The words of the key.
      total: The clipped sum.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return total
    # Equal sums pass: replicas that added up their sums before. Only values can say so, as
    # check_vma=False and pmap do not tell what differs.
    own = jnp.append(words.reshape(-1), seal(total))
    rows = jnp.zeros((jax.lax.axis_size(axes), len(own)), own.dtype)
    # A sum of zeros and one row is equal in all shards by its type too; all_gather is not.
    rows = jax.lax.psum(rows.at[jax.lax.axis_index(axes)].set(own), axes)
    return _nan_if(_shared(rows[:, :-2], rows[:, -2:]), total)


def _shared(keys: Array, sums: Array) -> Any:
    """Whether two of these rows have one key and two sums."""
    one_key, one_sum = (jnp.all(x[:, None] == x[None], axis=-1) for x in (keys, sums))
    return jnp.any(one_key & ~one_sum)


def _nan_if(wrong: Any, total: PyTree) -> PyTree:
    # In the sum: noise, mean and any factor on either of them then are NaN too.
    return jax.tree.map(lambda x: jnp.where(wrong, jnp.nan, x), total)


def _unless_reset(total: PyTree, key: Key, name: str) -> PyTree:
    """The total; inside ``jit`` NaN, and outside an error, if the key was overwritten by zeros.

    ``jax.tree.map(jnp.zeros_like, state)``, a common way to reset momentum, makes the public key
    of zeros and the step 0.

    Args:
      total: The clipped sum.
      key: The key of the state, of a link whose own key is not zero.
      name: How errors call the link.
    """
    reset = ~jnp.any(jax.random.key_data(key) != 0)
    if _traced(reset):
        return _nan_if(reset, total)
    if reset:
        raise ValueError(
            f"{name}: the key in the state is zero, and the link was made with another one; "
            "expected the key of the link. Usually a whole optimizer state was reset with "
            "zeros_like. Reset the momentum alone, or start a new run with a new key."
        )
    return total


def add_noise(
    total: PyTree,
    partition: Partition,
    deviations: Sequence[Any],
    key: Key,
    step: Any,
    strategy: Strategy | None = None,
    memory: PyTree = (),
    *,
    lost: PyTree | None = None,
    in_parts: bool = False,
) -> tuple[PyTree, PyTree]:
    """The sum plus the Gaussian noise of one step.

    Args:
      total: The clipped sum.
      partition: The groups of its leaves.
      deviations: The standard deviation of each group, from `standard_deviations`.
      key: The root key of the run.
      step: The number of the step.
      strategy: How the noise of different steps is correlated; None for white noise.
      memory: What the strategy remembers of earlier steps, from `start`.
      lost: What ``total`` lacks of the sum. It is far smaller than the last bits of a long sum,
        and meets the noise first, where it counts.
      in_parts: Whether a mesh splits the leaves. Then each device draws the numbers of its own
        part. The numbers are the same.

    Returns:
      The noisy sum, and the memory of the next step.
    """
    # By the partition of the rule that clipped: each group has the noise of its own bound.
    groups = partition.assign(total)
    scales = jax.tree.structure(total).unflatten([deviations[group] for group in groups])
    # A function of (root key, step): a resumed run adds the same noise to the same sum.
    noise_key = trees.step_key(key, Purpose.NOISE, step)
    more = (scales,) if lost is None else (scales, lost)
    parts = normal_in_parts if in_parts else None
    if strategy is None:
        noisy = trees.random_like(standard_normal, noise_key, total, *more, use=_added, parts=parts)
        return noisy, memory
    # The numbers of white noise, mixed with earlier steps' numbers, and then scaled.
    drawn = trees.random_like(standard_normal, noise_key, total, parts=parts)
    mixed, memory = strategy.next(drawn, memory, step)
    return jax.tree.map(_added, mixed, total, *more), memory


def _added(noise: Array, leaf: Array, deviation: Any, lost: Array | None = None) -> Array:
    scaled = deviation * noise
    # The small terms first: beside a long sum, what it lost would round away again.
    return leaf.astype(noise.dtype) + (scaled if lost is None else lost + scaled)


def standard_deviations(noise_multiplier: NoiseMultiplier, rule: Clipping, step: Any) -> list[Any]:
    """The standard deviation of the noise of `gaussian` in each group at a step.

    Args:
      noise_multiplier: As in `gaussian`.
      rule: As in `gaussian`.
      step: The number of the step, traced or not.
    """
    if isinstance(noise_multiplier, Sequence):
        # Relative to each group's own bound; a number is relative to the sensitivity of all groups
        # together.
        pairs = zip(noise_multiplier, rule.bounds, strict=True)
        return [_product(multiplier, bound) for multiplier, bound in pairs]
    multiplier = noise_multiplier
    if callable(noise_multiplier):
        # In a narrower dtype the product with a small bound could round to zero.
        multiplier = jnp.asarray(noise_multiplier(step), jnp.float32)
    return [_product(multiplier, rule.sensitivity)] * rule.partition.size


def _product(multiplier: Any, bound: float) -> Any:
    """Multiplier * bound. With an infinite bound only a multiplier of 0 is allowed."""
    return 0.0 if math.isinf(bound) else multiplier * bound


def plain_multiplier(call: str, noise_multiplier: Any) -> NoiseMultiplier:
    """The multiplier as a Python number, a tuple of numbers, or a schedule.

    Args:
      call: How errors call the function that received it.
      noise_multiplier: As in `gaussian`.
    """
    if callable(noise_multiplier):
        return noise_multiplier
    if any(map(_traced, jax.tree.leaves(noise_multiplier))):
        raise TypeError(
            f"{call}(noise_multiplier={reprlib.repr(noise_multiplier)}): a traced number; expected "
            "one that is known before jit, because it is accounted. Usually "
            "optax.inject_hyperparams or a jitted function builds the link. Build it outside, and "
            "give a schedule of the step to the link itself: inject_hyperparams also shows the key "
            "in its state."
        )
    each = np.asarray(noise_multiplier)
    if each.dtype.kind not in "iuf" and each.size:
        raise ValueError(
            f"{call}(noise_multiplier={reprlib.repr(noise_multiplier)}): expected a "
            "number, a schedule of the step, or one number per group. Usually a flag was not "
            "converted from text."
        )
    each = each.astype(np.float64)
    if each.ndim > 1:
        raise ValueError(
            f"{call}: noise multipliers of shape {each.shape}; expected a number, a "
            "schedule of the step, or one number per group. A number for each step is a schedule: "
            "dpjax.schedules.table(multipliers)."
        )
    return tuple(each.tolist()) if each.ndim else float(each)


def check_multiplier(call: str, noise_multiplier: NoiseMultiplier, rule: Clipping) -> None:
    """Raises if this multiplier does not fit this rule.

    Args:
      call: How errors call the function that received them.
      noise_multiplier: As in `gaussian`.
      rule: As in `gaussian`.
    """
    if callable(noise_multiplier):
        multipliers: Sequence[Any] = ()
    elif isinstance(noise_multiplier, Sequence):
        multipliers = noise_multiplier
        if len(multipliers) != rule.partition.size:
            raise ValueError(
                f"{call}: {len(multipliers)} multipliers for a rule with "
                f"{rule.partition.size} groups ({', '.join(rule.partition.names)}); give "
                "one number, a schedule, or one number per group."
            )
    else:
        multipliers = (noise_multiplier,)
    hint = "It is the noise's standard deviation divided by the sensitivity."
    for multiplier in multipliers:
        checks.not_negative(call, "noise_multiplier", multiplier, hint)
    # 0 * inf is NaN; the pair is allowed only as "no clipping, no noise".
    if math.isinf(rule.sensitivity) and (callable(noise_multiplier) or any(multipliers)):
        raise ValueError(
            f"{call}: the rule's bound is infinite, so no finite noise hides one example. Give "
            "the rule a finite bound; or, for a run that is not private, set noise_multiplier=0.0 "
            "too."
        )


def secret_key() -> Key:
    """A root key from the operating system's randomness, for runs that are released."""
    # Threefry by name: under jax_default_prng_impl='rbg' the default generator is not a function of
    # the key alone on every platform.
    # Inside a traced function it is drawn once, for all calls and rounds: a constant, and `begin`
    # must see that.
    with jax.ensure_compile_time_eval():
        words = jnp.asarray(np.frombuffer(os.urandom(8), dtype=np.uint32))
        return jax.random.wrap_key_data(words, impl="threefry2x32")
