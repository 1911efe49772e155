# SPDX-License-Identifier: Apache-2.0
"""Several views of one example, averaged before clipping, so the noise does not grow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import checks, trees
from dpjax.losses.modules import checked_example
from dpjax.types import Key, LossFn, Purpose, PyTree


def augmented(
    loss: LossFn, augment: Callable[[Key, Array], Array], views: int, *, key: Key
) -> LossFn:
    r"""Makes the mean of a loss over random views of an example.

    $$ \frac1K \sum_{k=1}^K \text{loss}(\theta, (a_k(x), y)) $$

    The view $a_k(x)$ is the input after ``augment`` with the k-th of K independent keys.

    Args:
      loss: ``loss(params, (x, y))``, as from `of`.
      augment: ``augment(key, x) -> view``, of the shape of x.
      views: K, the multiplicity; time and memory of a step grow with it.
      key: Root key of the views; it need not be secret.

    Returns:
      ``loss(params, (x, y, *numbers))``. The whole numbers are folded into the key: the
      example's row, a column of the data, gives each example its own views, and the step, which
      ``dpjax.dpsgd(per_step=...)`` adds, gives new views in each step. Without numbers all
      examples have the same views in all steps.

    Privacy:
      The mean over views is one example's loss: clipped once, sensitivity unchanged.

    Example:
      >>> from dpjax import losses, models
      >>> loss = losses.of(models.MLP(features=()), losses.cross_entropy)
      >>> flip = lambda key, x: jnp.where(jax.random.bernoulli(key), x[:, ::-1], x)
      >>> loss = losses.augmented(loss, flip, views=4, key=jax.random.key(0))
      >>> data = (jnp.zeros((100, 8, 8, 1)), jnp.zeros(100, int), jnp.arange(100))
      >>> # dpjax.dpsgd(loss, optimizer, mechanism, data, per_step=lambda step: step)

    References:
      De et al., "Unlocking High-Accuracy Differentially Private Image Classification through
      Scale", 2022, section 3.3.
    """
    views = checks.whole("losses.augmented", "views", views)
    checks.key("losses.augmented", key)
    # The purpose keeps these draws apart from others of the same root key. `mappable` makes a
    # threefry key, because training maps the loss over examples, and with an rbg key `jax.vmap`
    # gives every example the draws of the first one.
    views_key = trees.mappable(jax.random.fold_in(key, Purpose.VIEWS))

    def mean_loss(params: PyTree, example: tuple[Any, ...]) -> Float[Array, ""]:
        x, y, *numbers = checked_example("augmented", example)
        # A key that is derived from row and step needs no random state: the loss stays pure, and a
        # resumed run draws the same views. Folds are sequential, so (row 1, step 2) and (row 2,
        # step 1) differ.
        example_key = functools.reduce(jax.random.fold_in, numbers, views_key)
        view_keys = jax.random.split(example_key, views)
        views_of_x = jax.vmap(augment, (0, None))(view_keys, x)
        values = jax.vmap(lambda view: loss(params, (view, y)))(views_of_x)
        return jnp.mean(values)

    return mean_loss
