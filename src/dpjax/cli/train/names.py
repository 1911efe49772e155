# SPDX-License-Identifier: Apache-2.0
"""The names that flags take: of data sets, models, losses, optimizers and noise schedules.

They are written down a second time, because the tables that they name import JAX, and a misspelt
name is answered before that.  A test holds both to each other.
"""

from __future__ import annotations

import difflib
import pathlib
from collections.abc import Sequence

from absl import flags

DATASETS = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "svhn", "pathmnist")
DATASETS += ("organamnist", "organcmnist", "organsmnist")
QUANTITIES = ("california_housing", "wine_quality")  # data sets that a script learns
MODELS = ("cifar_cnn", "cifar_dense_cnn", "linear", "mlp", "scatter_cifar_cnn")
MODELS += ("scatter_cnn", "scatter_linear", "tempered_cnn", "text_transformer", "vit", "vit_base")
MODELS += ("wide_resnet",)
LOSSES = ("cross_entropy", "focal", "composite", "squared_error", "absolute", "huber")
OPTIMIZERS = ("sgd", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "dp_adam")
CURRICULA = ("exponential-down", "exponential-up", "piecewise-down", "piecewise-up", "linear-down")
CURRICULA += ("linear-up", "quadratic-down", "quadratic-up", "logarithmic-up")


def is_file(dataset: str) -> bool:
    """Whether the data set is a file of the user, rather than a name."""
    return dataset.endswith((".npz", ".csv"))


def is_own(model: str) -> bool:
    """Whether the model is code of the user, ``module:name``, rather than a name."""
    return ":" in model


def check_dataset(dataset: str) -> bool:
    """Refuses a data set that is neither a name nor a file that exists."""
    if is_file(dataset):
        if not pathlib.Path(dataset).is_file():
            raise flags.ValidationError(
                f"there is no such file in {pathlib.Path(dataset).absolute().parent}. Expected the "
                "path of an .npz or .csv; usually the folder is missing from it."
            )
        return True
    if dataset in QUANTITIES:
        raise flags.ValidationError(
            "its target is a quantity, and dpjax train learns classes. Train it by a script: "
            "dpjax.dpsgd with dpjax.losses.squared_error, as your_model.md in docs/pages shows "
            "under Regression."
        )
    return _check(dataset, DATASETS, "a file of yours: --dataset=my.npz or --dataset=my.csv")


def check_model(model: str) -> bool:
    """Refuses a model that is neither a name nor of the form ``module:name``."""
    if is_own(model):
        module, _, name = model.partition(":")
        named = all(part.isidentifier() for part in [*module.split("."), name])
        if not named or module.endswith(".py"):
            raise flags.ValidationError(
                "expected the names of a module and of a Flax module or function in it, such as "
                "networks:CNN for class CNN in networks.py. Usually the file was named, with .py."
            )
        return True
    return _check(model, MODELS, "a model of yours: --model=networks:CNN for CNN in networks.py")


def _check(word: str, known: Sequence[str], own: str) -> bool:
    if word in known:
        return True
    near = difflib.get_close_matches(word, known, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise flags.ValidationError(f"expected one of {', '.join(known)}, or {own}.{hint}")
