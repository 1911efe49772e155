# SPDX-License-Identifier: Apache-2.0
"""The networks of `workloads` once more, in PyTorch, for the peers.

Layer for layer the same work. Channels are first, as PyTorch's users have them. Attention is
linear layers around PyTorch's own product, and positions are an embedding that is read once per
example, because Opacus wants every parameter inside a layer it knows and every activation with a
batch axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

CLASSES = 10
TOKENS = 10_000
LENGTH = 64


def mnist_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, CLASSES),
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(100, 256),
        nn.Tanh(),
        nn.Linear(256, 256),
        nn.Tanh(),
        nn.Linear(256, CLASSES),
    )


def conv(before: int, channels: int, kernel: int, stride: int = 1) -> nn.Module:
    """A convolution with "same" padding and without a bias."""
    padding = kernel // 2
    return nn.Conv2d(before, channels, kernel, stride, padding, bias=False)


class WideBlock(nn.Module):
    """Norms and activations come first; a shortcut that changes shapes takes their output."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(16, before), nn.ReLU())
        self.short = None
        if before != channels:
            self.short = conv(before, channels, 1, stride)
        self.rest = nn.Sequential(
            conv(before, channels, 3, stride),
            nn.GroupNorm(16, channels),
            nn.ReLU(),
            conv(channels, channels, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.short is not None:
            x = self.short(h)
        return self.rest(h) + x


class Block(nn.Module):
    """ResNet-18's block: each convolution is normalised, and the sum goes through a ReLU."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.short = nn.Sequential()
        if before != channels:
            self.short = nn.Sequential(
                conv(before, channels, 1, stride), nn.GroupNorm(32, channels)
            )
        self.rest = nn.Sequential(
            conv(before, channels, 3, stride),
            nn.GroupNorm(32, channels),
            nn.ReLU(),
            conv(channels, channels, 3),
            nn.GroupNorm(32, channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.rest(x) + self.short(x))


def residual(block: Callable[..., nn.Module], widths: list[int], *last: nn.Module) -> nn.Module:
    """Stages of two blocks; all but the first halve the sides."""
    layers = []
    stride = 1
    for before, channels in itertools.pairwise(widths):
        layers.append(block(before, channels, stride))
        layers.append(block(channels, channels, 1))
        stride = 2
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES)]
    return nn.Sequential(*layers, *last, *head)


def wide_resnet() -> nn.Module:
    stages = residual(WideBlock, [16, 64, 128, 256], nn.GroupNorm(16, 256), nn.ReLU())
    return nn.Sequential(conv(3, 16, 3), stages)


def resnet18() -> nn.Module:
    return nn.Sequential(
        conv(3, 64, 3),
        nn.GroupNorm(32, 64),
        nn.ReLU(),
        residual(Block, [64, 64, 128, 256, 512]),
    )


class Adapted(nn.Linear):
    """A frozen linear layer with LoRA."""

    def __init__(self, before: int, after: int, rank: int = 8) -> None:
        super().__init__(before, after)
        down = nn.Linear(before, rank, bias=False)
        up = nn.Linear(rank, after, bias=False)
        self.thin = nn.Sequential(down, up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.thin(x)


class DecoderBlock(nn.Module):
    """A block like GPT-2's; ``linear`` makes its layers."""

    def __init__(self, linear: Callable[..., nn.Module], width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width, eps=1e-6)
        self.between = nn.LayerNorm(width, eps=1e-6)
        self.query = linear(width, width)
        self.key = linear(width, width)
        self.value = linear(width, width)
        self.out = linear(width, width)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        h = self.before(x)
        query = split(self.query(h))
        key = split(self.key(h))
        value = split(self.value(h))
        h = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        h = h.transpose(1, 2).flatten(2)
        x = x + self.out(h)
        h = self.up(self.between(x))
        h = nn.functional.gelu(h, approximate="tanh")
        return x + self.down(h)


class Decoder(nn.Module):
    """A causal Transformer."""

    def __init__(
        self,
        linear: Callable[..., nn.Module] = nn.Linear,
        width: int = 128,
        heads: int = 4,
        depth: int = 2,
        words: int = TOKENS,
        length: int = LENGTH,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.positions = nn.Embedding(length, width)
        blocks = [DecoderBlock(linear, width, heads) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        examples, length = tokens.shape
        places = torch.arange(length, device=tokens.device).repeat(examples, 1)
        x = self.tokens(tokens) + self.positions(places)
        x = self.norm(self.blocks(x))
        return self.head(x)


def adapted_decoder() -> nn.Module:
    network = Decoder(Adapted)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("thin" in name)
    return network


# The network of each name in `workloads`, and the shape of an input, with channels first.
NETWORKS = {
    "tempered CNN": (mnist_cnn, (1, 28, 28)),
    "WideResNet-16-4": (wide_resnet, (3, 32, 32)),
    "MLP on a table": (mlp, (100,)),
    "ResNet-18": (resnet18, (3, 32, 32)),
    "decoder of 2 layers": (Decoder, (LENGTH,)),
    "LoRA on the decoder": (adapted_decoder, (LENGTH,)),
}
