# SPDX-License-Identifier: Apache-2.0
"""Networks as Flax Linen modules: those in the five papers, wide ResNets and Transformers.

Each maps **one example**, without a batch axis, to logits or predictions; leading batch axes give
the same answers. Images are channels-last. No network has batch normalisation, which mixes
examples. Hidden layers keep their pre-activations in the Flax collection "preactivations".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import flax.linen as nn

from dpjax import checks
from dpjax.models._parts import Activation
from dpjax.models.activations import tempered_sigmoid
from dpjax.models.papers import (
    CIFARCNN,
    MLP,
    CIFARDenseCNN,
    ScatterCIFARCNN,
    ScatterCNN,
    TemperedCNN,
)
from dpjax.models.resnets import WideResNet
from dpjax.models.transformers import Decoder, TextTransformer, ViT

__all__ = [
    "CIFARCNN",
    "MLP",
    "NAMES",
    "CIFARDenseCNN",
    "Decoder",
    "ScatterCIFARCNN",
    "ScatterCNN",
    "TemperedCNN",
    "TextTransformer",
    "ViT",
    "WideResNet",
    "by_name",
    "tempered_sigmoid",
]

# Read-only: a name on a command line means the same network in every run.
_NAMED: MappingProxyType[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "cifar_cnn": CIFARCNN,
        "cifar_dense_cnn": CIFARDenseCNN,
        "linear": partial(MLP, features=()),
        "mlp": MLP,
        "regression_mlp": partial(MLP, features=(64, 64, 32), activation=nn.relu),
        "scatter_cifar_cnn": ScatterCIFARCNN,
        "scatter_cnn": ScatterCNN,
        "scatter_linear": partial(MLP, features=()),
        "tempered_cnn": TemperedCNN,
        "text_transformer": TextTransformer,
        "vit": partial(ViT, patch=4, width=64, depth=4, heads=4),
        "vit_base": ViT,
        "wide_resnet": WideResNet,
    }
)

NAMES: tuple[str, ...] = tuple(_NAMED)
"""The names that `by_name` knows."""


def by_name(
    name: str, /, classes: int, *, activation: Activation | None = None, **options: Any
) -> nn.Module:
    """Finds a model by name, for command lines and configurations.

    | name | takes |
    |---|---|
    | ``linear``, ``mlp`` | vectors, or images of any size |
    | ``regression_mlp`` | vectors; classes=1 |
    | ``tempered_cnn`` | 28x28 images |
    | ``cifar_cnn``, ``cifar_dense_cnn`` | 32x32 images |
    | ``scatter_linear``, ``scatter_cnn`` | wavelet features of 28x28 images |
    | ``scatter_cifar_cnn`` | wavelet features of 32x32 images |
    | ``wide_resnet`` | images |
    | ``vit`` (small, patches of 4), ``vit_base`` (of 16) | images whose sides the patch divides |
    | ``text_transformer`` | tokens |

    Args:
      name: One of the names above.
      classes: Number of outputs.
      activation: Of the hidden layers; by default the default of the model.
      **options: Further fields of the module, such as ``features`` of an MLP.

    Example:
      >>> by_name("mlp", classes=10).features
      (64, 64)
    """
    checks.one_of("models.by_name", "name", name, _NAMED)
    if activation is not None:
        options["activation"] = activation
    return _NAMED[name](classes=classes, **options)
