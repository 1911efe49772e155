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
from dpjax.accounting.rounding import upwards
from experiments import text
from experiments.common import runs
from experiments.llm import networks, objective

LENGTH, PIECES, RANK, DIGITS = 64, 1024, 8, 3
PLANTED = {
    1: ("orla", "bram", "yusuf", "ines", "kofi"),
    10: ("thea", "wim", "zora", "emil", "ravi"),
}
CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation + " "


class Row(NamedTuple):
    """How the private sentences are learnt."""

    lora: bool
    epsilon: float
    rate: float


ROWS: dict[str, Row | None] = {"pretrained alone": None} | {
    f"{'lora' if lora else 'full'} {words}": Row(lora, epsilon, 5e-3 if lora else 2e-3)
    for lora in (False, True)
    for words, epsilon in (
        ("at epsilon 1", 1.0),
        ("at epsilon 3", 3.0),
        ("at epsilon 8", 8.0),
        ("not private", math.inf),
    )
}


class Pieces:
    """Splits a text into the longest known pieces; 0 is the begin and the end of a text.

    Known are the characters, and the parts of words that save the most tokens in given texts.
    """

    def __init__(self, texts: list[str], size: int) -> None:
        saved: collections.Counter[str] = collections.Counter()
        words = collections.Counter(re.findall(r" ?[a-z']+", "\n".join(texts).lower()))
        for word, times in words.items():
            for begin, end in itertools.combinations(range(len(word) + 1), 2):
                saved[word[begin:end]] += times * (end - begin - 1)
        parts = [p for p, _ in saved.most_common(size + len(CHARACTERS)) if p not in CHARACTERS]
        self.pieces = ["", *CHARACTERS, *parts[: size - 1 - len(CHARACTERS)]]
        self._numbers = {piece: number for number, piece in enumerate(self.pieces)}
        known = sorted(self.pieces[1:], key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, known)))

    def __call__(self, text: str) -> list[int]:
        return [0, *(self._numbers[p] for p in self._split.findall(" " + text.lower())), 0]

    def text(self, tokens: list[int]) -> str:
        return "".join(self.pieces[token] for token in tokens).strip()


def public() -> list[str]:
    """Lines of the play, and questions."""
    if runs.SMOKE.value:
        return ["To thine own self be true.", "What is a warm film?"] * 20
    play = re.sub(r"\n(?=[^\n])", " ", text.text_of("tiny_shakespeare.txt")).split("\n")
    rows = text.text_of("trec_train.tsv").splitlines()[1:]
    return [line for line in play if line.strip()] + [row.split("\t")[2] for row in rows]


@functools.cache
def pieces() -> Pieces:
    return Pieces(public(), PIECES)


@functools.cache
def network() -> networks.Network:
    fields = {"vocab_size": len(pieces().pieces), "n_positions": LENGTH}
    small = {"n_embd": 64, "n_layer": 2, "n_head": 4}
    return networks.decoder(fields | small)


def examples_of(texts: list[str]) -> tuple[Any, Any]:
    """Each text as one example, cut at a length."""
    return objective.stacked([objective.example_of(pieces()(each), LENGTH) for each in texts])


@functools.cache
def pretraining() -> tuple[Any, Any]:
    """Public texts in rows of a full length: no text is protected, so they may be cut."""
    tokens = [token for line in public() for token in pieces()(line)[1:]]
    starts = range(0, len(tokens) - LENGTH, LENGTH - 1)
    return objective.stacked(
        [objective.example_of(tokens[at : at + LENGTH], LENGTH) for at in starts]
    )


@functools.cache
def base(seed: int) -> Any:
    """The leaves after public training."""
    data = pretraining()
    mechanism = text.mechanism_of(len(data[0]), min(128, len(data[0]) // 2), 6, math.inf)
    leaves = jax.jit(network().init)(jax.random.key(seed))
    loss = objective.loss_of(network())
    start, frozen = {"leaves": leaves}, {"lora": {}}
    return text.train(loss, 3e-3, mechanism, data, start, seed, frozen)["leaves"]


def secret(name: str, number: int) -> str:
    return f"the number of {name} is {number:0{DIGITS}}"


def run(row: Row | None, seed: int, folder: Any) -> Mapping[str, Any]:
    """Perplexity of the test sentences, the exposure of each secret, and a text."""
    del folder
    draw = np.random.default_rng(seed)
    secrets = {n: int(draw.integers(10**DIGITS)) for names in PLANTED.values() for n in names}
    sentences = [*text.sentences()] + [
        secret(name, secrets[name])
        for times, names in PLANTED.items()
        for name in names
        for _ in range(times)
    ]
    weights = {"leaves": base(seed), "lora": {}}
    costs: Mapping[str, Any] = {}
    if row is not None:
        data = examples_of(sentences)
        params, frozen = {"leaves": weights["leaves"]}, {"lora": {}}
        if row.lora:
            params = {"lora": networks.adapters(network(), RANK, jax.random.key(seed))}
            frozen = {"leaves": weights["leaves"]}
        mechanism = text.mechanism_of(len(data[0]), min(512, len(data[0]) // 2), 6, row.epsilon)
        loss = objective.loss_of(network())
        last = text.train(loss, row.rate, mechanism, data, params, seed, frozen)
        weights = {**frozen, **last}
        trained = sum(leaf.size for leaf in jax.tree.leaves(params))
        costs = {"trained": trained, **text.costs(mechanism, tuple(PLANTED))}
    draw, surprises = compiled()
    written = objective.written(draw, weights, pieces()("the film")[:-1], LENGTH, 0, seed)
    return {
        "perplexity": objective.perplexity(surprises, weights, held_out()),
        "exposure": {
            str(times): [exposure(weights, name, secrets[name]) for name in names]
            for times, names in PLANTED.items()
        },
        **costs,
        "text": pieces().text(written),
    }


@functools.cache
def held_out() -> tuple[Any, Any]:
    return examples_of([each.strip() for each, _ in text.rows_of("test")])


@functools.cache
def compiled() -> tuple[Any, Any]:
    return objective.next_of(network()), objective.surprises_of(network(), 100)


def exposure(weights: Any, name: str, number: int) -> float:
    """Bits by which the model prefers a secret to the other numbers."""
    nats = compiled()[1](weights, examples_of([secret(name, n) for n in range(10**DIGITS)]))
    return auditing.exposure(nats, number)


def tables(rows: Mapping[str, Any]) -> dict[str, str]:
    times = [f"exposure, planted {count}" for count in PLANTED]
    head = ["", "trained", "perplexity", *times, "epsilon of 1 and 10 sentences"]
    clean = str.maketrans({"`": "'", "|": "/"})  # for a cell of Markdown
    texts = [
        [name, f"`{rows[name]['0']['text'].translate(clean)}`"] for name in ROWS if name in rows
    ]
    return {
        "sentences": runs.table(head, [*_cells(rows)]),
        "samples": runs.table(["", "the first seed's text"], texts),
    }


def _cells(rows: Mapping[str, Any]) -> Iterator[list[str]]:
    """Perplexity of the model, and exposures over secrets and seeds: mean, and the range."""
    for name in filter(rows.__contains__, ROWS):
        seeds = list(rows[name].values())
        found = [[e for run in seeds for e in run["exposure"][str(n)]] for n in PLANTED]
        each = (f"{np.mean(e):.1f} ({min(e):.1f} to {max(e):.1f})" for e in found)
        epsilons = [upwards(e, ".3g") for e in seeds[0].get("epsilon_of", {}).values()]
        trained = f"{seeds[0].get('trained', 0):,}"
        spread = runs.spread([run["perplexity"] for run in seeds])
        yield [name, trained, spread, *each, ", ".join(epsilons)]


def main(results: runs.Results) -> None:
    for seed in runs.seeds():
        for name, row in ROWS.items():
            if runs.named(name):
                print(name, results.of(name, seed, partial(run, row)), sep="\n  ", flush=True)


if __name__ == "__main__":
    runs.guide("llm", tables, main, "data_dir", "row")
