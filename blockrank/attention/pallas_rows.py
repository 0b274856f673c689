"""Pallas TPU kernel of packed rows: each query sees a prefix and an interval of its own row's keys.

Documents lie contiguously in a row, so a query's own segment up to itself is an interval of row indices. Per query tile
the key tiles that its intervals touch are known beforehand and prefetched as scalars; no other tile is read or
computed. The prefix lies whole in VMEM and is fetched once per kv head, a row's keys once per row.

B batch, K kv heads, M rows, R row length, N = R * G folded queries of a row, P prefix, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from blockrank.attention.pallas_codes import own_intervals
from blockrank.attention.pallas_tiles import (
    LANES,
    Blocks,
    Cotangent,
    Softmax,
    backward_rows,
    block,
    key_tile,
    like,
    pad_axis,
    query_tile,
    run_kernel,
    tile_gradients,
)
from blockrank.packing import round_up

PREFIX_TILE = 512
ROW_TILE = 128
"""Keys per step. A tile of queries spans few documents: small steps over the row skip more than they cost."""
MAX_RESIDENT_BYTES = 12 << 20
"""What the backward pass may keep of the 16 MB of VMEM that any TPU grants; the rest is for tiles."""


def row_attention_fits(row_length: int, prefix: int, head_dim: int, itemsize: int) -> bool:
    """Whether a row and the prefix lie in VMEM with the gradients of their keys and values.

    What goes in or out is held twice, one block for the copy under way; gradients are summed in float32, a row's in
    scratch and the prefix's where they go out.
    """
    row, shared = _tiles(row_length, prefix)
    per_row_key, per_prefix_key = 2 * itemsize + 2 * itemsize + 4, 2 * itemsize + 2 * 4
    keys = round_up(row_length, row) * per_row_key + round_up(prefix, shared) * per_prefix_key
    return 2 * round_up(head_dim, LANES) * keys <= MAX_RESIDENT_BYTES


def _tiles(row_length: int, prefix: int) -> tuple[int, int]:
    return key_tile(row_length, 256, ROW_TILE), key_tile(prefix, PREFIX_TILE, PREFIX_TILE // 2)


def row_attention(
    q: Float[Array, "B M R K G H"],
    k: Float[Array, "B M R K H"],
    v: Float[Array, "B M R K H"],
    prefix_k: Float[Array, "B P K H"],
    prefix_v: Float[Array, "B P K H"],
    segment_ids: Int[Array, "B M R"],
    prefix_length: Int[Array, " B"],
    *,
    scale: float,
) -> tuple[Float[Array, "B M R K G H"], Float[Array, "B M R K G"]]:
    """Attention of every row token to the first `prefix_length` prefix keys and its own segment up to itself.

    Tokens of one segment (id >= 0) must be contiguous in their row, in order; negative ids are padding. Returns output
    and float32 log-sum-exp; padding gives 0 and -inf. Differentiable in q, k, v, prefix_k, prefix_v.
    """
    batch, rows, length, kv_heads, groups, head_dim = q.shape
    tile, prefix_tile = _tiles(length, prefix_k.shape[1])
    queries = round_up(length * groups, query_tile(length * groups))
    folded = jnp.einsum("bmrkgh->bkmrgh", q).reshape(batch, kv_heads, rows, length * groups, head_dim)
    k, v = (pad_axis(jnp.einsum("bmrkh->bkmrh", x), 3, round_up(length, tile)) for x in (k, v))
    size = round_up(max(prefix_k.shape[1], 1), prefix_tile)
    prefix_k, prefix_v = (pad_axis(jnp.einsum("bpkh->bkph", x), 2, size) for x in (prefix_k, prefix_v))
    intervals = pad_axis(jnp.repeat(own_intervals(segment_ids), groups, axis=-1), 3, queries, -1)
    bounds = _tile_bounds(intervals, tile)
    kernel = _row_kernel(scale, tile, prefix_tile)
    out, lse = kernel(pad_axis(folded, 3, queries), k, v, prefix_k, prefix_v, intervals, (*bounds, prefix_length))
    out = out[..., : length * groups, :].reshape(batch, kv_heads, rows, length, groups, head_dim)
    lse = lse[..., 0, : length * groups].reshape(batch, kv_heads, rows, length, groups)
    return jnp.einsum("bkmrgh->bmrkgh", out), jnp.einsum("bkmrg->bmrkg", lse)


def _tile_bounds(intervals: Int[Array, "B M 2 N"], tile: int) -> tuple[Int[Array, "B M I"], Int[Array, "B M I"]]:
    """Per query tile the first key tile its intervals touch, and one past the last; equal where all is padding."""
    by_tile = intervals.reshape(*intervals.shape[:3], -1, query_tile(intervals.shape[-1]))
    first = jnp.min(jnp.where(by_tile[:, :, 0] < 0, jnp.iinfo(jnp.int32).max, by_tile[:, :, 0]), axis=-1) // tile
    end = jnp.max(by_tile[:, :, 1], axis=-1) // tile + 1
    return jnp.minimum(first, end), end


def _for_visible_tiles(scalars: tuple, tile: int, prefix_tile: int, intervals: Array, step: Callable) -> None:
    """Call `step(in_prefix, rows of the key refs, visible)` for each tile of keys that the query tile may see."""
    first_tile, end_tile, prefix_length = scalars
    b, m, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    at = (b * pl.num_programs(2) + m) * pl.num_programs(3) + i
    first, end, length = first_tile[at], end_tile[at], prefix_length[b]
    low, high = intervals[0:1, :], intervals[1:2, :]

    def key_index(tile: int, start: Array) -> Array:
        return start + jax.lax.broadcasted_iota(jnp.int32, (tile, intervals.shape[-1]), 0)

    def prefix_step(j: Array, _: None) -> None:
        start = pl.multiple_of(j * prefix_tile, prefix_tile)
        step(True, pl.ds(start, prefix_tile), (key_index(prefix_tile, start) < length) & (high >= 0))

    def own_step(j: Array, _: None) -> None:
        start = pl.multiple_of(j * tile, tile)
        index = key_index(tile, start)
        step(False, pl.ds(start, tile), (index >= low) & (index <= high))

    jax.lax.fori_loop(0, jnp.where(end > first, pl.cdiv(length, prefix_tile), 0), prefix_step, None)
    jax.lax.fori_loop(first, end, own_step, None)


def _forward_kernel(*refs, scale: float, tile: int, prefix_tile: int) -> None:
    *scalars, q, k, v, prefix_k, prefix_v, intervals, out, lse, peak, total, values = refs
    softmax = Softmax(peak, total, values)
    softmax.reset()

    def step(in_prefix: bool, where: pl.Slice, visible: Array) -> None:
        keys, content = (prefix_k, prefix_v) if in_prefix else (k, v)
        softmax.add(q[...], keys[where, :], content[where, :], visible, scale)

    _for_visible_tiles(tuple(scalars), tile, prefix_tile, intervals, step)
    result, lse[...] = softmax.result()
    out[...] = result.astype(out.dtype)


def _backward_kernel(*refs, scale: float, tile: int, prefix_tile: int) -> None:
    """Accumulates dq over key tiles, a row's dk and dv over its query tiles, the prefix's over all rows."""
    *scalars, q, k, v, prefix_k, prefix_v, intervals, dout, lse, delta = refs[:12]
    dq, dk, dv, prefix_dk, prefix_dv, dq_sum, dk_sum, dv_sum = refs[12:]
    m, i = pl.program_id(2), pl.program_id(3)
    cotangent = Cotangent(dout[...], lse[...], delta[...])
    dq_sum[...] = jnp.zeros_like(dq_sum)

    @pl.when((m == 0) & (i == 0))
    def _() -> None:
        prefix_dk[...] = jnp.zeros_like(prefix_dk)
        prefix_dv[...] = jnp.zeros_like(prefix_dv)

    @pl.when(i == 0)
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    def step(in_prefix: bool, where: pl.Slice, visible: Array) -> None:
        keys, content, to_k, to_v = (prefix_k, prefix_v, prefix_dk, prefix_dv) if in_prefix else (k, v, dk_sum, dv_sum)
        parts = tile_gradients(q[...], keys[where, :], content[where, :], cotangent, visible, scale)
        dq_sum[...] += parts[0]
        to_k[where, :] += scale * parts[1]
        to_v[where, :] += parts[2]

    _for_visible_tiles(tuple(scalars), tile, prefix_tile, intervals, step)
    dq[...] = (scale * dq_sum[...]).T.astype(dq.dtype)

    @pl.when(i == pl.num_programs(3) - 1)
    def _() -> None:
        dk[...] = dk_sum[...].astype(dk.dtype)
        dv[...] = dv_sum[...].astype(dv.dtype)


class _RowBlocks(NamedTuple):
    """Block specs over the grid (B, K, M, query tile)."""

    queries: pl.BlockSpec
    own: pl.BlockSpec
    prefix: pl.BlockSpec
    intervals: pl.BlockSpec
    line: pl.BlockSpec

    @staticmethod
    def of(q: Array, k: Array, prefix_k: Array) -> _RowBlocks:
        width, size = q.shape[-1], query_tile(q.shape[-2])
        return _RowBlocks(
            queries=block((None, None, None, size, width), 0, 1, 2, 3, None),
            own=block((None, None, None, k.shape[-2], width), 0, 1, 2, None, None),
            prefix=block((None, None, prefix_k.shape[-2], width), 0, 1, None, None),
            intervals=block((None, None, 2, size), 0, 2, None, 3),
            line=block((None, None, None, 1, size), 0, 1, 2, None, 3),
        )


def _row_kernel(scale: float, tile: int, prefix_tile: int) -> Callable:
    """(q [B K M N H], k and v [B K M R H], prefix_k and prefix_v [B K P H], intervals [B M 2 N], scalars) -> out, lse.

    out [B K M N H], lse [B K M 1 N]. Lengths are whole numbers of tiles.
    """
    options = {"scale": scale, "tile": tile, "prefix_tile": prefix_tile}

    def grid(q: Array) -> tuple[int, ...]:
        return *q.shape[:3], q.shape[3] // query_tile(q.shape[3])

    @jax.custom_vjp
    def attend(q, k, v, prefix_k, prefix_v, intervals, scalars):
        at = _RowBlocks.of(q, k, prefix_k)
        return run_kernel(
            partial(_forward_kernel, **options),
            grid(q),
            Blocks(
                [at.queries, at.own, at.own, at.prefix, at.prefix, at.intervals],
                [at.queries, at.line],
                Softmax.scratch(query_tile(q.shape[3]), q.shape[4]),
            ),
            [like(q), jax.ShapeDtypeStruct((*q.shape[:3], 1, q.shape[3]), jnp.float32)],
            scalars,
            (q, k, v, prefix_k, prefix_v, intervals),
            parallel=4,
            multiplications=2 * q.size * (k.shape[3] + prefix_k.shape[2]),
        )

    def forward(*inputs):
        results = attend(*inputs)
        return results, (*inputs, *results)

    def backward(residuals, cotangents):
        q, k, v, prefix_k, prefix_v, intervals, scalars, out, lse = residuals
        dout, dlse = cotangents
        lse, delta = backward_rows(out, lse, dout, dlse)
        at = _RowBlocks.of(q, k, prefix_k)
        row = pltpu.VMEM(k.shape[-2:], jnp.float32)
        grads = run_kernel(
            partial(_backward_kernel, **options),
            grid(q),
            Blocks(
                [at.queries, at.own, at.own, at.prefix, at.prefix, at.intervals, at.queries, at.line, at.line],
                [at.queries, at.own, at.own, at.prefix, at.prefix],
                [pltpu.VMEM((q.shape[4], query_tile(q.shape[3])), jnp.float32), row, row],
            ),
            [like(q), like(k), like(v), like(prefix_k, jnp.float32), like(prefix_v, jnp.float32)],
            scalars,
            (q, k, v, prefix_k, prefix_v, intervals, dout, lse, delta),
            parallel=2,
            multiplications=5 * q.size * (k.shape[3] + prefix_k.shape[2]),
        )
        dq, dk, dv, prefix_dk, prefix_dv = grads
        return dq, dk, dv, prefix_dk.astype(prefix_k.dtype), prefix_dv.astype(prefix_v.dtype), None, None

    attend.defvjp(forward, backward)
    return attend
