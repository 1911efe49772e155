# SPDX-License-Identifier: Apache-2.0
"""What the network reads: images as they are, or wavelet features on a private scale.

Moments of the private data are queries with noise, whose answers stay in the run's folder: a
resumed run reads them there, because a second query would spend privacy again.
"""

from __future__ import annotations

import pathlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import dpjax
from dpjax import data, features, processes, scattering
from dpjax._files import replacing

MOMENTS = "moments.npz"


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
    x, _ = dataset.train.row if isinstance(dataset.train, data.Stream) else dataset.train
    shape = x.shape if isinstance(dataset.train, data.Stream) else x.shape[1:]
    if given.features == "none":
        return jax.ShapeDtypeStruct(shape, x.dtype)
    # On shapes: a wrong flag is found before minutes of scattering.
    row = jax.eval_shape(scattering.scatter, jax.ShapeDtypeStruct((1, *shape), x.dtype))
    channels: Any = jax.ShapeDtypeStruct(row.shape[-1:], row.dtype)
    moments = features.Moments(channels, channels) if given.normalization == "data" else None
    return jax.eval_shape(lambda row, moments: scale(given, row, moments)[0], row, moments)


def require_known_tokens(dataset: data.Dataset, model: Any) -> None:
    """Refuses tokens without a vector: such an example has no finite gradient.

    Raises:
      ValueError: A whole number lies outside the model's vocabulary and is not its padding.
    """
    size = getattr(model, "vocabulary", None)
    if not isinstance(size, int) or isinstance(dataset.train, data.Stream):
        return
    for part, (x, _) in (("training", dataset.train), ("test", dataset.test)):
        if not np.issubdtype(x.dtype, np.integer):
            continue
        tokens = np.asarray(x)
        unknown = (tokens >= size) | ((tokens < 0) & (tokens != getattr(model, "padding", None)))
        if unknown.any():
            raise ValueError(
                f"{unknown.sum():,} tokens of the {part} part of {dataset.name} have no vector; "
                f"expected whole numbers from 0 to {size - 1}, and found {tokens.min()} to "
                f"{tokens.max()}. Every text with such a token would add nothing to any step. "
                "Usually the vocabulary is smaller than the tokenizer's: give "
                "--model_options=vocabulary=N with the number of its tokens."
            )


def with_features(given: flags.FlagValues, dataset: data.Dataset) -> data.Dataset:
    """Replaces images by their features, each computed from its own image alone."""
    if given.features == "none":
        return dataset
    try:
        x, x_test = (
            jnp.asarray(features.scattered(part[0], directory=given.cache_dir))
            for part in (dataset.train, dataset.test)
        )
    except OSError as error:
        raise app.UsageError(f"--cache_dir={given.cache_dir}: {error}") from error
    return dataset._replace(train=(x, dataset.train[1]), test=(x_test, dataset.test[1]))


def with_scale(
    given: flags.FlagValues,
    dataset: data.Dataset,
    normalization: features.Normalization | None,
    key: Any,
    folder: pathlib.Path,
) -> data.Dataset:
    """Scales features, after the private queries of ``normalization`` if there are any."""
    if given.features == "none":
        return dataset
    (x, labels), (x_test, test_labels) = dataset.train, dataset.test
    moments = None
    if normalization is not None:
        # One release, in the first process, which alone writes files.
        path, seed = folder / MOMENTS, given.seed
        moments = processes.from_first(lambda: release_once(path, normalization, key, x, seed))
    x, x_test = map(jax.jit(partial(scale, given, moments=moments)), (x, x_test))
    return dataset._replace(train=(x, labels), test=(x_test, test_labels))


def release_once(
    path: pathlib.Path,
    normalization: features.Normalization,
    key: Any,
    x: Any,
    seed: int | None = None,
) -> features.Moments:
    """Reads the moments from ``path``, or releases them with noise and writes them there.

    Args:
      path: The file of the moments.
      normalization: The queries.
      key: The root key of the run.
      x: The features.
      seed: The published seed that made the key, if one did.
    """
    # The released answers are kept with their question: a second query would be a release that no
    # card counts. With their seed too: only the card of a run that names it says that their noise
    # is public.
    asked = {
        "multipliers": normalization.multipliers,
        "features": dpjax.trees.fingerprint(x),
        "seed": str(seed),
    }
    if not path.exists():
        if (path.parent / "run.json").exists():
            raise dpjax.ledger.Refused(
                f"--out={path.parent}: a run is there that asked nothing of its data beforehand, "
                "so this is another run. Give another folder, or --overwrite."
            )
        # Closed to others: with the hash, anyone could test a guess of all features. A killed
        # process leaves all answers or none.
        with replacing(path) as file:
            np.savez(file, **asked, **normalization.release(key, x)._asdict())
    kept = np.load(path)
    there = {name: np.asarray(kept.get(name, "unknown")).tolist() for name in asked}
    now = {name: np.asarray(value).tolist() for name, value in asked.items()}
    if differ := [name for name in asked if there[name] != now[name]]:
        raise dpjax.ledger.Refused(
            f"{path} holds the answers to other queries, of other data or under another --seed: "
            + "; ".join(f"{name}: {there[name]} there, {now[name]} now" for name in differ)
            + ". Their cost is already spent. Give another --out, or --overwrite."
        )
    return features.Moments(kept["mean"], kept["variance"])
