"""The encoder: BERT and DistilBERT (and MiniLM, Contriever, which are BERT) by configuration.

Post-norm blocks over bidirectional attention, stacked and scanned as a decoder's. Attention takes its keys from a
`memory` of its own, so that blocks whose queries and keys are different texts are built of the same parts.
B batch, T tokens, S memory tokens, D model, L layers, K heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from blockrank.attention.dispatch import attend
from blockrank.attention.visibility import BIDIRECTIONAL
from blockrank.layout import PAD, PREFIX, TokenLayout
from blockrank.models.config import Activation, EncoderConfig
from blockrank.models.layers import LayerNorm, Linear
from blockrank.models.stack import Attend, Remat, scan_blocks, stack_layers

ACTIVATIONS: Final[dict[Activation, Callable[[Array], Array]]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class Embeddings(nnx.Module):
    """Words, token types and positions, summed and normed."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        def table(rows: int) -> nnx.Param:
            shape = rows, config.hidden_size
            return nnx.Param(config.initializer_range * jax.random.normal(rngs.params(), shape, jnp.float32))

        self.word = table(config.vocab_size)
        self.position = table(config.max_positions)
        self.token_type = table(config.token_types) if config.token_types else None
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], token_types: Int[Array, "B T"] | None
    ) -> Float[Array, "B T D"]:
        states = self.word[...][tokens]
        if self.token_type is not None:
            states = states + self.token_type[...][jnp.zeros_like(tokens) if token_types is None else token_types]
        elif token_types is not None:
            raise ValueError("this encoder has no token types")
        return self.norm(states + self.position[...][positions])


class EncoderAttention(nnx.Module):
    """Multi-head attention of states over a memory; who sees whom is the caller's `attend`."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        def linear() -> Linear:
            return Linear(config.hidden_size, config.hidden_size, bias=True, std=config.initializer_range, rngs=rngs)

        self.query, self.key, self.value, self.out = linear(), linear(), linear(), linear()
        self.heads = (config.num_heads, config.head_dim)

    def __call__(
        self, x: Float[Array, "B T D"], memory: Float[Array, "B S D"], attend: Attend
    ) -> Float[Array, "B T D"]:
        q, k, v = self.query(x), self.key(memory), self.value(memory)
        k, v = (y.reshape(*y.shape[:2], *self.heads) for y in (k, v))
        mixed = attend(q.reshape(*q.shape[:2], self.heads[0], 1, self.heads[1]), k, v)
        return self.out(mixed.reshape(x.shape))


class FeedForward(nnx.Module):
    """`down(activation(up(x)))`."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        std = config.initializer_range
        self.up = Linear(config.hidden_size, config.intermediate_size, bias=True, std=std, rngs=rngs)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=True, std=std, rngs=rngs)
        self.activation: Activation = config.activation

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


class EncoderBlock(nnx.Module):
    """Self-attention and feed-forward, each added to its input and normed."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.attention = EncoderAttention(config, rngs=rngs)
        self.attention_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = FeedForward(config, rngs=rngs)
        self.mlp_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(self, x: Float[Array, "B T D"], attend: Attend) -> Float[Array, "B T D"]:
        x = self.attention_norm(x + self.attention(x, x, attend))
        return self.mlp_norm(x + self.mlp(x))


class Encoder(nnx.Module):
    """Embeddings, blocks and, where the weights have one, BERT's pooler. `dtype` is that of activations."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.config = config
        self.dtype = dtype
        self.embed = Embeddings(config, rngs=rngs)
        self.blocks = stack_layers(lambda rngs: EncoderBlock(config, rngs=rngs), config.num_layers, rngs=rngs)
        size, std = config.hidden_size, config.initializer_range
        self.pooler = Linear(size, size, bias=True, std=std, rngs=rngs) if config.pooler else None

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
        *,
        token_types: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        attend: Attend | None = None,
        remat: Remat = "none",
    ) -> Float[Array, "B T D"]:
        """States after the last block. `mask` tells tokens from padding, which nothing sees.

        Positions count from 0 and token types are 0 unless given; `attend` replaces `see_all`.
        """
        return self._run(tokens, mask, token_types, positions, attend, remat)[0]

    def hidden_states(
        self, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], *, token_types: Int[Array, "B T"] | None = None
    ) -> Float[Array, "L1 B T D"]:
        """States entering each layer, then those after the last, [L+1, B, T, D]."""
        last, entering = self._run(tokens, mask, token_types, None, None, "none")
        return jnp.concatenate([entering, last[None]])

    def pooled(self, states: Float[Array, "B T D"]) -> Float[Array, "B D"]:
        """BERT's pooled output: tanh of a dense layer over the first token's state."""
        if self.pooler is None:
            raise ValueError("this encoder has no pooler")
        return jnp.tanh(self.pooler(states[:, 0]))

    def _run(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
        token_types: Int[Array, "B T"] | None,
        positions: Int[Array, "B T"] | None,
        attend: Attend | None,
        remat: Remat,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "L B T D"]]:
        visible = see_all(tokens, mask) if attend is None else attend
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        state = self.embed(tokens, positions, token_types).astype(self.dtype)

        def step(block: EncoderBlock, state: Array, _: None) -> tuple[Array, Array]:
            return block(state, visible), state

        return scan_blocks(self.blocks, step, state, remat=remat)


def see_all(tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], backend: str = "auto") -> Attend:
    """Attention in which every token sees all tokens of its text, and padding neither sees nor is seen."""
    layout = TokenLayout.causal(tokens)
    layout = replace(layout, segment_ids=jnp.where(mask, PREFIX, PAD))
    return partial(attend, layout=layout, visibility=BIDIRECTIONAL, backend=backend)
