# SPDX-License-Identifier: Apache-2.0
"""Losses through which examples could see each other are refused by name, and others are not."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.custom_derivatives import linear_call
from jax.experimental import hijax
from jax.experimental.buffer_callback import buffer_callback
from jax.experimental.pallas import pallas_call
from jax.experimental.sparse import BCOO
from jax.extend.core import Primitive
from jax.interpreters import batching
from mutation import kills

import dpjax
from dpjax import clipping, federated, losses, sampling
from dpjax.gradients.loss_checks import has_own_derivatives
from dpjax.types import Clipping, Partition

# Its name before JAX 0.11 comes second.
HiPrim = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive
X = jnp.ones((4, 3))
W = jnp.ones(3)
ONE = jax.ShapeDtypeStruct((3,), jnp.float32)


@jax.custom_batching.custom_vmap
def centred(x):
    return x


@centred.def_vmap
def _(size, batched, x):
    return x - x.mean(axis=0), True


def centring(name):
    """A primitive outside of JAX that subtracts the mean of the batch."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[primitive] = lambda given, axes: (
        given[0] - given[0].mean(axes[0], keepdims=True),
        axes[0],
    )
    return primitive.bind


class Centring(HiPrim):
    def __init__(self, kind):
        self.in_avals, self.out_aval, self.params = (kind,), kind, {}
        super().__init__()

    def expand(self, x):
        return x

    def batch(self, axis_data, args, dims):
        return args[0] - args[0].mean(dims[0], keepdims=True), dims[0]


def solved(x):
    """JAX 0.12 calls a class of its own, with two functions of the user's."""
    return jax.lax.custom_root(
        lambda y: y - x, x, lambda f, y: y - f(y), lambda g, y: y / g(jnp.ones(3))
    )


# A class of a library under the name and the module of one of JAX.
Ldexp = type("Ldexp", (Centring,), {"__module__": "jax._src.numpy.ufuncs"})


def drawing(draw, impl="unsafe_rbg"):
    """Draws from keys that follow from the example, under a root key of the run."""
    root = jax.random.key(0, impl=impl)
    return lambda x: x * draw(root, x[0].astype(int))


def folded_late(root, i):
    """Only `fold_in` meets the example; the draw itself is by a key of threefry."""
    data = jax.random.key_data(jax.random.fold_in(root, i))
    return jax.random.uniform(jax.random.wrap_key_data(data[:2], impl="threefry2x32"))


def split_late(root, i):
    data = jax.random.key_data(jax.random.split(root, 4)[i])
    return jax.random.uniform(jax.random.wrap_key_data(data[:2], impl="threefry2x32"))


def hosted(x, method="broadcast_all"):
    return jax.pure_callback(lambda x: np.asarray(x), ONE, x, vmap_method=method)


def remembered(x):
    return jax.experimental.io_callback(lambda x: np.asarray(x), ONE, x)


def buffered(x):
    return buffer_callback(lambda context, out, x: None, ONE)(x)


def drawn(x):
    return jax.random.normal(jax.random.key(0, impl="rbg"), (3,))


def bits(x):
    return jax.lax.rng_uniform(0.0, 1.0, (3,))


SEEN = {
    "custom_vmap": (centred, "custom_vmap_call, which has a batching rule"),
    "pure_callback": (hosted, "pure_callback, which calls the host"),
    "sequential": (lambda x: hosted(x, "sequential"), "pure_callback, which calls the host"),
    "io_callback": (remembered, "io_callback, which calls the host"),
    "buffer_callback": (buffered, "buffer_callback, which calls the host"),
    "rbg": (drawn, "random_seed, which has a key of another generator"),
    "rbg bits": (
        drawing(lambda k, i: jax.random.uniform(k), "rbg"),
        "random_bits, which has a key",
    ),
    "fold_in": (drawing(folded_late), "random_fold_in, which has a key of another generator"),
    "split": (drawing(split_late), "random_split, which has a key of another generator"),
    "gamma": (drawing(lambda k, i: jax.random.gamma(k, 0.3)), "(random_split|random_gamma), which"),
    "primitive": (centring("centre"), "centre, which is not one of JAX's primitives"),
    "primitive of a known name": (centring("sin"), "sin, which is not one of JAX's primitives"),
    "hijax": (
        lambda x: Centring(jax.typeof(x))(x),
        r"call_hi_primitive \(Centring\), which has a batching",
    ),
    "hijax of a known name": (
        lambda x: Ldexp(jax.typeof(x))(x),
        r"call_hi_primitive \(Ldexp\), which has a batching",
    ),
    "linear_call": (
        lambda x: linear_call(lambda _, x: x, lambda _, c: c, (), x),
        "linear_call, which has a transpose",
    ),
    "rng_uniform": (bits, "rng_uniform, which draws for the whole batch"),
    "in a jitted function": (jax.jit(centred), "custom_vmap_call"),
    "in a scan": (lambda x: jax.lax.scan(lambda c, _: (centred(c), 0), x, None, 2)[0], "custom_vm"),
    "in a branch": (lambda x: jax.lax.cond(x[0] > 0, centred, lambda x: x, x), "custom_vmap"),
}


def loss_of(function):
    return lambda w, x: jnp.sum(w * jax.lax.stop_gradient(function(x)))


def mechanism(rule=None, examples=4, **options):
    rule = clipping.flat(1.0) if rule is None else rule
    sampler = sampling.full(examples)
    return dpjax.Mechanism(
        sampling=sampler, clipping=rule, noise_multiplier=1.0, steps=3, **options
    )


def run(loss, data=X, rule=None):
    algorithm = dpjax.dpsgd(loss, optax.sgd(0.1), mechanism(rule, len(data)), data)
    return algorithm.step(algorithm.init(jax.random.key(0), W))


@kills(
    "gradients/loss_checks.py",
    "yield from _not_vouched(inner)",
    "yield from ()",
    case="in a scan",
    slow=True,
)
@kills(
    "gradients/loss_checks.py", "set(others) - {_threefry()}", "set()", case="fold_in", slow=True
)
@kills(
    "gradients/loss_checks.py",
    "not of_jax(equation.primitive)",
    "False",
    case="primitive",
    slow=True,
)
@kills(
    "_jaxpr.py",
    "return primitive in _defined(len(sys.modules))",
    "return primitive.name in {p.name for p in _defined(len(sys.modules))}",
    case="primitive of a known name",
    slow=True,
)
@kills("gradients/loss_checks.py", '"call_hi_primitive": _OWN_RULE,', "", case="hijax", slow=True)
@kills(
    "_jaxpr.py",
    "known and getattr(home, kind.__name__, None) is kind",
    "known",
    case="hijax of a known name",
    slow=True,
)
@pytest.mark.parametrize("name", SEEN)
def test_losses_that_could_mix_examples_are_refused(name):
    function, message = SEEN[name]
    with pytest.raises(ValueError, match=message):
        dpjax.clipped_grad(loss_of(function), clipping.flat(1.0))(W, X)
    with pytest.raises(ValueError, match=message):
        run(loss_of(function))


def test_classes_of_jax_that_hold_functions_are_refused():
    program = jax.make_jaxpr(solved)(W)
    if "call_hi_primitive" not in {e.primitive.name for e in program.eqns}:
        pytest.skip("this version of JAX computes a root by other primitives")
    with pytest.raises(ValueError, match=r"call_hi_primitive \(CustomRoot\), which has a batching"):
        dpjax.clipped_grad(lambda w, x: jnp.sum(solved(w * x)), clipping.flat(1.0))(W, X)


# Functions of `jax.numpy` that JAX 0.12 writes as classes, which batch row by row.
ROW_BY_ROW = {
    "ldexp": lambda w, x: jnp.ldexp(w * x, (3 * x).astype(int)),
    "searchsorted": lambda w, x: w * jnp.searchsorted(x.cumsum(), 0.7),
    "digitize": lambda w, x: w * jnp.digitize(x, jnp.array([0.2, 0.7])),
    "interp": lambda w, x: jnp.interp(3 * x, jnp.arange(3.0), w),
    "histogram": lambda w, x: w * jnp.histogram(x, bins=3)[0],
    "choice": lambda w, x: w * jax.random.choice(jax.random.key(0), x, (3,), p=x / x.sum()),
    "expm": lambda w, x: jax.scipy.linalg.expm(x[0] * jnp.outer(w, w)),
    "nonzero": lambda w, x: w * x[jnp.nonzero(x > 0.4, size=3, fill_value=1)[0]],
    "unique": lambda w, x: w * jnp.unique(jnp.round(x, 1), size=3),
    "frexp": lambda w, x: jnp.frexp(w * x + 1)[0],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_classes_of_jax_that_batch_row_by_row_are_accepted(name):
    """They were refused as a library's, on JAX 0.12."""
    batch = jnp.asarray(np.random.default_rng(0).uniform(0.1, 0.9, (5, 3)), jnp.float32)

    def loss(w, x):
        return jnp.sum(ROW_BY_ROW[name](w, x) ** 2)

    expected = jnp.zeros(3)
    for x in batch:
        gradient = jax.grad(loss)(W, x)
        expected += gradient * jnp.minimum(1, 0.5 / jnp.linalg.norm(gradient))
    for engine in ("ghost", "vmap"):
        found = dpjax.clipped_grad(loss, clipping.flat(0.5), engine)(W, batch)
        np.testing.assert_allclose(found.value, expected, rtol=1e-5, atol=1e-6)


def test_classes_of_jax_have_the_derivatives_of_jax():
    """Book-keeping and estimated norms read them as JAX's, and not as a user's."""

    def loss(w, x):
        return jnp.sum(jnp.ldexp(w, 2) * x)

    assert "the user's own" not in str(dpjax.gradients.explain(loss, W, W))
    jax.eval_shape(dpjax.clipped_grad(loss, clipping.jl(1.0)), W, X, key=jax.random.key(0))


def backwards(function):
    """The product of two arrays, with a gradient that ``function`` made."""

    @jax.custom_vjp
    def product(w, x):
        return w * x

    def back(x, cotangent):
        return function(cotangent * x), jnp.zeros_like(x)

    product.defvjp(lambda w, x: (w * x, x), back)
    return lambda w, x: jnp.sum(product(w, x))


def noised(gradient):
    return gradient + drawn(gradient)


@kills(
    "gradients/traced.py",
    "jax.make_jaxpr(derivative)(params, example)",
    "jax.make_jaxpr(self)(params, example)",
    slow=True,
)
@kills(
    "gradients/loss_checks.py",
    "require_one_example(gradient,",
    "require_one_example(program.jaxpr,",
    slow=True,
)
@pytest.mark.parametrize("function", [centred, noised], ids=["custom_vmap", "rbg"])
def test_derivatives_of_the_user_are_read(function):
    loss, message = backwards(function), "gradient of the loss: its program holds"
    with pytest.raises(ValueError, match=f"clipped_grad: the {message}"):
        dpjax.clipped_grad(loss, clipping.flat(1.0))(W, X)
    with pytest.raises(ValueError, match=f"dpsgd: the {message}"):
        run(loss)
    vouched = backwards(losses.vouched(function))
    jax.eval_shape(dpjax.clipped_grad(vouched, clipping.flat(1.0)), W, X)


def test_init_traces_a_loss_once():
    seen = []

    def counted(w, x):
        seen.append(x)
        return loss_of(lambda x: x)(w, x)

    algorithm = dpjax.dpsgd(counted, optax.sgd(0.1), mechanism(), X)
    algorithm.init(jax.random.key(0), W)
    assert len(seen) == 1


@kills("gradients/loss_checks.py", "or own_vjp(e) for e", "for e", slow=True)
def test_primitives_of_a_library_have_derivatives_of_their_own():
    for function in (centring("centre"), lambda x: Centring(jax.typeof(x))(x)):
        program = jax.make_jaxpr(losses.vouched(function))(W).jaxpr
        assert has_own_derivatives(program)
    assert not has_own_derivatives(jax.make_jaxpr(losses.vouched(jnp.sin))(W).jaxpr)


def test_keys_of_other_generators_may_be_read():
    """Words of a key that came with the example are data of the example."""
    keys = jax.random.split(jax.random.key(0, impl="unsafe_rbg"), 4)

    def loss(w, e):
        words = jax.random.key_data(e["key"])[:2]
        return jnp.sum(w * jax.random.normal(jax.random.wrap_key_data(words), (3,)) * e["x"])

    jax.eval_shape(dpjax.clipped_grad(loss, clipping.flat(1.0)), W, {"key": keys, "x": X})


def test_attention_of_cudnn_is_read(monkeypatch):
    """Its kernel adds the gradients of a bias over the batch."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_is_flash_attention", lambda *a, **k: None)
    query, bias = jnp.ones((2, 1, 4, 2, 8), jnp.bfloat16), jnp.ones((1, 2, 4, 4), jnp.bfloat16)

    def attend(bias, x, **options):
        return cudnn.dot_product_attention(x, x, x, bias, **options).sum().astype(jnp.float32)

    def clipped(loss):
        return jax.eval_shape(dpjax.clipped_grad(loss, clipping.flat(1.0)), bias, query)

    clipped(lambda w, x: w.sum().astype(jnp.float32) * attend(None, x))
    for mixing in (
        attend,
        lambda w, x: w.sum().astype(jnp.float32) * attend(None, x, dropout_rate=0.1),
    ):
        with pytest.raises(ValueError, match="calls cuDNN once for the whole batch"):
            clipped(mixing)


@kills("gradients/loss_checks.py", 'e.primitive.name.startswith("custom_") or', "", slow=True)
def test_forward_derivatives_of_the_user_are_read():
    @jax.custom_jvp
    def double(x):
        return 2 * x

    double.defjvp(lambda x, t: (2 * x[0], centred(x[0]) * t[0]))
    with pytest.raises(ValueError, match="gradient of the loss: its program holds custom_vmap"):
        dpjax.clipped_grad(lambda w, x: jnp.sum(double(w * x)), clipping.flat(1.0))(W, X)


@kills(
    "training/recipe.py",
    'require_one_example(program, f"{recipe.name}: weights")',
    "pass",
    slow=True,
)
def test_weights_are_read():
    def weigh(step, params, x):
        return centred(x)[0]

    honest = loss_of(lambda x: x)
    algorithm = dpjax.dpsgd(honest, optax.sgd(0.1), mechanism(), X, weights=weigh)
    state = algorithm.init(jax.random.key(0), W)
    with pytest.raises(ValueError, match="dpsgd: weights: its program holds custom_vmap_call"):
        algorithm.step(state)


@kills(
    "gradients/clipped_grad.py",
    "check_loss(traced, params, trees.one_row(rows), call)",
    "pass  # row",
    slow=True,
)
def test_a_step_reads_its_loss_whichever_algorithm_made_the_state():
    honest, mixing = (
        dpjax.dpsgd(loss_of(function), optax.sgd(0.1), mechanism(), X)
        for function in (lambda x: x, centred)
    )
    state, _ = honest.step(honest.init(jax.random.key(0), W))
    with pytest.raises(ValueError, match="custom_vmap_call"):
        mixing.step(state)


def test_optimizers_of_clients_are_read():
    clients = federated.Clients.of([np.ones((2, 3), np.float32)] * 4)
    algorithm = federated.fedavg(
        lambda w, x: jnp.sum(w * x),
        optax.sgd(1.0),
        mechanism(unit="client"),
        clients,
        client_optimizer=optax.chain(optax.stateless(lambda u, _: centred(u)), optax.sgd(1.0)),
        local_batch_size=2,
        local_steps=1,
    )
    with pytest.raises(ValueError, match="fedavg: the loss: its program holds custom_vmap_call"):
        algorithm.init(jax.random.key(0), W)


@pytest.mark.slow
@kills(
    "trees.py", '== "threefry2x32":\n        return key', '!= "":\n        return key', slow=True
)
def test_clients_order_their_rows_by_their_own_key_whatever_its_generator():
    def after(sizes):
        rows = [np.arange(3 * n, dtype=np.float32).reshape(n, 3) for n in sizes]
        algorithm = federated.fedavg(
            lambda w, x: jnp.sum((w - x) ** 2),
            optax.sgd(1.0),
            dpjax.Mechanism(
                sampling=sampling.full(len(sizes)),
                clipping=clipping.flat(1.0),
                noise_multiplier=0.0,
                steps=1,
                unit="client",
            ),
            federated.Clients.of(rows),
            client_optimizer=optax.sgd(0.3),
            local_batch_size=1,
            local_epochs=1,
            microbatch_size=len(sizes),
        )
        state, _ = algorithm.step(algorithm.init(jax.random.key(3, impl="rbg"), W))
        return np.asarray(state.params) * len(sizes)

    # The first client moves the sum by its own update alone.
    assert np.linalg.norm(after([1, *[9] * 12]) - after([0, *[9] * 12])) <= 1 + 1e-5


def test_clients_losses_are_read_too():
    clients = federated.Clients.of([np.ones((2, 3), np.float32)] * 4)
    algorithm = federated.fedsgd(
        loss_of(centred), optax.sgd(1.0), mechanism(unit="client"), clients
    )
    with pytest.raises(ValueError, match="custom_vmap_call"):
        algorithm.init(jax.random.key(0), W)
    honest = federated.fedsgd(
        lambda w, x: jnp.sum(w * x), optax.sgd(1.0), mechanism(unit="client"), clients
    )
    honest.step(honest.init(jax.random.key(0, impl="rbg"), W))


COLLECTIVES = {
    "psum": lambda x: jax.lax.pmean(x, "d"),
    "pmax": lambda x: jax.lax.pmax(x, "d"),
    "ppermute": lambda x: jax.lax.ppermute(x, "d", [(0, 0)]),
    "all_gather": lambda x: jax.lax.all_gather(x, "d")[0],
    "all_to_all": lambda x: jax.lax.all_to_all(x[None], "d", 0, 0)[0],
    "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "d", tiled=True),
    "pbroadcast": lambda x: jax.lax.pbroadcast(x, "d", 0),
    "ragged_all_to_all": lambda x: jax.lax.ragged_all_to_all(
        x, x, *[jnp.array([n], jnp.int32) for n in (0, 3, 0, 3)], axis_name="d"
    ),
    "axis_index": lambda x: x * jax.lax.axis_index("d"),
}


def over_devices(function, check_vma=False):
    """A function inside of a user's own `jax.shard_map`, on a part of its argument."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)


@kills("gradients/loss_checks.py", 'p.get("axis_name")', "()", case="ppermute", slow=True)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_refused(name):
    clipped = dpjax.clipped_grad(loss_of(COLLECTIVES[name]), clipping.flat(1.0))
    with pytest.raises(ValueError, match=f"{name}, which names an axis of devices"):
        jax.eval_shape(over_devices(lambda x: clipped(W, x).value), X)


@kills("gradients/loss_checks.py", 'name != "pvary" and not', "not", slow=True)
def test_a_change_of_type_is_no_collective():
    """A `jax.shard_map` in a loss casts a constant where it meets a part of an array."""
    whole = over_devices(lambda x: 2 * x, check_vma=True)
    jax.eval_shape(dpjax.clipped_grad(loss_of(whole), clipping.flat(1.0), "vmap"), W, X)


@kills("gradients/loss_checks.py", 'equation.params.get("name") != VOUCHED', "True", slow=True)
@pytest.mark.slow
def test_a_vouched_function_takes_what_no_jitted_one_does():
    """As modules of Equinox, which hold activations, and words."""

    def scaled(model, x, *, how):
        assert how == "twice"
        return model["activation"](hosted(model["w"] * x, "sequential")) * 2

    def loss(w, x):
        model = jax.lax.stop_gradient({"w": w}) | {"activation": jnp.tanh}
        return jnp.sum(w * losses.vouched(scaled)(model, x, how="twice"))

    jax.eval_shape(dpjax.clipped_grad(loss, clipping.flat(1.0)), W, X)


@pytest.mark.slow
def test_a_vouched_function_is_not_read():
    vouched = losses.vouched(lambda x: hosted(x, "sequential"))
    plain = dpjax.clipped_grad(loss_of(lambda x: x), clipping.flat(1.0))(W, X)
    for engine in ("vmap", "ghost"):
        found = dpjax.clipped_grad(loss_of(vouched), clipping.flat(1.0), engine)(W, X)
        np.testing.assert_allclose(found.value, plain.value, rtol=1e-6)
    run(loss_of(vouched))


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        x = nn.LayerNorm()(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=False)(x, rng=key).sum()


def dropping(w, x):
    params = {"Dense_0": {"kernel": jnp.outer(w, jnp.ones(4)), "bias": jnp.zeros(4)}}
    params["LayerNorm_0"] = {"scale": jnp.ones(4), "bias": jnp.zeros(4)}
    return Dropping().apply({"params": params}, x, jax.random.key(3))


def printing(w, x):
    jax.debug.print("{}", x.sum())
    return jnp.sum(w * x)


def centred_by_axis(w, x):
    """A collective over an axis of the example."""
    return jnp.sum(jax.vmap(lambda v: v - jax.lax.pmean(v, "i"), axis_name="i")(w * x) ** 2)


def doubled(w, x):
    """A kernel of Pallas, which JAX batches by one more axis of its grid."""

    def kernel(given, out):
        out[...] = 2 * given[...]

    return jnp.sum(w * pallas_call(kernel, out_shape=ONE, interpret=True)(x))


HONEST = {
    "pallas": doubled,
    "sparse": lambda w, x: jnp.sum(w * (BCOO.fromdense(jnp.outer(x, x), nse=9) @ w)),
    "an axis of the example": centred_by_axis,
    "linear algebra": lambda w, x: jnp.linalg.norm(
        jnp.linalg.solve(jnp.eye(3) + jnp.outer(x, x), w)
    ),
    "solver": lambda w, x: jax.scipy.sparse.linalg.cg(lambda v: 2 * v, w * x)[0].sum(),
    "attention": lambda w, x: jax.nn.dot_product_attention(
        *[(w * x).reshape(1, 3, 1, 1)] * 3
    ).sum(),
    "categorical": lambda w, x: jnp.sum(w) * jax.random.categorical(jax.random.key(1), x),
    "gelu": lambda w, x: jax.nn.gelu(jax.nn.logsumexp(w * x)),
    "dropout": dropping,
    "optax loss": lambda w, x: optax.softmax_cross_entropy(w * x, jax.nn.softmax(x)),
    "print": printing,
    "fft": lambda w, x: jnp.abs(jnp.fft.fft(w * x)).sum(),
    "special": lambda w, x: jax.scipy.special.gammaln(1 + (w * x) ** 2).sum(),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_losses_pass(name):
    found = jax.eval_shape(dpjax.clipped_grad(HONEST[name], clipping.flat(1.0)), W, X)
    assert found.value.shape == W.shape
    assert found.norms.shape == (len(X), 1)


def test_a_rule_that_calls_the_host_is_refused():
    def factors(norms):
        shape = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        return jax.pure_callback(np.asarray, shape, norms, vmap_method="broadcast_all")

    rule = Clipping(Partition(("all",), lambda tree: (0,)), (1.0,), factors)
    with pytest.raises(ValueError, match="custom: factors: its program holds pure_callback"):
        dpjax.clipped_grad(lambda w, x: jnp.sum(w * x), rule)
    with pytest.raises(ValueError, match="pure_callback"):
        run(lambda w, x: jnp.sum(w * x), rule=rule)


@kills("losses/augmentation.py", "trees.mappable(jax", "(jax")
def test_augmentation_by_rbg_draws_for_each_example():
    def total(rows):
        loss = losses.augmented(
            lambda w, e: jnp.sum(w * e[0]),
            lambda key, x: jnp.where(jax.random.bernoulli(key), x, -x),
            views=1,
            key=jax.random.key(3, impl="rbg"),
        )
        data = (jnp.ones((len(rows), 6)), jnp.zeros(len(rows), jnp.int32), rows)
        clipped = jax.jit(dpjax.clipped_grad(loss, clipping.flat(1.0), "vmap"))
        return np.asarray(clipped(jnp.ones(6), data).value)

    rows = jnp.arange(16)
    assert np.linalg.norm(total(rows) - total(rows[1:])) <= 1 + 1e-5


def test_estimated_norms_refuse_a_solver():
    def loss(p, x):
        return jax.scipy.sparse.linalg.cg(lambda v: 2 * v, p * x, maxiter=5)[0].sum()

    with pytest.raises(TypeError, match="solves a linear system"):
        dpjax.clipped_grad(loss, clipping.jl(1.0, 5))(W, X, key=jax.random.key(0))


@kills("gradients/loss_checks.py", "shape[:1] == (examples,)", "shape[:1] == ()", slow=True)
def test_a_loss_that_closes_over_the_data_is_told(caplog):
    inputs = jnp.arange(21.0).reshape(7, 3)
    with caplog.at_level("WARNING"):
        run(lambda w, i: jnp.sum(w * (inputs[i] - inputs.mean(axis=0))), jnp.arange(7))
    assert "closes over an array of shape (7, 3), one row for each of the 7" in caplog.text
    caplog.clear()
    frozen = jnp.ones((3, 3))
    with caplog.at_level("WARNING"):
        run(lambda w, x: jnp.sum(frozen @ (w * x)))
    assert "closes over" not in caplog.text


KEY, KEYS = jax.random.key(1), jax.random.split(jax.random.key(1), 4)


def halved(key, x):
    return x * jax.random.bernoulli(key, 0.5, x.shape)


def of_row(row, step):
    return jax.random.fold_in(jax.random.fold_in(KEY, row), step)


def in_a_scan(key, x):
    def body(key, _):
        key, own = jax.random.split(key)
        return key, halved(own, x)

    return jax.lax.scan(body, key, None, 2)[1].sum(0)


def in_a_loop(key, x):
    """The key of each round is carried; the first one decides all of them."""
    end = 3 * jnp.abs(jnp.sum(x)) + 1
    start = key, 0, jnp.zeros_like(x)

    def body(carry):
        key, i, total = carry
        key, own = jax.random.split(key)
        return key, i + 1, total + halved(own, x)

    return jax.lax.while_loop(lambda carry: carry[1] < end, body, start)[2]


# Where a draw stands, as a function of its key and of an input.
DRAWS = {
    "plain": halved,
    "checkpoint": jax.checkpoint(halved),
    "scan": in_a_scan,
    "while": in_a_loop,
    "cond": lambda key, x: jax.lax.cond(x[0] > 0, halved, lambda key, x: x, key, x),
    "vmap": lambda key, x: jax.vmap(halved, (None, 0))(key, x),
    "gamma": lambda key, x: x * jax.random.gamma(key, 2.0),
    "raw key": lambda key, x: halved(jax.random.key_data(key), x),
}


@kills("gradients/loss_checks.py", "_DRAWS and not moving[0]", "_DRAWS and moving[0]")
@kills(
    "gradients/loss_checks.py",
    "follow(inner, marks)",
    "follow(inner, [False] * len(marks))",
    case="scan",
    slow=True,
)
@pytest.mark.parametrize("where", DRAWS)
def test_one_draw_for_all_examples_is_told(where, caplog):
    draw = DRAWS[where]
    data = (X, jnp.arange(4))
    made = {
        "closed over": (lambda row, step: KEY, True),
        "made inside": (lambda row, step: jax.random.key(3), True),
        "from row and step": (of_row, False),
        "from the step": (lambda row, step: jax.random.fold_in(KEY, step), False),
        "a row of keys": (lambda row, step: KEYS[row], False),
    }
    for name, (key, told) in made.items():

        def loss(w, example, key=key):
            x, row, step = example
            return jnp.sum(w * draw(key(row, step), x))

        caplog.clear()
        algorithm = dpjax.dpsgd(loss, optax.sgd(0.1), mechanism(), data, per_step=lambda step: step)
        with caplog.at_level("WARNING"):
            algorithm.init(dpjax.noise.secret_key(), W)
        assert ("share the numbers" in caplog.text) == told, name
    assert not told


def test_one_draw_for_all_clients_is_told(caplog):
    """And the key by which a client orders its rows is one of the round."""
    clients = federated.Clients.of([np.ones((2, 3), np.float32)] * 4)
    for draw, told in ((jax.jit(lambda x: halved(KEY, x)), 1), (lambda x: x, 0)):
        algorithm = federated.fedavg(
            lambda w, x, draw=draw: jnp.sum(w * draw(x)),
            optax.sgd(1.0),
            mechanism(unit="client"),
            clients,
            client_optimizer=optax.sgd(1.0),
            local_batch_size=2,
            local_steps=2,
        )
        caplog.clear()
        with caplog.at_level("WARNING"):
            algorithm.init(dpjax.noise.secret_key(), W)
        assert caplog.text.count("federated.fedavg: the loss draws random numbers") == told


@pytest.mark.parametrize("kind", ["keys", "list"])
def test_a_loss_that_keeps_what_is_traced_is_told(kind):
    seen, keys = [jnp.zeros(3)], iter_of_keys()

    def loss(w, x):
        if kind == "keys":
            return jnp.sum(w * halved(next(keys), x))
        seen.append(x + seen[-1])
        return jnp.sum(w * seen[-1])

    algorithm = dpjax.dpsgd(loss, optax.sgd(0.1), mechanism(), X)
    state = algorithm.init(dpjax.noise.secret_key(), W)
    for use in (algorithm.step, algorithm.identity):
        with pytest.raises(jax.errors.JAXTypeError) as caught:
            use(state)
        notes = "".join(caught.value.__notes__)
        assert "keeps a traced value in an object outside of it" in notes
        assert "written for a batch" not in notes


def iter_of_keys():
    """As `next(hk.PRNGSequence(0))`."""
    key = jax.random.key(0)
    while True:
        key, own = jax.random.split(key)
        yield own
