# SPDX-License-Identifier: Apache-2.0
"""Every optimizer of Optax on private means: which run, which are refused, and why.

claim     an optimizer that runs in Optax on gradients, state and parameters runs on private means
verdict   of 118 all but `optax.monitor`, whose state grows in its first update, and in a chain
          `contrib.sam`, whose update takes no ``mask=``
hardware  any; no figure depends on it
command   make bench BENCH=optimizers ARGS="--out experiments/results/optimizers.json"

A row is a public function of `optax` or `optax.contrib` that returns a gradient transformation, or
a composition of them. One without a row in `CALLS` is called with only a learning rate.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags

import dpjax
from dpjax import clipping, sampling, testing
from experiments.benchmarks import reporting

RATE = 0.01
PARAMS = {"bias": jnp.full(4, 0.1), "kernel": jnp.full((3, 4), 0.5)}
# The kernel is trained or masked, and the bias is left as it is.
MASK = {"bias": False, "kernel": True}
LABELS = {"bias": "frozen", "kernel": "trained"}


def two() -> dict[str, optax.GradientTransformation]:
    """An optimizer for each label."""
    return {"frozen": optax.set_to_zero(), "trained": inner()}


def inner() -> optax.GradientTransformation:
    return optax.sgd(RATE)


def size(updates: Any) -> jax.Array:
    """A measurement, for the links that take one."""
    return optax.tree.norm(updates)


# Calls of functions that need more than a learning rate.
CALLS: dict[str, Callable[[Any], Any]] = {
    "MultiSteps": lambda of: of(inner(), 2),
    "adaptive_grad_clip": lambda of: of(0.1),
    "add_noise": lambda of: of(eta=0.1, gamma=0.5, key=0),
    "apply_if_finite": lambda of: of(inner(), 2),
    "clip": lambda of: of(1.0),
    "clip_by_block_rms": lambda of: of(1.0),
    "clip_by_global_norm": lambda of: of(1.0),
    "conditionally_mask": lambda of: of(inner(), lambda step: step > 0),
    "conditionally_transform": lambda of: of(inner(), lambda step: step > 0),
    "contrib.differentially_private_aggregate": lambda of: of(1.0, 1.0, key=0),
    "contrib.dpsgd": lambda of: of(RATE, 1.0, 1.0, seed=0),
    "contrib.mechanize": lambda of: of(inner()),
    "contrib.sam": lambda of: of(inner(), inner()),
    "contrib.schedule_free": lambda of: of(inner(), RATE),
    "contrib.split_real_and_imaginary": lambda of: of(inner()),
    "ema": lambda of: of(0.9),
    "flatten": lambda of: of(inner()),
    "freeze": lambda of: of(MASK),
    "lookahead": lambda of: of(inner(), 2, 0.5),
    "masked": lambda of: of(inner(), MASK),
    "measure_with_ema": lambda of: of(size, 0.9),
    "multi_transform": lambda of: of(two(), LABELS),
    "partition": lambda of: of(two(), LABELS),
    "scale": lambda of: of(-RATE),
    "scale_by_backtracking_linesearch": lambda of: of(3),
    "scale_by_schedule": lambda of: of(optax.constant_schedule(-RATE)),
    "scale_by_zoom_linesearch": lambda of: of(3),
    "selective_transform": lambda of: of(inner(), freeze_mask=MASK),
    "snapshot": lambda of: of("size", size),
    "stateless": lambda of: of(lambda updates, params: jax.tree.map(jnp.add, updates, params)),
    "stateless_with_tree_map": lambda of: of(jnp.add),
    "trace": lambda of: of(0.9),
    "with_extra_args_support": lambda of: of(inner()),
}


def composed() -> dict[str, Callable[[], Any]]:
    """Compositions, as users write them."""
    return {
        "chain(clip_by_global_norm, adamw of a schedule)": lambda: optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(optax.warmup_cosine_decay_schedule(0.0, RATE, 1, 2)),
        ),
        "chain(add_decayed_weights, trace, scale)": lambda: optax.chain(
            optax.add_decayed_weights(0.1, MASK),
            optax.trace(0.9, nesterov=True),
            optax.scale(-RATE),
        ),
        "chain(sgd, apply_every)": lambda: optax.chain(
            inner(),
            optax.apply_every(2),
        ),
        "chain(sgd, ema)": lambda: optax.chain(
            inner(),
            optax.ema(0.9),
        ),
        "chain(adam, reduce_on_plateau)": lambda: optax.chain(
            optax.adam(RATE),
            optax.contrib.reduce_on_plateau(),
        ),
        "inject_hyperparams(adam)": lambda: optax.inject_hyperparams(optax.adam)(
            learning_rate=RATE
        ),
        "inject_stateful_hyperparams(adam)": lambda: optax.inject_stateful_hyperparams(optax.adam)(
            learning_rate=RATE
        ),
        "MultiSteps(lion), skip_not_finite": lambda: optax.MultiSteps(
            optax.lion(RATE),
            2,
            should_skip_update_fn=optax.skip_not_finite,
        ),
        "chain(monitor, adam)": lambda: optax.chain(
            optax.monitor({"size": size}),
            optax.adam(RATE),
        ),
        "named_chain(adam, weight decay)": lambda: optax.named_chain(
            ("adam", optax.scale_by_adam()),
            ("decay", optax.add_decayed_weights(0.1)),
        ),
        "schedule_free(adam without momentum)": lambda: optax.contrib.schedule_free(
            optax.adam(RATE, b1=0.0),
            RATE,
        ),
        "training.lookahead": lambda: dpjax.training.lookahead(inner(), 2, 0.5),
        "training.dp_adam": lambda: dpjax.training.dp_adam(RATE, mechanism()),
    }


# These return a transformation, but their annotation does not name it.
ANNOTATED = ("scale_by_factored_rms", "contrib.hutchinson_estimator_diag_hessian")
# These take functions of optimizers, or any number of them: `composed` has a row for each.
ELSEWHERE = ("chain", "named_chain", "inject_hyperparams", "inject_stateful_hyperparams")
SMOKE = ["adam", "contrib.sam", "lookahead", "lbfgs", "training.dp_adam"]


def mechanism() -> dpjax.Mechanism:
    return dpjax.Mechanism(
        sampling=sampling.full(8),
        clipping=clipping.flat(1.0),
        noise_multiplier=1.3,
        steps=4,
    )


def found() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions of Optax that return a gradient transformation, and `MultiSteps`."""
    yield "MultiSteps", optax.MultiSteps
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, function in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            returns = str(inspect.signature(function).return_annotation)
            if prefix + name in ANNOTATED or "GradientTransformation" in returns:
                yield prefix + name, function


def with_learning_rate(function: Callable[..., Any]) -> Any:
    """Calls a function with a learning rate, if it needs one."""
    rate = inspect.signature(function).parameters.get("learning_rate")
    if rate is not None and rate.default is rate.empty:
        return function(learning_rate=RATE)
    return function()


def rows() -> dict[str, Callable[[], Any]]:
    """A function for each row, which makes its transformation."""
    makers = {}
    for name, function in sorted(found()):
        if name not in ELSEWHERE:
            call = CALLS.get(name, with_learning_rate)
            makers[name] = functools.partial(call, function)
    return makers | composed()


def loss(params: Any, x: Any) -> Any:
    outputs = x @ params["kernel"] + params["bias"]
    return jnp.sum(jnp.square(outputs - 1))


def by_itself(optimizer: Any) -> None:
    """Two steps of Optax."""
    params = PARAMS
    state = optimizer.init(params)
    for _ in range(2):
        gradients = jax.grad(loss)(params, jnp.ones(3))
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)


def through_dpsgd(optimizer: Any) -> None:
    """Two steps of `dpjax.dpsgd`."""
    data = jax.random.normal(jax.random.key(1), (8, 3))
    algorithm = dpjax.dpsgd(loss, optimizer, mechanism(), data)
    state = algorithm.init(PARAMS)
    for _ in range(2):
        state, _ = algorithm.step(state)
    for leaf in jax.tree.leaves(state.params):
        if not jnp.all(jnp.isfinite(leaf)):
            raise FloatingPointError("the parameters are not finite after two steps.")


def behind_the_noise(optimizer: Any) -> None:
    """Two steps of a chain, with and without one example."""
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    testing.assert_private(optax.chain(mechanism().private(), optimizer), PARAMS, steps=2)


WAYS = {"optax": by_itself, "dpsgd": through_dpsgd, "chain": behind_the_noise}


def outcome(run: Callable[[Any], None], make: Callable[[], Any]) -> str:
    """``"runs"``, or the kind and the first sentence of the error."""
    try:
        run(make())
    except Exception as error:
        first = str(error).strip().split(". ")[0].split("\n")[0]
        return f"{type(error).__name__}: {first}"
    return "runs"


def main(asked: Any) -> None:
    makers = rows()
    report = reporting.begin(("dpjax", "jax", "optax"))
    words = SMOKE if asked.smoke else asked.names
    report["rows"] = {}
    for name in reporting.chosen("names", list(makers), words):
        row = {way: outcome(run, makers[name]) for way, run in WAYS.items()}
        report["rows"][name] = row
        cells = [f"{result:.50}" for result in row.values()]
        print(f"{name:50}", " | ".join(cells), flush=True)
        reporting.keep(report, asked.out)
    for way in WAYS:
        ran = sum(row[way] == "runs" for row in report["rows"].values())
        print(f"{way}: {ran} of {len(report['rows'])} run")


if __name__ == "__main__":
    flags.DEFINE_list("names", None, "How their names begin; by default all.")
    reporting.run(main, smoke="A few rows")
