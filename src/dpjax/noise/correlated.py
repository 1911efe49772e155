# SPDX-License-Identifier: Apache-2.0
"""Noise that is correlated over the steps: sums of many steps have less of it.

An optimizer adds up what steps release, and there the noise of one step can cancel some of the
noise of earlier ones. It is what DP-FTRL and matrix factorisation run.
"""

from __future__ import annotations

import optax

from dpjax import checks, strategies
from dpjax.noise.link import sum_link
from dpjax.strategies import Participation, Strategy
from dpjax.types import Clipping, Key, NoiseMultiplier


def correlated(
    strategy: Strategy,
    noise_multiplier: NoiseMultiplier,
    rule: Clipping,
    key: Key | None = None,
    *,
    participation: Participation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""The Optax link that adds noise correlated over the steps to clipped sums.

    $$ s_t + m \, \Delta \, \mathrm{sens}(C) \, (C^{-1} Z)_t,
       \qquad Z \sim \mathcal{N}(0, I) $$

    Args:
      strategy: $C$, from `dpjax.strategies`; it also fixes the number of steps.
      noise_multiplier: $m$, relative to the whole run: a number, or a tuple with one number per
        group. Schedules are refused: the strategy is one.
      rule: As for `gaussian`; $\Delta$ is its sensitivity.
      key: As for `gaussian`.
      participation: In which steps one example can be; by default in one step only, as in a
        single epoch. $\mathrm{sens}(C)$ follows from it.

    Returns:
      As for `gaussian`. Beyond ``strategy.steps`` it raises, or inside ``jit`` releases NaN.

    Privacy:
      All steps together are one Gaussian mechanism with multiplier $m$, if no example is in more
      steps than ``participation`` allows, even if later gradients depend on earlier releases.
      `dpjax.Mechanism` with ``noise=`` takes participation from the sampler.

    Example:
      >>> import dpjax
      >>> rule, strategy = dpjax.clipping.flat(bound=1.0), dpjax.strategies.square_root(steps=100)
      >>> optimizer = optax.chain(dpjax.clip_and_sum(rule), correlated(strategy, 1.1, rule))

    References:
      Denisov, McMahan, Rush, Smith and Thakurta, "Improved Differential Privacy for SGD via
      Optimal Private Linear Operators on Adaptive Streams", 2022.
    """
    call = "noise.correlated"
    checks.constant_noise(call, noise_multiplier)
    scale = strategies.sensitivity(strategy, Participation.or_once(call, participation))
    return sum_link(call, noise_multiplier, rule, key, strategy, scale)
