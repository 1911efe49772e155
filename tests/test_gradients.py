# SPDX-License-Identifier: Apache-2.0
"""`clipped_grad`: what it returns, what it refuses, whose models it takes."""

import functools
import subprocess
import sys

import equinox
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from mutation import kills
from small_mechanisms import mechanism_with

import dpjax
from dpjax import clipped_grad, clipping, gradients, losses, testing
from dpjax.gradients import batching
from dpjax.gradients._bookkeeping import sites
from dpjax.gradients._layout import bytes_per_example
from dpjax.gradients.batching import Rows
from dpjax.gradients.clipped_grad import clipped_sum
from dpjax.gradients.nan_isolation import isolated
from dpjax.gradients.traced import Traced

RULE, KINDS = clipping.flat(1.0), ["in memory", "streamed"]


def loss(w, x):
    return 0.5 * jnp.sum((w - x) ** 2)


@pytest.mark.thorough
def test_aux_comes_out_a_row_an_example():
    def with_aux(w, x):
        return loss(w, x), {"residual": w - x, "first": x[0]}

    for engine in gradients.ENGINES:
        clipped = clipped_grad(with_aux, RULE, engine, 2, has_aux=True)
        result = clipped(jnp.zeros(3), jnp.arange(15.0).reshape(5, 3))
        assert result.aux["residual"].shape == (5, 3)
        np.testing.assert_allclose(result.aux["first"], [0, 3, 6, 9, 12])
        np.testing.assert_allclose(result.losses[1], 0.5 * (9 + 16 + 25))


@pytest.mark.parametrize(
    ("engine", "given", "loops"),
    [("vmap", None, False), ("vmap", 2, True), ("scan", None, False), ("scan", 2, True)],
)
def test_a_given_microbatch_size_holds_for_every_engine(engine, given, loops):
    """Without one, "vmap" takes the whole batch, and "scan" what fits."""
    clipped, batch = clipped_grad(loss, RULE, engine, given, devices=1), jnp.ones((6, 3))
    program = jax.make_jaxpr(clipped)(jnp.zeros(3), batch)
    assert loops == ("length=3" in str(program))


def test_norms_are_those_before_clipping():
    result = dpjax.clipped_grad(loss, RULE)(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.3, 0.4]]))
    np.testing.assert_allclose(result.norms, [[5.0], [0.5]], rtol=1e-6)
    np.testing.assert_allclose(result.factors, [[0.2], [1.0]], rtol=1e-6)
    np.testing.assert_allclose(result.value, [-0.9, -1.2], rtol=1e-6)


def test_layouts_are_chosen_from_the_shapes():
    example = jax.ShapeDtypeStruct((784,), jnp.float32)
    params = {"w": jax.ShapeDtypeStruct((784, 65_536), jnp.float32)}

    def matrix(p, x):
        return jnp.sum((x @ p["w"]) ** 2)

    small = gradients.layout(loss, jnp.zeros(784), example, 4096, "scan")
    large = gradients.layout(matrix, params, example, 4096, "scan")
    assert small.microbatch_size == 1024  # the most, see `dpjax.gradients.batching`
    assert 1 <= large.microbatch_size < small.microbatch_size
    # Book-keeping holds activations; the matrix never has a gradient per example.
    held = functools.partial(bytes_per_example, Traced(matrix), params, example)
    assert held("ghost") < held("vmap") / 50
    assert gradients.layout(matrix, params, example, 3) == gradients.Layout(3)
    assert gradients.layout(matrix, params, example, 0) == gradients.Layout(1)


def test_frozen_weights_are_worth_larger_microbatches():
    def size(loss, example):
        layout = gradients.layout(loss, jnp.zeros(8192), example, 10**6, devices=1)
        return layout.microbatch_size

    def product(inputs):
        weights = np.zeros((inputs, 8192), np.float32)
        example = jax.ShapeDtypeStruct((inputs,), jnp.float32)
        return size(lambda b, x: jnp.sum(jnp.tanh(x @ weights + b)), example)

    # A table whose rows are read is no weight of a product.
    table = jnp.zeros((2048, 8192))
    row = jax.ShapeDtypeStruct((), jnp.int32)
    rows = size(lambda b, i: jnp.sum(jnp.tanh(table[i] + b)), row)
    assert product(2048) > 4 * max(product(8), rows)


@pytest.mark.slow
def test_jit_vmap_and_grad_compose_with_it():
    clipped = dpjax.clipped_grad(loss, RULE)
    batch = jnp.arange(12.0).reshape(4, 3)
    plain = clipped(jnp.zeros(3), batch)
    np.testing.assert_allclose(jax.jit(clipped)(jnp.zeros(3), batch).value, plain.value, rtol=1e-6)
    stacked = jax.vmap(clipped, (0, None))(jnp.zeros((2, 3)), batch)
    np.testing.assert_allclose(stacked.value[1], plain.value, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 2])
def test_a_gradient_through_it_is_the_same_for_every_engine(size):
    """As for hypergradients and meta-learning."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"table": jax.random.normal(keys[0], (5, 3)), "kernel": jnp.eye(3)}
    batch = jax.random.randint(keys[1], (4, 6), 0, 5), jax.random.normal(keys[2], (4, 6, 3))

    def of_words(p, example):
        return jnp.sum(jnp.tanh(p["table"][example[0]] @ p["kernel"] * example[1]))

    def by(engine):
        def squares(scale):
            clipped = clipped_grad(of_words, RULE, engine, microbatch_size=size)
            scaled = jax.tree.map(lambda leaf: scale * leaf, params)
            return sum(jnp.sum(x**2) for x in clipped(scaled, batch).value.values())

        return jax.grad(jax.jit(squares))(1.5)

    np.testing.assert_allclose(by("auto"), by("vmap"), rtol=1e-4)


def called(*batch, loss=loss, params=None, rule=RULE, **options):
    """A call of `clipped_grad` with zeros, or what is given in their place."""
    params = jnp.zeros(3) if params is None else params
    return lambda: clipped_grad(loss, rule, **options)(params, *(batch or (PAIR,)))


def with_leaf(extra):
    return called(loss=lambda p, x: loss(p["w"], x), params={"extra": extra, "w": jnp.zeros(3)})


PAIR = jnp.zeros((2, 3))
NORMALISED = {"params": jnp.zeros(3), "batch_stats": {"mean": jnp.zeros(3)}}
TEACHES = [
    (ValueError, called(engine="fast"), "one of auto, vmap"),
    (ValueError, called(engine="scan", microbatch_size=8.5), r"8\.5.*whole number"),
    (TypeError, called(rule=1.0), r"is a float; .*clipping\.flat\(1\.0\)"),
    (TypeError, called(has_aux=True), r"returns \(scalar, aux\)"),
    (ValueError, called(loss=lambda w, x: w - x), "^clipped_grad: .*expected a real scalar"),
    (ValueError, called((PAIR, jnp.zeros(3))), "leading axis of one length"),
    (
        ValueError,
        called(loss=lambda p, x: loss(p["params"], x), params=NORMALISED),
        "hold .batch_stats",
    ),
    (TypeError, with_leaf(jnp.arange(3)), "^clipped_grad: leaf extra is int32; expected floating"),
    (ValueError, called(loss=lambda p, x: jnp.sum(x), params={}), "there are only 0 leaves"),
]


@pytest.mark.parametrize(("error", "call", "message"), TEACHES)
def test_errors_teach(error, call, message):
    with pytest.raises(error, match=message):
        call()


# The loss is any pure function: each library's models come as they are. ----------------

X = np.linspace(-1, 1, 5 * 6).reshape(5, 6).astype(np.float32)
Y = np.arange(5, dtype=np.int32) % 3


def linen_case():
    model = linen.Sequential([linen.Dense(8), linen.LayerNorm(), jnp.tanh, linen.Dense(3)])
    params = model.init(jax.random.key(0), jnp.zeros(6))["params"]
    return losses.of(model, losses.cross_entropy), params


def nnx_case():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(6, 8, rngs=rngs)
            self.second = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    graph, params = nnx.split(Net(nnx.Rngs(0)))

    def per_example(params, example):
        x, y = example
        return losses.cross_entropy(nnx.merge(graph, params)(x), y)

    return per_example, params


def equinox_case():
    model = equinox.nn.MLP(6, 3, 8, depth=1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = equinox.partition(model, equinox.is_inexact_array)

    def per_example(params, example):
        x, y = example
        return losses.cross_entropy(equinox.combine(params, static)(x), y)

    return per_example, params


@pytest.mark.slow
@pytest.mark.parametrize("case", [linen_case, nnx_case, equinox_case])
@pytest.mark.promotes
def test_models_of_any_library_train_privately(case):
    per_example, params = case()
    testing.assert_engines_agree(per_example, clipping.grouped(0.5, 2), params, (X, Y))
    mechanism = mechanism_with(5, 3, clipping=RULE, steps=2)
    algorithm = dpjax.dpsgd(per_example, optax.adam(1e-2), mechanism, (X, Y))
    state, info = algorithm.step(algorithm.init(params, jax.random.key(1)))
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    assert info.norm.shape == (1,)


@kills(
    "gradients/clipped_grad.py", "jnp.where(rows > 0, jnp.minimum(rows, 1), 0)", "rows", slow=True
)
def test_weights_are_held_to_one():
    """Weights scale what is already clipped, per example or per group, and never up."""
    params, batch = {"a": jnp.zeros(2), "b": jnp.zeros(3)}, jnp.arange(1.0, 6.0)

    def loss(p, x):
        return x * (jnp.sum(p["a"]) + jnp.sum(p["b"]))

    rule = clipping.grouped(0.5, clipping.by_leaf(params))
    weights = jnp.array([0.25, 1.0, 7.0, -3.0, jnp.nan])
    held = jnp.array([0.25, 1.0, 1.0, 0.0, 0.0])
    for engine in gradients.ENGINES:
        clipped = clipped_grad(loss, rule, engine, 2)
        every, by_group = clipped(params, batch), jnp.stack([weights, jnp.ones(5)], axis=1)
        result = clipped(params, batch, weights=weights)
        np.testing.assert_allclose(result.factors, every.factors * held[:, None], rtol=1e-6)
        np.testing.assert_allclose(jnp.linalg.norm(result.value["a"]), 0.5 * 2.25, rtol=1e-6)
        grouped = clipped(params, batch, weights=by_group).value
        np.testing.assert_allclose(grouped["a"], result.value["a"], rtol=1e-6)
        np.testing.assert_allclose(grouped["b"], every.value["b"], rtol=1e-6)
    with pytest.raises(ValueError, match="broadcast"):
        clipped_grad(loss, rule)(params, batch, weights=jnp.ones(4))


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", gradients.ENGINES)
@pytest.mark.parametrize(("size", "examples"), [(2, 5), (5, 5), (2, 40)])
@pytest.mark.promotes
def test_a_sum_is_added_to_what_was_there(engine, size, examples):
    """For every microbatch size; also for a table with few used rows, some used twice."""
    params = {"table": jnp.ones((9, 2)), "scale": jnp.ones(2)}

    def loss(p, x):
        return jnp.sum(x * p["table"][jnp.array([3, 1, 3])] * p["scale"])

    batch, mask = 1.0 + jnp.arange(examples), jnp.arange(examples) % 3 < 2
    clipped = clipped_grad(loss, clipping.flat(2.0), engine, size)
    start = jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), params)
    given = clipping.empty_sum(clipping.flat(2.0), params)._replace(value=start)
    alone = clipped(params, batch, mask).value
    both = jax.jit(clipped)(params, batch, mask, start=given).value
    total = jax.tree.map(jnp.add, alone, start)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), total, both)
    assert not alone["table"][0].any()
    assert alone["table"][3].all()


def hostile(size, micro):
    """Numbers from 0 to 1 whose microbatches round down, until one example shifts all of them."""
    x, total, last = np.zeros(size), 0.0, 0.0
    for k in range(size // micro):
        unit = 2.0 ** (np.floor(np.log2(max(total, 1))) - 23)  # the last bit of the running sum
        rounded = np.floor(0.98 * micro / unit) * unit
        now = last - 0.02 * unit if k % 100 else 0.0
        x[k * micro : (k + 1) * micro] = (rounded + 0.49 * unit) / micro
        x[k * micro] -= now
        x[(k + 1) * micro - 1] += now
        total, last = total + rounded, now
    return np.clip(x, 0, 1).astype(np.float32)


@kills("gradients/batching.py", "math.isqrt(2**11 //", "int(2**16 //", case="clipped_grad-2")
@kills(
    "gradients/batching.py", "low + ((high - (rounded - back)) + (block - back))", "low", slow=True
)
@pytest.mark.parametrize(("path", "micro"), [("clipped_grad", 2), ("dpsgd", 16)])
def test_one_example_moves_a_long_sum_by_its_bound(path, micro):
    rows = hostile(8192, micro)

    def total(x):
        if path == "clipped_grad":
            clipped = clipped_grad(lambda w, x: w * x, RULE, "vmap", micro)
            return float(jax.jit(clipped)(jnp.zeros(()), jnp.asarray(x)).value)
        mechanism = mechanism_with(sampling=dpjax.sampling.full(len(x)), noise_multiplier=0.0)
        options = {"engine": "vmap", "microbatch_size": micro}
        run = dpjax.dpsgd(lambda w, x: -w * x, optax.sgd(float(len(x))), mechanism, x, **options)
        return float(run.step(run.init(jnp.zeros(()), jax.random.key(0)))[0].params)

    moved = total(np.append(np.float32(1), rows)) - total(rows)
    # Reading the sum as one array rounds it once: half of its last bit on either side.
    assert abs(moved - 1) <= 2**-11 + 2 * np.spacing(np.float32(rows.sum()))


@pytest.mark.parametrize("devices", [1, 3])
def test_a_sum_in_two_parts_moves_by_one_bound(devices):
    shares = hostile(60_000, 2).reshape(devices, -1, 2)
    zero = jnp.zeros(())

    @jax.jit
    def total(first):
        def add(carry, pair):
            return carry._replace(block=pair[0] + pair[1]).settled(), None

        def share(pairs):
            done = jax.lax.scan(add, batching.Total(zero, zero, zero), pairs[:-1])[0]
            return done._replace(block=jnp.sum(pairs[-1]))  # a block that has not ended

        every = [share(x) for x in jnp.asarray(shares).at[0, 0, 0].set(first)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *every)
        layout = batching.Layout(2, jax.sharding.AbstractMesh((devices,), ("data",)), ("data",))
        join = jax.vmap(lambda x: batching._joined(x, (), layout, [60_000.0]), axis_name="data")
        return [part[0] for part in join(stacked)[:2]]

    with_it, without = (sum(map(np.float64, total(first))) for first in (1 / 3, 0.0))
    assert abs(with_it - without - 1 / 3) < 1e-5


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.promotes
@pytest.mark.parametrize(
    "kind", [lambda x: x, lambda x: dpjax.data.Stream(list(x))], ids=["in memory", "streamed"]
)
def test_what_a_long_sum_rounds_away_meets_the_noise(kind):
    """Beside 2^25, one more example is a quarter of a last bit; it must still move the noise."""
    rows, count, large = 64, 4096, 2.0**25
    data = np.zeros((rows, count), np.float32)
    data[0] = large

    def mean(data):
        mechanism = dpjax.Mechanism(
            sampling=dpjax.sampling.full(rows),
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
    data[60] = 1  # in the second block
    # Noise of deviation 8 lets the mean of many roundings see what one rounding cannot.
    assert mean(data) - without == pytest.approx(1, abs=0.1)


TWO_DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import numpy as np
from dpjax import clipped_grad, clipping

assert jax.local_device_count() == 2
loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)
w, x = jax.random.normal(jax.random.key(0), (3, 2)), jax.random.normal(jax.random.key(1), (7, 3))
mask = jnp.array([1, 1, 0, 1, 1, 1, 1])
rule = clipping.flat(0.3)
start = clipping.empty_sum(rule, w)._replace(value=w)
for engine in ("vmap", "ghost"):
    one, two = (
        jax.jit(clipped_grad(loss, rule, engine, 2, devices=n))(w, x, mask, start=start)
        for n in (1, None)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), one, two)
"""


@pytest.mark.slow
def test_two_devices_are_one():
    subprocess.run([sys.executable, "-c", TWO_DEVICES], check=True, timeout=120)


SPLIT_BATCH = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from dpjax import clipped_grad, clipping

whole = jax.random.normal(jax.random.key(0), (8, 6, 6, 3))
params = jax.random.normal(jax.random.key(1), (3, 3, 3, 4))


def split(kind):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    return jax.device_put(whole, NamedSharding(mesh, PartitionSpec("d")))


def conv(k, x):
    return jnp.sum(jnp.sin(jax.lax.conv_general_dilated(x[None], k, (1, 1), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"))))


def derived(k, x):
    return conv(k * jnp.mean(x), x)


def dense(k, x):
    return jnp.sum(jnp.tanh(jnp.tensordot(x, k, 3)))


def run(loss, batch, engine, jitted, devices=None):
    clipped = clipped_grad(loss, clipping.flat(0.3), engine, devices=devices)
    return jax.device_get((jax.jit(clipped) if jitted else clipped)(
        jnp.ones((6, 6, 3, 4)) if loss is dense else params, batch))


batch = split(AxisType.Auto)
estimated = clipped_grad(derived, clipping.jl(0.3, 2))
with pytest.raises((ValueError, RuntimeError), match="lies on 2 devices"):
    estimated(params, batch, key=jax.random.key(0))
for loss, engine in [(conv, "vmap"), (conv, "scan"), (derived, "ghost"), (conv, "ghost"),
                     (dense, "vmap"), (dense, "auto")]:
    alone = run(loss, whole, engine, True)
    refused = loss is derived or (loss is conv and engine != "ghost")
    for jitted, devices in [(True, 2), (True, None), (False, None)]:
        if refused and devices is None:
            with pytest.raises((ValueError, RuntimeError), match="clipped_grad.*2 .*devices=2"):
                run(loss, batch, engine, jitted, devices)
            continue
        both = run(loss, batch, engine, jitted, devices)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            alone[:4], both[:4])
for jitted in (True, False):
    run(conv, np.asarray(whole), "vmap", jitted)  # on no device yet
batch = split(AxisType.Explicit)
for jitted, devices in [(True, 2), (True, None), (False, None)]:
    with pytest.raises(ValueError, match="explicit axes"):
        run(conv, batch, "ghost", jitted, devices)
"""


def link_of(rows):
    """What a user's loop does with `Mechanism.private`, up to the noise."""

    def find(w, x):
        link = clipping.clip_and_sum(RULE)
        return link.update(rows(w, x), link.init(w))[0].value

    return find


def over_index(w, x):
    """The shard is a constant of the loss, so the batch of indices is equal on all devices."""
    return clipped_grad(lambda w, i: loss(w, x[i]), RULE, "vmap")(w, jnp.arange(len(x))).value


def rows_of(w, x):
    return jax.vmap(jax.grad(loss), (None, 0))(w, x)


def step_of(w, x):
    real, wide = jnp.ones(len(x), bool), jnp.zeros_like(w)
    return clipped_sum("dpsgd", loss, RULE, "vmap", w, x, real, None, None, wide).value


IN_A_SHARD_MAP = {
    "clipped_grad": over_index,
    "clip_and_sum": link_of(rows_of),
    "dpsgd": step_of,
}


@kills(
    "clipping/application.py",
    'meshes.refuse_tracking("clipping.clip")',
    "pass",
    case="clip_and_sum",
)
@kills(
    "gradients/clipped_grad.py",
    'meshes.refuse_tracking("clipped_grad")',
    "pass",
    case="clipped_grad",
)
@pytest.mark.parametrize("call", IN_A_SHARD_MAP)
def test_a_shard_map_that_sums_gradients_by_itself_is_refused(call):
    """Also where no argument varies: in a closure, or after the user's own `jax.grad`."""
    auto, w, x = (jax.sharding.AxisType.Auto,), jnp.zeros(3), jnp.ones((4, 3))
    specs = {"in_specs": (jax.P(), jax.P("d")), "out_specs": jax.P()}
    name = "clipping.clip" if call == "clip_and_sum" else call  # which that link calls
    for devices in (1, 2):
        mesh = jax.sharding.AbstractMesh((devices,), ("d",), auto)
        split = functools.partial(jax.shard_map, IN_A_SHARD_MAP[call], mesh=mesh, **specs)
        with pytest.raises(ValueError, match=rf"^{name}: a jax.shard_map that checks .*check_vma="):
            jax.eval_shape(split(), w, x)
        jax.eval_shape(split(check_vma=False), w, x)


@pytest.mark.slow
@kills("gradients/nan_isolation.py", "_refuse_split(rows.batch)", "pass", slow=True)
def test_a_batch_that_lies_on_two_devices_is_right_or_refused():
    """XLA's partitioner gets the grouped convolutions of vmapped kernel gradients wrong."""
    subprocess.run([sys.executable, "-c", SPLIT_BATCH], check=True, timeout=240)


def convolved(w, x):
    return jnp.sum(jnp.sin(jax.lax.conv_general_dilated(x[None], w, (1,), "SAME")))


def images(broken=None):
    """Float64 images, one possibly NaN, and a kernel."""
    x = np.random.default_rng(0).normal(size=(5, 2, 6))
    if broken is not None:
        x[broken] = np.nan
    return x, jnp.ones((2, 2, 3))


@kills(
    "gradients/nan_isolation.py",
    "broken = ~jnp.all(jnp.isfinite(together.norms))",
    "broken = jnp.zeros((), bool)",
    slow=True,
)
@pytest.mark.slow
def test_examples_are_taken_one_by_one_where_another_compiler_mixes_them(monkeypatch):
    """What compilers but that of CPUs do was not tried: there a norm that is NaN may be all's."""

    def mixing(loss, rule, params, rows, start):
        mixed = rows._replace(batch=rows.batch + 0 * jnp.sum(rows.batch))
        return gradients.ENGINES["vmap"](loss, rule, params, mixed, start)

    def found(x, mask):
        rows = Rows(x, jnp.asarray(mask), jnp.ones((5, 1)))
        return isolated(mixing)(Traced(convolved), RULE, w, rows, 0 * w)

    (x, w), (broken, _) = images(), images(1)
    x, broken, w = (jnp.asarray(a, jnp.float32) for a in (x, broken, w))
    monkeypatch.setattr(jax, "default_backend", lambda: "another")
    want = found(x, np.arange(5) != 1).value
    np.testing.assert_allclose(found(broken, np.ones(5, bool)).value, want, rtol=1e-5)
    assert np.abs(want).max() > 0.1


def test_frozen_leaves_have_no_site():
    """What is closed over, or stopped, costs nothing: it is not even looked at."""
    base = jnp.ones((3, 3))

    def loss(p, x):
        return jnp.sum(x @ (base + p["down"] @ p["up"]) @ jax.lax.stop_gradient(p["stopped"]))

    params = {"down": jnp.ones((3, 1)), "stopped": jnp.ones((3, 2)), "up": jnp.ones((1, 3))}
    words = gradients.explain(loss, params, jnp.ones(3)).splitlines()[1:]
    found = [line.split(maxsplit=1)[1].split()[0] for line in words]
    assert found == ["dot_general", "not", "dot_general"]


def test_frozen_weights_are_explained_by_their_shapes():
    def adapted(params, x, frozen):
        return jnp.sum(x @ (frozen + params["w"]))

    shape = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    words = gradients.explain(adapted, {"w": shape}, jnp.ones(3), shape).splitlines()
    assert len(words) == 2
    assert words[1].split()[:3] == ["w", "dot_general", "product"]


def _dense(counter, params, example):
    counter.append("traced")
    return jnp.sum(jnp.tanh(example.reshape(-1) @ params["kernel"] + params["bias"]) ** 2)


def _convolved(counter, params, example):
    counter.append("traced")
    numbers = ("NHWC", "HWIO", "NHWC")
    kernel = params["kernel"].reshape(3, 3, 1, -1)
    x = jax.lax.conv_general_dilated(example[None], kernel, (1, 1), "SAME", None, None, numbers)
    return jnp.sum(jnp.tanh(x + params["bias"]) ** 2)


@pytest.mark.thorough
@pytest.mark.parametrize("network", [_dense, _convolved])
@pytest.mark.parametrize("engine", ["ghost", "vmap", "scan"])
@pytest.mark.promotes
@pytest.mark.sample(1)
def test_a_loss_is_traced_at_most_three_times(network, engine, monkeypatch):
    counter, programs = [], []

    def counted(*fields):
        programs.append(fields)
        return sites.Program(*fields)

    monkeypatch.setattr("dpjax.gradients._bookkeeping.trace.Program", counted)
    loss = functools.partial(network, counter)
    params = {"kernel": jnp.ones((9, 4)), "bias": jnp.ones(4)}
    data = jnp.ones((8, 3, 3, 1))
    clipped = clipped_grad(loss, clipping.flat(1.0), engine)
    jax.jit(clipped).lower(params, data)
    assert len(counter) <= 3
    # Layout, the guard of convolutions and the engine share one search for sites.
    assert len(programs) <= 1

    counter.clear()
    algorithm = dpjax.dpsgd(loss, optax.sgd(0.1), mechanism_with(8, 4), data, engine=engine)
    algorithm.step(algorithm.init(params, jax.random.key(0)))
    assert len(counter) <= 3


KILLS = {
    "test_what_a_long_sum_rounds_away_meets_the_noise": [
        kills("training/step.py", "lost=lost,\n", "lost=None,\n", case="in memory", slow=True),
        kills(
            "training/step.py",
            "data, whole, end_block)",
            "data, whole)",
            case="in memory",
            slow=True,
        ),
        kills(
            "training/_streaming.py",
            "sums = programs.settle(sums)",
            "pass",
            case="streamed",
            slow=True,
        ),
        kills("noise/link.py", "addend = lost + addend", "pass", case="in memory", slow=True),
        kills(
            "gradients/batching.py",
            "= examples <= layout",
            "= True or layout",
            case="in memory",
            slow=True,
        ),
    ],
}
