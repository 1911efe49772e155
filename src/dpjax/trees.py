# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on trees of arrays: group norms, scaled sums, keys and random trees.

Everything is computed in float32 or wider, whatever the dtype of the leaves: a float16 norm
underflows to 0, so nothing would be clipped, and a bfloat16 sum stops growing at 256. Products
have the highest precision, because accelerators round their inputs otherwise.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jaxtyping import Array, Float, Shaped

from dpjax import checks
from dpjax.types import Key, Purpose, PyTree

__all__ = ["copy", "step_key"]

T = TypeVar("T")

# Numbers per draw, 16 MiB: many small draws run, and above all compile, far more slowly.
_TOGETHER = 2**22


def wide(dtype: Any) -> jnp.dtype:
    """The dtype in which numbers of ``dtype`` are summed: float32, or wider."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"trees.wide({jnp.dtype(dtype)}): expected real floating-point leaves. Keep counters "
            "out of the parameters, and make a complex leaf of two real ones in the loss."
        )
    return jnp.dtype(dtype if jnp.finfo(dtype).bits > 32 else jnp.float32)


def leaf_names(tree: PyTree) -> tuple[str, ...]:
    """The path of each leaf, as ``dense/bias``, in JAX's order of leaves; no two are equal."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    within = collections.Counter(path[:depth] for path in paths for depth in range(len(path)))

    def named(path: tuple[Any, ...]) -> tuple[Any, ...]:
        # A variable of NNX has a single leaf, its `value`: the variable's name is the leaf's.
        last = path[1:][-1:] == (jax.tree_util.GetAttrKey("value"),)
        return path[:-1] if last and within[path[:-1]] == 1 else path

    keys = [[jax.tree_util.keystr((key,), simple=True) for key in named(path)] for path in paths]
    names = tuple(map("/".join, keys))
    if len(set(names)) == len(names):
        return names
    # A key may contain "/", as Haiku's do. Quoted keys do not, and differ where the keys differ.
    return tuple("/".join(quote(key, safe="") for key in path) for path in keys)


def nodes(tree: PyTree, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """The nodes of a type, or of several, wherever they stand in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in leaves if isinstance(node, kind)]


def leading_size(tree: PyTree, *, name: str = "batch") -> int:
    """The length of the leading axis that all leaves share."""
    sizes = [jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)]
    if len(set(sizes)) == 1 and sizes[0]:
        return sizes[0][0]
    named = dict(zip(leaf_names(tree), sizes, strict=True))
    raise ValueError(
        f"{name}: every leaf needs a leading axis of one length, one row an example, not "
        f"{reprlib.repr(named)}. Close the loss over what is no example."
    )


def one_row(tree: PyTree) -> PyTree:
    """Shapes and dtypes of a single row of arrays that share a leading axis, as JAX holds them."""

    def row(x: Any) -> jax.ShapeDtypeStruct:
        kind = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(x.shape[1:], kind)

    return jax.tree.map(row, tree)


# One program for all shapes, where JAX compiles one for each shape outside of `jax.jit`.
_copies = jax.jit(lambda arrays: list(map(jnp.copy, arrays)))


def copy(tree: PyTree) -> PyTree:
    """A tree whose JAX arrays are in buffers of their own; other leaves as they are."""
    leaves, structure = jax.tree.flatten(tree)
    places: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            # A state may lie on several sets of devices, which JAX refuses in one program.
            place = None if isinstance(leaf, Tracer) else leaf.sharding
            places.setdefault(place, []).append(i)
    for some in places.values():
        for i, own in zip(some, _copies([leaves[i] for i in some]), strict=True):
            leaves[i] = own
    return jax.tree.unflatten(structure, leaves)


def expand(rows: Shaped[Array, " batch"], like: Array) -> Array:
    """Gives a value per example the rank of ``like``, so that they broadcast."""
    return rows.reshape(rows.shape + (1,) * (like.ndim - rows.ndim))


def fingerprint(tree: PyTree) -> str:
    """A hash of all names, shapes, types and numbers of a tree: equal for equal trees alone."""
    digest = hashlib.sha256()
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        array = np.ascontiguousarray(_readable(leaf))
        # Names and shapes too: trees of equal bytes and other structure are other trees.
        digest.update(f"{name} {array.dtype.name} {np.shape(leaf)} ".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def on_host(leaf: Any) -> np.ndarray:
    """A copy as a NumPy array; all processes that hold a part of the leaf must call this."""
    return np.array(_readable(leaf))


def _readable(leaf: Any) -> np.ndarray:
    """The array of `on_host`, which on a CPU may be that of the leaf: data can be large."""
    if isinstance(leaf, jax.Array):
        is_key = checks.is_typed_key(leaf)
        # A traced function may read a key that it closes over.
        with jax.ensure_compile_time_eval():
            leaf = jax.random.key_data(leaf) if is_key else leaf
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def traced(tree: PyTree) -> bool:
    """Whether a leaf stands for an array of a program that is traced: it has no value yet."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def widened(tree: PyTree) -> PyTree:
    """The same numbers in the dtypes that sums are kept in: float32 or wider."""
    return jax.tree.map(lambda x: jnp.asarray(x, wide(jnp.result_type(x))), tree)


def widened_exactly(x: Array) -> Array:
    """The same numbers in float32 or wider, equal for all that read them; integers as they are."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == wide(x.dtype):
        return x
    # Where XLA widens a bfloat16 that it has just rounded, it may leave out the rounding: in the
    # norm and not in the sum. It keeps this rounding, which changes no bfloat16.
    kind, wider = jnp.finfo(x.dtype), x.astype(wide(x.dtype))
    # A float8 may have numbers where IEEE's format with its exponent bits has infinity.
    exponents = kind.nexp if kind.bits > 8 else jnp.finfo(wider.dtype).nexp
    rounded = jax.lax.reduce_precision(wider, exponents, kind.nmant)
    if kind.nexp == jnp.finfo(wider.dtype).nexp:
        return rounded
    # To fewer exponent bits it rounds subnormal numbers to 0: in a float16 all below 6e-5.
    unit, normal = float(kind.smallest_subnormal), float(kind.smallest_normal)
    return jnp.where(jnp.abs(wider) < normal, jnp.round(wider / unit) * unit, rounded)


def zeros_wide(tree: PyTree) -> PyTree:
    """Zeros of the same shapes, in the dtypes that sums are kept in."""
    return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), wide(jnp.result_type(x))), tree)


def group_norms(
    gradients: PyTree, groups: tuple[int, ...], size: int
) -> Float[Array, "batch size"]:
    """The norm of each example's gradient in a group; entries below about 1e-19 square to 0."""
    leaves = list(map(widened_exactly, jax.tree.leaves(gradients)))
    # Leaf by leaf: a joined copy of all per-example gradients would double the memory.
    squares = [jnp.sum(jnp.real(x * jnp.conj(x)), axis=tuple(range(1, x.ndim))) for x in leaves]
    # A group may have no leaf of this tree; its norm is then 0.
    none = jnp.zeros(leaves[0].shape[:1], jnp.float32)
    totals = [
        sum((s for s, g in zip(squares, groups, strict=True) if g == group), none)
        for group in range(size)
    ]
    return jnp.sqrt(jnp.stack(totals, axis=-1))


def scaled_sum(
    gradients: PyTree, factors: Float[Array, "batch groups"], groups: tuple[int, ...]
) -> PyTree:
    """Sums gradients over the batch, each example's groups scaled by its factors."""

    def total(leaf: Array, group: int) -> Array:
        scale = factors[:, group].astype(wide(leaf.real.dtype))
        # 0 * NaN is NaN: a dropped example must contribute exactly 0.
        counted = jnp.where(expand(scale, leaf) != 0, widened_exactly(leaf), 0)
        scale = scale.astype(counted.dtype)  # complex for a complex leaf
        # XLA on CPU runs this product many times faster than a multiplication and a sum.
        return jnp.einsum("b,b...->...", scale, counted, precision=jax.lax.Precision.HIGHEST)

    leaves, structure = jax.tree.flatten(gradients)
    return structure.unflatten(
        total(leaf, group) for leaf, group in zip(leaves, groups, strict=True)
    )


def step_key(root: Key, purpose: Purpose, step: Any) -> Key:
    """The key of one step's randomness for one purpose.

    ``fold_in(fold_in(root, purpose), step)``: every step can be drawn again alone, and no two
    purposes ever share a stream.

    Args:
      root: The root key of the run; a sampler of your own receives it in ``draw(key, step)``.
      purpose: What the numbers are for: ``dpjax.types.Purpose.SAMPLING`` in a sampler.
      step: The number of the step, traced or not.

    Example:
      >>> key = step_key(jax.random.key(0), Purpose.SAMPLING, step=3)
      >>> rows = jax.random.choice(key, 100, (10,), replace=False)
    """
    checks.key("trees.step_key", root)
    # Purpose first, so that the steps of two purposes come from two keys and never meet.
    return jax.random.fold_in(jax.random.fold_in(root, purpose), step)


def mappable(key: Key) -> Key:
    """A key of threefry that follows from a key of any generator, for draws of each example."""
    # JAX batches rbg by the key of the first example, which would decide everyone's draws.
    if str(jax.random.key_impl(key)) == "threefry2x32":
        return key
    words = jax.random.bits(key, (2,), jnp.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def random_like(
    sample: Callable[..., Array],
    key: Key,
    tree: PyTree,
    *more: PyTree,
    use: Callable[..., Array] | None = None,
    parts: Callable[..., Sequence[Array]] | None = None,
) -> PyTree:
    """A tree of independent draws, or of what is made of them; consumes the key.

    ``sample(key, shape, dtype, after=...)`` draws for leaves beside each other together, and
    ``parts(key, shapes, dtype)`` the same numbers, not cut. With ``use(draw, leaf, *more)`` a draw
    waits until the draws before it are used up.
    """

    def cut_from_one(key: Key, shapes: Sequence[Any], dtype: Any, **options: Any) -> list[Array]:
        return cut(sample(key, (sum(map(math.prod, shapes)),), dtype, **options), shapes)

    leaves, structure = jax.tree.flatten(tree)
    columns = [leaves, *map(structure.flatten_up_to, more)]
    values: list[Array] = []
    for run in _runs(leaves):
        shapes = [jnp.shape(leaf) for leaf in run]
        # By its first leaf, so that a run of leaves keeps its noise when later leaves change.
        where = jax.random.fold_in(key, len(values))
        options = {} if use is None or not values or parts else {"after": values[-1]}
        draw = parts or cut_from_one
        for z in draw(where, shapes, wide(run[0].dtype), **options):
            row = [column[len(values)] for column in columns]
            values.append(z if use is None else use(z, *row))
    return structure.unflatten(values)


def cut(array: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Arrays of these shapes, cut from a flat one; an array that has the only shape is itself."""
    sizes = [math.prod(shape) for shape in shapes]
    pieces = jnp.split(array.reshape(-1), list(itertools.accumulate(sizes))[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _runs(leaves: Sequence[Array]) -> list[list[Array]]:
    """Leaves beside each other of one dtype, together no more numbers than `_TOGETHER`, or one."""
    runs: list[list[Array]] = []
    room = 0
    for leaf in leaves:
        size = math.prod(jnp.shape(leaf))
        # A run ends where the dtype changes, because one draw has one dtype.
        if not runs or size > room or wide(leaf.dtype) != wide(runs[-1][0].dtype):
            runs.append([])
            room = _TOGETHER
        runs[-1].append(leaf)
        room -= size
    return runs
