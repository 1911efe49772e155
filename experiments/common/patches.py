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

SIDE = 6  # pixels of a patch
CELLS = 3  # of the grid of means, along one side
THRESHOLD = 1.0  # of a filter's answer
_DARK = 1.5e-4  # is added to the variance of a patch, of colours in [0, 1]
_SIZE = 32  # pixels of an image of leaves
_LEAVES = 150  # of an image
_IMAGES = 2_000
_PATCHES = 80_000
_SMOOTH = 0.3  # is added to the eigenvalues before whitening
_OFFSETS = list(itertools.product(range(SIDE), repeat=2))  # of the pixels of a patch


def leaves(images: int, colours: int, rng: np.random.Generator) -> np.ndarray:
    """Images of the process, ``[images, 32, 32, colours]`` in [0, 1]."""
    one = (images, 1, 1)  # a number for each image
    y, x = np.mgrid[:_SIZE, :_SIZE].astype(np.float32)[:, None]

    def colour(grey: float, hue: float) -> np.ndarray:
        brightness = rng.normal(0, grey, (*one, 1))
        return brightness + rng.normal(0, hue, (*one, colours))

    base = 0.5 + colour(0.15, 0.06)
    shape = (images, _SIZE, _SIZE, colours)
    canvas = np.broadcast_to(base, shape).astype(np.float32)
    for _ in range(_LEAVES):
        # The density of radii falls with their cube, as in photographs: no scale is special.
        share = rng.random(one)
        radius = 1 / np.sqrt((1 - share) / 1.5**2 + share / 40**2)
        center_x, center_y = rng.uniform(-8, _SIZE + 8, (2, *one))
        angle = rng.uniform(0, np.pi, one)
        # Coordinates along the two axes of the leaf; it is shorter along the second.
        across = x - center_x
        down = y - center_y
        cos = np.cos(angle)
        sin = np.sin(angle)
        u = (cos * across + sin * down) / radius
        v = (cos * down - sin * across) / radius
        v = v / rng.uniform(0.4, 1, one)
        # Half of the leaves are boxes, the others discs. A reach of 1 is the edge.
        box = rng.random(one) < 0.5
        reach = np.where(box, np.maximum(abs(u), abs(v)), np.hypot(u, v))
        softness = rng.uniform(0.5, 2, one)  # pixels over which an edge fades
        cover = np.clip((1 - reach) * radius / softness + 0.5, 0, 1)
        slope_u = rng.normal(0, 0.1, one)
        slope_v = rng.normal(0, 0.1, one)
        shade = slope_u * u + slope_v * v
        leaf = base + colour(0.25, 0.12) + shade[..., None]
        canvas += cover[..., None] * (leaf - canvas)
    return np.clip(canvas, 0, 1).astype(np.float32)


@functools.cache
def dictionary(filters: int, colours: int, seed: int = 0) -> np.ndarray:
    """Filters ``[numbers of a patch, filters]``: whitened patches of leaves, of length 1."""
    rng = np.random.default_rng(seed)
    images = leaves(_IMAGES, colours, rng)
    image = rng.integers(_IMAGES, size=_PATCHES)
    row, column = rng.integers(_SIZE - SIDE + 1, size=(2, _PATCHES))
    pixels = [images[image, row + i, column + j] for i, j in _OFFSETS]
    patches = np.stack(pixels, 1).reshape(_PATCHES, -1)
    patches = _contrast(patches, np)
    covariance = patches.T @ patches / _PATCHES
    values, vectors = np.linalg.eigh(covariance)
    whiten = vectors / np.sqrt(values + _SMOOTH) @ vectors.T
    whitened = patches @ whiten
    lengths = np.linalg.norm(whitened, axis=1, keepdims=True)
    not_flat = np.flatnonzero(lengths > np.quantile(lengths, 0.3))
    chosen = not_flat[:filters]
    directions = whitened[chosen] / lengths[chosen]
    return (directions @ whiten).T.astype(np.float32)


def _contrast(patches: Any, xp: Any = jnp) -> Any:
    """Patches of mean 0 and, but for dark ones, of variance 1."""
    centred = patches - patches.mean(1, keepdims=True)
    variance = (centred * centred).mean(1, keepdims=True)
    return centred / xp.sqrt(variance + _DARK)


def cell_means(maps: Any, cells: int) -> Any:
    """Means over a grid of cells, of ``[..., height, width, channels]``."""
    xp = jnp if isinstance(maps, jax.Array) else np
    height, width, _ = maps.shape[-3:]
    rows = np.linspace(0, height, cells + 1).astype(int)
    columns = np.linspace(0, width, cells + 1).astype(int)
    means = [maps[..., low:high, :, :].mean(-3) for low, high in itertools.pairwise(rows)]
    maps = xp.stack(means, -3)
    means = [maps[..., low:high, :].mean(-2) for low, high in itertools.pairwise(columns)]
    return xp.stack(means, -2)


@jax.jit
def encode(images: Any, filters: Any) -> Any:
    """How strongly each filter and its negative answer, as means over a grid of cells."""

    def of_image(image: Any) -> Any:
        side = image.shape[0] - SIDE + 1
        pixels = [image[i : i + side, j : j + side] for i, j in _OFFSETS]
        patches = jnp.stack(pixels, 2)
        patches = _contrast(patches.reshape(side * side, -1))
        answers = patches @ filters
        positive = jax.nn.relu(answers - THRESHOLD)
        negative = jax.nn.relu(-answers - THRESHOLD)
        pairs = jnp.stack([positive, negative], -1)
        return cell_means(pairs.reshape(side, side, -1), CELLS)

    return jax.lax.map(of_image, images)


def encoded(
    images: np.ndarray, filters: int, directory: str | os.PathLike[str] | None = None
) -> np.ndarray:
    """The features of a data set, ``[examples, cells, cells, 2 filters]``, from a cache."""

    def compute(images: np.ndarray) -> np.ndarray:
        kernels = dictionary(filters, images.shape[-1])  # takes a minute
        parts = np.array_split(images, max(1, len(images) // 100))
        return np.concatenate([encode(part, kernels) for part in parts])

    if directory is None:
        return compute(images)
    settings = {
        "filters": [filters, SIDE, CELLS, THRESHOLD],
        "process": [_DARK, _SIZE, _LEAVES, _IMAGES, _PATCHES, _SMOOTH],
        "version": 1,
    }
    return features.cached(
        compute,
        images,
        settings=settings,
        directory=directory,
        name="patches",
    )
