# SPDX-License-Identifier: Apache-2.0
"""DP-SGD, for any loss and any Optax optimizer; `training.step` has the step itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from dpjax import checks, ledger, losses, meshes, trees
from dpjax._arrays import arrays
from dpjax.mechanism import Mechanism
from dpjax.training.assembly import assemble
from dpjax.training.checks import check_kinds, checked_data, positive_plan
from dpjax.training.recipe import Entry, Recipe
from dpjax.types import Algorithm, LossFn, PyTree, Schedule


def dpsgd(
    loss: LossFn,
    optimizer: optax.GradientTransformation,
    mechanism: Mechanism,
    data: PyTree,
    engine: str = "auto",
    *,
    per_step: Callable[[Int[Array, ""]], PyTree] | None = None,
    bound_schedule: Schedule | None = None,
    weights: Callable[[Int[Array, ""], PyTree, PyTree], Array] | None = None,
    microbatch_size: int | None = None,
    budget: ledger.Budget | None = None,
    mesh: Mesh | None = None,
    frozen: PyTree = None,
) -> Algorithm:
    """Differentially private stochastic gradient descent.

    Args:
      loss: ``loss(params, example) -> scalar`` for one example.
      optimizer: Any Optax optimizer; it receives private mean gradients.
      mechanism: The mechanism that runs and is accounted.
      data: A tree of arrays with a leading axis of ``mechanism.sampling.examples``, or of the
        owners of `dpjax.sampling.persons`, which `dpsgd` puts on the device; or a
        `dpjax.data.Stream`, which reads the rows of each draw.
        Tensors and data frames that NumPy can read are arrays too.
      engine: How the clipped sum is computed; see `dpjax.clipped_grad`. Speed only. ``"vmap"``
        takes as many examples at a time as fit, as ``"scan"`` does.
      per_step: For a loss that changes over time. ``per_step(step)`` is appended to every
        example: ``(x, y)`` becomes ``(x, y, per_step(step))``. Steps count from 0 over the whole
        run. It is traced: use arithmetic and ``jnp.where`` rather than ``if``.
      bound_schedule: A positive Optax schedule that multiplies the rule's bounds, and the noise
        with them. For bounds that follow the gradients see ``Mechanism(adaptive=...)``.
      weights: ``weights(step, params, example)``, the share of an example's clipped gradient that
        counts at a step, for a curriculum. Held to [0, 1]. It may read the example, the
        parameters and anything public, and is computed in addition to the gradient.
      microbatch_size: Examples in flight on a device; by default as many as fit. Speed only.
      budget: A `dpjax.ledger.Budget` that no step may pass.
      mesh: The devices of the run, of this process or of several. Its axis ``model`` splits
        parameters and optimizer, all other axes the batch; see `dpjax.meshes`. By default the
        mesh of `jax.set_mesh`, else all devices of all processes, where there are several.
      frozen: Public weights that are not trained, of any dtype; the loss is then
        ``loss(params, example, frozen)``. They are neither constants of the program nor in a
        checkpoint. On a mesh they keep their `PartitionSpec`, or ``model`` splits them.

    Returns:
      An `Algorithm`: ``init(params, key=None) -> state``, ``step(state) -> (state, info)``.
      ``step`` is compiled inside. Do not ``jit`` it: the ledger checks every step on the host.
      ``run(state, count)`` takes several steps in one dispatch and *donates* the buffers of the
      state that it receives.

    Privacy:
      ``state.params`` after n steps are private with ``ledger.epsilon`` of these steps.
      ``per_step`` costs nothing: it reads the number of the step, which is public, and clipping
      bounds each example's gradient whatever the loss computes from it.
      ``bound_schedule`` costs nothing: multipliers are relative to the bound. Correlated noise
      then cancels less.
      ``weights`` cost nothing: a weight follows from its own example and from released
      parameters, and shortens a clipped gradient; the divisor of the sum stays the same.
      An adapted bound costs its count, which is part of the mechanism's noise multiplier.
      Without a key, draws and noise are secret and fresh. **A key that you supply is for one
      run**, which can be repeated: epsilon then holds against those who do not know the key. Two
      runs with one key have the same noise, and the difference of what they release has none.
      A loop of your own carries its state: two steps from one state have the same noise too.

    Example:
      >>> import dpjax
      >>> import jax.numpy as jnp
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.poisson(examples=100, batch_size=10),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=1.0,
      ...     steps=5,
      ... )
      >>> loss = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
      >>> algorithm = dpsgd(loss, optax.sgd(0.1), mechanism, data=jnp.ones((100, 3)))
      >>> state = algorithm.init(jnp.zeros(3))
      >>> state, info = algorithm.step(state)
      >>> state.ledger.steps
      1

      A loss that depends on the epoch, here of 10 steps, as `dpjax.losses.composite` does:

      >>> loss = lambda w, example: (1 + example[1]) * jnp.sum((w - example[0]) ** 2)
      >>> data = (jnp.ones((100, 3)),)
      >>> algorithm = dpsgd(loss, optax.sgd(0.1), mechanism, data, per_step=lambda t: t // 10)

      Examples of low loss first, the others later in training:

      >>> easy = lambda t, w, example: jax.nn.sigmoid(t - jnp.sum((w - example[0]) ** 2))
      >>> loss = lambda w, example: jnp.sum((w - example[0]) ** 2)
      >>> algorithm = dpsgd(loss, optax.sgd(0.1), mechanism, data, weights=easy)
    """
    if mesh is not None:
        hint = "Write dpjax.meshes.parse('data:4,model:2')."
        checks.instance("dpsgd", "mesh", mesh, Mesh, hint)
    recipe = Recipe(
        name="dpsgd",
        loss=loss,
        optimizer=optimizer,
        mechanism=mechanism,
        engine=engine,
        entry=entry_of(per_step),
        weights=weights,
        microbatch_size=microbatch_size,
        mesh=meshes.of(mesh),
        frozen=frozen is not None,
    )
    check_kinds(recipe)
    scales = None
    if bound_schedule is not None:
        if mechanism.adaptive is not None:
            raise ValueError(
                "dpsgd(bound_schedule=...): the mechanism adapts its bounds. Leave one out."
            )
        # One table of factors is checked, runs, and is in the identity of the run: a function that
        # is traced again could return others.
        scales = positive_plan("dpsgd: the factor on bounds", bound_schedule, mechanism.steps)
        recipe = recipe._replace(bound_scales=scales)
    schedule_hash = None
    if scales is not None:
        schedule_hash = trees.fingerprint(scales.values)
    identity = {"algorithm": "dpsgd", "bound schedule": schedule_hash}
    data = checked_data(recipe, data)
    if mechanism.sampling.most_rows is not None:
        # A person is one example, whose loss is the mean over the drawn rows.
        recipe = recipe._replace(loss=losses.of_person(loss))
    frozen = jax.tree.map(jnp.asarray, arrays(frozen, "dpsgd: frozen"))
    algorithm = assemble(recipe, data, identity, shared=frozen, budget=budget)
    if scales is None:
        return algorithm
    # The mechanism has the rule's bounds only, so the statement names the factor on them.
    return dataclasses.replace(algorithm, scaled_by="a bound schedule")


def entry_of(per_step: Callable[[Int[Array, ""]], PyTree] | None) -> Entry | None:
    """The entry of a recipe from ``per_step``: it reads only the step, which is public."""
    if per_step is None:
        return None
    return lambda key, step: per_step(step)
