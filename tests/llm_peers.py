# SPDX-License-Identifier: Apache-2.0
"""`make test-llm`: logits of transformers, adapters of PEFT, and tokenizers, beside experiments.llm.

It runs in an environment of its own: Tunix, transformers, PEFT and PyTorch bring much along, and
`make test` needs none of them.
"""

import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import tokenizers
import torch
import transformers

from dpjax import clipping, testing
from experiments.llm import networks, objective, run, texts, weights

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
}
GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 4}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES | GEMMA | {"num_hidden_layers": 6}),
    "gemma3, one key": lambda: transformers.Gemma3TextConfig(
        **SIZES | GEMMA | {"num_key_value_heads": 1}
    ),
    "gemma3, all keys": lambda: transformers.Gemma3TextConfig(
        **SIZES | GEMMA | {"num_key_value_heads": 4}
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=97
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 97, 12)


@pytest.fixture(params=MODELS)
def saved(request, tmp_path):
    """A tiny random model of transformers, in shards."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[request.param]())
    with torch.no_grad():
        for weight in model.parameters():  # norms are ones, and their layout is then not seen
            weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    return model.eval(), tmp_path


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)[None]).logits[0].numpy()


def test_logits_are_those_of_transformers_and_adapters_those_of_peft(saved):
    model, folder = saved
    network = networks.of(json.loads((folder / "config.json").read_text()))
    leaves = weights.filled(network, folder)
    ours = jax.jit(network.apply)
    np.testing.assert_allclose(ours(leaves, {}, TOKENS), logits_of(model), atol=1e-4)

    adapters = networks.adapters(network, 3, jax.random.key(0))
    np.testing.assert_allclose(ours(leaves, adapters, TOKENS), logits_of(model), atol=1e-4)
    keys = iter(jax.random.split(jax.random.key(1), 99))
    adapters = jax.tree.map(lambda x: x + jax.random.normal(next(keys), x.shape) / 5, adapters)
    weights.write_adapters(folder, network, adapters, str(folder))
    tuned = peft.PeftModel.from_pretrained(model, folder).eval()
    want = logits_of(tuned)
    assert np.abs(want - ours(leaves, {}, TOKENS)).max() > 0.1
    np.testing.assert_allclose(ours(leaves, adapters, TOKENS), want, atol=1e-4)


def test_engines_agree(saved):
    _, folder = saved
    network = networks.of(json.loads((folder / "config.json").read_text()))
    frozen = {"leaves": weights.filled(network, folder)}
    params = {"lora": networks.adapters(network, 2, jax.random.key(0))}
    params = jax.tree.map(lambda x: x + 0.1, params)
    loss = objective.loss_of(network)
    rows = objective.stacked([objective.example_of(TOKENS[i:], 12, 2) for i in range(4)])
    testing.assert_engines_agree(
        lambda params, row: loss(params, row, frozen), clipping.flat(0.5), params, rows
    )


def test_a_tokenizer_that_was_trained_here_round_trips(tmp_path):
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["to thine own self be true", "what is a warm film"] * 9, 300)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = texts.Tokenizer(str(tmp_path))
    for text in ("to thine own film", "un été, 42 €"):
        assert tokenizer.text(tokenizer(text)) == text


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        raise SystemExit(pytest.main([__file__, "-q", f"--rootdir={folder}", "-p", "no:cacheprovider", "-c/dev/null", "--noconftest", *__import__("sys").argv[1:]]))
