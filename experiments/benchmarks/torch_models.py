# SPDX-License-Identifier: Apache-2.0
"""The networks of `workloads` once more, in PyTorch, for the peers.

Layer for layer the same work: with the same parameters the same logits, to 2e-6.  Channels
are first, as PyTorch's users have them.  Attention is four linear layers around PyTorch's own
product, and positions are an embedding that is read once per example, because Opacus wants
every parameter inside a layer it knows and every activation with a batch axis.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

CLASSES = 10
layer_norm = functools.partial(nn.LayerNorm, eps=1e-6)  # Flax's


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


def cifar_cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for before, channels in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, CLASSES)]
    return nn.Sequential(*layers)


def scatter_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(243, 64, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(1024, CLASSES),
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, CLASSES)
    )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = layer_norm(width), layer_norm(width)
        self.attention = Attention(width, heads=4)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(nn.functional.gelu(self.up(self.between(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 10_000, length: int = 64, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        self.norm, self.head = layer_norm(width), nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        where = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        x = self.blocks(self.tokens(tokens) + self.positions(where))
        return self.head(self.norm(x).mean(dim=1))


# Name -> (network, shape of an input, channels first), in the order of `workloads`.
NETWORKS = {
    "W1": (mnist_cnn, (1, 28, 28)),
    "W2": (cifar_cnn, (3, 32, 32)),
    "W3": (scatter_cnn, (243, 8, 8)),
    "W4": (mlp, (784,)),
    "W5": (Transformer, (64,)),
}
