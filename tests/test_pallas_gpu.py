"""The Pallas GPU kernel, interpreted and tile by tile; and lowered for CUDA. No GPU is needed, and none has run it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import assert_same, dense, normal

from blockrank.attention import pallas_triton
from blockrank.attention.dispatch import attend
from blockrank.attention.merge import merge_partial
from blockrank.attention.pallas_codes import UNSEEN
from blockrank.attention.pallas_triton import Codes, stream_attention
from blockrank.attention.visibility import BLOCKRANK, DENSE, Visibility
from blockrank.layout import LayoutShape, TokenLayout

WIDTH = 16


def mask_of(codes: Codes, shared: int = 0) -> np.ndarray:
    first, last, keys = (np.asarray(x) for x in codes)
    within = (keys[:, None] >= first[..., None]) | (keys[:, None] < shared)
    return within & (keys[:, None] <= last[..., None])


@pytest.mark.parametrize("programs", [1, 264], ids=["whole walks", "split walks"])
def test_prefix_and_documents_of_many_tiles(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that ends within a tile; documents over several tiles and within one; padding between, and alone."""
    monkeypatch.setattr(pallas_triton, "PROGRAMS", programs)
    length, prefix = 420, 170
    index = np.arange(length, dtype=np.int32)
    first, real = np.zeros((2, length), np.int32), np.zeros((2, length), bool)
    real[0, :165] = True
    for start, end in [(170, 171), (175, 330), (340, 352), (352, 420)]:
        first[0, start:end], real[0, start:end] = start, True
    real[1, :1] = True
    codes = Codes(first, np.where(real, index, -1), np.where(real, index, UNSEEN))
    mask = mask_of(codes, prefix)
    assert_same(
        partial(stream_attention, codes=codes, shared=prefix, scale=WIDTH**-0.5),
        lambda q, k, v: dense(q, k, v, mask, WIDTH**-0.5),
        normal(0, (2, length, 1, 3, WIDTH), *[(2, length, 1, WIDTH)] * 2),
    )


@pytest.mark.parametrize("programs", [1, 264], ids=["whole walks", "split walks"])
def test_codes_in_any_order(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blind queries, unseen keys, tiles no query sees; more keys than queries."""
    monkeypatch.setattr(pallas_triton, "PROGRAMS", programs)
    length, keys = 90, 500
    rng = np.random.default_rng(2)
    last, key_codes = rng.integers(-1, 40, (2, length)), rng.integers(0, 50, (2, keys))
    key_codes[0, 128:256] = UNSEEN
    key_codes[1, ::3] = UNSEEN
    last[0, :5] = -1
    codes = Codes(*(x.astype(np.int32) for x in (np.zeros_like(last), last, key_codes)))
    mask = mask_of(codes)
    assert_same(
        partial(stream_attention, codes=codes, scale=WIDTH**-0.5),
        lambda q, k, v: dense(q, k, v, mask, WIDTH**-0.5),
        normal(1, (2, length, 1, 2, WIDTH), *[(2, keys, 1, WIDTH)] * 2),
    )


def test_shards_merge_to_the_whole() -> None:
    """A suffix over two shards of keys: the gradient goes through the log-sum-exps, which split walks merge too."""
    length, keys = 6, 400
    last = 1 + np.arange(length, dtype=np.int32)[None]
    key_codes = np.concatenate([np.zeros(keys - length, np.int32), last[0]])[None]
    key_codes[0, 3:7] = UNSEEN
    codes = Codes(np.zeros_like(last), last, key_codes)
    mask, shards = mask_of(codes), (slice(0, 200), slice(200, keys))

    def run(q, k, v):
        results = [
            stream_attention(q, k[:, p], v[:, p], codes._replace(keys=key_codes[:, p]), scale=0.25) for p in shards
        ]
        return merge_partial(*zip(*results, strict=True)), results[0][1]

    def oracle(q, k, v):
        return dense(q, k, v, mask, 0.25)[0], dense(q, k[:, :200], v[:, :200], mask[..., :200], 0.25)[1]

    assert_same(run, oracle, normal(3, (1, length, 2, 2, WIDTH), *[(1, keys, 2, WIDTH)] * 2))


def test_walks_cover_what_is_seen_and_splits_divide_them() -> None:
    seen = np.zeros((4, 9), bool)
    seen[0, 2:6] = seen[2, 8] = seen[3] = True
    seen[3, 4] = False
    np.testing.assert_array_equal(pallas_triton._walk(jnp.asarray(seen)), [[2, 6], [0, 0], [8, 9], [0, 9]])
    np.testing.assert_array_equal(pallas_triton._walk(jnp.asarray(seen[:, 3:]), 3), [[3, 6], [0, 0], [8, 9], [3, 9]])
    assert pallas_triton._walk(jnp.zeros((1, 0), bool)).tolist() == [[0, 0]]
    for splits in (1, 2, 5):
        shares = [[int(x) for x in pallas_triton._share(jnp.int32(3), jnp.int32(10), s, splits)] for s in range(splits)]
        assert [t for start, end in shares for t in range(start, end)] == list(range(3, 10))


def lowered(head_dim: int, dtype: jnp.dtype, pattern: Visibility, groups: int = 4) -> str:
    """Output and gradients over a small stream, as a program for CUDA: StableHLO with its kernels in Triton's IR."""
    shape = LayoutShape(2, 40, 2, 200, 30, 2, 0)
    layout = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, TokenLayout.blank(1, shape)))
    layout = TokenLayout(**{**vars(layout), "sequential": pattern.sequential})
    q, k = (jax.ShapeDtypeStruct((1, shape.tokens, 2, *heads), dtype) for heads in ((groups, head_dim), (head_dim,)))

    def run(q, k, v, cotangent, layout):
        out, pull = jax.vjp(lambda *x: attend(*x, layout=layout, visibility=pattern, backend="pallas_gpu"), q, k, v)
        return out, pull(cotangent)

    return jax.jit(run).trace(q, k, k, q, layout).lower(lowering_platforms=("cuda",)).as_text()


LOWERS = pytest.mark.skipif(
    jax.__version_info__ > (0, 10, 2), reason="this JAX compiles Triton kernels as it lowers, by its CUDA plugin"
)
TRITON = "@__gpu$xla.gpu.triton("


@LOWERS
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, jnp.float32), (80, jnp.bfloat16)])
def test_lowers_to_triton(head_dim: int, dtype: jnp.dtype) -> None:
    """Forward for prefix with rows, and suffix; backward the queries' of both, the keys' of prefix, rows and suffix."""
    text = lowered(head_dim, dtype, BLOCKRANK)
    assert text.count(TRITON) == 7
    assert "stablehlo.dot_general" not in text, "nothing is interpreted"


@LOWERS
@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 3, 7])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_every_head_dim_dtype_and_grouping_lowers(head_dim: int, dtype: jnp.dtype, groups: int) -> None:
    assert lowered(head_dim, dtype, BLOCKRANK, groups).count(TRITON) == 7
    assert lowered(head_dim, dtype, DENSE, groups).count(TRITON) == 3
