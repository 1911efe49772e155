# SPDX-License-Identifier: Apache-2.0
"""The link after which a gradient may be released.

Its scale is a *multiplier* times the rule's sensitivity, so the number that is accounted
is the number that is drawn.

Keys are explicit. There is no default key: `secret_key` reads the operating system's randomness.
The noise of step t comes from ``fold_in(fold_in(root, NOISE), t)``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int

from dpjax import checks, processes, trees
from dpjax._display import veiled
from dpjax._marks import noised, require_clipped_sum
from dpjax.noise.measured import Measurement, unless_measured
from dpjax.noise.multiplier import (
    WIDER,
    check_multiplier,
    plain_multiplier,
    standard_deviations,
)
from dpjax.noise.normal import normal_in_parts, standard_normal
from dpjax.noise.one_run import require_one_run, unless_reset, with_own_noise
from dpjax.noise.seals import seal_outside_jit
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
      ``jit`` a second release for a key and a step is refused (`dpjax.noise.seals`). Inside it,
      ``update`` with a state that it received before adds the same noise to another sum: return
      the next state from a jitted step, and carry it in a loop.

    Privacy:
      With add-or-remove neighbours, one step is the Gaussian mechanism with multiplier $m_t$.
      Release the output of this link, never its input.

    | multiplier | bound | noise |
    |---|---|---|
    | 0 | any | none: the identity, not private |
    | positive | infinite | refused |
    | negative or NaN | | refused |
    | negative at a step of a schedule | finite | noise of its size; a `Mechanism` refuses it |

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
    checked = checked_sums(name, rule, noise_multiplier, key, strategy)

    def init(params: PyTree) -> GaussianState:
        return first_state(name, key, params, strategy)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        del extra
        # Without noise no scale can be wrong, so any tree passes.
        silent = isinstance(noise_multiplier, float) and not noise_multiplier
        updates = require_clipped_sum(updates, rule, name, plain=silent, alone=params is None)
        deviations = standard_deviations(noise_multiplier, rule, state.step)
        deviations = [x * scale for x in deviations]
        updates, _ = checked(updates, state, deviations)
        noisy, memory = add_noise(
            updates, rule.partition, deviations, state.key, state.step, strategy, state.memory
        )
        seal_outside_jit(state.key, state.step, noisy, name)
        return noisy, GaussianState(state.key, state.step + 1, memory)

    return optax.GradientTransformationExtraArgs(init, update)


def first_state(name: str, key: Key, params: PyTree, strategy: Strategy | None) -> GaussianState:
    """The state of a link before the first step; refuses several states that share one key.

    Args:
      name: How errors call the link.
      key: The root key of the link.
      params: The parameters.
      strategy: How the noise of different steps is correlated; None for white noise.
    """
    step = jnp.zeros((), jnp.int32)
    require_one_run(key, step, params, name)
    # A key of each process would release one sum with several noises. Compared where parameters lie
    # on several processes, because a link of one process alone would wait for the others.
    arrays = [x for x in (key, *jax.tree.leaves(params)) if isinstance(x, jax.Array)]
    if not trees.traced(arrays) and not all(x.is_fully_addressable for x in arrays):
        facts = {"the root key": trees.fingerprint(key)}
        processes.require_agreement(name, lambda: facts)
    # A copy: a step that donates the state would delete the key of the caller.
    return GaussianState(jnp.copy(key), step, first_memory(strategy, params))


def first_memory(strategy: Strategy | None, params: PyTree) -> PyTree:
    """The memory of correlated noise before the first step; empty for white noise."""
    return () if strategy is None else strategy.start(trees.zeros_wide(params))


def checked_sums(
    name: str,
    rule: Clipping,
    noise_multiplier: NoiseMultiplier,
    key: Key,
    strategy: Strategy | None,
) -> Callable[..., tuple[PyTree, Any]]:
    """Checks the arguments of a link, and returns what each of its steps does before the noise.

    Args:
      name: How errors call the link.
      rule: The rule that clipped the sums.
      noise_multiplier: As in `gaussian`.
      key: The root key of the link.
      strategy: How the noise of different steps is correlated; None for white noise.

    Returns:
      ``checked(total, state, deviations, below=None) -> (total, below)``. It refuses a sum that
      would share its noise with another one of its program. ``deviations`` has one number per
      group, and ``below`` is the count that an adapted bound follows.
    """
    check_multiplier(name, noise_multiplier, rule)
    checks.key(name, key)
    trees.warn_of_seed(key, name)
    # A traced key cannot be read, so it may be the key of zeros.
    key_of_zeros = trees.traced(key) or not np.any(trees.on_host(key))

    def checked(
        total: PyTree, state: Any, deviations: Sequence[Any], below: Any = None
    ) -> tuple[PyTree, Any]:
        noised(total)
        total = with_own_noise(total, state, name)
        total = total if key_of_zeros else unless_reset(total, state.key, name)
        each = [deviations[group] for group in rule.partition.assign(total)]
        own = Measurement(total, each, noise_multiplier, below, strategy)
        found = unless_measured(state.key, state.step, own)
        return found.total, found.below

    return checked


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
      deviations: The standard deviation of each group, from `standard_deviations`; the noise is
        wider by the margin `WIDER`.
      key: The root key of the run.
      step: The number of the step.
      strategy: How the noise of different steps is correlated; None for white noise.
      memory: What the strategy remembers of earlier steps, from `first_memory`.
      lost: What ``total`` lacks of the sum. It is far smaller than the last bits of a long sum,
        and meets the noise first, where it counts.
      in_parts: Whether a mesh splits the leaves. Then each device draws the numbers of its own
        part. The numbers are the same.

    Returns:
      The noisy sum, and the memory of the next step.
    """
    # By the partition of the rule that clipped: each group has the noise of its own bound.
    groups = partition.assign(total)
    wider = [deviation * WIDER for deviation in deviations]
    scales = jax.tree.structure(total).unflatten([wider[group] for group in groups])
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


def secret_key() -> Key:
    """A root key from the operating system's randomness, for runs that are released."""
    # Threefry by name: under jax_default_prng_impl='rbg' the default generator is not a function of
    # the key alone on every platform.
    # Inside a traced function it is drawn once, for all calls and rounds: a constant, and
    # `first_state` must see that.
    with jax.ensure_compile_time_eval():
        words = jnp.asarray(np.frombuffer(os.urandom(8), dtype=np.uint32))
        return jax.random.wrap_key_data(words, impl="threefry2x32")
