# SPDX-License-Identifier: Apache-2.0
"""What every step of a run does, and what follows from it by shapes alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dpjax import meshes, trees
from dpjax.gradients import layout
from dpjax.gradients.batching import Layout
from dpjax.gradients.loss_checks import require_one_example
from dpjax.gradients.nan_isolation import map_rows
from dpjax.mechanism import Mechanism
from dpjax.mechanism.multipliers import Planned
from dpjax.types import Key, LossFn, PyTree, State

Entry = Callable[[Key, Int[Array, ""]], PyTree]
"""``entry(key, step)``, one more leaf of every example of a step."""

Home = Callable[[PyTree], Mesh | None]
"""From parameters to the mesh of their run; None if JAX places it on one device."""


class Recipe(NamedTuple):
    """What every step of a run does: the arguments of `dpjax.dpsgd`, and two more."""

    name: str
    """How errors call the algorithm."""
    loss: LossFn
    optimizer: optax.GradientTransformation
    mechanism: Mechanism
    engine: str = "auto"
    entry: Entry | None = None
    """What the step appends to every example; `per_step` of dpsgd."""
    bound_scales: Planned | None = None
    """The factor on the rule's bounds at each planned step; from `bound_schedule` of dpsgd."""
    weights: Callable[[Int[Array, ""], PyTree, PyTree], Array] | None = None
    microbatch_size: int | None = None
    sizes: Callable[[PyTree], Int[Array, " size"]] | None = None
    """How many examples each row holds, where a row is a client. Rows of 0 are masked."""
    mesh: Mesh | None = None
    """The user's choice of devices, if any; `home_of` has the devices of the run."""
    frozen: bool = False
    """Whether the shared arrays are public weights, and no data."""

    @property
    def rescales(self) -> bool:
        """Whether the rule's bounds change with the step."""
        return self.bound_scales is not None or self.mechanism.adaptive is not None

    def bound_scale(self, state: State) -> Any:
        """The factor on the rule's bounds, and on the noise with them, at this step."""
        if self.bound_scales is not None:
            return self.bound_scales(state.step)
        return state.bound_scale if self.mechanism.adaptive is not None else 1.0


def bound_to(recipe: Recipe, shared: PyTree) -> Recipe:
    """The recipe with the shared arrays in its loss."""
    if shared is None:
        return recipe
    return recipe._replace(loss=lambda params, example: recipe.loss(params, example, shared))


def held_on(recipe: Recipe, shared: PyTree, mesh: Mesh | None) -> PyTree:
    """The shared arrays on the devices of a run: weights may be split, data are whole on each."""
    if recipe.frozen and mesh is not None:
        return meshes.placed(shared, mesh)
    return meshes.whole(shared, mesh)


def extra_arguments(optimizer: optax.GradientTransformation, bound_scale: Any) -> dict[str, Any]:
    """What the update of an optimizer takes beside gradients, state and parameters."""
    # By the signature: some optimizers take extra arguments of their own and refuse all others.
    takes = inspect.signature(optimizer.update).parameters.values()
    named = any(x.name == "bound_scale" or x.kind is x.VAR_KEYWORD for x in takes)
    return {"bound_scale": bound_scale} if named else {}


def layout_of(recipe: Recipe, params: PyTree, row: PyTree) -> Layout:
    """The microbatch and the devices of a run, chosen by shapes alone."""
    return layout(
        recipe.loss,
        params,
        example_of(recipe, row),
        recipe.mechanism.sampling.usual_size,
        recipe.engine,
        microbatch_size=recipe.microbatch_size,
        devices=recipe.mesh,
    )


def home_of(recipe: Recipe, row: PyTree) -> Home:
    """Where a run lies, chosen by shapes alone."""

    @functools.cache
    def of_shapes(structure: Any, kinds: tuple[Any, ...]) -> Mesh | None:
        # Where only one device is, no layout needs to be chosen, which traces the loss.
        if recipe.mesh is not None or jax.local_device_count() == 1:
            return recipe.mesh
        shapes = structure.unflatten(jax.ShapeDtypeStruct(*kind) for kind in kinds)
        return layout_of(recipe, shapes, row).mesh

    def home(params: PyTree) -> Mesh | None:
        leaves, structure = jax.tree.flatten(params)
        return of_shapes(structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))

    return home


def reach_of(recipe: Recipe, params: PyTree) -> list[float]:
    """For each leaf, what no coordinate of the clipped sum of a usual draw exceeds."""
    rule, most = recipe.mechanism.clipping, 2 * recipe.mechanism.sampling.usual_size
    return [most * rule.bounds[group] for group in rule.partition.assign(params)]


def example_of(recipe: Recipe, row: PyTree) -> PyTree:
    """Shapes of the example that the loss receives, from the shapes of a row of the data."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))  # whatever the default
    most = recipe.mechanism.sampling.most_rows

    def example(key: Key, row: PyTree) -> PyTree:
        if most is None:
            return with_entry(recipe.entry, key, jnp.int32(0), row, ())
        rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (most, *x.shape)), row)
        return with_entry(recipe.entry, key, jnp.int32(0), rows, (most,)), jnp.ones(most, bool)

    return jax.eval_shape(example, key, row)


def with_entry(
    entry: Entry | None, key: Key, step: Int[Array, ""], rows: PyTree, size: tuple[int, ...]
) -> PyTree:
    """Rows, with the entry of the step appended to each if there is one."""
    if entry is None:
        return rows
    # It depends on the step alone (and on the root key for clients), so it costs no privacy.
    added = jax.tree.map(jnp.asarray, entry(key, step))
    return (*rows, jax.tree.map(lambda x: jnp.broadcast_to(x, (*size, *x.shape)), added))


def weights_of(recipe: Recipe, state: State, examples: PyTree) -> Float[Array, " size"] | None:
    """The weight of each example."""
    if recipe.weights is None:
        return None
    weight = functools.partial(recipe.weights, state.step, state.params)
    # A weight that took a mean over the batch would move all contributions when one example leaves.
    program = jax.make_jaxpr(weight)(trees.one_row(examples)).jaxpr
    require_one_example(program, f"{recipe.name}: weights")
    return map_rows(weight, examples)
