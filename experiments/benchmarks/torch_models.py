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

CLASSES, TOKENS, LENGTH = 10, 10_000, 64


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
        nn.Linear(100, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, CLASSES)
    )


def conv(before: int, channels: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(before, channels, kernel, stride, kernel // 2, bias=False)


class WideBlock(nn.Module):
    """Norms and activations first; the shortcut branches off behind them where shapes change."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(16, before), nn.ReLU())
        self.short = conv(before, channels, 1, stride) if before != channels else None
        self.rest = nn.Sequential(
            conv(before, channels, 3, stride),
            nn.GroupNorm(16, channels),
            nn.ReLU(),
            conv(channels, channels, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.rest(h) + (x if self.short is None else self.short(h))


class Block(nn.Module):
    """ResNet-18's: norms behind the convolutions, an activation behind the sum."""

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
    for stage, (before, channels) in enumerate(itertools.pairwise(widths)):
        layers += [block(before, channels, 1 + (stage > 0)), block(channels, channels, 1)]
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))
    return nn.Sequential(*layers, *last, *pool)


def wide_resnet() -> nn.Module:
    stages = residual(WideBlock, [16, 64, 128, 256], nn.GroupNorm(16, 256), nn.ReLU())
    return nn.Sequential(conv(3, 16, 3), stages)


def resnet18() -> nn.Module:
    first = conv(3, 64, 3), nn.GroupNorm(32, 64), nn.ReLU()
    return nn.Sequential(*first, residual(Block, [64, 64, 128, 256, 512]))


class Adapted(nn.Linear):
    """A linear layer that is frozen, and LoRA beside it."""

    def __init__(self, before: int, after: int, rank: int = 8) -> None:
        super().__init__(before, after)
        self.thin = nn.Sequential(
            nn.Linear(before, rank, bias=False), nn.Linear(rank, after, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.thin(x)


class DecoderBlock(nn.Module):
    def __init__(self, linear: Callable[..., nn.Module], width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.query, self.key, self.value, self.out = (linear(width, width) for _ in range(4))
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        h = self.before(x)
        q, k, v = split(self.query(h)), split(self.key(h)), split(self.value(h))
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        h = nn.functional.gelu(self.up(self.between(x)), approximate="tanh")
        return x + self.down(h)


class Decoder(nn.Module):
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
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(DecoderBlock(linear, width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        where = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(where))))


def adapted_decoder() -> nn.Module:
    network = Decoder(Adapted)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("thin" in name)
    return network


# Name -> (network, shape of an input, channels first), as in `workloads`.
NETWORKS = {
    "tempered CNN": (mnist_cnn, (1, 28, 28)),
    "WideResNet-16-4": (wide_resnet, (3, 32, 32)),
    "MLP on a table": (mlp, (100,)),
    "ResNet-18": (resnet18, (3, 32, 32)),
    "decoder of 2 layers": (Decoder, (LENGTH,)),
    "LoRA on the decoder": (adapted_decoder, (LENGTH,)),
}
