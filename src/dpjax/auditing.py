# SPDX-License-Identifier: Apache-2.0
"""Audits: measured lower bounds on what an attacker can learn.

An accountant proves an upper bound on epsilon from the description of a mechanism; an audit
measures a lower bound on the running program. A lower bound above the claim means that the
program is not the mechanism that was accounted. `audit_step` measures one step;
`epsilon_lower_bound` turns guesses about canaries after a whole run into a bound.

An audit without a finding proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy.typing import ArrayLike

from dpjax import clipping, trees
from dpjax.mechanism import Mechanism
from dpjax.types import Key, PyTree

__all__ = ["audit_step", "epsilon_lower_bound", "guess_members"]

_ENOUGH = 4096  # the standard deviation of this many numbers is known to about one per cent


def audit_step(mechanism: Mechanism, gradients: PyTree, canary: PyTree, key: Key) -> float:
    r"""White-box audit of one private step: the separation of two neighbouring batches.

    $$ \mu = \lVert \Sigma^{-1/2} (\mathbb{E}[M(D \cup \{c\})] - \mathbb{E}[M(D)]) \rVert $$

    The standard deviation of the noise is measured, for each leaf separately. A step with
    multiplier $m$ and a canary that reaches the rule's bounds has $\mu = 1 / m$. A larger value
    means that the guarantee is broken, a smaller one that noise is wasted.

    Args:
      mechanism: Its first step is audited, without sampling.
      gradients: Per-example gradients of the batch ``(batch, ...)``. The noise of a leaf of fewer
        than 4,096 numbers is measured over several first steps with other keys.
      canary: One example's gradient, without batch axis.
      key: Root key of the audited steps.

    Returns:
      The separation, to one or two per cent; infinite if a leaf that the canary moves has no noise.
    """
    _check_canary(gradients, canary)
    both = jax.tree.map(
        lambda g, c: jnp.concatenate([g, jnp.asarray(c, g.dtype)[None]]), gradients, canary
    )
    # A sum over no examples: the step then releases noise alone.
    like = jax.tree.map(lambda g: jnp.zeros(g.shape[1:], trees.wide(g.dtype)), gradients)

    def privatized(summed: PyTree, key: Key) -> list[Array]:
        # The pure function, and not the link: an audit gives one noise to two sums on purpose.
        return jax.tree.leaves(mechanism.private_mean(summed, key, jnp.int32(0))[0])

    with_canary = privatized(clipping.clip(mechanism.clipping, both)[0], key)
    without = privatized(clipping.clip(mechanism.clipping, gradients)[0], key)
    # With one key the noise of both batches is equal and cancels in their difference, so only
    # its standard deviation has to be measured.
    noise = _measured(lambda key: privatized(like, key), key)
    moved = [
        np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        for a, b in zip(with_canary, without, strict=True)
    ]
    with np.errstate(divide="ignore"):  # without noise: infinity, where anything moved at all
        shift = [m / deviation for m, deviation in zip(moved, noise, strict=True) if m != 0]
    # Leaf by leaf, because groups have noise of their own scale; independent Gaussians separate by
    # the root of the sum of squares.
    return float(np.linalg.norm(shift))


def _check_canary(gradients: PyTree, canary: PyTree) -> None:
    trees.leading_size(gradients, name="auditing.audit_step(gradients)")
    wanted, given = map(jax.tree.structure, (gradients, canary))
    if wanted != given:
        raise ValueError(
            f"auditing.audit_step: the canary is {given!s:.200}, the gradients {wanted!s:.200}; "
            "expected the same tree, because the canary is one more example's gradient."
        )
    both = map(jax.tree.leaves, (gradients, canary))
    for name, rows, leaf in zip(trees.leaf_names(canary), *both, strict=True):
        if np.shape(leaf) != np.shape(rows)[1:]:
            raise ValueError(
                f"auditing.audit_step: the canary's {name or 'array'} has shape {np.shape(leaf)}; "
                f"expected {np.shape(rows)[1:]}, one row of the gradients' {np.shape(rows)}. "
                "Usually its batch axis was left on: use jax.tree.map(lambda g: g[0], canary)."
            )


def _measured(noise: Callable[[Key], list[Array]], key: Key) -> list[np.floating]:
    """The standard deviation of each leaf of pure noise; small leaves are drawn many times."""
    leaves = noise(key)
    small = [i for i, leaf in enumerate(leaves) if 0 < leaf.size < _ENOUGH]
    if small:
        times = -(-_ENOUGH // min(leaves[i].size for i in small))
        again = jax.jit(lambda keys: jax.lax.map(lambda k: [noise(k)[i] for i in small], keys))
        for i, drawn in zip(small, again(jax.random.split(key, times)), strict=True):
            leaves[i] = drawn
    return [np.std(np.asarray(leaf, np.float64)) if leaf.size else np.float64(0) for leaf in leaves]


def guess_members(scores: ArrayLike, members: ArrayLike, guesses: int) -> tuple[int, int]:
    """Guesses that the highest scores are members and the lowest are not; abstains on the rest.

    Args:
      scores: ``[canaries]``, higher where a canary is more likely a member; NaN is refused.
      members: ``[canaries]``, whether each canary took part, decided by independent fair coins:
        truth values, or 0 and 1.
      guesses: The number of guesses, half of them on either side.

    Returns:
      The number of right guesses, and the number of guesses.

    Example:
      >>> guess_members(np.array([3.0, -1.0, 0.1, 2.0]), np.array([True, False, True, False]), 2)
      (2, 2)
    """
    scores, truths = np.asarray(scores), np.asarray(members)
    if scores.ndim != 1 or np.any(np.isnan(scores)):
        raise ValueError(
            f"auditing.guess_members(scores of shape {scores.shape}): expected one number for each "
            "canary, and no NaN, which cannot be sorted. Usually training diverged."
        )
    if truths.shape != scores.shape or not np.all((truths == 0) | (truths == 1)):
        raise ValueError(
            f"auditing.guess_members(members of shape {truths.shape}, {truths.dtype}): expected "
            f"True or False for each of {scores.size} scores: whether that canary took part. "
            "Usually the members' indices were given: use np.isin(np.arange(canaries), indices)."
        )
    if not 2 <= guesses <= scores.size or guesses % 1 != 0:
        raise ValueError(
            f"auditing.guess_members(guesses={guesses}): expected 2 to {scores.size} guesses, "
            "at most one for each canary."
        )
    # Half of the guesses at either end, where scores say most; the middle abstains.
    order, half, inside = np.argsort(scores), int(guesses) // 2, truths == 1
    right = np.sum(inside[order[-half:]]) + np.sum(~inside[order[:half]])
    return int(right), 2 * half


def epsilon_lower_bound(
    correct: int, guesses: int, *, canaries: int, delta: float = 0.0, confidence: float = 0.95
) -> float:
    r"""The largest epsilon that this number of right guesses refutes, from a single run.

    If a run is $(\epsilon, \delta)$-private, the number of right guesses about canaries that
    joined by fair coins is stochastically at most binomial with probability
    $e^\epsilon / (1 + e^\epsilon)$, up to a term in $\delta$.

    Args:
      correct: The number of right guesses.
      guesses: The number of guesses.
      canaries: The number of canaries, guessed or not.
      delta: The delta of the claim.
      confidence: The confidence of the bound.

    Returns:
      A lower bound on epsilon, at most 50; 0 if no epsilon is refuted.

    Example:
      >>> round(epsilon_lower_bound(100, 100, canaries=100), 2)
      3.49
      >>> epsilon_lower_bound(50, 100, canaries=100)
      0.0

    References:
      Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", 2023,
      theorem 5.2.
    """
    _check_guesses(correct, guesses, canaries)
    if not (0 <= delta <= 1 and 0 < confidence < 1):
        raise ValueError(
            f"auditing.epsilon_lower_bound(delta={delta}, confidence={confidence}): expected a "
            "delta from 0 to 1, that of the claim, and a confidence between 0 and 1, such as 0.95. "
            "Usually the confidence was given in per cent."
        )
    from scipy.stats import binom  # a second that only audits of whole runs cost

    def p_value(epsilon: float) -> float:
        # Theorem 5.2 of Steinke, Nasr and Jagielski (2023): with pure epsilon each guess is right
        # with at most this chance, and delta adds a slack that is bounded over all thresholds.
        chance, steps = 1 / (1 + np.exp(-epsilon)), np.arange(1, correct + 1)
        # How likely a few more wrong guesses are: delta turns a bounded number of them into right
        # ones.
        below = np.cumsum(binom.pmf(correct - steps, guesses, chance))
        slack = np.max(below / steps, initial=0.0)
        return float(binom.sf(correct - 1, guesses, chance) + 2 * canaries * delta * slack)

    # By bisection: the p-value grows with epsilon. An epsilon of 50 bounds nothing in practice.
    low, high = 0.0, 50.0
    if p_value(low) > 1 - confidence:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) <= 1 - confidence else (low, middle)
    return low


def _check_guesses(correct: int, guesses: int, canaries: int) -> None:
    numbers = (correct, guesses, canaries)
    whole = all(number % 1 == 0 for number in numbers)
    if not whole or not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"auditing.epsilon_lower_bound({correct}, {guesses}, canaries={canaries}): expected "
            "whole numbers, each from 0 to the next: right guesses, guesses, canaries. Usually "
            "rates or percentages were given, or guess_members' two results in the other order."
        )
