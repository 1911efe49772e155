# SPDX-License-Identifier: Apache-2.0
"""The recipe of a run's steps, and what follows from it by shapes.

`dpjax.dpsgd` and `dpjax.federated.fedavg` write a recipe. `dpjax.training.step` runs it, with data
in memory or from a stream.
"""

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
from dpjax.gradients import Layout, layout
from dpjax.gradients.nan_isolation import map_rows
from dpjax.mechanism import Mechanism
from dpjax.schedules import Planned
from dpjax.types import Key, LossFn, PyTree, State

Entry = Callable[[Key, Int[Array, ""]], PyTree]
"""``entry(key, step)``: one more leaf of every example of a step."""

Home = Callable[[PyTree], Mesh | None]
"""From parameters to the mesh of their run; None if the run has one device."""


class Recipe(NamedTuple):
    """The work of every step of a run: most arguments of `dpjax.dpsgd`, and three more."""

    name: str
    """How errors name the algorithm."""
    loss: LossFn
    optimizer: optax.GradientTransformation
    mechanism: Mechanism
    engine: str = "auto"
    entry: Entry | None = None
    """A step appends its value to every example; `per_step` of dpsgd."""
    bound_scales: Planned | None = None
    """The factor on the rule's bounds at each planned step: `bound_schedule` of dpsgd."""
    weights: Callable[[Int[Array, ""], PyTree, PyTree], Array] | None = None
    microbatch_size: int | None = None
    sizes: Callable[[PyTree], Int[Array, " size"]] | None = None
    """The number of examples of each row, where a row is a client. Rows of 0 are masked."""
    mesh: Mesh | None = None
    """The devices that the user chose, if any; `home_of` returns those on which the run lies."""
    frozen: bool = False
    """Whether the shared arrays are public weights. Otherwise they are data."""

    @property
    def rescales(self) -> bool:
        """Whether the rule's bounds change with the step."""
        return self.bound_scales is not None or self.mechanism.adaptive is not None

    def bound_scale(self, state: State) -> Any:
        """The factor on the rule's bounds, and on the noise with them, at this step."""
        if self.bound_scales is not None:
            return self.bound_scales(state.step)
        if self.mechanism.adaptive is not None:
            return state.bound_scale
        return 1.0


def bound_to(recipe: Recipe, shared: PyTree) -> Recipe:
    """The recipe with the shared arrays in its loss."""
    if shared is None:
        return recipe

    def loss(params: PyTree, example: PyTree) -> Any:
        return recipe.loss(params, example, shared)

    return recipe._replace(loss=loss)


def held_on(recipe: Recipe, shared: PyTree, mesh: Mesh | None) -> PyTree:
    """The shared arrays on the devices of a run. Weights may be split, data are whole on each."""
    if recipe.frozen and mesh is not None:
        return meshes.placed(shared, mesh)
    return meshes.whole(shared, mesh)


def extra_arguments(optimizer: optax.GradientTransformation, bound_scale: Any) -> dict[str, Any]:
    """The arguments of an update in addition to gradients, state and parameters."""
    # The signature decides: some optimizers refuse extra arguments that they do not know.
    for parameter in inspect.signature(optimizer.update).parameters.values():
        if parameter.name == "bound_scale" or parameter.kind is parameter.VAR_KEYWORD:
            return {"bound_scale": bound_scale}
    return {}


def layout_of(recipe: Recipe, params: PyTree, row: PyTree) -> Layout:
    """The microbatch size and the devices of a run, which follow from shapes."""
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
    """The function from parameters to the mesh of the run, for data with rows like ``row``."""

    # Shapes and dtypes decide, so they are the key of the cache: parameters cannot be hashed.
    @functools.cache
    def mesh_of(structure: Any, kinds: tuple[Any, ...]) -> Mesh | None:
        # The recipe has a mesh if the user chose one or there are several processes. Otherwise the
        # layout chooses, which traces the loss. On a single device its choice is known: none, as in
        # the recipe.
        if recipe.mesh is not None or jax.local_device_count() == 1:
            return recipe.mesh
        shapes = structure.unflatten(jax.ShapeDtypeStruct(*kind) for kind in kinds)
        return layout_of(recipe, shapes, row).mesh

    def home(params: PyTree) -> Mesh | None:
        leaves, structure = jax.tree.flatten(params)
        kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        return mesh_of(structure, kinds)

    return home


def reach_of(recipe: Recipe, params: PyTree) -> list[float]:
    """An upper limit of each leaf's coordinates in the clipped sum of a usual draw."""
    rule = recipe.mechanism.clipping
    # Twice a size that nearly every draw stays below. A larger draw is only rounded more coarsely;
    # see `Layout.join`.
    examples = 2 * recipe.mechanism.sampling.usual_size
    return [examples * rule.bounds[group] for group in rule.partition.assign(params)]


def example_of(recipe: Recipe, row: PyTree) -> PyTree:
    """Shapes of the example that the loss receives, from the shapes of a row of the data.

    The example is the row, with the value of ``recipe.entry`` as its last leaf, if there is one. If
    people are drawn, it is a pair: ``most_rows`` such rows, and the mask of the drawn ones.
    """
    # Entries take a key. This one is of the kind that `init` draws: threefry, whatever the default
    # generator of JAX is.
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    most_rows = recipe.mechanism.sampling.most_rows
    step = jnp.int32(0)

    def example(key: Key, row: PyTree) -> PyTree:
        if most_rows is None:
            # One row has no leading axis, and its entry has none either.
            return with_entry(recipe.entry, key, step, row, ())
        rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (most_rows, *x.shape)), row)
        rows = with_entry(recipe.entry, key, step, rows, (most_rows,))
        return rows, jnp.ones(most_rows, bool)

    return jax.eval_shape(example, key, row)


def with_entry(
    entry: Entry | None, key: Key, step: Int[Array, ""], rows: PyTree, size: tuple[int, ...]
) -> PyTree:
    """The rows, each with the entry of the step as its last leaf, if the recipe has an entry."""
    if entry is None:
        return rows
    # The entry reads only the step (and, for clients, the root key), so it costs no privacy.
    return trees.with_last(rows, entry(key, step), size)


def weights_of(recipe: Recipe, state: State, examples: PyTree) -> Float[Array, " size"] | None:
    """The weight of each example."""
    if recipe.weights is None:
        return None
    weight = functools.partial(recipe.weights, state.step, state.params)
    # A weight may read only its own example. With a mean over the batch, one example that leaves
    # moves the contributions of all others.
    return map_rows(weight, examples, f"{recipe.name}: weights")
