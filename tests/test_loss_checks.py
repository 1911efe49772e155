# SPDX-License-Identifier: Apache-2.0
"""Losses of a batch are refused in a sentence, and others are not."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.pallas import pallas_call
from jax.experimental.sparse import BCOO
from mutation import kills

from dpjax import Mechanism, clipped_grad, clipping, dpsgd, federated, losses, sampling

X = jnp.ones((4, 3))
W = jnp.ones(3)
ONE = jax.ShapeDtypeStruct((3,), jnp.float32)


@jax.custom_batching.custom_vmap
def centred(x):
    return x


@centred.def_vmap
def _(size, batched, x):
    return x - x.mean(axis=0), True


def hosted(x):
    return jax.pure_callback(np.asarray, jax.typeof(x), x, vmap_method="broadcast_all")


SEEN = {
    "custom_vmap": (centred, "custom_vmap_call"),
    "pure_callback": (hosted, "pure_callback"),
    "io_callback": (lambda x: jax.experimental.io_callback(np.asarray, ONE, x), "io_callback"),
    "ffi_call": (lambda x: jax.ffi.ffi_call("any", ONE, vmap_method="sequential")(x), "ffi_call"),
    "in a scan": (lambda x: jax.lax.scan(lambda c, _: (hosted(c), 0), x, None, 2)[0], "pure_"),
    "in a branch": (lambda x: jax.lax.cond(x[0] > 0, centred, lambda x: x, x), "custom_vmap"),
}


def loss_of(function):
    return lambda w, x: jnp.sum(w * jax.lax.stop_gradient(function(x)))


def clipped(loss, w=W, x=X):
    """Traced, and neither compiled nor run."""
    return jax.eval_shape(clipped_grad(loss, clipping.flat(1.0)), w, x)


def mechanism(examples=4, **options):
    sampler, rule = sampling.full(examples), clipping.flat(1.0)
    options = {"sampling": sampler, "clipping": rule, "noise_multiplier": 1.0} | options
    return Mechanism(steps=3, **options)


def started(loss, data=X, params=W, **options):
    algorithm = dpsgd(loss, optax.sgd(0.1), mechanism(len(data)), data, **options)
    return algorithm, algorithm.init(params, jax.random.key(0))


@kills("gradients/loss_checks.py", '"pure_callback", "io_callback", ', "", case="pure_callback")
@kills("gradients/_jaxprs.py", "yield from equations(inner)", "yield from ()", case="in a scan")
@pytest.mark.parametrize("name", SEEN)
def test_losses_that_could_mix_examples_are_refused(name):
    function, primitive = SEEN[name]
    message = f"the loss uses {primitive}.*which may see the whole batch; expected a function of"
    with pytest.raises(ValueError, match=f"^clipped_grad: {message}"):
        clipped(loss_of(function))
    with pytest.raises(ValueError, match=f"^dpsgd: {message}"):
        started(loss_of(function))


def of_reverse_rule(w, x):
    product = jax.custom_vjp(jnp.multiply)
    product.defvjp(lambda w, x: (w * x, x), lambda x, c: (centred(c * x), jnp.zeros_like(x)))
    return jnp.sum(product(w, x))


def of_forward_rule(w, x):
    double = jax.custom_jvp(lambda x: 2 * x)
    double.defjvp(lambda x, t: (2 * x[0], centred(x[0]) * t[0]))
    return jnp.sum(double(w * x))


@kills(
    "gradients/traced.py",
    "require_one_example(self.gradient(params, example),",
    "require_one_example(program.jaxpr,",
)
@pytest.mark.parametrize("loss", [of_reverse_rule, of_forward_rule])
def test_derivatives_of_the_user_are_read(loss):
    with pytest.raises(ValueError, match="clipped_grad: the gradient of the loss uses custom_vmap"):
        clipped(loss)


def test_weights_and_losses_of_clients_are_read():
    weighted, state = started(loss_of(jnp.sin), weights=lambda step, w, x: centred(x)[0])
    with pytest.raises(ValueError, match="dpsgd: weights uses custom_vmap_call"):
        weighted.step(state)
    clients = federated.Clients.of([np.ones((2, 3), np.float32)] * 4)
    described = mechanism(unit="client")
    fedsgd = federated.fedsgd(loss_of(centred), optax.sgd(1.0), described, clients)
    with pytest.raises(ValueError, match="custom_vmap_call"):
        fedsgd.init(W, jax.random.key(0))


def test_a_step_reads_its_loss_whichever_algorithm_made_the_state():
    _, state = started(loss_of(jnp.sin))
    mixing = dpsgd(loss_of(centred), optax.sgd(0.1), mechanism(), X)
    with pytest.raises(ValueError, match="custom_vmap_call"):
        mixing.step(state)


def test_init_traces_a_loss_once():
    seen = []

    def counted(w, x):
        seen.append(x)
        return jnp.sum(w * x)

    started(counted)
    assert len(seen) == 1


def dropping(w, x):
    dropout = nn.Dropout(0.5, deterministic=False)
    return jnp.sum(dropout.apply({}, w * x, rng=jax.random.key(3)))


def doubled(w, x):
    def kernel(given, out):
        out[...] = 2 * given[...]

    return jnp.sum(w * pallas_call(kernel, out_shape=ONE, interpret=True)(x))


HONEST = {
    "pallas": doubled,
    "sparse": lambda w, x: jnp.sum(w * (BCOO.fromdense(jnp.outer(x, x), nse=9) @ w)),
    "an axis of the example": lambda w, x: jnp.sum(
        jax.vmap(lambda v: v - jax.lax.pmean(v, "i"), axis_name="i")(w * x) ** 2
    ),
    "solver": lambda w, x: jax.scipy.sparse.linalg.cg(lambda v: 2 * v, w * x)[0].sum(),
    "attention": lambda w, x: jax.nn.dot_product_attention(
        *[(w * x).reshape(1, 3, 1, 1)] * 3
    ).sum(),
    "dropout": dropping,
    "rbg": lambda w, x: jnp.sum(w) * jax.random.uniform(jax.random.key(0, impl="rbg")),
    "optax loss": lambda w, x: optax.softmax_cross_entropy(w * x, jax.nn.softmax(x)),
    "classes of JAX 0.12": lambda w, x: jnp.interp(3 * x, jnp.arange(3.0), w).sum(),
    "checkpoint": lambda w, x: jax.checkpoint(lambda w, x: jnp.sum(jnp.sin(w * x)))(w, x),
}


def test_honest_losses_pass_in_silence(caplog):
    for name, loss in HONEST.items():
        found = clipped(loss)
        assert found.norms.shape == (len(X), 1), name
    assert not caplog.text


def test_a_print_is_warned_of(caplog):
    def printing(w, x):
        jax.debug.print("{}", x.sum())
        return jnp.sum(w * x)

    clipped(printing)
    assert "the loss prints or calls the host, which shows numbers without noise" in caplog.text


def test_a_loss_of_a_batch_is_answered_in_a_sentence():
    for loss in (lambda w, x, y: w @ x - y, lambda w, x: w @ x.mean(0)[None]):
        for name, run in (("clipped_grad", clipped), ("dpsgd", started)):
            with pytest.raises(TypeError) as raised:
                run(loss)
            notes = raised.value.__notes__
            (note,) = [note for note in notes if note.startswith(f"{name} called loss(params")]
            assert "example = float32[3]: one example, without a batch axis. A tuple is unp" in note


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        (lambda w, x: w * x, r"shape=\(3,\)"),
        (lambda w, x: None, "None"),
        (lambda w, x: jnp.int32(1), "dtype=int32"),
        (lambda w, x: jnp.sum(w * x) * 1j, "dtype=complex64"),
        (lambda w, x: (jnp.sum(w * x), x), "has_aux=True"),
    ],
)
def test_a_loss_that_is_no_real_scalar_is_answered_in_a_sentence(loss, value):
    with pytest.raises(ValueError, match=rf"the loss of one example is .*{value}"):
        clipped(loss)


def test_batch_statistics_are_answered_in_a_sentence(caplog):
    params = {"params": W, "batch_stats": {"mean": W}}
    with pytest.raises(ValueError, match=r"^dpsgd: the parameters hold 'batch_stats'.*GroupNorm"):
        started(lambda p, x: jnp.sum(p["params"] * x), params=params)
    clipped(lambda p, x: jnp.sum(p["batch_stats"] * x), w={"batch_stats": W})
    assert not caplog.text


@pytest.mark.thorough
def test_augmentation_by_rbg_draws_for_each_example():
    def total(rows):
        loss = losses.augmented(
            lambda w, e: jnp.sum(w * e[0]),
            lambda key, x: jnp.where(jax.random.bernoulli(key), x, -x),
            views=1,
            key=jax.random.key(3, impl="rbg"),
        )
        data = (jnp.ones((len(rows), 6)), jnp.zeros(len(rows), jnp.int32), rows)
        run = jax.jit(clipped_grad(loss, clipping.flat(1.0), "vmap"))
        return np.asarray(run(jnp.ones(6), data).value)

    rows = jnp.arange(16)
    assert np.linalg.norm(total(rows) - total(rows[1:])) <= 1 + 1e-5


def test_a_loss_that_closes_over_the_data_is_told(caplog):
    inputs = jnp.arange(21.0).reshape(7, 3)
    started(lambda w, i: jnp.sum(w * (inputs[i] - inputs.mean(axis=0))), jnp.arange(7))
    assert "closes over an array of shape (7, 3), one row for each of the 7" in caplog.text
    caplog.clear()
    frozen, wide = jnp.ones((3, 3)), jnp.ones((7, 3))
    started(lambda w, x: jnp.sum(frozen @ (w * x)))
    started(lambda w, x: jnp.sum(w * (x @ wide)), jnp.ones((7, 7)))  # a width of 7
    assert "closes over" not in caplog.text


def test_data_that_jax_writes_into_equations_are_seen(caplog):
    inputs, before = jnp.arange(21.0).reshape(7, 3), jax.config.jax_use_simplified_jaxpr_constants
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    try:
        started(lambda w, i: jnp.sum(w * inputs[i]), jnp.arange(7))
    finally:
        jax.config.update("jax_use_simplified_jaxpr_constants", before)
    assert "closes over an array of shape (7, 3)" in caplog.text
