# SPDX-License-Identifier: Apache-2.0
"""Tunix's language models, full and with Qwix's adapters: both engines give the same sum.

`make test-llm` runs this in an environment of its own, since Tunix installs much.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dpjax import clipped_grad, clipping

qwix = pytest.importorskip("qwix", reason="optional; `make test-llm` installs it and Tunix")

# A warning of these libraries is none of ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WORDS, LENGTH, EXAMPLES, BOUND = 97, 16, 4, 0.02
SIZES = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
ROPE = {"vocab_size": WORDS, "rope_theta": 10_000, "norm_eps": 1e-6}
GEMMA = {"param_dtype": jnp.float32, "sliding_window_size": 8}
FAMILIES = {
    "llama3": ("Llama3", ROPE),
    "qwen3": ("Qwen3", ROPE),
    "gemma3": ("Gemma3", {"num_embed": WORDS, **GEMMA}),
}
ADAPTERS = {  # Qwix's rules: LoRA, and QLoRA of two types
    "lora": {},
    "int8": {"weight_qtype": "int8"},
    "nf4": {"weight_qtype": "nf4", "tile_size": 8},
}
# Tunix 0.1.7 casts the weights of Qwen 3, and Qwix's quantised arrays have no cast.
CASES = [
    (family, case)
    for family in FAMILIES
    for case in ("full", *ADAPTERS, "remat", "bfloat16")
    if family != "qwen3" or not ADAPTERS.get(case)
]


def inputs(tokens):
    """What a model is called with, for one text."""
    causal = jnp.tril(jnp.ones((1, LENGTH, LENGTH), bool))
    return tokens[None], jnp.arange(LENGTH)[None], None, causal


def network(family, case):
    name, options = FAMILIES[family]
    module = importlib.import_module(f"tunix.models.{family}.model")
    if case == "remat":
        options = {**options, "remat_config": module.RematConfig.DECODER}
    model = getattr(module, name)(module.ModelConfig(**SIZES, **HEADS, **options), rngs=nnx.Rngs(0))
    if case in ADAPTERS:
        rule = {"module_path": ".*(proj|einsum)", "rank": 2, "alpha": 4.0, **ADAPTERS[case]}
        given = inputs(jnp.zeros(LENGTH, jnp.int32))
        model = qwix.apply_lora_to_model(model, qwix.LoraProvider(**rule), *given, rngs=nnx.Rngs(1))
    return model


@pytest.mark.parametrize(("family", "case"), CASES)
def test_engines_agree(family, case):
    kind = nnx.LoRAParam if case in ADAPTERS else nnx.Param
    graph, params, frozen = nnx.split(network(family, case), kind, ...)
    rng, wide = np.random.default_rng(0), case == "bfloat16"
    if wide:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    else:  # Adapters that are zero would leave half of the gradient zero.
        moved = jax.tree.map(lambda x: 0.02 * rng.normal(size=x.shape), params)
        params = jax.tree.map(lambda x, y: (x + y).astype(x.dtype), params, moved)
    tokens = jnp.asarray(rng.integers(WORDS, size=(EXAMPLES, LENGTH + 1)), jnp.int32)
    lengths = jnp.arange(LENGTH - EXAMPLES, LENGTH)

    def loss(params, example, frozen):
        tokens, length = example
        logits, _ = nnx.merge(graph, params, frozen, copy=True)(*inputs(tokens[:-1]))
        each = optax.softmax_cross_entropy_with_integer_labels(
            logits[0].astype(jnp.float32), tokens[1:]
        )
        return jnp.mean(each, where=jnp.arange(LENGTH) < length)

    def clipped(engine):
        total = clipped_grad(loss, clipping.flat(BOUND), engine)
        return jax.jit(total)(params, (tokens, lengths), frozen=frozen)

    found, want = clipped("auto"), clipped("vmap")
    # Both engines round activations to bfloat16, and not always in the same place.
    tolerance = 2e-2 if wide else 1e-5
    np.testing.assert_allclose(found.norms, want.norms, rtol=tolerance)
    assert jnp.all(want.norms > BOUND), want.norms
    pairs = zip(*map(jax.tree.leaves, (found.value, want.value)), strict=True)
    apart = max(float(jnp.abs(a - b).max()) for a, b in pairs)
    print(f"{family}, {case}: {apart:.1e}")
    assert apart < tolerance * BOUND * EXAMPLES
