# SPDX-License-Identifier: Apache-2.0
"""`clipped_grad`: checks its arguments, picks an engine, and returns the clipped sum."""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool

from dpjax import checks, meshes, trees
from dpjax._arrays import arrays
from dpjax.clipping.application import real_rows
from dpjax.gradients._bookkeeping.ghost import by_patches
from dpjax.gradients._estimated_norms.jl import projected
from dpjax.gradients._layout import Request, run_laid_out
from dpjax.gradients.batching import BoundEngine, Engine, Rows
from dpjax.gradients.engines import ENGINES, named
from dpjax.gradients.nan_isolation import isolated
from dpjax.gradients.traced import Traced
from dpjax.types import ClippedSum, Clipping, Key, LossFn, PyTree


def clipped_grad(
    loss: LossFn,
    rule: Clipping,
    engine: str = "auto",
    microbatch_size: int | None = None,
    has_aux: bool = False,
    devices: int | Mesh | None = None,
) -> Callable[..., ClippedSum]:
    r"""The clipped sum of the gradients of a loss, over a batch.

    $$ \sum_i \mathrm{mask}_i \, w_i \, f_i \odot \nabla_\theta\, \ell(\theta, x_i) $$

    Here example $i$ has a mask of 0 or 1, weights $w_i$ in [0, 1], and the factors $f_i$ by which
    the rule scales its gradient: one weight and one factor for each group of leaves.

    Args:
      loss: ``loss(params, example) -> scalar``, a pure function of *one* example: the leaves
        of ``batch`` without their leading axis. With ``frozen``: ``loss(params, example, frozen)``.
      rule: A `dpjax.clipping` rule.
      engine: Like ``microbatch_size`` and ``devices``, it changes only the speed. ``"ghost"``, also
        ``"auto"``: book-keeping, without per-example gradients. ``"scan"``: per-example gradients,
        vectorised in microbatches. ``"vmap"``: the same, with the whole batch as one by default.
      microbatch_size: The number of examples that are differentiated together, at most 1,024; by
        default as many as fit, or all with ``"vmap"``.
      has_aux: Whether the loss returns ``(scalar, aux)``.
      devices: How many of this process's devices share the batch, or a mesh, whose axes other than
        ``model`` split it. By default all host devices (``jax_num_cpu_devices``) if the batch
        takes several microbatches, else one. Arrays that `jax.device_put` committed to a device
        stay there, unless ``devices`` is given; in your own `jax.jit` this is not seen: give 1.

    Returns:
      A function of ``(params, batch, mask=None, weights=None, key=None, start=None, frozen=None)``
      that returns a `ClippedSum`.

      * ``weights`` ``[batch]`` or ``[batch, groups]`` multiply the factors.
      * ``key`` is only for `dpjax.clipping.jl`, which draws its directions from it: a fresh key for
        each step, one key for all parts of a batch.
      * ``start`` is the `ClippedSum` of other examples of the same step, by an equal rule, to which
        this one is added. A loop begins with `dpjax.clipping.empty_sum`.
      * ``frozen`` are public weights that are not trained, in any dtype. A loss that closes over
        them, inside ``jax.jit``, makes them constants of the program.

    Sensitivity:
      ``rule.sensitivity``, if the loss of an example sees no other example, and if each weight
      depends on its own example and on no other private value.

    | batch | result |
    |---|---|
    | no examples, or all masked | zeros |
    | a weight above 1, below 0, or NaN | taken as 1, 0 and 0 |
    | an example with a NaN or infinite gradient | contributes exactly 0 |
    | bfloat16 or float16 parameters | norms and sums are float32 |

    Example:
      >>> import dpjax
      >>> def loss(w, x):
      ...     return 0.5 * jnp.sum((w - x) ** 2)
      >>> clipped = clipped_grad(loss, dpjax.clipping.flat(bound=2.5))
      >>> clipped(jnp.array([2.0]), jnp.array([[1.0], [4.0], [7.0]])).value
      Array([-3.5], dtype=float32)
    """
    checks.instance("clipped_grad", "rule", rule, Clipping, "Such as dpjax.clipping.flat(1.0).")
    engine = named("clipped_grad", engine)
    microbatch_size = checks.whole_or_none("clipped_grad", "microbatch_size", microbatch_size)
    if not isinstance(devices, Mesh):
        devices = checks.whole_or_none("clipped_grad", "devices", devices)

    def clipped(
        params: PyTree,
        batch: PyTree,
        mask: Any = None,
        weights: Any = None,
        key: Key = None,
        start: PyTree = None,
        frozen: PyTree = None,
    ) -> ClippedSum:
        params = _with_arrays(params)
        trees.check_params("clipped_grad", params)
        params = jax.tree.map(jnp.asarray, params)  # the check has refused what is not an array
        batch = arrays(batch, "clipped_grad: batch")
        size = trees.leading_size(batch)
        # A `jax.shard_map` with check_vma=True sums gradients over devices before they are clipped,
        # and most models do not run on a mesh of explicit axes.
        meshes.refuse_tracking("clipped_grad")
        meshes.refuse_explicit("clipped_grad", "data", batch)
        meshes.refuse_explicit("clipped_grad", "parameters", params)
        # `real` is False for padding. The mask is checked before the loss runs, because its error
        # for a mask [batch, rows of a person] is clearer.
        real = real_rows("clipped_grad", mask, size)
        traced = Traced(loss, has_aux)
        # `check` is called for its errors. It also returns the loss's constants, for training.
        traced.with_frozen(frozen).check(params, trees.one_row(batch), "clipped_grad")
        # Every engine returns zeros for no examples, so the simplest one runs.
        name = "vmap" if size == 0 else engine
        # None leaves the choice to the layout; "vmap" takes the whole batch by default.
        examples_together = microbatch_size
        if name == "vmap":
            examples_together = microbatch_size or size
        request = Request(size, name, examples_together, devices)
        # The size of the partition is the number of groups of leaves.
        rows = Rows(batch, real, _limited_weights(weights, size, rule.partition.size))
        start_value = _start_value(start, rule, params)

        # All arrays are arguments, because `run_laid_out` may move them to other devices.
        def engine_of(key: Key) -> BoundEngine:
            run = _engine(name, rule, key)

            def run_for_loss(model: PyTree, rows: Rows, start_value: PyTree) -> ClippedSum:
                params, frozen = model
                return run(traced.with_frozen(frozen), rule, params, rows, start_value)

            return run_for_loss

        total = run_laid_out(request, engine_of, traced, params, rows, start_value, key, frozen)
        return total._replace(rule=rule.limits(params))  # engines leave it out

    return clipped


def _with_arrays(params: PyTree) -> PyTree:
    """Parameters with arrays for Python's numbers; `check_params` refuses other objects by name."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, Number) else x, params)


def _start_value(start: Any, rule: Clipping, params: PyTree) -> PyTree:
    """The tree to which a clipped sum is added: the value of ``start``, or zeros."""
    if start is None:
        # Sums are float32 or wider: a narrower sum loses the gradient of one example.
        return trees.zeros_wide(params)
    if not isinstance(start, ClippedSum) or start.rule != rule.limits(params):
        raise ValueError(
            "clipped_grad(start=...): expected a ClippedSum of this rule. Begin with "
            "dpjax.clipping.empty_sum(rule, params)."
        )
    return start.value


def clipped_sum(
    call: str,
    loss: LossFn,
    rule: Clipping,
    engine: str,
    params: PyTree,
    rows: PyTree,
    mask: Bool[Array, " size"],
    weights: Any,
    key: Key,
    start: PyTree,
) -> ClippedSum:
    """The clipped sum of one microbatch: `clipped_grad` without its layout, in a trace."""
    meshes.refuse_tracking(call)
    limited = _limited_weights(weights, mask.shape[0], rule.partition.size)
    run = _engine(named(call, engine), rule, key)
    traced = Traced(loss)
    # Checked here, where the loss is mapped over examples, so every path to a step is checked.
    traced.check(params, trees.one_row(rows), call)
    return run(traced, rule, params, Rows(rows, mask, limited), start)


def _engine(name: str, rule: Clipping, key: Key) -> Engine:
    """The engine; or the estimator of norms, which changes the guarantee and is not an engine."""
    if rule.projections is None:
        return ENGINES[name]
    if key is None:
        raise ValueError(
            "clipped_grad: estimated norms need a key, a fresh one at every step: "
            "clipped(params, batch, key=key)."
        )
    return isolated(functools.partial(projected, key=key), by_patches)


def _limited_weights(weights: Any, size: int, groups: int) -> Array:
    """Weights ``[batch, groups]`` in [0, 1], because larger ones undo the clipping."""
    if weights is None:
        return jnp.ones((size, groups), jnp.float32)
    weights = jnp.asarray(weights, trees.wide(jnp.result_type(float)))
    rows = weights if weights.ndim == 2 else weights[:, None]
    # A NaN compares False and becomes 0.
    limited = jnp.where(rows > 0, jnp.minimum(rows, 1), 0)
    return jnp.broadcast_to(limited, (size, groups))
