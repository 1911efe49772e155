# SPDX-License-Identifier: Apache-2.0
"""Norms of pre-activations, by layer.

In private training with the cross-entropy they grow, and gradients with them; bounded activations
and the penalty of losing_less_2022 prevent this.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpjax import trees
from dpjax.diagnostics.vectors import length
from dpjax.types import PyTree


def preactivation_norms(model: nn.Module, params: PyTree, x: PyTree) -> dict[str, Array]:
    """The norm of the pre-activations of each hidden layer, on average over a batch.

    Args:
      model: A Linen module that keeps its pre-activations in the collection
        "preactivations", as all modules of `dpjax.models` do.
      params: Its parameters.
      x: A batch of inputs.

    Privacy:
      The mean over the batch has no noise: it is as private as the batch.

    Example:
      >>> from dpjax.models import MLP
      >>> model, x = MLP(features=(4,), activation=jnp.tanh), jnp.ones((5, 3))
      >>> params = model.init(jax.random.key(0), x[0])["params"]
      >>> list(preactivation_norms(model, params, x))
      ['hidden/0']
    """

    def norms(x: PyTree) -> dict[str, Array]:
        _, sown = model.apply({"params": params}, x, mutable=["preactivations"])
        if not jax.tree.leaves(sown):
            raise ValueError(
                f"diagnostics.preactivation_norms: {type(model).__name__} keeps none. In the "
                "module, call self.sow('preactivations', 'hidden', h) before each activation."
            )
        named = zip(trees.leaf_names(sown), jax.tree.leaves(sown), strict=True)
        return {name.removeprefix("preactivations/"): length(h) for name, h in named}

    # By vmap, because a model may be written for one example only.
    return jax.tree.map(jnp.mean, jax.vmap(norms)(x))
