"""The Pallas TPU kernels, interpreted, against the dense oracle: values, log-sum-exps, gradients, isolation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from strategies import HASTE, SHAPE, batches, numbered_prompt
from test_attention import ENCODER, Heads, lay_out, tensors

from blockrank.attention import pallas_flash, pallas_tpu
from blockrank.attention.dispatch import attend, resolve_backend
from blockrank.attention.merge import merge_partial
from blockrank.attention.pallas_flash import UNSEEN, flash_attention
from blockrank.attention.pallas_rows import row_attention, row_attention_fits
from blockrank.attention.visibility import BLOCKRANK, DENSE, Visibility
from blockrank.layout import PAD, TokenLayout
from blockrank.prompts.encode import PromptSegments

TOLERANCE = 1e-5


def with_gradients(function: Callable, arrays: tuple, cotangents: tuple) -> tuple:
    """Outputs of `function(*arrays)`, and the gradients of their products with `cotangents`."""
    out, pull = jax.vjp(function, *arrays)
    return out, pull(cotangents)


@partial(jax.jit, static_argnames=("pattern", "backend"), compiler_options=HASTE)
def through(q, k, v, cotangent, layout, *, pattern: Visibility, backend: str):
    out, grads = with_gradients(
        lambda *x: attend(*x, layout=layout, visibility=pattern, backend=backend), (q, k, v), cotangent
    )
    return {"out": out, "dq": grads[0], "dk": grads[1], "dv": grads[2]}


def assert_equals_the_oracle(layout: TokenLayout, pattern: Visibility, heads: Heads, seed: int = 0) -> None:
    arrays = tensors(layout, heads, seed)
    ours, oracle = (through(*arrays, layout, pattern=pattern, backend=name) for name in ("pallas_tpu", "reference"))
    padding = layout.segment_ids == PAD
    for name in oracle:
        np.testing.assert_allclose(ours[name], oracle[name], rtol=0, atol=TOLERANCE, err_msg=name)
        assert not np.asarray(ours[name])[padding].any(), name


BATCH = [
    numbered_prompt(5, [9, 3, 12, 5, 16, 1], 6),
    numbered_prompt(8, [4, 4], 8),
    numbered_prompt(1, [], 2),
]
"""With padding everywhere: rows and whole rows, prefixes, suffixes, and a list without documents."""


@pytest.mark.parametrize(
    ("pattern", "heads"),
    [(BLOCKRANK, Heads(2, 2, 64)), (BLOCKRANK, Heads(1, 3, 80)), (DENSE, Heads(1, 2, 128))],
    ids=["blockrank, head_dim 64", "blockrank, head_dim 80", "dense, head_dim 128"],
)
def test_values_and_gradients_equal_the_oracle(pattern: Visibility, heads: Heads) -> None:
    assert_equals_the_oracle(lay_out(BATCH, pattern, row_length=24, bucket=False), pattern, heads)


@settings(max_examples=6, deadline=None)
@given(batches(), st.integers(0, 10**6))
def test_random_packings(batch: list[PromptSegments], seed: int) -> None:
    batch = [*batch, *[numbered_prompt(1, [], 2)] * (3 - len(batch))]
    assert_equals_the_oracle(lay_out(batch, BLOCKRANK, shape=SHAPE), BLOCKRANK, Heads(1, 2, 16), seed)


def test_documents_do_not_reach_one_another() -> None:
    """Of the gradient of one document's output, exactly nothing arrives outside the prefix and itself."""
    layout = lay_out([BATCH[0]] * 3, BLOCKRANK, shape=SHAPE)
    q, k, v, cotangent = tensors(layout, Heads(1, 2, 16))
    segments = np.asarray(layout.segment_ids)
    for document in (0, 4):
        alone = cotangent * (segments == document)[..., None, None, None]
        results = through(q, k, v, alone, layout, pattern=BLOCKRANK, backend="pallas_tpu")
        for name in ("dq", "dk", "dv"):
            touched = np.asarray(results[name]).any(axis=tuple(range(2, results[name].ndim)))
            allowed = segments == document if name == "dq" else (segments == document) | (segments == -1)
            assert touched.any(), name
            assert not touched[~allowed].any(), name


def dense(q, k, v, mask, scale):
    """Output [B T K G H] and log-sum-exp [B T K G] under a mask [B T S]."""
    logits = scale * jnp.einsum("btkgh,bskh->btkgs", q, k, precision="highest")
    logits = jnp.where(mask[:, :, None, None], logits, -jnp.inf)
    lse = jax.scipy.special.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
    return jnp.einsum("btkgs,bskh->btkgh", weights, v, precision="highest"), lse


def assert_same(function: Callable, oracle: Callable, arrays: tuple) -> None:
    """Outputs, log-sum-exps and the gradients of both."""
    out = jax.eval_shape(oracle, *arrays)
    cotangents = tuple(np.random.default_rng(9).standard_normal(x.shape).astype(np.float32) for x in out)
    blind = np.isneginf(jax.jit(oracle)(*arrays)[1])
    cotangents = cotangents[0], np.where(blind, 0, cotangents[1])
    run = partial(jax.jit, compiler_options=HASTE)
    ours = jax.tree.leaves(run(lambda *x: with_gradients(function, x, cotangents))(*arrays))
    theirs = jax.tree.leaves(run(lambda *x: with_gradients(oracle, x, cotangents))(*arrays))
    for mine, yours in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, np.where(np.isnan(yours), 0, yours), rtol=0, atol=TOLERANCE)


def normal(seed: int, *shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


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


def test_bfloat16_stays_close_to_float32() -> None:
    layout = lay_out([BATCH[0]] * 3, BLOCKRANK, shape=SHAPE)
    narrow = tuple(jnp.asarray(x, jnp.bfloat16) for x in tensors(layout, Heads(1, 2, 16)))
    wide = tuple(x.astype(jnp.float32) for x in narrow)
    fast = through(*narrow, layout, pattern=BLOCKRANK, backend="pallas_tpu")
    slow = through(*wide, layout, pattern=BLOCKRANK, backend="reference")
    for name in slow:
        assert fast[name].dtype == jnp.bfloat16
        error = np.abs(np.asarray(fast[name], np.float32) - np.asarray(slow[name]))
        assert error.max() < 0.02 * max(1.0, np.abs(slow[name]).max()), name


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


def test_what_the_kernels_cannot_take_goes_to_xla_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    layout = lay_out([BATCH[0]] * 3, BLOCKRANK, shape=SHAPE)
    q, k, v, _ = (jnp.asarray(x) for x in tensors(layout, Heads(1, 2, 16)))
    pallas_tpu._log_fallback.cache_clear()
    with caplog.at_level(logging.INFO, pallas_tpu.__name__):
        run = partial(attend, layout=layout, visibility=ENCODER, sliding_window=4)
        jax.eval_shape(partial(run, backend="pallas_tpu"), q, k, v)
        ours, xla = (
            jax.jit(partial(run, backend=name), compiler_options=HASTE)(q, k, v) for name in ("pallas_tpu", "xla")
        )
    np.testing.assert_array_equal(ours, xla)
    assert [r.getMessage() for r in caplog.records] == ["pallas_tpu cannot take a sliding window: computed by xla"]


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


def test_auto_takes_the_kernels_where_they_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert resolve_backend("auto") == "pallas_tpu"
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert resolve_backend("auto") == "xla", "the compiler cannot split a kernel over devices"
    assert resolve_backend("pallas_tpu") == "pallas_tpu"


def test_auto_goes_by_the_devices_compiled_for() -> None:
    """Those of the active mesh: here a TPU's, while this process has CPUs only."""
    device = jax.sharding.AbstractDevice("TPU v6 lite", 1, "tpu")

    def chosen(size: int, kind: AxisType) -> str:
        mesh = AbstractMesh((size,), ("data",), axis_types=(kind,), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            return resolve_backend("auto")

    assert chosen(1, AxisType.Auto) == "pallas_tpu"
    assert chosen(8, AxisType.Auto) == "xla", "the compiler cannot split a kernel over devices"
    assert chosen(8, AxisType.Manual) == "pallas_tpu"
    assert resolve_backend("auto") == "xla"
