# SPDX-License-Identifier: Apache-2.0
r"""DP-SGLD: samples from a posterior, private by the noise that Langevin dynamics adds.

The step size determines the noise and therefore the cost of a step, and the prior is weight decay.
Draw, clipping, noise and ledger are the same as in `dpsgd`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optax

from dpjax import checks, noise, schedules
from dpjax.mechanism import Mechanism, Spent
from dpjax.training.checks import positive_plan
from dpjax.training.dpsgd import dpsgd
from dpjax.training.samples import keep_samples
from dpjax.types import Algorithm, Clipping, LossFn, PyTree, Sampler, Schedule


def dp_sgld(
    loss: LossFn,
    learning_rate: float | Schedule,
    sampling: Sampler,
    clipping: Clipping,
    steps: int,
    data: PyTree,
    *,
    prior_deviation: float = 1.0,
    temperature: float = 1.0,
    samples: int = 20,
    burn_in: int | None = None,
    every: int | None = None,
    preparation: Sequence[float] = (),
    before: Sequence[Spent] = (),
    **options: Any,
) -> Algorithm:
    r"""Differentially private stochastic gradient Langevin dynamics.

    With $V_t$ the clipped sum, $L$ the expected batch size and $n$ the number of examples,

    $$ w_{t+1} = w_t - \frac{\eta_t n}{2} \Bigl( \frac{V_t}{L} + \frac{w_t}{n s^2} \Bigr)
       + \mathcal{N}(0,\ \eta_t T I). $$

    Args:
      loss: ``loss(params, example)``: the *negative log-likelihood* of one example, with its
        units: cross-entropy, or half a squared error over the variance of the observations.
      learning_rate: $\eta_t$, positive; a number or an Optax schedule. It is the variance of the
        noise, about $1/n$ of the rate of SGD, and a smaller one is more private. Accounting is
        faster if it changes per epoch. Parameters narrower than float32 round small steps, and
        their noise, to 0.
      sampling: Which examples each step sees.
      clipping: How much each may contribute. Clipping changes the posterior.
      steps: How many steps are planned.
      data: As for `dpjax.dpsgd`.
      prior_deviation: $s$ of the prior $\mathcal{N}(0, s^2 I)$; infinity for a flat one.
      temperature: $T$; the density is raised to the power $1/T$, and the noise grows with $T$.
      samples: How many of the last samples to keep; each takes the memory of the parameters.
      burn_in: Steps before the first sample; by default half of them.
      every: Steps between samples; by default such that ``samples`` fill the rest of the run.
      preparation: As for `dpjax.Mechanism`.
      before: As for `dpjax.Mechanism`.
      options: Further arguments of `dpjax.dpsgd`, such as ``budget``, ``engine`` and ``per_step``.

    Returns:
      An `Algorithm` whose ``mechanism`` is a `dpjax.Mechanism`, for the statement, the ledger,
      `fit` and checkpoints. `dpjax.training.samples` reads the samples from its state.

    Privacy:
      That of `dpjax.dpsgd` with ``algorithm.mechanism``, for all samples together. The noise
      multiplier is `dpjax.noise.langevin_multiplier`: to meet an epsilon, change the rate, the
      batch size or the number of steps.

    Example:
      >>> import dpjax, jax.numpy as jnp
      >>> algorithm = dp_sgld(
      ...     lambda w, x: 0.5 * jnp.sum((w - x) ** 2),
      ...     learning_rate=1e-4,
      ...     sampling=dpjax.sampling.poisson(examples=1000, batch_size=100),
      ...     clipping=dpjax.clipping.flat(bound=2.0),
      ...     steps=50,
      ...     data=jnp.ones((1000, 3)),
      ...     samples=5,
      ... )
      >>> round(algorithm.mechanism.noise_multiplier, 9)  # 2 x 100 / (1000 x 2 x 0.01)
      10.0
      >>> state = algorithm.init(jnp.zeros(3))
      >>> state, _ = dpjax.fit(algorithm, state, progress=False)
      >>> dpjax.training.samples(state).shape
      (5, 3)

    References:
      Welling and Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", 2011;
      Wang, Fienberg and Smola, "Privacy for Free: Posterior Sampling and Stochastic Gradient
      Monte Carlo", 2015. Algorithm 3 of Bu, Wang, Dai and Long, "On the Convergence and
      Calibration of Deep Learning with Differential Privacy", 2023, is a step of rate
      $2 \eta / n$ at temperature $n / 2$; it does not sample from the posterior.
    """
    call = "training.dp_sgld"
    hint = "math.inf is a flat prior."
    prior_deviation = checks.positive(call, "prior_deviation", prior_deviation, hint, infinite=True)
    if callable(learning_rate):
        learning_rate = positive_plan(f"{call}: the rate", learning_rate, steps)
    # The multiplier is computed from the rate, so the accounted noise is the noise of the paper.
    multiplier = noise.langevin_multiplier(
        learning_rate,
        clipping,
        examples=sampling.examples,
        batch_size=sampling.batch_size,
        temperature=temperature,
    )
    mechanism = Mechanism(
        sampling=sampling,
        clipping=clipping,
        noise_multiplier=multiplier,
        steps=steps,
        preparation=preparation,
        before=before,
    )
    if burn_in is None:
        burn_in = steps // 2
    if every is None:
        # Samples are spread over the remaining steps, because neighbouring steps are nearly equal.
        every = max(1, (steps - burn_in) // samples)
    optimizer = optax.chain(
        # The gradient of the Gaussian prior, w / s^2, is divided by n, as the loss is a mean.
        optax.add_decayed_weights(1 / (sampling.examples * prior_deviation**2)),
        optax.scale_by_learning_rate(schedules.times(learning_rate, sampling.examples / 2)),
        keep_samples(samples, burn_in=burn_in, every=every),
    )
    # The rest is DP-SGD: draw, clipping, noise and ledger are implemented once.
    return dpsgd(loss, optimizer, mechanism, data, **options)
