"""Structured einsums: linear in tokens for BlockRank, tiled for dense patterns, on any device.

For each part of the stream the visibility's rules say which keys can matter: whole parts that every query of the part
may see, and, for documents that see only their own segment, the keys of their own row. Only those logits are computed;
the same rules then mask within them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from blockrank.attention.precision import matmul_precision
from blockrank.attention.reference import masked_exponentials
from blockrank.attention.visibility import Part, Tokens, Visibility
from blockrank.layout import PAD, TokenLayout

MAX_TILE_LOGITS = 1 << 22
"""Query-key pairs per list and head held at once; longer query parts, and more rows, are tiled."""

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
    tokens: Tokens,
    keys: Keys,
    visibility: Visibility,
    window: Array | int | None,
    scale: float,
) -> tuple[Float[Array, "*b T K G H"], Float[Array, "*b T K G"]]:
    """Every query against every key given, masked by the rules: outputs and log-sum-exps.

    A kv head's query heads are laid beside its queries, so that each product is one large matrix per batch entry and
    head: XLA on CPU runs that three times faster than the einsum over separate axes, forward and backward. The softmax
    divides after the product with v, where there is less to divide.
    """
    *batch, t, kv_heads, groups, head_dim = q.shape
    precision = matmul_precision(q.dtype)
    stacked = jnp.einsum("...tkgh->...kgth", q).reshape(*batch, kv_heads, groups * t, head_dim)
    k, v = jnp.einsum("...skh->...ksh", keys.k), jnp.einsum("...skh->...ksh", keys.v)
    logits = jnp.einsum("...th,...sh->...ts", stacked, k, precision=precision, preferred_element_type=jnp.float32)
    mask = visibility.allowed(tokens, keys.tokens, window)[..., None, None, :, :]
    logits = scale * logits.reshape(*batch, kv_heads, groups, t, k.shape[-2])
    weights, total, lse = masked_exponentials(logits, mask)
    weights = weights.astype(q.dtype).reshape(*batch, kv_heads, groups * t, k.shape[-2])
    out = jnp.einsum("...ts,...sh->...th", weights, v, precision=precision, preferred_element_type=jnp.float32)
    out = (out.reshape(*batch, kv_heads, groups, t, head_dim) / total).astype(q.dtype)
    return jnp.einsum("...kgth->...tkgh", out), jnp.einsum("...kgt->...tkg", lse)


def _shared(
    q: Float[Array, "B T K G H"], tokens: Tokens, keys: Keys, visibility: Visibility, window: Array | int | None, scale
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B T K G"]]:
    """Queries that all see the same keys: outputs and log-sum-exps."""

    def attend(queries: tuple[Array, Tokens]) -> tuple[Array, Array]:
        return _attend(queries[0], queries[1], keys, visibility, window, scale)

    return _tiled(attend, (q, tokens), keys.k.shape[1])


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
            out, _ = _attend(queries, where, keys.first(shared.k.shape[1] + end), visibility, window, scale)
            outputs.append(out)
        return jnp.concatenate(outputs, axis=2)

    logits_per_row = row_length * (shared.k.shape[1] + row_length)
    return _tiled(attend, jax.tree.map(split, (q, tokens, own)), logits_per_row).reshape(q.shape)


def _tiled(attend: Callable[[Any], Out], queries: Any, logits_each: int) -> Out:
    """`attend(queries)`, a tile of axis 1 at a time, recomputed in the backward pass, when the logits would be large.

    `queries` is a tree of arrays [B, T, ...] whose entry along T costs `logits_each`; the result is one as well. The
    last tile is filled up with padding tokens.
    """
    t = jax.tree.leaves(queries)[0].shape[1]
    tile = max(1, MAX_TILE_LOGITS // max(logits_each, 1))
    if t <= tile:
        return attend(queries)
    count = -(-t // tile)
    tile = -(-t // count)

    def tiles(x: Array) -> Array:
        fill = PAD if jnp.issubdtype(x.dtype, jnp.integer) else 0
        x = jnp.pad(x, ((0, 0), (0, count * tile - t), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], count, tile, *x.shape[2:]), 1, 0)

    def joined(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], count * tile, *x.shape[3:])[:, :t]

    return jax.tree.map(joined, jax.lax.map(jax.checkpoint(attend), jax.tree.map(tiles, queries)))
