# SPDX-License-Identifier: Apache-2.0
r"""The noise of Langevin dynamics, whose scale follows from the step size.

Stochastic gradient Langevin dynamics moves by $\eta_t / 2$ times the gradient of the log posterior
and adds noise of variance $\eta_t$, so its parameters are samples from the posterior. For privacy
this noise is a Gaussian on the clipped sum with a known multiplier: smaller steps are more private.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import optax

from dpjax import checks
from dpjax.noise.link import gaussian
from dpjax.types import Clipping, Key, Schedule


def langevin(
    learning_rate: float | Schedule,
    rule: Clipping,
    *,
    examples: int,
    batch_size: float,
    key: Key | None = None,
    temperature: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""The Optax link of Langevin dynamics: `gaussian` with the multiplier `langevin_multiplier`.

    With $\tilde g_t$ the output divided by the expected batch size, the update

    $$ w \leftarrow w - \tfrac{\eta_t n}{2}\, \tilde g_t
       + \tfrac{\eta_t}{2}\, \nabla \log p(w) $$

    adds noise of covariance $\eta_t T I$. `dpjax.training.dp_sgld` is the whole algorithm. The
    arguments are as for `langevin_multiplier` and `gaussian`.

    Example:
      >>> import dpjax
      >>> rule, n, size, rate = dpjax.clipping.flat(bound=1.0), 60_000, 256, 6e-5
      >>> optimizer = optax.chain(
      ...     dpjax.clip_and_sum(rule),
      ...     langevin(rate, rule, examples=n, batch_size=size),
      ...     optax.scale(1 / size),
      ...     optax.scale(-rate * n / 2),
      ... )
    """
    multiplier = langevin_multiplier(
        learning_rate, rule, examples=examples, batch_size=batch_size, temperature=temperature
    )
    return gaussian(multiplier, rule, key)


def langevin_multiplier(
    learning_rate: float | Schedule,
    rule: Clipping,
    *,
    examples: int,
    batch_size: float,
    temperature: float = 1.0,
) -> float | Schedule:
    r"""The noise multiplier that follows from a Langevin step.

    $$ m_t = \frac{2 L \sqrt{T}}{n\, \Delta \sqrt{\eta_t}} $$

    Args:
      learning_rate: $\eta_t$: a positive number, or an Optax schedule of the step.
      rule: The rule that clipped the sum; $\Delta$ is its sensitivity.
      examples: $n$, the number of examples; public.
      batch_size: $L$, the *expected* batch size, which divides the sum.
      temperature: $T$; 1 for the posterior itself, less for a sharper one.

    Returns:
      A number for a number, a schedule for a schedule; infinity where the schedule is 0.

    Example:
      >>> import dpjax
      >>> rule = dpjax.clipping.flat(bound=1.0)
      >>> round(langevin_multiplier(6.018e-5, rule, examples=60_000, batch_size=256), 4)
      1.1

    References:
      Welling and Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", 2011;
      Bu, Wang, Dai and Long, "On the Convergence and Calibration of Deep Learning with
      Differential Privacy", 2023, section 4.5.
    """
    call = "noise.langevin_multiplier"
    temperature = checks.positive(call, "temperature", temperature)
    sensitivity = checks.positive(call, "rule.sensitivity", rule.sensitivity)
    if not 0 < batch_size <= examples:
        raise ValueError(f"{call}: expected a batch_size above 0 and at most examples.")
    # The update multiplies noise of deviation m * Delta by (eta n / 2) / L, after which the
    # deviation is to be sqrt(eta T). So m is this scale divided by sqrt(eta).
    scale = 2 * batch_size * math.sqrt(temperature) / (examples * sensitivity)
    if not callable(learning_rate):
        learning_rate = checks.positive(call, "learning_rate", learning_rate)
        return scale / math.sqrt(learning_rate)
    schedule = learning_rate

    def multiplier(step: Any) -> Any:
        # The table that is accounted and the noise come from this one expression in float32.
        return scale / jnp.sqrt(jnp.asarray(schedule(step), jnp.float32))

    return multiplier
