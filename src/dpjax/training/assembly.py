# SPDX-License-Identifier: Apache-2.0
"""From a recipe to an `Algorithm`: the ledger admits, then the steps run."""

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
from dpjax.clipping.shards import refuse_explicit
from dpjax.data import Stream
from dpjax.data.arrays import arrays
from dpjax.gradients.loss_checks import check_loss, check_params
from dpjax.gradients.traced import Traced
from dpjax.noise.link import first_memory
from dpjax.training._keys import first_keys, supplied
from dpjax.training.checks import check_state, check_untraced, warn_of_batch_norm, warn_of_constants
from dpjax.training.in_memory import InMemory
from dpjax.training.info import Seen, mean_info, warn_of_unscored
from dpjax.training.recipe import Recipe, bound_to, example_of, home_of
from dpjax.training.streaming import Streamed
from dpjax.types import Algorithm, Key, PyTree, State


def assemble(
    recipe: Recipe,
    data: PyTree,
    identity: Mapping[str, Any],
    *,
    shared: PyTree = None,
    budget: ledger.Budget | None = None,
    info: Callable[[Seen], Any] = mean_info,
) -> Algorithm:
    """The algorithm of a recipe; ``identity`` tells the run from others, beside mechanism and data.

    ``shared`` are arrays that ``recipe.loss`` takes after the example: a closure would copy them
    into the program as constants.
    """
    name, mechanism = recipe.name, recipe.mechanism
    if budget is not None:
        hint = "Write dpjax.ledger.Budget(epsilon=..., delta=...)."
        checks.instance(name, "budget", budget, ledger.Budget, hint)
    size = checks.whole_or_none(name, "microbatch_size", recipe.microbatch_size)
    its = _Assembly(recipe._replace(microbatch_size=size), data, identity, shared, budget, info)
    return Algorithm(its.init, its.step, its.run, mechanism, its.identity, its.released, budget)


@dataclasses.dataclass(eq=False, repr=False)
class _Assembly:
    """The functions of an `Algorithm`; ``facts`` is the ``identity`` of `assemble`."""

    recipe: Recipe
    data: PyTree
    facts: Mapping[str, Any]
    shared: PyTree
    budget: ledger.Budget | None
    info: Callable[[Seen], Any]

    def __post_init__(self) -> None:
        recipe, data, shared = self.recipe, self.data, self.shared
        self.name, self.mechanism, self.mesh = recipe.name, recipe.mechanism, recipe.mesh
        self.stream = isinstance(data, Stream)
        # Shapes alone: nothing is read from a stream before the first step but its first row.
        self.row = data.row if self.stream else trees.one_row(jax.eval_shape(lambda x: x, data))
        self.with_shared = bound_to(recipe, shared)
        self.home = home_of(self.with_shared, self.row)
        self.steps = (
            Streamed(recipe, data, shared)
            if self.stream
            else InMemory(recipe, data, self.home, shared)
        )
        self.warned = False

    def init(self, params: PyTree, key: Key | None = None) -> State:
        """The first state, on the devices of the run."""
        name, shared = self.name, self.shared
        check_untraced(f"{name}: init", (key, params))
        self.warned = False
        with meshes.in_force(self.mesh):
            params = checked_params(name, params, key)
            if self.mesh is not None:
                params = meshes.placed(params, self.mesh)
            elif not self.stream:
                refuse_explicit(name, "data", self.data)
            loss = Traced(self.with_shared.loss)
            program = check_loss(loss, params, example_of(self.recipe, self.row), name)
            warn_of_batch_norm(name, params)
            sampler = self.mechanism.sampling
            warn_of_constants(name, program, shared, sampler.rows or sampler.examples)
            home = self.home(params)
            if home is not None:
                params = meshes.placed(params, home)
            # Index i is one example in all processes, and split parameters cannot be sent.
            mechanism = self.mechanism
            processes.require_equal(
                name,
                lambda: {
                    "the data": self.content,
                    "the parameters": trees.fingerprint(params),
                    "the mechanism": f"{mechanism.accounted} {mechanism.multipliers.tolist()}",
                    "the budget": repr(self.budget),
                },
            )
            return _first_state(self.recipe, key, params, home)

    def step(self, state: State) -> tuple[State, Any]:
        """One step. It keeps the caller's state usable, for notebooks; `run` donates it."""
        check_state(f"{self.name}: step", state)
        state, infos = self.run(trees.copy(state), 1)
        return state, jax.tree.map(lambda x: x[0], infos)

    def run(self, state: State, count: int) -> tuple[State, Any]:
        """Several steps in one dispatch: the ledger admits them, then they run."""
        check_state(f"{self.name}: run", state)
        count = checks.whole(f"{self.name}: run", "count", count)
        with meshes.in_force(self.mesh):
            # `Checkpoints` store zeros, and noise of a known key would be public.
            if not supplied(state) and not np.any(trees.on_host(state.noise_key)):
                raise ValueError(
                    f"{self.name}: the noise key of this state is not set, as in a checkpoint. "
                    "dpjax.noise.renew(state) sets one."
                )
            # Before the steps run: a crash during a step leaves it counted.
            spent = ledger.admit(state.ledger, self.mechanism, self.budget, steps=count)
            # Moved if it is of another mesh, or of files.
            home, bare = self.home(state.params), state._replace(ledger=None)
            bare = bare if home is None else meshes.placed(bare, home)
            after, seen = self.steps.run(bare, count)
            self.warned = self.warned or warn_of_unscored(self.name, seen)
            return after._replace(ledger=spent), self.info(seen)

    @functools.cached_property
    def content(self) -> str:
        """A hash of the rows in their order; made once, as it reads all of them."""
        alone = self.shared is None or self.recipe.frozen
        everything = self.data if alone else (self.data, self.shared)
        return self.data.fingerprint if self.stream else trees.fingerprint(everything)

    def identity(self, state: State) -> dict[str, Any]:
        """What the run is, in JSON types; see `Algorithm`."""
        identity = {
            **self.facts,
            **self.mechanism.identity,
            "examples": self.mechanism.sampling.examples,
            "row": _kinds(self.row),
        }
        if self.recipe.frozen:  # by shapes: a checkpoint does not hold them
            identity["frozen"] = _kinds(self.shared)
        # Permuted rows would put an example into two batches of an epoch.
        independent = self.mechanism.sampling.independent
        return identity if independent else {**identity, "rows": self.content}

    def released(self, state: State) -> dict[str, Any]:
        """The bounds of a state, where they are adapted."""
        if self.mechanism.adaptive is None:
            return {}
        return {"bound": float(state.bound_scale) * np.array(self.mechanism.clipping.bounds)}


def _kinds(tree: PyTree) -> dict[str, str]:
    """The dtype and shape of each leaf, by its name."""
    leaves = zip(trees.leaf_names(tree), jax.tree.leaves(tree), strict=True)
    return {name or "array": f"{x.dtype}{list(x.shape)}" for name, x in leaves}


def checked_params(name: str, params: PyTree, key: Key | None) -> PyTree:
    """The parameters as arrays."""
    if checks.is_typed_key(params):
        raise TypeError(f"{name}: init was given a key as parameters. Write init(params, key=key).")
    if key is not None:
        checks.key(f"{name}: init", key)
    params = arrays(params, f"{name}: init(params)")
    check_params(f"{name}: init(params)", params)
    return params


def _first_state(recipe: Recipe, key: Key | None, params: PyTree, mesh: Mesh | None) -> State:
    memory = first_memory(recipe.mechanism.noise, params)
    if mesh is not None and jax.tree.leaves(memory):
        memory = meshes.placed_rows(memory, params, mesh)
    draws, noise_key = first_keys(key)
    bins = recipe.mechanism.sampling.bins
    epoch_key = None if bins is None else bins.key(noise_key, 0)
    state = State(
        params=params,
        optimizer=recipe.optimizer.init(trees.widened(params)),
        bound_scale=jnp.ones((), jnp.float32),
        key=draws,
        noise_key=noise_key,
        step=jnp.zeros((), jnp.int32),
        ledger=None,
        memory=memory,
        epoch_key=epoch_key,
    )
    state = state if mesh is None else meshes.placed(state, mesh)
    # No two leaves share a buffer, nor one with the caller: `run` donates them.
    return trees.copy(state._replace(ledger=ledger.empty(supplied=key is not None)))
