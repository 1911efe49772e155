# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning by `experiments.llm`: records, weights, adapters, and what a run leaves.

The comparisons with transformers and PEFT are slow, and need an environment of their own, which
``make test-llm`` sets up.
"""

import importlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments.finetuning.transformers import read_safetensors
from experiments.llm import networks, objective, quantized, texts, weights
from run_binary import run

import dpjax

TINY = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6, "vocab_size": 9}
BYTES = texts.Tokenizer(None)


@pytest.mark.parametrize(
    ("name", "lines", "want"),
    [
        ("a.jsonl", ['{"text": "one"}', '{"prompt": "p", "completion": "c"}'], ["one", "p/c"]),
        ("a.tsv", ["label\ttext", "1\ttwo"], ["two"]),
        ("a.tsv", ["completion\tprompt", "c\tp"], ["p/c"]),
        ("a.tsv", ["two\t1"], ["two"]),
        ("a.txt", ["one", "two\tthree"], ["one", "two\tthree"]),
    ],
)
def test_a_line_is_a_record(tmp_path, name, lines, want):
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    found = texts.records(str(tmp_path / name))
    assert ["/".join(filter(None, record)) for record in found] == want


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.jsonl", ['{"text": "one", "by": 7}', '{"text": "two", "by": "b"}']),
        ("a.tsv", ["by\ttext", "7\tone", "b\ttwo"]),
    ],
)
def test_a_record_has_its_author_where_a_column_is_named(tmp_path, name, lines):
    path = str(tmp_path / name)
    (tmp_path / name).write_text("\n".join(lines))
    assert [record.author for record in texts.records(path)] == ["", ""]
    assert [record.author for record in texts.records(path, "by")] == ["7", "b"]
    with pytest.raises(ValueError, match=r"line \d: no writer"):
        texts.records(path, "writer")


@pytest.mark.parametrize("line", ["", '{"text": ""}', '{"prompt": "p", "completion": " "}'])
def test_a_record_without_text_is_refused(tmp_path, line):
    path = tmp_path / ("a.jsonl" if line else "a.txt")
    path.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"line 2: no text"):
        texts.records(str(path))


def test_prompt_and_padding_are_not_predicted():
    tokens, counted = BYTES.example(texts.Record("ab", "cd"), 8)
    assert BYTES.text(tokens) == "abcd"
    assert tokens.tolist() == [98, 99, 100, 101, 0, 0, 0, 0]
    assert counted.tolist() == [0, 0, 1, 1, 1, 0, 0, 0], "the end of a text is predicted too"
    assert BYTES.example(texts.Record("", "abc"), 2)[1].tolist() == [0, 1], "cut"


@pytest.mark.thorough
def test_padding_and_prompt_change_no_loss():
    network = networks.decoder(TINY)
    frozen = {"leaves": network.init(jax.random.key(0)), "lora": {}}
    loss = objective.loss_of(network)
    short, long = (objective.example_of([1, 2, 3, 4], length, 2) for length in (4, 6))
    np.testing.assert_allclose(loss({}, short, frozen), loss({}, long, frozen), rtol=1e-5)
    logits = network.apply(frozen["leaves"], {}, short[0])
    want = -np.mean([jax.nn.log_softmax(logits)[i, short[0][i + 1]] for i in (1, 2)])
    np.testing.assert_allclose(loss({}, short, frozen), want, rtol=1e-5)


def perturbed(adapters):
    """Adapters whose product is not zero."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + rng.normal(0, 0.2, x.shape).astype(x.dtype), adapters)


def assert_cached(network, leaves, adapters, tokens):
    """A token at a time, behind a cache, gives the logits of the whole text."""
    want = jax.jit(network.apply)(leaves, adapters, tokens)
    read, cache = jax.jit(network.read), network.begin(leaves, len(tokens))
    for place, token in enumerate(tokens):
        logits, cache = read(leaves, adapters, jnp.int32(token), jnp.int32(place), cache)
        np.testing.assert_allclose(logits, want[place], atol=1e-4)
    assert np.abs(want).max() > 0.01


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 2])
def test_a_cache_changes_no_logits(rank):
    network = networks.decoder({**TINY, "n_layer": 2})
    leaves = jax.tree.map(lambda leaf: 9 * leaf, network.init(jax.random.key(0)))
    adapters = perturbed(networks.adapters(network, rank, jax.random.key(0))) if rank else {}
    assert_cached(network, leaves, adapters, np.array([1, 2, 3, 4, 5, 6]))


# How far a normal number may move, relative to the largest of its block: by half of a gap.
HALF_GAPS = {"int8": 0.5 / 127, "nf4": (1 - 0.6961) / 2}


@pytest.mark.parametrize("kind", quantized.KINDS)
def test_a_quantised_kernel_is_near_and_small(kind):
    kernel = jax.random.normal(jax.random.key(0), (64, 3, 32)).at[:2].set(0)
    made = quantized.quantized(kernel, kind)
    near = made.dense()
    assert (near.shape, near.dtype) == (kernel.shape, kernel.dtype)
    largest = np.abs(kernel.reshape(-1, quantized.BLOCK)).max(axis=1, keepdims=True)
    apart = np.abs((near - kernel).reshape(-1, quantized.BLOCK))
    assert np.all(apart <= 1.001 * HALF_GAPS[kind] * largest)
    assert np.all(near[:2] == 0)
    assert made.codes.nbytes == kernel.size // (1 if kind == "int8" else 2)
    again = quantized.quantized(near, kind)
    np.testing.assert_array_equal(again.codes, made.codes)


def tiny(family):
    """A small network, of GPT-2 or of Tunix."""
    if family == "gpt2":
        return networks.decoder({**TINY, "n_embd": 16, "n_layer": 2})
    pytest.importorskip("tunix", reason="optional; `make test-llm` installs it")
    module = importlib.import_module(f"tunix.models.{family}.model")
    sizes = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    if family == "gemma3":
        fields = {"num_embed": 9, "sliding_window_size": 8, "param_dtype": np.float32}
    else:
        fields = {"vocab_size": 9, "rope_theta": 10_000, "norm_eps": 1e-6}
    return networks.tunix(family, module.ModelConfig(**sizes, **heads, **fields))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", quantized.KINDS)
@pytest.mark.parametrize("family", ["gpt2", *networks.TUNIX])
def test_engines_agree_on_llm_adapters_of_a_quantised_base(family, kind):
    network = tiny(family)
    leaves = jax.jit(network.init)(jax.random.key(0))
    base = quantized.kernels_quantized(leaves, kind)
    kernels = [leaf for leaf in base.values() if isinstance(leaf, quantized.Quantized)]
    assert len(kernels) >= 2 * 6, "of two layers"
    adapters = perturbed(networks.adapters(network, 2, jax.random.key(0)))
    given = quantized.of_quantized(network)
    assert_cached(given, base, adapters, np.array([1, 2, 3, 4, 5, 6]))
    loss = objective.loss_of(given)
    examples = np.arange(24).reshape(4, 6) % 9, np.ones((4, 6), np.float32)
    sums = []
    for engine in ("auto", "vmap"):
        clipped = dpjax.clipped_grad(loss, dpjax.clipping.flat(0.02), engine)
        sums.append(jax.jit(clipped)({"lora": adapters}, examples, frozen={"leaves": base}))
    found, want = sums
    assert np.all(want.norms > 0.02)
    np.testing.assert_allclose(found.norms, want.norms, rtol=1e-4)
    for one, other in zip(*map(jax.tree.leaves, (found.value, want.value)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.slow
def test_a_run_has_a_quantised_base(tmp_path):
    (tmp_path / "texts.txt").write_text("one text\nand another\n" * 8)
    given = [f"--text={tmp_path / 'texts.txt'}", "--steps=2", "--length=8", "--batch_size=4"]
    given += ["--quantize=nf4", f"--out={tmp_path / 'run'}", "--generate=one"]
    done = run("experiments.llm", *given, "--lora=2")
    assert "\none" in done.stdout
    assert json.loads((tmp_path / "run" / "run.json").read_text())["quantize"] == "nf4"
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()
    refused = run("experiments.llm", *given, "--lora=0", status=1)
    assert "quantised kernels are not trained" in refused.stderr + refused.stdout


@pytest.mark.thorough
def test_a_written_text_is_that_of_the_whole_network():
    network = networks.decoder(TINY)
    leaves = jax.tree.map(lambda leaf: 9 * leaf, network.init(jax.random.key(0)))
    tuned = {"leaves": leaves, "lora": {}}
    found = objective.written(network, objective.next_of(network), tuned, [1, 2], 6, -1, seed=3)
    want = [1, 2]
    for place in range(2, 6):
        logits = network.apply(leaves, {}, np.array(want))[-1]
        key = jax.random.fold_in(jax.random.key(3), place)
        want.append(int(jax.random.categorical(key, logits / 0.8)))
    assert found == want
    found = objective.written(
        network, objective.next_of(network), tuned, [1, 2], 6, want[3], seed=3
    )
    assert found == want[: want.index(want[3], 2)], "without the end"


def saved(folder, **changed):
    """Weights of a tiny GPT-2, as its own files name them."""
    network = networks.decoder(TINY)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    arrays: dict = {
        network.published(path)[0]: np.ones(leaf.shape) for path, leaf in shapes.items()
    }
    arrays["transformer.wpe.weight"] = np.ones((6, 8))
    for part, shape in (("attn.c_attn.weight", (8, 24)), ("attn.c_attn.bias", 24)):
        arrays[f"transformer.h.0.{part}"] = np.ones(shape)
    arrays = {name.removeprefix("transformer."): array for name, array in arrays.items()}
    content = weights.safetensors({**arrays, **changed})
    (folder / "model.safetensors").write_bytes(content)
    return network


def test_weights_of_other_shapes_and_missing_shards_are_refused(tmp_path):
    network = saved(tmp_path)
    read = read_safetensors(tmp_path / "model.safetensors")
    assert read["h.0.attn.c_attn.weight"].shape == (8, 24)
    assert all(np.all(leaf == 1) for leaf in weights.filled(network, tmp_path).values())
    saved(tmp_path, **{"wte.weight": np.ones((9, 4))})
    with pytest.raises(ValueError, match=r"wte.weight has shape \(9, 4\), .* \(9, 8\)"):
        weights.filled(network, tmp_path)
    index = {"weight_map": {"wte.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002.safetensors is missing"):
        weights.filled(network, tmp_path)


def test_models_without_a_network_are_refused():
    with pytest.raises(ValueError, match=r"model_type is 'bert'; expected gpt2, llama"):
        networks.of({"model_type": "bert"})
    with pytest.raises(ValueError, match=r"--model=gpt5: expected decoder"):
        networks.by_size("gpt5", 9)


@pytest.mark.slow
def test_a_run_leaves_a_card_and_adapters(tmp_path):
    lines = [json.dumps({"prompt": "who? ", "completion": name}) for name in ("orla", "bram")]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines * 8))
    given = [f"--text={tmp_path / 'texts.jsonl'}", "--steps=3", "--length=16", "--batch_size=4"]
    out, test = tmp_path / "run", f"--test={tmp_path / 'texts.jsonl'}"
    done = run(
        "experiments.llm",
        *given,
        test,
        f"--out={out}",
        "--lora=2",
        "--generate=who? ",
        "--plant=pin ##",
    )
    assert "epsilon" in done.stdout
    assert "Perplexity" in done.stdout
    assert "\nwho? " in done.stdout
    assert re.search(r"pin ##: exposure \d\.\d of 6\.6 bits", done.stdout)
    card = json.loads((out / "privacy.json").read_text())
    assert card["steps"] == 3
    found = read_safetensors(out / "adapter_model.safetensors")
    name = "base_model.model.transformer.h.1.attn.c_attn.lora_B.weight"
    assert found[name].shape == (3 * 64, 2)
    assert np.abs(found[name]).max() > 0
    saved(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **TINY}))
    given = [f"--text={tmp_path / 'texts.jsonl'}", f"--weights={tmp_path}"]
    done = run("experiments.llm", *given, f"--out={tmp_path / 'other'}", status=1)
    assert "bytes has 257 tokens, the model 9" in done.stderr + done.stdout


@pytest.mark.slow
def test_authors_are_the_unit_where_their_column_is_named(tmp_path):
    lines = [json.dumps({"text": f"text {i}", "by": f"author {i % 5}"}) for i in range(20)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    given = ["--steps=2", "--length=8", "--batch_size=2", "--lora=2", "--plant=pin #"]
    given += ["--author_column=by", "--texts_per_author=3", "--delta=0.01", "--seed=1"]
    given += [f"--text={tmp_path / 'texts.jsonl'}", f"--out={tmp_path / 'run'}"]
    done = run("experiments.llm", *given)
    assert "exposure" in done.stdout
    assert "one author" in done.stdout
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["mechanism"]["unit"] == "author"
    assert card["mechanism"]["sampling"]["examples"] == 6, "and who would have the planted text"


# --- beside transformers and PEFT --------------------------------------------------------------

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
}
LLAMA = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 4}
MODELS = {  # class of the configuration and its fields
    "llama": ("LlamaConfig", SIZES),
    "llama 3.2": ("LlamaConfig", {**SIZES, "tie_word_embeddings": True, "rope_parameters": LLAMA}),
    "qwen3": ("Qwen3Config", SIZES),
    "gemma3": ("Gemma3TextConfig", {**SIZES, **GEMMA, "num_hidden_layers": 6}),
    "gemma3, one key": ("Gemma3TextConfig", {**SIZES, **GEMMA, "num_key_value_heads": 1}),
    "gemma3, all keys": ("Gemma3TextConfig", {**SIZES, **GEMMA, "num_key_value_heads": 4}),
    "gpt2": ("GPT2Config", {**TINY, "n_embd": 32, "n_layer": 2, "n_positions": 16}),
}
TOKENS = np.random.default_rng(0).integers(0, 9, 12)


@pytest.fixture(params=MODELS)
def published(request, tmp_path):
    """A tiny random model of transformers, the network of its files, and its weights."""
    torch = pytest.importorskip("torch", reason="optional; see the head of this file")
    transformers = pytest.importorskip("transformers")
    kind, fields = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():  # norms are ones, which would hide their layout
            weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    network = networks.of(json.loads((tmp_path / "config.json").read_text()))
    return model.eval(), tmp_path, network, weights.filled(network, tmp_path)


def logits_of(model):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model(torch.tensor(TOKENS)[None]).logits[0].numpy()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of these libraries
def test_logits_are_those_of_transformers_and_adapters_those_of_peft(published):
    peft = pytest.importorskip("peft")
    model, folder, network, leaves = published
    ours = jax.jit(network.apply)
    np.testing.assert_allclose(ours(leaves, {}, TOKENS), logits_of(model), atol=1e-4)
    adapters = networks.adapters(network, 3, jax.random.key(0))
    np.testing.assert_allclose(ours(leaves, adapters, TOKENS), logits_of(model), atol=1e-4)
    adapters = perturbed(adapters)
    weights.write_adapters(folder, network, adapters, str(folder))
    want = logits_of(peft.PeftModel.from_pretrained(model, folder).eval())
    assert np.abs(want - ours(leaves, {}, TOKENS)).max() > 0.1
    np.testing.assert_allclose(ours(leaves, adapters, TOKENS), want, atol=1e-4)
    for factors in ({}, adapters):
        assert_cached(network, leaves, factors, TOKENS)


@pytest.mark.slow
def test_tokenizers_that_were_trained_here_round_trip(tmp_path):
    lines = ["to thine own self be true", "what is a warm film"] * 9
    made = pytest.importorskip("tokenizers").ByteLevelBPETokenizer()
    made.train_from_iterator(lines, 300)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = texts.Tokenizer(str(tmp_path), end=3)
    for text in ("to thine own film", "un été, 42 €"):
        assert tokenizer.text(tokenizer(text)) == text
    assert tokenizer.example(texts.Record("to ", "thine"), 9)[1].sum() == 2, "and the end"
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    prefix = str(tmp_path / "pieces")
    trainer.train(sentence_iterator=iter(lines), model_prefix=prefix, vocab_size=21)
    tokenizer = texts.Tokenizer(f"{prefix}.model")
    assert tokenizer.text(tokenizer("a true self")) == "a true self"
    assert (tokenizer("a")[0], tokenizer.end, tokenizer.size) == (1, 2, 21)
