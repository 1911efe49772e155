# SPDX-License-Identifier: Apache-2.0
"""Causal language models of one text: `dpjax.models.Decoder`, and Llama 3, Qwen 3, Gemma 3 of Tunix.

A network is a function of flat leaves, adapters and tokens to logits. The leaves have the paths
of the module, the adapters the names and shapes of the published files (``config.json`` and
safetensors, as the hubs store them), so that PEFT reads them. An adapter adds ``x A B`` to the
output of its projection: no kernel is merged, so frozen bfloat16 kernels round no adapter away.

References:
  Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2022. Radford et al., "Language
  Models are Unsupervised Multitask Learners", 2019: GPT-2.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from dpjax import models

Leaves = Mapping[str, Any]  # by path
Adapters = Mapping[str, Mapping[str, Any]]  # "a" [inputs, rank], "b" [rank, outputs] by their name


class Network(NamedTuple):
    """A model, and how its leaves and projections are called in published files."""

    family: str
    vocabulary: int
    length: int | None  # the most tokens of a text
    apply: Callable[[Leaves, Adapters, Any], Any]  # the tokens of a text -> logits behind each
    init: Callable[[Any], Leaves]
    published: Callable[[str], tuple[str, ...]]  # the arrays that a leaf is made from
    made: Callable[[str, tuple[int, ...], list[Any]], Any]  # a leaf of this path and shape
    adapted: Mapping[str, tuple[int, int]]  # inputs and outputs of each adapted projection


def adapters(network: Network, rank: int, key: Any) -> dict[str, dict[str, Any]]:
    """Thin factors whose product is zero, so the adapted network begins as the network."""
    keys = jax.random.split(key, len(network.adapted))
    return {
        name: {
            "a": jax.random.normal(each, (inputs, rank)) / math.sqrt(inputs),
            "b": jnp.zeros((rank, outputs)),
        }
        for each, (name, (inputs, outputs)) in zip(keys, network.adapted.items(), strict=True)
    }


SIZES = {  # of decoders with random weights
    "decoder": {},
    "decoder_tiny": {"n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4},
}
_GPT2 = (
    (r"^token/embedding$", "wte.weight"),
    (r"^Transformer/posembed_input/pos_embedding$", "wpe.weight"),
    (r"^Transformer/encoder_norm/", "ln_f."),
    (r"^Transformer/encoderblock_(\d+)/", r"h.\1."),
    (r"LayerNorm_0/", "ln_1."),
    (r"LayerNorm_2/", "ln_2."),
    (r"MultiHeadDotProductAttention_1/out/", "attn.c_proj."),
    (r"MultiHeadDotProductAttention_1/(query|key|value)/", "attn.c_attn."),
    (r"MlpBlock_3/Dense_0/", "mlp.c_fc."),
    (r"MlpBlock_3/Dense_1/", "mlp.c_proj."),
    (r"(kernel|scale)$", "weight"),
)
_PARTS = ("query", "key", "value")  # of the columns of c_attn, in this order


def decoder(config: Mapping[str, Any]) -> Network:
    """GPT-2's network, of the fields of its ``config.json``."""
    config = {"vocab_size": 50_257, "n_positions": 1024, "n_embd": 768, **config}
    width, depth = config["n_embd"], config.get("n_layer", 12)
    model = models.Decoder(
        vocabulary=config["vocab_size"],
        length=config["n_positions"],
        width=width,
        depth=depth,
        heads=config.get("n_head", 12),
        hidden=config.get("n_inner"),
    )

    def apply(leaves: Leaves, adapters: Adapters, tokens: Any) -> Any:
        def adapted(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            out, path = call(*args, **kwargs), context.module.path
            if context.method_name != "__call__" or path[-1:] not in {(p,) for p in _PARTS}:
                return out
            factors = adapters[f"transformer.h.{path[1].partition('_')[2]}.attn.c_attn"]
            b = jnp.split(factors["b"], 3, axis=1)[_PARTS.index(path[-1])]
            return out + _low(factors["a"], b, args[0], out)

        params = unflatten_dict(dict(leaves), sep="/")
        with nn.intercept_methods(adapted if adapters else lambda call, a, k, _: call(*a, **k)):
            return model.apply({"params": params}, tokens)

    def init(key: Any) -> Leaves:
        return flatten_dict(model.init(key, jnp.zeros(2, jnp.int32))["params"], sep="/")

    def published(path: str) -> tuple[str, ...]:
        for ours, theirs in _GPT2:
            path = re.sub(ours, theirs, path)
        return (f"transformer.{path}",)

    def made(path: str, shape: tuple[int, ...], given: list[Any]) -> Any:
        part = path.split("/")[-2]
        if part in _PARTS and "MultiHead" in path:
            given = jnp.split(given[0], 3, axis=-1)[_PARTS.index(part) :]
        return given[0].reshape(shape)

    adapted = {f"transformer.h.{i}.attn.c_attn": (width, 3 * width) for i in range(depth)}
    length = config["n_positions"]
    return Network(
        "gpt2", config["vocab_size"], length, apply, init, published, made, adapted
    )


def _low(a: Any, b: Any, x: Any, out: Any) -> Any:
    """What an adapter adds to the output of its projection."""
    return (x @ a @ b).astype(out.dtype).reshape(out.shape)
