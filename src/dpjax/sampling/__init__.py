# SPDX-License-Identifier: Apache-2.0
"""Samplers: which examples each step sees, and the privacy event proved for that sampling.

A draw is a pure function of ``(key, step)``: a resumed run replays nothing. The list of drawn
examples is secret; data set size, expected batch size and rates are public.

`poisson`, `fixed`, `shuffled` and `random_allocation` draw small batches of large data sets in time
and memory of the batch, by `dpjax.sampling.sparse`. Indices are int32. Beyond 2^31 - 1 examples
they are pairs of 32-bit words, which `on_host` joins for a `dpjax.data.Stream`. For a loop of one's
own, the method ``sampler.batch(data, key, step)`` gives rows and mask. A `dpjax.types.Sampler` of
your own describes its draws by `stated`.
"""

from dpjax.sampling.allocation import random_allocation
from dpjax.sampling.cycles import balls_in_bins, cyclic_poisson
from dpjax.sampling.draws import fold, on_host
from dpjax.sampling.epochs import curriculum, shuffled
from dpjax.sampling.events import from_facts, stated
from dpjax.sampling.independent import fixed, full, poisson, scored
from dpjax.sampling.names import by_name
from dpjax.sampling.persons import persons

__all__ = [
    "balls_in_bins",
    "by_name",
    "curriculum",
    "cyclic_poisson",
    "fixed",
    "fold",
    "from_facts",
    "full",
    "on_host",
    "persons",
    "poisson",
    "random_allocation",
    "scored",
    "shuffled",
    "stated",
]
