# SPDX-License-Identifier: Apache-2.0
"""Small Transformers on private text: what is trained, and what is memorised.

  result    RESULT
  time      TIME
  command   python experiments/text.py --seeds=3 --out=experiments/results/text.json
  figures   experiments/results/text.json; --rows=shakespeare selects some, --smoke runs on a few lines

  sst2         two blocks of width 64 classify phrases at epsilon 3.  A base was trained on the public
               questions of TREC.  Trained privately: the head; adapters (LoRA) and the head;
               embeddings and the head; all weights, from the base or from random ones
  shakespeare  a model of characters reads windows of 64 characters, and lines with a secret of four
               digits, each planted 1, 4 or 16 times

Words become numbers by a hash and characters by their code, because a vocabulary that is counted in
private texts is a release of its own.  An example is a phrase or a window.  SST-2's phrases are
parts of sentences: `phrases` counts how many a sentence has.  Rates were chosen on SST-2's
development part and on the last tenth of the play, which count as public.

The exposure of a secret is log2 of the number of candidates less log2 of its rank among them by the
model's loss: 13.3 bits for the first of 10,000, 1.4 on average for a guess.

References:
  Carlini et al., "The Secret Sharer", 2019.  Hu et al., "LoRA", 2022.  Socher et al., "Recursive
  Deep Models for Semantic Compositionality Over a Sentiment Treebank", 2013.
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from flax.traverse_util import flatten_dict, unflatten_dict

import dpjax
from dpjax import accounting, clipping, losses, metrics, models, sampling
from dpjax.cli.flag_checks import only_flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from common import paper_runs

_ROWS = flags.DEFINE_list(
    "rows", None, "Rows whose names contain one of these words; all by default."
)

DELTA = paper_runs.DELTA
WORDS, LENGTH, WIDTH, RANK = 4096, 32, 64, 4  # hashed words, the longest text, of the model, of LoRA
WINDOW, ALPHABET, DIGITS = 64, 96, 4  # characters; printable ASCII and the end of a line
PLANTED = {1: ("Orla", "Bram", "Yusuf"), 4: ("Ines", "Kofi", "Thea"), 16: ("Wim", "Zora", "Emil")}

# The leaves that are trained, as a regular expression of their names.
TRAINED = {
    "head": r"^head/",
    "lora and head": r"^lora/|^head/",
    "embeddings and head": r"^token/|pos_embedding|^head/",
    "all": r"^(?!lora/)",
}
SENTIMENT = {  # what is trained, from the base or not, epsilon, rate of Adam
    "sst2 head at epsilon 3": ("head", True, 3.0, 1e-2),
    "sst2 lora and head at epsilon 3": ("lora and head", True, 3.0, 3e-3),
    "sst2 embeddings and head at epsilon 3": ("embeddings and head", True, 3.0, 3e-3),
    "sst2 all at epsilon 3": ("all", True, 3.0, 2e-3),
    "sst2 all, no base, at epsilon 3": ("all", False, 3.0, 2e-3),
    "sst2 all, not private": ("all", True, math.inf, 2e-3),
}
PLAY = {  # epsilon, rate of Adam
    "shakespeare not private": (math.inf, 2e-3),
    "shakespeare at epsilon 8": (8.0, 2e-3),
    "shakespeare at epsilon 2": (2.0, 2e-3),
}


def mechanism_of(
    examples: int, batch: int, epochs: int, epsilon: float, bound: float
) -> dpjax.Mechanism:
    """The mechanism of a row; without noise and with an infinite bound at epsilon infinity."""
    steps = epochs * examples // batch
    batches = sampling.poisson(examples, batch)
    if math.isinf(epsilon):
        rule = clipping.flat(math.inf)
        return dpjax.Mechanism(sampling=batches, clipping=rule, noise_multiplier=0.0, steps=steps)
    rule = clipping.flat(bound)
    planned = dpjax.Mechanism(sampling=batches, clipping=rule, noise_multiplier=1.0, steps=steps)
    return planned.calibrate(epsilon, DELTA, "pld")


def train(
    loss: Callable[..., Any], rate: float, mechanism: dpjax.Mechanism, data: Any, params: Any, seed: int
) -> Any:
    """The parameters after all steps of Adam."""
    algorithm = dpjax.dpsgd(loss, optax.adam(rate), mechanism, data)
    state = algorithm.init(jax.random.key(seed), params)
    return dpjax.fit(algorithm, state, evaluate_every=mechanism.steps, progress=False)[0].params


# Sentiment of phrases.


def tokens(text: str) -> np.ndarray:
    """Each word as a number by a public hash; 0 pads."""
    words = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.lower().split()]
    return np.array((words + [0] * LENGTH)[:LENGTH], np.int32)


def classifier(classes: int) -> nn.Module:
    return models.TextTransformer(
        classes=classes, vocabulary=WORDS, length=LENGTH, width=WIDTH, depth=2, heads=4
    )


def adapters(flat: Mapping[str, Any], key: Any) -> dict[str, Any]:
    """Thin factors for the kernels of queries and values; their product starts at zero."""
    found = {}
    for number, name in enumerate(k for k in flat if re.search("(query|value)/kernel", k)):
        inputs = flat[name].shape[0]
        draw = jax.random.normal(jax.random.fold_in(key, number), (inputs, RANK))
        found[f"lora/{name}/a"] = draw / math.sqrt(inputs)
        found[f"lora/{name}/b"] = jnp.zeros((RANK, flat[name].size // inputs))
    return found


def assembled(frozen: Mapping[str, Any], trained: Mapping[str, Any]) -> Any:
    """The tree of the model: frozen leaves, trained ones, and kernels with their adapters."""
    flat = {**frozen, **{k: v for k, v in trained.items() if not k.startswith("lora/")}}
    for name in (k[5:-2] for k in trained if k.endswith("/a")):
        low = trained[f"lora/{name}/a"] @ trained[f"lora/{name}/b"]
        flat[name] = flat[name] + low.reshape(flat[name].shape)
    return unflatten_dict(flat, sep="/")


@functools.cache
def base(seed: int) -> dict[str, Any]:
    """Leaves of a network that knows public questions and not one phrase, with a new head."""
    x, y = questions()
    model = classifier(int(y.max()) + 1)
    params = jax.jit(model.init)(jax.random.key(seed), jnp.zeros(LENGTH, jnp.int32))["params"]
    mechanism = mechanism_of(len(y), min(256, len(y)), 8, math.inf, 1.0)
    loss = losses.of(model, losses.cross_entropy)
    known = flatten_dict(train(loss, 2e-3, mechanism, (x, y), params, seed), sep="/")
    return {**random_leaves(seed), **{k: v for k, v in known.items() if not k.startswith("head/")}}


def random_leaves(seed: int) -> dict[str, Any]:
    init = jax.jit(classifier(2).init)
    return flatten_dict(init(jax.random.key(seed), jnp.zeros(LENGTH, jnp.int32))["params"], sep="/")


def sentiment(row: tuple[str, bool, float, float], seed: int, folder: Any) -> Mapping[str, Any]:
    """Test accuracy of one run, the number of trained parameters, and epsilon of a sentence."""
    del folder
    part, based, epsilon, rate = row
    (x, y), (x_test, y_test) = phrases_of("train"), phrases_of("test")
    leaves = base(seed) if based else random_leaves(seed)
    leaves = leaves | adapters(leaves, jax.random.key(seed))
    trained = {k: v for k, v in leaves.items() if re.search(TRAINED[part], k)}
    frozen = {k: v for k, v in leaves.items() if k not in trained and not k.startswith("lora/")}
    mechanism = mechanism_of(len(y), min(1024, len(y) // 2), 3, epsilon, 0.5)

    def loss(params: Any, example: tuple[Any, Any]) -> Any:
        logits = classifier(2).apply({"params": assembled(frozen, params)}, example[0])
        return losses.cross_entropy(logits, example[1])

    last = train(loss, rate, mechanism, (x, y), trained, seed)
    logits = paper_runs.logits_on(classifier(2), jnp.asarray(x_test))(assembled(frozen, last))
    return {
        "accuracy": 100 * float(metrics.accuracy(logits, jnp.asarray(y_test))),
        "trained": sum(leaf.size for leaf in trained.values()),
        **costs(mechanism, epsilon, (1, 12, 48)),
    }


def costs(mechanism: dpjax.Mechanism, epsilon: float, records: Iterable[int]) -> dict[str, Any]:
    """The noise, and epsilon for a unit of several examples."""
    if math.isinf(epsilon):
        return {}
    of = partial(accounting.epsilon_for_users, mechanism.event, DELTA)
    # The accountant has no answer for 16 of the few examples of a smoke run.
    counts = (1,) if paper_runs.SMOKE.value else records
    return {
        "noise_multiplier": float(mechanism.multipliers[0]),
        "epsilon_of": {str(count): of(count) for count in counts},
    }


# Secrets in a play.


class Characters(nn.Module):
    """A causal Transformer: logits of the next character at every position."""

    depth: int = 2
    heads: int = 4

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.Embed(ALPHABET, WIDTH)(x)
        h = h + self.param("position", nn.initializers.normal(0.02), (WINDOW, WIDTH))
        mask = nn.make_causal_mask(x)
        for _ in range(self.depth):
            h = h + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(h), mask=mask)
            h = h + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(h))))
        return nn.Dense(ALPHABET)(nn.LayerNorm()(h))


def characters(text: str) -> np.ndarray:
    """Printable ASCII as 1 to 95; an end of a line, and all else, as 0."""
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32) - 31
    return np.where((codes > 0) & (codes < ALPHABET), codes, 0)


def line(name: str, secret: int) -> np.ndarray:
    """A window of one line with a secret, filled with ends of lines."""
    found = characters(f"\nThe number of {name} is {secret:0{DIGITS}}.")
    return np.pad(found, (0, WINDOW + 1 - len(found)))


def character_loss(params: Any, window: Any) -> Any:
    """The mean loss of the characters of one window."""
    logits = Characters().apply({"params": params}, window[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[1:]).mean()


def memorised(row: tuple[float, float], seed: int, folder: Any) -> Mapping[str, Any]:
    """Bits per character of public text, and the exposure of every planted secret."""
    del folder
    epsilon, rate = row
    draw = np.random.default_rng(seed)
    secrets = {n: int(draw.integers(10**DIGITS)) for names in PLANTED.values() for n in names}
    planted = [
        line(name, secrets[name])
        for times, names in PLANTED.items()
        for name in names
        for _ in range(times)
    ]
    private, public = play()
    data = np.concatenate([private, np.stack(planted)])
    mechanism = mechanism_of(len(data), min(512, len(data) // 2), 10, epsilon, 0.5)
    params = jax.jit(Characters().init)(jax.random.key(seed), jnp.zeros(WINDOW, jnp.int32))["params"]
    last = train(character_loss, rate, mechanism, data, params, seed)

    @jax.jit
    def loss_of(windows: Any) -> Any:
        return jax.lax.map(partial(character_loss, last), windows, batch_size=500)

    def exposure(name: str) -> float:
        found = loss_of(np.stack([line(name, secret) for secret in range(10**DIGITS)]))
        rank = int(jnp.sum(found <= found[secrets[name]]))
        return DIGITS * math.log2(10) - math.log2(rank)

    return {
        "bits": float(loss_of(public).mean() / math.log(2)),
        "exposure": {str(t): [exposure(name) for name in names] for t, names in PLANTED.items()},
        **costs(mechanism, epsilon, PLANTED),
    }


# The texts, and small ones for --smoke.


def lines(name: str) -> list[list[str]]:
    folder = paper_runs.DATA_DIR.value or os.environ.get("DPJAX_DATA_DIR", ".")
    text = pathlib.Path(folder, f"{name}.tsv").read_text("utf-8")
    return [row.split("\t") for row in text.splitlines()[1:]]


@functools.cache
def phrases_of(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Phrases and their sentiment."""
    found = SMALL if paper_runs.SMOKE.value else lines(f"sst2_{part}")
    x = np.stack([tokens(text) for text, _ in found])
    return x, np.array([int(label) for _, label in found], np.int32)


@functools.cache
def questions() -> tuple[np.ndarray, np.ndarray]:
    """Public questions and their kinds."""
    if paper_runs.SMOKE.value:
        return phrases_of("train")
    found = lines("trec_train")
    kinds = sorted({kind for kind, *_ in found})
    x = np.stack([tokens(text) for *_, text in found])
    return x, np.array([kinds.index(kind) for kind, *_ in found], np.int32)


@functools.cache
def play() -> tuple[np.ndarray, np.ndarray]:
    """Windows of the private and of the public part, each with the character after it."""
    if paper_runs.SMOKE.value:
        text = "To thine own self be true.\n" * 60
    else:
        folder = paper_runs.DATA_DIR.value or os.environ.get("DPJAX_DATA_DIR", ".")
        text = pathlib.Path(folder, "tiny_shakespeare.txt").read_text("utf-8")
    codes = characters(text)
    starts = np.arange(0, len(codes) - WINDOW, WINDOW)
    windows = np.stack([codes[start : start + WINDOW + 1] for start in starts])
    kept = len(windows) * 9 // 10
    return windows[:kept], windows[kept:]


SMALL = [[text, label] for text, label in (
    ("a warm and funny film", "1"),
    ("warm and funny", "1"),
    ("dull from start to end", "0"),
    ("dull", "0"),
)] * 5


def phrases(found: list[str]) -> dict[str, Any]:
    """How many phrases of a sentence are examples: a phrase that no other contains is a sentence."""
    parts: dict[str, set[str]] = {text: set() for text in found}
    ordered = sorted(parts, key=len, reverse=True)
    sentences: list[str] = []
    index: dict[str, set[int]] = {}
    for text in ordered:
        words = text.split()
        held = set.intersection(*(index.get(word, set()) for word in words))
        inside = [n for n in held if f" {text} " in f" {sentences[n]} "]
        for n in inside:
            parts[sentences[n]].add(text)
        if not inside:
            for word in words:
                index.setdefault(word, set()).add(len(sentences))
            sentences.append(text)
    counts = np.array([1 + len(parts[text]) for text in sentences])
    return {
        "sentences": len(counts),
        "median": float(np.median(counts)),
        "most": int(counts.max()),
        "at_most_50": float(100 * np.mean(counts <= 50)),
    }


def main(argv: list[str]) -> None:
    only_flags(argv)
    logging.set_verbosity(logging.ERROR)
    results = paper_runs.results()
    seeds = range(1 if paper_runs.SMOKE.value else paper_runs.SEEDS.value)
    made = {name: (sentiment, row) for name, row in SENTIMENT.items()}
    made |= {name: (memorised, row) for name, row in PLAY.items()}
    for name, (one, row) in made.items():
        if any(word in name for word in _ROWS.value or [""]):
            found = [results.of(name, seed, partial(one, row)) for seed in seeds]
            print(name, *found, sep="\n  ", flush=True)


if __name__ == "__main__":
    app.run(main)
