# SPDX-License-Identifier: Apache-2.0
"""Small Transformers on private text: what is trained, and what is memorised.

claim     private embeddings learn more than a head or LoRA; DP-SGD keeps planted secrets
verdict   so it is, in the tables of docs/pages/tutorials/text.md, which ``--page`` writes
time      7 core minutes for three seeds of all rows
hardware  CPU cores
command   python -m experiments.text --seeds=3 --out=experiments/results/text.json

  sst2         one block of width 32 classifies phrases. The base was trained on the development
               part of SST-2 alone, 872 sentences that count as public
  shakespeare  one block of width 32 predicts the characters of windows of 64, of a quarter of
               the play and of lines with a secret of three digits

Words become numbers by a hash and characters by their codes, because a vocabulary that is counted
in private texts is a release of its own. An example is a phrase or a window; SST-2's phrases are
parts of sentences. Settings were not searched, but for the rate of the play, the better of 0.002
and 0.01 on its public part without privacy.

References:
  Carlini et al., "The Secret Sharer", 2019: exposure. Hu et al., "LoRA", 2022. Socher et al.,
  "Recursive Deep Models for Semantic Compositionality Over a Sentiment Treebank", 2013.
"""

from __future__ import annotations

import collections
import functools
import json
import math
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax.traverse_util import flatten_dict, unflatten_dict

import dpjax
from dpjax import accounting, clipping, losses, metrics, models, sampling
from dpjax.accounting.rounding import upwards
from experiments.common import markdown, runs

DELTA = runs.DELTA
WORDS, LENGTH, RANK = 4096, 24, 4  # hashed words, the longest text, of adapters
WINDOW, ALPHABET, DIGITS = 64, 96, 3  # characters; printable ASCII and the end of a line
PLANTED = {1: ("Orla", "Bram", "Yusuf"), 4: ("Ines", "Kofi", "Thea"), 16: ("Wim", "Zora", "Emil")}

SMALL = [["a warm and funny film", "1"], ["warm and funny", "1"], ["dull", "0"]] * 7

# The leaves that are trained, as a regular expression of their names.
TRAINED = {
    "head": r"^head/",
    "lora and head": r"^lora/|^head/",
    "embeddings and head": r"^token/|pos_embedding|^head/",
    "all": r"^(?!lora/)",
}
SENTIMENT = {  # what is trained, from the base or not, epsilon, rate of Adam
    "sst2 base alone": (None, True, 0.0, 0.0),
    "sst2 head at epsilon 3": ("head", True, 3.0, 1e-2),
    "sst2 lora and head at epsilon 3": ("lora and head", True, 3.0, 5e-3),
    "sst2 embeddings and head at epsilon 3": ("embeddings and head", True, 3.0, 5e-3),
    "sst2 all at epsilon 3": ("all", True, 3.0, 2e-3),
    "sst2 all, no base, at epsilon 3": ("all", False, 3.0, 2e-3),
    "sst2 all, not private": ("all", True, math.inf, 2e-3),
}
PLAY = {  # epsilon, rate of Adam
    "shakespeare not private": (math.inf, 1e-2),
    "shakespeare at epsilon 2": (2.0, 1e-2),
    "shakespeare at epsilon 8": (8.0, 1e-2),
}


@functools.cache
def mechanism_of(examples: int, batch: int, epochs: int, epsilon: float) -> dpjax.Mechanism:
    """The mechanism of a row; without noise and with an infinite bound at epsilon infinity."""
    private = math.isfinite(epsilon)
    planned = dpjax.Mechanism(
        sampling=sampling.poisson(examples, batch),
        clipping=clipping.flat(0.5 if private else math.inf),
        noise_multiplier=1.0 if private else 0.0,
        steps=epochs * examples // batch,
    )
    return planned.calibrate(epsilon, DELTA, "pld") if private else planned


def train(
    loss: Callable[..., Any],
    rate: float,
    mechanism: dpjax.Mechanism,
    data: Any,
    params: Any,
    seed: int,
    frozen: Any = None,
) -> Any:
    algorithm = dpjax.dpsgd(loss, optax.adam(rate), mechanism, data, frozen=frozen)
    state = algorithm.init(params, key=jax.random.key(seed))
    return dpjax.fit(algorithm, state, evaluate_every=mechanism.steps, progress=False)[0].params


def tokens(text: str) -> np.ndarray:
    """Each word as a number by a public hash; 0 pads."""
    words = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.lower().split()]
    return np.array((words + [0] * LENGTH)[:LENGTH], np.int32)


MODEL = models.TextTransformer(vocabulary=WORDS, length=LENGTH, width=32, depth=1, heads=2)


def adapters(flat: Mapping[str, Any], key: Any) -> dict[str, Any]:
    """Thin factors for the kernels of queries and values; their product starts at zero."""
    factors = {}
    for number, name in enumerate(k for k in flat if re.search("(query|value)/kernel", k)):
        inputs = flat[name].shape[0]
        draw = jax.random.normal(jax.random.fold_in(key, number), (inputs, RANK))
        factors[f"lora/{name}/a"] = draw / math.sqrt(inputs)
        factors[f"lora/{name}/b"] = jnp.zeros((RANK, flat[name].size // inputs))
    return factors


def assembled(frozen: Mapping[str, Any], trained: Mapping[str, Any]) -> Any:
    """The tree of the model: frozen leaves, trained ones, and kernels with their adapters."""
    flat = {**frozen, **{k: v for k, v in trained.items() if not k.startswith("lora/")}}
    for name in (k[5:-2] for k in trained if k.endswith("/a")):
        low = trained[f"lora/{name}/a"] @ trained[f"lora/{name}/b"]
        flat[name] = flat[name] + low.reshape(flat[name].shape)
    return unflatten_dict(flat, sep="/")


@functools.cache
def base(seed: int) -> dict[str, Any]:
    """Leaves of a network that was trained on the public sentences alone."""
    x, y = phrases_of("dev")
    mechanism = mechanism_of(len(y), min(64, len(y) // 2), 20, math.inf)
    loss = losses.of(MODEL, losses.cross_entropy)
    params = unflatten_dict(random_leaves(seed), sep="/")
    return flatten_dict(train(loss, 2e-3, mechanism, (x, y), params, seed), sep="/")


def random_leaves(seed: int) -> dict[str, Any]:
    init = jax.jit(MODEL.init)
    return flatten_dict(init(jax.random.key(seed), jnp.zeros(LENGTH, jnp.int32))["params"], sep="/")


def sentiment(
    row: tuple[str | None, bool, float, float], seed: int, folder: Any
) -> Mapping[str, Any]:
    """Test accuracy of one run, the number of trained parameters, and epsilon of a sentence."""
    del folder
    part, based, epsilon, rate = row
    leaves = base(seed) if based else random_leaves(seed)
    if part is None:
        return {"accuracy": accuracy(unflatten_dict(leaves, sep="/"))}
    known = leaves | adapters(leaves, jax.random.key(seed))
    trained = {k: v for k, v in known.items() if re.search(TRAINED[part], k)}
    frozen = {k: v for k, v in leaves.items() if k not in trained}
    x, y = phrases_of("train")
    mechanism = mechanism_of(len(y), min(1024, len(y) // 2), 1, epsilon)

    per_phrase = losses.of(MODEL, losses.cross_entropy)

    def loss(params: Any, example: tuple[Any, Any], frozen: Any) -> Any:
        return per_phrase(assembled(frozen, params), example)

    last = train(loss, rate, mechanism, (x, y), trained, seed, frozen)
    return {
        "accuracy": accuracy(assembled(frozen, last)),
        "trained": sum(leaf.size for leaf in trained.values()),
        **costs(mechanism, (1, 13, 53)),
    }


def accuracy(params: Any) -> float:
    """On the test sentences, in per cent."""
    x, y = jax.tree.map(jnp.asarray, phrases_of("test"))
    return 100 * float(metrics.accuracy(runs.logits_on(MODEL, x)(params), y))


@functools.cache
def costs(mechanism: dpjax.Mechanism, records: tuple[int, ...]) -> dict[str, Any]:
    """The noise, and epsilon for a unit of several examples."""
    if not mechanism.multipliers[0]:
        return {}
    of = partial(accounting.epsilon_for_users, mechanism.event, DELTA)
    # The accountant has no answer for 16 of the few examples of a smoke run.
    counts = (1,) if runs.SMOKE.value else records
    return {
        "noise_multiplier": float(mechanism.multipliers[0]),
        "epsilon_of": {str(count): of(count) for count in counts},
    }


class Characters(nn.Module):
    """A causal Transformer: logits of the next character at every position."""

    width: int = 32

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.Embed(ALPHABET, self.width)(x)
        places = self.param("position", nn.initializers.normal(0.02), (WINDOW, self.width))
        h = h + places[: x.shape[-1]]
        attention = nn.MultiHeadDotProductAttention(num_heads=4)
        h = h + attention(nn.LayerNorm()(h), mask=nn.make_causal_mask(x))
        h = h + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(h))))
        return nn.Dense(ALPHABET)(nn.LayerNorm()(h))


def characters(text: str) -> np.ndarray:
    """Printable ASCII as 1 to 95; an end of a line, and all else, as 0."""
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32) - 31
    return np.where((codes > 0) & (codes < ALPHABET), codes, 0)


def line(name: str, secret: int) -> np.ndarray:
    return characters(f"\nThe number of {name} is {secret:0{DIGITS}}.")


def character_loss(params: Any, window: Any) -> Any:
    logits: Any = Characters().apply({"params": params}, window[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[1:]).mean()


def memorised(row: tuple[float, float], seed: int, folder: Any) -> Mapping[str, Any]:
    """Bits per character of public text, and the exposure of every planted secret."""
    del folder
    epsilon, rate = row
    draw = np.random.default_rng(seed)
    secrets = {n: int(draw.integers(10**DIGITS)) for names in PLANTED.values() for n in names}
    private, public = play()
    planted = [private]
    for times, names in PLANTED.items():
        for codes in (line(name, secrets[name]) for name in names):
            planted += [np.pad(codes, (0, WINDOW + 1 - len(codes)))[None]] * times
    data = np.concatenate(planted)
    mechanism = mechanism_of(len(data), min(256, len(data) // 2), 10, epsilon)
    variables = jax.jit(Characters().init)(jax.random.key(seed), jnp.zeros(WINDOW, jnp.int32))
    last = train(character_loss, rate, mechanism, data, variables["params"], seed)

    @jax.jit
    def loss_of(windows: Any) -> Any:
        return jax.lax.map(partial(character_loss, last), windows, batch_size=200)

    def exposure(name: str) -> float:
        candidates = loss_of(np.stack([line(name, secret) for secret in range(10**DIGITS)]))
        rank = int(jnp.sum(candidates <= candidates[secrets[name]]))
        return DIGITS * math.log2(10) - math.log2(rank)  # ties count against the secret

    return {
        "bits": float(loss_of(public).mean() / math.log(2)),
        "exposure": {str(t): [exposure(name) for name in names] for t, names in PLANTED.items()},
        **costs(mechanism, tuple(PLANTED)),
    }


def text_of(name: str) -> str:
    folder = runs.DATA_DIR.value or os.environ.get("DPJAX_DATA_DIR", ".")
    return pathlib.Path(folder, name).read_text("utf-8")


def rows_of(part: str) -> list[list[str]]:
    """Phrases and their sentiment, 1 for positive."""
    if runs.SMOKE.value:
        return SMALL
    return [row.split("\t") for row in text_of(f"sst2_{part}.tsv").splitlines()[1:]]


def phrases_of_sentences(seed: int, folder: Any) -> dict[str, Any]:
    """How many of the examples are parts of one sentence.

    A sentence is a phrase that is part of no other one.  Some phrases are parts of several.
    """
    del seed, folder
    kept: list[str] = []  # sentences
    counts: list[int] = []
    of_word: dict[str, set[int]] = collections.defaultdict(set)
    for text in sorted((text.strip() for text, _ in rows_of("train")), key=len, reverse=True):
        shared = set.intersection(*(of_word[word] for word in text.split()))
        inside = [n for n in shared if f" {text} " in f" {kept[n]} "]
        for n in inside:
            counts[n] += 1
        if not inside:
            for word in text.split():
                of_word[word].add(len(kept))
            kept.append(text)
            counts.append(1)
    return {"sentences": len(kept), "median": float(np.median(counts)), "most": max(counts)}


@functools.cache
def phrases_of(part: str) -> tuple[np.ndarray, np.ndarray]:
    x = np.stack([tokens(text) for text, _ in rows_of(part)])
    return x, np.array([int(label) for _, label in rows_of(part)], np.int32)


@functools.cache
def play() -> tuple[np.ndarray, np.ndarray]:
    """Windows of the private and of the public part, each with the character after it."""
    small = "To thine own self be true.\n" * 60
    codes = characters(small if runs.SMOKE.value else text_of("tiny_shakespeare.txt"))
    starts = np.arange(0, len(codes) - WINDOW, WINDOW)
    windows = np.stack([codes[start : start + WINDOW + 1] for start in starts])
    kept = len(windows) // 4
    return windows[:kept], windows[-kept // 4 :]


def tables(rows: Mapping[str, Any]) -> dict[str, str]:
    counts = rows["sst2 phrases of a sentence"]["0"]
    units = rows["sst2 all at epsilon 3"]["0"]["epsilon_of"]
    times = [f"exposure, planted {count}" for count in PLANTED]
    return {
        "sst2": runs.table(["", "parameters", "test accuracy"], [*_sentiment(rows)]),
        "phrases": (
            f"Its {counts['sentences']:,} sentences have {counts['median']:.0f} phrases in the "
            f"median, and one has {counts['most']}."
        ),
        "units": runs.table(
            ["phrases of one sentence", "epsilon at delta 1e-5"],
            [[count, upwards(epsilon, ".4g")] for count, epsilon in units.items()],
        ),
        "shakespeare": runs.table(
            ["", "bits a character", *times, "epsilon of 1, 4 and 16 windows"],
            [*_exposures(rows)],
        ),
    }


def _sentiment(rows: Mapping[str, Any]) -> Iterator[list[str]]:
    for name in SENTIMENT:
        seeds = list(rows[name].values())
        trained = f"{seeds[0].get('trained', 0):,}"
        accuracies = [run["accuracy"] for run in seeds]
        yield [name.removeprefix("sst2 "), trained, runs.spread(accuracies)]
    file = pathlib.Path(__file__).parent / "results" / "finetuning.json"
    seeds = [*json.loads(file.read_text())["rows"]["sst2 linear small R at epsilon 1"].values()]
    accuracies = [run["accuracy"] for run in seeds]
    trained = str(seeds[0]["trained"])
    yield ["a head on frozen MiniLM at epsilon 1", trained, runs.spread(accuracies)]


def _exposures(rows: Mapping[str, Any]) -> Iterator[list[str]]:
    """Bits of the model, and exposures over secrets and seeds: mean, and the range."""
    for name in PLAY:
        seeds = list(rows[name].values())
        found = [[e for run in seeds for e in run["exposure"][str(n)]] for n in PLANTED]
        each = (f"{np.mean(e):.1f} ({min(e):.1f} to {max(e):.1f})" for e in found)
        bits = runs.spread([run["bits"] for run in seeds])
        epsilons = [upwards(e, ".3g") for e in seeds[0].get("epsilon_of", {}).values()]
        yield [name.removeprefix("shakespeare "), bits, *each, ", ".join(epsilons)]


def main(argv: list[str]) -> None:
    runs.only_flags(argv)
    logging.set_verbosity(logging.ERROR)
    if runs.PAGE.value is not None:
        kept = pathlib.Path(__file__).parent / "results/text.json"
        markdown.rewrite(runs.PAGE.value, tables(json.loads(kept.read_text())["rows"]))
        return
    results = runs.results()
    seeds = runs.seeds()
    if runs.named("sst2 phrases of a sentence"):
        print(results.of("sst2 phrases of a sentence", 0, phrases_of_sentences))
    made = {name: (sentiment, row) for name, row in SENTIMENT.items()}
    made |= {name: (memorised, row) for name, row in PLAY.items()}
    for name, (one, row) in made.items():
        if runs.named(name):
            done = [results.of(name, seed, partial(one, row)) for seed in seeds]
            print(name, *done, sep="\n  ", flush=True)


if __name__ == "__main__":
    runs.start(main, "seeds", "smoke", "out", "runs", "data_dir", "row", "page")
