# SPDX-License-Identifier: Apache-2.0
"""A small decoder learns from private sentences: what it gains, and what it memorises.

claim     private fine-tuning improves a public language model and keeps planted secrets
verdict   so it is, in the table of docs/pages/tutorials/text.md, which ``--page`` writes
time      40 core minutes for three seeds of all rows
hardware  CPU cores
command   python -m experiments.sentences --seeds=3 --out=experiments/results/llm.json

The model is `dpjax.models.Decoder` with two blocks of width 64. It is trained on Tiny Shakespeare
and the questions of TREC, which count as public, and fine-tuned on the sentences of SST-2 (phrases
that no other phrase contains) and on sentences with secrets of three digits, planted once or ten
times. One sentence is one example. Perplexity is that of the pieces of SST-2's test sentences.

Pieces are the characters and the frequent words of the public texts: a vocabulary that is counted
in private texts is a release of its own. Settings were not searched.

References:
  Carlini et al., "The Secret Sharer", 2019: exposure. Hu et al., "LoRA", 2022. Socher et al.,
  "Recursive Deep Models for Semantic Compositionality Over a Sentiment Treebank", 2013. Li and
  Roth, "Learning Question Classifiers", 2002: TREC.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import re
import string
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax import auditing
from dpjax._rounding import upwards
from experiments import text
from experiments.common import runs
from experiments.llm import networks, objective

LENGTH = 64  # pieces of a text
PIECES = 1024  # of the vocabulary
RANK = 8  # of adapters
DIGITS = 3  # of a secret
PLANTED = {
    1: ("orla", "bram", "yusuf", "ines", "kofi"),
    10: ("thea", "wim", "zora", "emil", "ravi"),
}
CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation + " "


class Row(NamedTuple):
    """A run on the private sentences: of adapters or all weights, at one epsilon and rate."""

    lora: bool
    epsilon: float
    rate: float


ROWS: dict[str, Row | None] = {
    "pretrained alone": None,
    "full at epsilon 1": Row(False, 1.0, 2e-3),
    "full at epsilon 3": Row(False, 3.0, 2e-3),
    "full at epsilon 8": Row(False, 8.0, 2e-3),
    "full not private": Row(False, math.inf, 2e-3),
    "lora at epsilon 1": Row(True, 1.0, 5e-3),
    "lora at epsilon 3": Row(True, 3.0, 5e-3),
    "lora at epsilon 8": Row(True, 8.0, 5e-3),
    "lora not private": Row(True, math.inf, 5e-3),
}


class Pieces:
    """Splits a text into the longest known pieces; 0 is the begin and the end of a text.

    The pieces are the characters, and the parts of words that save the most tokens in given texts.
    """

    def __init__(self, texts: list[str], size: int) -> None:
        saved: collections.Counter[str] = collections.Counter()
        words = collections.Counter(re.findall(r" ?[a-z']+", "\n".join(texts).lower()))
        for word, times in words.items():
            for begin, end in itertools.combinations(range(len(word) + 1), 2):
                saved[word[begin:end]] += times * (end - begin - 1)
        best = saved.most_common(size + len(CHARACTERS))
        parts = [part for part, _ in best if part not in CHARACTERS]
        self.pieces = ["", *CHARACTERS, *parts[: size - 1 - len(CHARACTERS)]]
        self._numbers = {piece: number for number, piece in enumerate(self.pieces)}
        longest_first = sorted(self.pieces[1:], key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first)))

    def __call__(self, text: str) -> list[int]:
        """The numbers of the pieces of a text."""
        found = self._split.findall(" " + text.lower())
        numbers = [self._numbers[piece] for piece in found]
        return [0, *numbers, 0]

    def text(self, tokens: list[int]) -> str:
        """The text of numbers."""
        return "".join(self.pieces[token] for token in tokens).strip()


def public() -> list[str]:
    """Lines of the play, and questions."""
    if runs.SMOKE.value:
        return ["To thine own self be true.", "What is a warm film?"] * 20
    play = text.text_of("tiny_shakespeare.txt")
    joined = re.sub(r"\n(?=[^\n])", " ", play)  # the lines of a speech
    speeches = [speech for speech in joined.split("\n") if speech.strip()]
    rows = text.text_of("trec_train.tsv").splitlines()[1:]
    questions = [row.split("\t")[2] for row in rows]
    return speeches + questions


@functools.cache
def pieces() -> Pieces:
    """The vocabulary."""
    return Pieces(public(), PIECES)


@functools.cache
def network() -> networks.Network:
    """The decoder."""
    return networks.decoder(
        {
            "vocab_size": len(pieces().pieces),
            "n_positions": LENGTH,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
        }
    )


def examples_of(texts: list[str]) -> tuple[Any, Any]:
    """Each text as one example, cut at a length."""
    return objective.stacked([objective.example_of(pieces()(each), LENGTH) for each in texts])


@functools.cache
def pretraining() -> tuple[Any, Any]:
    """Public texts in rows of a full length: no text is protected, so they may be cut."""
    tokens = [token for line in public() for token in pieces()(line)[1:]]
    starts = range(0, len(tokens) - LENGTH, LENGTH - 1)
    rows = [tokens[start : start + LENGTH] for start in starts]
    return objective.stacked([objective.example_of(row, LENGTH) for row in rows])


@functools.cache
def base(seed: int) -> Any:
    """The leaves after public training."""
    data = pretraining()
    size = len(data[0])
    params = text.train(
        loss=objective.loss_of(network()),
        rate=3e-3,
        mechanism=text.mechanism_of(size, min(128, size // 2), 6, math.inf),
        data=data,
        params={"leaves": jax.jit(network().init)(jax.random.key(seed))},
        seed=seed,
        frozen={"lora": {}},
    )
    return params["leaves"]


def secret(name: str, number: int) -> str:
    """A sentence with a secret."""
    return f"the number of {name} is {number:0{DIGITS}}"


def secrets_of(seed: int) -> dict[str, int]:
    """The number of each name."""
    rng = np.random.default_rng(seed)
    return {name: int(rng.integers(10**DIGITS)) for names in PLANTED.values() for name in names}


def private_sentences(secrets: Mapping[str, int]) -> list[str]:
    """The sentences of SST-2, and those with secrets."""
    sentences = list(text.sentences())
    for times, names in PLANTED.items():
        for name in names:
            sentences += [secret(name, secrets[name])] * times
    return sentences


def tuned(row: Row, secrets: Mapping[str, int], seed: int) -> tuple[Any, dict[str, Any]]:
    """The weights after private training, and the facts of the run."""
    data = examples_of(private_sentences(secrets))
    size = len(data[0])
    if row.lora:
        params = {"lora": networks.adapters(network(), RANK, jax.random.key(seed))}
        frozen = {"leaves": base(seed)}
    else:
        params = {"leaves": base(seed)}
        frozen = {"lora": {}}
    mechanism = text.mechanism_of(size, min(512, size // 2), 6, row.epsilon)
    last = text.train(
        loss=objective.loss_of(network()),
        rate=row.rate,
        mechanism=mechanism,
        data=data,
        params=params,
        seed=seed,
        frozen=frozen,
    )
    trained = sum(leaf.size for leaf in jax.tree.leaves(params))
    facts = {"trained": trained, **text.costs(mechanism, tuple(PLANTED))}
    return {**frozen, **last}, facts


def run(row: Row | None, seed: int, folder: Any) -> Mapping[str, Any]:
    """Perplexity of the test sentences, the exposure of each secret, and a text."""
    del folder
    secrets = secrets_of(seed)
    if row is None:
        weights = {"leaves": base(seed), "lora": {}}
        facts = {}
    else:
        weights, facts = tuned(row, secrets, seed)
    exposures = {
        str(times): [exposure(weights, name, secrets[name]) for name in names]
        for times, names in PLANTED.items()
    }
    prompt = pieces()("the film")[:-1]
    written = objective.written(network(), next_token(), weights, prompt, LENGTH, 0, seed)
    return {
        "perplexity": objective.perplexity(surprises(), weights, held_out()),
        "exposure": exposures,
        **facts,
        "text": pieces().text(written),
    }


@functools.cache
def held_out() -> tuple[Any, Any]:
    """The test sentences."""
    return examples_of([sentence.strip() for sentence, _ in text.rows_of("test")])


@functools.cache
def next_token() -> Any:
    """The compiled function that draws a token."""
    return objective.next_of(network())


@functools.cache
def surprises() -> Any:
    """The compiled function to the nats of each text."""
    return objective.surprises_of(network(), 100)


def exposure(weights: Any, name: str, number: int) -> float:
    """Bits by which the model prefers a secret to the other numbers."""
    candidates = [secret(name, other) for other in range(10**DIGITS)]
    nats = surprises()(weights, examples_of(candidates))
    return auditing.exposure(nats, number)


def tables(rows: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the page, by marker."""
    times = [f"exposure, planted {count}" for count in PLANTED]
    head = ["", "trained", "perplexity", *times, "epsilon of 1 and 10 sentences"]
    clean = str.maketrans({"`": "'", "|": "/"})  # for a cell of Markdown
    lines = []
    texts = []
    for name in ROWS:
        if name in rows:
            seeds = list(rows[name].values())
            lines.append([name, *_cells(seeds)])
            texts.append([name, f"`{seeds[0]['text'].translate(clean)}`"])
    return {
        "sentences": runs.table(head, lines),
        "samples": runs.table(["", "the first seed's text"], texts),
    }


def _cells(seeds: list[Any]) -> Iterator[str]:
    """Perplexity of the model, and exposures over secrets and seeds: mean, and the range."""
    first = seeds[0]
    yield f"{first.get('trained', 0):,}"
    yield runs.spread([run["perplexity"] for run in seeds])
    for count in PLANTED:
        bits = [bit for run in seeds for bit in run["exposure"][str(count)]]
        yield f"{np.mean(bits):.1f} ({min(bits):.1f} to {max(bits):.1f})"
    epsilons = first.get("epsilon_of", {}).values()
    yield ", ".join(upwards(epsilon, ".3g") for epsilon in epsilons)


def main(results: runs.Results) -> None:
    """Runs the rows as far as they are missing."""
    for seed in runs.seeds():
        for name, row in ROWS.items():
            if runs.named(name):
                print(name, results.of(name, seed, partial(run, row)), sep="\n  ", flush=True)


if __name__ == "__main__":
    runs.guide("llm", tables, main, "data_dir", "row")
