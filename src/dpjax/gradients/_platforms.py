# SPDX-License-Identifier: Apache-2.0
"""Platforms: the kind of device that a program is traced for, which decides its forms.

JAX knows the platform late, when it lowers. So code that decides reads `on_cpu`, and runs inside
`dependent`, which traces it for each platform.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

T = TypeVar("T")

ACCELERATOR = "accelerator"
"""Any platform but the CPU. Where TPUs and GPUs differ, `on_tpu` and `on_gpu` decide."""

# The setting of the default device; pyright does not know its attribute.
_DEVICE = "jax_default_device"

_TRACED: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


def current() -> str:
    """The platform that a program is traced for; by default that of the default device."""
    return known() or _default()


def on_cpu() -> bool:
    """Whether decisions are for a CPU."""
    return current() == "cpu"


def on_gpu() -> bool:
    """Whether decisions are for a GPU; an unknown accelerator is that of the default device."""
    platform = current()
    if platform == ACCELERATOR:
        platform = _default()
    return platform in ("gpu", "cuda", "rocm")


def on_tpu() -> bool:
    """Whether decisions are for an accelerator other than a GPU."""
    return not (on_cpu() or on_gpu())


def known() -> str | None:
    """The platform that is settled before lowering; None if lowering decides."""
    # The mesh knows its kind of device, also inside a `shard_map`.
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is None:
        return _TRACED.get()
    return device.platform


def of(devices: int | Mesh | None) -> str | None:
    """The platform of a mesh; None for a number of devices."""
    if not isinstance(devices, Mesh):
        return None
    return devices.devices.flat[0].platform


@contextlib.contextmanager
def traced_for(platform: str | None) -> Iterator[None]:
    """Settles the platform of programs that are traced inside; None changes nothing."""
    token = _TRACED.set(platform or _TRACED.get())
    try:
        yield
    finally:
        _TRACED.reset(token)


def dependent(function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)``, with the decisions of the platform for which it is lowered."""
    if known() is not None:
        return function(*arguments)
    # Traced for both platforms; only one program is lowered.
    return jax.lax.platform_dependent(
        *arguments, cpu=traced_for("cpu")(function), default=traced_for(ACCELERATOR)(function)
    )


def memory_limit() -> int:
    """Bytes of memory of one accelerator; 16 GiB if this process has none."""
    # A device of this process, because JAX does not know the memory of others.
    device = jax.local_devices()[0]
    stats = None
    if device.platform != "cpu":
        stats = device.memory_stats()
    return (stats or {}).get("bytes_limit", 16 * 2**30)


def _default() -> str:
    device = getattr(jax.config, _DEVICE)
    if device is None:
        return jax.default_backend()
    if isinstance(device, str):
        return device
    return device.platform
