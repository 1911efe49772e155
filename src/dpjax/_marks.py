# SPDX-License-Identifier: Apache-2.0
"""Marks: which arrays are the leaves of a clipped sum, and by which rule it was clipped.

A noise link must stand directly behind the clipping: any link between the two (a scale, Adam,
momentum, a mask) makes new arrays, and the bound of the rule says nothing about these. So
`clip_and_sum` and `clipped_grad` mark the arrays that they return, and a noise link accepts marked
arrays alone. A mark belongs to one array object, traced or not, and ends with it.

The results of a jitted function are new arrays. So a `ClippedSum` says itself by which rule it was
clipped, in the structure of its tree, and carries a checksum of its value as a further leaf. Both
leave ``jit`` with it. `jax.tree.map` makes arrays that the checksum does not fit.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from dpjax import trees
from dpjax._checksums import checksum_of_buffers
from dpjax.types import ClippedSum, Clipping, PyTree

__all__ = [
    "certified",
    "mark",
    "marked_again",
    "marks_of",
    "noised",
    "require_clipped_sum",
    "require_start",
]


# Name, bounds and projections of a rule, and the group of each leaf.
_By: TypeAlias = tuple[str, tuple[float, ...], int | None, tuple[int, ...]]


class _Certified(ClippedSum):
    """A `ClippedSum` as `clipped_grad` returned it."""

    by: _By | None = None
    """The rule, as `_described`; None after `_replace`."""
    checksum: Any = None
    """Of the value, once the tree was taken apart; None before, while marks know the arrays."""

    def __repr__(self) -> str:
        return repr(ClippedSum(*self))

    def __reduce__(self) -> Any:
        # Copies and pickles have new arrays, as trees have.
        fields, by = _named(self)
        return _joined, (by, tuple(value for _, value in fields))


def _joined(by: Any, fields: Any) -> _Certified:
    *fields, checksum = fields
    found = _Certified(*fields)
    found.by, found.checksum = by, checksum
    return found


def _named(found: _Certified) -> Any:
    by, checksum = found.by, found.checksum
    if by is not None and checksum is None:
        # From here on the arrays may be replaced by copies, which have no marks.
        known = all(map(_found, jax.tree.leaves(found.value)))
        by, checksum = (by, _checksum(found.value)) if known else (None, None)
    names = map(jax.tree_util.GetAttrKey, (*found._fields, "checksum"))
    return tuple(zip(names, (*found, checksum), strict=True)), by


jax.tree_util.register_pytree_with_keys(_Certified, _named, _joined)


def _checksum(total: PyTree) -> Any:
    # Noise refuses complex leaves, so no link reads the checksum of their sum.
    real = [x for x in jax.tree.leaves(total) if not jnp.iscomplexobj(x)]
    words = checksum_of_buffers(real)
    # Two bits a number, at the end of numbers near 1: sums that are equal up to rounding compare so
    # leaf by leaf, this one included.
    pairs = (words[:, None] >> jnp.arange(0, 32, 2, dtype=jnp.uint32)[None]) & 3
    dtype = jnp.result_type(jnp.float32, *real)
    return (1 + pairs.astype(dtype) * jnp.finfo(dtype).eps).reshape(-1)


class _Mark(NamedTuple):
    """One leaf of a clipped sum."""

    array: weakref.ref
    rule: Clipping
    total: object
    """Equal for the leaves of one sum."""
    leaves: int
    trace: Any
    """Where the sum was made: in which trace, or in none."""
    noised: bool = False


# By the identity of the array: arrays are not hashable, and equal arrays are not the same sum.
_marks: dict[int, _Mark] = {}


def mark(total: PyTree, rule: Clipping) -> PyTree:
    """The clipped sum itself, known from here on as one of this rule."""
    leaves, token = jax.tree.leaves(total), object()
    for leaf in leaves:
        _remember(leaf, rule, token, len(leaves))
    return total


def marks_of(tree: PyTree) -> list[_Mark | None]:
    """The marks of the leaves, for `marked_again`."""
    return list(map(_found, jax.tree.leaves(tree)))


def marked_again(tree: PyTree, marks: list[_Mark | None], first: PyTree) -> PyTree:
    """The tree itself, whose leaves are clipped sums where other leaves in their places were.

    Not if ``first``, which the loop began with, is known to be neither zeros nor such a sum.
    """
    starts = zip(jax.tree.leaves(first), marks, strict=True)
    if not all(entry is None or _may_begin(leaf, entry.rule) for leaf, entry in starts):
        return tree
    for leaf, entry in zip(jax.tree.leaves(tree), marks, strict=True):
        if entry is not None:
            _remember(leaf, entry.rule, entry.total, entry.leaves)
    return tree


def _may_begin(leaf: Any, rule: Clipping) -> bool:
    """Whether a clipped sum of the rule may begin with this leaf. Traced leaves pass."""
    if (entry := _found(leaf)) is not None:
        return not entry.noised and entry.rule == rule
    return trees.traced(leaf) or not np.any(np.asarray(leaf))


def _remember(leaf: Any, rule: Clipping, token: object, leaves: int) -> None:
    name = id(leaf)
    # The entry goes with its array; otherwise the next array at this address would inherit it.
    array = weakref.ref(leaf, lambda _: _marks.pop(name, None))
    _marks[name] = _Mark(array, rule, token, leaves, get_opaque_trace_state())


def certified(found: ClippedSum, rule: Clipping) -> ClippedSum:
    """The sum, known from here on as one of this rule, also outside ``jit``."""
    by = _described(rule, found.value)
    return _joined(by, (*found._replace(value=mark(found.value, rule)), None))


def require_clipped_sum(
    updates: Any, rule: Clipping, name: str, *, plain: bool = False, alone: bool = False
) -> PyTree:
    """The sum that a noise link received, or an error that says what is wrong with it.

    Args:
      updates: What the link received: a marked sum, or a `ClippedSum`.
      rule: The rule to which the noise is scaled.
      name: How errors call the link.
      plain: Whether trees without any mark pass, because the caller vouches for them.
      alone: Whether the link runs without parameters, and so hardly in a chain. A traced tree
        without marks then becomes NaN where an error would be raised outside ``jit``.

    Raises:
      ValueError: It is no clipped sum of this rule, as far as this can be known.
    """
    if isinstance(updates, _Certified) and updates.by is not None:
        _require_rule(updates.by, rule, updates.value, name)
        return updates.value if plain else _unchanged(updates, name)
    updates = updates.value if isinstance(updates, ClippedSum) else updates
    leaves = jax.tree.leaves(updates)
    found = [entry for leaf in leaves if (entry := _found(leaf)) is not None]
    # The sum over no examples is a clipped sum of every rule.
    traced = trees.traced(leaves)
    if not found and (plain or not (traced or any(np.any(np.asarray(x)) for x in leaves))):
        return updates
    if not found and alone and traced:
        # Only the values can say whether the tree is the sum over no examples.
        empty = jnp.all(jnp.stack([jnp.all(x == 0) for x in leaves]))
        return jax.tree.map(lambda x: jnp.where(empty, x, jnp.nan), updates)
    if not _is_whole(found, leaves):
        raise ValueError(f"{name}: {_broken(found, leaves)}")
    # A branch of `lax.cond` holds the noise, and the other branch would release the bare sum.
    if found[0].trace != get_opaque_trace_state():
        raise ValueError(
            f"{name}: the sum was clipped in another trace than the noise is added in; expected "
            "both in one function. Usually optax.conditionally_transform, optax.apply_if_finite or "
            "jax.lax.cond stands around the noise alone, and could release a sum without it: put "
            "it behind the noise."
        )
    _require_rule(_described(found[0].rule, updates), rule, updates, name)
    return updates


def require_start(start: PyTree, rule: Clipping) -> PyTree:
    """The sum that `clipped_grad` adds to; refuses values that are known to be no sum of this rule.

    Args:
      start: What the caller gave. Traced arrays pass: a loop carries them without their marks.
      rule: The rule that clips what is added.
    """
    leaves = jax.tree.leaves(start)
    dtypes = {jnp.result_type(leaf) for leaf in leaves}
    wide = {x for x in dtypes if jnp.issubdtype(x, jnp.inexact) and jnp.finfo(x).bits >= 32}
    # Engines add in the dtype of the start, where a narrow one rounds away whole examples.
    if narrow := dtypes - wide:
        raise TypeError(
            f"clipped_grad(start=...): received {narrow.pop()} numbers; expected float32 or wider, "
            "in which sums are kept whatever the parameters are. Usually jnp.zeros_like was mapped "
            "over parameters of that dtype: write jnp.zeros(x.shape), or begin with start=None."
        )
    found = [entry for leaf in leaves if (entry := _found(leaf)) is not None]
    if _is_whole(found, leaves) and not found[0].noised:
        one, other = (_described(by, start) for by in (rule, found[0].rule))
        same = one[1:] == other[1:]
    else:
        same = trees.traced(leaves) or not any(np.any(np.asarray(x)) for x in leaves)
    if not same:
        raise ValueError(
            "clipped_grad(start=...): received a tree that is no clipped sum of this rule "
            f"({rule.name} with the bounds {rule.bounds}), or one that noise was added to; "
            "expected zeros, or the value that clipped(...) returned for other examples of the "
            "same step. The result counts as one clipped sum, whatever it starts with. Usually a "
            "total was not reset after a step, or changed by jax.tree.map. Begin each step with "
            "start=None. A value that left a jitted function is not known either: add all parts in "
            "one jitted function, or write dpjax.clipping.trusted_sum(tree, rule)."
        )
    return start


def noised(total: PyTree) -> None:
    """Notes that noise was added to a sum: the sum of another step does not start with it."""
    for leaf in jax.tree.leaves(total):
        if (entry := _found(leaf)) is not None:
            _marks[id(leaf)] = entry._replace(noised=True)


def _unchanged(found: _Certified, name: str) -> PyTree:
    """The value, if it is still the one that `clipped_grad` returned; NaN inside ``jit`` if not."""
    if found.checksum is None:
        same = all(map(_found, jax.tree.leaves(found.value)))
    else:
        same = jnp.array_equal(_checksum(found.value), found.checksum)
    if trees.traced(same):
        return jax.tree.map(lambda x: jnp.where(same, x, jnp.nan), found.value)
    if not same:
        raise ValueError(
            f"{name}: the value of this ClippedSum is not the one that clipped_grad returned. The "
            "bound of the rule holds for that one alone, so the noise would have the wrong scale. "
            "Usually a link stands between clipping and noise (a scale, a schedule, clip), or "
            "jax.tree.map added or scaled sums: put the link behind the noise, and give the sum of "
            "a step's other microbatches to clipped(..., start=value). For a sum that you changed "
            "yourself, write dpjax.clipping.trusted_sum(tree, rule)."
        )
    return found.value


def _described(rule: Clipping, total: PyTree) -> _By:
    """A rule by all that the cost of its sums depends on, after its name."""
    # With projections: estimated norms cost more, whatever the bounds are.
    return rule.name, rule.bounds, rule.projections, rule.partition.assign(total)


def _require_rule(by: _By, rule: Clipping, total: PyTree, name: str) -> None:
    """Refuses noise of another rule than the one that clipped the sum."""
    clipped, *what = by
    noise, *wanted = _described(rule, total)
    if what != wanted:
        norms = f" ({what[1]} and {wanted[1]} random projections)" * (what[1] != wanted[1])
        raise ValueError(
            f"{name}: the sum was clipped by {clipped} to the bounds {what[0]}, and the noise is "
            f"scaled to {noise} with the bounds {wanted[0]}{norms}; expected one rule for both "
            "links. Usually the rule was written twice: give both links one object, or use "
            "mechanism.private(key), which clips and adds noise by its own rule."
        )


def _found(leaf: Any) -> _Mark | None:
    entry = _marks.get(id(leaf))
    return entry if entry is not None and entry.array() is leaf else None


def _is_whole(found: list[_Mark], leaves: list[Any]) -> bool:
    """Whether a tree with these marks is one whole clipped sum."""
    one = len(found) == len(leaves) and len({id(entry.total) for entry in found}) == 1
    return one and found[0].leaves == len(leaves)


def _broken(found: list[_Mark], leaves: list[Any]) -> str:
    """What is wrong with a tree that is not one whole clipped sum."""
    if found:
        return (
            f"received {len(found)} of the {found[0].leaves} leaves of a clipped sum, in a tree of "
            f"{len(leaves)}; the others would be released without noise, or with noise of the "
            "wrong scale. Usually optax.masked or optax.multi_transform stands around the noise or "
            "in front of it: put it behind the noise, where it freezes leaves without harm."
        )
    return (
        "received a tree that is not the clipped sum of clip_and_sum or clipped_grad. The bound "
        "of the rule holds for that sum alone, so the noise would have the wrong scale. Usually a "
        "link stands between clipping and noise (a scale, Adam, momentum, apply_every): put it "
        "behind the noise. Or there is no clip_and_sum; or the sum left a jitted function: give "
        "the ClippedSum itself instead of its value. Or jax.lax.scan or fori_loop added "
        "microbatches, whose result is a new array: sampling.fold keeps it known, and so does a "
        "Python loop. For a sum that you clipped and added "
        "yourself, write dpjax.clipping.trusted_sum(tree, rule)."
    )
