# SPDX-License-Identifier: Apache-2.0
"""Checks before a run and before a step, of shapes and public numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from dpjax import checks, trees
from dpjax._arrays import arrays
from dpjax._stream import Stream
from dpjax.data import Dataset
from dpjax.gradients import ENGINES
from dpjax.mechanism import Mechanism
from dpjax.schedules import Planned
from dpjax.training.recipe import Recipe
from dpjax.types import PyTree, Schedule, State

# Bytes of constants above which compilation takes seconds longer.
LARGE = 64 * 2**20
# Rows of the data that are read together.
_ROWS = 256
# Flax names a layer BatchNorm_0; others write batch_norm or bn.
_BATCH_NORM = re.compile(r"batch_?norm|(^|/)bn_?\d*(/|$)", re.IGNORECASE)


def check_kinds(recipe: Recipe) -> None:
    """Refuses arguments of `dpjax.dpsgd` of the wrong kind, as when two were swapped."""
    name = recipe.name
    loss = recipe.loss
    hint = "Write dpsgd(loss, optimizer, mechanism, data)."
    checks.instance(name, "mechanism", recipe.mechanism, Mechanism, hint)
    checks.optimizer(f"{name}: the optimizer", recipe.optimizer)
    # A loss object of the user may have a method of one of these names; a Linen module has both.
    is_module = hasattr(loss, "apply") and hasattr(loss, "init")
    if is_module or not callable(loss):
        raise TypeError(
            f"{name}: the loss is a {type(loss).__name__}; expected loss(params, example). For a "
            "Linen module, write losses.of(model, losses.cross_entropy)."
        )
    hint = "Engines differ in speed alone."
    checks.one_of(name, "engine", recipe.engine, ("auto", *ENGINES), hint)
    # A unit that the user named, such as patient, is a client with all of its rows. This sampler
    # draws single rows, so it does not protect patients with several.
    if recipe.mechanism.of_clients:
        raise ValueError(
            f"{name}: the mechanism's unit is {recipe.mechanism.unit!r}, and "
            f"{recipe.mechanism.sampling.name} draws rows. Draw with sampling.persons for people; "
            "for clients see dpjax.federated."
        )


def check_untraced(call: str, given: PyTree) -> None:
    """Refuses a call of the algorithm inside ``jit``, ``vmap`` or ``grad``, which trace it."""
    # A traced step becomes part of another program, which runs again without the ledger.
    if trees.traced(given):
        raise TypeError(
            f"{call}: called inside a JAX transformation, where the ledger cannot count steps. "
            "Call algorithm.run(state, count)."
        )


def check_state(name: str, state: Any) -> None:
    """Refuses an object that is not a state, and a traced one."""
    checks.instance(name, "the state", state, State, "Give algorithm.init(params).")
    check_untraced(name, state)


def positive_plan(what: str, schedule: Schedule, steps: int) -> Planned:
    """A schedule as its table, which must be positive at every step."""
    planned = Planned.of(schedule, steps)
    positive = (planned.values > 0) & np.isfinite(planned.values)
    if not positive.all():
        step = int(np.argmin(positive))  # the first step that is not positive
        raise ValueError(
            f"{what} is {planned.values[step]} at step {step} of {steps}; expected a finite, "
            "positive one."
        )
    return planned


def checked_data(recipe: Recipe, data: PyTree) -> PyTree:
    """The data as arrays; refuses data that do not fit the recipe.

    It refuses another number of rows than the accounted one, a `Dataset`, arrays without a finite
    row, and rows that are not tuples if ``per_step`` has to append to them.
    """
    name = recipe.name
    sampler = recipe.mechanism.sampling
    # A sampler of persons counts persons as its examples, and their rows apart.
    expected = sampler.rows or sampler.examples
    # A data set has test examples too. Training on both makes every reported accuracy wrong.
    if isinstance(data, Dataset):
        raise TypeError(
            f"{name}: the data.Dataset {data.name!r} holds test examples too. Give its .train."
        )
    if isinstance(data, Stream):
        size = len(data)
    else:
        data = arrays(data, f"{name} data")
        size = trees.leading_size(data, name=f"{name} data")
    if size != expected:
        raise ValueError(
            f"{name}: the data hold {size} examples, the mechanism's sampler {expected}. Build it "
            f"for these data: sampling.poisson(examples={size}, batch_size=...), or "
            "sampling.persons(owners, ...)."
        )
    readable = not isinstance(data, Stream) and not trees.traced(data)
    if readable and not any_finite_row(data):
        raise ValueError(
            f"{name}: each of the {size} rows of the data holds a number that is NaN or infinite, "
            "and so no gradient. Declare what a gap counts as, as dpjax.data.table does."
        )
    # Arrays have the structure of one of their rows.
    row = data
    if isinstance(data, Stream):
        row = data.row
    if recipe.entry is not None and not isinstance(row, tuple):
        raise TypeError(
            f"{name}(per_step=...): expected a tuple as data; for a single array write (x,)."
        )
    return data


def any_finite_row(data: PyTree) -> bool:
    """Whether a row of arrays in memory holds finite numbers only; stops at the first such row.

    A row is the index i of all leaves, ``[rows, ...]``. Leaves of integers are finite.
    """
    leaves = [x for x in jax.tree.leaves(data) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if not leaves:
        return True
    for start in range(0, len(leaves[0]), _ROWS):
        finite: Any = True  # of each of these rows, in the leaves so far
        for leaf in leaves:
            rows = trees.on_host(leaf[start : start + _ROWS])
            finite = finite & np.isfinite(rows).all(axis=tuple(range(1, rows.ndim)))
        if np.any(finite):
            return True
    return False


def warn_of_constants(
    name: str, constants: Iterable[Any], arguments: PyTree, shared: PyTree, examples: int
) -> None:
    """Warns of a loss that closes over the data, or over large weights; ``shared`` are neither."""
    given = {id(leaf) for leaf in jax.tree.leaves(shared)}
    closed_over = [x for x in constants if id(x) not in given]
    # If parameters or example have an axis of this size, the array may be one of the weights. A
    # data set of one example matches every axis of size 1.
    widths = {size for leaf in jax.tree.leaves(arguments) for size in leaf.shape}
    shapes = [np.shape(x) for x in closed_over if np.shape(x)[:1] == (examples,)]
    if shapes and examples > 1 and examples not in widths:
        logging.warning(
            "%s: the loss closes over an array of shape %s, one row for each of the %d examples. "
            "If these are the data, each loss sees all examples, and clipping bounds nothing: "
            "give them as data. Ignore this warning if they are frozen weights.",
            name,
            shapes[0],
            examples,
        )
    size = sum(np.size(x) * jnp.result_type(x).itemsize for x in closed_over)  # in bytes
    if size > LARGE:
        logging.warning(
            "%s: the loss closes over %d MiB, which become constants of the compiled program. Give "
            "weights that are not trained as frozen=: loss(params, example, frozen).",
            name,
            size // 2**20,
        )


def check_batch_norm(name: str, params: PyTree, frozen: PyTree) -> None:
    """Refuses Keras' batch normalisation that is trained, and warns about others, by their names.

    Keras' layer keeps ``moving_mean`` among the variables that are not trained, and its scale and
    offset among the trained ones. With ``layer.trainable = False`` none of them is trained, and
    Keras then uses the moving statistics, which are constants.
    """
    leaves = trees.leaf_names(params)
    for statistic in trees.leaf_names(frozen):
        layer, _, last = statistic.rpartition("/")
        if last == "moving_mean" and any(leaf.startswith(f"{layer}/") for leaf in leaves):
            raise ValueError(
                f"{name}: {layer} is a BatchNormalization, which mixes the examples of a batch. "
                "Use GroupNormalization, or fix its statistics by layer.trainable = False."
            )
    layers = [leaf for leaf in leaves if _BATCH_NORM.search(leaf)]
    if layers:
        logging.warning(
            "%s: %s belongs to a batch normalisation, by its name; the loss of one example has "
            "its statistics alone. Use group or layer normalisation, or fixed statistics.",
            name,
            layers[0],
        )
