# SPDX-License-Identifier: Apache-2.0
"""Causal language models of one text: `dpjax.models.Decoder` and three of Tunix.

A network is a function of flat leaves, adapters and tokens to logits. The leaves have the paths
of the module, the adapters the names and shapes of the published files (``config.json`` and
safetensors, as the hubs store them), which PEFT reads. An adapter adds ``x A B`` to the
output of its projection: no kernel is merged, so frozen bfloat16 kernels round no adapter away.

References:
  Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2022. Radford et al., "Language
  Models are Unsupervised Multitask Learners", 2019: GPT-2.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from dpjax import models

Leaves = Mapping[str, Any]  # by path
Cache = Any  # the keys and values of the tokens that were read, for each layer
Adapters = Mapping[str, Mapping[str, Any]]  # "a" [inputs, rank], "b" [rank, outputs] by their name


class Network(NamedTuple):
    """A model, and the names of its leaves and projections in published files."""

    family: str
    vocabulary: int
    length: int | None  # the most tokens of a text
    apply: Callable[[Leaves, Adapters, Any], Any]  # the tokens of a text -> logits behind each
    begin: Callable[[Leaves, int], Cache]  # an empty cache for texts of this length
    # Reads the token at a place, after those before it: the logits behind it, and the cache.
    read: Callable[[Leaves, Adapters, Any, Any, Cache], tuple[Any, Cache]]
    init: Callable[[Any], Leaves]
    published: Callable[[str], tuple[str, ...]]  # the arrays that a leaf is made from
    made: Callable[[str, tuple[int, ...], list[Any]], Any]  # a leaf of this path and shape
    adapted: Mapping[str, tuple[int, int]]  # inputs and outputs of each adapted projection


def adapters(network: Network, rank: int, key: Any) -> dict[str, dict[str, Any]]:
    """Thin factors whose product is zero, so the adapted network begins as the network."""
    keys = jax.random.split(key, len(network.adapted))
    pairs = {}
    for a_key, (name, (inputs, outputs)) in zip(keys, network.adapted.items(), strict=True):
        a = jax.random.normal(a_key, (inputs, rank)) / math.sqrt(inputs)
        pairs[name] = {"a": a, "b": jnp.zeros((rank, outputs))}
    return pairs


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
_PROJECTED = tuple((part,) for part in _PARTS)


def decoder(config: Mapping[str, Any]) -> Network:
    """GPT-2's network, from the fields of its ``config.json``."""
    vocabulary = config.get("vocab_size", 50_257)
    length = config.get("n_positions", 1024)
    width = config.get("n_embd", 768)
    depth = config.get("n_layer", 12)
    model = models.Decoder(
        vocabulary=vocabulary,
        length=length,
        width=width,
        depth=depth,
        heads=config.get("n_head", 12),
        hidden=config.get("n_inner"),
    )

    def called(leaves: Leaves, tokens: Any, interceptor: Callable[..., Any] | None) -> Any:
        params = {"params": unflatten_dict(dict(leaves), sep="/")}
        if interceptor is None:
            return model.apply(params, tokens)
        with nn.intercept_methods(interceptor):
            return model.apply(params, tokens)

    def projected(adapters: Adapters, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """The output of a method, with the adapter of queries, keys or values added."""
        out = call(*args, **kwargs)
        path = context.module.path
        if not adapters or context.method_name != "__call__" or path[-1:] not in _PROJECTED:
            return out
        _, _, block = path[1].partition("_")  # such as "encoderblock_3"
        factors = adapters[f"transformer.h.{block}.attn.c_attn"]
        b = jnp.split(factors["b"], 3, axis=1)[_PARTS.index(path[-1])]
        return out + _low(factors["a"], b, args[0], out)

    def apply(leaves: Leaves, adapters: Adapters, tokens: Any) -> Any:
        if not adapters:
            return called(leaves, tokens, None)
        return called(leaves, tokens, partial(projected, adapters))

    def begin(leaves: Leaves, length: int) -> Cache:
        cache = {}
        for path, leaf in leaves.items():
            if re.search(r"Attention_1/(key|value)/kernel$", path):
                _, heads, size = leaf.shape
                cache[path.removesuffix("/kernel")] = jnp.zeros((length, heads, size), leaf.dtype)
        return cache

    def read(
        leaves: Leaves, adapters: Adapters, token: Any, place: Any, cache: Cache
    ) -> tuple[Any, Cache]:
        after = dict(cache)

        def remembered(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            """Puts keys and values into the cache, and lets the query attend to all of them."""
            module = context.module
            name = "/".join(module.path)
            if name.endswith("posembed_input"):
                table = module.get_variable("params", "pos_embedding")
                return args[0] + table[0, place]
            if isinstance(module, nn.MultiHeadDotProductAttention):
                (rows, *_) = cache.values()
                kwargs = {**kwargs, "mask": (jnp.arange(len(rows)) <= place)[None, None]}
            out = projected(adapters, call, args, kwargs, context)
            if name not in cache:
                return out
            after[name] = cache[name].at[place].set(out[0])
            return after[name]

        logits = called(leaves, token[None], remembered)
        return logits[0], after

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

    return Network(
        family="gpt2",
        vocabulary=vocabulary,
        length=length,
        apply=apply,
        begin=begin,
        read=read,
        init=init,
        published=published,
        made=made,
        adapted={f"transformer.h.{i}.attn.c_attn": (width, 3 * width) for i in range(depth)},
    )


def _low(a: Any, b: Any, x: Any, out: Any) -> Any:
    """The product ``x A B`` that an adapter adds to the output of its projection."""
    product = x @ a @ b
    return product.astype(out.dtype).reshape(out.shape)


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
    """A network of Tunix, from its own ``ModelConfig``; ``rope`` has the fields of positions."""
    from flax import nnx

    module = importlib.import_module(f"tunix.models.{family}.model")
    make = getattr(module, TUNIX[family])
    abstract = nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract, nnx.Param)
    by_path, tree = jax.tree.flatten_with_path(state)
    shapes = {}
    for path, leaf in by_path:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shapes[name.removesuffix("/value")] = leaf
    projections = _projections(shapes)

    def called(
        leaves: Leaves, adapters: Adapters, tokens: Any, places: Any, cache: Cache, seen: Any
    ) -> tuple[Any, Cache]:
        model = nnx.merge(graph, jax.tree.unflatten(tree, [leaves[name] for name in shapes]))
        if adapters:
            adapt(model, adapters)
        # Tunix 0.1.7 rotates by its default base, and ignores the base of the configuration.
        rotate = module.apply_rope if family == "gemma3" else _rotation(rope, config)
        with mock.patch.object(module, "apply_rope", rotate):
            logits, cache = model(tokens[None], places[None], cache, seen[None])
        return logits[0], cache

    def apply(leaves: Leaves, adapters: Adapters, tokens: Any) -> Any:
        places = jnp.arange(len(tokens))
        logits, _ = called(leaves, adapters, tokens, places, None, places <= places[:, None])
        return logits

    def begin(leaves: Leaves, length: int) -> Cache:
        dtype = leaves["embedder/input_embedding"].dtype
        empty = jnp.zeros((1, length, config.num_kv_heads, config.head_dim), dtype)
        layer = {"k": empty, "v": empty, "end_index": jnp.zeros(1, jnp.int32)}
        return {f"layer_{i}": layer for i in range(config.num_layers)}

    def read(
        leaves: Leaves, adapters: Adapters, token: Any, place: Any, cache: Cache
    ) -> tuple[Any, Cache]:
        length = cache["layer_0"]["k"].shape[1]
        seen = (jnp.arange(length) <= place)[None]
        logits, cache = called(leaves, adapters, token[None], place[None], cache, seen)
        return logits[0], cache

    def adapt(model: Any, adapters: Adapters) -> None:
        """Puts adapters around the projections of a model."""
        for path, names in projections.items():
            *_, layer, attention, name = path.split("/")
            owner = getattr(model.layers[int(layer)], attention)
            factors = [adapters.get(part) for part in names]
            # NNX's own `setattr` takes an object with arrays for a part of the module.
            object.__setattr__(owner, name, _Adapted(getattr(owner, name), factors))

    def init(key: Any) -> Leaves:
        # Tunix's own start has zeros in all kernels of the hidden layers.
        scale = 0.0 if family == "gemma3" else 1.0
        keys = jax.random.split(key, len(shapes))
        leaves = {}
        for leaf_key, (name, leaf) in zip(keys, shapes.items(), strict=True):
            if leaf.ndim > 1:
                leaves[name] = 0.02 * jax.random.normal(leaf_key, leaf.shape)
            else:
                leaves[name] = jnp.full(leaf.shape, scale)
        return leaves

    def made(path: str, shape: tuple[int, ...], given: list[Any]) -> Any:
        if re.fullmatch(_FUSED, path):
            width, head = shape[-2:]
            parts = [weight.T.reshape(width, -1, head).swapaxes(0, 1) for weight in given]
            return jnp.stack(parts).reshape(shape)
        (weight,) = given
        if weight.ndim > 1 and "input_embedding" not in path:
            return weight.T.reshape(shape)
        return weight

    outputs = {"q_proj": config.num_heads, "v_proj": config.num_kv_heads}
    adapted = {}
    for names in projections.values():
        for name in names:
            kind = name.split(".")[-1]
            if kind in outputs:
                adapted[name] = (config.embed_dim, outputs[kind] * config.head_dim)
    return Network(
        family=family,
        vocabulary=shapes["embedder/input_embedding"].shape[0],
        length=None,
        apply=apply,
        begin=begin,
        read=read,
        init=init,
        published=_tunix_names,
        made=made,
        adapted=adapted,
    )


def _projections(paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The published names of the parts of each projection that has adapters."""
    projections = {}
    for path in paths:
        path = path.removesuffix("/w")
        if re.search(r"/attn/([qv]_proj|q?k?v?_einsum)$", path):
            names = _tunix_names(f"{path}/w")
            projections[path] = tuple(name.removesuffix(".weight") for name in names)
    return projections


def _tunix_names(path: str) -> tuple[str, ...]:
    """The published names of the arrays that a leaf is made from."""
    if fused := re.fullmatch(_FUSED, path):
        return tuple(_tunix_names(f"{fused[1]}{part}_proj/w")[0] for part in fused[2])
    for ours, theirs in _TUNIX:
        path = re.sub(ours, theirs, path)
    return (path,)


def _rotation(rope: Mapping[str, Any] | None, config: Any) -> Callable[..., Any]:
    """Rotary positions; with the long waves of Llama 3.1 and newer, which are stretched."""
    rope = rope or {"rope_theta": config.rope_theta}
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    waves = rope["rope_theta"] ** -exponents
    if rope.get("rope_type") == "llama3":
        low = rope["low_freq_factor"]
        high = rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * waves / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        waves = waves * (kept + (1 - kept) / rope["factor"])

    def apply_rope(x: Any, positions: Any, head_dim: int, rope_theta: float = 0) -> Any:
        del head_dim, rope_theta
        angles = positions[..., None, None] * jnp.asarray(waves, jnp.float32)
        sin = jnp.sin(angles)
        cos = jnp.cos(angles)
        first, second = jnp.split(x, 2, axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)

    return apply_rope


class _Adapted:
    """A projection with adapters; its other attributes come from the projection."""

    def __init__(self, projection: Any, factors: list[Mapping[str, Any] | None]) -> None:
        self.projection = projection
        self.factors = factors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.projection, name)

    def __call__(self, x: Any) -> Any:
        out = self.projection(x)
        if len(self.factors) == 1:
            return self._added(x, out, self.factors[0])
        parts = zip(out, self.factors, strict=True)
        return [self._added(x, part, pair) for part, pair in parts]

    def _added(self, x: Any, out: Any, pair: Mapping[str, Any] | None) -> Any:
        """An output with the product of its adapter, if it has one."""
        if pair is None:
            return out
        return out + _low(pair["a"], pair["b"], x, out)


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
    rope = config.get("rope_parameters")
    if not rope:  # before version 5 of transformers, positions had no field of their own
        scaling = config.get("rope_scaling") or {}
        rope = {"rope_theta": config.get("rope_theta"), **scaling}
    if family == "gemma3":
        scalings = module.QueryPreAttentionNormalisation
        scaling = scalings.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
        if config["query_pre_attn_scalar"] == fields["head_dim"]:
            scaling = scalings.BY_ONE_OVER_SQRT_HEAD_DIM
        whole = rope.get("full_attention", {})
        local = rope.get("sliding_attention", {})
        fields |= {
            "query_pre_attn_norm": scaling,
            "num_embed": config["vocab_size"],
            "sliding_window_size": config["sliding_window"],
            "global_base_frequency": whole.get("rope_theta") or rope["rope_theta"],
            "local_base_frequency": local.get("rope_theta") or config["rope_local_base_freq"],
            "global_scale_factor": whole.get("factor") or rope.get("factor") or 1.0,
        }
    else:
        tied = "weight_tying" if family == "llama3" else "use_tied_embedding"
        fields |= {
            "vocab_size": config["vocab_size"],
            "rope_theta": rope["rope_theta"],
            "norm_eps": config["rms_norm_eps"],
            tied: config.get("tie_word_embeddings", False),
        }
    return tunix(family, module.ModelConfig(**fields), rope)


def by_size(size: str, vocabulary: int) -> Network:
    """A network of a known size, such as ``decoder_tiny``, or a name of Tunix: ``llama3p2_1b``."""
    if size in SIZES:
        return decoder({**SIZES[size], "vocab_size": vocabulary})
    for family in TUNIX:
        if size.startswith(family):
            module = importlib.import_module(f"tunix.models.{family}.model")
            if hasattr(module.ModelConfig, size):
                config = getattr(module.ModelConfig, size)()
                return tunix(family, config)
    raise ValueError(
        f"--model={size}: expected {', '.join(SIZES)} or a size of Tunix, as llama3p2_1b."
    )
