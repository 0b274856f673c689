"""Pallas TPU kernel of streamed keys: every query against all keys, tile by tile, masked by one comparison.

A query sees the keys whose code is at most its own. That covers a suffix that sees prefix, documents and its own past
(codes 0, and 1 + index inside the suffix), causal text (codes are positions), and padding (a key's code `UNSEEN`, a
query's code -1). Tiles in which no query sees a key are skipped. Output and log-sum-exp of disjoint keys merge by
`blockrank.attention.merge`.

B batch, K kv heads, N = T * G folded queries, S keys, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from blockrank.attention.pallas_codes import UNSEEN
from blockrank.attention.pallas_tiles import (
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

KEY_TILE = 512
"""Few queries read many keys, so time is the keys' way from HBM: large tiles keep it busy."""
CHUNK_TILES = 8
"""Query tiles whose dq is kept in VMEM while the backward pass reads the keys once: at most 2.5 MB."""


def flash_attention(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    query_codes: Int[Array, "B T"],
    key_codes: Int[Array, "B S"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B T K G"]]:
    """Attention of each query to the keys with `key_codes <= query_codes`; output and float32 log-sum-exp.

    A query that sees nothing gives 0 and -inf. Differentiable in q, k, v.
    """
    batch, length, kv_heads, groups, head_dim = q.shape
    query_size, key_size = query_tile(length * groups), key_tile(k.shape[1], KEY_TILE, KEY_TILE)
    tiles = pl.cdiv(length * groups, query_size)
    chunks = pl.cdiv(tiles, CHUNK_TILES)
    queries, keys = chunks * pl.cdiv(tiles, chunks) * query_size, round_up(k.shape[1], key_size)
    folded = jnp.einsum("btkgh->bktgh", q).reshape(batch, kv_heads, length * groups, head_dim)
    k, v = (pad_axis(jnp.einsum("bskh->bksh", x), 2, keys) for x in (k, v))
    query_codes = pad_axis(jnp.repeat(query_codes, groups, axis=1), 1, queries, -1)
    key_codes = pad_axis(key_codes, 1, keys, UNSEEN)
    bounds = (
        jnp.max(query_codes.reshape(batch, -1, query_size), axis=-1),
        jnp.min(key_codes.reshape(batch, -1, key_size), axis=-1),
    )
    kernel = _flash_kernel(scale, query_size, key_size, chunks)
    out, lse = kernel(pad_axis(folded, 2, queries), k, v, query_codes[:, None], key_codes[:, None], bounds)
    out = out[:, :, : length * groups].reshape(batch, kv_heads, length, groups, head_dim)
    lse = lse[:, :, 0, : length * groups].reshape(batch, kv_heads, length, groups)
    return jnp.einsum("bktgh->btkgh", out), jnp.einsum("bktg->btkg", lse)


def _forward_kernel(query_max, key_min, q, k, v, query_codes, key_codes, out, lse, *scratch, scale: float) -> None:
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    softmax = Softmax(*scratch)

    @pl.when(j == 0)
    def _() -> None:
        softmax.reset()

    @pl.when(key_min[b * pl.num_programs(3) + j] <= query_max[b * pl.num_programs(2) + i])
    def _() -> None:
        softmax.add(q[...], k[...], v[...], query_codes[...] >= key_codes[...].T, scale)

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        result, lse[...] = softmax.result()
        out[...] = result.astype(out.dtype)


def _backward_kernel(*refs, scale: float) -> None:
    """Keys outside, a chunk's queries inside: dk and dv per key tile, dq of the whole chunk kept in VMEM."""
    query_max, key_min, q, k, v, query_codes, key_codes, dout, lse, delta = refs[:10]
    dq, dk, dv, dq_sum, dk_sum, dv_sum = refs[10:]
    b, j, i = (pl.program_id(axis) for axis in (0, 2, 3))
    key_tiles, tiles = (pl.num_programs(axis) for axis in (2, 3))

    @pl.when(i == 0)
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @pl.when(j == 0)
    def _() -> None:
        dq_sum[i] = jnp.zeros(dq_sum.shape[1:], dq_sum.dtype)

    @pl.when(key_min[b * key_tiles + j] <= query_max[b * tiles + i])
    def _() -> None:
        cotangent = Cotangent(dout[...], lse[...], delta[...])
        visible = query_codes[...] >= key_codes[...].T
        parts = tile_gradients(q[...], k[...], v[...], cotangent, visible, scale)
        dq_sum[i] += parts[0]
        dk_sum[...] += parts[1]
        dv_sum[...] += parts[2]

    @pl.when(j == key_tiles - 1)
    def _() -> None:
        size = q.shape[0]
        dq[pl.ds(pl.multiple_of(i * size, size), size), :] = (scale * dq_sum[i]).T.astype(dq.dtype)

    @pl.when(i == tiles - 1)
    def _() -> None:
        dk[...] = (scale * dk_sum[...]).astype(dk.dtype)
        dv[...] = dv_sum[...].astype(dv.dtype)


def _flash_kernel(scale: float, query_size: int, key_size: int, chunks: int) -> Callable:
    """(q [B K N H], k and v [B K S H], query codes [B 1 N], key codes [B 1 S], bounds) -> out [B K N H], lse [B K 1 N].

    `bounds`: largest query code of each query tile, smallest key code of each key tile. Lengths are whole tiles.
    """

    @jax.custom_vjp
    def attend(q, k, v, query_codes, key_codes, bounds):
        batch, kv_heads, n, width = q.shape
        queries = block((None, None, query_size, width), 0, 1, 2, None)
        keys = block((None, None, key_size, width), 0, 1, 3, None)
        query_line = block((None, 1, query_size), 0, None, 2)
        key_line = block((None, 1, key_size), 0, None, 3)
        line = block((None, None, 1, query_size), 0, 1, None, 2)
        return run_kernel(
            partial(_forward_kernel, scale=scale),
            (batch, kv_heads, n // query_size, k.shape[2] // key_size),
            Blocks([queries, keys, keys, query_line, key_line], [queries, line], Softmax.scratch(query_size, width)),
            [like(q), jax.ShapeDtypeStruct((batch, kv_heads, 1, n), jnp.float32)],
            bounds,
            (q, k, v, query_codes, key_codes),
            parallel=3,
            multiplications=2 * q.size * k.shape[2],
        )

    def forward(*inputs):
        results = attend(*inputs)
        return results, (*inputs, *results)

    def backward(residuals, cotangents):
        q, k, v, query_codes, key_codes, bounds, out, lse = residuals
        dout, dlse = cotangents
        lse, delta = backward_rows(out, lse, dout, dlse)
        if chunks == 1:
            dq, dk, dv = chunk_gradients(q, k, v, query_codes, key_codes, bounds, dout, lse, delta, k.dtype)
            return dq, dk, dv, None, None, None
        size, (query_max, key_min) = q.shape[2] // chunks, bounds

        def step(c: Array, sums: tuple) -> tuple:
            def part(x: Array, axis: int, size: int = size) -> Array:
                return jax.lax.dynamic_slice_in_dim(x, c * size, size, axis)

            codes = part(query_codes, 2), key_codes, (part(query_max, 1, size // query_size), key_min)
            given = part(dout, 2), part(lse, 3), part(delta, 3)
            dq, dk, dv = chunk_gradients(part(q, 2), k, v, *codes, *given, jnp.float32)
            return jax.lax.dynamic_update_slice_in_dim(sums[0], dq, c * size, 2), sums[1] + dk, sums[2] + dv

        # One chunk after the other, so that memory does not grow with queries times keys.
        start = jnp.zeros_like(q), *[jnp.zeros(k.shape, jnp.float32)] * 2
        dq, dk, dv = jax.lax.fori_loop(0, chunks, step, start)
        return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None, None

    def chunk_gradients(q, k, v, query_codes, key_codes, bounds, dout, lse, delta, dtype: jnp.dtype) -> list[Array]:
        """dq of one chunk of queries, and its share of dk and dv in `dtype`."""
        batch, kv_heads, n, width = q.shape
        queries = block((None, None, query_size, width), 0, 1, 3, None)
        keys = block((None, None, key_size, width), 0, 1, 2, None)
        query_line = block((None, 1, query_size), 0, None, 3)
        key_line = block((None, 1, key_size), 0, None, 2)
        line = block((None, None, 1, query_size), 0, 1, None, 3)
        chunk = block((None, None, n, width), 0, 1, None, None)
        key_sum = pltpu.VMEM((key_size, width), jnp.float32)
        return run_kernel(
            partial(_backward_kernel, scale=scale),
            (batch, kv_heads, k.shape[2] // key_size, n // query_size),
            Blocks(
                [queries, keys, keys, query_line, key_line, queries, line, line],
                [chunk, keys, keys],
                [pltpu.VMEM((n // query_size, width, query_size), jnp.float32), key_sum, key_sum],
            ),
            [like(q), like(k, dtype), like(v, dtype)],
            bounds,
            (q, k, v, query_codes, key_codes, dout, lse, delta),
            parallel=2,
            multiplications=5 * q.size * k.shape[2],
        )

    attend.defvjp(forward, backward)
    return attend
