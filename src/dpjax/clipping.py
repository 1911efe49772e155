# SPDX-License-Identifier: Apache-2.0
"""Rules: how much one example may contribute, and how its gradient is scaled to it.

A rule answers two questions: into which groups are the leaves divided, and by which
factor does each group of an example's gradient get scaled.  Each function here builds a
`Clipping` that holds both, and whose ``sensitivity`` follows from its bounds; nobody ever
types that number.  `clip_and_sum` puts a rule into an Optax chain.

Bounds and thresholds must not be computed from private data (or must be paid for).
This file must never know how gradients are computed, what noise is, or what an epsilon is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from dpjax import trees
from dpjax.types import Clipping, Partition, PyTree

__all__ = [
    "ClipState",
    "automatic",
    "balanced",
    "by_layer",
    "by_leaf",
    "by_path",
    "clip",
    "clip_and_sum",
    "flat",
    "grouped",
    "hard_threshold",
    "normalized",
    "per_group",
]

Norms: TypeAlias = Float[Array, "batch groups"]
Groups: TypeAlias = int | Partition


# Rules ------------------------------------------------------------------------------


def flat(bound: float) -> Clipping:
    r"""Clips each example's whole gradient to a norm of at most ``bound``.

    $$ \bar g_i = g_i \min(1, C / \lVert g_i \rVert) $$

    Args:
      bound: $C$, the most that one example can move the sum.

    Sensitivity:
      ``bound``; attained by any example whose gradient is at least that long.

    | bound | gradient | contribution |
    |---|---|---|
    | 0 | any | 0 |
    | infinity | finite | unchanged |
    | any | 0 | 0 |
    | any | NaN or infinite anywhere | 0 |
    | negative | | refused |

    Example:
      >>> flat(bound=1.0).factors(jnp.array([[0.5], [4.0]]))
      Array([[1.  ],
             [0.25]], dtype=float32)

    References:
      Abadi et al., "Deep Learning with Differential Privacy", 2016, algorithm 1.
    """
    return _rule("flat", bound, 1, jnp.ones_like)


def grouped(
    bound: float | None = None, groups: Groups = 2, *, total: float | None = None
) -> Clipping:
    r"""Clips every group of leaves separately, all to the same bound.

    Args:
      bound: Each group is clipped to this norm.
      groups: A number of groups (leaves in order, balanced by size) or a `Partition`.
      total: Instead of ``bound``: each of the $k$ groups is clipped to
        ``total / sqrt(k)``, so that the sensitivity is ``total``.

    Sensitivity:
      ``bound * sqrt(k)``, or ``total``.  The groups are orthogonal blocks, so an example
      that fills all of them moves the sum by more than one bound.

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
        raise ValueError(
            f"clipping.grouped(bound={bound}, total={total}): give one of them. bound= is "
            "each group's own bound, total= is the sensitivity of all groups together."
        )
    partition = _partition(groups)
    each = bound if bound is not None else _share(total, partition.size)
    return _rule("grouped", each, partition, jnp.ones_like)


def per_group(bounds: Sequence[float] | Mapping[str, float], groups: Groups) -> Clipping:
    r"""Clips every group to a bound of its own.

    Args:
      bounds: One bound per group, in the partition's order or by group name.
      groups: A number of groups or a `Partition`.

    Sensitivity:
      $\lVert (C_1, \dots, C_k) \rVert_2$.

    Example:
      >>> per_group((3.0, 4.0), groups=2).sensitivity
      5.0
    """
    partition = _partition(groups)
    if isinstance(bounds, Mapping):
        if set(bounds) != set(partition.names):
            raise ValueError(
                f"clipping.per_group: bounds are named {sorted(bounds)}, the groups "
                f"{sorted(partition.names)}; every group needs exactly one bound."
            )
        bounds = [bounds[name] for name in partition.names]
    return Clipping(partition, tuple(map(float, bounds)), jnp.ones_like, "per_group")


def automatic(bound: float = 1.0, gamma: float = 0.01, *, groups: Groups = 1) -> Clipping:
    r"""Scales every gradient to nearly ``bound``: small ones up, large ones down.

    $$ \bar g_i = g_i \, C / (\lVert g_i \rVert + \gamma) $$

    Args:
      bound: $C$; with several groups, of each group.
      gamma: Keeps the direction of very small gradients from being blown up.
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
    if not gamma >= 0:
        raise ValueError(
            f"clipping.automatic(gamma={gamma}): gamma must not be negative; it is added "
            "to every norm, and 0.01 is the usual choice."
        )
    return _rule("automatic", bound, groups, lambda norms: bound / (norms + gamma))


def normalized(bound: float = 1.0, *, groups: Groups = 1) -> Clipping:
    r"""Scales every gradient to exactly ``bound``; a zero gradient stays zero.

    $$ \bar g_i = g_i \, C / \lVert g_i \rVert $$

    Args:
      bound: $C$; with several groups, of each group.
      groups: A number of groups or a `Partition`.

    Sensitivity:
      ``bound * sqrt(k)``; attained by every example with a gradient.

    Example:
      >>> normalized(bound=1.0).factors(jnp.array([[0.5], [0.0]]))
      Array([[2.],
             [0.]], dtype=float32)
    """

    def wish(norms: Norms) -> Norms:
        return jnp.where(norms > 0, bound / jnp.where(norms > 0, norms, 1), 0)

    return _rule("normalized", bound, groups, wish)


def hard_threshold(bound: float, screen: float | None = None, *, groups: Groups = 1) -> Clipping:
    r"""Keeps short gradients and drops long ones ("global clipping").

    $$ \bar g_i = (C / Z) \, g_i \ \text{ if } \lVert g_i \rVert \le Z, \text{ else } 0 $$

    Args:
      bound: $C$; with several groups, of each group.
      screen: $Z$, the longest gradient that is kept; must not depend on the data.  By
        default ``bound``, and then nothing that is kept is scaled.
      groups: A number of groups or a `Partition`.

    Sensitivity:
      ``bound * sqrt(k)``: noise follows ``bound``, not ``screen``.

    Example:
      >>> hard_threshold(bound=1.0, screen=2.0).factors(jnp.array([[1.5], [3.0]]))
      Array([[0.5],
             [0. ]], dtype=float32)

    References:
      Bu et al., "On the Convergence and Calibration of Deep Learning with Differential
      Privacy", 2023, section 4.
    """
    screen = bound if screen is None else screen
    if not screen > 0:
        raise ValueError(
            f"clipping.hard_threshold(bound={bound}, screen={screen}): screen must be "
            "positive; examples with longer gradients are dropped."
        )
    scale = 1.0 if screen == bound else bound / screen

    def wish(norms: Norms) -> Norms:
        return jnp.where(norms <= screen, scale, 0.0).astype(norms.dtype)

    return _rule("hard_threshold", bound, groups, wish)


def _rule(name: str, bound: float, groups: Groups, wish: Callable[[Norms], Norms]) -> Clipping:
    """A rule that gives every group of the partition the same bound."""
    partition = _partition(groups)
    return Clipping(partition, (float(bound),) * partition.size, wish, name)


def _share(total: float | None, size: int) -> float:
    if total is None or not total >= 0:
        raise ValueError(
            f"clipping.grouped(total={total}): total must be positive; it is the most "
            "that one example can move the sum."
        )
    return total / size**0.5


# Partitions -------------------------------------------------------------------------


def balanced(groups: int) -> Partition:
    """Cuts the leaves, in their order, into groups of as equal size as possible.

    Args:
      groups: How many; at most as many as there are leaves.

    Example:
      >>> balanced(2).assign([jnp.zeros(6), jnp.zeros(1), jnp.zeros(2), jnp.zeros(4)])
      (0, 0, 1, 1)
    """
    if isinstance(groups, bool) or int(groups) != groups or groups < 1:
        raise ValueError(
            f"clipping: groups={groups!r}; expected a positive number of groups or a "
            "Partition such as clipping.by_layer(params)."
        )

    def assign(tree: PyTree) -> tuple[int, ...]:
        leaves = jax.tree.leaves(tree)
        if len(leaves) < groups:
            raise ValueError(
                f"clipping: {groups} groups were asked for, but the parameters have "
                f"only {len(leaves)} leaves; a leaf is never split. Ask for fewer groups."
            )
        sizes = [max(1, leaf.size) for leaf in leaves]
        low, high = max(sizes), sum(sizes)
        while low < high:
            middle = (low + high) // 2
            fits = _fill(sizes, int(groups), middle)[-1] < groups
            low, high = (low, middle) if fits else (middle + 1, high)
        return _fill(sizes, int(groups), low)

    return Partition(tuple(f"group {i}" for i in range(int(groups))), assign)


def _fill(sizes: Sequence[int], groups: int, capacity: int) -> tuple[int, ...]:
    """Fills groups in order up to a capacity, leaving a leaf for each group to come."""
    assigned, group, load = [], 0, 0
    for i, size in enumerate(sizes):
        starved = len(sizes) - i <= groups - 1 - group
        if i and (load + size > capacity or starved):
            group, load = group + 1, 0
        assigned.append(group)
        load += size
    return tuple(assigned)


def by_leaf(params: PyTree) -> Partition:
    """One group a leaf.

    Example:
      >>> by_leaf({"a": jnp.zeros(2), "b": jnp.zeros(3)}).names
      ('a', 'b')
    """
    return _named(params, trees.leaf_names(params))


def by_layer(params: PyTree) -> Partition:
    """One group a layer: leaves that share all of their path but the last name.

    Example:
      >>> layer = {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}
      >>> by_layer({"first": layer, "second": layer}).names
      ('first', 'second')
    """
    return _named(params, [name.rpartition("/")[0] for name in trees.leaf_names(params)])


def by_path(params: PyTree, patterns: Mapping[str, Any]) -> Partition:
    """Groups leaves by regular expressions on their paths.

    Args:
      params: The parameters.
      patterns: Regular expression -> name of a group.  The first that is found anywhere
        in a leaf's path counts; every leaf must match one.

    Example:
      >>> params = {"embed": jnp.zeros(3), "head": {"kernel": jnp.zeros(2)}}
      >>> by_path(params, {"^embed": "words", ".*": "rest"}).names
      ('words', 'rest')
    """

    def group(leaf: str) -> str:
        for pattern, name in patterns.items():
            if re.search(pattern, leaf):
                return str(name)
        raise ValueError(
            f"clipping.by_path: no pattern of {list(patterns)} matches the leaf {leaf!r}; "
            "every leaf needs a group. End with '.*' to catch the rest."
        )

    return _named(params, [group(leaf) for leaf in trees.leaf_names(params)])


def _named(params: PyTree, labels: Sequence[str]) -> Partition:
    """The partition that gives each leaf of ``params`` the group of its label."""
    names = tuple(dict.fromkeys(labels))
    groups = tuple(names.index(label) for label in labels)
    expected = trees.leaf_names(params)

    def assign(tree: PyTree) -> tuple[int, ...]:
        if trees.leaf_names(tree) != expected:
            raise ValueError(
                f"clipping: this partition was made for the leaves {list(expected)}, but "
                f"the tree has {list(trees.leaf_names(tree))}. Make it from the same "
                "parameters that are trained."
            )
        return groups

    return Partition(names, assign)


def _partition(groups: Groups) -> Partition:
    return groups if isinstance(groups, Partition) else balanced(groups)


# Application ------------------------------------------------------------------------


def clip(
    rule: Clipping,
    gradients: PyTree,
    mask: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[PyTree, Norms, Norms]:
    """Clips per-example gradients and sums them.

    Args:
      rule: The rule.
      gradients: Per-example gradients; every leaf ``(batch, ...)``.
      mask: Nonzero for a real example, 0 for padding, which contributes exactly 0.
      weights: Further factors ``[batch, groups]``; only in [0, 1] is the sensitivity kept,
        and `dpjax.clipped_grad` sees to that.

    Returns:
      The clipped sum, the norms and the factors ``[batch, groups]`` (0 for padding).

    Sensitivity:
      ``rule.sensitivity``.
    """
    groups = rule.partition.assign(gradients)
    norms = trees.group_norms(gradients, groups, rule.partition.size)
    factors = rule.factors(norms)
    if mask is not None:
        real = jnp.asarray(mask)[:, None] != 0
        norms, factors = jnp.where(real, norms, 0), jnp.where(real, factors, 0)
    if weights is not None:
        factors = factors * jnp.asarray(weights, factors.dtype)
    return trees.scaled_sum(gradients, factors, groups), norms, factors


@jax.tree_util.register_static
@dataclass(frozen=True)
class ClipState:
    """The shapes of the parameters: no arrays, only what is needed to refuse."""

    shapes: tuple[tuple[int, ...], ...]


def clip_and_sum(rule: Clipping) -> optax.GradientTransformationExtraArgs:
    """The Optax link from per-example gradients ``(batch, ...)`` to their clipped sum.

    Args:
      rule: The rule.

    Returns:
      A link whose ``update(gradients, state, params=None, mask=None)`` expects every
      leaf of the gradients to have one more, leading, axis than its parameter.

    Sensitivity:
      ``rule.sensitivity``.  The sum is not private until noise is added to it.

    Example:
      >>> link = clip_and_sum(flat(bound=1.0))
      >>> state = link.init({"w": jnp.zeros(2)})
      >>> gradients = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5]])}
      >>> summed, state = link.update(gradients, state)
      >>> [round(float(x), 4) for x in summed["w"]]
      [0.6, 1.3]
    """

    def init(params: PyTree) -> Any:
        return ClipState(tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(params)))

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        mask: ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        del params, extra
        _refuse_unbatched(updates, state.shapes)
        return clip(rule, updates, mask)[0], state

    return optax.GradientTransformationExtraArgs(init, update)


def _refuse_unbatched(gradients: PyTree, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raises unless every gradient leaf is ``(batch, *parameter shape)``."""
    found = [jnp.shape(leaf) for leaf in jax.tree.leaves(gradients)]
    names = trees.leaf_names(gradients)
    for name, given, shape in zip(names, found, shapes, strict=True):
        if len(given) != len(shape) + 1 or given[1:] != shape:
            raise ValueError(
                f"clip_and_sum: the gradient of {name or 'the parameter'} has shape "
                f"{given}; expected (batch, {', '.join(map(str, shape))}): one gradient "
                "per example. Usually the gradient was already averaged over the batch "
                "(jax.grad of a batch loss): use jax.vmap(jax.grad(loss), (None, 0)), or "
                "dpjax.clipped_grad, which clips and sums by itself."
            )
    trees.leading_size(gradients, name="clip_and_sum")
