# SPDX-License-Identifier: Apache-2.0
"""Checks before a run and before a step: arguments, data, optimizer, state.

They read shapes and public numbers, never the values of examples.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from dpjax import checks, clipping, ledger, noise, trees
from dpjax._jaxpr import depends
from dpjax.accounting.event_parts import split
from dpjax.data import Dataset, Stream
from dpjax.data.arrays import arrays, no_arrays
from dpjax.gradients.engines import named
from dpjax.gradients.loss_checks import centres_alone, closed_over
from dpjax.mechanism import Mechanism
from dpjax.mechanism.multipliers import Planned
from dpjax.training.optimizers import DPAdamState
from dpjax.training.recipe import Recipe, extra_arguments
from dpjax.types import PyTree, Sampler, Schedule, State

# Flax names a layer BatchNorm_0; others write batch_norm or bn.
_BATCH_NORM = re.compile(r"batch_?norm|(^|/)bn_?\d*(/|$)", re.IGNORECASE)


def check_kinds(recipe: Recipe) -> None:
    """Refuses arguments of `dpjax.dpsgd` of the wrong kind; usually two were swapped."""
    name, mechanism, loss = recipe.name, recipe.mechanism, recipe.loss
    hint = "Usually arguments were swapped: dpsgd(loss, optimizer, mechanism, data)."
    checks.instance(name, "mechanism", mechanism, Mechanism, hint)
    check_is_optimizer(f"{name}: the optimizer", recipe.optimizer)
    # A Linen module has both methods; a loss object of the user may have one that is called so.
    if not callable(loss) or (hasattr(loss, "apply") and hasattr(loss, "init")):
        raise TypeError(
            f"{name}: the loss is a {type(loss).__name__}; expected a function, loss(params, "
            "example) -> scalar. For a Linen module, dpjax.losses.of(model, "
            "dpjax.losses.cross_entropy) makes one."
        )
    if recipe.weights is not None and not callable(recipe.weights):
        raise TypeError(
            f"{name}: weights is a {type(recipe.weights).__name__}; expected a function, "
            "weights(step, params, example) -> number. Usually a weight for each example was "
            "given: put the weights into the data, and read them there, as in lambda step, params, "
            "example: example[2]."
        )
    named(name, recipe.engine)
    if mechanism.unit != "example":
        raise ValueError(
            f"{name}: the mechanism protects one {mechanism.unit}, and a step draws and clips "
            "single examples. Leave unit= out. dpjax.federated protects a client with all of its "
            "examples; dpjax.accounting.for_groups bounds what example-level training costs it."
        )


def check_is_optimizer(name: str, given: Any) -> None:
    """Refuses what is no Optax optimizer.

    Args:
      name: The function and its argument, as ``dpsgd: the optimizer``.
      given: The argument.
    """
    if not (hasattr(given, "init") and hasattr(given, "update")):
        raise TypeError(
            f"{name} is a {type(given).__name__}; expected an Optax optimizer, such as "
            "optax.sgd(0.1). Usually the learning rate alone was given, the function optax.sgd "
            "without a rate, or arguments were swapped. Of an nnx.Optimizer, give its tx."
        )


def check_optimizer(recipe: Recipe, optimizer_state: Any, params: PyTree) -> None:
    """Refuses an optimizer that adds noise, or needs more than gradients of single steps.

    Args:
      recipe: Its optimizer receives private mean gradients.
      optimizer_state: From the optimizer's ``init``.
      params: Parameters.
    """
    name = f"{recipe.name}: the optimizer"
    _check_public(name, optimizer_state)
    program = update_program(name, recipe.optimizer, optimizer_state, params)
    _check_means(name, program, optimizer_state, params)
    if idle := _zeros(program, params):
        logging.warning(
            "%s never moves %d of %d leaves (%s). Their gradients take a part of the bound all the "
            "same. Usually they are frozen by optax.set_to_zero: let the loss close over frozen "
            "leaves, and the bound is for the others.",
            name,
            len(idle),
            len(jax.tree.leaves(params)),
            _few(idle),
        )
    if climbing := _unchanged(program, params):
        logging.warning(
            "%s returns the gradient itself as the update of %d of %d leaves (%s), so they climb "
            "the loss. Usually optax.masked stands alone: it passes on what its mask leaves out. "
            "To freeze leaves, let the loss close over them; for two kinds of leaves, take "
            "optax.partition.",
            name,
            len(climbing),
            len(jax.tree.leaves(params)),
            _few(climbing),
        )


def update_program(
    name: str, optimizer: optax.GradientTransformation, optimizer_state: Any, params: PyTree
) -> Jaxpr:
    """The program of an update; refuses an optimizer that needs more than gradients.

    Args:
      name: The algorithm and its argument, as ``dpsgd: the optimizer``.
      optimizer: Receives gradients.
      optimizer_state: From its ``init``, or the shapes.
      params: Parameters.
    """
    wide, scale = trees.widened(params), jnp.ones((), jnp.float32)
    # Traced on shapes: an optimizer that needs a loss value fails here with a cure, and not in the
    # first step.
    extra = extra_arguments(optimizer, scale)
    update = jax.make_jaxpr(lambda *x: optimizer.update(*x, **extra), return_shape=True)
    try:
        program, (updates, after) = update(wide, optimizer_state, params)
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name} does not run on gradients, state and parameters alone ({error}). Usually it "
            "looks at the loss, as optax.contrib.reduce_on_plateau and optax.lbfgs do: a private "
            "step has no loss to give, because the loss of a batch is not private. Or it wants "
            "parameters of its own kind, as optax.lookahead does: take dpjax.training.lookahead. "
            "Take an optimizer that follows gradients alone, and a schedule for its rate."
        ) from error
    # Steps are rounds of one compiled loop, and a checkpoint is read back into the first state.
    if jax.tree.structure(after) != jax.tree.structure(optimizer_state):
        raise TypeError(
            f"{name} has a state with another structure after an update than at the beginning: "
            f"{jax.tree.structure(optimizer_state)!s:.300}. Expected equal ones. Usually "
            "optax.monitor adds its measurements: take optax.snapshot(name, measure)."
        )
    found, expected = ([jnp.shape(x) for x in jax.tree.leaves(t)] for t in (updates, params))
    if found != expected:
        raise TypeError(
            f"{name} returns updates of shapes {reprlib.repr(found)}; expected the shapes of the "
            f"parameters, {reprlib.repr(expected)}. Usually a link that measures, as "
            "optax.measure_with_ema, stands alone: give it to optax.monitor, in a chain with an "
            "optimizer."
        )
    return program.jaxpr


def _check_public(name: str, optimizer_state: Any) -> None:
    """Refuses an optimizer that clips or adds noise: a step would do both a second time."""
    private = (
        clipping.ClipState,
        noise.GaussianState,
        optax.contrib.DifferentiallyPrivateAggregateState,
    )
    if found := [type(node).__name__ for node in trees.nodes(optimizer_state, private)]:
        raise ValueError(
            f"{name} holds {', '.join(found)}, so it clips or adds noise itself; expected an "
            "optimizer of private means, such as optax.sgd(0.1). The step clips and adds the "
            "noise of the mechanism, so both would be done twice. Usually the chain has "
            "clip_and_sum, noise.gaussian, mechanism.privatize or a link of optax.contrib: leave "
            "these links out, or keep the chain and write your own loop."
        )


def _check_means(name: str, program: Jaxpr, optimizer_state: Any, params: PyTree) -> None:
    """Refuses `dp_adam` behind a link that averages means, whose noise is not that of one step."""

    def kept(node: Any) -> Any:
        # An average has the shapes of the parameters; counters and rates are scalars.
        return jax.tree.map(lambda x: not isinstance(node, DPAdamState) and jnp.ndim(x) > 0, node)

    marks = jax.tree.map(kept, optimizer_state, is_leaf=lambda x: isinstance(x, DPAdamState))
    still = [False] * len(jax.tree.leaves(params))
    after = depends(program, [*still, *jax.tree.leaves(marks), *still])[len(still) :]
    moments = trees.nodes(jax.tree.unflatten(jax.tree.structure(marks), after), DPAdamState)
    if any(jax.tree.leaves([each.second for each in moments])):
        raise ValueError(
            f"{name} gives dp_adam averages over several steps; expected private means of one "
            "step, because dp_adam subtracts the noise of one step from its second moment. An "
            "average has less noise, so the updates would be far too long. Usually "
            "optax.MultiSteps stands around dp_adam, or a link with momentum before it. In place "
            "of MultiSteps use a larger batch, or optax.adam inside it; put momentum behind "
            "dp_adam."
        )


def check_state(name: str, state: Any) -> None:
    """Refuses an object that is not a state, and a state with donated buffers.

    Args:
      name: The function that received it.
      state: The object.
    """
    if not all(hasattr(state, field) for field in ("params", "key", "step", "ledger")):
        raise TypeError(
            f"{name}: the state is a {type(state).__name__}; expected the state of "
            "algorithm.init(key, params). Usually the parameters were given alone."
        )
    # JAX's own error names a buffer. The user knows states, and which call used one up.
    if any(_deleted(leaf) for leaf in jax.tree.leaves(state)):
        raise RuntimeError(
            f"{name}: this state was used up: algorithm.run donated its buffers to the next "
            "state. Continue with the state that run returned, or give run a copy: "
            "algorithm.run(dpjax.trees.copy(state), count). step and fit copy the state."
        )


def check_same_optimizer(name: str, optimizer: optax.GradientTransformation, state: State) -> None:
    """Refuses the state of another optimizer, before Optax fails within the step."""
    wide = trees.widened(state.params)
    # By names: the structure of a tree may hold functions, which a script makes again.
    expected = trees.leaf_names(jax.eval_shape(optimizer.init, wide))
    if (found := trees.leaf_names(state.optimizer)) != expected:
        raise TypeError(
            f"{name}: the leaves of the optimizer's state are {reprlib.repr(found)}; expected "
            f"{reprlib.repr(expected)}. Usually the state comes from an algorithm with another "
            "optimizer. Continue it there; or begin from its parameters, init(key, state.params), "
            "with another key and Mechanism(..., before=...)."
        )


def check_step(name: str, state: State) -> None:
    """Refuses a state whose step is not the number of steps in its ledger."""
    if int(state.step) != state.ledger.steps:
        raise ledger.Refused(
            f"{name}: the state is at step {int(state.step)} and its ledger at "
            f"{state.ledger.steps}; expected equal numbers: draw and noise follow from the step, "
            "epsilon from the ledger. Usually fields of two states were combined."
        )


def _deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def check_draw(call: str, sampler: Sampler) -> None:
    """Refuses a sampler whose batch is the same at every step, unless its event pays for that."""
    key = jax.random.key(0, impl="threefry2x32")
    # Traced and not drawn: NumPy's random numbers are constants of the program, which `depends`
    # sees.
    program = jax.make_jaxpr(sampler.draw)(key, jnp.int32(0)).jaxpr
    moved, *_ = depends(program, [True] * len(program.invars))
    # A batch that stays is sound where each step is paid for without amplification.
    parts = split(sampler.event(np.ones(2)))
    paid = not parts.sampled and not parts.foreign and parts.precision >= 2
    if sampler.batch_size < sampler.examples and not moved and not paid:
        raise ValueError(
            f"{call}: the sampler {sampler.name!r} draws indices that depend neither on its key "
            "nor on the step, so every step would see the same examples, but the accounting "
            "assumes fresh draws. Usually the indices were drawn with NumPy, which runs once, when "
            "the step is compiled. Draw with jax.random, from dpjax.trees.step_key(key, "
            "dpjax.types.Purpose.SAMPLING, step)."
        )


def planned_bounds(name: str, schedule: Schedule | None, mechanism: Mechanism) -> Planned | None:
    """A schedule of bounds as its table, which must be positive at every planned step."""
    if schedule is None:
        return None
    if not callable(schedule):
        raise TypeError(
            f"{name}(bound_schedule={schedule!r:.100}): expected a function of the step. For one "
            "factor at all steps, multiply the bound of the rule."
        )
    if mechanism.adaptive is not None:
        raise ValueError(
            f"{name}(bound_schedule=...): the mechanism adapts its bounds to the gradients, so "
            "they cannot follow a schedule. Leave one of the two out."
        )
    bounds = Planned.of(schedule, mechanism.steps)
    if (step := bounds.first_without_size()) is not None:
        raise ValueError(
            f"{name}(bound_schedule=...): expected positive numbers at all planned steps; the "
            f"number at step {step} is not positive and finite. It multiplies the "
            "bounds of the rule; to silence a step, do not plan it."
        )
    return bounds


def checked_data(recipe: Recipe, data: PyTree) -> PyTree:
    """The data as arrays; refuses a size that differs from the accounted one."""
    name = recipe.name
    # A data set has test examples too; training on both would void every accuracy that is reported.
    if isinstance(data, Dataset):
        raise TypeError(
            f"{name}: the data are the data.Dataset {data.name!r}, which holds test examples too; "
            f"expected the training examples: give its .train, of {data.examples} examples."
        )
    data = data if isinstance(data, Stream) else _arrays_of_rows(name, data)
    _check_size(name, data, recipe.mechanism.sampling.examples)
    row = data.row if isinstance(data, Stream) else data
    if recipe.entry is not None and not isinstance(row, tuple):
        raise TypeError(
            f"{name}(per_step=...): the data are a {type(row).__name__}; expected a tuple such as "
            "(x, y), because the step appends its entry to every example: (x, y, per_step(step)). "
            "For a single array write (x,)."
        )
    return data


def _check_size(name: str, data: PyTree, expected: int) -> None:
    """Refuses another number of examples than is accounted."""
    stream = isinstance(data, Stream)
    size = len(data) if stream else trees.leading_size(data, name=f"{name} data")
    if not size:
        raise ValueError(
            f"{name}: the data hold no examples; expected at least one. Usually a filter or a "
            "split left no row: look at the shapes of what was loaded."
        )
    if size != expected:
        batched = "If a record is a batch, let the source give single examples. " if stream else ""
        raise ValueError(
            f"{name}: the data hold {size} examples, the mechanism's sampler {expected}; the "
            f"sampling rate would not be the accounted one. {batched}Build the "
            f"sampler for this data set: dpjax.sampling.poisson(examples={size}, batch_size=...)."
        )


def _arrays_of_rows(name: str, data: PyTree) -> PyTree:
    """The data as arrays; refuses single numbers and objects, which have no rows."""
    data = arrays(data, f"{name} data")
    for path, leaf in zip(trees.leaf_names(data), jax.tree.leaves(data), strict=True):
        if isinstance(leaf, int | float | np.number):
            raise TypeError(
                f"{name} data: leaf {path or '(the data)'} is {leaf!r:.20}, one number; expected "
                "arrays with a row for each example. Usually lists of numbers or of pairs were "
                "given: make arrays with (np.stack(inputs), np.array(targets))."
            )
        if not hasattr(leaf, "dtype"):
            raise no_arrays(leaf, f"{name} data")
    return data


def warn_of_constants(name: str, loss: ClosedJaxpr, examples: int) -> None:
    """Warns about a constant of the loss that has a row for each example of the data."""
    # A warning, since frozen weights may have this length by chance.
    if shape := closed_over(loss, examples):
        logging.warning(
            "%s: the loss closes over an array of shape %s, one row for each of the %d examples. "
            "If these are the data, each loss sees all examples, and clipping bounds nothing: "
            "give them as data. If they are fixed weights, all is well.",
            name,
            shape,
            examples,
        )


def warn_of_idle(name: str, gradient: Jaxpr, params: PyTree) -> None:
    """Warns about leaves without a gradient, which receive noise like all others.

    Args:
      name: The algorithm.
      gradient: The program of the gradient of the loss.
      params: Parameters.
    """
    count = len(jax.tree.leaves(params))
    if idle := _zeros(gradient, params):
        logging.warning(
            "%s: %d of %d leaves have no gradient (%s). They receive noise like all others "
            "and drift. Usually they are frozen by stop_gradient, or unused: let the loss close "
            "over frozen leaves, and they receive no noise.",
            name,
            len(idle),
            count,
            _few(idle),
        )


def warn_of_narrow(name: str, params: PyTree) -> None:
    """Warns about parameters that are narrower than the numbers which are added to them."""
    dtypes = map(jnp.result_type, jax.tree.leaves(params))
    if narrow := [str(dtype) for dtype in dtypes if jnp.finfo(dtype).bits < 32]:
        logging.warning(
            "%s: parameters are %s, which rounds away updates below half of the last digit of a "
            "parameter: with a small rate it stays where it was, and the budget is spent. Keep "
            "float32 parameters and cast them inside the loss.",
            name,
            narrow[0],
        )


def warn_of_batch_norm(name: str, loss: Jaxpr, params: PyTree) -> None:
    """Warns about batch normalisation, which would normalise an example by itself alone."""
    # By its effect, or by its name: behind a convolution it has a mean over pixels.
    if centres_alone(loss):
        logging.warning(
            "%s: the loss subtracts from numbers their own mean over an axis of length one. "
            "This is zero, and no layer below learns. Usually it has batch normalisation in "
            "training mode, whose batch is one example: use group or layer normalisation.",
            name,
        )
    elif found := [leaf for leaf in trees.leaf_names(params) if _BATCH_NORM.search(leaf)]:
        logging.warning(
            "%s: %s belong to a batch normalisation, by their names. A private loss sees one "
            "example and has its statistics alone: use group or layer normalisation. If the "
            "statistics are fixed (use_running_average=True), all is well.",
            name,
            _few(found),
        )


def _zeros(program: Jaxpr, params: PyTree) -> list[str]:
    """The leaves of the parameters for which a program returns a constant 0, in their order."""
    # JAX instantiates a symbolic zero as a broadcast literal 0 in the traced program.
    zeros = [
        equation.outvars[0]
        for equation in program.eqns
        if equation.primitive.name == "broadcast_in_dim" and _is_zero(equation.invars[0])
    ]
    # Behind the leaves, an optimizer returns its state.
    names = zip(trees.leaf_names(params), program.outvars, strict=False)
    return [
        name or "(the array)"
        for name, v in names
        if _is_zero(v) or any(v is zero for zero in zeros)
    ]


def _unchanged(program: Jaxpr, params: PyTree) -> list[str]:
    """The leaves of the parameters for which a program returns its own input, the gradient."""
    names = trees.leaf_names(params)
    each = zip(names, program.outvars[: len(names)], program.invars, strict=False)
    return [name or "(the array)" for name, update, gradient in each if update is gradient]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def _is_zero(v: Any) -> bool:
    return isinstance(v, Literal) and np.ndim(v.val) == 0 and v.val == 0
