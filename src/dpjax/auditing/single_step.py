# SPDX-License-Identifier: Apache-2.0
"""White-box audit of one step, from per-example gradients: of a rule and a mechanism alone."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax import clipping, trees
from dpjax.auditing.algorithm_step import in_units
from dpjax.mechanism import Mechanism
from dpjax.mechanism.link import private_mean
from dpjax.noise.link import first_memory
from dpjax.types import Key, Purpose, PyTree

_ENOUGH = 4096  # the standard deviation of this many numbers is known to about one per cent


def audit_step(mechanism: Mechanism, gradients: PyTree, canary: PyTree, key: Key) -> float:
    r"""White-box audit of one private step, without its algorithm: the separation of two batches.

    $$ \mu = \lVert \Sigma^{-1/2} (\mathbb{E}[M(D \cup \{c\})] - \mathbb{E}[M(D)]) \rVert $$

    The noise of each leaf is measured, to one or two per cent. A first step with multiplier $m$,
    without sampling, and a canary that reaches the rule's bounds has $\mu = 1 / m$; more breaks the
    guarantee, less wastes noise. It is infinite if a leaf that the canary moves has no noise.

    ``gradients`` are the per-example gradients of the batch ``(batch, ...)``, ``canary`` is one
    example's, without batch axis, and ``key`` is the root key of the audited steps.

    Example:
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.poisson(examples=100, batch_size=10),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=2.0,
      ...     steps=5,
      ... )
      >>> gradients, canary = jnp.ones((10, 5000)), jnp.full(5000, 9.0)
      >>> separation = audit_step(mechanism, gradients, canary, jax.random.key(0))
      >>> round(separation, 1)  # 1 / 2.0
      0.5
    """
    if mechanism.adaptive is not None or mechanism.clipping.projections is not None:
        raise ValueError(
            "auditing.audit_step: expected fixed bounds and exact norms. Use audit_algorithm."
        )
    both = jax.tree.map(
        lambda g, c: jnp.concatenate([g, jnp.asarray(c, g.dtype)[None]]), gradients, canary
    )
    # A sum over no examples: the step then releases noise alone.
    like = jax.tree.map(lambda g: jnp.zeros(g.shape[1:], trees.wide(g.dtype)), gradients)

    def privatized(summed: PyTree, key: Key) -> list[Array]:
        # The pure function, and not the link: an audit gives one noise to two sums on purpose.
        memory = first_memory(mechanism.noise, like)
        mean, *_ = private_mean(mechanism, summed, key, jnp.int32(0), memory=memory)
        return jax.tree.leaves(mean)

    with_canary = privatized(clipping.clip(mechanism.clipping, both)[0], key)
    without = privatized(clipping.clip(mechanism.clipping, gradients)[0], key)
    # One key: the noise of both batches cancels, and only its deviation has to be measured.
    noise = _measured(lambda key: privatized(like, key), key)
    # Leaf by leaf: groups have noise of their own scale.
    moved = [
        np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        for a, b in zip(with_canary, without, strict=True)
    ]
    return float(in_units(np.array([moved]), np.array(noise))[0])


def _measured(noise: Callable[[Key], list[Array]], key: Key) -> list[np.floating]:
    """The deviation of each leaf of pure noise; small leaves are drawn under many keys."""
    leaves = noise(key)
    small = [i for i, leaf in enumerate(leaves) if 0 < leaf.size < _ENOUGH]
    if small:
        times = -(-_ENOUGH // min(leaves[i].size for i in small))
        again = jax.jit(lambda keys: jax.lax.map(lambda k: [noise(k)[i] for i in small], keys))
        keys = jax.random.split(jax.random.fold_in(key, Purpose.MEASURES), times)
        for i, drawn in zip(small, again(keys), strict=True):
            leaves[i] = drawn
    return [np.std(np.asarray(leaf, np.float64)) if leaf.size else np.float64(0) for leaf in leaves]
