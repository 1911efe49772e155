# SPDX-License-Identifier: Apache-2.0
"""Canaries: rows that join a run by fair coins, and guesses about which of them did.

Any score is valid; a better one guesses more canaries right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from dpjax import checks, trees
from dpjax.gradients.clipped_grad import clipped_grad
from dpjax.mechanism import Mechanism
from dpjax.types import Algorithm, LossFn, PyTree, State


class Recorded(NamedTuple):
    """The state of `recording`."""

    mean: PyTree
    inner: Any


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with a state that keeps the last private mean for `score_canaries`."""
    with_extra = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> Recorded:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Recorded(zeros, optimizer.init(params))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        changes, inner = with_extra.update(updates, state.inner, params, **extra)
        return changes, Recorded(updates, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def score_canaries(
    algorithm: Algorithm,
    state: State,
    steps: int,
    loss: LossFn,
    canaries: PyTree,
    rest: PyTree,
    *,
    per_step: Callable[[Any], PyTree] | None = None,
) -> tuple[Float[np.ndarray, " canaries"], State]:
    r"""Runs an algorithm and scores each canary by what every step releases.

    $$ s_i = \sum_t \Bigl\langle \bar g_i(w_t),\ \tilde g_t - \frac1n \Bigl(
       \sum_{j \in \mathrm{rest}} \bar g_j(w_t) + \frac12 \sum_k \bar g_k(w_t) \Bigr)
       \Bigr\rangle $$

    with $\bar g_i(w_t)$ the clipped gradient of canary $i$ at the parameters before step $t$,
    $\tilde g_t$ the private mean of the step, and $n$ the number of rows and canaries. The
    expectation of the mean is subtracted from it: the attacker knows the rest of the data, and that
    canaries $k$ joined by fair coins. If the rule clips several groups of leaves, $\bar g_i$ is the
    gradient times the mean of the canary's clipping factors over the groups.

    Args:
      algorithm: `dpjax.dpsgd` with an optimizer from `recording`, on data that hold all canaries;
        its sampler leaves those out that take no part (`dpjax.auditing.without`).
      state: Its state before the first of these steps.
      steps: The number of steps.
      loss: As for the algorithm.
      canaries: The examples of all canaries, with a leading axis, whether they took part or not.
      rest: The other rows of the data: all of them, or a sample, whose sum is scaled up.
      per_step: As for the algorithm.

    Returns:
      The scores, for `guess_members`; and the state after the steps.

    Privacy:
      Scores read only data that the attacker knows: the canaries, the rest and the releases.

    Example:
      >>> import dpjax
      >>> rows, canaries = np.zeros((20, 8), np.float32), 9 * np.eye(8, dtype=np.float32)
      >>> joined = np.array([True, False] * 4)  # by fair coins, in an audit
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.auditing.without(
      ...         dpjax.sampling.full(28), 20 + np.flatnonzero(~joined)
      ...     ),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=0.2,
      ...     steps=3,
      ... )
      >>> loss = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
      >>> data = np.concatenate([rows, canaries])
      >>> algorithm = dpjax.dpsgd(loss, recording(optax.sgd(0.1)), mechanism, data)
      >>> state = algorithm.init(jnp.zeros(8))
      >>> scores, _ = score_canaries(algorithm, state, 3, loss, canaries, rows)
      >>> guess_members(scores, joined, guesses=8)
      (8, 8)

    References:
      Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", 2023, for its
      white-box audits.
    """
    call = "auditing.score_canaries"
    hint = "Build the algorithm with auditing.recording(optimizer)."
    checks.instance(call, "state.optimizer", state.optimizer, Recorded, hint)
    mechanism = checks.instance(call, "algorithm.mechanism", algorithm.mechanism, Mechanism)
    add = jax.jit(partial(_scores_after_step, loss, per_step, mechanism))
    scores = jnp.zeros(trees.leading_size(canaries, name="auditing.score_canaries(canaries)"))
    for _ in range(steps):
        before = state
        state, _ = algorithm.step(state)
        released_mean = state.optimizer.mean
        scores = add(scores, before.params, before.step, released_mean, canaries, rest)
    return np.asarray(scores), state


def _scores_after_step(
    loss: LossFn,
    per_step: Callable[[Any], PyTree] | None,
    mechanism: Mechanism,
    scores: Array,
    params: PyTree,
    step: Array,
    mean: PyTree,
    canaries: PyTree,
    rest: PyTree,
) -> Float[Array, " canaries"]:
    """The scores after one more step: each gains its term of the sum in `score_canaries`.

    Args:
      loss: As for `score_canaries`.
      per_step: As for `score_canaries`.
      mechanism: That of the algorithm.
      scores: The scores before the step, ``[canaries]``.
      params: The parameters before the step.
      step: The number of steps before it.
      mean: The private mean that the step released.
      canaries: As for `score_canaries`.
      rest: As for `score_canaries`.
    """
    examples = mechanism.sampling.examples
    canary_count = trees.leading_size(canaries)
    rest_count = trees.leading_size(rest)
    if per_step is not None:  # the loss reads the value of the step as the last part of an example
        of_step = per_step(step)
        canaries = trees.with_last(canaries, of_step, (canary_count,))
        rest = trees.with_last(rest, of_step, (rest_count,))
    # The attacker can compute exact norms, so none is estimated here. A clipped sum has the sum of
    # the clipped gradients as its value, and the factors that clip each of them.
    clipped = clipped_grad(loss, dataclasses.replace(mechanism.clipping, projections=None))
    of_canaries = clipped(params, canaries)
    of_rest = clipped(params, rest)
    # The sum of a sample of the other rows is scaled up to all of them; that of an empty one is 0.
    scale = (examples - canary_count) / max(1, rest_count)

    def surplus_of(mean: Array, rest_sum: Array, canary_sum: Array, param: Array) -> Array:
        """The released mean, less its expectation over the coins of the canaries."""
        expected = (scale * rest_sum + canary_sum / 2) / examples
        return (mean - expected).astype(param.dtype)  # as `jax.jvp` needs it

    surplus = jax.tree.map(surplus_of, mean, of_rest.value, of_canaries.value, params)

    def losses(params: PyTree) -> Array:
        return jax.vmap(loss, (None, 0))(params, canaries)

    # One forward-mode pass is the dot product of every canary's gradient with the surplus. The
    # factors clip it: they are [canaries, groups], and their mean stands for all groups.
    _, products = jax.jvp(losses, (params,), (surplus,))
    return scores + products * jnp.mean(of_canaries.factors, axis=1)


def guess_members(scores: ArrayLike, members: ArrayLike, guesses: int) -> tuple[int, int]:
    """Guesses that the highest scores are members and the lowest are not; abstains on the rest.

    It returns the numbers of right guesses and of guesses.

    Args:
      scores: ``[canaries]``, higher where a canary is more likely a member; NaN is refused.
      members: ``[canaries]``, whether each canary took part, decided by independent fair coins:
        truth values, or 0 and 1.
      guesses: The number of guesses, half of them on either side.

    Example:
      >>> guess_members(np.array([3.0, -1.0, 0.1, 2.0]), np.array([True, False, True, False]), 2)
      (2, 2)
    """
    call = "auditing.guess_members"
    scores = np.asarray(scores)
    members = np.asarray(members)
    if scores.ndim != 1 or np.any(np.isnan(scores)):
        raise ValueError(f"{call}(scores of shape {scores.shape}): expected a vector, no NaN.")
    if members.shape != scores.shape or not np.all((members == 0) | (members == 1)):
        raise ValueError(
            f"{call}(members of shape {members.shape}): expected {scores.size} truth values."
        )
    guesses = checks.whole(call, "guesses", guesses, least=2, most=scores.size)
    half = guesses // 2
    # Equal scores are in a random order. Otherwise sorted members are guessed right by their place.
    ties = np.random.default_rng(0).permutation(scores.size)
    order = np.lexsort((ties, scores))  # from the lowest score
    is_member = (members == 1)[order]
    right = np.sum(is_member[-half:]) + np.sum(~is_member[:half])
    return int(right), 2 * half
