# SPDX-License-Identifier: Apache-2.0
"""Rules: the factor by which each group of an example's gradient is scaled.

The wished factor is a choice; the bounds, which a `Clipping` holds it to, are the guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import checks
from dpjax.clipping.partitions import Groups, partition_of
from dpjax.types import Clipping

Norms: TypeAlias = Float[Array, "batch groups"]

ON_BOUND = 2.0**-14
"""How far above a number, relative to it, a norm still counts as at most that number.

An engine may round a norm up, and an example that is exactly on its bound is kept by all of them.
"""

_BOUND_HINT = "It is the most that one example can move the sum."


def flat(bound: float) -> Clipping:
    r"""Clips each example's whole gradient to a norm of at most ``bound``.

    $$ \bar g_i = g_i \min(1, C / \lVert g_i \rVert) $$

    A gradient with NaN or infinity in it contributes 0. An infinite bound changes no other.

    Sensitivity:
      ``bound``; attained by any example whose gradient is at least that long.

    Example:
      >>> flat(bound=1.0).factors(jnp.array([[0.5], [4.0]]))
      Array([[1.  ],
             [0.25]], dtype=float32)

    References:
      Abadi et al., "Deep Learning with Differential Privacy", 2016, algorithm 1.
    """
    # The wish is 1; `Clipping` takes the minimum with bound / norm, which is flat clipping.
    return _rule("flat", bound, 1, jnp.ones_like)


def grouped(
    bound: float | None = None, groups: Groups = 2, *, total: float | None = None
) -> Clipping:
    r"""Clips every group of leaves separately, all to the same bound.

    Args:
      bound: Each group is clipped to this norm.
      groups: A number of groups (leaves in order, balanced by size) or a `Partition`.
      total: Instead of ``bound``: each of the $k$ groups is clipped to
        ``total / sqrt(k)``, and the sensitivity is ``total``.

    Sensitivity:
      ``bound * sqrt(k)``, or ``total``.

    Example:
      >>> grouped(bound=1.0, groups=4).sensitivity
      2.0
      >>> grouped(total=1.0, groups=4).bounds
      (0.5, 0.5, 0.5, 0.5)

    References:
      Liu, "Differentially Private Learning with Grouped Gradient Clipping", 2021, states a
      sensitivity of ``bound`` (theorem 2); that does not hold for two groups or more: the
      gradient (5, 5) at bound 1 moves the sum by the square root of 2.
    """
    if (bound is None) == (total is None):
        raise ValueError(f"clipping.grouped(bound={bound}, total={total}): give one of them.")
    partition = partition_of(groups)
    if bound is None:
        # k orthogonal groups of total / sqrt(k) have the sensitivity `total`.
        total = checks.not_negative("clipping.grouped", "total", total, _BOUND_HINT)
        bound = float(total / partition.size**0.5)
    return _rule("grouped", bound, partition, jnp.ones_like)


def per_group(bounds: Sequence[float] | Mapping[str, float], groups: Groups) -> Clipping:
    r"""Clips every group to its own bound, given in the partition's order or by group name.

    Sensitivity:
      $\lVert (C_1, \dots, C_k) \rVert_2$.

    Example:
      >>> per_group((3.0, 4.0), groups=2).sensitivity
      5.0
    """
    partition = partition_of(groups)
    # Bounds by name cannot be exchanged by an order of groups that changes with the model.
    if isinstance(bounds, Mapping):
        bounds = [bounds[name] for name in partition.names]
    return Clipping(partition, tuple(bounds), jnp.ones_like, "per_group")


def automatic(bound: float = 1.0, gamma: float = 0.01, *, groups: Groups = 1) -> Clipping:
    r"""Scales every gradient to nearly ``bound``: small ones up, large ones down.

    $$ \bar g_i = g_i \, C / (\lVert g_i \rVert + \gamma) $$

    Args:
      bound: $C$; with several groups, of each group.
      gamma: $\gamma$, 0 or more; it limits the scaling of very small gradients.
      groups: A number of groups or a `Partition`.

    Sensitivity:
      ``bound * sqrt(k)``; approached, never attained.

    Example:
      >>> automatic(bound=1.0, gamma=1.0).factors(jnp.array([[3.0], [0.0]]))
      Array([[0.25],
             [1.  ]], dtype=float32)

    References:
      Bu et al., "Automatic Clipping", 2022.
    """
    hint = "It is added to every norm; 0.01 is the usual choice."
    gamma = checks.not_negative("clipping.automatic", "gamma", gamma, hint)
    return _rule("automatic", bound, groups, _stretched(bound, gamma), gamma=gamma)


def psac(bound: float = 1.0, stabilizer: float = 0.1, *, groups: Groups = 1) -> Clipping:
    r"""Like `automatic`, but the factor of a gradient near 0 is the bound, not ``bound / gamma``.

    $$ \bar g_i = g_i \, C \Big/ \Bigl(\lVert g_i \rVert
       + \frac{r}{\lVert g_i \rVert + r}\Bigr) $$

    Args:
      bound: As for `automatic`.
      stabilizer: $r$, positive; not on the scale of the ``gamma`` of `automatic`.
      groups: As for `automatic`.

    Sensitivity:
      ``bound * sqrt(k)``; approached, never attained.

    Example:
      >>> psac(bound=1.0, stabilizer=1.0).factors(jnp.array([[3.0], [0.0]]))
      Array([[0.30769232],
             [1.        ]], dtype=float32)

    References:
      Xia et al., "Differentially Private Learning with Per-Sample Adaptive Clipping", 2023.
    """
    hint = "Without it this is clipping.normalized. 0.1 is a usual choice."
    stabilizer = checks.positive("clipping.psac", "stabilizer", stabilizer, hint)

    def wish(norms: Norms) -> Norms:
        # As the norm goes to 0 the factor tends to the bound and not to infinity, so gradients that
        # are mostly noise are not stretched.
        return bound / (norms + stabilizer / (norms + stabilizer))

    return _rule("psac", bound, groups, wish, stabilizer=stabilizer)


def normalized(bound: float = 1.0, *, groups: Groups = 1) -> Clipping:
    r"""Scales every gradient to exactly ``bound``; a zero gradient stays zero.

    $$ \bar g_i = g_i \, C / \lVert g_i \rVert $$

    The arguments are as for `automatic`.

    Sensitivity:
      ``bound * sqrt(k)``; attained by every example with a gradient.

    Example:
      >>> normalized(bound=1.0).factors(jnp.array([[0.5], [0.0]]))
      Array([[2.],
             [0.]], dtype=float32)
    """
    return _rule("normalized", bound, groups, _stretched(bound, 0.0))


def hard_threshold(bound: float, screen: float | None = None, *, groups: Groups = 1) -> Clipping:
    r"""Keeps short gradients and drops long ones ("global clipping").

    $$ \bar g_i = (C / Z) \, g_i \ \text{ if } \lVert g_i \rVert \le Z, \text{ else } 0 $$

    Args:
      bound: $C$; with several groups, of each group.
      screen: $Z$, the longest gradient that is kept, up to a rounding of $2^{-14} Z$; must not
        depend on the data. By default ``bound``, and then nothing that is kept is scaled.
      groups: A number of groups or a `Partition`.

    Sensitivity:
      ``bound * sqrt(k)``: noise follows ``bound``, not ``screen``.

    Example:
      >>> hard_threshold(bound=1.0, screen=2.0).factors(jnp.array([[1.5], [3.0]]))
      Array([[0.5],
             [0. ]], dtype=float32)

    References:
      Bu et al., "On the Convergence and Calibration of Deep Learning with Differential
      Privacy", 2023, appendices C.8 and D.
    """
    call = "clipping.hard_threshold"
    hint = "Examples with longer gradients are dropped."
    bound = checks.not_negative(call, "bound", bound, _BOUND_HINT)
    if screen is None:
        screen = bound
    screen = checks.number(call, "screen", screen, hint)
    # (C / Z) g has norm at most C for |g| at most Z, so the sensitivity is C and not Z.
    scale = 1.0  # C / Z of equal C and Z, also if both are 0 or infinite
    if screen != bound:
        scale = bound / checks.positive(call, "screen", screen, hint)

    def wish(norms: Norms) -> Norms:
        return jnp.where(norms <= screen * (1 + ON_BOUND), scale, 0.0).astype(norms.dtype)

    return _rule("hard_threshold", bound, groups, wish, screen=screen)


def jl(bound: float, projections: int = 50) -> Clipping:
    r"""Clips by norms that are estimated from random projections, in forward mode.

    Experimental: the rounding of the reverse pass is not counted.

    With $r$ directions $u_j$ of independent standard normal numbers, the same for all
    examples of a step,

    $$ \bar g_i = g_i \min(1, C / M_i), \qquad M_i^2 = \frac1r \sum_j \langle g_i, u_j \rangle^2 $$

    No gradient of one example is ever formed: a step is $r$ forward-mode passes over the
    batch and one reverse pass, whatever the layers are.

    Args:
      bound: $C$.
      projections: $r$; 30 and more cost little more epsilon than exact norms, fewer than 10
        often have no finite one.

    Sensitivity:
      None that holds always.  An example contributes up to $C \sqrt{r / \chi^2_r}$.  The guarantee
      is over that chance, by ``method="pld"`` only; other methods are refused.

      It holds for exact arithmetic. Where derivatives of thousands of positions cancel to the last
      digits, an example passes the bound by far; exact norms (`flat`) hold there too.

      A loss in less than float32 is refused: narrow dtypes, ``reduce_precision``, and a
      ``precision=`` of products below the highest.

    For 256 of 60,000, multiplier 1.1, 14,063 steps and delta 1e-5, epsilon is 2.38 with exact
    norms; with 10, 20, 30, 50, 100 and 200 projections 16.3, 3.5, 2.73, 2.55, 2.47 and 2.43.

    Example:
      >>> jl(bound=1.0, projections=30).projections
      30

    References:
      Bu, Gopi, Kulkarni, Lee, Shen, Tantipongpipat, "Fast and Memory Efficient Differentially
      Private-SGD via JL Projections", 2021.
    """
    hint = "30 directions and more are usual; each costs a forward-mode pass."
    count = checks.whole("clipping.jl", "projections", projections, hint)
    return Clipping(partition_of(1), (bound,), jnp.ones_like, "jl", count)


def _stretched(bound: float, gamma: float) -> Callable[[Norms], Norms]:
    """From norms to ``bound / (norms + gamma)``, and to 0 where the divisor is 0."""

    def wish(norms: Norms) -> Norms:
        length = norms + gamma
        return jnp.where(length > 0, bound / jnp.where(length > 0, length, 1), 0)

    return wish


def _rule(
    name: str, bound: float, groups: Groups, wish: Callable[[Norms], Norms], **facts: float
) -> Clipping:
    """A rule that gives every group of the partition the same bound.

    Facts are its other arguments, by which records of a run tell it from rules of the same name.
    """
    partition = partition_of(groups)
    return Clipping(partition, (bound,) * partition.size, wish, name, facts=facts)
