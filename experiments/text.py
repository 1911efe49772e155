# SPDX-License-Identifier: Apache-2.0
"""A small Transformer that judges private phrases: what is trained, and what it costs.

claim     private embeddings learn more than a head or LoRA
verdict   so it is, in the tables of docs/pages/tutorials/text.md, which ``--page`` writes
time      4 core minutes for three seeds of all rows
hardware  CPU cores
command   python -m experiments.text --seeds=3 --out=experiments/results/text.json

One block of width 32 classifies phrases of SST-2. The base was trained only on the development
part, 872 sentences that count as public. Words become numbers by a hash, because a vocabulary that
is counted in private texts is a release of its own. An example is a phrase; SST-2's phrases are
parts of sentences. Settings were not searched. `experiments.sentences` measures memorisation.

References:
  Hu et al., "LoRA", 2022. Socher et al., "Recursive Deep Models for Semantic Compositionality Over
  a Sentiment Treebank", 2013.
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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

import dpjax
from dpjax import accounting, losses, metrics, models
from dpjax._rounding import upwards
from experiments.common import runs

DELTA = runs.DELTA
WORDS = 4096  # numbers that stand for words
LENGTH = 24  # words of the longest text
RANK = 4  # of adapters

SMALL = [["a warm and funny film", "1"], ["warm and funny", "1"], ["dull", "0"]] * 7

# The leaves that are trained, as a regular expression of their names.
TRAINED = {
    "head": r"^head/",
    "lora and head": r"^lora/|^head/",
    "embeddings and head": r"^token/|pos_embedding|^head/",
    "all": r"^(?!lora/)",
}


class Row(NamedTuple):
    """A run: the part that is trained, epsilon, the rate of Adam, and where it starts."""

    trained: str
    epsilon: float = 3.0
    rate: float = 2e-3
    from_base: bool = True


SENTIMENT: dict[str, Row | None] = {
    "sst2 base alone": None,
    "sst2 head at epsilon 3": Row("head", rate=1e-2),
    "sst2 lora and head at epsilon 3": Row("lora and head", rate=5e-3),
    "sst2 embeddings and head at epsilon 3": Row("embeddings and head", rate=5e-3),
    "sst2 all at epsilon 3": Row("all"),
    "sst2 all, no base, at epsilon 3": Row("all", from_base=False),
    "sst2 all, not private": Row("all", epsilon=math.inf),
}


def mechanism_of(examples: int, batch: int, epochs: int, epsilon: float) -> dpjax.Mechanism:
    """Poisson batches with the noise of an epsilon."""
    steps = epochs * examples // batch
    return runs.calibrated(
        examples=examples,
        batch=batch,
        steps=steps,
        epsilon=epsilon,
        bound=0.5,
    )


def train(
    loss: Callable[..., Any],
    rate: float,
    mechanism: dpjax.Mechanism,
    data: Any,
    params: Any,
    seed: int,
    frozen: Any = None,
) -> Any:
    """The parameters after the last step."""
    algorithm = dpjax.dpsgd(loss, optax.adam(rate), mechanism, data, frozen=frozen)
    state = algorithm.init(params, key=jax.random.key(seed))
    state, _ = dpjax.fit(algorithm, state, evaluate_every=mechanism.steps, progress=False)
    return state.params


def tokens(text: str) -> np.ndarray:
    """Each word as a number by a public hash; 0 pads."""
    numbers = np.zeros(LENGTH, np.int32)
    for place, word in enumerate(text.lower().split()[:LENGTH]):
        numbers[place] = 1 + zlib.crc32(word.encode()) % (WORDS - 1)
    return numbers


MODEL = models.TextTransformer(vocabulary=WORDS, length=LENGTH, width=32, depth=1, heads=2)


def adapters(flat: Mapping[str, Any], key: Any, rank: int = RANK) -> dict[str, Any]:
    """Thin factors for the kernels of queries and values; their product starts at zero."""
    kernels = [name for name in flat if re.search("(query|value)/kernel", name)]
    factors = {}
    for number, name in enumerate(kernels):
        inputs = flat[name].shape[0]
        outputs = flat[name].size // inputs
        a = jax.random.normal(jax.random.fold_in(key, number), (inputs, rank))
        factors[f"lora/{name}/a"] = a / math.sqrt(inputs)
        factors[f"lora/{name}/b"] = jnp.zeros((rank, outputs))
    return factors


def assembled(frozen: Mapping[str, Any], trained: Mapping[str, Any]) -> Any:
    """The tree of the model: frozen leaves, trained ones, and kernels with their adapters."""
    flat = dict(frozen)
    flat.update({name: leaf for name, leaf in trained.items() if not name.startswith("lora/")})
    for factor in trained:
        if factor.startswith("lora/") and factor.endswith("/a"):
            name = factor.removeprefix("lora/").removesuffix("/a")
            low = trained[f"lora/{name}/a"] @ trained[f"lora/{name}/b"]
            flat[name] = flat[name] + low.reshape(flat[name].shape)
    return unflatten_dict(flat, sep="/")


@functools.cache
def base(seed: int) -> dict[str, Any]:
    """Leaves of a network that was trained only on the public sentences."""
    x, y = phrases_of("dev")
    mechanism = mechanism_of(
        examples=len(y),
        batch=min(64, len(y) // 2),
        epochs=20,
        epsilon=math.inf,
    )
    params = train(
        loss=losses.of(MODEL, losses.cross_entropy),
        rate=2e-3,
        mechanism=mechanism,
        data=(x, y),
        params=unflatten_dict(random_leaves(seed), sep="/"),
        seed=seed,
    )
    return flatten_dict(params, sep="/")


def random_leaves(seed: int) -> dict[str, Any]:
    """Leaves of the network before training."""
    text = jnp.zeros(LENGTH, jnp.int32)
    params = jax.jit(MODEL.init)(jax.random.key(seed), text)["params"]
    return flatten_dict(params, sep="/")


def sentiment(row: Row | None, seed: int, folder: Any) -> Mapping[str, Any]:
    """Test accuracy of one run, the number of trained parameters, and epsilon of a sentence."""
    del folder
    if row is None:
        return {"accuracy": accuracy(unflatten_dict(base(seed), sep="/"))}
    leaves = base(seed) if row.from_base else random_leaves(seed)
    known = leaves | adapters(leaves, jax.random.key(seed))
    pattern = TRAINED[row.trained]
    trained = {name: leaf for name, leaf in known.items() if re.search(pattern, name)}
    frozen = {name: leaf for name, leaf in leaves.items() if name not in trained}
    x, y = phrases_of("train")
    mechanism = mechanism_of(
        examples=len(y),
        batch=min(1024, len(y) // 2),
        epochs=1,
        epsilon=row.epsilon,
    )

    per_phrase = losses.of(MODEL, losses.cross_entropy)

    def loss(params: Any, example: tuple[Any, Any], frozen: Any) -> Any:
        return per_phrase(assembled(frozen, params), example)

    last = train(
        loss=loss,
        rate=row.rate,
        mechanism=mechanism,
        data=(x, y),
        params=trained,
        seed=seed,
        frozen=frozen,
    )
    return {
        "accuracy": accuracy(assembled(frozen, last)),
        "trained": sum(leaf.size for leaf in trained.values()),
        **costs(mechanism, (1, 13, 53)),
    }


def accuracy(params: Any) -> float:
    """The accuracy on the test sentences, in per cent."""
    x, y = jax.tree.map(jnp.asarray, phrases_of("test"))
    logits = runs.logits_on(MODEL, x)(params)
    return 100 * float(metrics.accuracy(logits, y))


@functools.cache
def costs(mechanism: dpjax.Mechanism, records: tuple[int, ...]) -> dict[str, Any]:
    """The noise, and epsilon for a unit of several examples."""
    if not mechanism.multipliers[0]:
        return {}
    if runs.SMOKE.value:
        records = (1,)  # the accountant has no answer for 13 of its few examples
    return {
        "noise_multiplier": float(mechanism.multipliers[0]),
        "epsilon_of": {
            str(count): accounting.epsilon_for_users(mechanism.event, DELTA, count)
            for count in records
        },
    }


def text_of(name: str) -> str:
    """A file of the data folder."""
    folder = runs.DATA_DIR.value or os.environ.get("DPJAX_DATA_DIR", ".")
    return pathlib.Path(folder, name).read_text("utf-8")


def rows_of(part: str) -> list[list[str]]:
    """Phrases and their sentiment, 1 for positive."""
    if runs.SMOKE.value:
        return SMALL
    return [row.split("\t") for row in text_of(f"sst2_{part}.tsv").splitlines()[1:]]


def phrases_of_sentences(seed: int, folder: Any) -> dict[str, Any]:
    """How many of the examples are parts of one sentence."""
    del seed, folder
    counts = list(sentences().values())
    return {"sentences": len(counts), "median": float(np.median(counts)), "most": max(counts)}


def sentences() -> dict[str, int]:
    """The phrases that are part of no other one, and how many phrases are parts of each.

    Some phrases are parts of several.
    """
    counts: dict[str, int] = {}
    with_word: dict[str, set[str]] = collections.defaultdict(set)
    phrases = [phrase.strip() for phrase, _ in rows_of("train")]
    for phrase in sorted(phrases, key=len, reverse=True):
        candidates = set.intersection(*(with_word[word] for word in phrase.split()))
        found = [sentence for sentence in candidates if f" {phrase} " in f" {sentence} "]
        for sentence in found:
            counts[sentence] += 1
        if not found:
            counts[phrase] = 1
            for word in phrase.split():
                with_word[word].add(phrase)
    return counts


@functools.cache
def phrases_of(part: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of phrases, and their sentiment."""
    x = np.stack([tokens(text) for text, _ in rows_of(part)])
    return x, np.array([int(label) for _, label in rows_of(part)], np.int32)


def tables(rows: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the page, by marker."""
    counts = rows["sst2 phrases of a sentence"]["0"]
    phrases = (
        f"Its {counts['sentences']:,} sentences have {counts['median']:.0f} phrases in the "
        f"median, and one has {counts['most']}."
    )
    epsilons = rows["sst2 all at epsilon 3"]["0"]["epsilon_of"]
    units = [[count, upwards(epsilon, ".4g")] for count, epsilon in epsilons.items()]
    return {
        "sst2": runs.table(["", "parameters", "test accuracy"], list(_sentiment(rows))),
        "phrases": phrases,
        "units": runs.table(["phrases of one sentence", "epsilon at delta 1e-5"], units),
    }


def _sentiment(rows: Mapping[str, Any]) -> Iterator[list[str]]:
    """A line for each row, and one of `experiments.finetuning`."""
    for name in SENTIMENT:
        seeds = list(rows[name].values())
        trained = f"{seeds[0].get('trained', 0):,}"
        accuracies = [run["accuracy"] for run in seeds]
        yield [name.removeprefix("sst2 "), trained, runs.spread(accuracies)]
    file = pathlib.Path(__file__).parent / "results" / "finetuning.json"
    finetuned = json.loads(file.read_text())["rows"]
    seeds = list(finetuned["sst2 linear small R at epsilon 1"].values())
    accuracies = [run["accuracy"] for run in seeds]
    trained = str(seeds[0]["trained"])
    yield ["a head on frozen MiniLM at epsilon 1", trained, runs.spread(accuracies)]


def main(results: runs.Results) -> None:
    """Runs the rows as far as they are missing."""
    seeds = runs.seeds()
    if runs.named("sst2 phrases of a sentence"):
        print(results.of("sst2 phrases of a sentence", 0, phrases_of_sentences))
    for name, row in SENTIMENT.items():
        if runs.named(name):
            done = [results.of(name, seed, partial(sentiment, row)) for seed in seeds]
            print(name, *done, sep="\n  ", flush=True)


if __name__ == "__main__":
    runs.guide("text", tables, main, "runs", "data_dir", "row")
