"""Greedy decoding over a layout with a key-value cache: what a ranker that writes its answer needs of a decoder.

The prompt is read once under any `Visibility`; each new token then continues the suffix and sees what a suffix token
may. B batch, T prompt tokens, C = T + new tokens, D model, V vocab, L layers, K kv heads, G query heads per kv head,
H head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from blockrank.attention.dispatch import attend
from blockrank.attention.reference import reference_attention
from blockrank.attention.visibility import Tokens, Visibility
from blockrank.layout import PAD, SUFFIX, TokenLayout
from blockrank.models.decoder import Decoder
from blockrank.models.stack import Block, layer_windows, scan_blocks


class Cache(NamedTuple):
    """Keys and values of every layer after RoPE, and which tokens they belong to; slots not yet written are padding."""

    k: Float[Array, "L B C K H"]
    v: Float[Array, "L B C K H"]
    tokens: Tokens


def prefill(
    model: Decoder, layout: TokenLayout, spare: int, *, visibility: Visibility, backend: str = "auto"
) -> tuple[Float[Array, "B D"], Cache]:
    """Read the prompt: the state after its last token, and a cache with room for `spare` more tokens."""

    def step(block: Block, state: Array, window: Array | None) -> tuple[Array, tuple[Array, Array]]:
        kept: list[tuple[Array, Array]] = []

        def keep(q: Array, k: Array, v: Array, *, sliding_window: Array | int | None) -> Array:
            kept.append((k, v))
            options = {"visibility": visibility, "backend": backend, "sliding_window": sliding_window}
            return attend(q, k, v, layout=layout, **options)

        return block(state, layout.positions, keep, window), kept[0]

    states = model.embed(layout.tokens, model.dtype)
    windows = layer_windows(model.config) if visibility.sequential else None
    states, (k, v) = scan_blocks(model.blocks, step, states, windows)
    last = jnp.sum(layout.segment_ids[:, layout.suffix] == SUFFIX, axis=1) - 1 + layout.suffix.start
    tokens = Tokens.of(layout)
    room = (0, 0), (0, 0), (0, spare), (0, 0), (0, 0)
    cache = Cache(
        jnp.pad(k, room),
        jnp.pad(v, room),
        Tokens(
            jnp.pad(tokens.segment_ids, room[1:3], constant_values=PAD),
            jnp.pad(tokens.positions, room[1:3]),
        ),
    )
    return jnp.take_along_axis(states, last[:, None, None], axis=1)[:, 0], cache


def decode_step(
    model: Decoder,
    cache: Cache,
    slot: Int[Array, ""] | int,
    token: Int[Array, " B"],
    position: Int[Array, " B"],
    *,
    visibility: Visibility,
) -> tuple[Float[Array, "B D"], Cache]:
    """Read one more token of the suffix into `slot` of the cache: the state after it, and the cache with it."""
    where = Tokens(jnp.full_like(position, SUFFIX)[:, None], position[:, None])
    tokens = Tokens(*(_put(old, new, slot, 1) for old, new in zip(cache.tokens, where, strict=True)))

    def step(block: Block, state: Array, layer: tuple[Array, Array, Array | None]) -> tuple[Array, tuple[Array, Array]]:
        written: list[tuple[Array, Array]] = []

        def look(q: Array, k: Array, v: Array, *, sliding_window: Array | int | None) -> Array:
            written.append((k, v))
            keys, values = _put(layer[0], k, slot, 1), _put(layer[1], v, slot, 1)
            mask = visibility.allowed(where, tokens, sliding_window)
            return reference_attention(q, keys, values, mask, q.shape[-1] ** -0.5)

        return block(state, where.positions, look, layer[2]), written[0]

    state = model.embed(token[:, None], model.dtype)
    windows = layer_windows(model.config) if visibility.sequential else None
    state, (k, v) = scan_blocks(model.blocks, step, state, (cache.k, cache.v, windows))
    return state[:, 0], Cache(_put(cache.k, k, slot, 2), _put(cache.v, v, slot, 2), tokens)


def greedy(
    model: Decoder, layout: TokenLayout, count: int, *, visibility: Visibility, backend: str = "auto"
) -> Int[Array, "B count"]:
    """The `count` most likely next tokens after each prompt, one by one; the prompt must end in a suffix."""
    length, after = layout.shape.tokens, jnp.max(layout.positions[:, layout.suffix], axis=1) + 1
    state, cache = prefill(model, layout, count - 1, visibility=visibility, backend=backend)
    first = jnp.argmax(model.head_logits(state), axis=-1).astype(jnp.int32)

    def step(carry: tuple[Array, Cache], index: Array) -> tuple[tuple[Array, Cache], Array]:
        token, cache = carry
        state, cache = decode_step(model, cache, length + index, token, after + index, visibility=visibility)
        token = jnp.argmax(model.head_logits(state), axis=-1).astype(jnp.int32)
        return (token, cache), token

    _, rest = jax.lax.scan(step, (first, cache), jnp.arange(count - 1))
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def _put(array: Array, new: Array, slot: Array | int, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, new.astype(array.dtype), slot, axis)
