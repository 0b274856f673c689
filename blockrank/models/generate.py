"""Decoding over a layout with a key-value cache: what a ranker that writes its answer needs of a decoder.

The prompt is read once under any `Visibility`; each new token then continues the suffix and sees what a suffix token
may. Several continuations (beams) of one prompt share its keys and values: a step reads one token of each, and a mask
says which of the tokens written so far are its own. B batch, W beams, N paths, S path length, T prompt tokens,
C = T + new tokens, D model, V vocab, L layers, K kv heads, H head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from blockrank.attention.reference import reference_attention
from blockrank.attention.visibility import Tokens, Visibility
from blockrank.layout import SUFFIX, TokenLayout
from blockrank.models.decoder import Decoder
from blockrank.models.stack import Block, layer_windows, scan_blocks


class Cache(NamedTuple):
    """Keys and values of every layer after RoPE, with room for tokens to come; `prompt` says what the first T are."""

    k: Float[Array, "L B C K H"]
    v: Float[Array, "L B C K H"]
    prompt: Tokens


def prefill(
    model: Decoder, layout: TokenLayout, spare: int, *, visibility: Visibility, backend: str = "auto"
) -> tuple[Float[Array, "B D"], Cache]:
    """Read the prompt: the state after its last token, and a cache with room for `spare` more tokens."""
    states, (k, v) = model.keys_values(layout, visibility=visibility, backend=backend)
    last = last_places(layout)
    room = (0, 0), (0, 0), (0, spare), (0, 0), (0, 0)
    cache = Cache(jnp.pad(k, room), jnp.pad(v, room), Tokens.of(layout))
    return jnp.take_along_axis(states, last[:, None, None], axis=1)[:, 0], cache


def decode_step(
    model: Decoder,
    cache: Cache,
    slot: Int[Array, ""] | int,
    token: Int[Array, "B W"],
    position: Int[Array, " B"],
    own: Bool[Array, "B W new"],
    *,
    visibility: Visibility,
) -> tuple[Float[Array, "B W D"], Cache]:
    """Read one more token of each beam: the states after them, and the cache with them from `slot` on.

    `own`: which of the C - T slots after the prompt each beam sees, the one it is written to included. A layer's
    sliding window does not hide these: an answer is shorter than any.
    """
    where = Tokens(jnp.full_like(token, SUFFIX), jnp.broadcast_to(position[:, None], token.shape))

    def step(block: Block, state: Array, layer: tuple[Array, Array, Array | None]) -> tuple[Array, tuple[Array, Array]]:
        written: list[tuple[Array, Array]] = []

        def look(q: Array, k: Array, v: Array, *, sliding_window: Array | int | None) -> Array:
            written.append((k, v))
            keys, values = _put(layer[0], k, slot, 1), _put(layer[1], v, slot, 1)
            mask = jnp.concatenate([visibility.allowed(where, cache.prompt, sliding_window), own], axis=-1)
            return reference_attention(q, keys, values, mask, q.shape[-1] ** -0.5)

        return block(state, where.positions, look, layer[2]), written[0]

    state = model.embed(token, model.dtype)
    windows = layer_windows(model.config) if visibility.sequential else None
    state, (k, v) = scan_blocks(model.blocks, step, state, (cache.k, cache.v, windows))
    return state, Cache(_put(cache.k, k, slot, 2), _put(cache.v, v, slot, 2), cache.prompt)


def greedy(
    model: Decoder, layout: TokenLayout, count: int, *, visibility: Visibility, backend: str = "auto"
) -> Int[Array, "B count"]:
    """The `count` most likely next tokens after each prompt, one by one; the prompt must end in a suffix.

    From where logits are not numbers on, tokens are -1.
    """
    length, after = layout.shape.tokens, next_positions(layout)
    state, cache = prefill(model, layout, count - 1, visibility=visibility, backend=backend)
    first = _likeliest(model.head_logits(state))

    def step(carry: tuple[Array, Cache], index: Array) -> tuple[tuple[Array, Cache], Array]:
        token, cache = carry
        own = jnp.broadcast_to(jnp.arange(count - 1) <= index, (len(token), 1, count - 1))
        state, cache = decode_step(
            model, cache, length + index, token[:, None], after + index, own, visibility=visibility
        )
        token = _likeliest(model.head_logits(state[:, 0]))
        return (token, cache), token

    _, rest = jax.lax.scan(step, (first, cache), jnp.arange(count - 1))
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def _likeliest(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    numbers = ~jnp.isnan(logits).any(axis=-1)
    return jnp.where(numbers, jnp.argmax(logits, axis=-1), -1).astype(jnp.int32)


def last_places(layout: TokenLayout) -> Int[Array, " B"]:
    """Where in its stream each prompt's last token lies; the prompt must end in a suffix."""
    return jnp.sum(layout.segment_ids[:, layout.suffix] == SUFFIX, axis=1) - 1 + layout.suffix.start


def next_positions(layout: TokenLayout) -> Int[Array, " B"]:
    """The position of the token after each prompt."""
    return jnp.max(layout.positions[:, layout.suffix], axis=1) + 1


def _put(array: Array, new: Array, slot: Array | int, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, new.astype(array.dtype), slot, axis)
