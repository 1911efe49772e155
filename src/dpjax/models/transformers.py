# SPDX-License-Identifier: Apache-2.0
"""Transformers: one stack of blocks classifies texts or images, or predicts the next token.

For fine-tuning, the parameters have the names and shapes of the original Vision Transformer
release, and with ``layout="bert"`` the text classifier is BERT's network, whose files
`experiments/finetuning/transformers.py` reads. `Decoder` is GPT-2's network;
`experiments/llm` reads its files.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dpjax import checks
from dpjax.models import _parts

_XAVIER: _parts.Initializer = nn.initializers.xavier_uniform()


class _Layout(NamedTuple):
    """The norms of an encoder: their epsilon, and whether they follow each residual sum."""

    epsilon: float
    norms_follow: bool = False


_LAYOUTS = {
    "pre-norm": _Layout(1e-6),
    "bert": _Layout(1e-12, norms_follow=True),
    "gpt2": _Layout(1e-5),
}


class _MlpBlock(nn.Module):
    hidden: int
    activation: _parts.Activation
    kernel_init: _parts.Initializer
    torch_init: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*batch positions width"]) -> Array:
        h = _parts.activated(self, self.activation, _parts.dense(self, x, self.hidden))
        return _parts.dense(self, h, x.shape[-1])


class _EncoderBlock(nn.Module):
    heads: int
    hidden: int
    activation: _parts.Activation
    layout: _Layout
    kernel_init: _parts.Initializer
    torch_init: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*batch positions width"], mask: Any) -> Array:
        # The numbers in the names are the published ones; all layouts share them.
        first_norm = _norm(self.layout, "LayerNorm_0")
        second_norm = _norm(self.layout, "LayerNorm_2")
        attention = nn.MultiHeadDotProductAttention(
            self.heads,
            name="MultiHeadDotProductAttention_1",
            **_parts.attention_init(self, x.shape[-1]),
        )
        mlp = _MlpBlock(
            self.hidden,
            self.activation,
            self.kernel_init,
            self.torch_init,
            name="MlpBlock_3",
        )
        if self.layout.norms_follow:
            x = first_norm(x + attention(x, mask=mask))
            return second_norm(x + mlp(x))
        x = x + attention(first_norm(x), mask=mask)
        return x + mlp(second_norm(x))


class _Positions(nn.Module):
    length: int
    torch_init: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*batch positions width"]) -> Array:
        *_, positions, width = x.shape
        shape = (1, self.length, width)
        table = self.param("pos_embedding", _parts.embedding_init(self), shape)
        return x + table[0, :positions]


class _Encoder(nn.Module):
    length: int
    depth: int
    block: Any
    layout: _Layout
    torch_init: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*batch positions width"], mask: Any = None) -> Array:
        x = _Positions(self.length, self.torch_init, name="posembed_input")(x)
        if self.layout.norms_follow:
            x = _norm(self.layout, "input_norm")(x)
        for i in range(self.depth):
            x = self.block(name=f"encoderblock_{i}")(x, mask)
        if not self.layout.norms_follow:
            x = _norm(self.layout, "encoder_norm")(x)
        return x


def _norm(layout: _Layout, name: str) -> nn.LayerNorm:
    # Flax's fast variance, E[x^2] - E[x]^2, cancels digits.
    return nn.LayerNorm(layout.epsilon, use_fast_variance=False, name=name)


class TextTransformer(nn.Module):
    """A Transformer that classifies texts: tokens in, logits out.

    | ``layout`` | each block | the input of the head |
    |---|---|---|
    | ``"pre-norm"`` | x + f(norm(x)); a last norm | the mean over tokens |
    | ``"bert"`` | norm(x + f(x)); a first norm | tanh of a dense layer of token 0 |

    An input is ``tokens``, at most ``length`` of them, or ``(tokens, segments)`` if there are
    segments (first and second sentence); batch axes may lead. A text of only padding gives finite
    logits. Logits are NaN if a token or segment has no vector.

    Attributes:
      width: Length of every token's vector; a multiple of ``heads``.
      hidden: Width of the hidden layer of a block; 4 ``width`` by default.
      segments: Number of kinds of segments; 0 for none.
      padding: The token that attention masks; None if there is none.
      layout: ``"pre-norm"`` or ``"bert"``, as above.
      activation: Of the hidden layer; GELU.
      kernel_init: As in `MLP`, like ``torch_init``.

    Example:
      >>> import jax
      >>> model = TextTransformer(classes=2, vocabulary=100, length=16, width=32, depth=2, heads=4)
      >>> text = jax.ShapeDtypeStruct((16,), jnp.int32)
      >>> jax.eval_shape(model.init_with_output, jax.random.key(0), text)[0].shape
      (2,)

    References:
      Vaswani et al., "Attention Is All You Need", 2017. Devlin et al., "BERT", 2019. Xiong et
      al., "On Layer Normalization in the Transformer Architecture", 2020.
    """

    classes: int = 2
    vocabulary: int = 30_522
    length: int = 128
    width: int = 128
    depth: int = 2
    heads: int = 4
    hidden: int | None = None
    segments: int = 0
    padding: int | None = 0
    layout: str = "pre-norm"
    activation: _parts.Activation = partial(nn.gelu, approximate=False)
    kernel_init: _parts.Initializer = _XAVIER
    torch_init: bool = False

    @nn.compact
    def __call__(
        self,
        x: Int[Array, "*batch positions"]
        | tuple[Int[Array, "*batch positions"], Int[Array, "*batch positions"]],
    ) -> Float[Array, "*batch classes"]:
        """Gives the logits of one text, or of a batch."""
        checks.one_of("models.TextTransformer", "layout", self.layout, ("pre-norm", "bert"))
        tokens: Any = x
        segments = None
        if isinstance(x, tuple | list):
            tokens, segments = x
        # Which positions are not padding.
        real = jnp.ones(tokens.shape, bool) if self.padding is None else tokens != self.padding
        embed = partial(nn.Embed, features=self.width, embedding_init=_parts.embedding_init(self))
        h = embed(self.vocabulary, name="token")(tokens)  # [*batch, positions, width]
        least_index = tokens  # negative if the token or its segment is
        if segments is not None:
            h = h + embed(self.segments, name="segment")(segments)
            least_index = jnp.minimum(tokens, segments)
        # A lookup counts negative numbers from the end, and so reads -100, the padding of other
        # libraries, as a word. Too large numbers give NaN already.
        is_unknown = real & (least_index < 0)
        h = jnp.where(is_unknown[..., None], jnp.nan, h)
        # The mask has axes for heads and queries: padding may attend, but no query attends to it.
        h = _encoder(self, self.length, self.layout)(h, real[..., None, None, :])
        return _parts.dense(self, self._summary(h, real), self.classes, name="head")

    def _summary(self, h: Array, real: Bool[Array, "*batch positions"]) -> Array:
        """The input of the head: one vector for each text."""
        if self.layout == "bert":
            h = _parts.dense(self, h[..., 0, :], self.width, name="pooler")
            return jnp.tanh(h)
        total = jnp.sum(jnp.where(real[..., None], h, 0), axis=-2)
        # The count is at least 1, because a text of only padding has the mean 0 / 0.
        count = jnp.maximum(real.sum(axis=-1, keepdims=True), 1)
        return total / count


class ViT(nn.Module):
    """A Vision Transformer: patches of an image, one class token, logits.

    The defaults are ViT-Base with patches of 16, 86 million parameters. Smaller sides or
    patches make small ones. The other fields are as in `TextTransformer`.

    Attributes:
      patch: Side of a patch in pixels; must divide the sides of the image.
      activation: Of the hidden layer; GELU by its tanh approximation.

    Example:
      >>> import jax
      >>> model = ViT(patch=8, width=32, depth=2, heads=4)
      >>> image = jax.ShapeDtypeStruct((32, 32, 3), jnp.float32)
      >>> jax.eval_shape(model.init_with_output, jax.random.key(0), image)[0].shape
      (10,)

    References:
      Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021.
    """

    classes: int = 10
    patch: int = 16
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int | None = None
    activation: _parts.Activation = nn.gelu
    kernel_init: _parts.Initializer = _XAVIER
    torch_init: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch height width channels"]
    ) -> Float[Array, "*batch classes"]:
        """Gives the logits of one image, or of a batch."""
        _parts.expect_image("ViT", x, smallest=self.patch)
        if x.shape[-3] % self.patch or x.shape[-2] % self.patch:
            raise ValueError(
                f"models.ViT: patch {self.patch} must divide the sides {x.shape[-3:-1]}."
            )
        # A convolution with patches as kernel and stride applies one dense layer to each patch.
        h = _parts.conv(
            self,
            x,
            self.width,
            self.patch,
            name="embedding",
            strides=self.patch,
            padding="VALID",
        )
        h = h.reshape(*h.shape[:-3], -1, self.width)  # one position for each patch
        # The class token starts at 0 and has this shape, as in the published ViT.
        class_token = self.param("cls", nn.initializers.zeros, (1, 1, self.width))
        # One class token for each image of the batch: [*batch, 1, width].
        class_tokens = jnp.broadcast_to(class_token[0], (*h.shape[:-2], 1, self.width))
        h = jnp.concatenate([class_tokens, h], axis=-2)
        h = _encoder(self, h.shape[-2], "pre-norm")(h)
        # The class token is the first position.
        return _parts.dense(self, h[..., 0, :], self.classes, name="head")


class Decoder(nn.Module):
    """A causal Transformer, GPT-2's network: tokens in, logits of each next token out.

    The defaults are the smallest GPT-2, 124 million parameters. The table of tokens is also the
    last layer. No position attends to a later one, so padding behind a text changes none of its
    logits, and the loss leaves the padding out. The other fields are as in `TextTransformer`.

    Attributes:
      length: The most tokens of a text.
      activation: Of the hidden layer; GELU by its tanh approximation.

    Example:
      >>> import jax
      >>> model = Decoder(vocabulary=100, length=16, width=32, depth=2, heads=4)
      >>> text = jax.ShapeDtypeStruct((16,), jnp.int32)
      >>> jax.eval_shape(model.init_with_output, jax.random.key(0), text)[0].shape
      (16, 100)

    References:
      Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    vocabulary: int = 50_257
    length: int = 1024
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int | None = None
    activation: _parts.Activation = nn.gelu
    kernel_init: _parts.Initializer = nn.initializers.normal(0.02)
    torch_init: bool = False

    @nn.compact
    def __call__(
        self, x: Int[Array, "*batch positions"]
    ) -> Float[Array, "*batch positions vocabulary"]:
        """Gives the logits behind each token of one text, or of a batch."""
        init = _parts.embedding_init(self)
        table = nn.Embed(self.vocabulary, self.width, embedding_init=init, name="token")
        encoder = _encoder(self, self.length, "gpt2")
        h = encoder(table(x), nn.make_causal_mask(x))
        return table.attend(h)


def _encoder(model: TextTransformer | ViT | Decoder, length: int, name: str) -> _Encoder:
    """The stack of blocks of a model, in the layout of this name."""
    layout = _LAYOUTS[name]
    block = partial(
        _EncoderBlock,
        heads=model.heads,
        hidden=model.hidden or 4 * model.width,
        activation=model.activation,
        layout=layout,
        kernel_init=model.kernel_init,
        torch_init=model.torch_init,
    )
    return _Encoder(length, model.depth, block, layout, model.torch_init, name="Transformer")
