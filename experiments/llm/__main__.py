# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a causal language model on private texts, and writes its adapters.

claim     a folder of safetensors and a file of texts give adapters, a statement and a card
verdict   so it is: tests/test_llm_program.py compares with transformers and PEFT
time      by size
hardware  CPU, or what JAX finds
command   python -m experiments.llm --weights=FOLDER --text=FILE.jsonl --target_epsilon=8 --out=RUN

Needs ``pip install '.[llm]'`` for Llama 3, Qwen 3 and Gemma 3 (Tunix) and for tokenizers; GPT-2's
network and bytes need nothing. Draws are Poisson, epsilon is by PLD, and one record is one
example: epsilon does not hold for an author with many records.

--out is the folder of the run: the card, the statement and the trained weights, and with --lora
the files of PEFT, ``adapter_config.json`` and ``adapter_model.safetensors``. Perplexity is that of
--test, whose texts must not be private.
"""

from __future__ import annotations

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
from experiments.llm import networks, objective, texts, weights

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
_LENGTH = flags.DEFINE_integer("length", 128, "The most tokens of a text; the rest is cut.", 2)
_BATCH = flags.DEFINE_integer("batch_size", 64, "Expected records of a draw.", 1)
_STEPS = flags.DEFINE_integer("steps", 100, "Steps.", 1)
_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Rate of Adam.")
_BOUND = flags.DEFINE_float("bound", 1.0, "Clipping bound of the gradient of a record.")
_EPSILON = flags.DEFINE_float("target_epsilon", 8.0, "Of one record; inf trains without privacy.")
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
        leaves = jax.jit(network.init)(jax.random.key(0))
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
    return network, tokenizer, leaves


def tune(text: str, out: pathlib.Path) -> None:
    """Trains the adapters, or with ``--lora=0`` all weights, in the folder of the run."""
    network, tokenizer, leaves = loaded()
    length = _LENGTH.value
    if network.length is not None:
        length = min(length, network.length)

    def examples(records: Sequence[texts.Record]) -> tuple[Any, Any]:
        return objective.stacked([tokenizer.example(record, length) for record in records])

    records = texts.records(text)
    planted = {pattern: texts.candidates(pattern) for pattern in _PLANT.value or []}
    for secret, *_ in planted.values():
        records.append(secret)
    data = examples(records)
    if _LORA.value:
        params = {"lora": networks.adapters(network, _LORA.value, jax.random.key(0))}
        frozen = {"leaves": leaves}
    else:
        params = {"leaves": leaves}
        frozen = {"lora": {}}
    size = len(records)
    batch = min(_BATCH.value, size)
    mechanism = runs.calibrated(
        examples=size,
        batch=batch,
        steps=_STEPS.value,
        epsilon=_EPSILON.value,
        bound=_BOUND.value,
    )
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
        delta=runs.DELTA,
        directory=out,
        configuration={flag.name: flag.value for flag in (_WEIGHTS, _MODEL, _LORA, _LENGTH)},
    )
    if _LORA.value:
        adapters = jax.tree.map(np.asarray, state.params["lora"])
        weights.write_adapters(out, network, adapters, _WEIGHTS.value)
    last = rows[-1]
    print(dpjax.statement(mechanism, runs.DELTA, ledger=state.ledger))
    print(f"\n{last['examples_per_second'] * length:,.0f} tokens a second, padding included")
    print(f"{gibibytes():.2f} GiB of memory")
    if _TEST.value:
        print(f"Perplexity {last['perplexity']:.4g} on {_TEST.value}")
    tuned = {**frozen, **state.params}
    surprises = objective.surprises_of(network)
    for pattern, candidates in planted.items():
        bits = auditing.exposure(surprises(tuned, examples(candidates)), 0)
        factor = math.exp(min(99, last["epsilon"]))
        chance = min(1, factor * 2**-bits + runs.DELTA)
        most = math.log2(len(candidates))
        print(
            f"{pattern}: exposure {bits:.1f} of {most:.1f} bits; "
            f"epsilon allows this with a chance of {chance:.2g}"
        )
    draw = objective.next_of(network)
    end = -1 if tokenizer.end is None else tokenizer.end
    for prompt in _GENERATE.value or []:
        tokens = objective.written(draw, tuned, tokenizer(prompt), length, end, seed=0)
        print(f"\n{tokenizer.text(tokens)}")


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
    if not (_TEXT.value and runs.OUT.value):
        raise app.UsageError("expected --text=FILE and --out=FOLDER; see --help.")
    try:
        tune(_TEXT.value, pathlib.Path(runs.OUT.value))
    except (ImportError, OSError, ValueError) as error:
        raise app.UsageError(str(error)) from error


if __name__ == "__main__":
    runs.start(main, "out")
