# SPDX-License-Identifier: Apache-2.0
"""A prior without data: features from patches of images that a random process draws.

The process drops leaves: discs and boxes of random places, sizes and colours, one over another.
Leaves have edges as photographs have, so their patches are good filters. No data are read: a
feature depends on one image and on a published seed, and costs no privacy.

References:
  Lee, Mumford and Huang, "Occlusion models for natural images", 2001, for the process.
  Coates, Lee and Ng, "An analysis of single-layer networks in unsupervised feature learning", 2011,
  for whitened patches as filters, which they draw from their data.
  Tang et al., "Differentially private image classification by learning priors from random
  processes", 2023, for such a prior before private training.
"""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import features

SIDE, CELLS, THRESHOLD = 6, 3, 1.0  # of a patch; of the grid of means; of a filter's answer
_DARK = 1.5e-4  # what is added to the variance of a patch, of colours in [0, 1]
_SIZE, _LEAVES, _IMAGES, _PATCHES, _SMOOTH = 32, 150, 2_000, 80_000, 0.3


def leaves(images: int, colours: int, rng: np.random.Generator) -> np.ndarray:
    """Images of the process, ``[images, 32, 32, colours]`` in [0, 1]."""
    one = (images, 1, 1)
    y, x = np.mgrid[:_SIZE, :_SIZE].astype(np.float32)[:, None]

    def colour(grey: float, hue: float) -> np.ndarray:
        return rng.normal(0, grey, (*one, 1)) + rng.normal(0, hue, (*one, colours))

    base = 0.5 + colour(0.15, 0.06)
    canvas = np.broadcast_to(base, (images, _SIZE, _SIZE, colours)).astype(np.float32)
    for _ in range(_LEAVES):
        # The density of radii falls with their cube, as in photographs: no scale is special.
        share = rng.random(one)
        radius = 1 / np.sqrt((1 - share) / 1.5**2 + share / 40**2)
        along, angle = rng.uniform(-8, _SIZE + 8, (2, *one)), rng.uniform(0, np.pi, one)
        across, down = x - along[0], y - along[1]
        u = (np.cos(angle) * across + np.sin(angle) * down) / radius
        v = (np.cos(angle) * down - np.sin(angle) * across) / radius / rng.uniform(0.4, 1, one)
        reach = np.where(rng.random(one) < 0.5, np.maximum(abs(u), abs(v)), np.hypot(u, v))
        cover = np.clip((1 - reach) * radius / rng.uniform(0.5, 2, one) + 0.5, 0, 1)[..., None]
        shade = (rng.normal(0, 0.1, one) * u + rng.normal(0, 0.1, one) * v)[..., None]
        canvas += cover * (base + colour(0.25, 0.12) + shade - canvas)
    return np.clip(canvas, 0, 1).astype(np.float32)


@functools.cache
def dictionary(filters: int, colours: int, seed: int = 0) -> np.ndarray:
    """Filters ``[numbers of a patch, filters]``: whitened patches of leaves, of length 1."""
    rng = np.random.default_rng(seed)
    drawn = leaves(_IMAGES, colours, rng)
    of = rng.integers(_IMAGES, size=_PATCHES)
    row, column = rng.integers(_SIZE - SIDE + 1, size=(2, _PATCHES))
    places = [drawn[of, row + i, column + j] for i, j in itertools.product(range(SIDE), repeat=2)]
    patches = _contrast(np.stack(places, 1).reshape(_PATCHES, -1), np)
    values, vectors = np.linalg.eigh(patches.T @ patches / _PATCHES)
    whiten = vectors / np.sqrt(values + _SMOOTH) @ vectors.T
    found = patches @ whiten
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    edges = np.flatnonzero(lengths > np.quantile(lengths, 0.3))[:filters]  # the others are flat
    return (found[edges] / lengths[edges] @ whiten).T.astype(np.float32)


def _contrast(patches: Any, xp: Any = jnp) -> Any:
    """Patches of mean 0 and, but for dark ones, of variance 1."""
    centred = patches - patches.mean(1, keepdims=True)
    return centred / xp.sqrt((centred * centred).mean(1, keepdims=True) + _DARK)


def cell_means(maps: Any, cells: int) -> Any:
    """Means over a grid of cells, of ``[..., height, width, channels]``."""
    for axis in (-3, -2):
        cuts = np.linspace(0, maps.shape[axis], cells + 1).astype(int)
        parts = [
            (maps[..., a:b, :, :] if axis == -3 else maps[..., a:b, :]).mean(axis)
            for a, b in itertools.pairwise(cuts)
        ]
        maps = (jnp if isinstance(maps, jax.Array) else np).stack(parts, axis)
    return maps


@jax.jit
def encode(images: Any, filters: Any) -> Any:
    """How strongly each filter and its negative answer, as means over a grid of cells."""

    def of_one(image: Any) -> Any:
        side = image.shape[0] - SIDE + 1
        places = itertools.product(range(SIDE), repeat=2)
        parts = [image[i : i + side, j : j + side] for i, j in places]
        answers = _contrast(jnp.stack(parts, 2).reshape(side * side, -1)) @ filters
        pairs = jnp.stack([jax.nn.relu(sign * answers - THRESHOLD) for sign in (1, -1)], -1)
        return cell_means(pairs.reshape(side, side, -1), CELLS)

    return jax.lax.map(of_one, images)


def encoded(
    images: np.ndarray, filters: int, directory: str | os.PathLike[str] | None = None
) -> np.ndarray:
    """The features of a data set, ``[examples, cells, cells, 2 filters]``, from a cache."""

    def compute(images: np.ndarray) -> np.ndarray:
        words = dictionary(filters, images.shape[-1])  # a minute, so only where it is needed
        parts = np.array_split(images, max(1, len(images) // 100))
        return np.concatenate([encode(part, words) for part in parts])

    if directory is None:
        return compute(images)
    process = [_DARK, _SIZE, _LEAVES, _IMAGES, _PATCHES, _SMOOTH]
    settings = {"filters": [filters, SIDE, CELLS, THRESHOLD], "process": process, "version": 1}
    return features.cached(compute, images, settings=settings, directory=directory, name="patches")
