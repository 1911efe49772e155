# SPDX-License-Identifier: Apache-2.0
"""The loss of one text, perplexity, and texts that a model writes.

An example is ``(tokens, weights)``, both padded: ``weights[i]`` is 1 where the prediction of
``tokens[i]`` counts, and 0 for a prompt, the first token and padding. One record is one example.
Texts that are packed into one row share its clipping, so the epsilon of a row does not hold for a
text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.llm.networks import Network

Example = tuple[Any, Any]


def example_of(tokens: Sequence[int], length: int, prompt: int = 1) -> tuple[Any, Any]:
    """Tokens cut and padded to a length; the first ``prompt`` of them are not predicted."""
    kept = min(len(tokens), length)
    padded = np.zeros(length, np.int32)
    padded[:kept] = tokens[:kept]
    places = np.arange(length)
    predicted = (places >= prompt) & (places < kept)
    return padded, predicted.astype(np.float32)


def stacked(examples: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """The examples as one batch."""
    tokens, weights = zip(*examples, strict=True)
    return np.stack(tokens), np.stack(weights)


def surprise(network: Network, weights: Any, example: Example) -> Any:
    """Nats of the predicted tokens of a text, in all; ``weights`` has "leaves" and "lora"."""
    tokens, counted = example
    logits = network.apply(weights["leaves"], weights["lora"], tokens)
    logits = logits[:-1].astype(jnp.float32)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:])
    return jnp.sum(nats * counted[1:])


def loss_of(network: Network) -> Callable[..., Any]:
    """The mean over the predicted tokens of a text; ``frozen`` has the other weights."""

    def loss(params: Any, example: Example, frozen: Any) -> Any:
        _, counted = example
        # A prompt that fills the row leaves nothing to predict, so the count may be 0.
        count = jnp.maximum(counted.sum(), 1)
        return surprise(network, {**frozen, **params}, example) / count

    return loss


def surprises_of(network: Network, batch_size: int = 8) -> Callable[..., Any]:
    """A compiled function of weights and texts to the nats of each text."""

    @jax.jit
    def surprises(weights: Any, examples: Example) -> Any:
        of_text = partial(surprise, network, weights)
        return jax.lax.map(of_text, examples, batch_size=batch_size)

    return surprises


def perplexity(surprises: Callable[..., Any], weights: Any, examples: Example) -> float:
    """Exp of the mean nats over all predicted tokens; each text is read by itself."""
    _, counted = examples
    nats = np.asarray(surprises(weights, examples))
    total = np.sum(nats, dtype=np.float64)
    return math.exp(total / np.sum(counted))


def next_of(network: Network, temperature: float = 0.8) -> Callable[..., Any]:
    """A compiled function that reads the token at a place and draws the one behind it."""

    @jax.jit
    def draw(weights: Any, token: Any, place: Any, key: Any, cache: Any) -> tuple[Any, Any]:
        logits, cache = network.read(weights["leaves"], weights["lora"], token, place, cache)
        drawn = jax.random.categorical(key, logits.astype(jnp.float32) / temperature)
        return drawn, cache

    return draw


def written(
    network: Network,
    draw: Callable[..., Any],
    weights: Any,
    prompt: Sequence[int],
    length: int,
    end: int,
    seed: int,
) -> list[int]:
    """Continues a prompt up to the token ``end`` or a length; reads each token once."""
    tokens = list(prompt[:length])
    cache = network.begin(weights["leaves"], length)
    key = jax.random.key(seed)
    for place in range(length - 1):
        token_key = jax.random.fold_in(key, place + 1)
        token = jnp.asarray(tokens[place], jnp.int32)
        drawn, cache = draw(weights, token, jnp.asarray(place), token_key, cache)
        if place + 1 < len(tokens):
            continue  # a token of the prompt
        if int(drawn) == end:
            break
        tokens.append(int(drawn))
    return tokens
