"""Exact nearest neighbours by inner product: matrix products over blocks of documents, merged by `lax.top_k`.

Q queries, N documents of a block, D embedding, k neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from blockrank.packing import round_up
from blockrank.retrieval.devices import everywhere, spread_rows

QUERIES = 1024
"""Queries that are compared with a block at once."""
DOCUMENTS = 32_768
"""Documents of a block, for each device; with `QUERIES`, a device holds 128 MB of scores."""


def exact_top_k(
    queries: Float[np.ndarray, "Q D"],
    blocks: Iterable[Float[np.ndarray, "N D"]],
    k: int,
    *,
    block_rows: int,
    mesh: Mesh,
) -> tuple[Float[np.ndarray, "Q k"], Int[np.ndarray, "Q k"]]:
    """Scores, best first, and positions (int32, over all blocks in order) of each query's `k` best documents.

    Ties go to the earlier document. Blocks have at most `block_rows` documents, and each is spread over all devices of
    `mesh`; memory is that of one block, of its scores for `QUERIES` queries, and of the result. Products are
    float32. With fewer than `k` documents the rest has score -inf and position -1.
    """
    rows = round_up(block_rows, mesh.size)
    width = min(QUERIES, 1 << max(len(queries) - 1, 0).bit_length())
    parts = [
        jax.device_put(_padded(queries[start : start + width], width), everywhere(mesh))
        for start in range(0, len(queries), width)
    ]
    nothing = np.full((width, k), -np.inf, np.float32), np.full((width, k), -1, np.int32)
    best = [jax.device_put(nothing, everywhere(mesh)) for _ in parts]
    offset = 0
    for block in blocks:
        placed = jax.device_put(_padded(block, rows), spread_rows(mesh))
        for i, part in enumerate(parts):
            best[i] = _merge(best[i], part, placed, np.int32(len(block)), np.int32(offset), mesh=mesh)
        offset += len(block)
    scores, positions = (
        np.concatenate([np.asarray(found[i]) for found in best] or [nothing[i]])[: len(queries)] for i in (0, 1)
    )
    return scores, np.where(np.isneginf(scores), -1, positions)


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    if len(rows) > count:
        raise ValueError(f"{len(rows)} rows do not fit in a block of {count}")
    return np.pad(np.asarray(rows, np.float32), ((0, count - len(rows)), (0, 0)))


@partial(jax.jit, static_argnames="mesh")
def _merge(
    best: tuple[Float[Array, "Q k"], Int[Array, "Q k"]],
    queries: Float[Array, "Q D"],
    block: Float[Array, "N D"],
    count: Int[Array, ""],
    offset: Int[Array, ""],
    *,
    mesh: Mesh,
) -> tuple[Float[Array, "Q k"], Int[Array, "Q k"]]:
    """The best so far merged with a block's first `count` documents; the earlier in the corpus first among equals."""
    k = best[0].shape[1]
    replicated, devices = PartitionSpec(), mesh.axis_names
    search = jax.shard_map(
        partial(_search, k=k, devices=devices),
        mesh=mesh,
        in_specs=(replicated, PartitionSpec(devices), replicated, replicated),
        out_specs=PartitionSpec(None, devices),
    )
    found = search(queries, block, count, offset)
    scores, positions = (jnp.concatenate(pair, axis=1) for pair in zip(best, found, strict=True))
    top, at = jax.lax.top_k(scores, k)
    return top, jnp.take_along_axis(positions, at, axis=1)


def _search(
    queries: Float[Array, "Q D"],
    block: Float[Array, "M D"],
    count: Int[Array, ""],
    offset: Int[Array, ""],
    *,
    k: int,
    devices: tuple[str, ...],
) -> tuple[Float[Array, "Q n"], Int[Array, "Q n"]]:
    """The best of one device's part of a block, n = min(k, M)."""
    first = jax.lax.axis_index(devices) * block.shape[0]
    scores = jnp.matmul(queries, block.T, precision=jax.lax.Precision.HIGHEST)
    scores = jnp.where(scores == 0, 0.0, scores)  # -0 sorts below 0
    scores = jnp.where(first + jnp.arange(block.shape[0]) < count, scores, -jnp.inf)
    top, at = jax.lax.top_k(scores, min(k, block.shape[0]))
    return top, offset + first + at
