# SPDX-License-Identifier: Apache-2.0
"""EfficientNet-Lite0 as a Flax Linen module, with the weights of ImageNet.

Its batch normalisation is folded into the convolutions: the published mean and variance of a
channel are public constants, so the folded network maps each image by itself, as a private loss
requires.

References:
  Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", 2019.
  The Lite variant has ReLU6 and no squeeze-and-excitation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Array, Float

from dpjax import features
from experiments.finetuning import files

# A stage has blocks, a kernel, the stride of its first block, an expansion and channels.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
MEAN = 127 / 255  # of pixels in [0, 1], as in the release
SCALE = 128 / 255
_EPSILON = 1e-3  # of the folded batch normalisation
# Each kind of convolution in the file has our name, and the name of its batch normalisation.
_KINDS = {
    "_conv_stem": ("stem", "_bn0"),
    "_expand_conv": ("expand", "_bn0"),
    "_depthwise_conv": ("depthwise", "_bn1"),
    "_project_conv": ("project", "_bn2"),
    "_conv_head": ("top", "_bn1"),
}


class EfficientNetLite0(nn.Module):
    """Images to the features that the head of the release reads.

    Attributes:
      stages: Blocks, kernel, stride, expansion and channels of each stage.
      width: Number of features.
    """

    stages: tuple[tuple[int, int, int, int, int], ...] = STAGES
    width: int = 1280

    @nn.compact
    def __call__(self, x: Float[Array, "*batch height width channels"]) -> Array:
        x = nn.relu6(_conv(x, 32, 3, 2, "stem"))
        index = 0
        for blocks, kernel, first_stride, expansion, channels in self.stages:
            stride = first_stride
            for _ in range(blocks):
                name = f"block_{index}"
                y = x
                if expansion != 1:
                    y = _conv(y, expansion * x.shape[-1], 1, 1, f"{name}_expand")
                    y = nn.relu6(y)
                width = y.shape[-1]
                y = _conv(y, width, kernel, stride, f"{name}_depthwise", groups=width)
                y = nn.relu6(y)
                y = _conv(y, channels, 1, 1, f"{name}_project")
                if y.shape == x.shape:
                    y = x + y
                x = y
                stride = 1
                index += 1
        x = nn.relu6(_conv(x, self.width, 1, 1, "top"))
        return x.mean(axis=(-3, -2))


def _conv(x: Array, channels: int, kernel: int, stride: int, name: str, groups: int = 1) -> Array:
    sides = (kernel, kernel)
    return nn.Conv(channels, sides, stride, feature_group_count=groups, name=name)(x)


def load(content: bytes, params: Any) -> Any:
    """Fills the parameters of an `EfficientNetLite0` from the published state dict."""
    stored = folded(files.read_state_dict(content))
    leaves: Any = traverse_util.flatten_dict(params, sep="/")
    wrong = set()
    for name, leaf in leaves.items():
        if name not in stored or stored[name].shape != leaf.shape:
            wrong.add(name)
    if wrong:
        raise ValueError(
            f"efficientnet.load: the model does not fit at {', '.join(sorted(wrong))}."
        )
    filled = {name: jnp.asarray(stored[name]) for name in leaves}
    return traverse_util.unflatten_dict(filled, sep="/")


def folded(stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Kernels and biases by our names: each convolution times the scale of its normalisation."""
    found = {"head/kernel": stored["_fc.weight"].T, "head/bias": stored["_fc.bias"]}
    for name in stored:
        block, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind not in _KINDS:
            continue
        place, norm = _KINDS[kind]
        if block:  # the others are the first and the last convolution
            ours = block.replace("_blocks.", "block_")
            place = f"{ours}_{place}"
            norm = f"{block}.{norm}"
        weight, bias, mean, variance = (
            stored[f"{norm}.{part}"].astype(np.float64)
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        scale = weight / np.sqrt(variance + _EPSILON)
        # PyTorch has [outputs, inputs, height, width], Flax [height, width, inputs, outputs].
        kernel = stored[name].transpose(2, 3, 1, 0) * scale
        found[f"{place}/kernel"] = kernel.astype(np.float32)
        found[f"{place}/bias"] = (bias - mean * scale).astype(np.float32)
    return found


def features_of(images: np.ndarray, side: int, folder: str | None, directory: str) -> np.ndarray:
    """The 1,280 features of each image, kept in a cache that is as secret as the images."""
    content = files.checked(files.EFFICIENTNET, folder).read_bytes()

    def compute(images: np.ndarray) -> np.ndarray:
        model = EfficientNetLite0()
        image = jax.ShapeDtypeStruct((side, side, 3), jnp.float32)
        shapes = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
        params = load(content, shapes)

        def of_image(image: Array) -> Any:
            resized = jax.image.resize(image, (side, side, 3), "linear")
            return model.apply({"params": params}, (resized - MEAN) / SCALE)

        @jax.jit
        def of_images(images: Any) -> Any:
            # The activations of ten images fit into the cache of a core.
            return jax.lax.map(of_image, images, batch_size=10)

        return np.asarray(of_images(images))

    settings = {"side": side, "weights": files.EFFICIENTNET.sha256}
    return features.cached(
        compute, images, settings=settings, directory=directory, name="efficientnet"
    )
