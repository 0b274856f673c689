"""Pallas kernel for GPUs (its Triton lowering): queries against a stream of keys, tiles that nobody sees skipped.

Keys have a code each, queries an interval of codes: a query sees the codes in its interval and, with `shared`, all
codes below that up to the interval's end. So BlockRank's prefix and documents are one call, where a code is an index in
the stream and an interval the query's own segment up to itself; a suffix is one, and so is dense causal text, where
codes are positions.

A grid step has a tile of queries in registers and walks the keys it may see, or the reverse for the keys' gradients.
Nothing survives a grid step here and steps run in any order, so sums over many steps are taken in `splits` shares that
are added up outside. Tiles are powers of two, head dims are padded to one. Logits are [queries, keys], other than on
TPUs: the softmax's weights then stay in the registers that the tensor cores read them from.

B batch, K kv heads, N = T * G folded queries (row t * G + g), S keys, H head dim, I query tiles, J key tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from blockrank.attention.merge import merge_partial
from blockrank.attention.pallas_codes import UNSEEN
from blockrank.attention.pallas_tiles import (
    FLOOR,
    HIDDEN,
    NN,
    NT,
    TN,
    backward_rows,
    block,
    pad_axis,
    product,
)
from blockrank.layout import round_up

PROGRAMS = 264
"""Grid steps wanted at least, two for each multiprocessor of an H100: with fewer, long walks are split."""
LEAST_STEPS = 4
"""Tiles a share of a walk has at least."""
LOG2_E = math.log2(math.e)


class Tiles(NamedTuple):
    """Folded queries and keys per tile."""

    queries: int
    keys: int

    @staticmethod
    def forward(dtype: jnp.dtype) -> Tiles:
        return Tiles(128, 64) if dtype.itemsize == 2 else Tiles(64, 32)

    @staticmethod
    def backward(dtype: jnp.dtype) -> Tiles:
        return Tiles(64, 64) if dtype.itemsize == 2 else Tiles(32, 32)


class Codes(NamedTuple):
    """Who sees whom: first and last code each query sees (last -1: none), and each key's code (`UNSEEN`: by none)."""

    first: Int[Array, "B N"]
    last: Int[Array, "B N"]
    keys: Int[Array, "B S"]


def stream_attention(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    codes: Codes,
    *,
    shared: int = 0,
    scale: float,
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B T K G"]]:
    """Attention of each query to the keys with `first <= code <= last` or `code < shared, code <= last`.

    `codes.first` and `codes.last` are [B T]. Keys with codes below `shared` must be among the first `shared` of the
    stream. Returns output and float32 log-sum-exp; a query that sees nothing gives 0 and -inf. Differentiable in q, k
    and v.
    """
    batch, length, kv_heads, groups, head_dim = q.shape
    tiles = Tiles.forward(q.dtype)
    count, width = length * groups, max(16, pl.next_power_of_2(head_dim))
    queries, keys = round_up(count, tiles.queries), round_up(k.shape[1], tiles.keys)
    folded = jnp.einsum("btkgh->bktgh", q).reshape(batch, kv_heads, count, head_dim)
    folded = pad_axis(pad_axis(folded, 3, width), 2, queries)
    k, v = (pad_axis(pad_axis(jnp.einsum("bskh->bksh", x), 3, width), 2, keys) for x in (k, v))
    first, last = (jnp.repeat(x, groups, axis=1) for x in (codes.first, codes.last))
    codes = Codes(
        pad_axis(jnp.where(last < 0, UNSEEN, first), 1, queries, UNSEEN),
        pad_axis(last, 1, queries, -1),
        pad_axis(codes.keys, 1, keys, UNSEEN),
    )
    out, lse = _stream_kernel(scale, shared)(folded, k, v, codes)
    out = out[:, :, :count, :head_dim].reshape(batch, kv_heads, length, groups, head_dim)
    lse = lse[:, :, :count].reshape(batch, kv_heads, length, groups)
    return jnp.einsum("bktgh->btkgh", out), jnp.einsum("bktg->btkg", lse)


def _tiles_seen(codes: Codes, tiles: Tiles, shared: int) -> Bool[Array, "B I J"]:
    """Whether a tile of queries may see any key of a tile."""
    first = jnp.min(codes.first.reshape(codes.first.shape[0], -1, tiles.queries), axis=-1)[..., None]
    last = jnp.max(codes.last.reshape(codes.last.shape[0], -1, tiles.queries), axis=-1)[..., None]
    keys = codes.keys.reshape(codes.keys.shape[0], 1, -1, tiles.keys)
    least, largest = jnp.min(keys, axis=-1), jnp.max(jnp.where(keys == UNSEEN, -1, keys), axis=-1)
    return (least <= last) & ((largest >= first) | (least < shared))


def _walk(seen: Bool[Array, "*n J"], start: int = 0) -> Int[Array, "*n 2"]:
    """First and one past the last of the tiles seen, `start` being the index of the first given; (0, 0) if none is."""
    index = start + jnp.arange(seen.shape[-1], dtype=jnp.int32)
    end = jnp.max(jnp.where(seen, index + 1, 0), axis=-1, initial=0)
    first = jnp.min(jnp.where(seen, index, end[..., None]), axis=-1, initial=UNSEEN)
    return jnp.stack([jnp.minimum(first, end), end], axis=-1)


def _splits(programs: int, steps: int) -> int:
    """Shares of a walk over `steps` tiles where there are `programs` walks."""
    return max(1, min(steps // LEAST_STEPS, PROGRAMS // max(programs, 1)))


def _share(first: Array, end: Array, index: Array, splits: int) -> tuple[Array, Array]:
    """The part of a walk that split `index` takes."""
    size = pl.cdiv(end - first, splits)
    start = first + index * size
    return start, jnp.minimum(start + size, end)


def _visible(first: Array, last: Array, keys: Array, shared: int) -> Bool[Array, "N S"]:
    own = keys[None, :] >= first[:, None]
    return (keys[None, :] <= last[:, None]) & (own | (keys[None, :] < shared) if shared else own)


def _logits(q: Array, k: Array, visible: Array, scale: float) -> Float[Array, "N S"]:
    """To the base 2, which the hardware exponentiates."""
    return jnp.where(visible, scale * LOG2_E * product(q, k, NT), HIDDEN)


def _for_keys(bounds, first, last, key_codes, step: Callable, carry, *, tile: int, shared: int, splits: int):
    """`carry = step(rows of the key refs, visible, carry)` for each tile of keys that the query tile may see."""
    split = pl.program_id(3)
    first, last = first[...], last[...]

    def body(j: Array, carry):
        where = pl.ds(j * tile, tile)
        return step(where, _visible(first, last, key_codes[where], shared), carry)

    if shared:
        start = bounds[0]
        carry = jax.lax.fori_loop(start, jnp.where(split == 0, bounds[1], start), body, carry)
    return jax.lax.fori_loop(*_share(bounds[2], bounds[3], split, splits), body, carry)


def _forward_kernel(bounds, q, k, v, first, last, key_codes, out, lse, *, scale: float, **walk) -> None:
    queries = q[...]

    def step(where: pl.Slice, visible: Array, carry: tuple) -> tuple:
        peak, total, values = carry
        logits = _logits(queries, k[where, :], visible, scale)
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
        decay, weights = jnp.exp2(peak - new_peak), jnp.exp2(logits - new_peak[:, None])
        values = decay[:, None] * values + product(weights.astype(v.dtype), v[where, :], NN)
        return new_peak, decay * total + jnp.sum(weights, axis=1), values

    size = q.shape[0]
    carry = jnp.full((size,), FLOOR, jnp.float32), jnp.zeros((size,), jnp.float32), jnp.zeros(q.shape, jnp.float32)
    peak, total, values = _for_keys(bounds, first, last, key_codes, step, carry, **walk)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out[...] = (values / total[:, None]).astype(out.dtype)
    lse[...] = jnp.where(seen, (peak + jnp.log2(total)) / LOG2_E, -jnp.inf)


def _tile_gradients(q, k, v, dout, lse, delta, visible, scale: float) -> tuple[Array, Array]:
    """Weights and the logits' gradients of a tile, [N S] in the dtype of the inputs."""
    weights = jnp.exp2(_logits(q, k, visible, scale) - (LOG2_E * lse)[:, None])
    dlogits = weights * (product(dout, v, NT) - delta[:, None])
    return weights.astype(q.dtype), dlogits.astype(q.dtype)


def _query_gradient_kernel(
    bounds, q, k, v, first, last, key_codes, dout, lse, delta, dq, *, scale: float, **walk
) -> None:
    queries, cotangent, line, shift = q[...], dout[...], lse[...], delta[...]

    def step(where: pl.Slice, visible: Array, total: Array) -> Array:
        keys = k[where, :]
        _, dlogits = _tile_gradients(queries, keys, v[where, :], cotangent, line, shift, visible, scale)
        return total + product(dlogits, keys, NN)

    total = _for_keys(bounds, first, last, key_codes, step, jnp.zeros(q.shape, jnp.float32), **walk)
    dq[...] = (scale * total).astype(dq.dtype)


def _key_gradient_kernel(
    bounds, q, k, v, first, last, key_codes, dout, lse, delta, dk, dv, *, scale: float, tile: int, shared: int, splits
) -> None:
    keys, content, codes = k[...], v[...], key_codes[...]

    def body(i: Array, carry: tuple) -> tuple:
        where = pl.ds(i * tile, tile)
        queries, cotangent = q[where, :], dout[where, :]
        visible = _visible(first[where], last[where], codes, shared)
        weights, dlogits = _tile_gradients(queries, keys, content, cotangent, lse[where], delta[where], visible, scale)
        return carry[0] + product(dlogits, queries, TN), carry[1] + product(weights, cotangent, TN)

    zeros = jnp.zeros(k.shape, jnp.float32)
    share = _share(bounds[0], bounds[1], pl.program_id(3), splits)
    sums = jax.lax.fori_loop(*share, body, (zeros, zeros))
    dk[...] = (scale * sums[0]).astype(dk.dtype)
    dv[...] = sums[1].astype(dv.dtype)


def _run(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    inputs: Sequence[tuple[Array, pl.BlockSpec]],
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
) -> list[Array]:
    """Compiled where the program is lowered for CUDA, interpreted elsewhere."""
    arrays, in_specs = zip(*inputs, strict=True)
    shapes, out_specs = zip(*outputs, strict=True)
    call = partial(
        pl.pallas_call,
        kernel,
        grid=grid,
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        out_shape=list(shapes),
        compiler_params=triton.CompilerParams(num_warps=4 if arrays[1].shape[-1] <= 64 else 8, num_stages=2),
    )
    return jax.lax.platform_dependent(*arrays, cuda=call(), rocm=call(), default=call(interpret=True))


def _at(shape: Sequence[int], tile: int | None = None, *, split: bool = False) -> pl.BlockSpec:
    """A tile, or all, of the tokens of an array [B N], [B K N] or [B K N H] over the grid (tile, K, B, split).

    With `split` the array has a further axis in front, of which a grid step has its own entry.
    """
    lead = (2, 1)[: min(len(shape) - 1, 2)]
    length, *width = shape[len(lead) :]
    first = (3,) if split else ()
    sizes = (*(None,) * len(first + lead), tile or length, *width)
    return block(sizes, *first, *lead, 0 if tile else None, *(None,) * len(width))


def _shares(shape: Sequence[int], tile: int, splits: int, dtype: jnp.dtype) -> tuple:
    """An output of such a shape, a float32 one for each split if there are several."""
    whole = jax.ShapeDtypeStruct((splits, *shape), dtype if splits == 1 else jnp.float32)
    return whole, _at(shape, tile, split=True)


def _stream_kernel(scale: float, shared: int) -> Callable:
    """(q [B K N H], k and v [B K S H], codes) -> out [B K N H], lse [B K N]; lengths are whole tiles."""

    def by_query(kernel: Callable, tiles: Tiles, arrays: Sequence[Array], codes: Codes, more: Sequence[Array]) -> tuple:
        """What walks over keys have in common: kernel, grid, inputs, splits."""
        q, k, v = arrays
        seen, prefix = _tiles_seen(codes, tiles, shared), pl.cdiv(shared, tiles.keys)
        bounds = jnp.concatenate([_walk(seen[..., :prefix]), _walk(seen[..., prefix:], prefix)], axis=-1)
        grid = q.shape[2] // tiles.queries, q.shape[1], q.shape[0]
        splits = _splits(math.prod(grid), seen.shape[-1] - prefix)
        inputs = [
            (bounds, block((None, None, 4), 2, 0, None)),
            (q, _at(q.shape, tiles.queries)),
            *((x, _at(x.shape)) for x in (k, v)),
            *((x, _at(x.shape, tiles.queries)) for x in (codes.first, codes.last)),
            (codes.keys, _at(codes.keys.shape)),
            *((x, _at(x.shape, tiles.queries)) for x in more),
        ]
        run = partial(kernel, scale=scale, tile=tiles.keys, shared=shared, splits=splits)
        return run, (*grid, splits), inputs, splits

    @jax.custom_vjp
    def attend(q, k, v, codes):
        tiles = Tiles.forward(q.dtype)
        run, grid, inputs, splits = by_query(_forward_kernel, tiles, (q, k, v), codes, ())
        outputs = [
            _shares(q.shape, tiles.queries, splits, q.dtype),
            _shares(q.shape[:3], tiles.queries, splits, jnp.float32),
        ]
        out, lse = _run(run, grid, inputs, outputs)
        if splits == 1:
            return out[0], lse[0]
        return merge_partial(out, lse).astype(q.dtype), jax.scipy.special.logsumexp(lse, axis=0)

    def forward(q, k, v, codes):
        results = attend(q, k, v, codes)
        return results, (q, k, v, codes, *results)

    def backward(residuals, cotangents):
        q, k, v, codes, out, lse = residuals
        dout, dlse = cotangents
        lse, delta = (x[:, :, 0] for x in backward_rows(out, lse[:, :, None], dout, dlse[:, :, None]))
        tiles, more = Tiles.backward(q.dtype), (dout, lse, delta)
        run, grid, inputs, splits = by_query(_query_gradient_kernel, tiles, (q, k, v), codes, more)
        (dq,) = _run(run, grid, inputs, [_shares(q.shape, tiles.queries, splits, q.dtype)])
        prefix = pl.cdiv(shared, tiles.keys) * tiles.keys
        parts = [
            key_gradients(q, k[:, :, where], v[:, :, where], codes._replace(keys=codes.keys[:, where]), more, tiles)
            for where in (slice(0, prefix), slice(prefix, None))
            if codes.keys[:, where].size
        ]
        dk, dv = (jnp.concatenate(x, axis=2) for x in zip(*parts, strict=True))
        return jnp.sum(dq, axis=0).astype(q.dtype), dk, dv, None

    def key_gradients(q, k, v, codes: Codes, more: Sequence[Array], tiles: Tiles) -> list[Array]:
        """dk and dv of keys that are all seen by many tiles of queries (a prefix) or by few (documents)."""
        bounds = _walk(jnp.swapaxes(_tiles_seen(codes, tiles, shared), 1, 2))
        grid = k.shape[2] // tiles.keys, k.shape[1], k.shape[0]
        splits = _splits(math.prod(grid), q.shape[2] // tiles.queries)
        inputs = [
            (bounds, block((None, None, 2), 2, 0, None)),
            (q, _at(q.shape)),
            *((x, _at(x.shape, tiles.keys)) for x in (k, v)),
            *((x, _at(x.shape)) for x in (codes.first, codes.last)),
            (codes.keys, _at(codes.keys.shape, tiles.keys)),
            *((x, _at(x.shape)) for x in more),
        ]
        kernel = partial(_key_gradient_kernel, scale=scale, tile=tiles.queries, shared=shared, splits=splits)
        outputs = [_shares(k.shape, tiles.keys, splits, k.dtype)] * 2
        return [jnp.sum(x, axis=0).astype(k.dtype) for x in _run(kernel, (*grid, splits), inputs, outputs)]

    attend.defvjp(forward, backward)
    return attend
