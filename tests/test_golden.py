# SPDX-License-Identifier: Apache-2.0
"""Golden behaviours: what a key, a step and a seed give, written down once.

A stored run is resumed by drawing its next step again from (key, step).  If any figure
here changes, old checkpoints resume with other batches or other noise: change it on
purpose, say so in BUILD_NOTES.md, or find out what went wrong.
"""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import clipping, federated, noise, sampling


def test_the_noise_of_a_key():
    rule, like = clipping.flat(0.5), {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    link = noise.gaussian(2.0, rule, jax.random.key(0))
    state = link.init(like)
    for a, b in [
        ([-0.37652, 0.47943, 1.11674], [-0.80173, 1.68024]),
        ([-1.18661, -0.27670, 1.04662], [1.60301, -1.55151]),
    ]:
        out, state = link.update(clipping.trusted_sum(like, rule), state)
        np.testing.assert_allclose(out["a"], a, atol=1e-5)
        np.testing.assert_allclose(out["b"], b, atol=1e-5)


DRAWS = [
    (sampling.poisson(1000, 5), 0, [60, 89, 155, 256, 285, 372, 723, 747, 829]),
    (sampling.poisson(1000, 5), 1, [309, 595, 612]),
    (sampling.poisson(1000, 5), 25, [276, 339, 740, 847]),
    (sampling.shuffled(100, 5), 0, [52, 35, 55, 24, 86]),
    (sampling.shuffled(100, 5), 25, [90, 89, 83, 95, 55]),
    (sampling.fixed(100, 5), 1, [36, 4, 93, 48, 35]),
    (sampling.fixed(100, 5), 25, [75, 40, 60, 27, 49]),
    # Drawn in time of the batch, with indices of 32 bits and beyond.
    (sampling.poisson(10**6, 4), 25, [157028, 421004, 885094]),
    (
        sampling.poisson(10**12, 4),
        25,
        [404314319622, 408853614900, 525012085418, 568995025462, 830923184324, 963668802165],
    ),
    (sampling.fixed(10**6, 4), 25, [309325, 576415, 739007, 16278]),
    (sampling.fixed(10**12, 4), 25, [799497415853, 641130625403, 841179592792, 755947583163]),
    (sampling.random_allocation(100, 20), 25, [13, 38, 50, 54, 78, 93]),
    (sampling.random_allocation(10**6, 250_000), 25, [123957, 883829]),
    (sampling.shuffled(10**6, 4), 25, [982750, 708884, 906980, 401829]),
    (sampling.shuffled(10**12, 4), 25, [339299524806, 182223594167, 60283223989, 961535801634]),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("sampler", "step", "want"), DRAWS)
def test_the_draws_of_a_key(sampler, step, want):
    draw = sampler.draw(jax.random.key(7), step)
    assert sampling.on_host(draw).tolist() == want


def test_ten_steps_on_the_digits():
    digits = dpjax.data.load("digits")
    model = dpjax.models.MLP(features=(16,), classes=10)
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(1437, 100),
        clipping=clipping.flat(1.0),
        noise_multiplier=1.0,
        steps=10,
    )
    algorithm = dpjax.dpsgd(
        dpjax.losses.of(model, dpjax.losses.cross_entropy),
        optax.sgd(0.5, momentum=0.9),
        mechanism,
        digits.train,
    )
    params = model.init(jax.random.key(0), jnp.zeros((8, 8, 1)))["params"]
    state = algorithm.init(params, jax.random.key(1))
    infos = []
    for _ in range(10):
        state, info = algorithm.step(state)
        infos.append(info)
    assert [int(infos[i].examples) for i in (0, 9)] == [105, 109]
    np.testing.assert_allclose([infos[i].loss for i in (0, 9)], [2.447772, 1.831597], rtol=1e-3)
    np.testing.assert_allclose([infos[i].norm[0] for i in (0, 9)], [3.85941, 3.43846], rtol=1e-3)
    assert optax.tree.norm(state.params) == pytest.approx(6.038666, rel=1e-3)
    assert mechanism.epsilon(1e-5) == pytest.approx(2.671722, rel=1e-5)
    assert mechanism.epsilon(1e-5, "pld") == pytest.approx(2.145836, rel=1e-3)


@pytest.mark.thorough
@pytest.mark.promotes
def test_three_rounds_of_clients():
    """The draw, the order of local examples, the weights and the noise of (key, round)."""
    sizes = np.random.default_rng(0)
    clients = federated.Clients.of([sizes.normal(size=(1 + i % 4, 3)) for i in range(20)])
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(20, 8),
        clipping=clipping.flat(1.0),
        noise_multiplier=1.0,
        steps=3,
        unit="client",
    )
    algorithm = federated.fedavg(
        lambda w, x: 0.5 * jnp.sum((w - x) ** 2),
        optax.sgd(1.0, momentum=0.9),
        mechanism,
        clients,
        client_optimizer=optax.sgd(0.1),
        local_batch_size=2,
        local_epochs=1,
    )
    state, infos = algorithm.run(algorithm.init(jnp.zeros(3), jax.random.key(3)), 3)
    assert infos.clients.tolist() == [10, 10, 10]
    np.testing.assert_allclose(state.params, [0.106082, 0.2940999, 0.8704168], rtol=1e-4)
    assert float(infos.norm[2, 0]) == pytest.approx(0.147878, rel=1e-4)


# Persons 0 to 6, with five or six rows each.
PERSONS = sampling.persons(np.arange(40) % 7, batch_size=3, most_rows=3)


@pytest.mark.parametrize(
    ("step", "want"),
    [
        (0, [[17, 31, 3], [18, 11, 39], [12, 19, 5], [20, 13, 34]]),
        (25, [[14, 28, 35], [9, 23, 30]]),
    ],
)
def test_the_draws_of_persons(step, want):
    draw = PERSONS.draw(jax.random.key(7), step)
    assert sampling.on_host(draw).tolist() == want


def three_steps_of_persons(in_memory=True, **options):
    """The parameters, the drawn persons and the mean norms of three steps."""
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(40, 3)).astype(np.float32)
    mechanism = dpjax.Mechanism(
        sampling=PERSONS,
        clipping=clipping.flat(1.0),
        noise_multiplier=1.0,
        steps=3,
    )
    algorithm = dpjax.dpsgd(
        lambda w, x: 0.5 * jnp.sum((w - x) ** 2),
        optax.sgd(0.5, momentum=0.9),
        mechanism,
        rows if in_memory else dpjax.data.Stream(rows),
        **options,
    )
    state, infos = algorithm.run(algorithm.init(jnp.zeros(3), jax.random.key(3)), 3)
    return np.asarray(state.params), infos.examples.tolist(), infos.norm[:, 0]


def assert_three_steps_of_persons(**options):
    params, drawn, norms = three_steps_of_persons(**options)
    assert drawn == [4, 3, 4]
    np.testing.assert_allclose(params, [0.0366766, 0.0452590, 1.2632211], rtol=1e-4)
    np.testing.assert_allclose(norms, [0.8725917, 0.5994739, 1.0746342], rtol=1e-4)


@pytest.mark.promotes
@pytest.mark.parametrize("in_memory", [True, False])
def test_three_steps_of_persons(in_memory):
    assert_three_steps_of_persons(in_memory=in_memory)


ON_TWO_DEVICES = """
import test_golden
from dpjax import meshes

for in_memory in (True, False):
    test_golden.assert_three_steps_of_persons(
        in_memory=in_memory, mesh=meshes.parse("data:2"), microbatch_size=1
    )
"""


@pytest.mark.thorough
def test_three_steps_of_persons_on_two_devices():
    command = [sys.executable, "-c", ON_TWO_DEVICES]
    folders = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": folders, "JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.promotes
def test_three_steps_of_a_composite_loss():
    """A loss that changes with the epoch, here of two steps."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 4)).astype(np.float32)
    y = np.arange(60) % 3
    model = dpjax.models.MLP(features=(5,), classes=3)
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(60, 12),
        clipping=clipping.flat(1.0),
        noise_multiplier=1.0,
        steps=3,
    )
    algorithm = dpjax.dpsgd(
        dpjax.losses.of(model, dpjax.losses.composite(threshold=1.0, beta=2.0)),
        optax.sgd(0.5),
        mechanism,
        (x, y),
        per_step=lambda step: step // 2,
    )
    params = model.init(jax.random.key(0), jnp.zeros(4))["params"]
    state, infos = algorithm.run(algorithm.init(params, jax.random.key(1)), 3)
    assert infos.examples.tolist() == [13, 11, 15]
    np.testing.assert_allclose(infos.loss, [0.7449703, 0.7079447, 0.6198386], rtol=1e-4)
    np.testing.assert_allclose(infos.norm[:, 0], [1.838272, 1.842579, 1.686651], rtol=1e-4)
    assert optax.tree.norm(state.params) == pytest.approx(2.381172, rel=1e-4)


def test_the_statement_word_for_word():
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(examples=60_000, batch_size=256),
        clipping=clipping.flat(1.0),
        noise_multiplier=1.1,
        steps=14_063,
    )
    head = dpjax.statement(mechanism, 1e-5).split("\n\nReferences")[0]
    assert re.sub(r" \(dpjax [^)]*\)", "", head) == STATEMENT, "but for versions"


STATEMENT = """\
Privacy statement

  (2.39, 1e-05)-differentially private, as proved by PLD.

  unit          one example
  neighbours    add-or-remove: data sets that differ by one example added or removed
  sampler       poisson: 256 of 60,000 examples a step (rate 0.00427)
                exact Poisson sampling; amplification by sampling is proved and counted
  clipping      flat, 1 group: one example moves the sum by at most 1
  noise         multiplier 1.1 x sensitivity, on the sum
                = standard deviation 0.004297 on the mean
  steps         14,063
  delta         1e-05

  epsilon           2.39   pld: tightest upper bound, by privacy loss distributions
  epsilon           2.60   rdp: upper bound by Rényi divergences, improved conversion
  epsilon           3.01   rdp-classic: looser upper bound, as older papers print
  epsilon           2.33   gdp: an estimate, not a bound: central limit of Gaussian DP

  in a paper    We ran 14,063 steps with Poisson sampling of 256 of 60,000 examples, per-example
                clipping (flat, sensitivity 1) and Gaussian noise with multiplier 1.1. This is
                (2.39, 1e-05)-differentially private for data sets that differ by one example added
                or removed (add-or-remove), by the PLD accountant.

Not covered
  - the choice of this run among several, also by public data: see accounting.select_best
  - choosing hyper-parameters or a checkpoint by looking at the private data
  - statistics of the data outside this run (means, class weights, vocabularies), unless named above
  - per-step info (losses, norms, clipped fractions): computed before the noise
  - examples that belong together: the unit is one example, not one person
  - models or data in which examples see each other (batch statistics)
  - attacks on float32 arithmetic or on the pseudo-random generator"""
