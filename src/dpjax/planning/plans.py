# SPDX-License-Identifier: Apache-2.0
"""A whole plan of private training, from public numbers: neither data nor losses are read."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import logging

from dpjax import checks, clipping, sampling, training, trees
from dpjax._rounding import three_digits
from dpjax.mechanism import Mechanism
from dpjax.planning.pace import DRIFT, WARMUP, paced
from dpjax.planning.sizes import Size, size_for
from dpjax.types import PyTree

NO_SETTING = "No setting was chosen on these data."
FIRST_BOUND = 1.0
"""Where the bound of a plan begins. It rises fast, so it begins below usual norms."""


class Planned(NamedTuple):
    """A plan of private training; `print` it.

    Attributes:
      mechanism: What runs and is accounted.
      optimizer: An Optax optimizer for the private means of this mechanism.
        `dpjax.training.averaged` reads the averaged parameters of its state.
      reasons: A sentence for each choice, by its name.
    """

    mechanism: Mechanism
    optimizer: optax.GradientTransformation
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{name:<10}{reason}" for name, reason in self.reasons.items()]
        return "\n".join([*lines, NO_SETTING])


def plan(
    examples: PyTree,
    params: PyTree,
    *,
    epsilon: float,
    delta: float,
    drift: float = DRIFT,
    minutes: float | None = None,
    examples_per_second: float | None = None,
) -> Planned:
    """Plans private training without a search: batch, steps, noise, clipping and step sizes.

    Args:
      examples: The number of examples, or the training data: a tree of arrays with a leading axis.
      params: The parameters that are trained, or their shapes.
      epsilon: The most that training may cost.
      delta: Choose it below 1 / examples.
      drift: How far noise moves a loss in the whole run, as of `dpjax.planning.paced`. The default
        suits a cross entropy, and 1 the squared error of a target in [-1, 1].
      minutes: How long training may take; by default as long as more time gains much. Batches
        get smaller, and then steps fewer, until it fits.
      examples_per_second: The speed of training, with which ``minutes`` are counted. By default
        that of dense layers with as many parameters; convolutions are slower.

    Returns:
      A `Planned`.

    Privacy:
      The plan reads public numbers only: sizes and the speed of this machine. Its mechanism costs
      at most ``epsilon``, by its own accounting.

    Example:
      >>> import dpjax
      >>> planned = dpjax.plan(60_000, {"w": jnp.zeros((784, 10))}, epsilon=3.0, delta=1e-5)
      >>> planned.mechanism.steps, planned.mechanism.epsilon() <= 3.0
      (800, True)

      Then ``dpjax.dpsgd(loss, planned.optimizer, planned.mechanism, data)``.
    """
    if isinstance(examples, int):
        count = checks.whole("plan", "examples", examples)
    else:
        count = trees.leading_size(examples, name="examples")
    checks.positive("plan", "epsilon", epsilon)
    most_examples = math.inf  # of all steps together
    if minutes is not None:
        minutes = checks.positive("plan", "minutes", minutes)
        speed = examples_per_second
        if speed is None:
            speed = speed_of(params)
        most_examples = 60 * minutes * speed
    size = size_for(count, epsilon, delta, most_examples)
    uncalibrated = Mechanism(
        sampling=sampling.poisson(count, size.batch),
        clipping=clipping.automatic(FIRST_BOUND),
        noise_multiplier=1.0,  # any positive number, which `calibrate` scales
        steps=size.steps,
        adaptive=size.adaptive,
    )
    mechanism = uncalibrated.calibrate(epsilon, delta)
    parameters = sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(params))
    return Planned(
        mechanism=mechanism,
        optimizer=optimizer_for(mechanism, drift),
        reasons=_reasons(
            mechanism, size, parameters, drift, target=f"{three_digits(epsilon)} at delta {delta:g}"
        ),
    )


def optimizer_for(mechanism: Mechanism, drift: float) -> optax.GradientTransformation:
    """The optimizer of a plan, for a mechanism that may be another one."""
    average = training.average_parameters(decay_for(mechanism.steps))
    return optax.chain(paced(mechanism, drift), average)


def decay_for(steps: int) -> float:
    """The decay of a plan's average, which looks back over a tenth of the steps."""
    return max(0.0, 1 - 10 / max(1, steps))


def _reasons(
    mechanism: Mechanism, size: Size, parameters: int, drift: float, target: str
) -> dict[str, str]:
    """Why each choice was made."""
    multiplier = float(mechanism.multipliers[0])
    deviation = float(mechanism.deviations_on_mean(0)[0])
    ratio = math.inf
    if deviation > 0:
        ratio = mechanism.clipping.sensitivity / (deviation * math.sqrt(parameters))
    bound = "one length, because a noised count cannot tell the norms of so few examples"
    if mechanism.adaptive is not None:
        share = f"{mechanism.adaptive.target:.0%}"
        bound = f"a bound that {share} of the norms are below, by a noised count"
    return {
        "batch": (
            f"{mechanism.batch_size:g} of {mechanism.sampling.examples:,}: noise about "
            f"{100 * (size.excess - 1):.0f} % above that of whole batches."
        ),
        "steps": f"{mechanism.steps}: more take more time, or smaller batches and so more noise.",
        "noise": (
            f"multiplier {multiplier:.4g} for epsilon {target}; a gradient "
            f"in which all examples agree is "
            f"{ratio:.3g} times as long as the noise of its {parameters:,} parameters."
        ),
        "clipping": f"every gradient is scaled to {bound}.",
        "rate": (
            f"Adam's, {drift / math.sqrt(mechanism.steps):.3g} over the bound, after a rise over "
            f"{WARMUP:.0%} of the steps: noise moves the loss of an example at the bound by at "
            f"most about {drift:g} in the whole run."
        ),
        "average": "of about the last tenth of the steps; it costs no privacy.",
    }


def speed_of(params: PyTree) -> float:
    """Examples a second of a dense layer with as many parameters, measured on this machine."""
    parameters = sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(params))
    width = max(1, math.isqrt(parameters))
    batch_size = 1024

    @jax.jit
    def both_passes(x: Any, w: Any) -> Any:
        """The derivatives by parameters and by inputs, with y as its own cotangent."""
        y = x @ w
        return x.T @ y, y @ w.T

    arrays = jnp.ones((batch_size, width)), jnp.ones((width, width))
    jax.block_until_ready(both_passes(*arrays))  # compiles
    began = time.perf_counter()
    jax.block_until_ready(both_passes(*arrays))
    seconds = time.perf_counter() - began
    # Sampling, norms and the noise take about as long as these products, so the time doubles.
    speed = batch_size / (2 * seconds)
    logging.info("plan: %g examples a second of %d parameters.", speed, parameters)
    return speed
