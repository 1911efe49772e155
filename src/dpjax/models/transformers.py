# SPDX-License-Identifier: Apache-2.0
"""Transformers: one stack of blocks classifies texts or images, or predicts the next token.

For fine-tuning, the parameters have the names and shapes of the original Vision Transformer
release, and with ``layout="bert"`` the text classifier is BERT's network, whose files
`experiments/finetuning/transformers.py` reads. `Decoder` is GPT-2's network;
`experiments/llm` reads its files.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dpjax import checks
from dpjax.models import _parts

_XAVIER: _parts.Initializer = nn.initializers.xavier_uniform()
_EPSILON = {"pre-norm": 1e-6, "bert": 1e-12, "gpt2": 1e-5}  # of the norms of each layout


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
    layout: str
    kernel_init: _parts.Initializer
    torch_init: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*batch positions width"], mask: Any) -> Array:
        style = (self.activation, self.kernel_init, self.torch_init)
        # The numbers in the names are the published ones; both layouts share them.
        norms = [_norm(self.layout, f"LayerNorm_{i}") for i in (0, 2)]
        attention = nn.MultiHeadDotProductAttention(
            self.heads,
            name="MultiHeadDotProductAttention_1",
            **_parts.attention_init(self, x.shape[-1]),
        )
        mlp = _MlpBlock(self.hidden, *style, name="MlpBlock_3")
        if self.layout == "bert":
            # BERT normalises behind each residual sum; later encoders in front of each block.
            x = norms[0](x + attention(x, mask=mask))
            return norms[1](x + mlp(x))
        x = x + attention(norms[0](x), mask=mask)
        return x + mlp(norms[1](x))


class _Positions(nn.Module):
    length: int
    torch_init: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*batch positions width"]) -> Array:
        shape = (1, self.length, x.shape[-1])
        return x + self.param("pos_embedding", _parts.embedding_init(self), shape)[0, : x.shape[-2]]


class _Encoder(nn.Module):
    length: int
    depth: int
    block: Any
    layout: str
    torch_init: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*batch positions width"], mask: Any = None) -> Array:
        x = _Positions(self.length, self.torch_init, name="posembed_input")(x)
        if self.layout == "bert":
            x = _norm(self.layout, "input_norm")(x)
        for i in range(self.depth):
            x = self.block(name=f"encoderblock_{i}")(x, mask)
        return x if self.layout == "bert" else _norm(self.layout, "encoder_norm")(x)


def _norm(layout: str, name: str) -> nn.LayerNorm:
    # Flax's fast variance, E[x^2] - E[x]^2, cancels digits.
    return nn.LayerNorm(_EPSILON[layout], use_fast_variance=False, name=name)


class TextTransformer(nn.Module):
    """A Transformer that classifies texts: tokens in, logits out.

    | ``layout`` | each block | the input of the head |
    |---|---|---|
    | ``"pre-norm"`` | x + f(norm(x)); a last norm | the mean over tokens |
    | ``"bert"`` | norm(x + f(x)); a first norm | tanh of a dense layer of token 0 |

    An input is ``tokens``, at most ``length`` of them, or ``(tokens, segments)`` if there are
    segments (first and second sentence); batch axes may lead. A text of padding alone gives
    finite logits. Logits are NaN if a token or segment has no vector.

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
        tokens, segments = x if isinstance(x, tuple | list) else (x, None)
        real = jnp.ones(tokens.shape, bool) if self.padding is None else tokens != self.padding
        table = partial(nn.Embed, features=self.width, embedding_init=_parts.embedding_init(self))
        h = table(self.vocabulary, name="token")(tokens)
        if segments is not None:
            h = h + table(self.segments, name="segment")(segments)
        # A lookup counts negative numbers from the end: -100, padding elsewhere, would be a word.
        # Too large ones are NaN already.
        least = tokens if segments is None else jnp.minimum(tokens, segments)
        h = jnp.where((real & (least < 0))[..., None], jnp.nan, h)
        # The mask has axes for heads and queries: padding may attend, but no query attends to it.
        h = _encoder(self, self.length, self.layout)(h, real[..., None, None, :])
        return _parts.dense(self, self._summary(h, real), self.classes, name="head")

    def _summary(self, h: Array, real: Bool[Array, "*batch positions"]) -> Array:
        if self.layout == "bert":
            return jnp.tanh(_parts.dense(self, h[..., 0, :], self.width, name="pooler"))
        # At least 1: the mean over a text of padding alone would be 0 / 0.
        count = jnp.maximum(real.sum(axis=-1, keepdims=True), 1)
        return jnp.sum(jnp.where(real[..., None], h, 0), axis=-2) / count


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
        h = _parts.conv(
            self, x, self.width, self.patch, "embedding", strides=self.patch, padding="VALID"
        )
        h = h.reshape(*h.shape[:-3], -1, self.width)
        # Zeros, as in the published ViT: the class token learns where to look.
        first = self.param("cls", nn.initializers.zeros, (1, 1, self.width))
        h = jnp.concatenate([jnp.broadcast_to(first[0], (*h.shape[:-2], 1, self.width)), h], -2)
        h = _encoder(self, h.shape[-2], "pre-norm")(h)
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
        h = _encoder(self, self.length, "gpt2")(table(x), nn.make_causal_mask(x))
        return table.attend(h)


def _encoder(model: TextTransformer | ViT | Decoder, length: int, layout: str) -> _Encoder:
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
