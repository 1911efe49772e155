# SPDX-License-Identifier: Apache-2.0
"""The state of a noise link, and where its key comes from.

A traced ``init`` runs once for many calls, and gives the *unset* key of zeros in place of a fresh
one. Nothing is released with it before `renew`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dpjax import checks, processes, trees
from dpjax._display import veiled
from dpjax.strategies import Strategy
from dpjax.types import Key, NoiseMultiplier, PyTree, State, Sum

T = TypeVar("T")


class LinkNoise(NamedTuple):
    """The noise of a link."""

    deviations: Callable[[Any], Sequence[Any]]
    """From a step to the standard deviation in each group."""
    multiplier: NoiseMultiplier
    strategy: Strategy | None = None
    """How the noise of different steps is correlated; None for white noise."""


class GaussianState(NamedTuple):
    """The inputs of the next step of a noise link.

    Privacy: the key and the memory are secrets, which a checkpoint of this state holds. The scale
    follows from noised counts, and may be released.
    """

    key: Key
    step: Int[Array, ""]
    memory: PyTree = ()
    """What correlated noise remembers of earlier steps; empty for white noise."""
    scale: Float[Array, ""] | None = None
    """The factor of the rule's bounds, and of the noise, at this step, if bounds are adapted."""

    def __repr__(self) -> str:
        return veiled(self, "key", "memory")

    def meeting(self, clipped: Sum, below: Any, noise: LinkNoise) -> tuple[PyTree, Any]:
        """The sum and the count that meet the noise, as received; `dpjax.testing` records them."""
        return clipped.value, below


def first_key(key: Key | None, begun: PyTree) -> Key:
    """The key with which a run begins: as supplied, or fresh; unset if ``begun`` is traced."""
    if key is not None:
        # A step that donates the state deletes the buffers that it holds, so this is a copy.
        return jnp.copy(key)
    if trees.traced(begun):
        # A key of the operating system is a constant of the traced program, for all its calls.
        return processes.key_of(np.zeros(2, np.uint32))
    return processes.shared_key()


def is_unset(key: Key) -> Bool[Array, ""]:
    """Whether a key is the unset one, which a traced ``init`` gives."""
    return ~jnp.any(jax.random.key_data(key) != 0)


def unless_unset(total: PyTree, key: Key, name: str) -> PyTree:
    """The sum; where the key is unset an error, or inside ``jit`` NaN."""
    unset = is_unset(key)
    if trees.traced(unset):
        return jax.tree.map(lambda x: jnp.where(unset, jnp.nan, x), total)
    if unset:
        raise ValueError(
            f"{name}: the key is unset, as init was traced. Set one: state = "
            "dpjax.noise.renew(state)."
        )
    return total


def renew(state: T) -> T:
    """A state, or any tree with states in it, whose noise follows from fresh keys.

    Two runs that continue one state then share no noise. The key for draws of a `dpjax.types.State`
    stays, unless it is unset.

    The tree may be ``nnx.state(optimizer)``, in which Flax holds a noise state as a mapping:
    ``nnx.update(optimizer, renew(nnx.state(optimizer)))``.

    Example:
      >>> import dpjax
      >>> link = dpjax.noise.gaussian(1.0, dpjax.clipping.flat(1.0))
      >>> state = renew(jax.jit(link.init)(jnp.zeros(3)))
      >>> bool(is_unset(state.key))
      False
    """
    nodes, structure = jax.tree.flatten(state, is_leaf=_has_noise_key)
    if not any(map(_has_noise_key, nodes)):
        raise ValueError(
            f"noise.renew: expected a tree with the state of a noise link, not this "
            f"{type(state).__name__} without one."
        )
    return structure.unflatten(map(_with_fresh_keys, nodes))


def _has_noise_key(node: Any) -> bool:
    """Whether a node of a tree is the state of a run or of a noise link."""
    return isinstance(node, GaussianState | State) or _is_mapped_state(node)


def _is_mapped_state(node: Any) -> bool:
    """Whether a node has the fields of a `GaussianState`, as in ``nnx.state(optimizer)``."""
    if not isinstance(node, Mapping):
        return False
    # Flax leaves out fields without arrays.
    if not {"key", "step"} <= set(node) <= set(GaussianState._fields):
        return False
    keys = jax.tree.leaves(node["key"])
    return all(checks.is_typed_key(x) or getattr(x, "dtype", None) == np.uint32 for x in keys)


def _with_fresh_keys(node: Any) -> Any:
    """A node of a tree, with fresh keys if it is a state."""
    # Flax may hold a key in a variable, which `tree.map` looks into.
    if isinstance(node, GaussianState):
        return node._replace(key=jax.tree.map(_fresh_like, node.key))
    if isinstance(node, State):
        # The key for draws stays unless it is unset, because the order of an epoch follows from it.
        # The key of an epoch stays to its end; the next one follows from the new noise key.
        keys = {"noise_key": node.noise_key}
        if is_unset(node.key):
            keys["key"] = node.key
        return node._replace(**jax.tree.map(_fresh_like, keys))
    if _is_mapped_state(node):
        mapping: Any = type(node)
        return mapping({**node, "key": jax.tree.map(_fresh_like, node["key"])})
    return node


def _fresh_like(key: Key) -> Key:
    """A fresh key, or as many as the shape of a key has: an array of keys is an ensemble's.

    An untyped key, of the raw words of older programs, has one more axis for these words.
    """
    typed = checks.is_typed_key(key)
    shape = key.shape
    if not typed:
        shape = shape[:-1]
    fresh = processes.shared_key()
    if shape:
        fresh = jax.random.split(fresh, shape)
    if not typed:
        fresh = jax.random.key_data(fresh)
    return fresh
