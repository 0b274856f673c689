"""Structured einsums: linear in tokens for BlockRank, tiled triangles for dense patterns, on any device.

For each part of the stream the visibility's rules say which keys can matter: whole parts that every query of the part
may see, and, for documents that see only their own segment, the keys of their own row. Only those logits are computed;
the same rules then mask within them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from blockrank.attention.precision import matmul_precision
from blockrank.attention.reference import masked_exponentials, masked_softmax_lse
from blockrank.attention.visibility import Part, Tokens, Visibility
from blockrank.layout import PAD, TokenLayout

MAX_TILE_LOGITS = 1 << 22
"""Query-key pairs per list and head held at once; longer query parts, and more rows, are tiled."""

KEY_TILE = 512
"""Keys that tiled queries take at once, or skip if none of them sees any: half of all in causal attention."""

ROW_TILE = 128
"""Queries of a row that share one range of keys: fewer waste fewer logits, more make larger products."""

Out = TypeVar("Out")


class Keys(NamedTuple):
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    tokens: Tokens

    @staticmethod
    def concatenate(parts: list[Keys]) -> Keys:
        k, v = (jnp.concatenate(arrays, axis=1) for arrays in zip(*((p.k, p.v) for p in parts), strict=True))
        return Keys(k, v, Tokens.concatenate([p.tokens for p in parts]))

    def first(self, count: int) -> Keys:
        """The first `count` keys of each row (arrays [B, M, S, ...])."""
        return jax.tree.map(lambda x: x[:, :, :count], self)


def xla_attention(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    layout: TokenLayout,
    visibility: Visibility,
    sliding_window: Array | int | None,
    scale: float,
) -> Float[Array, "B T K G H"]:
    """Attention over a whole layout; equals the oracle in values and gradients."""
    tokens = Tokens.of(layout)
    if visibility.sequential and q.shape[1] ** 2 > MAX_TILE_LOGITS:
        return _by_position(q, k, v, tokens, visibility, sliding_window, scale)
    slices = {Part.PREFIX: layout.prefix, Part.DOCUMENT: layout.rows, Part.SUFFIX: layout.suffix}

    def part(where: slice) -> Keys:
        return Keys(k[:, where], v[:, where], Tokens(*(field[:, where] for field in tokens)))

    outputs = []
    for query_part, where in slices.items():
        if where.start == where.stop:
            continue
        relations = {p: visibility.relation(query_part, p) for p in Part}
        own_row = query_part is Part.DOCUMENT and (r := relations[Part.DOCUMENT]) is not None and r.same_segment
        shared = [
            part(slices[p]) for p, r in relations.items() if r is not None and not (own_row and p is Part.DOCUMENT)
        ]
        queries = q[:, where], Tokens(*(field[:, where] for field in tokens))
        keys = Keys.concatenate(shared or [part(slice(0, 0))])
        if own_row:
            out = _rows(*queries, keys, part(where), layout.shape.row_length, visibility, sliding_window, scale)
        else:
            out, _ = _shared(*queries, keys, visibility, sliding_window, scale)
        outputs.append(out)
    return jnp.concatenate(outputs, axis=1)


def _by_position(
    q: Array, k: Array, v: Array, tokens: Tokens, visibility: Visibility, window: Array | int | None, scale: float
) -> Float[Array, "B T K G H"]:
    """Attention over the whole stream in reading order, so that tiles of keys lie wholly after those of queries.

    Rows hold documents by length, and the padding of all of them goes last.
    """
    last = jnp.iinfo(tokens.positions.dtype).max
    order = jnp.argsort(jnp.where(tokens.segment_ids == PAD, last, tokens.positions), axis=1)

    def take(x: Array, order: Array) -> Array:
        return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)

    q, k, v, tokens = jax.tree.map(lambda x: take(x, order), (q, k, v, tokens))
    out, _ = _shared(q, tokens, Keys(k, v, tokens), visibility, window, scale)
    return take(out, jnp.argsort(order, axis=1))


def xla_partial(
    q: Float[Array, "B Q K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    queries: Tokens,
    keys: Tokens,
    visibility: Visibility,
    scale: float,
) -> tuple[Float[Array, "B Q K G H"], Float[Array, "B Q K G"]]:
    """Attention of any queries to any keys, and the float32 log-sum-exp of each query's logits (-inf: sees nothing)."""
    return _shared(q, queries, Keys(k, v, keys), visibility, None, scale)


def _attend(
    q: Float[Array, "*b T K G H"],
    k: Float[Array, "*b S K H"],
    v: Float[Array, "*b S K H"],
    mask: Bool[Array, "*b T S"],
    scale: float,
) -> tuple[Float[Array, "*b T K G H"], Float[Array, "*b T K G"]]:
    """Every query against every key given, where `mask`: float32 outputs and log-sum-exps.

    A kv head's query heads are laid beside its queries, so that each product is one large matrix per batch entry and
    head: XLA on CPU runs that three times faster than the einsum over separate axes, forward and backward. The softmax
    divides after the product with v, where there is less to divide.
    """
    *batch, t, kv_heads, groups, head_dim = q.shape
    precision = matmul_precision(q.dtype)
    stacked = jnp.einsum("...tkgh->...kgth", q).reshape(*batch, kv_heads, groups * t, head_dim)
    k, v = jnp.einsum("...skh->...ksh", k), jnp.einsum("...skh->...ksh", v)
    logits = jnp.einsum("...th,...sh->...ts", stacked, k, precision=precision, preferred_element_type=jnp.float32)
    logits = scale * logits.reshape(*batch, kv_heads, groups, t, k.shape[-2])
    weights, total, lse = masked_exponentials(logits, mask[..., None, None, :, :])
    weights = weights.astype(q.dtype).reshape(*batch, kv_heads, groups * t, k.shape[-2])
    out = jnp.einsum("...ts,...sh->...th", weights, v, precision=precision, preferred_element_type=jnp.float32)
    out = out.reshape(*batch, kv_heads, groups, t, head_dim) / total
    return jnp.einsum("...kgth->...tkgh", out), jnp.einsum("...kgt->...tkg", lse)


def _shared(
    q: Float[Array, "B T K G H"], tokens: Tokens, keys: Keys, visibility: Visibility, window: Array | int | None, scale
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B T K G"]]:
    """Queries that all choose among the same keys: outputs and log-sum-exps."""

    def attend(queries: tuple[Array, Tokens]) -> tuple[Array, Array]:
        q, tokens = queries
        if q.shape[1] == t:
            out, lse = _attend(q, keys.k, keys.v, visibility.allowed(tokens, keys.tokens, window), scale)
        else:
            out, lse = _streamed(q, tokens, keys, visibility, window, scale)
        return out.astype(q.dtype), lse

    t = q.shape[1]
    return _tiled(attend, (q, tokens), keys.k.shape[1])


def _streamed(
    q: Float[Array, "B T K G H"], tokens: Tokens, keys: Keys, visibility: Visibility, window: Array | int | None, scale
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B T K G"]]:
    """A tile of queries against the keys, `KEY_TILE` at a time; a tile that none of them sees is skipped."""

    def step(state: tuple[Array, Array], tile: Keys) -> tuple[tuple[Array, Array], None]:
        mask = visibility.allowed(tokens, tile.tokens, window)

        def attend(state: tuple[Array, Array]) -> tuple[Array, Array]:
            out, lse = _attend(q, tile.k, tile.v, mask, scale)
            lses = jnp.stack([state[1], lse], axis=-1)
            shares, lse = masked_softmax_lse(lses, jnp.isfinite(lses))
            return shares[..., :1] * state[0] + shares[..., 1:] * out, lse

        return jax.lax.cond(mask.any(), attend, lambda state: state, state), None

    blind = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], -jnp.inf)
    state, _ = jax.lax.scan(step, blind, jax.tree.map(lambda x: _split(x, KEY_TILE), keys))
    return state


def _rows(
    q: Float[Array, "B T K G H"],
    tokens: Tokens,
    shared: Keys,
    own: Keys,
    row_length: int,
    visibility: Visibility,
    window: Array | int | None,
    scale: float,
) -> Float[Array, "B T K G H"]:
    """Packed rows: each row against the shared keys and its own row's, under one softmax.

    A row holds each document in reading order, so causal queries need no key of the row that lies after them: rows are
    taken in tiles of queries that stop there.
    """

    relation = visibility.relation(Part.DOCUMENT, Part.DOCUMENT)
    causal = relation is not None and relation.causal
    tile = -(-row_length // -(-row_length // ROW_TILE)) if causal else row_length

    def split(x: Array) -> Array:
        return x.reshape(x.shape[0], x.shape[1] // row_length, row_length, *x.shape[2:])

    def attend(rows: tuple[Array, Tokens, Keys]) -> Array:
        q, tokens, own = rows

        def with_shared(own: Array, shared: Array) -> Array:
            repeated = jnp.broadcast_to(shared[:, None], (*own.shape[:2], *shared.shape[1:]))
            return jnp.concatenate([repeated, own], axis=2)

        keys = jax.tree.map(with_shared, own, shared)
        outputs = []
        for start in range(0, row_length, tile):
            end = min(start + tile, row_length)
            queries, where = jax.tree.map(lambda x: x[:, :, start:end], (q, tokens))  # noqa: B023
            seen = keys.first(shared.k.shape[1] + end)
            mask = visibility.allowed(where, seen.tokens, window)
            outputs.append(_attend(queries, seen.k, seen.v, mask, scale)[0].astype(q.dtype))
        return jnp.concatenate(outputs, axis=2)

    logits_per_row = row_length * (shared.k.shape[1] + row_length)
    return _tiled(attend, jax.tree.map(split, (q, tokens, own)), logits_per_row).reshape(q.shape)


def _tiled(attend: Callable[[Any], Out], queries: Any, logits_each: int) -> Out:
    """`attend(queries)`, a tile of axis 1 at a time, recomputed in the backward pass, when the logits would be large.

    `queries` is a tree of arrays [B, T, ...] whose entry along T costs `logits_each`; the result is one as well.
    """
    t = jax.tree.leaves(queries)[0].shape[1]
    tile = max(1, MAX_TILE_LOGITS // max(logits_each, 1))
    if t <= tile:
        return attend(queries)
    tile = -(-t // -(-t // tile))

    def joined(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :t]

    tiles = jax.tree.map(lambda x: _split(x, tile), queries)
    return jax.tree.map(joined, jax.lax.map(jax.checkpoint(attend), tiles))


def _split(x: Array, tile: int) -> Array:
    """[B, T, ...] -> [tiles, B, tile, ...]; the last tile is filled up with padding tokens."""
    count = -(-x.shape[1] // tile)
    fill = PAD if jnp.issubdtype(x.dtype, jnp.integer) else 0
    spare = (0, count * tile - x.shape[1])
    x = jnp.pad(x, ((0, 0), spare, *((0, 0),) * (x.ndim - 2)), constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], count, tile, *x.shape[2:]), 1, 0)
