# SPDX-License-Identifier: Apache-2.0
"""Audits: what an attacker can really tell, measured.

An accountant proves an upper bound on epsilon from the description of a mechanism; an
audit measures a lower bound from what the program does.  The two must not cross: a lower
bound above the claim means that the program is not the mechanism that was accounted.
`audit_step` looks inside one step; `epsilon_lower_bound` turns guesses about canaries
after a whole run into a bound.

An audit that finds nothing proves nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import binom

from dpjax import clipping, trees
from dpjax.mechanism import Mechanism
from dpjax.types import Key, PyTree

__all__ = ["audit_step", "epsilon_lower_bound", "guess_members"]


def audit_step(mechanism: Mechanism, gradients: PyTree, canary: PyTree, key: Key) -> float:
    r"""White-box audit of one private step: the separation of two neighbouring batches.

    $$ \mu = \lVert \Sigma^{-1/2} (\mathbb{E}[M(D \cup \{c\})] - \mathbb{E}[M(D)]) \rVert $$

    with the noise measured rather than believed.  A step with multiplier $m$ whose
    canary fills the rule's bounds has $\mu = 1 / m$; more means that the guarantee is
    broken, less that noise is wasted.

    Args:
      mechanism: Its first step is audited, sampling left out.
      gradients: Per-example gradients of the batch ``(batch, ...)``; large leaves, so
        that the noise of each can be measured.
      canary: One example's gradient, without batch axis.
      key: Root key of the audited steps.
    """
    both = jax.tree.map(
        lambda g, c: jnp.concatenate([g, jnp.asarray(c, g.dtype)[None]]), gradients, canary
    )
    like = jax.tree.map(lambda g: jnp.zeros(g.shape[1:], trees.wide(g.dtype)), gradients)

    def privatized(summed: PyTree) -> PyTree:
        link = mechanism.privatize(key)
        return link.update(summed, link.init(like))[0]

    with_canary = privatized(clipping.clip(mechanism.clipping, both)[0])
    without = privatized(clipping.clip(mechanism.clipping, gradients)[0])
    noise = privatized(like)
    shift = [
        np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)) / np.std(n)
        for a, b, n in zip(*map(jax.tree.leaves, (with_canary, without, noise)), strict=True)
    ]
    return float(np.linalg.norm(shift))


def guess_members(scores: np.ndarray, members: np.ndarray, guesses: int) -> tuple[int, int]:
    """Guesses who took part: the highest scores did, the lowest did not, the rest is silence.

    Args:
      scores: ``[canaries]``, higher where a canary is more likely a member.
      members: ``[canaries]``, whether each, by a fair coin of its own, took part.
      guesses: How many to guess, half of them on either side.

    Returns:
      How many guesses were right, and how many were made.

    Example:
      >>> guess_members(np.array([3.0, -1.0, 0.1, 2.0]), np.array([True, False, True, False]), 2)
      (2, 2)
    """
    order, half = np.argsort(scores), guesses // 2
    if not 1 <= half <= len(scores) // 2:
        raise ValueError(
            f"auditing.guess_members(guesses={guesses}): expected 2 to {len(scores)} guesses, "
            "one for each canary at most."
        )
    right = np.sum(members[order[-half:]]) + np.sum(~members[order[:half]])
    return int(right), 2 * half


def epsilon_lower_bound(
    correct: int, guesses: int, *, canaries: int, delta: float = 0.0, confidence: float = 0.95
) -> float:
    r"""The largest epsilon that so many right guesses refute, from a single run.

    If a run is (epsilon, delta)-private, the number of right guesses about canaries that
    joined by fair coins is at most binomial with probability
    $e^\epsilon / (1 + e^\epsilon)$, up to a term in delta.

    Args:
      correct: How many guesses were right.
      guesses: How many were made.
      canaries: How many canaries there were, guessed or not.
      delta: The delta of the claim.
      confidence: Of the bound.

    Returns:
      A lower bound on epsilon; 0 if nothing is refuted.

    Example:
      >>> round(epsilon_lower_bound(100, 100, canaries=100), 2)
      3.49
      >>> epsilon_lower_bound(50, 100, canaries=100)
      0.0

    References:
      Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", 2023,
      theorem 5.2.
    """

    def p_value(epsilon: float) -> float:
        chance, steps = 1 / (1 + np.exp(-epsilon)), np.arange(1, correct + 1)
        below = np.cumsum(binom.pmf(correct - steps, guesses, chance))
        slack = np.max(below / steps, initial=0.0)
        return float(binom.sf(correct - 1, guesses, chance) + 2 * canaries * delta * slack)

    low, high = 0.0, 50.0
    if p_value(low) > 1 - confidence:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) <= 1 - confidence else (low, middle)
    return low
