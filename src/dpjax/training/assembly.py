# SPDX-License-Identifier: Apache-2.0
"""From a recipe to an `Algorithm`: the ledger admits steps, then they run.

Everything that a user calls passes through here. So this is where the arguments are checked, the
devices are chosen, the ledger counts, and secret sums become measurements.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dpjax import checks, ledger, meshes, processes, trees
from dpjax._arrays import arrays
from dpjax._stream import Stream
from dpjax.gradients.traced import Traced
from dpjax.training._in_memory import InMemory
from dpjax.training._keys import first_keys, supplied
from dpjax.training._streaming import Streamed
from dpjax.training.checks import (
    check_batch_norm,
    check_state,
    check_untraced,
    warn_of_constants,
)
from dpjax.training.info import Seen, mean_info, warn_of_unscored
from dpjax.training.recipe import Recipe, bound_to, example_of, home_of
from dpjax.types import Algorithm, Key, LossFn, PyTree, State


def assemble(
    recipe: Recipe,
    data: PyTree,
    identity: Mapping[str, Any],
    *,
    shared: PyTree = None,
    budget: ledger.Budget | None = None,
    info: Callable[[Seen], Any] = mean_info,
    of_one: tuple[LossFn, PyTree] | None = None,
) -> Algorithm:
    """The algorithm of a recipe.

    ``identity`` distinguishes its runs from others, in addition to mechanism and data. ``shared``
    are arrays that ``recipe.loss`` takes after the example. In a closure they become constants of
    the program. ``of_one`` is the loss of one example and the example, if a row holds several.
    """
    name = recipe.name
    if budget is not None:
        hint = "Write dpjax.ledger.Budget(epsilon=..., delta=...)."
        checks.instance(name, "budget", budget, ledger.Budget, hint)
    size = checks.whole_or_none(name, "microbatch_size", recipe.microbatch_size)
    recipe = recipe._replace(microbatch_size=size)
    assembly = _Assembly(recipe, data, identity, shared, budget, info, of_one)
    return Algorithm(
        init=assembly.init,
        step=assembly.step,
        run=assembly.run,
        mechanism=recipe.mechanism,
        identity=assembly.identity,
        released=assembly.released,
        budget=budget,
    )


@dataclasses.dataclass(eq=False, repr=False)
class _Assembly:
    """The functions of an `Algorithm`; ``facts`` is the ``identity`` of `assemble`."""

    recipe: Recipe
    data: PyTree
    facts: Mapping[str, Any]
    shared: PyTree
    budget: ledger.Budget | None
    info: Callable[[Seen], Any]
    of_one: tuple[LossFn, PyTree] | None

    def __post_init__(self) -> None:
        recipe = self.recipe
        self.name = recipe.name
        self.mechanism = recipe.mechanism
        self.warned = False  # of examples without a finite loss
        self.recipe_with_shared = bound_to(recipe, self.shared)
        self.is_stream = isinstance(self.data, Stream)
        # `row` has the shapes of one row of the data. `home` maps parameters to the mesh of the
        # run, or to None for a single device.
        if self.is_stream:
            # Only the first row of a stream is read before the first step, for its shapes.
            self.row = self.data.row
            self.home = home_of(self.recipe_with_shared, self.row)
            self.steps = Streamed(recipe, self.data, self.shared)
        else:
            self.row = trees.one_row(jax.eval_shape(lambda x: x, self.data))
            self.home = home_of(self.recipe_with_shared, self.row)
            self.steps = InMemory(recipe, self.data, self.home, self.shared)

    def init(self, params: PyTree, key: Key | None = None) -> State:
        """The first state, on the devices of the run."""
        name = self.name
        check_untraced(f"{name}: init", (key, params))
        self.warned = False  # a new run warns again
        mesh = self.recipe.mesh
        with meshes.in_force(mesh):
            params = _checked_params(name, params, key)
            # If a row holds several examples, as of a client, the user's loss of one example is
            # checked before the loss of a row, so an error is about the function of the user.
            if self.of_one is not None:
                loss_of_one, example = self.of_one
                Traced(loss_of_one).check(params, example, name)
            # The loss is traced with the shardings of the mesh that the user chose. Without one,
            # data that the user split by explicit axes are refused: most models do not run on them.
            if mesh is not None:
                params = meshes.placed(params, mesh)
            elif not self.is_stream:
                meshes.refuse_explicit(name, "data", self.data)
            self._check_loss(params)
            # `home` returns the mesh of the user again. Without one, the shapes of the parameters
            # decide on which devices the run lies.
            home = self.home(params)
            if home is not None:
                params = meshes.placed(params, home)
            self._compare_processes(params)
            return _first_state(self.recipe, key, params, home)

    def _check_loss(self, params: PyTree) -> None:
        """Traces the loss of one example: refuses what is not a scalar, warns of constants."""
        sampler = self.mechanism.sampling
        example = example_of(self.recipe, self.row)
        constants = Traced(self.recipe_with_shared.loss).check(params, example, self.name)
        check_batch_norm(self.name, params, self.shared)
        # A sampler of persons counts persons as its examples, and their rows apart.
        rows = sampler.rows or sampler.examples
        warn_of_constants(self.name, constants, (params, example), self.shared, rows)

    def _compare_processes(self, params: PyTree) -> None:
        """Raises in all processes if one of them has other data, parameters or settings."""
        # Index i must be the same example in all processes. Split parameters cannot be sent to
        # other processes, so they are compared too.
        mechanism = self.mechanism
        processes.require_equal(
            self.name,
            lambda: {
                "the data": self.content,
                "the parameters": trees.fingerprint(params),
                "the mechanism": f"{mechanism.accounted} {mechanism.multipliers.tolist()}",
                "the budget": repr(self.budget),
            },
        )

    def step(self, state: State) -> tuple[State, Any]:
        """One step, which keeps the given state usable, for notebooks; `run` donates it."""
        check_state(f"{self.name}: step", state)
        after, infos = self.run(trees.copy(state), 1)
        return after, jax.tree.map(lambda x: x[0], infos)

    def run(self, state: State, count: int) -> tuple[State, Any]:
        """Several steps in few dispatches: the ledger admits them, then they run.

        Returns the next state, and the measurements ``self.info`` of the steps, ``[count, ...]``.
        """
        check_state(f"{self.name}: run", state)
        count = checks.whole(f"{self.name}: run", "count", count)
        with meshes.in_force(self.recipe.mesh):
            # A checkpoint holds zeros in place of the noise key, and anybody can compute the noise
            # of zeros. A key of the caller may be zeros too (`jax.random.key(0)`): the ledger
            # records it as supplied, so no secret is claimed.
            if not supplied(state) and not np.any(trees.on_host(state.noise_key)):
                raise ValueError(
                    f"{self.name}: the noise key of this state is not set, as in a checkpoint. "
                    "dpjax.noise.renew(state) sets one."
                )
            # The ledger counts steps before they run, so a step that crashes is counted.
            spent = ledger.admit(state.ledger, self.mechanism, self.budget, steps=count)
            # The ledger stays on the host; the programs take all other fields.
            state = state._replace(ledger=None)
            home = self.home(state.params)
            if home is not None:
                # A state of another mesh or from a checkpoint lies elsewhere.
                state = meshes.placed(state, home)
            after, seen = self.steps.run(state, count)
            if not self.warned:
                self.warned = warn_of_unscored(self.name, seen)
            return after._replace(ledger=spent), self.info(seen)

    @functools.cached_property
    def content(self) -> str:
        """A hash of the rows in their order, computed once because it reads all of them."""
        if self.is_stream:
            return self.data.fingerprint
        if self.shared is None or self.recipe.frozen:
            return trees.fingerprint(self.data)
        # Shared arrays that are not frozen weights are data too, such as the examples of clients.
        return trees.fingerprint((self.data, self.shared))

    def identity(self, state: State) -> dict[str, Any]:
        """The facts that distinguish the run from others, in JSON types; see `Algorithm`."""
        identity = {
            **self.facts,
            **self.mechanism.identity,
            "examples": self.mechanism.sampling.examples,
            "row": _kinds(self.row),
        }
        if self.recipe.frozen:
            # Only shapes: a checkpoint does not hold the weights.
            identity["frozen"] = _kinds(self.shared)
        if not self.mechanism.sampling.independent:
            # If the rows are permuted on resumption, an example can be in two batches of an epoch.
            identity["rows"] = self.content
        return identity

    def released(self, state: State) -> dict[str, Any]:
        """The bounds of a state, if they are adapted."""
        if self.mechanism.adaptive is None:
            return {}
        bounds = np.array(self.mechanism.clipping.bounds)
        return {"bound": float(state.bound_scale) * bounds}


def _kinds(tree: PyTree) -> dict[str, str]:
    """The dtype and shape of each leaf, by its name."""
    leaves = zip(trees.leaf_names(tree), jax.tree.leaves(tree), strict=True)
    return {name or "array": f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves}


def _checked_params(name: str, params: PyTree, key: Key | None) -> PyTree:
    """The parameters as arrays; refuses a key in their place and leaves that are not floats."""
    if checks.is_typed_key(params):
        raise TypeError(f"{name}: init was given a key as parameters. Write init(params, key=key).")
    if key is not None:
        checks.key(f"{name}: init", key)
    params = arrays(params, f"{name}: init(params)")
    trees.check_params(f"{name}: init(params)", params)
    return params


def _first_state(recipe: Recipe, key: Key | None, params: PyTree, mesh: Mesh | None) -> State:
    """The state before the first step, on the devices of a mesh; ``key`` is the supplied one."""
    # Only correlated noise, which has a strategy, has a memory: the noise of earlier steps.
    strategy = recipe.mechanism.noise
    memory = ()
    if strategy is not None:
        memory = strategy.start(trees.zeros_wide(params))
        # Each leaf has one more axis than its parameter, for the remembered steps, along which
        # `placed` below may split it. So it is split here as its parameter is: `placed` keeps
        # arrays that lie on the mesh already.
        if mesh is not None:
            memory = meshes.placed_rows(memory, params, mesh)
    draw_key, noise_key = first_keys(key)
    # Only samplers that assign examples to the bins of an epoch have a key for each epoch.
    bins = recipe.mechanism.sampling.bins
    epoch_key = None
    if bins is not None:
        # The key of each epoch follows from the noise key; this is the epoch that step 0 begins.
        epoch_key = bins.key(noise_key, 0)
    state = State(
        params=params,
        # Widened as the private means are, to float32 at least.
        optimizer=recipe.optimizer.init(trees.widened(params)),
        bound_scale=jnp.ones((), jnp.float32),
        key=draw_key,
        noise_key=noise_key,
        step=jnp.zeros((), jnp.int32),
        ledger=None,  # on the host, so it is set after the other fields are placed
        memory=memory,
        epoch_key=epoch_key,
    )
    if mesh is not None:
        state = meshes.placed(state, mesh)
    # `run` donates the buffers, so no two leaves may share one, nor share one with the caller.
    return trees.copy(state._replace(ledger=ledger.empty(supplied=key is not None)))
