# SPDX-License-Identifier: Apache-2.0
"""Audits: what an attacker can really tell, measured.

An accountant proves an upper bound on epsilon from the description of a mechanism; an
audit measures a lower bound from what the program does. The two must not cross: a lower
bound above the claim means that the program is not the mechanism that was accounted.
`audit_step` looks inside one step; `epsilon_lower_bound` turns guesses about canaries
after a whole run into a bound.

An audit that finds nothing proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy.typing import ArrayLike
from scipy.stats import binom

from dpjax import clipping, trees
from dpjax.mechanism import Mechanism
from dpjax.types import Key, PyTree

__all__ = ["audit_step", "epsilon_lower_bound", "guess_members"]

_ENOUGH = 4096  # numbers, of which a standard deviation is known to about one per cent


def audit_step(mechanism: Mechanism, gradients: PyTree, canary: PyTree, key: Key) -> float:
    r"""White-box audit of one private step: the separation of two neighbouring batches.

    $$ \mu = \lVert \Sigma^{-1/2} (\mathbb{E}[M(D \cup \{c\})] - \mathbb{E}[M(D)]) \rVert $$

    with the noise measured rather than believed, of each leaf by itself. A step with
    multiplier $m$ whose canary fills the rule's bounds has $\mu = 1 / m$; more means that the
    guarantee is broken, less that noise is wasted.

    Args:
      mechanism: Its first step is audited, sampling left out.
      gradients: Per-example gradients of the batch ``(batch, ...)``; the noise of a leaf of few
        numbers is measured over as many first steps, of other keys, as make 4,096 of them.
      canary: One example's gradient, without batch axis.
      key: Root key of the audited steps.

    Returns:
      The separation, to one or two per cent; infinite if a leaf that the canary moves has no noise.
    """
    _check_canary(gradients, canary)
    both = jax.tree.map(
        lambda g, c: jnp.concatenate([g, jnp.asarray(c, g.dtype)[None]]), gradients, canary
    )
    like = jax.tree.map(lambda g: jnp.zeros(g.shape[1:], trees.wide(g.dtype)), gradients)

    def privatized(summed: PyTree, key: Key) -> list[Array]:
        link = mechanism.privatize(key)
        return jax.tree.leaves(link.update(summed, link.init(like))[0])

    with_canary = privatized(clipping.clip(mechanism.clipping, both)[0], key)
    without = privatized(clipping.clip(mechanism.clipping, gradients)[0], key)
    noise = _measured(lambda key: privatized(like, key), key)
    moved = [
        np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        for a, b in zip(with_canary, without, strict=True)
    ]
    with np.errstate(divide="ignore"):  # without noise: infinity, where anything moved at all
        shift = [m / deviation for m, deviation in zip(moved, noise, strict=True) if m != 0]
    return float(np.linalg.norm(shift))


def _check_canary(gradients: PyTree, canary: PyTree) -> None:
    trees.leading_size(gradients, name="auditing.audit_step(gradients)")
    wanted, given = map(jax.tree.structure, (gradients, canary))
    if wanted != given:
        raise ValueError(
            f"auditing.audit_step: the canary is {given!s:.200}, the gradients {wanted!s:.200}; "
            "expected the same tree of both, for the canary is one more example's gradient."
        )
    both = map(jax.tree.leaves, (gradients, canary))
    for name, rows, leaf in zip(trees.leaf_names(canary), *both, strict=True):
        if np.shape(leaf) != np.shape(rows)[1:]:
            raise ValueError(
                f"auditing.audit_step: the canary's {name or 'array'} has shape {np.shape(leaf)}; "
                f"expected {np.shape(rows)[1:]}, one row of the gradients' {np.shape(rows)}. "
                "Usually its batch axis was left on: jax.tree.map(lambda g: g[0], canary)."
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
    """Guesses who took part: the highest scores did, the lowest did not, the rest is silence.

    Args:
      scores: ``[canaries]``, higher where a canary is more likely a member; NaN is refused.
      members: ``[canaries]``, whether each, by a fair coin of its own, took part: truth values,
        or 0 and 1.
      guesses: How many to guess, half of them on either side.

    Returns:
      How many guesses were right, and how many were made.

    Example:
      >>> guess_members(np.array([3.0, -1.0, 0.1, 2.0]), np.array([True, False, True, False]), 2)
      (2, 2)
    """
    scores, truths = np.asarray(scores), np.asarray(members)
    if scores.ndim != 1 or np.any(np.isnan(scores)):
        raise ValueError(
            f"auditing.guess_members(scores of shape {scores.shape}): expected one number for each "
            "canary, and no NaN, which has no place in an order. Usually training diverged."
        )
    if truths.shape != scores.shape or not np.all((truths == 0) | (truths == 1)):
        raise ValueError(
            f"auditing.guess_members(members of shape {truths.shape}, {truths.dtype}): expected "
            f"True or False for each of {scores.size} scores: whether that canary took part. "
            "Usually the numbers of those who did were given: np.isin(np.arange(canaries), them)."
        )
    if not 2 <= guesses <= scores.size or guesses % 1 != 0:
        raise ValueError(
            f"auditing.guess_members(guesses={guesses}): expected 2 to {scores.size} guesses, "
            "one for each canary at most."
        )
    order, half, inside = np.argsort(scores), int(guesses) // 2, truths == 1
    right = np.sum(inside[order[-half:]]) + np.sum(~inside[order[:half]])
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
      A lower bound on epsilon, at most 50; 0 if nothing is refuted.

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
            "delta from 0 to 1, that of the claim, and a confidence between 0 and 1, such as 0.95; "
            "one of 95 was usually meant in per cent."
        )

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


def _check_guesses(correct: int, guesses: int, canaries: int) -> None:
    numbers = (correct, guesses, canaries)
    whole = all(number % 1 == 0 for number in numbers)
    if not whole or not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"auditing.epsilon_lower_bound({correct}, {guesses}, canaries={canaries}): expected "
            "whole numbers, each from 0 to the next: right guesses, guesses, canaries. Usually "
            "rates or per cents were given, or guess_members' two results in the other order."
        )
