# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a causal language model on private texts, and writes its adapters.

claim     a folder of safetensors and a file of texts give adapters, a statement and a card
verdict   so it is: tests/test_llm_program.py compares with transformers and PEFT
time      by size
hardware  CPU, or what JAX finds
command   python -m experiments.llm --weights=FOLDER --text=FILE.jsonl --target_epsilon=8 --out=RUN

Needs ``pip install '.[llm]'`` for Llama 3, Qwen 3 and Gemma 3 (Tunix) and for tokenizers; GPT-2's
network and bytes need nothing. Draws are Poisson, and epsilon is by PLD.

The unit is one record, a line of --text: epsilon does not hold for an author with many records.
With --author_column the unit is an author with all records, and each step takes up to
--texts_per_author of the records of each author that is drawn.

--out is the folder of the run, and a killed run resumes from it: ``privacy.json`` (the card),
``statement.txt``, ``params.msgpack``, and with --lora the two files of PEFT,
``adapter_config.json`` and ``adapter_model.safetensors``. Perplexity is that of --test, whose
texts must not be private.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import resource
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import app, flags

import dpjax
from dpjax import auditing, meshes
from experiments.common import runs
from experiments.llm import networks, objective, quantized, texts, weights

_TEXT = flags.DEFINE_string("text", None, "Private texts, a record a line: .jsonl, .tsv or plain.")
_TEST = flags.DEFINE_string("test", None, "Texts that are not private, for perplexity.")
_WEIGHTS = flags.DEFINE_string("weights", "random", "Folder of config.json and safetensors.")
_MODEL = flags.DEFINE_string(
    "model", "decoder_tiny", "Of random weights: decoder, or a size of Tunix, as gemma3_270m."
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "tokenizer.json or tokenizer.model; by default of the weights, or bytes."
)
_LORA = flags.DEFINE_integer("lora", 8, "Rank of the adapters; 0 trains all weights.", 0)
_QUANTIZE = flags.DEFINE_enum(
    "quantize", None, quantized.KINDS, "Keeps the frozen kernels in 8 or 4 bits; with --lora."
)
_LENGTH = flags.DEFINE_integer("length", 128, "The most tokens of a text; the rest is cut.", 2)
_OUT = flags.DEFINE_string(
    "out",
    None,
    "Folder of the run: card, statement, weights and checkpoints.",
    allow_override=True,  # elsewhere in `experiments` it is a file
)
_AUTHOR = flags.DEFINE_string(
    "author_column", None, "Field or column of --text with the author, who is then the unit."
)
_TEXTS = flags.DEFINE_integer(
    "texts_per_author", 4, "The most records of an author in a step; with --author_column.", 1
)
_BATCH = flags.DEFINE_integer("batch_size", 64, "Expected units of a draw: records or authors.", 1)
_STEPS = flags.DEFINE_integer("steps", 100, "Steps.", 1)
_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Rate of Adam.")
_BOUND = flags.DEFINE_float("bound", 1.0, "Clipping bound of the gradient of a unit.")
_EPSILON = flags.DEFINE_float(
    "target_epsilon", 8.0, "Of one unit, a record or an author; inf trains without privacy."
)
_DELTA = flags.DEFINE_float("delta", runs.DELTA, "Of the epsilon; well below 1 / units.", 0, 1)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Of new weights, adapters and written texts; draws and noise are always secret."
)
_MESH = flags.DEFINE_string("mesh", None, "Axes of the devices, as data:4,model:2.")
_PLANT = flags.DEFINE_multi_string(
    "plant", None, "An audit: one more text, such as 'my code is ####', with random digits."
)
_GENERATE = flags.DEFINE_multi_string("generate", None, "A prompt to continue after training.")


def loaded() -> tuple[networks.Network, texts.Tokenizer, networks.Leaves]:
    """The network, its tokenizer and its weights before training."""
    if _WEIGHTS.value == "random":
        tokenizer = texts.Tokenizer(_TOKENIZER.value)
        network = networks.by_size(_MODEL.value, tokenizer.size)
        leaves = jax.jit(network.init)(jax.random.key(_SEED.value))
    else:
        folder = pathlib.Path(_WEIGHTS.value)
        config = json.loads((folder / "config.json").read_text())
        end = config.get("eos_token_id")
        if isinstance(end, list):
            end = end[0]
        tokenizer = texts.Tokenizer(_TOKENIZER.value or str(folder), end)
        network = networks.of(config)
        leaves = weights.filled(network, folder)
    if tokenizer.size > network.vocabulary:
        raise ValueError(
            f"{tokenizer.name} has {tokenizer.size} tokens, the model {network.vocabulary}. "
            "Give --tokenizer the file that belongs to the weights."
        )
    if _QUANTIZE.value is not None:
        network = quantized.of_quantized(network)
        leaves = quantized.kernels_quantized(leaves, _QUANTIZE.value)
    return network, tokenizer, leaves


def tune(text: str, out: pathlib.Path) -> None:
    """Trains the adapters, or with ``--lora=0`` all weights, in the folder of the run."""
    network, tokenizer, leaves = loaded()
    length = _LENGTH.value
    if network.length is not None:
        length = min(length, network.length)

    def examples(records: Sequence[texts.Record]) -> tuple[Any, Any]:
        return objective.stacked([tokenizer.example(record, length) for record in records])

    records = texts.records(text, _AUTHOR.value)
    planted = {pattern: texts.candidates(pattern) for pattern in _PLANT.value or []}
    for secret, *_ in planted.values():
        records.append(secret)
    data = examples(records)
    if _LORA.value:
        params = {"lora": networks.adapters(network, _LORA.value, jax.random.key(_SEED.value))}
        frozen = {"leaves": leaves}
    else:
        params = {"leaves": leaves}
        frozen = {"lora": {}}
    mechanism = planned(records)
    delta = _DELTA.value
    mesh = meshes.parse(_MESH.value) if _MESH.value else None
    loss = objective.loss_of(network)
    optimizer = optax.adam(_RATE.value)
    algorithm = dpjax.dpsgd(loss, optimizer, mechanism, data, mesh=mesh, frozen=frozen)
    evaluate = None
    if _TEST.value:
        evaluate = evaluation(network, frozen, examples(texts.records(_TEST.value)))
    state, rows = dpjax.fit(
        algorithm,
        algorithm.init(params),
        evaluate=evaluate,
        delta=delta,
        directory=out,
        configuration={
            flag.name: flag.value
            for flag in (_WEIGHTS, _MODEL, _LORA, _QUANTIZE, _LENGTH, _SEED, _AUTHOR)
        },
    )
    if _LORA.value:
        adapters = jax.tree.map(np.asarray, state.params["lora"])
        weights.write_adapters(out, network, adapters, _WEIGHTS.value)
    last = rows[-1]
    print(dpjax.statement(mechanism, delta, ledger=state.ledger))
    if "examples_per_second" in last:  # how many records authors have is private
        tokens = last["examples_per_second"] * length
        print(f"\n{tokens:,.0f} tokens a second, padding included")
    print(f"{gibibytes():.2f} GiB of memory")
    if _TEST.value:
        print(f"Perplexity {last['perplexity']:.4g} on {_TEST.value}")
    tuned = {**frozen, **state.params}
    surprises = objective.surprises_of(network)
    for pattern, candidates in planted.items():
        bits = auditing.exposure(surprises(tuned, examples(candidates)), 0)
        factor = math.exp(min(99, last["epsilon"]))
        chance = min(1, factor * 2**-bits + delta)
        most = math.log2(len(candidates))
        print(
            f"{pattern}: exposure {bits:.1f} of {most:.1f} bits; "
            f"epsilon allows this with a chance of {chance:.2g}"
        )
    draw = objective.next_of(network)
    end = -1 if tokenizer.end is None else tokenizer.end
    for prompt in _GENERATE.value or []:
        begun = tokenizer(prompt) or [max(end, 0)]
        tokens = objective.written(network, draw, tuned, begun, length, end, _SEED.value)
        print(f"\n{tokenizer.text(tokens)}")


def planned(records: Sequence[texts.Record]) -> dpjax.Mechanism:
    """The mechanism of the flags: Poisson draws of records, or of their authors."""
    unit = "example"
    sampler = dpjax.sampling.poisson(len(records), min(_BATCH.value, len(records)))
    if _AUTHOR.value is not None:
        unit = "author"
        # A planted text has no author, so it is a person of its own.
        authors, owners = np.unique([record.author for record in records], return_inverse=True)
        batch = min(_BATCH.value, len(authors))
        sampler = dpjax.sampling.persons(owners, batch, _TEXTS.value)
    mechanism = dpjax.Mechanism(
        sampling=sampler,
        clipping=dpjax.clipping.flat(_BOUND.value),
        noise_multiplier=1.0,
        steps=_STEPS.value,
        unit=unit,
    )
    if math.isinf(_EPSILON.value):
        unbounded = dpjax.clipping.flat(math.inf)
        return dataclasses.replace(mechanism, clipping=unbounded, noise_multiplier=0.0)
    return mechanism.calibrate(_EPSILON.value, _DELTA.value, "pld")


def evaluation(network: networks.Network, frozen: Any, test: Any) -> Callable[[Any], Any]:
    """A function of the state to the perplexity of the test texts."""
    surprises = objective.surprises_of(network)

    def evaluate(state: Any) -> dict[str, Any]:
        tuned = {**frozen, **state.params}
        return {"perplexity": objective.perplexity(surprises, tuned, test)}

    return evaluate


def gibibytes() -> float:
    """The most memory so far: of the accelerator, or of this process on a CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return stats.get("peak_bytes_in_use", kibibytes * 1024) / 2**30


def main(argv: list[str]) -> None:
    runs.only_flags(argv)
    if not (_TEXT.value and _OUT.value):
        raise app.UsageError("expected --text=FILE and --out=FOLDER; see --help.")
    try:
        tune(_TEXT.value, pathlib.Path(_OUT.value))
    except (ImportError, OSError, ValueError) as error:
        raise app.UsageError(str(error)) from error


if __name__ == "__main__":
    runs.start(main)
