# SPDX-License-Identifier: Apache-2.0
"""Weights in folders as the hubs store them: safetensors in, PEFT's adapters out.

Files are data and never code. A bfloat16 file gives bfloat16 leaves.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.finetuning import transformers
from experiments.llm.networks import Adapters, Leaves, Network

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


def read(folder: str | pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of a folder, of one file or of the shards that its index names."""
    folder = pathlib.Path(folder)
    names = {_WHOLE}
    if (folder / _INDEX).exists():
        index = json.loads((folder / _INDEX).read_text())
        names = set(index["weight_map"].values())
    found: dict[str, np.ndarray] = {}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing. Download the folder again.")
        found |= transformers.read_safetensors(folder / name)
    return found


def filled(network: Network, folder: str | pathlib.Path) -> Leaves:
    """The leaves of a network from a folder; other arrays of the folder are left out."""
    stored = read(folder)
    leaves = {}
    for path, leaf in jax.eval_shape(network.init, jax.random.key(0)).items():
        names = network.published(path)
        # GPT-2's own files lack the first part of each name.
        given = [stored.get(name, stored.get(name.partition(".")[2])) for name in names]
        try:
            made = network.made(path, leaf.shape, given)
        except (AttributeError, TypeError, ValueError):  # an array is missing, or too small
            made = None
        if made is None or made.shape != leaf.shape:
            found = getattr(given[0], "shape", None)
            raise ValueError(
                f"{folder}: {', '.join(names)} has shape {found}, which does not fit "
                f"{leaf.shape}, the shape by config.json."
            )
        leaves[path] = jnp.asarray(made)
    return leaves


def write_adapters(folder: pathlib.Path, network: Network, adapters: Adapters, base: str) -> None:
    """The two files that PEFT reads; its scale, ``lora_alpha / r``, is 1."""
    rank = next(iter(adapters.values()))["a"].shape[1]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-1] for name in adapters}),
        "fan_in_fan_out": network.family == "gpt2",  # GPT-2 stores [inputs, outputs]
        "inference_mode": True,
    }
    arrays = {}
    for name, pair in adapters.items():
        prefix = f"base_model.model.{name}"
        arrays[f"{prefix}.lora_A.weight"] = np.asarray(pair["a"], np.float32).T
        arrays[f"{prefix}.lora_B.weight"] = np.asarray(pair["b"], np.float32).T
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "adapter_model.safetensors").write_bytes(safetensors(arrays))


def safetensors(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Float32 arrays in the format: the length of a header, the header in JSON, the numbers."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, array in arrays.items():
        numbers = np.ascontiguousarray(array, "<f4").tobytes()
        places = [len(content), len(content) + len(numbers)]
        content += numbers
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": places}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    return len(words).to_bytes(8, "little") + words + content
