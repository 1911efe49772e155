# SPDX-License-Identifier: Apache-2.0
"""The names that flags take, a second time, because the tables that they name import JAX."""

from __future__ import annotations

DATASETS = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "svhn", "pathmnist")
DATASETS += ("organamnist", "organcmnist", "organsmnist")
MODELS = ("cifar_cnn", "cifar_dense_cnn", "linear", "mlp", "scatter_cifar_cnn")
MODELS += ("scatter_cnn", "scatter_linear", "tempered_cnn", "text_transformer", "vit", "vit_base")
MODELS += ("wide_resnet",)
LOSSES = ("cross_entropy", "focal", "composite", "squared_error", "absolute", "huber")
OPTIMIZERS = ("sgd", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "dp_adam", "paced")
CURRICULA = ("exponential-down", "exponential-up", "piecewise-down", "piecewise-up", "linear-down")
CURRICULA += ("linear-up", "quadratic-down", "quadratic-up", "logarithmic-up")


OF_ARROW = (".parquet", ".arrow", ".feather")


def is_file(dataset: str) -> bool:
    """Whether the data set is a file of the user, rather than a name."""
    return dataset.endswith((".npz", ".csv", *OF_ARROW))


def is_own(model: str) -> bool:
    """Whether the model is code of the user, ``module:name``, rather than a name."""
    return ":" in model
