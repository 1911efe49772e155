# SPDX-License-Identifier: Apache-2.0
"""The inputs of the network: images as they are, or wavelet features on a private scale."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import dpjax
from dpjax import data, features, noise, scattering, trees
from dpjax._files import held, replacing


def build_normalization(given: flags.FlagValues, examples: int) -> features.Normalization | None:
    """The queries on private data for the scale of features, if the flags want any."""
    if given.features == "none" or given.normalization != "data":
        return None
    return features.Normalization(
        examples=examples,
        noise_multiplier=given.norm_multiplier,
        thresholds=features.Search(noise_multiplier=given.search_multiplier),
    )


def scale(given: flags.FlagValues, x: Any, moments: features.Moments | None) -> Any:
    """Scales features by private moments, or each example by its own groups of channels."""
    if moments is None:
        return features.group_norm(x, groups=given.norm_groups)
    return features.normalize(x, moments)


def input_shape(given: flags.FlagValues, dataset: data.Dataset) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one input of the network, computed without reading data."""
    x = row_of(dataset)
    if given.features == "none":
        return x
    # Shapes find a wrong flag before minutes of scattering.
    row = jax.eval_shape(scattering.scatter, jax.ShapeDtypeStruct((1, *x.shape), x.dtype))
    moments = None
    if given.normalization == "data":
        # A mean and a variance for each channel, which is the last axis of features.
        channels: Any = jax.ShapeDtypeStruct(row.shape[-1:], row.dtype)
        moments = features.Moments(channels, channels)
    return jax.eval_shape(lambda row, moments: scale(given, row, moments)[0], row, moments)


def row_of(dataset: data.Dataset) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the inputs of one row of the data set."""
    if isinstance(dataset.train, data.Stream):
        x, _ = dataset.train.row
    else:
        x, _ = trees.one_row(dataset.train)
    return x


def with_features(given: flags.FlagValues, dataset: data.Dataset) -> data.Dataset:
    """The data set with the features of each image, which follow from that image only."""
    if given.features == "none":
        return dataset
    scattered = partial(features.scattered, directory=given.cache_dir)
    return _changed(dataset, lambda images: jnp.asarray(scattered(images)))


def with_scale(
    given: flags.FlagValues, dataset: data.Dataset, moments: features.Moments | None
) -> data.Dataset:
    """Scales features, if there are any."""
    if given.features == "none":
        return dataset
    return _changed(dataset, jax.jit(partial(scale, given, moments=moments)))


def _changed(dataset: data.Dataset, change: Callable[[Any], Any]) -> data.Dataset:
    train, test = ((change(x), labels) for x, labels in (dataset.train, dataset.test))
    return dataset._replace(train=train, test=test)


def release_once(
    path: pathlib.Path, normalization: features.Normalization, x: Any, seed: int | None = None
) -> features.Moments:
    """Reads the moments from ``path``, or releases them with noise and writes them there."""
    # The lock and the file prevent a second query, which no card counts.
    with held(path.parent, "moments.lock"):
        if not path.exists():
            # `fit` refuses the folder of another run too, but only after this query is spent.
            if (path.parent / "run.json").exists():
                raise dpjax.ledger.Refused(f"{path.parent}: another run is there.")
            key = noise.secret_key() if seed is None else jax.random.key(seed)
            answers = normalization.release(key, x)._asdict()
            with replacing(path) as file:  # private, and never half written
                np.savez(file, multipliers=normalization.multipliers, **answers)
    return read_moments(path, normalization)


def read_moments(path: pathlib.Path, normalization: features.Normalization) -> features.Moments:
    """The answers to the queries of ``normalization``, which a run's folder holds."""
    answers = np.load(path)
    multipliers = answers["multipliers"].tolist()
    asked = list(normalization.multipliers)
    if multipliers != asked:
        raise dpjax.ledger.Refused(
            f"{path}: asked with noise {multipliers}, not {asked}. Their cost is spent: give the "
            "same flags."
        )
    return features.Moments(answers["mean"], answers["variance"])


def released_moments(path: pathlib.Path, given: flags.FlagValues) -> features.Moments | None:
    """The private moments of a finished run, if its flags asked for any."""
    # The noise of the queries, which is compared here, does not depend on the number of examples.
    normalization = build_normalization(given, examples=2)
    if normalization is None:
        return None
    return read_moments(path, normalization)
