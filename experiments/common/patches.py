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
  Kessy, Lewin and Strimmer, "Optimal whitening and decorrelation", 2018, for whitening; here it is
  partial, and the covariance is that of the process.
"""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any, NamedTuple

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
_TOGETHER = 100  # images that fit into a processor's cache
_PATCHES = 80_000
_SMOOTH = 0.3  # is added to the eigenvalues before whitening
_OFFSETS = list(itertools.product(range(SIDE), repeat=2))  # of the pixels of a patch


def leaves(images: int, colours: int, rng: np.random.Generator) -> np.ndarray:
    """Images of the process, ``[images, 32, 32, colours]`` in [0, 1]."""
    one = (images, 1, 1)  # a number for each image

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
        leaf = _Leaf(
            radius=radius,
            center_x=center_x,
            center_y=center_y,
            angle=rng.uniform(0, np.pi, one),
            shorter=rng.uniform(0.4, 1, one),
            box=rng.random(one) < 0.5,  # half of the leaves are boxes, the others discs
            softness=rng.uniform(0.5, 2, one),
            slope_u=rng.normal(0, 0.1, one),
            slope_v=rng.normal(0, 0.1, one),
            colour=base + colour(0.25, 0.12),
        )
        for start in range(0, images, _TOGETHER):
            rows = slice(start, start + _TOGETHER)
            _drop(canvas[rows], _Leaf(*(of_images[rows] for of_images in leaf)))
    return np.clip(canvas, 0, 1).astype(np.float32)


class _Leaf(NamedTuple):
    """A leaf of each image, ``[images, 1, 1]``; the colour has one axis more."""

    radius: np.ndarray
    center_x: np.ndarray
    center_y: np.ndarray
    angle: np.ndarray
    shorter: np.ndarray  # the second axis, as a part of the first
    box: np.ndarray
    softness: np.ndarray  # pixels over which an edge fades
    slope_u: np.ndarray
    slope_v: np.ndarray
    colour: np.ndarray


def _drop(canvas: np.ndarray, leaf: _Leaf) -> None:
    """Paints a leaf over each image."""
    y, x = np.mgrid[:_SIZE, :_SIZE].astype(np.float32)[:, None]
    # Coordinates along the two axes of the leaf.
    across = x - leaf.center_x
    down = y - leaf.center_y
    cos = np.cos(leaf.angle)
    sin = np.sin(leaf.angle)
    u = (cos * across + sin * down) / leaf.radius
    v = (cos * down - sin * across) / leaf.radius
    v = v / leaf.shorter
    # A reach of 1 is the edge.
    reach = np.where(leaf.box, np.maximum(abs(u), abs(v)), np.hypot(u, v))
    cover = np.clip((1 - reach) * leaf.radius / leaf.softness + 0.5, 0, 1)
    shade = leaf.slope_u * u + leaf.slope_v * v
    painted = leaf.colour + shade[..., None]
    canvas += cover[..., None] * (painted - canvas)


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


@functools.partial(jax.jit, static_argnames="cells")
def encode(images: Any, filters: Any, cells: int = CELLS) -> Any:
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
        return cell_means(pairs.reshape(side, side, -1), cells)

    return jax.lax.map(of_image, images)


def encoded(
    images: np.ndarray,
    filters: int,
    directory: str | os.PathLike[str] | None = None,
    *,
    cells: int = CELLS,
    seed: int = 0,
) -> np.ndarray:
    """The features of a data set, ``[examples, cells, cells, 2 filters]``.

    They come from a cache, if there is one and the filters have the first seed.
    """

    def compute(images: np.ndarray) -> np.ndarray:
        kernels = dictionary(filters, images.shape[-1], seed)  # takes a minute
        parts = np.array_split(images, max(1, len(images) // 100))
        return np.concatenate([encode(part, kernels, cells) for part in parts])

    if directory is None or seed:  # other seeds would fill the disk
        return compute(images)
    settings = {
        "filters": [filters, SIDE, cells, THRESHOLD],
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


class Whitening(NamedTuple):
    """An affine map of features to fewer ones, ``(features - mean) @ matrix``."""

    mean: np.ndarray
    matrix: np.ndarray

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The map of rows, ``[..., numbers]``."""
        flat = rows.reshape(-1, rows.shape[-1])  # else every row is a product of its own
        parts = np.array_split(flat, max(1, len(flat) // 5_000))
        mapped = np.concatenate([(part - self.mean) @ self.matrix for part in parts])
        return mapped.reshape(*rows.shape[:-1], -1)


def whitening(drawn: np.ndarray, power: float, directions: int) -> Whitening:
    """Flattens the spectrum that features of leaves have.

    Args:
      drawn: Features of leaves, ``[leaves, numbers]``.
      power: Each direction is divided by its standard deviation to this power: 1 whitens, and 0
        only turns the axes.
      directions: The number of eigenvectors that are kept; their variances are the largest.

    Returns:
      The map. It keeps the mean square length of centred leaves, and reads no data.
    """
    mean = drawn.mean(0)
    centred = drawn - mean
    covariance = centred.T @ centred / len(drawn)
    variances, vectors = np.linalg.eigh(covariance)
    variances = variances[-directions:]
    kept = vectors[:, -directions:]
    divided = kept / variances ** (power / 2)
    length = np.sqrt(np.trace(covariance) / np.sum(variances ** (1 - power)))
    return Whitening(mean, (divided * length).astype(np.float32))
