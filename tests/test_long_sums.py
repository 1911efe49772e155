# SPDX-License-Identifier: Apache-2.0
"""Sums of many microbatches: one example moves them by its bound, whatever rounds on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills

import dpjax
from dpjax import clipping, sampling
from dpjax.gradients import batching

RULE, KINDS = clipping.flat(1.0), ["in memory", "streamed"]


def hostile(size, micro):
    """Numbers from 0 to 1 whose microbatches round down, until one example shifts all of them."""
    x, total, last = np.zeros(size), 0.0, 0.0
    for k in range(size // micro):
        unit = 2.0 ** (np.floor(np.log2(max(total, 1))) - 23)  # the last bit of the running sum
        whole = np.floor(0.98 * micro / unit) * unit
        now = last - 0.02 * unit if k % 100 else 0.0
        x[k * micro : (k + 1) * micro] = (whole + 0.49 * unit) / micro
        x[k * micro] -= now
        x[(k + 1) * micro - 1] += now
        total, last = total + whole, now
    return np.clip(x, 0, 1).astype(np.float32)


@pytest.mark.sample(1)
@pytest.mark.parametrize("path", ["clipped_grad", "dpsgd"])
def test_one_example_moves_a_long_sum_by_its_bound(path):
    micro, size = 2, 8192
    rows = hostile(size, micro)

    def total(x):
        if path == "clipped_grad":
            clipped = dpjax.clipped_grad(lambda w, x: w * x, RULE, "vmap", micro)
            return float(jax.jit(clipped)(jnp.zeros(()), jnp.asarray(x)).value)
        mechanism = dpjax.Mechanism(
            sampling=sampling.full(len(x)), clipping=RULE, noise_multiplier=0.0, steps=1
        )
        options = {"engine": "vmap", "microbatch_size": micro}
        run = dpjax.dpsgd(lambda w, x: -w * x, optax.sgd(float(len(x))), mechanism, x, **options)
        return float(run.step(run.init(jnp.zeros(()), jax.random.key(0)))[0].params)

    moved = total(np.append(np.float32(1), rows)) - total(rows)
    # Reading the sum as one array rounds it once: half of its last bit on either side.
    assert abs(moved - 1) <= 2 * np.spacing(np.float32(rows.sum()))


@kills("gradients/batching.py", "(a - (rounded - back)) + (b - back)", "0 * rounded", slow=True)
@kills(
    "gradients/batching.py",
    "return two_sum(rounded, low + error)",
    "return rounded, error",
    slow=True,
)
@kills(
    "gradients/batching.py",
    "parts = _add_exactly(total.high, total.low, total.block)\n        value",
    "parts = total.high, total.low\n        value",
    slow=True,
)
@kills(
    "gradients/batching.py",
    "_rounded(lacks + (x - kept), ",
    "_rounded(lacks + 0 * x, ",
    case="3",
    slow=True,
)
@kills(
    "gradients/batching.py",
    "_rounded(lacks + (x - kept), ",
    "_rounded(x - kept, ",
    case="3",
    slow=True,
)
@pytest.mark.parametrize("devices", [1, 3])
def test_a_blanked_example_moves_a_sum_of_two_parts_by_one_bound(devices):
    """The public size of a data set stands: a neighbour has a row that counts as nothing."""
    shares = hostile(60_000, 2).reshape(devices, -1, 2)
    zero = jnp.zeros(())

    @jax.jit
    def total(first):
        def add(carry, pair):
            return batching.settled(carry._replace(block=pair[0] + pair[1])), None

        def share(pairs):
            done = jax.lax.scan(add, batching.Total(zero, [zero], [zero]), pairs[:-1])[0]
            return done._replace(block=jnp.sum(pairs[-1]))  # a block that has not ended

        each = [share(x) for x in jnp.asarray(shares).at[0, 0, 0].set(first)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
        layout = batching.Layout(2, jax.sharding.AbstractMesh((devices,), ("data",)), ("data",))
        join = jax.vmap(lambda x: batching._joined(x, (), layout, [60_000.0]), axis_name="data")
        return [part[0] for part in join(stacked)[:2]]

    with_it, without = (sum(map(np.float64, total(first))) for first in (1 / 3, 0.0))
    assert abs(with_it - without - 1 / 3) < 1e-6
    shares[0, 0, 0] = 0
    assert abs(without - np.sum(shares[..., 0] + shares[..., 1], dtype=np.float64)) < 1e-6


@pytest.mark.sample(1)
@kills(
    "training/step.py",
    "lost=lost,\n",
    "lost=None,\n",
    case="in memory",
    slow=True,
)
@kills("training/step.py", "data, held, end_block)", "data, held)", case="in memory", slow=True)
@kills("training/streaming.py", "sums = its.settle(sums)", "pass", case="streamed", slow=True)
@kills("noise/link.py", "else lost + scaled", "else scaled", case="in memory", slow=True)
@kills(
    "gradients/batching.py",
    "= examples <= layout",
    "= True or layout",
    case="in memory",
    slow=True,
)
@pytest.mark.parametrize("kind", [lambda x: x, lambda x: dpjax.data.Stream(list(x))], ids=KINDS)
def test_what_a_long_sum_rounds_away_meets_the_noise(kind):
    """Beside 2^25, one more example is a quarter of a last bit; it must still move the noise."""
    rows, count, large = 64, 4096, 2.0**25
    data = np.zeros((rows, count), np.float32)
    data[0] = large

    def mean(data):
        mechanism = dpjax.Mechanism(
            sampling=sampling.full(rows),
            clipping=clipping.flat(2.0**32),
            noise_multiplier=2.0**-29,
            steps=1,
        )
        run = dpjax.dpsgd(
            lambda w, x: -jnp.sum(w * x), optax.sgd(rows), mechanism, kind(data), microbatch_size=1
        )
        state, _ = run.step(run.init(jnp.zeros(count), jax.random.key(0)))
        return np.mean(np.asarray(state.params, np.float64) - large)

    without = mean(data)
    data[40] = 1
    # Noise of deviation 8 lets the mean of many roundings see what one rounding cannot.
    assert mean(data) - without == pytest.approx(1, abs=0.1)
