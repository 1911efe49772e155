# SPDX-License-Identifier: Apache-2.0
"""A mechanism for tests, which name only the facts that matter to them."""

from dpjax import Mechanism, clipping, sampling


def mechanism_with(examples=50, batch=10, **facts):
    """Poisson batches, a bound of 1 and a multiplier of 1 for 20 steps, but for `facts`."""
    usual = {"clipping": clipping.flat(1.0), "noise_multiplier": 1.0, "steps": 20}
    if "sampling" not in facts:
        usual["sampling"] = sampling.poisson(examples, batch)
    return Mechanism(**{**usual, **facts})
