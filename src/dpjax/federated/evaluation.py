# SPDX-License-Identifier: Apache-2.0
"""Metrics per client: an average over examples hides clients for whom the model fails.

These functions add no noise: their results are private.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float

from dpjax.federated.clients import Clients
from dpjax.types import PyTree

Metric = Callable[[PyTree, PyTree], Array]

# Examples in one vectorised call.
_TOGETHER = 256


def scores(metric: Metric, params: PyTree, clients: Clients) -> Float[np.ndarray, " clients"]:
    """The mean of a metric over each client's examples; NaN for a client without examples.

    Args:
      metric: ``metric(params, example) -> number``, for example 1 where the prediction is right.
        It is compiled once, as by `jax.jit`, so other arrays that it reads are constants.
      params: Parameters of the model.
      clients: The clients that trained, or the same clients with held-out examples.

    Privacy:
      Not private: no noise.

    Example:
      >>> clients = Clients.of([np.array([1.0, 0.0]), np.array([]), np.array([1.0])])
      >>> scores(lambda params, example: example, None, clients).tolist()
      [0.5, nan, 1.0]
    """
    values = np.asarray(_values(metric, params, clients), np.float64)
    counts = np.asarray(clients.counts)
    owners = np.repeat(np.arange(len(clients)), counts)
    totals = np.bincount(owners, weights=values, minlength=len(clients))
    return np.divide(totals, counts, out=np.full(len(clients), np.nan), where=counts > 0)


def evaluate_clients(
    metric: Metric, params: PyTree, clients: Clients
) -> dict[str, dict[str, float]]:
    """The distribution of a metric over clients, with equal weight for each client.

    The arguments are as in `scores`.

    Returns:
      ``{"private": {...}}`` with the mean over clients, the minimum, the 10 %, 50 % and 90 %
      quantiles, and the mean over all examples. Clients without examples are left out. Merge it
      into the result of the ``evaluate`` function of `dpjax.fit`.

    Privacy:
      Not private: no noise.

    Example:
      >>> clients = Clients.of([np.array([1.0, 0.0, 0.0, 1.0]), np.array([1.0])])
      >>> private = evaluate_clients(lambda params, example: example, None, clients)["private"]
      >>> private["client mean"], private["client lowest"], private["example mean"]
      (0.75, 0.5, 0.6)
    """
    counts = np.asarray(clients.counts)
    # A client without examples has no score.
    has_examples = counts > 0
    known = scores(metric, params, clients)[has_examples]
    lowest, tenth, median, ninetieth = np.quantile(known, [0.0, 0.1, 0.5, 0.9]).tolist()
    # This mean differs from that over clients if large clients have better or worse scores.
    of_examples = np.average(known, weights=counts[has_examples])
    measures = {
        "client mean": float(known.mean()),
        "example mean": float(of_examples),
        "client lowest": lowest,
        "client 10 %": tenth,
        "client median": median,
        "client 90 %": ninetieth,
    }
    return {"private": measures}


@partial(jax.jit, static_argnums=0)
def _values(metric: Metric, params: PyTree, clients: Clients) -> Float[Array, " examples"]:
    # All rows of all clients are mapped together, because each client's shape is another program.
    return jax.lax.map(partial(metric, params), clients.examples, batch_size=_TOGETHER)
