# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on trees of arrays: group norms, scaled sums, keys and random trees.

Everything is computed in float32 or wider, whatever the dtype of the leaves: a float16 norm
underflows to 0, so nothing is clipped, and a bfloat16 sum stops growing at 256. Products
have the highest precision, because accelerators round their inputs otherwise.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
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

__all__ = ["copy", "digest", "step_key"]

T = TypeVar("T")

# Numbers per draw, 16 MiB: many small draws take much longer, above all to compile.
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
    # The number of leaves below each node, by the path of the node.
    leaves_below = collections.Counter(path[:depth] for path in paths for depth in range(len(path)))
    keys_of_leaves: list[list[str]] = []
    for path in paths:
        is_value = len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value")
        if is_value and leaves_below[path[:-1]] == 1:
            # A variable of NNX has a single leaf, its `value`: the variable's name is the leaf's.
            path = path[:-1]
        keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
        keys_of_leaves.append(keys)
    names = tuple(map("/".join, keys_of_leaves))
    if len(set(names)) == len(names):
        return names
    # A key may contain "/", as Haiku's do. Quoted keys do not, and differ where the keys differ.
    return tuple("/".join(quote(key, safe="") for key in keys) for keys in keys_of_leaves)


def nodes(tree: PyTree, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """The nodes of a type, or of several, wherever they stand in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in leaves if isinstance(node, kind)]


def leading_size(tree: PyTree, *, name: str = "batch") -> int:
    """The length of the leading axis that all leaves share."""
    sizes = [jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)]
    if len(set(sizes)) == 1 and sizes[0]:
        return sizes[0][0]
    sizes_by_name = dict(zip(leaf_names(tree), sizes, strict=True))
    raise ValueError(
        f"{name}: every leaf needs a leading axis of one length, one row an example, not "
        f"{reprlib.repr(sizes_by_name)}. Close the loss over what is no example."
    )


def one_row(tree: PyTree) -> PyTree:
    """Shapes and dtypes of a single row of arrays that share a leading axis, as JAX holds them."""

    def row(x: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(x.shape[1:], dtype)

    return jax.tree.map(row, tree)


# One program copies all arrays: outside of `jax.jit` JAX compiles a program for each shape.
_copies = jax.jit(lambda arrays: list(map(jnp.copy, arrays)))


def copy(tree: PyTree) -> PyTree:
    """A tree with copies of its JAX arrays, in new buffers; other leaves as they are."""
    leaves, structure = jax.tree.flatten(tree)
    # A state may lie on several sets of devices, which JAX refuses in one program. So the indices
    # of the leaves are grouped by sharding.
    indices_by_sharding: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            # A tracer has none, and all tracers belong to one program.
            sharding = None if isinstance(leaf, Tracer) else leaf.sharding
            indices_by_sharding.setdefault(sharding, []).append(i)
    for indices in indices_by_sharding.values():
        copies = _copies([leaves[i] for i in indices])
        for i, leaf_copy in zip(indices, copies, strict=True):
            leaves[i] = leaf_copy
    return jax.tree.unflatten(structure, leaves)


def with_last(rows: PyTree, value: PyTree, size: tuple[int, ...]) -> PyTree:
    """The leaves of a tuple of rows, and a value that all rows share as the last leaf of each."""
    shared = jax.tree.map(jnp.asarray, value)
    of_rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (*size, *x.shape)), shared)
    return (*rows, of_rows)


def expand(rows: Shaped[Array, " batch"], like: Array) -> Array:
    """Gives a value per example the rank of ``like``, to broadcast them."""
    return rows.reshape(rows.shape + (1,) * (like.ndim - rows.ndim))


def fingerprint(tree: PyTree) -> str:
    """A hash of all names, shapes, types and numbers of a tree: equal only for equal trees."""
    digest = hashlib.sha256()
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        array = np.ascontiguousarray(_readable(leaf))
        # Names and shapes count, because trees of equal bytes may differ in structure.
        digest.update(f"{name} {array.dtype.name} {np.shape(leaf)} ".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def on_host(leaf: Any) -> np.ndarray:
    """A copy as a NumPy array; all processes that hold a part of the leaf must call this."""
    return np.array(_readable(leaf))


def _readable(leaf: Any) -> np.ndarray:
    """As `on_host`, but on a CPU without a copy if possible, because data can be large."""
    if isinstance(leaf, jax.Array):
        if checks.is_typed_key(leaf):
            # A traced function may read a key that it closes over.
            with jax.ensure_compile_time_eval():
                leaf = jax.random.key_data(leaf)
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def check_params(call: str, params: PyTree) -> None:
    """Refuses leaves without a gradient; ``call`` is the function that received the parameters."""
    for name, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True):
        kind = getattr(leaf, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.floating):
            raise TypeError(
                f"{call}: leaf {name or '(the array)'} is "
                f"{type(leaf).__name__ if kind is None else kind}; expected floating-point arrays. "
                "Close the loss over the rest: nnx.split, eqx.partition."
            )


def traced(tree: PyTree) -> bool:
    """Whether a leaf is a tracer, which has no value yet."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def widened(tree: PyTree) -> PyTree:
    """The same numbers in the dtypes of sums: float32 or wider."""
    return jax.tree.map(lambda x: jnp.asarray(x, wide(jnp.result_type(x))), tree)


def widened_exactly(x: Array) -> Array:
    """The same numbers in float32 or wider, with the same bits at each use; integers as they are.

    Where a program rounds to bfloat16 and then widens, XLA may drop the rounding at one use and not
    at another: the norm of a gradient is then not that of the gradient in the sum. XLA keeps an
    explicit rounding, `jax.lax.reduce_precision`, to the digits that the narrow dtype has anyway.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == wide(x.dtype):
        return x
    wider = x.astype(wide(x.dtype))
    narrow_info = jnp.finfo(x.dtype)
    wide_exponent_bits = jnp.finfo(wider.dtype).nexp
    exponent_bits = narrow_info.nexp
    if narrow_info.bits <= 8:
        # A float8 may have finite numbers where IEEE's format with as many exponent bits has
        # infinity, so only the mantissa is rounded.
        exponent_bits = wide_exponent_bits
    rounded = jax.lax.reduce_precision(wider, exponent_bits, narrow_info.nmant)
    if narrow_info.nexp == wide_exponent_bits:  # bfloat16 has the exponents of float32
        return rounded
    # Subnormal numbers have fewer digits, and XLA rounds them to 0, in float16 all below 6e-5. They
    # are rounded here, to multiples of the smallest one.
    smallest = float(narrow_info.smallest_subnormal)
    is_subnormal = jnp.abs(wider) < float(narrow_info.smallest_normal)
    return jnp.where(is_subnormal, jnp.round(wider / smallest) * smallest, rounded)


def zeros_wide(tree: PyTree) -> PyTree:
    """Zeros of the same shapes, in the dtypes of sums."""
    return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), wide(jnp.result_type(x))), tree)


def group_norms(
    gradients: PyTree, groups: tuple[int, ...], size: int
) -> Float[Array, "batch size"]:
    """The norm of each example's gradient in each of ``size`` groups.

    ``groups`` has the group of each leaf. Entries below about 1e-19 square to 0.
    """
    leaves = list(map(widened_exactly, jax.tree.leaves(gradients)))
    # Leaf by leaf, because a joined copy of all per-example gradients doubles the memory.
    squares = [jnp.sum(jnp.real(x * jnp.conj(x)), axis=tuple(range(1, x.ndim))) for x in leaves]
    # The norm of a group without a leaf in this tree is 0.
    zeros = jnp.zeros(leaves[0].shape[:1], jnp.float32)
    totals = [zeros] * size
    for square, group in zip(squares, groups, strict=True):
        totals[group] = totals[group] + square
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


def restored(saved: bytes, like: PyTree, where: str) -> PyTree:
    """The parameters that `serialized` wrote, in the structure of ``like``.

    ``where`` is the call that error messages name.
    """
    from flax import serialization

    arrays = dict(serialization.msgpack_restore(saved))  # by the names of leaves
    leaves, structure = jax.tree.flatten(like)
    shapes_saved = {name: list(np.shape(array)) for name, array in arrays.items()}
    names = leaf_names(like)
    shapes_expected = dict(zip(names, (list(np.shape(leaf)) for leaf in leaves), strict=True))
    for name in {**shapes_expected, **shapes_saved}:
        found = shapes_saved.get(name, "no leaf")
        expected = shapes_expected.get(name, "no leaf")
        if found != expected:
            raise ValueError(
                f"{where}: found {found} at {name!r}, expected {expected}. Give the tree that was "
                "trained."
            )
    return structure.unflatten(jnp.array(arrays[name]) for name in names)


def serialized(params: Any) -> bytes:
    """The leaves of parameters by name, as Flax writes msgpack."""
    from flax import serialization  # training without a folder does not need it

    arrays = jax.tree.map(np.asarray, jax.device_get(params))
    named = dict(zip(leaf_names(arrays), jax.tree.leaves(arrays), strict=True))
    return serialization.msgpack_serialize(named)


def digest(params: PyTree) -> str:
    """The SHA-256 of parameters that the card of a run holds, as hexadecimal digits.

    It is of all leaves, sorted by name. Each gives a line with the JSON ``[name, dtype, shape]``,
    then its numbers in row-major order, little-endian. A leaf that devices share is hashed as a
    whole, so the digest does not depend on the mesh; all processes that hold a part must call this.

    Example:
      >>> digest({"w": jnp.zeros(2), "b": jnp.ones(())})[:8]
      '3138e183'
    """
    total = hashlib.sha256()
    named = zip(leaf_names(params), jax.tree.leaves(params), strict=True)
    for name, leaf in sorted(named, key=lambda pair: pair[0]):
        array = np.ascontiguousarray(_readable(leaf))
        head = [name, array.dtype.name, list(np.shape(leaf))]
        total.update(f"{json.dumps(head)}\n".encode())
        total.update(array.reshape(-1).view(np.uint8).data)  # JAX runs on little-endian machines
    return total.hexdigest()


def step_key(root: Key, purpose: Purpose, step: Any) -> Key:
    """The key of one step's randomness for one purpose.

    ``fold_in(fold_in(root, purpose), step)``: every step can be drawn again without the others, and
    no two purposes share a stream.

    Args:
      root: The root key of the run; a sampler of your own receives it in ``draw(key, step)``.
      purpose: The purpose of the numbers: ``dpjax.types.Purpose.SAMPLING`` in a sampler.
      step: The number of the step, traced or not.

    Example:
      >>> key = step_key(jax.random.key(0), Purpose.SAMPLING, step=3)
      >>> rows = jax.random.choice(key, 100, (10,), replace=False)
    """
    checks.key("trees.step_key", root)
    # The purpose is first, so steps of two purposes come from two keys and never meet.
    return jax.random.fold_in(jax.random.fold_in(root, purpose), step)


def mappable(key: Key) -> Key:
    """A key of threefry that follows from a key of any generator, for draws of each example."""
    # JAX batches rbg by the key of the first example, which then decides every example's draws.
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
    """A tree of independent draws, or of the results of ``use``; consumes the key.

    Adjacent leaves share one draw, as many as `_TOGETHER` allows.

    Args:
      sample: ``(key, shape, dtype, after=...) -> array``, one draw; it waits for ``after``, which
        is an earlier result.
      key: Consumed.
      tree: The numbers that are drawn have its shapes, in float32 or wider.
      more: Trees of the same structure, for ``use``.
      use: ``(draw of a leaf, leaf, *leaves of more) -> array``, such as the leaf plus its noise.
        The tree then has its results. On a CPU each draw waits until earlier ones are used up, so
        they are not in memory together.
      parts: ``(key, shapes, dtype) -> arrays``, in place of ``sample``, for leaves that a mesh
        splits: it draws the same numbers, as an array for each leaf.
    """

    def cut_from_one(key: Key, shapes: Sequence[Any], dtype: Any, **options: Any) -> list[Array]:
        """One draw, cut into an array for each leaf."""
        return cut(sample(key, (sum(map(math.prod, shapes)),), dtype, **options), shapes)

    leaves, structure = jax.tree.flatten(tree)
    # Each entry has a leaf, and the leaves of `more` at its place.
    leaves_for_use = list(zip(leaves, *map(structure.flatten_up_to, more), strict=True))
    # Draws, or results of `use`, in the order of leaves. The next leaf has the index `len(values)`.
    values: list[Array] = []
    for run in _runs(leaves):
        shapes = [jnp.shape(leaf) for leaf in run]
        # The key follows from the index of the first leaf of the run, so a run keeps its draw if
        # later leaves change.
        run_key = jax.random.fold_in(key, len(values))
        options = {}
        if use is not None and values and not parts:  # `parts` takes no `after`
            options = {"after": values[-1]}
        draw = parts or cut_from_one
        for numbers in draw(run_key, shapes, wide(run[0].dtype), **options):
            if use is not None:
                numbers = use(numbers, *leaves_for_use[len(values)])
            values.append(numbers)
    return structure.unflatten(values)


def cut(array: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Arrays of these shapes, cut from an array with as many numbers."""
    sizes = [math.prod(shape) for shape in shapes]
    ends = list(itertools.accumulate(sizes))
    pieces = jnp.split(array.reshape(-1), ends[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _runs(leaves: Sequence[Array]) -> list[list[Array]]:
    """Groups adjacent leaves that share a draw: of one dtype, and at most `_TOGETHER` numbers.

    A longer leaf has a draw of its own.
    """
    runs: list[list[Array]] = []
    room = 0  # how many more numbers the last run may have
    for leaf in leaves:
        size = math.prod(jnp.shape(leaf))
        # A run ends where the dtype changes, because one draw has one dtype.
        if not runs or size > room or wide(leaf.dtype) != wide(runs[-1][0].dtype):
            runs.append([])
            room = _TOGETHER
        runs[-1].append(leaf)
        room -= size
    return runs
