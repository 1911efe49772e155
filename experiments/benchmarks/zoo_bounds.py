# SPDX-License-Identifier: Apache-2.0
"""Private programs written for one model each: how fast could an engine run the zoo's slowest?

  result    over a plain step: hypernetwork 2.8 (the product that it needs: 2.6), neural ode 2.2
            (1.5 in some processes), weight decay 1.1, factorisation machine 1.1
  hardware  two CPU cores
  command   make bench BENCH=zoo_bounds

Each takes norms from the factors of its gradients, and sums from one VJP of weighted cotangents. It
runs in plain JAX and adds no bounds on rounding errors. Ratios are CPU times over JAX's gradient of
the mean loss, as in `zoo`. ``needed`` is a plain step and one product beside it: the gradient of
the hypernetwork's hidden layer has 32 bilinear forms ``h @ W_k @ d`` for each example and layer,
which as matrix products take ``batch * depth * 32 * 64 * 64`` multiplications.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import reporting
from zoo import Run, cpu_seconds, norms_of, plain, private
from zoo_models import MODELS, Case, cross_entropy

Array = jax.Array
Found = tuple[Any, Array]


def squared(x: Array) -> Array:
    return jnp.sum(x**2, axis=tuple(range(1, x.ndim)))


def clipped(squares: Array, bound: float) -> tuple[Array, Array]:
    norms = jnp.sqrt(squares)
    return norms[:, None], jnp.minimum(1.0, bound / jnp.maximum(norms, 1e-12))


def hypernetwork(params: Any, batch: Any, bound: float) -> Found:
    x, labels = batch
    width, count = 64, len(x)

    def generated(p: Any) -> tuple[Array, Array]:
        z = jnp.tanh(p["codes"] @ p["hidden"]["w"] + p["hidden"]["b"])
        return (z @ p["out"]["w"] + p["out"]["b"]).reshape(-1, width, width), z

    (kernels, z), pull = jax.vjp(generated, params)

    def loss(taps: list[Array]) -> tuple[Array, list[Array]]:
        h, seen = x @ params["first"]["w"] + params["first"]["b"] + taps[0], [x]
        for kernel, tap in zip(kernels, taps[1:-1], strict=True):
            seen.append(h)
            h = h + jax.nn.relu(h @ kernel + tap)
        logits = h @ params["last"]["w"] + params["last"]["b"] + taps[-1]
        return jnp.sum(jax.vmap(cross_entropy)(logits, labels)), [*seen, h]

    taps = [jnp.zeros((count, n)) for n in (*(width,) * (1 + len(kernels)), 10)]
    cotangents, seen = jax.grad(loss, has_aux=True)(taps)
    first, *inner, last = zip(seen, cotangents, strict=True)
    h, d = (jnp.stack(arrays, axis=1) for arrays in zip(*inner, strict=True))
    by_z = bilinear(h, d, params["out"]["w"]) * (1 - z**2)
    of_h, of_d, of_z = (jnp.einsum("blk,bmk->blm", a, a) for a in (h, d, by_z))
    squares = jnp.einsum("blm,blm,lm->b", of_h, of_d, 1 + z @ z.T)
    squares += jnp.einsum("blm,lm->b", of_z, 1 + params["codes"] @ params["codes"].T)
    squares += squared(by_z @ params["hidden"]["w"].T)
    squares += sum((1 + squared(a)) * squared(g) for a, g in (first, last))
    norms, factors = clipped(squares, bound)
    (total,) = pull((jnp.einsum("bli,blo,b->lio", h, d, factors), jnp.zeros_like(z)))
    for name, (a, g) in (("first", first), ("last", last)):
        scaled = factors[:, None] * g
        total[name] = {"w": a.T @ scaled, "b": scaled.sum(0)}
    return total, norms


def bilinear(h: Array, d: Array, matrix: Array) -> Array:
    """``h @ W_k @ d`` for each example, layer and row of the generating matrix."""
    inner = jnp.einsum("bli,kio->blko", h, matrix.reshape(-1, h.shape[-1], d.shape[-1]))
    return jnp.einsum("blko,blo->blk", inner, d)


def needed(case: Case) -> Run:
    """A plain step of the hypernetwork, and the bilinear forms of numbers of the right shape."""
    step = plain(case)

    def run(params: Any, batch: Any) -> Any:
        h = jnp.broadcast_to(batch[0][:, None], (len(batch[0]), len(params["codes"]), 64))
        return step(params, batch), bilinear(h, h[::-1], params["out"]["w"])

    return jax.jit(run)


def neural_ode(params: Any, batch: Any, bound: float) -> Found:
    x, labels = batch
    p, count, steps = params["field"], len(x), 16

    def loss(taps: Any) -> tuple[Array, Any]:
        def tapped(h: Array, t: Array, by: Any) -> tuple[Array, tuple[Array, Array]]:
            inner = jnp.tanh(h @ p["in"]["w"] + p["in"]["b"] + t * p["time"] + by[0])
            return inner @ p["out"]["w"] + p["out"]["b"] + by[1], (h, inner)

        def step(h: Array, xs: Any) -> Any:
            t, one, two = xs
            slope, first = tapped(h, t, one)
            slope, second = tapped(h + slope / (2 * steps), t + 1 / (2 * steps), two)
            return h + slope / steps, (first, second)

        h, seen = jax.lax.scan(step, x, (jnp.arange(steps) / steps, *taps[:2]))
        logits = h @ params["last"]["w"] + params["last"]["b"] + taps[2]
        return jnp.sum(jax.vmap(cross_entropy)(logits, labels)), (seen, h)

    pair = jnp.zeros((steps, count, 64)), jnp.zeros((steps, count, 16))
    (one, two, last), (seen, h) = jax.grad(loss, has_aux=True)((pair, pair, jnp.zeros((count, 10))))
    times = jnp.arange(2 * steps) / (2 * steps)
    # Both evaluations of the field, in the order of time.
    (states, inner), (by_inner, by_slope) = jax.tree.map(
        lambda a, b: jnp.stack([a, b], 1).reshape(-1, *a.shape[1:]), (seen[0], one), (seen[1], two)
    )
    each = {
        "in": {"w": jnp.einsum("tbi,tbo->bio", states, by_inner), "b": by_inner.sum(0)},
        "out": {"w": jnp.einsum("tbi,tbo->bio", inner, by_slope), "b": by_slope.sum(0)},
        "time": jnp.einsum("t,tbo->bo", times, by_inner),
    }
    squares = sum(map(squared, jax.tree.leaves(each))) + (1 + squared(h)) * squared(last)
    norms, factors = clipped(squares, bound)
    scaled = factors[:, None] * last
    total = jax.tree.map(lambda g: jnp.einsum("b,b...->...", factors, g), each)
    return {"field": total, "last": {"w": h.T @ scaled, "b": scaled.sum(0)}}, norms


def weight_decay(params: Any, batch: Any, bound: float) -> Found:
    """It knows that the gradient of the decay is the kernel itself: no product is needed for it."""
    x, labels, decay = *batch, 2 * 5e-4
    widths = [len(layer["b"]) for layer in params]

    def loss(taps: list[Array]) -> tuple[Array, Any]:
        h, seen, products = x, list[Array](), list[Array]()
        for layer, tap in zip(params, taps, strict=True):
            seen.append(jax.nn.relu(h) if seen else h)
            products.append(seen[-1] @ layer["w"])
            h = products[-1] + layer["b"] + tap
        return jnp.sum(jax.vmap(cross_entropy)(h, labels)), (seen, products)

    taps = [jnp.zeros((len(x), n)) for n in widths]
    cotangents, (seen, products) = jax.grad(loss, has_aux=True)(taps)
    squares = jnp.zeros(len(x))
    for layer, h, y, g in zip(params, seen, products, cotangents, strict=True):
        squares += squared(h) * squared(g) + 2 * decay * jnp.sum(g * y, axis=1)
        squares += decay**2 * jnp.sum(layer["w"] ** 2) + squared(g + decay * layer["b"])
    norms, factors = clipped(squares, bound)
    sums = [
        {"w": h.T @ (factors[:, None] * g), "b": factors @ g}
        for h, g in zip(seen, cotangents, strict=True)
    ]
    return jax.tree.map(lambda s, p: s + decay * jnp.sum(factors) * p, sums, params), norms


def factorisation_machine(params: Any, batch: Any, bound: float) -> Found:
    """It knows that all rows of the linear part have one gradient, that of the score."""
    (ids, labels), (wide, last) = batch, params["deep"]
    rows, offset = params["table"][ids], params["bias"] + params["linear"][ids].sum(1)

    def loss(taps: Any) -> tuple[Array, Any]:
        v = rows + taps[0]
        x, pairs = v.reshape(len(v), -1), jnp.sum(v.sum(1) ** 2 - (v**2).sum(1), axis=1) / 2
        h = jax.nn.relu(x @ wide["w"] + wide["b"] + taps[1])
        score = offset + pairs + (h @ last["w"] + last["b"])[:, 0] + taps[2]
        return jnp.sum(optax.sigmoid_binary_cross_entropy(score, labels.astype(float))), (x, h)

    taps = jnp.zeros(rows.shape), jnp.zeros((len(ids), 64)), jnp.zeros(len(ids))
    (by_rows, by_h, by_score), (x, h) = jax.grad(loss, has_aux=True)(taps)
    # An example may take a row of the table more than once.
    same = (ids[:, :, None] == ids[:, None, :]).astype(rows.dtype)
    squares = jnp.sum(by_rows * jnp.einsum("bst,btd->bsd", same, by_rows), axis=(1, 2))
    squares += (1 + squared(x)) * squared(by_h)
    squares += by_score**2 * (2 + squared(h) + same.sum((1, 2)))
    norms, factors = clipped(squares, bound)
    by_rows, by_h = factors[:, None, None] * by_rows, factors[:, None] * by_h
    by_score = factors * by_score
    total = {
        "table": jnp.zeros_like(params["table"]).at[ids].add(by_rows),
        "linear": jnp.zeros_like(params["linear"]).at[ids].add(by_score[:, None]),
        "bias": by_score.sum(),
        "deep": [
            {"w": x.T @ by_h, "b": by_h.sum(0)},
            {"w": (h.T @ by_score)[:, None], "b": by_score.sum()[None]},
        ],
    }
    return total, norms


PROGRAMS: dict[str, Callable[[Any, Any, float], Found]] = {
    "hypernetwork": hypernetwork,
    "neural ode": neural_ode,
    "weight decay in the loss": weight_decay,
    "factorisation machine": factorisation_machine,
}


def measure(name: str, rounds: int, smoke: bool) -> None:
    case = MODELS[name](4 if smoke else None)
    bound = float(jnp.median(norms_of(case)))
    runs = {
        "plain": plain(case),
        "dpjax": private(case, bound),
        "written for it": jax.jit(lambda p, b: PROGRAMS[name](p, b, bound)),
    }
    if name == "hypernetwork":
        runs["needed"] = needed(case)
    found, wanted = (runs[who](case.params, case.batch) for who in ("written for it", "dpjax"))
    gap = jax.tree.map(jnp.subtract, found, wanted)
    apart = max(
        float(optax.tree.norm(a) / optax.tree.norm(b)) for a, b in zip(gap, wanted, strict=True)
    )
    taken: dict[str, list[float]] = {who: [] for who in runs}
    for run in runs.values():
        cpu_seconds(run, case, 1)  # compiles
    for _ in range(rounds):
        for who, run in runs.items():
            taken[who].append(cpu_seconds(run, case, 1 if smoke else 30))
    print(f"{name}: the sums and norms of both private programs differ by {apart:.1e}")
    for who, seconds in taken.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, taken["plain"], strict=True))
        print(f"  {who:16} {1e3 * statistics.median(seconds):8.3f} ms {ratio:6.2f} x", flush=True)


def main(asked: Any) -> None:
    for name in PROGRAMS:
        measure(name, 1 if asked.smoke else asked.rounds, asked.smoke)


if __name__ == "__main__":
    reporting.run(main, smoke="Batches of 4, one round", rounds=15, out=None)
