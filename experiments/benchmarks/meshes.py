# SPDX-License-Identifier: Apache-2.0
"""How far a mesh moves the parameters: meshes, engines and losses against one device.

  result    in two steps no parameter moves by more than 3.4e-8: three losses, two engines, four
            meshes
  command   make bench BENCH=meshes ARGS="--engines=auto,vmap --out FILE"
  figures   experiments/results/meshes.json, from before "dense, banded noise" joined the losses

Each case takes two steps with Adam on eight devices of the CPU, with one key, and compares all
parameters with the parameters of one device. The order of sums alone differs. Two cores that play
eight devices say nothing about speed: that is not measured here.
"""

from __future__ import annotations

import itertools
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import reporting
from absl import flags

import dpjax
from dpjax import clipping, losses, meshes, models, sampling, strategies

_DEVICES = flags.DEFINE_integer("devices", 8, "Devices that the CPU is shown as.", 1)
_MESHES = flags.DEFINE_multi_string(
    "mesh", ["data:8", "data:4,model:2", "data:2,model:4", "data:1,model:8"], "Meshes."
)
_ENGINES = flags.DEFINE_list("engines", ["auto", "vmap", "scan"], "Engines.")
EXAMPLES = 40


class Convolutions(nn.Module):
    """Two convolutions; the second has enough numbers to be split."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.tanh(nn.Conv(8, (3, 3))(x.reshape(6, 6, 1)))
        return nn.Dense(4)(nn.tanh(nn.Conv(16, (3, 3))(x)).reshape(-1))


class Tokens(nn.Module):
    """Attention over embedded tokens, with the table tied to the output."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        table = nn.Embed(64, 32)
        h = table((4 * x[:12]).astype(int) % 64)
        h = nn.LayerNorm()(h + nn.MultiHeadDotProductAttention(4)(h[None])[0])
        return table.attend(h.mean(0))[:4]


LOSSES: dict[str, nn.Module] = {
    "dense": models.MLP(features=(64, 64), classes=4),
    "convolution": Convolutions(),
    "Transformer, embedding": Tokens(),
    "dense, banded noise": models.MLP(features=(64, 64), classes=4),
}
_LOSSES = flags.DEFINE_multi_enum("loss", list(LOSSES), list(LOSSES), "Losses.")


def parameters(name: str, engine: str, mesh: Any) -> np.ndarray:
    """All parameters after two steps."""
    model, banded = LOSSES[name], "banded" in name
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 36)).astype(np.float32)
    mechanism = dpjax.Mechanism(
        sampling=sampling.cyclic_poisson(EXAMPLES, 16, cycle=2)
        if banded
        else sampling.poisson(EXAMPLES, 16),
        clipping=clipping.flat(1.0),
        noise_multiplier=1.0,
        steps=2,
        noise=strategies.square_root(2, bands=2) if banded else None,
    )
    loss, data = losses.of(model, losses.cross_entropy), (x, np.arange(EXAMPLES) % 4)
    options: Any = {"microbatch_size": 8, "mesh": mesh}
    algorithm = dpjax.dpsgd(loss, optax.adam(0.01), mechanism, data, engine, **options)
    params = jax.device_get(model.init(jax.random.key(0), x[0])["params"])
    state, _ = algorithm.run(algorithm.init(params, jax.random.key(1)), 2)
    return np.concatenate(
        [np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(state.params))]
    )


def main(asked: Any) -> None:
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    report = reporting.begin(("jax", "jaxlib"), devices=_DEVICES.value)
    report["largest_difference"] = {}
    for name, engine in itertools.product(_LOSSES.value, _ENGINES.value):
        single = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
        alone = parameters(name, engine, single)
        for text in _MESHES.value:
            found = parameters(name, engine, meshes.parse(text))
            moved = float(np.abs(found - alone).max())
            report["largest_difference"][f"{name}, {engine}, {text}"] = moved
            print(f"{name}, {engine}, {text}: {moved:.1e}", flush=True)
            reporting.keep(report, asked.out)


if __name__ == "__main__":
    reporting.run(main, smoke=None)
