# SPDX-License-Identifier: Apache-2.0
"""Causal language models of one text: `dpjax.models.Decoder` and three of Tunix.

A network is a function of flat leaves, adapters and tokens to logits. The leaves have the paths
of the module, the adapters the names and shapes of the published files (``config.json`` and
safetensors, as the hubs store them), so that PEFT reads them. An adapter adds ``x A B`` to the
output of its projection: no kernel is merged, so frozen bfloat16 kernels round no adapter away.

References:
  Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2022. Radford et al., "Language
  Models are Unsupervised Multitask Learners", 2019: GPT-2.
"""

from __future__ import annotations

import importlib
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
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
    return Network("gpt2", config["vocab_size"], length, apply, init, published, made, adapted)


def _low(a: Any, b: Any, x: Any, out: Any) -> Any:
    """What an adapter adds to the output of its projection."""
    return (x @ a @ b).astype(out.dtype).reshape(out.shape)


TUNIX = {"llama3": "Llama3", "qwen3": "Qwen3", "gemma3": "Gemma3"}  # families and their modules
_KINDS = {"llama": "llama3", "qwen3": "qwen3", "gemma3_text": "gemma3"}  # of config.json
_TUNIX = (
    (r"^embedder/input_embedding$", "model.embed_tokens/w"),
    (r"^(layers|final_norm)/", r"model.\1/"),
    (r"final_norm", "norm"),
    (r"/attn/", "/self_attn/"),
    (r"attn_vec_einsum", "o_proj"),
    (r"_(query|key)_norm", lambda found: f"{found[1][0]}_norm"),
    (r"pre_attention_norm", "input_layernorm"),
    (r"post_attention_norm", "post_attention_layernorm"),
    (r"(pre|post)_ffw_norm", r"\1_feedforward_layernorm"),
    (r"/(w|kernel|scale)$", "/weight"),
    (r"/", "."),
)
_FUSED = r"(.*/)(q?k?v?)_einsum(/w)?"  # Gemma's projections, of these letters together


def tunix(family: str, config: Any, rope: Mapping[str, Any] | None = None) -> Network:
    """A network of Tunix, of its own ``ModelConfig``; ``rope`` are the positions' fields."""
    from flax import nnx

    module = importlib.import_module(f"tunix.models.{family}.model")
    make = getattr(module, TUNIX[family])
    abstract = nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract, nnx.Param)
    found, tree = jax.tree.flatten_with_path(state)
    shapes = {
        re.sub(r"/value$", "", jax.tree_util.keystr(path, simple=True, separator="/")): leaf
        for path, leaf in found
    }
    projections = {  # of each adapted projection, the names of its parts
        path: tuple(name.removesuffix(".weight") for name in _tunix_names(f"{path}/w"))
        for path in (name.removesuffix("/w") for name in shapes)
        if re.search(r"/attn/([qv]_proj|q?k?v?_einsum)$", path)
    }

    def apply(leaves: Leaves, adapters: Adapters, tokens: Any) -> Any:
        model = nnx.merge(graph, jax.tree.unflatten(tree, [leaves[name] for name in shapes]))
        for path, names in projections.items() if adapters else ():
            *_, layer, attention, name = path.split("/")
            owner = getattr(model.layers[int(layer)], attention)
            factors = [adapters.get(each) for each in names]
            # Past the check of NNX, which takes what holds arrays for a part of the module.
            object.__setattr__(owner, name, _Adapted(getattr(owner, name), factors))
        places = jnp.arange(len(tokens))
        seen = places <= places[:, None]
        # Tunix 0.1.7 rotates by its default base and not by that of the configuration.
        turned = module.apply_rope if family == "gemma3" else _rotation(rope, config)
        with mock.patch.object(module, "apply_rope", turned):
            return model(tokens[None], places[None], None, seen[None])[0][0]

    def init(key: Any) -> Leaves:
        # Not the module's own: it begins with zeros in all kernels of its hidden layers.
        keys = jax.random.split(key, len(shapes))
        return {
            name: 0.02 * jax.random.normal(each, leaf.shape)
            if leaf.ndim > 1
            else jnp.full(leaf.shape, 0.0 if family == "gemma3" else 1.0)
            for each, (name, leaf) in zip(keys, shapes.items(), strict=True)
        }

    def made(path: str, shape: tuple[int, ...], given: list[Any]) -> Any:
        if re.fullmatch(_FUSED, path):
            width, head = shape[-2:]
            parts = [weight.T.reshape(width, -1, head).swapaxes(0, 1) for weight in given]
            return jnp.stack(parts).reshape(shape)
        kernel = given[0].ndim > 1 and "input_embedding" not in path
        return given[0].T.reshape(shape) if kernel else given[0]

    outputs = {"q_proj": config.num_heads, "v_proj": config.num_kv_heads}
    adapted = {
        name: (config.embed_dim, outputs[kind] * config.head_dim)
        for name in itertools.chain(*projections.values())
        if (kind := name.split(".")[-1]) in outputs
    }
    vocabulary = shapes["embedder/input_embedding"].shape[0]
    return Network(family, vocabulary, None, apply, init, _tunix_names, made, adapted)


def _tunix_names(path: str) -> tuple[str, ...]:
    if fused := re.fullmatch(_FUSED, path):
        return tuple(_tunix_names(f"{fused[1]}{part}_proj/w")[0] for part in fused[2])
    for ours, theirs in _TUNIX:
        path = re.sub(ours, theirs, path)
    return (path,)


def _rotation(rope: Mapping[str, Any] | None, config: Any) -> Callable[..., Any]:
    """Rotary positions; with the long waves of Llama 3.1 and newer, which are stretched."""
    rope = rope or {"rope_theta": config.rope_theta}
    waves = rope["rope_theta"] ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    if rope.get("rope_type") == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * waves / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        waves = waves * (kept + (1 - kept) / rope["factor"])

    def apply_rope(x: Any, positions: Any, head_dim: int, rope_theta: float = 0) -> Any:
        del head_dim, rope_theta
        angles = positions[..., None, None] * jnp.asarray(waves, jnp.float32)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        first, second = jnp.split(x, 2, axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)

    return apply_rope


class _Adapted:
    """A projection with adapters; its other attributes come from the projection."""

    def __init__(self, projection: Any, factors: list[Mapping[str, Any] | None]) -> None:
        self.projection, self.factors = projection, factors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.projection, name)

    def __call__(self, x: Any) -> Any:
        out = self.projection(x)
        outs = [
            part if pair is None else part + _low(pair["a"], pair["b"], x, part)
            for pair, part in zip(
                self.factors, out if len(self.factors) > 1 else [out], strict=True
            )
        ]
        return outs if len(outs) > 1 else outs[0]


def of(config: Mapping[str, Any]) -> Network:
    """The network of a ``config.json``."""
    kind = config.get("model_type")
    if kind == "gpt2":
        return decoder(config)
    if kind not in _KINDS:
        raise ValueError(
            f"config.json: model_type is {kind!r}; expected gpt2, {', '.join(_KINDS)}."
        )
    family = _KINDS[kind]
    module = importlib.import_module(f"tunix.models.{family}.model")
    heads = config["num_attention_heads"]
    fields = {
        "num_layers": config["num_hidden_layers"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
    }
    # Since version 5 of transformers, positions have a field of their own.
    old = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    rope = config.get("rope_parameters") or old
    if family != "gemma3":
        tied = "weight_tying" if family == "llama3" else "use_tied_embedding"
        fields |= {
            "vocab_size": config["vocab_size"],
            "rope_theta": rope["rope_theta"],
            "norm_eps": config["rms_norm_eps"],
            tied: config.get("tie_word_embeddings", False),
        }
    else:
        whole, local = (rope.get(f"{part}_attention", {}) for part in ("full", "sliding"))
        scalings = module.QueryPreAttentionNormalisation
        plain = config["query_pre_attn_scalar"] == fields["head_dim"]
        fields |= {
            "query_pre_attn_norm": scalings.BY_ONE_OVER_SQRT_HEAD_DIM
            if plain
            else scalings.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS,
            "num_embed": config["vocab_size"],
            "sliding_window_size": config["sliding_window"],
            "global_base_frequency": whole.get("rope_theta") or rope["rope_theta"],
            "local_base_frequency": local.get("rope_theta") or config["rope_local_base_freq"],
            "global_scale_factor": whole.get("factor") or rope.get("factor") or 1.0,
        }
    return tunix(family, module.ModelConfig(**fields), rope)


def by_size(size: str, vocabulary: int) -> Network:
    """A network of a known size, such as ``decoder_tiny``, or a name of Tunix: ``llama3p2_1b``."""
    if size in SIZES:
        return decoder({**SIZES[size], "vocab_size": vocabulary})
    family = next((family for family in TUNIX if size.startswith(family)), "")
    known = family and importlib.import_module(f"tunix.models.{family}.model").ModelConfig
    if not hasattr(known, size):
        raise ValueError(
            f"--model={size}: expected {', '.join(SIZES)} or a size of Tunix, as llama3p2_1b."
        )
    return tunix(family, getattr(known, size)())
