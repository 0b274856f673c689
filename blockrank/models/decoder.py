"""The decoder: Mistral, Llama and Qwen by configuration.

B batch, T tokens, D model, V vocab, L layers, Q suffix, A label tokens; `l` is a score layer, 0-based.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from blockrank.attention.dispatch import attend
from blockrank.attention.precision import matmul_precision
from blockrank.attention.visibility import DENSE, Visibility
from blockrank.errors import UserError
from blockrank.layout import TokenLayout
from blockrank.models.config import DecoderConfig
from blockrank.models.layers import Linear, QueryKey, RMSNorm
from blockrank.models.stack import Block, Remat, gathered, layer_windows, scan_blocks, stacked_blocks, take_layers
from blockrank.parallel import gather_weight, spread_batch


class Embedding(nnx.Module):
    """Token embedding [V, D]; the row of `padding_id` gets no gradient when looked up. Ids outside V give NaN."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        shape = config.vocab_size, config.hidden_size
        self.embedding = nnx.Param(config.initializer_range * jax.random.normal(rngs.params(), shape, jnp.float32))
        self.padding_id = config.padding_id

    def __call__(self, tokens: Int[Array, "*n"], dtype: jnp.dtype) -> Float[Array, "*n D"]:
        table = gather_weight("embed.embedding", self.embedding[...], self.embedding[...].dtype)
        states = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False).astype(dtype)
        if self.padding_id is None:
            return states
        return jnp.where(tokens[..., None] == self.padding_id, jax.lax.stop_gradient(states), states)


class Probe(nnx.Module):
    """What is left of the score layer in a truncated model: its norm and its query and key projections."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = QueryKey(config, rngs=rngs)

    @staticmethod
    def of(block: Block, config: DecoderConfig) -> Probe:
        probe = nnx.eval_shape(lambda: Probe(config, rngs=nnx.Rngs(0)))
        probe.attention_norm, whole = block.attention_norm, block.attention
        for name in ("query", "key", "query_norm", "key_norm"):
            setattr(probe.attention, name, getattr(whole, name))
        return probe


class Trunk(nnx.Module):
    """Embedding and stacked blocks: what turns a layout into states."""

    config: DecoderConfig
    dtype: jnp.dtype
    embed: Embedding
    blocks: Block

    def states(
        self,
        layout: TokenLayout,
        *,
        visibility: Visibility,
        tap: int | None = None,
        backend: str = "auto",
        remat: Remat = "none",
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """States after the last block, and those that enter block `tap` (None or L: the same states again)."""
        return self._run(self.blocks, layout, visibility, backend, remat, tap)

    def states_at(
        self,
        layout: TokenLayout,
        score_layer: int,
        *,
        visibility: Visibility,
        backend: str = "auto",
        remat: Remat = "none",
    ) -> Float[Array, "B T D"]:
        """States that enter `score_layer`; later layers are not run, nor given a gradient."""
        self.check_layer(score_layer)
        return self._run(take_layers(self.blocks, slice(0, score_layer)), layout, visibility, backend, remat)[0]

    def check_layer(self, score_layer: int) -> None:
        """Raise `UserError` unless scores can be read at `score_layer`."""
        raise NotImplementedError

    def observe(
        self,
        layout: TokenLayout,
        look: Callable[[Block, Array, Any], Any],
        *,
        visibility: Visibility,
        backend: str = "auto",
    ) -> Any:
        """`look(block, state, window)` for the state that enters each layer, stacked over layers; for analysis.

        `window` is the layer's sliding window, None where it has none under this visibility.
        """
        forward = self._step(layout, visibility, backend)

        def step(block: Block, state: Array, window: Any) -> tuple[Array, Any]:
            return forward(block, state, window), look(block, state, window)

        state = self._embedded(layout)
        return scan_blocks(self.blocks, step, state, self._windows(visibility))[1]

    def keys_values(
        self, layout: TokenLayout, *, visibility: Visibility, backend: str = "auto"
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "L B T K H"], Float[Array, "L B T K H"]]]:
        """States after the last block, and the keys (after RoPE) and values of every block's attention."""

        def step(block: Block, state: Array, window: Any) -> tuple[Array, tuple[Array, Array]]:
            kept: list[tuple[Array, Array]] = []

            def keep(q: Array, k: Array, v: Array, *, sliding_window: Array | int | None) -> Array:
                kept.append((k, v))
                options = {"visibility": visibility, "backend": backend, "sliding_window": sliding_window}
                return attend(q, k, v, layout=layout, **options)

            return block(state, layout.positions, keep, window), kept[0]

        return scan_blocks(self.blocks, step, self._embedded(layout), self._windows(visibility))

    def _embedded(self, layout: TokenLayout) -> Float[Array, "B T D"]:
        check_tokens(layout.tokens, self.config.vocab_size)
        return spread_batch(self.embed(layout.tokens, self.dtype))

    def _step(self, layout: TokenLayout, visibility: Visibility, backend: str) -> Callable[[Block, Array, Any], Array]:
        visible = partial(attend, layout=layout, visibility=visibility, backend=backend)

        def step(block: Block, state: Array, window: Any) -> Array:
            block = gathered(block, "blocks", self.dtype)
            return spread_batch(block(state, layout.positions, visible, window))

        return step

    def _windows(self, visibility: Visibility) -> Int[Array, " L"] | None:
        """BlockRank's pattern is its own window: a model's sliding window applies to sequential positions only."""
        return layer_windows(self.config) if visibility.sequential else None

    def _run(
        self,
        blocks: Block,
        layout: TokenLayout,
        visibility: Visibility,
        backend: str,
        remat: Remat,
        tap: int | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        forward = self._step(layout, visibility, backend)
        state = self._embedded(layout)
        depth = jax.tree.leaves(nnx.state(blocks))[0].shape[0]
        windows = self._windows(visibility)
        xs = jnp.arange(depth), None if windows is None else windows[:depth]

        def plain(block: Block, state: Array, x: tuple[Array, Any]) -> tuple[Array, None]:
            return forward(block, state, x[1]), None

        def tapped(block: Block, carry: tuple[Array, Array], x: tuple[Array, Any]) -> tuple[tuple[Array, Array], None]:
            state, tapped_state = carry
            return (forward(block, state, x[1]), jnp.where(x[0] == tap, state, tapped_state)), None

        if tap is None or tap == depth:
            state = scan_blocks(blocks, plain, state, xs, remat=remat)[0] if depth else state
            return state, state
        return scan_blocks(blocks, tapped, (state, jnp.zeros_like(state)), xs, remat=remat)[0]


class Decoder(Trunk):
    """The whole language model: trunk, final norm and head (absent when tied to the embedding).

    `dtype` is the type of activations; parameters keep theirs.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.config = config
        self.dtype = dtype
        std = config.initializer_range
        self.embed = Embedding(config, rngs=rngs)
        self.blocks = stacked_blocks(config, rngs=rngs)
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied = config.tie_embeddings
        self.head = None if tied else Linear(config.hidden_size, config.vocab_size, std=std, rngs=rngs)

    def check_layer(self, score_layer: int) -> None:
        check_score_layer(score_layer, self.config)

    def probe(self, score_layer: int) -> Probe | Block:
        """The norm, query and key projections of `score_layer`."""
        self.check_layer(score_layer)
        return gathered(take_layers(self.blocks, score_layer), "blocks", self.dtype)

    def truncate(self, score_layer: int) -> TruncatedDecoder:
        """The smaller model that inference needs: the blocks before `score_layer`, and that layer's norm, q and k."""
        return TruncatedDecoder(self, score_layer)

    def head_logits(self, states: Float[Array, "*n D"]) -> Float[Array, "*n V"]:
        """Next-token logits, float32, of states after the last block."""
        states = self.final_norm(states)
        if self.head is None:
            kernel = gather_weight("embed.embedding", self.embed.embedding[...], self.dtype).T
        else:
            kernel = gather_weight("head.kernel", self.head.kernel[...], self.dtype)
        precision = matmul_precision(states.dtype)
        return jnp.matmul(states, kernel.astype(states.dtype), precision=precision, preferred_element_type=jnp.float32)

    def logits(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Next-token logits of plain text under causal attention."""
        return self.head_logits(self.states(TokenLayout.causal(tokens), visibility=DENSE)[0])

    def hidden_states(self, tokens: Int[Array, "B T"]) -> Float[Array, "L1 B T D"]:
        """States entering each layer, then those after the last, [L+1, B, T, D], before the final norm."""
        layout = TokenLayout.causal(tokens)
        entering = self.observe(layout, lambda _, state, __: state, visibility=DENSE)
        return jnp.concatenate([entering, self.states(layout, visibility=DENSE)[0][None]])


class TruncatedDecoder(Trunk):
    """A decoder cut before its score layer: same interface for scoring, a third less work for Mistral at layer 20."""

    def __init__(self, decoder: Decoder, score_layer: int):
        check_score_layer(score_layer, decoder.config)
        self.config = decoder.config.truncated(score_layer)
        self.dtype = decoder.dtype
        self.embed = decoder.embed
        self.blocks = take_layers(decoder.blocks, slice(0, score_layer))
        self.score_block = Probe.of(take_layers(decoder.blocks, score_layer), decoder.config)

    def check_layer(self, score_layer: int) -> None:
        if score_layer != self.config.num_layers:
            raise UserError(f"this model was truncated at layer {self.config.num_layers}, not {score_layer}")

    def probe(self, score_layer: int) -> Probe | Block:
        """The norm, query and key projections of the score layer."""
        self.check_layer(score_layer)
        return gathered(self.score_block, "score_block", self.dtype)


def check_score_layer(score_layer: int, config: DecoderConfig) -> None:
    """Raise `UserError` unless `score_layer` is one of the model's layers."""
    if not 0 <= score_layer < config.num_layers:
        raise UserError(f"score_layer={score_layer} is not one of the model's {config.num_layers} layers (0-based)")


def check_tokens(tokens: Int[Array, "B T"], vocab_size: int) -> None:
    """Raise `UserError` for an id without an embedding. Traced ids cannot be told: their states are NaN instead."""
    if isinstance(tokens, Tracer) or not tokens.size:
        return
    ids = np.asarray(tokens)
    for bad in (int(ids.min()), int(ids.max())):
        if not 0 <= bad < vocab_size:
            raise UserError(f"token id {bad} is none of the model's {vocab_size}: model and tokenizer do not belong")
