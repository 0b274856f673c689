"""Where attention goes: sums per part of the prompt, as section 3 of arXiv 2510.05396 looks at them.

The parts of a prompt, in order, are the prefix, each document, and the suffix: C = N + 2 columns. Attention is summed
over the keys of a part while it is computed, a tile of queries at a time, so that memory is linear in tokens; only
`attention_weights` holds a [heads, T, T] matrix.

B batch, T tokens, N documents, C parts, L layers, K kv heads, G query heads per kv head, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from blockrank.attention.precision import matmul_precision
from blockrank.attention.reference import masked_softmax
from blockrank.attention.visibility import Tokens, Visibility
from blockrank.errors import UserError
from blockrank.layout import PAD, PREFIX, SUFFIX, TokenLayout
from blockrank.models.decoder import Decoder
from blockrank.models.stack import Block, take_layers

MAX_TILE_LOGITS = 1 << 24
"""Logits of all heads held at once."""

MAX_WEIGHTS = 1 << 28
"""Elements of the largest [B, heads, T, T] that `attention_weights` makes."""


def parts_of(layout: TokenLayout) -> Int[Array, "B T"]:
    """The column of each token: 0 the prefix, i + 1 document i, N + 1 the suffix, N + 2 padding."""
    segments, documents = jnp.asarray(layout.segment_ids), layout.shape.documents
    others = {PREFIX: 0, SUFFIX: documents + 1, PAD: documents + 2}
    columns = segments + 1
    for segment, column in others.items():
        columns = jnp.where(segments == segment, column, columns)
    return columns


def part_tokens(layout: TokenLayout) -> Int[Array, "B C"]:
    """How many tokens each part has."""
    return _by_part(jnp.ones(layout.tokens.shape), parts_of(layout), layout.shape.documents).astype(jnp.int32)


def token_attention(
    block: Block,
    states: Float[Array, "B T D"],
    layout: TokenLayout,
    queries: slice,
    visibility: Visibility,
    window: Any,
) -> Float[Array, "B Q C"]:
    """Of each query token of a slice of the stream, the attention on each part: mean over heads, float32.

    A token's row sums to 1, or to 0 for padding. `states` enter the block.
    """
    normed, attention, tokens = block.attention_norm(states), block.attention, Tokens.of(layout)
    k = attention.keys(normed, layout.positions)
    q = attention.queries(normed[:, queries], layout.positions[:, queries])
    where = Tokens(*(field[:, queries] for field in tokens))
    columns, documents = parts_of(layout), layout.shape.documents

    def tile(part: tuple[Array, Tokens]) -> Float[Array, "B t C"]:
        q, where = part
        weights = _weights(q, k, visibility.allowed(where, tokens, window)).mean(axis=(1, 2))
        return jnp.moveaxis(_by_part(jnp.moveaxis(weights, 1, 2), columns, documents), 1, 2)

    return _tiled(tile, (q, where), q.shape[0] * q.shape[2] * q.shape[3] * k.shape[1])


def part_attention(
    block: Block, states: Float[Array, "B T D"], layout: TokenLayout, visibility: Visibility, window: Any
) -> Float[Array, "B C C"]:
    """The attention that the tokens of each part (row) put on each part (column), mean over heads, summed over tokens.

    Divided by `part_tokens`, a row sums to 1 where the part has tokens.
    """
    per_token = token_attention(block, states, layout, slice(None), visibility, window)
    return _by_part(per_token, parts_of(layout), layout.shape.documents)


def attention_weights(
    block: Block, states: Float[Array, "B T D"], layout: TokenLayout, visibility: Visibility, window: Any = None
) -> Float[Array, "B K G T T"]:
    """All of one layer's attention, [.., query, key]. Quadratic in tokens: `UserError` for a prompt too long."""
    heads = block.attention.heads[0] * block.attention.heads[1]
    size = layout.tokens.shape[0] * heads * layout.shape.tokens**2
    if size > MAX_WEIGHTS:
        raise UserError(
            f"all attention of {layout.shape.tokens} tokens and {heads} heads is {4 * size / 2**30:.0f} GiB: take a "
            "shorter list, or the sums per part"
        )
    normed, tokens = block.attention_norm(states), Tokens.of(layout)
    q = block.attention.queries(normed, layout.positions)
    return _weights(q, block.attention.keys(normed, layout.positions), visibility.materialize(tokens, window))


def _weights(q: Float[Array, "B t K G H"], k: Float[Array, "B T K H"], mask: Array) -> Float[Array, "B K G t T"]:
    logits = jnp.einsum(
        "btkgh,bskh->bkgts", q, k, precision=matmul_precision(q.dtype), preferred_element_type=jnp.float32
    )
    return masked_softmax(logits * q.shape[-1] ** -0.5, mask[:, None, None])


def _by_part(values: Float[Array, "B T *n"], columns: Int[Array, "B T"], documents: int) -> Float[Array, "B C *n"]:
    """Values of tokens summed per part, padding left out."""
    summed = jax.vmap(lambda v, c: jax.ops.segment_sum(v, c, documents + 3))(values, columns)
    return summed[:, : documents + 2]


def _tiled(
    function: Callable[[tuple[Array, Tokens]], Array], queries: tuple[Array, Tokens], logits_each: int
) -> Float[Array, "B Q C"]:
    """`function` on a tile of queries (axis 1) at a time; the last tile is filled up with padding."""
    count = queries[0].shape[1]
    tile = max(1, min(count, MAX_TILE_LOGITS // max(logits_each, 1)))
    tiles = -(-count // tile)

    def cut(x: Array) -> Array:
        fill = PAD if jnp.issubdtype(x.dtype, jnp.integer) else 0
        x = jnp.pad(x, ((0, 0), (0, tiles * tile - count), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], tiles, tile, *x.shape[2:]), 1, 0)

    out = jnp.moveaxis(jax.lax.map(function, jax.tree.map(cut, queries)), 0, 1)
    return out.reshape(out.shape[0], tiles * tile, *out.shape[3:])[:, :count]


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention between the parts of one prompt, per layer: `weights` float32 [L, C, C], rows sum to 1.

    `tokens` int [C] are those of each part; part 0 is the prefix, the last is the suffix.
    """

    weights: Float[np.ndarray, "L C C"]
    tokens: Int[np.ndarray, " C"]

    def mean(self, first: int, last: int) -> Float[np.ndarray, "C C"]:
        """Over layers `first` to `last`, both included (the paper's figure is of 16 to 21)."""
        check_layers(first, last, len(self.weights))
        return self.weights[first : last + 1].mean(axis=0)

    def document_shares(self) -> Float[np.ndarray, "L 3"]:
        """Of the attention of all documents' tokens, the shares on prefix, own document and other documents."""
        counts = self.tokens[1:-1].astype(np.float64)
        rows = self.weights[:, 1:-1].astype(np.float64)
        prefix, own = rows[:, :, 0], np.diagonal(rows[:, :, 1:-1], axis1=1, axis2=2)
        others = rows[:, :, 1:-1].sum(axis=2) - own
        return np.stack([part @ counts for part in (prefix, own, others)], axis=1) / max(counts.sum(), 1)


def check_layers(first: int, last: int, layers: int) -> None:
    """Raises `UserError` unless `first` to `last` are layers of the model."""
    if not 0 <= first <= last < layers:
        raise UserError(f"layers {first} to {last} are not among the model's {layers} layers (0-based)")


class AttentionReader:
    """Attention of a model under a visibility; compiled once per shape of prompt.

    Layouts hold one list, with the positions the visibility is meant for.
    """

    def __init__(self, model: Decoder, visibility: Visibility, backend: str = "auto") -> None:
        graph, self._state = nnx.split(model)
        self._layers = model.config.num_layers
        options: dict[str, Any] = {"visibility": visibility, "backend": backend}

        def maps(state: nnx.State, layout: TokenLayout) -> tuple[Array, Array]:
            model = nnx.merge(graph, state)
            look = lambda block, states, window: part_attention(block, states, layout, visibility, window)  # noqa: E731
            return model.observe(layout, look, **options), part_tokens(layout)

        def whole(state: nnx.State, layout: TokenLayout, layer: int) -> Array:
            model = nnx.merge(graph, state)
            states = model.states_at(layout, layer, **options)
            window = model.config.windows[layer] if visibility.sequential else None
            return attention_weights(take_layers(model.blocks, layer), states, layout, visibility, window)

        self._maps, self._whole = jax.jit(maps), jax.jit(whole, static_argnums=2)

    def map(self, layout: TokenLayout) -> AttentionMap:
        """The attention between all parts of a list's prompt, at every layer."""
        documents = _documents(layout)
        weights, tokens = self._maps(self._state, layout)
        kept = np.r_[0 : documents + 1, layout.shape.documents + 1]
        counts = np.asarray(tokens)[0, kept]
        rows = np.asarray(weights)[:, 0][:, kept][:, :, kept]
        return AttentionMap(rows / np.maximum(counts, 1)[:, None], counts)

    def weights(self, layout: TokenLayout, layer: int) -> Float[np.ndarray, "heads T T"]:
        """All attention of one layer over one list's stream, which must be short (`attention_weights`)."""
        check_layers(layer, layer, self._layers)
        _documents(layout)
        weights = np.asarray(self._whole(self._state, layout, layer))[0]
        return weights.reshape(-1, *weights.shape[-2:])


def _documents(layout: TokenLayout) -> int:
    """How many documents the one list of a layout has."""
    if len(layout.tokens) != 1:
        raise UserError(f"attention maps are of one list, not {len(layout.tokens)}")
    return int(np.asarray(layout.document_mask).sum())
