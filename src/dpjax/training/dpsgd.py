# SPDX-License-Identifier: Apache-2.0
"""DP-SGD, for any loss and any Optax optimizer.

`dpsgd` checks its arguments, `assemble` makes an `Algorithm` of them: the ledger admits, then the
steps run. What a step does stands in `training.step`.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from dpjax import checks, ledger, meshes, processes, schedules, trees
from dpjax._foreign import arrays
from dpjax._jaxpr import fingerprint
from dpjax.data import Stream
from dpjax.gradients._bookkeeping.trace import Traced
from dpjax.gradients.clipped_grad import check_rule, checked_size
from dpjax.gradients.loss_checks import check_loss, check_params
from dpjax.gradients.sharding_checks import refuse_explicit
from dpjax.mechanism import Mechanism
from dpjax.mechanism.check_sampler import check_draw
from dpjax.noise.link import start
from dpjax.noise.seals import require_one_release
from dpjax.training import environment
from dpjax.training.checks import (
    check_kinds,
    check_optimizer,
    check_same_optimizer,
    check_schedule,
    check_state,
    check_step,
    checked_data,
    tell_of_batch_norm,
    tell_of_constants,
    tell_of_idle,
)
from dpjax.training.in_memory import in_memory
from dpjax.training.info import Sums, mean_info, tell_of_unscored
from dpjax.training.recipe import (
    Recipe,
    bound_to,
    example_of,
    functions_of,
    layout_of,
    mesh_of,
)
from dpjax.training.streaming import streamed
from dpjax.types import Algorithm, Key, LossFn, PyTree, Schedule, State


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
) -> Algorithm:
    """Differentially private stochastic gradient descent.

    Args:
      loss: ``loss(params, example) -> scalar`` for one example.
      optimizer: Any Optax optimizer; it receives private mean gradients.
      mechanism: The mechanism that runs and is accounted.
      data: A tree of arrays with a leading axis of ``mechanism.sampling.examples``, which
        `dpsgd` puts on the device; or a `dpjax.data.Stream`, which reads the rows of each draw.
        Tensors and data frames that NumPy can read are arrays too.
      engine: How the clipped sum is computed; see `dpjax.clipped_grad`. Speed only.
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

    Returns:
      An `Algorithm`: ``init(key, params) -> state``, ``step(state) -> (state, info)``.
      ``step`` is compiled inside. Do not ``jit`` it: the ledger checks every step on the host.
      ``run(state, count)`` takes several steps in one dispatch and *donates* the buffers of the
      state that it receives.

    Privacy:
      ``state.params`` after n steps are private with ``ledger.epsilon`` of these steps.
      ``per_step`` costs nothing: it reads the number of the step, which is public, and clipping
      bounds each example's gradient whatever the loss computes from it.
      ``bound_schedule`` costs nothing: multipliers are relative to the bound. Correlated noise of
      earlier steps, scaled to other bounds, then cancels less; the guarantee is the same.
      ``weights`` cost nothing: a weight follows from its own example and from released
      parameters, and shortens a clipped gradient; the divisor of the sum stays the same.
      An adapted bound costs its count, which is part of the mechanism's noise multiplier.
      **A key is for one run.** Two runs with one key, of a sweep for example, have the same draws
      and the same noise: the difference of what they release has no noise. Another sum for a step
      of a key is refused if that step ran in this process, or in the folder that `dpjax.fit`
      resumes. Other runs are not seen, and keys of seeds below 2^32 are exempt.
      Repeating the same run is safe, because it releases nothing new.

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
      >>> state = algorithm.init(dpjax.noise.secret_key(), jnp.zeros(3))
      >>> state, info = algorithm.step(state)
      >>> state.ledger.steps
      1

      A loss that depends on the epoch, here of 10 steps, as `dpjax.losses.composite` does:

      >>> loss = lambda w, example: (1 + example[1]) * jnp.sum((w - example[0]) ** 2)
      >>> data = (jnp.ones((100, 3)),)
      >>> algorithm = dpsgd(loss, optax.sgd(0.1), mechanism, data, per_step=lambda t: t // 10)

      Examples of low loss first, the others later in training:

      >>> easy = lambda t, w, example: jax.nn.sigmoid(t - jnp.sum((w - example[0]) ** 2))
      >>> algorithm = dpsgd(
      ...     lambda w, example: jnp.sum((w - example[0]) ** 2),
      ...     optax.sgd(0.1),
      ...     mechanism,
      ...     data,
      ...     weights=easy,
      ... )
    """
    check_kinds(loss, optimizer, mechanism, engine, budget)
    check_schedule(bound_schedule, mechanism)
    data = checked_data(data, mechanism, per_step)
    entry = None if per_step is None else (lambda key, step: per_step(step))
    recipe = Recipe(
        loss=loss,
        optimizer=optimizer,
        mechanism=mechanism,
        engine=engine,
        entry=entry,
        bound_schedule=bound_schedule,
        weights=weights,
        microbatch_size=microbatch_size,
        mesh=meshes.of(mesh),
    )
    # A function cannot be compared with the one of a resumed run; the table of its values can.
    scales = schedules.values(bound_schedule, mechanism.steps) if bound_schedule else None
    identity = {
        "algorithm": "dpsgd",
        "bound schedule": scales if scales is None else trees.fingerprint(scales),
    }
    return assemble(recipe, data, identity, budget=budget)


def assemble(
    recipe: Recipe,
    data: PyTree,
    identity: Mapping[str, Any],
    *,
    name: str = "dpsgd",
    shared: PyTree = None,
    budget: ledger.Budget | None = None,
    info: Callable[[Sums], Any] = mean_info,
) -> Algorithm:
    """The algorithm of a recipe: what `dpsgd` and the federated algorithms have in common.

    Args:
      recipe: What every step does.
      data: A tree of arrays with one row per example (or per client), or a `Stream`.
      identity: What else tells the run from others, beside mechanism and data.
      name: How errors call it.
      shared: Arrays that ``recipe.loss`` takes before the parameters; see `in_memory`.
      budget: What no step may pass.
      info: From the sums of steps to what the observer sees.
    """
    mechanism, mesh = recipe.mechanism, recipe.mesh
    check_draw(name, mechanism.sampling)
    size = checked_size(name, "microbatch_size", recipe.microbatch_size)
    recipe = recipe._replace(microbatch_size=size)
    check_rule(mechanism.clipping)
    stream = isinstance(data, Stream)
    # Shapes alone: nothing is read from a stream before the first step but its first row.
    row = data.row if stream else trees.one_row(jax.eval_shape(lambda x: x, data))

    @functools.cache
    def mesh_for(structure: Any, kinds: tuple[Any, ...]) -> Mesh | None:
        shapes = structure.unflatten(jax.ShapeDtypeStruct(*kind) for kind in kinds)
        return mesh_of(bound_to(recipe, shared), shapes, row)

    def where(params: PyTree) -> Mesh | None:
        leaves, structure = jax.tree.flatten(params)
        return mesh_for(structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))

    def placed(state: State) -> State:
        # The state of another mesh, or of files, is moved; on this mesh it stays as it is.
        home = where(state.params)
        return state if home is None else meshes.placed(state, home)

    steps = streamed(recipe, data) if stream else in_memory(recipe, data, where, shared)
    # What happens once a run, and happened already, by the key of the run.
    once: dict[bytes, set[str]] = collections.defaultdict(set)

    @meshes.in_force(mesh)
    def init(key: Key, params: PyTree) -> State:
        checks.key(f"{name}: init", key)
        params = arrays(params, f"{name}: init(params)")
        check_params(f"{name}: init(key, params)", params)
        if mesh is not None:
            params = meshes.placed(params, mesh)
        elif not stream:
            refuse_explicit(name, data)
        _read_loss(name, bound_to(recipe, shared), params, row, tell=shared is None)
        home = where(params)
        if home is None:
            meshes.committed(name, parameters=params, key=key, data=data)
        else:
            params = meshes.placed(params, home)
        once.pop(trees.on_host(key).tobytes(), None)  # a run that begins again
        return _first_state(name, recipe, key, params, home)

    def run(state: State, count: int) -> tuple[State, Any]:
        check_state(name, state)
        ledger.require_untraced(state, name)
        count = checks.whole(f"{name}: run", "count", count)
        with meshes.in_force(mesh):
            return dispatch(state, count)

    @functools.lru_cache(maxsize=4)
    def drawn_by(generator: Any, **settings: Any) -> str:
        del settings  # the draw follows from them too
        return environment.drawn(mechanism.sampling, generator)

    def dispatch(state: State, count: int) -> tuple[State, Any]:
        key, first = trees.on_host(state.key), int(state.step)
        happened = once[key.tobytes()]
        # First of all: below, a process that differs would be refused alone, and the others wait.
        plan = functools.partial(ledger.terms, mechanism, budget)
        processes.require_agreement(name, lambda: _facts_of_dispatch(state, count) | plan())
        # The ledger records the steps before they run: a crash during a step leaves it counted.
        drawn = drawn_by(jax.random.key_impl(state.key), **environment.settings())
        begun = ledger.keyed(state.ledger, state.key, name, drawn)
        spent = ledger.admit(begun, mechanism, budget, steps=count)
        check_step(name, state)
        # Each process has a set of its own, and all of them must compare the same facts.
        if processes.any_process("agreed" not in happened):
            check_same_optimizer(name, recipe.optimizer, state)
            processes.require_agreement(
                name, lambda: _facts_of_run(state, identify(state), mechanism)
            )
            happened.add("agreed")
        state, sums = steps.run(placed(state._replace(ledger=None)), count)
        # Before anything of these steps leaves: each has one release.
        require_one_release(key, first, sums.seal, name)
        if "warned" not in happened and tell_of_unscored(name, sums):
            happened.add("warned")
        return state._replace(ledger=spent), info(sums)

    def step(state: State) -> tuple[State, Any]:
        check_state(name, state)
        # `step` keeps the caller's state usable, for notebooks; `run` donates it.
        state, infos = run(trees.copy(state), 1)
        return state, jax.tree.map(lambda x: x[0], infos)

    @meshes.in_force(mesh)
    def identify(state: State) -> dict[str, Any]:
        everything = data if shared is None else (data, shared)
        content = data.fingerprint if stream else trees.fingerprint(everything)
        bare = placed(state._replace(ledger=None))
        # Loss, optimizer, weights and per_step are functions. Their program can be compared, also
        # with that of a run on another mesh.
        program = {
            "functions": fingerprint(functions_of(recipe, bare, row, shared)),
            "step": [fingerprint(each) for each in steps.programs(bare)],
        }
        layout = layout_of(bound_to(recipe, shared), state.params, row)
        numerics = {
            "engine": recipe.engine,
            "microbatch_size": int(layout.microbatch_size),
            "mesh": {} if layout.mesh is None else dict(layout.mesh.shape),
        }
        return {
            **identity,
            **mechanism.identity,
            "data": content,
            "program": program,
            "numerics": numerics,
        }

    released = functools.partial(_released, mechanism)
    return Algorithm(init, step, mechanism, budget, run, identify, released)


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


def _facts_of_run(
    state: State, identity: Mapping[str, Any], mechanism: Mechanism
) -> dict[str, Any]:
    """What would make the processes of a run drift apart in silence, compared once a run."""
    rest = dict(identity)
    data, program, numerics = (rest.pop(name) for name in ("data", "program", "numerics"))
    drawn = environment.draw_and_noise(mechanism.sampling, state.key, int(state.step))
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


def _released(mechanism: Mechanism, state: State) -> dict[str, Any]:
    """The bounds of a state, where they are adapted."""
    if mechanism.adaptive is None:
        return {}
    return {"bound": float(state.bound_scale) * np.array(mechanism.clipping.bounds)}


def _read_loss(name: str, recipe: Recipe, params: PyTree, row: PyTree, *, tell: bool) -> None:
    """Refuses a loss that is no loss of one example, before anything is compiled.

    Args:
      name: The algorithm.
      recipe: What the run does, bound to its shared arrays.
      params: Parameters.
      row: Shapes of one row of the data.
      tell: Whether constants may be the data; a client's loss closes over all clients.
    """
    example = example_of(recipe, row)
    loss = Traced(lambda params, example: (recipe.loss(params, example), None))
    program = check_loss(loss, params, example, name)
    tell_of_idle(loss.gradient(params, example), params)
    tell_of_batch_norm(params)
    if tell:
        tell_of_constants(program, recipe.mechanism.sampling.examples)


def _first_state(name: str, recipe: Recipe, key: Key, params: PyTree, mesh: Mesh | None) -> State:
    """The state before the first step, on the mesh of the run."""
    optimizer = recipe.optimizer.init(trees.widened(params))
    check_optimizer(recipe.optimizer, optimizer, params)
    seeded = trees.tell_of_seed(key, f"{name}: init(key, params)")
    memory = start(recipe.mechanism.noise, params)
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
