# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a causal language model on private texts, and writes its adapters.

claim     a folder of safetensors and a file of texts give adapters, a statement and a card
verdict   `tests/test_llm.py` compares logits and adapters with those of transformers and PEFT
time      by size; the smoke run takes half a minute
hardware  CPU, or what JAX finds
command   python -m experiments.llm --weights=FOLDER --text=FILE.jsonl --target_epsilon=8 --out=RUN

Needs ``pip install '.[llm]'`` for Llama 3, Qwen 3 and Gemma 3 (Tunix) and for tokenizers; GPT-2's
network and bytes need nothing. Draws are Poisson, epsilon is by PLD, and one record is one
example: epsilon says nothing of an author with many records.

--out is the folder of the run: the card, the statement and the trained weights, and with --lora
the files of PEFT, ``adapter_config.json`` and ``adapter_model.safetensors``. Perplexity is that of
--test, which must not be private.
"""

from __future__ import annotations

import json
import math
import pathlib
import resource
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import dpjax
from dpjax import clipping, meshes, sampling
from experiments.llm import networks, objective, texts, weights


class Settings(NamedTuple):
    """What the flags say."""

    text: str
    out: str
    weights: str = "random"
    model: str | None = None
    tokenizer: str | None = None
    test: str | None = None
    lora: int = 8
    length: int = 128
    batch_size: int = 64
    steps: int = 100
    learning_rate: float = 1e-3
    bound: float = 1.0
    target_epsilon: float = 8.0
    delta: float = 1e-5
    mesh: str | None = None


class Tuned(NamedTuple):
    """What a run leaves."""

    network: networks.Network
    tokenizer: texts.Tokenizer
    weights: Mapping[str, Any]
    rows: list[dict[str, Any]]
    mechanism: dpjax.Mechanism
    length: int

    def writes(self, prompt: str, seed: int = 0) -> str:
        """A continuation of a prompt."""
        tokens = self.tokenizer(prompt)
        draw, end = objective.next_of(self.network), self.tokenizer.end
        given = self.weights, tokens, self.length
        return self.tokenizer.text(
            objective.written(draw, *given, -1 if end is None else end, seed)
        )


def loaded(settings: Settings) -> tuple[networks.Network, texts.Tokenizer, networks.Leaves]:
    """The network, its tokenizer and its weights before training."""
    random, config = settings.weights == "random", {}
    if not random:
        config = json.loads(pathlib.Path(settings.weights, "config.json").read_text())
    end = config.get("eos_token_id")
    folder = settings.tokenizer or (None if random else settings.weights)
    tokenizer = texts.Tokenizer(folder, end[0] if isinstance(end, list) else end)
    if random:
        network = networks.by_size(settings.model or "decoder_tiny", tokenizer.size)
        leaves = jax.jit(network.init)(jax.random.key(0))
    else:
        network = networks.of(config)
        leaves = weights.filled(network, settings.weights)
    if tokenizer.size > network.vocabulary:
        raise ValueError(
            f"{tokenizer.name} has {tokenizer.size} tokens, the model {network.vocabulary}. "
            "Give --tokenizer the file that belongs to the weights."
        )
    return network, tokenizer, leaves


def mechanism_of(settings: Settings, examples: int) -> dpjax.Mechanism:
    """Poisson draws with the noise of an epsilon by PLD; no noise and no bound at infinity."""
    private = math.isfinite(settings.target_epsilon)
    planned = dpjax.Mechanism(
        sampling=sampling.poisson(examples, min(settings.batch_size, examples)),
        clipping=clipping.flat(settings.bound if private else math.inf),
        noise_multiplier=1.0 if private else 0.0,
        steps=settings.steps,
    )
    return planned.calibrate(settings.target_epsilon, settings.delta, "pld") if private else planned


def tune(settings: Settings) -> Tuned:
    """Trains the adapters, or with ``lora=0`` all weights, in the folder of the run."""
    network, tokenizer, leaves = loaded(settings)
    length = min(settings.length, network.length or settings.length)

    def examples(path: str) -> tuple[Any, Any]:
        return objective.stacked([tokenizer.example(r, length) for r in texts.records(path)])

    data = examples(settings.text)
    params, frozen = {"leaves": leaves}, {"lora": {}}
    if settings.lora:
        adapters = networks.adapters(network, settings.lora, jax.random.key(0))
        params, frozen = {"lora": adapters}, {"leaves": leaves}
    mechanism = mechanism_of(settings, len(data[0]))
    mesh = meshes.parse(settings.mesh) if settings.mesh else None
    loss, optimizer = objective.loss_of(network), optax.adam(settings.learning_rate)
    algorithm = dpjax.dpsgd(loss, optimizer, mechanism, data, mesh=mesh, frozen=frozen)
    state, rows = dpjax.fit(
        algorithm,
        algorithm.init(params),
        evaluate=evaluation(network, frozen, settings.test and examples(settings.test)),
        delta=settings.delta,
        directory=settings.out,
        configuration=settings._replace(out="")._asdict(),
    )
    if settings.lora:
        adapters = jax.tree.map(np.asarray, state.params["lora"])
        weights.write_adapters(pathlib.Path(settings.out), network, adapters, settings.weights)
    return Tuned(network, tokenizer, {**frozen, **state.params}, rows, mechanism, length)


def evaluation(network: networks.Network, frozen: Any, held_out: Any) -> Callable[[Any], Any]:
    surprises = objective.surprises_of(network)

    def evaluate(state: Any) -> dict[str, Any]:
        if held_out is None:
            return {}
        trained = {**frozen, **state.params}
        return {"perplexity": objective.perplexity(surprises, trained, held_out)}

    return evaluate


def gibibytes() -> float:
    """The most memory so far: of the accelerator, or of this process on a CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return stats.get("peak_bytes_in_use", kibibytes * 1024) / 2**30
