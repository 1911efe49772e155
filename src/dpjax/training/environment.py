# SPDX-License-Identifier: Apache-2.0
"""The environment of a run: versions, settings of JAX, devices, the machine.

Each of them may change the draws, the noise or the last bits of a sum. A repeated step must release
the same bits: other noise on the same sum, or the same noise on another sum, is a second release
that the ledger did not count.
"""

from __future__ import annotations

import functools
import os
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import meshes, noise, trees
from dpjax._versions import version
from dpjax.gradients import platforms
from dpjax.types import Key, Purpose, Sampler

# Processes compare them before every dispatch, and the files of packages take milliseconds.
_installed = functools.cache(version)
_PACKAGES = ("dpjax", "jax", "jaxlib", "optax")
_SETTINGS = ("jax_threefry_partitionable", "jax_enable_x64", "jax_default_matmul_precision")


def numerics() -> dict[str, Any]:
    """What may make equal states give different steps, in JSON types."""
    return {
        **{name: _installed(name) for name in _PACKAGES},
        **settings(),
        "platform": jax.default_backend(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def machine() -> dict[str, str]:
    """XLA's flags and the processor, which may differ between the processes of a run."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    numeric = sorted(flag for flag in flags if not flag.startswith("--xla_dump"))
    return {"XLA_FLAGS": " ".join(numeric) or "none", "processor": _processor()}


@functools.cache
def _processor() -> str:
    """The model of the CPU and its vector instructions: XLA compiles for them."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    known = {name.strip(): words for name, _, words in (line.partition(":") for line in lines)}
    vectors = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "sve")
    every = known.get("flags", known.get("Features", "")).split()
    found = [word for word in sorted(every) if word.startswith(vectors)]
    return " ".join([known.get("model name", platform.machine()).strip(), *found])


def settings() -> dict[str, Any]:
    """The settings of JAX that may change draws, noise or last bits."""
    return {name: getattr(jax.config, name, None) for name in _SETTINGS}


def repeatable(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` of a program of a step, which releases the same bits however often it runs.

    XLA for a GPU times several kernels and keeps the fastest, and adds some sums in the order in
    which threads arrive. A step that ran again, as after a crash, would have another seal.

    Args:
      function: The program. It is compiled on its own, never inside another program.
      options: Further arguments of `jax.jit`.
    """
    same = {"xla_gpu_deterministic_ops": True} if platforms.on_gpu() else None
    return jax.jit(function, compiler_options=same, **options)


def drawn(sampling: Sampler, generator: Any) -> str:
    """A hash of the first draw of a public key; nothing where steps draw independently.

    Steps of an epoch or a cycle share one order of the examples, which each step computes again
    from the root key. If the generator changed in between, an example could be drawn twice.

    Args:
      sampling: The sampler.
      generator: The kind of the run's key.
    """
    if sampling.independent:
        return ""
    with meshes.in_force(None):
        draw = sampling.draw(jax.random.key(0, impl=generator), jnp.int32(0))
    # Not the bits of its whole numbers, which are wider under `jax_enable_x64`.
    return trees.fingerprint([np.asarray(part, np.int64) for part in draw])


def draw_and_noise(sampling: Sampler, key: Key, step: int) -> str:
    """A hash of the draw of a step and of some numbers of its noise, as this process has them."""
    # From a copy of the key, without the run's mesh, where a program is one of all processes.
    with meshes.in_force(None):
        bits = jnp.asarray(trees.on_host(key))
        root = jax.random.wrap_key_data(bits, impl=jax.random.key_impl(key))
        numbers = noise.standard_normal(trees.step_key(root, Purpose.NOISE, step), (8,))
        return trees.fingerprint((sampling.draw(root, jnp.int32(step)), numbers))
