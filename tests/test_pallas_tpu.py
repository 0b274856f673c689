"""The Pallas TPU kernels, interpreted, tile by tile: many tiles, shards, what fits."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import assert_same, dense, normal
from strategies import batches
from test_attention import ENCODER, lay_out
from test_pallas import BATCH

from blockrank.attention import pallas_flash, pallas_tpu
from blockrank.attention.merge import merge_partial
from blockrank.attention.pallas_codes import UNSEEN
from blockrank.attention.pallas_flash import flash_attention
from blockrank.attention.pallas_rows import row_attention, row_attention_fits
from blockrank.attention.visibility import BLOCKRANK, DENSE, Visibility
from blockrank.layout import PAD
from blockrank.prompts.encode import PromptSegments


def test_rows_of_many_tiles() -> None:
    """Documents anywhere in rows of three key tiles, two query tiles, three prefix tiles; a row of padding alone."""
    batch, rows, length, prefix, groups, width = 2, 2, 300, 600, 3, 16
    segments = np.full((batch, rows, length), PAD, np.int32)
    for b, m, start, end, name in [(0, 0, 3, 140, 0), (0, 0, 140, 141, 2), (0, 0, 150, 300, 1), (1, 1, 127, 257, 0)]:
        segments[b, m, start:end] = name
    prefix_length = np.asarray([600, 1], np.int32)
    arrays = normal(
        0,
        (batch, rows, length, 1, groups, width),
        *[(batch, rows, length, 1, width)] * 2,
        *[(batch, prefix, 1, width)] * 2,
    )
    own = (segments[..., :, None] == segments[..., None, :]) & (segments >= 0)[..., None]
    own &= np.tri(length, dtype=bool)
    shared = (np.arange(prefix) < prefix_length[:, None])[:, None, None] & (segments >= 0)[..., None]
    mask = np.concatenate([shared, own], axis=-1).reshape(batch * rows, length, prefix + length)

    def oracle(q, k, v, prefix_k, prefix_v):
        def keys(shared, own):
            repeated = jnp.broadcast_to(shared[:, None], (batch, rows, *shared.shape[1:]))
            return jnp.concatenate([repeated, own], axis=2).reshape(batch * rows, -1, *shared.shape[2:])

        out, lse = dense(q.reshape(batch * rows, *q.shape[2:]), keys(prefix_k, k), keys(prefix_v, v), mask, width**-0.5)
        return out.reshape(q.shape), lse.reshape(q.shape[:-1])

    kernel = partial(row_attention, segment_ids=segments, prefix_length=prefix_length, scale=width**-0.5)
    assert_same(kernel, oracle, arrays)


def test_streamed_keys_of_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two query chunks, three key tiles; blind queries, unseen keys, tiles no query sees."""
    monkeypatch.setattr(pallas_flash, "CHUNK_TILES", 1)
    monkeypatch.setattr(pallas_flash, "KEY_TILE", 128)
    length, keys, groups, width = 330, 300, 2, 16
    arrays = normal(1, (2, length, 1, groups, width), *[(2, keys, 1, width)] * 2)
    rng = np.random.default_rng(2)
    query_codes = rng.integers(-1, 40, (2, length)).astype(np.int32)
    key_codes = rng.integers(0, 50, (2, keys)).astype(np.int32)
    key_codes[0, 128:256] = UNSEEN
    key_codes[1, ::3] = UNSEEN
    query_codes[0, :5] = -1
    mask = key_codes[:, None] <= query_codes[..., None]
    assert_same(
        partial(flash_attention, query_codes=query_codes, key_codes=key_codes, scale=width**-0.5),
        lambda q, k, v: dense(q, k, v, mask, width**-0.5),
        arrays,
    )


def test_shards_merge_to_the_whole() -> None:
    """A suffix over two shards of keys: the gradient goes through the log-sum-exps."""
    length, keys, width = 6, 40, 16
    arrays = normal(3, (1, length, 2, 2, width), *[(1, keys, 2, width)] * 2)
    query_codes = 1 + np.arange(length, dtype=np.int32)[None]
    key_codes = np.concatenate([np.zeros(keys - length, np.int32), query_codes[0]])[None]
    key_codes[0, 3:7] = UNSEEN

    def run(parts: list[slice], q, k, v):
        results = [flash_attention(q, k[:, p], v[:, p], query_codes, key_codes[:, p], scale=width**-0.5) for p in parts]
        return merge_partial(*zip(*results, strict=True)), results[0][1]

    def oracle(q, k, v):
        out, _ = dense(q, k, v, key_codes[:, None] <= query_codes[..., None], width**-0.5)
        return out, dense(q, k[:, :20], v[:, :20], (key_codes[:, None] <= query_codes[..., None])[..., :20], 0.25)[1]

    assert_same(partial(run, [slice(0, 20), slice(20, keys)]), oracle, arrays)


def test_tokens_of_a_document_are_contiguous_in_their_row() -> None:
    """What the row kernel builds on, and `TokenLayout` gives."""

    @settings(max_examples=30, deadline=None)
    @given(batches(), st.sampled_from(["packed", "chunked"]))
    def check(batch: list[PromptSegments], packing: str) -> None:
        layout = lay_out(batch, BLOCKRANK, packing=packing)
        for segments, positions in zip(layout.segment_ids, layout.positions, strict=True):
            for document in range(layout.shape.documents):
                where = np.flatnonzero(segments == document)
                if len(where):
                    assert (np.diff(where) == 1).all()
                    assert (np.diff(positions[where]) == 1).all()
                    assert len({(w - layout.shape.prefix) // layout.shape.row_length for w in where}) == 1

    check()


def test_why_not() -> None:
    layout = lay_out(BATCH, BLOCKRANK, bucket=False)

    def ask(
        head_dim: int = 64, dtypes: str = "fff", pattern: Visibility = BLOCKRANK, sliding_window: int | None = None
    ):
        kinds = {"f": jnp.float32, "b": jnp.bfloat16, "h": jnp.float16}
        shapes = [(3, layout.shape.tokens, 2, *heads, head_dim) for heads in ((2,), (), ())]
        arrays = [jax.ShapeDtypeStruct(s, kinds[d]) for s, d in zip(shapes, dtypes, strict=True)]
        return pallas_tpu.why_not(*arrays, layout, pattern, sliding_window)

    assert ask() is ask(dtypes="bbb") is ask(80) is ask(128) is ask(pattern=DENSE) is None
    assert ask(pattern=ENCODER) == "visibility 'encoder'"
    assert ask(pattern=DENSE, sliding_window=9) == "a sliding window"
    assert ask(dtypes="fbb") == "dtypes bfloat16, float32"
    assert ask(dtypes="hhh") == "dtypes float16"
    assert ask(72) == "head_dim 72"
    assert ask(256) == "head_dim 256"
    assert row_attention_fits(2816, 1024, 128, 2)
    assert row_attention_fits(1536, 1024, 128, 4)
    assert not row_attention_fits(2048, 1024, 128, 4)
    assert not row_attention_fits(4096, 1024, 128, 2)
