# SPDX-License-Identifier: Apache-2.0
"""What a step is a function of beside its state: versions, settings of JAX, devices.

Any of them may change the draws, the noise or the last bits of a sum.  A step that runs again
must release what it has released, to the last bit: other noise on the same sum, or the same
noise on another, is a second release, which nobody counted.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

import jax

_PACKAGES = ("dpjax", "jax", "jaxlib", "optax")
_SETTINGS = ("jax_threefry_partitionable", "jax_enable_x64", "jax_default_matmul_precision")


def numerics() -> dict[str, Any]:
    """By what equal states may give unequal steps, as JSON has it."""
    return {
        **{name: _version(name) for name in _PACKAGES},
        **{name: getattr(jax.config, name, None) for name in _SETTINGS},
        "platform": jax.default_backend(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
