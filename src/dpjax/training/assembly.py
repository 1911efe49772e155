# SPDX-License-Identifier: Apache-2.0
"""From a recipe to an `Algorithm`: the ledger admits, then the steps run.

`dpjax.dpsgd` and the federated algorithms have this in common. Before the first step of a run all
of its processes compare what they run, and no step leaves before its release is recorded.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dpjax import checks, ledger, meshes, processes, trees
from dpjax._foreign import arrays
from dpjax._jaxpr import fingerprint
from dpjax.clipping.shards import refuse_explicit
from dpjax.data import Stream
from dpjax.gradients.clipped_grad import check_rule, checked_size
from dpjax.gradients.loss_checks import (
    check_loss,
    check_params,
    leaks_noted,
    warn_of_one_draw,
)
from dpjax.gradients.traced import Traced
from dpjax.noise.link import first_memory
from dpjax.training import environment
from dpjax.training.checks import (
    check_draw,
    check_optimizer,
    check_same_optimizer,
    check_state,
    check_step,
    warn_of_batch_norm,
    warn_of_constants,
    warn_of_idle,
    warn_of_narrow,
)
from dpjax.training.in_memory import InMemory
from dpjax.training.info import Seen, mean_info, warn_of_unscored
from dpjax.training.recipe import (
    Recipe,
    bound_to,
    example_of,
    functions_of,
    home_of,
    layout_of,
)
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
    """The algorithm of a recipe: what `dpsgd` and the federated algorithms have in common.

    Args:
      recipe: What every step does.
      data: A tree of arrays with one row per example (or per client), or a `Stream`.
      identity: What else tells the run from others, beside mechanism and data.
      shared: Arrays that ``recipe.loss`` takes before the parameters; see `InMemory`.
      budget: What no step may pass.
      info: From the sums of steps to their means, which the observer sees.
    """
    name, mechanism = recipe.name, recipe.mechanism
    if budget is not None:
        hint = "Write dpjax.ledger.Budget(epsilon=..., delta=...): an epsilon needs its delta."
        checks.instance(name, "budget", budget, ledger.Budget, hint)
    check_draw(name, mechanism.sampling)
    size = checked_size(name, "microbatch_size", recipe.microbatch_size)
    check_rule(mechanism.clipping)
    recipe = recipe._replace(microbatch_size=size)
    its = _Assembly(recipe, data, identity, shared, budget, info)
    return Algorithm(its.init, its.step, mechanism, budget, its.run, its.identity, its.released)


@dataclasses.dataclass(eq=False, repr=False)
class _Assembly:
    """The functions of an `Algorithm`, and what they know of its runs.

    It takes the arguments of `assemble`, checked; ``facts`` is its ``identity``.
    """

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
            Streamed(recipe, data) if self.stream else InMemory(recipe, data, self.home, shared)
        )
        # What happens once a run, and happened already, by the key of the run.
        self.once: dict[bytes, set[str]] = collections.defaultdict(set)
        # The draw follows from the settings of JAX too.
        self.drawn_by = functools.lru_cache(maxsize=4)(
            lambda generator, **_: environment.drawn(recipe.mechanism.sampling, generator)
        )

    def init(self, key: Key, params: PyTree) -> State:
        """The first state, on the devices of the run."""
        name = self.name
        ledger.require_untraced((key, params), f"{name}: init")
        with meshes.in_force(self.mesh):
            checks.key(f"{name}: init", key)
            params = arrays(params, f"{name}: init(params)")
            check_params(f"{name}: init(key, params)", params)
            if self.mesh is not None:
                params = meshes.placed(params, self.mesh)
            elif not self.stream:
                refuse_explicit(name, "data", self.data)
            _read_loss(self.with_shared, params, self.row, tell=self.shared is None)
            home = self.home(params)
            if home is None:
                meshes.committed(name, parameters=params, key=key, data=self.data)
            else:
                params = meshes.placed(params, home)
            self.once.pop(trees.on_host(key).tobytes(), None)  # a run that begins again
            return _first_state(self.recipe, key, params, home)

    def step(self, state: State) -> tuple[State, Any]:
        """One step. It keeps the caller's state usable, for notebooks; `run` donates it."""
        check_state(self.name, state)
        ledger.require_untraced(state, f"{self.name}: step")
        state, infos = self.run(trees.copy(state), 1)
        return state, jax.tree.map(lambda x: x[0], infos)

    def run(self, state: State, count: int) -> tuple[State, Any]:
        """Several steps in one dispatch."""
        check_state(self.name, state)
        ledger.require_untraced(state, f"{self.name}: run")
        count = checks.whole(f"{self.name}: run", "count", count)
        with meshes.in_force(self.mesh), leaks_noted():
            return self._dispatch(state, count)

    def _dispatch(self, state: State, count: int) -> tuple[State, Any]:
        name, mechanism, budget = self.name, self.mechanism, self.budget
        key = trees.on_host(state.key)
        happened = self.once[key.tobytes()]
        # First of all: below, a process that differs would be refused alone, and the others wait.
        plan = functools.partial(ledger.terms, mechanism, budget)
        processes.require_agreement(name, lambda: _facts_of_dispatch(state, count) | plan())
        # Each process has a set of its own, and all of them must compare the same facts.
        if processes.any_process("agreed" not in happened):
            check_same_optimizer(name, self.recipe.optimizer, state)
            processes.require_agreement(name, lambda: self._facts_of_run(state))
            happened.add("agreed")
        # The ledger records the steps before they run: a crash during a step leaves it counted.
        drawn = self.drawn_by(jax.random.key_impl(state.key), **environment.settings())
        # Steps that share a draw divide up the rows of one order. With independent steps, also of
        # correlated noise, which then are full batches, an example has no step of its own.
        rows = drawn and f"{drawn} {self.content}"
        begun = ledger.keyed(state.ledger, state.key, name, rows)
        spent = ledger.admit(begun, mechanism, budget, steps=count)
        check_step(name, state)
        state, (seen, _) = self.steps.run(self._at_home(state), count)
        if "warned" not in happened and warn_of_unscored(name, seen):
            happened.add("warned")
        return state._replace(ledger=spent), self.info(seen)

    def _at_home(self, state: State) -> State:
        """What a program takes of a state, moved if it is of another mesh, or of files."""
        home, bare = self.home(state.params), state._replace(ledger=None)
        return bare if home is None else meshes.placed(bare, home)

    @functools.cached_property
    def content(self) -> str:
        """A hash of the rows in their order; made once, as it reads all of them."""
        everything = self.data if self.shared is None else (self.data, self.shared)
        return self.data.fingerprint if self.stream else trees.fingerprint(everything)

    def identity(self, state: State) -> dict[str, Any]:
        """What the run is, in JSON types; see `Algorithm`."""
        with meshes.in_force(self.mesh), leaks_noted():
            return {
                **self.facts,
                **self.mechanism.identity,
                "data": self.content,
                "program": self._program(self._at_home(state)),
                "numerics": self._numerics(state.params),
            }

    def released(self, state: State) -> dict[str, Any]:
        """The bounds of a state, where they are adapted."""
        if self.mechanism.adaptive is None:
            return {}
        return {"bound": float(state.bound_scale) * np.array(self.mechanism.clipping.bounds)}

    def _program(self, state: State) -> dict[str, Any]:
        # Loss, optimizer, weights and per_step are functions. Their program can be compared, also
        # with that of a run on another mesh.
        functions = functions_of(self.recipe, state, self.row, self.shared)
        return {
            "functions": fingerprint(functions),
            "step": [fingerprint(each) for each in self.steps.programs(state)],
        }

    def _numerics(self, params: PyTree) -> dict[str, Any]:
        layout = layout_of(self.with_shared, params, self.row)
        return {
            "engine": self.recipe.engine,
            "microbatch_size": int(layout.microbatch_size),
            "mesh": {} if layout.mesh is None else dict(layout.mesh.shape),
        }

    def _facts_of_run(self, state: State) -> dict[str, Any]:
        """What would make the processes of a run drift apart in silence, compared once a run."""
        rest = self.identity(state)
        data, program, numerics = (rest.pop(name) for name in ("data", "program", "numerics"))
        drawn = environment.draw_and_noise(self.mechanism.sampling, state.key, int(state.step))
        return {
            "the draw and the noise": drawn,
            "the parameters": trees.fingerprint(state.params),
            "the optimizer's state": trees.fingerprint(state.optimizer),
            "the scale of the bounds": trees.fingerprint(state.bound_scale),
            "the memory of the noise": trees.fingerprint(state.memory),
            "the data": data,
            "the program of a step": program,
            **numerics,
            "the mechanism": rest,
        }


def _facts_of_dispatch(state: State, count: int) -> dict[str, Any]:
    """Cheap facts, which processes compare before every dispatch."""
    # A process that went back to an earlier state would add the draw of another step, so one
    # example would count twice in a sum.
    return {
        "the root key": trees.fingerprint(state.key),
        "the step": int(state.step),
        "the number of steps": count,
        "the ledger": trees.fingerprint(state.ledger),
        **environment.numerics(),
    }


def _read_loss(recipe: Recipe, params: PyTree, row: PyTree, *, tell: bool) -> None:
    """Refuses a loss that is no loss of one example, before anything is compiled.

    Args:
      recipe: What the run does, bound to its shared arrays.
      params: Parameters.
      row: Shapes of one row of the data.
      tell: Whether constants may be the data; a client's loss closes over all clients.
    """
    name, example = recipe.name, example_of(recipe, row)
    loss = Traced(recipe.loss)
    program = check_loss(loss, params, example, name)
    warn_of_narrow(name, params)
    warn_of_idle(name, loss.gradient(params, example), params)
    warn_of_batch_norm(name, program.jaxpr, params)
    warn_of_one_draw(name, program.jaxpr)
    if tell:
        warn_of_constants(name, program, recipe.mechanism.sampling.examples)


def _first_state(recipe: Recipe, key: Key, params: PyTree, mesh: Mesh | None) -> State:
    """The state before the first step, on the mesh of the run."""
    optimizer = recipe.optimizer.init(trees.widened(params))
    check_optimizer(recipe, optimizer, params)
    seeded = trees.warn_of_seed(key, f"{recipe.name}: init(key, params)")
    memory = first_memory(recipe.mechanism.noise, params)
    if mesh is not None and jax.tree.leaves(memory):
        memory = meshes.placed_rows(memory, params, mesh)
    state = State(
        params=params,
        optimizer=optimizer,
        bound_scale=jnp.ones((), jnp.float32),
        key=key,
        step=jnp.zeros((), jnp.int32),
        ledger=None,
        memory=memory,
    )
    state = state if mesh is None else meshes.placed(state, mesh)
    # No two leaves share a buffer, nor one with the caller: `run` donates them.
    return trees.copy(state._replace(ledger=ledger.empty(seeded=seeded)))
