"""The structured backend against the dense oracle, and the oracle against plain float64 loops."""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import HASTE, SHAPE, batches, numbered_prompt, random_prompt

from blockrank.attention import xla
from blockrank.attention.dispatch import _log_choice, attend, resolve_backend
from blockrank.attention.reference import masked_softmax, reference_attention
from blockrank.attention.visibility import (
    ALL,
    BLOCKRANK,
    CAUSAL,
    DENSE,
    SAME_SEGMENT,
    Part,
    Tokens,
    Visibility,
    window,
)
from blockrank.errors import UserError
from blockrank.layout import PAD, TokenLayout
from blockrank.prompts.encode import PromptSegments

TOLERANCE = 1e-5
ENCODER = Visibility(
    "encoder",
    (
        (Part.DOCUMENT, Part.PREFIX, ALL),
        (Part.DOCUMENT, Part.DOCUMENT, SAME_SEGMENT & window(4)),
        (Part.SUFFIX, Part.DOCUMENT, ALL),
    ),
)
"""A pattern in which prefix queries see nothing and suffix queries do not see each other."""


class Heads(NamedTuple):
    kv: int = 2
    groups: int = 2
    size: int = 8


GROUPED = Heads()


def lay_out(batch: list[PromptSegments], pattern: Visibility, **options: object) -> TokenLayout:
    offset = None if pattern.sequential else 256
    return TokenLayout.from_segments(batch, **{"row_length": 16, "suffix_offset": offset, **options})


def tensors(layout: TokenLayout, heads: Heads, seed: int = 0, scale: float = 1.0) -> tuple[np.ndarray, ...]:
    """q, k, v and a cotangent of the output, float32."""
    rng = np.random.default_rng(seed)
    kv = (*layout.tokens.shape, heads.kv, heads.size)
    queries = (*layout.tokens.shape, heads.kv, heads.groups, heads.size)
    shapes = (queries, kv, kv, queries)
    return tuple((scale * rng.standard_normal(shape)).astype(np.float32) for shape in shapes)


def _with_gradients(q, k, v, cotangent, layout, sliding_window, *, pattern, backend, tile):
    """Output, and the gradients of its product with `cotangent`. `tile` only tells compiled programs apart."""
    del tile

    def run(q, k, v):
        return attend(q, k, v, layout=layout, visibility=pattern, backend=backend, sliding_window=sliding_window)

    out, pull = jax.vjp(run, q, k, v)
    return {"out": out, **dict(zip(("dq", "dk", "dv"), pull(cotangent), strict=True))}


STATIC = ("pattern", "backend", "tile")
PROGRAMS = {
    "reference": jax.jit(_with_gradients, static_argnames=STATIC, compiler_options=HASTE),
    "xla": jax.jit(_with_gradients, static_argnames=STATIC),
}


def with_gradients(arrays, layout, pattern, backend="xla", sliding_window=None):
    tile = xla.MAX_TILE_LOGITS, xla.KEY_TILE, xla.ROW_TILE
    return PROGRAMS[backend](*arrays, layout, sliding_window, pattern=pattern, backend=backend, tile=tile)


def assert_backends_agree(
    layout: TokenLayout,
    pattern: Visibility,
    heads: Heads = GROUPED,
    *,
    seed: int = 0,
    sliding_window: int | None = None,
) -> None:
    arrays = tensors(layout, heads, seed)
    slow, fast = (with_gradients(arrays, layout, pattern, name, sliding_window) for name in PROGRAMS)
    padding = np.asarray(layout.segment_ids) == PAD
    for name, expected in slow.items():
        assert np.isfinite(expected).all(), name
        np.testing.assert_allclose(fast[name], expected, rtol=0, atol=TOLERANCE, err_msg=name)
        assert not np.asarray(fast[name])[padding].any(), f"{name} of padding"
        assert not np.asarray(expected)[padding].any(), f"{name} of padding"


BATCH = [
    random_prompt(0, 7, [9, 3, 12, 5, 16, 1], 6),
    random_prompt(1, 3, [4], 2),
    random_prompt(2, 12, [], 9),
]
"""Ragged lists: most of the second and third is padding, some of it whole rows."""

CASES = {
    "blockrank": (BLOCKRANK, Heads(), {}),
    "blockrank, chunked": (BLOCKRANK, Heads(), {"packing": "chunked"}),
    "blockrank, bucketed": (BLOCKRANK, Heads(), {"bucket": True}),
    "blockrank, 1 kv head, head_dim 64": (BLOCKRANK, Heads(1, 3, 64), {}),
    "blockrank, a kv head per head, head_dim 80": (BLOCKRANK, Heads(2, 1, 80), {}),
    "dense": (DENSE, Heads(), {}),
    "dense, 1 kv head, bucketed": (DENSE, Heads(1, 4, 8), {"bucket": True}),
    "encoder": (ENCODER, Heads(), {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_values_and_gradients_equal_the_oracle(case: tuple[Visibility, Heads, dict]) -> None:
    pattern, heads, options = case
    assert_backends_agree(lay_out(BATCH, pattern, **{"bucket": False, **options}), pattern, heads)


@pytest.mark.parametrize("pattern", [BLOCKRANK, DENSE], ids=lambda p: p.name)
def test_length_130(pattern: Visibility) -> None:
    batch = [random_prompt(3, 130, [130, 61, 67], 33)]
    offset = None if pattern.sequential else 300
    assert_backends_agree(lay_out(batch, pattern, row_length=130, bucket=False, suffix_offset=offset), pattern)


@pytest.mark.parametrize("pattern", [BLOCKRANK, DENSE], ids=lambda p: p.name)
def test_sliding_window(pattern: Visibility) -> None:
    layout = lay_out(BATCH, pattern, bucket=False)
    for size in (1, 3, 8, 1000):
        assert_backends_agree(layout, pattern, sliding_window=size)


def test_a_window_as_wide_as_the_prompt_changes_nothing_and_a_narrow_one_does() -> None:
    layout = lay_out(BATCH, DENSE, bucket=False)
    arrays = tensors(layout, Heads())
    free, wide, narrow = (with_gradients(arrays, layout, DENSE, sliding_window=size)["out"] for size in (None, 1000, 3))
    np.testing.assert_allclose(free, wide, rtol=0, atol=1e-6)
    assert np.abs(np.asarray(free - narrow)).max() > 0.1


@pytest.mark.parametrize("pattern", [BLOCKRANK, DENSE], ids=lambda p: p.name)
@pytest.mark.parametrize("limit", [1, 150])
def test_tiles(pattern: Visibility, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one query, and of several, the last of which is not full."""
    batch = [random_prompt(4, 5, [11, 7, 3], 6), random_prompt(5, 4, [2], 3)]
    layout = lay_out(batch, pattern, bucket=False)
    monkeypatch.setattr(xla, "MAX_TILE_LOGITS", limit)
    monkeypatch.setattr(xla, "KEY_TILE", 6)
    assert_backends_agree(layout, pattern)


@pytest.mark.parametrize(
    ("limit", "options"), [(1, {}), (700, {}), (1400, {"packing": "chunked"})], ids=["one", "two", "four"]
)
def test_groups_of_rows(limit: int, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one row, and of several, the last of which is not full."""
    batch = [random_prompt(6, 5, [16, 12, 9, 16, 16, 7, 3], 6), random_prompt(7, 4, [2, 13], 3)]
    layout = lay_out(batch, BLOCKRANK, bucket=False, **options)
    assert layout.shape.rows in (5, 7)
    monkeypatch.setattr(xla, "MAX_TILE_LOGITS", limit)
    assert_backends_agree(layout, BLOCKRANK, sliding_window=5 if limit == 1 else None)


def test_memory_of_many_rows_does_not_grow_with_their_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporaries of the forward and backward pass of 64 rows, all at once and a group of 4 at a time."""
    layout = lay_out([random_prompt(8, 16, [64] * 64, 8)], BLOCKRANK, row_length=64)
    arrays = tensors(layout, Heads(1, 4, 8))
    temporaries = {}
    for limit in (xla.MAX_TILE_LOGITS, 4 * 64 * (64 + layout.shape.prefix)):
        monkeypatch.setattr(xla, "MAX_TILE_LOGITS", limit)
        options = {"pattern": BLOCKRANK, "backend": "xla", "tile": limit}
        memory = PROGRAMS["xla"].lower(*arrays, layout, None, **options).compile().memory_analysis()
        assert memory is not None
        temporaries[limit] = memory.temp_size_in_bytes
    whole, tiled = temporaries.values()
    assert tiled < whole / 2


@pytest.mark.parametrize("pattern", [BLOCKRANK, ENCODER], ids=lambda p: p.name)
def test_tiles_of_rows(pattern: Visibility, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 16 in tiles of 6, 6 and 4: documents begin and end within tiles, and some span them."""
    monkeypatch.setattr(xla, "ROW_TILE", 6)
    assert_backends_agree(lay_out(BATCH, pattern, bucket=False), pattern)


def test_causal_rows_compute_no_logits_behind_a_tile() -> None:
    layout = lay_out([random_prompt(6, 16, [120, 100, 36], 8)], BLOCKRANK, row_length=256, bucket=False)
    q, k, v, _ = tensors(layout, Heads(1, 1, 8))
    program = jax.make_jaxpr(lambda q, k, v: attend(q, k, v, layout=layout, visibility=BLOCKRANK, backend="xla"))
    assert {eqn.outvars[0].aval.shape[-2:] for eqn in program(q, k, v).eqns if eqn.primitive.name == "dot_general"} >= {
        (128, 16 + 128),
        (128, 16 + 256),
    }
    assert "256,272" not in str(program(q, k, v)).replace(" ", "")


@settings(max_examples=12, deadline=None)
@given(batches(), st.sampled_from([BLOCKRANK, DENSE]), st.integers(0, 10**6))
def test_random_packings(batch: list[PromptSegments], pattern: Visibility, seed: int) -> None:
    batch = [*batch, *[numbered_prompt(1, [], 2)] * (3 - len(batch))]
    assert_backends_agree(lay_out(batch, pattern, shape=SHAPE), pattern, Heads(1, 2, 4), seed=seed)


@pytest.mark.parametrize("pattern", [BLOCKRANK, DENSE], ids=lambda p: p.name)
def test_extreme_logits_stay_finite(pattern: Visibility) -> None:
    layout = lay_out(BATCH, pattern, bucket=False)
    q, k, v, cotangent = tensors(layout, Heads())
    for backend in ("reference", "xla"):
        results = with_gradients((100 * q, 100 * k, v, cotangent), layout, pattern, backend)
        assert all(np.isfinite(value).all() for value in results.values())
        assert np.abs(results["out"]).max() <= np.abs(v).max() + 1e-4


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_queries_that_see_nothing_give_zero_and_get_none(backend: str) -> None:
    layout = lay_out(BATCH, ENCODER, bucket=False)
    results = with_gradients(tensors(layout, Heads()), layout, ENCODER, backend)
    out, dq = np.asarray(results["out"]), np.asarray(results["dq"])
    assert not out[:, layout.prefix].any()
    assert not dq[:, layout.prefix].any()
    assert not out[2].any(), "the third list has no documents, and nothing sees its prefix"
    assert all(np.isfinite(value).all() for value in results.values())


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_pattern_without_rules(backend: str) -> None:
    layout = lay_out(BATCH, BLOCKRANK, bucket=False)
    results = with_gradients(tensors(layout, Heads()), layout, Visibility("none", ()), backend)
    assert all(not np.asarray(value).any() for value in results.values())


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_one_visible_key_gives_its_value(backend: str) -> None:
    """The first prefix token sees itself alone."""
    layout = lay_out(BATCH, BLOCKRANK, bucket=False)
    arrays = tensors(layout, Heads())
    out = with_gradients(arrays, layout, BLOCKRANK, backend)["out"]
    expected = np.broadcast_to(arrays[2][:, 0, :, None], out[:, 0].shape)
    np.testing.assert_allclose(out[:, 0], expected, rtol=0, atol=1e-6)


def test_plain_text() -> None:
    layout = TokenLayout.causal(np.ones((2, 20), np.int32))
    assert_backends_agree(layout, DENSE)


def test_packed_rows_equal_chunked_rows() -> None:
    """The same documents in other places: every token's output is the same."""
    prompt = numbered_prompt(7, [9, 3, 12, 5, 16, 1], 6)
    rng = np.random.default_rng(0)
    by_token = [rng.standard_normal((100, *shape)).astype(np.float32) for shape in ((2, 2, 8), (2, 8), (2, 8))]
    outputs = []
    for options in ({}, {"packing": "chunked"}, {"row_length": 53}):
        layout = lay_out([prompt], BLOCKRANK, **options)
        q, k, v = (table[layout.tokens] for table in by_token)
        out = np.asarray(with_gradients((q, k, v, q), layout, BLOCKRANK)["out"])
        outputs.append(out[0, np.argsort(layout.tokens[0])][-prompt.num_tokens :])
    for other in outputs[1:]:
        np.testing.assert_allclose(other, outputs[0], rtol=0, atol=1e-6)


def loops(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Attention as its definition reads, float64."""
    out = np.zeros(q.shape)
    for b, t, h, g in np.ndindex(*q.shape[:4]):
        seen = np.flatnonzero(mask[b, t])
        if len(seen):
            logits = k[b, seen, h].astype(np.float64) @ q[b, t, h, g].astype(np.float64) / np.sqrt(q.shape[-1])
            weights = np.exp(logits - logits.max())
            out[b, t, h, g] = weights @ v[b, seen, h].astype(np.float64) / weights.sum()
    return out


@pytest.mark.parametrize("pattern", [BLOCKRANK, DENSE, ENCODER], ids=lambda p: p.name)
def test_the_oracle_equals_its_definition(pattern: Visibility) -> None:
    layout = lay_out(BATCH, pattern, bucket=False)
    q, k, v, _ = tensors(layout, Heads(), scale=2.0)
    mask = np.asarray(pattern.materialize(Tokens.of(layout)))
    out = reference_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), mask, q.shape[-1] ** -0.5)
    np.testing.assert_allclose(out, loops(q, k, v, mask), rtol=0, atol=TOLERANCE)


def test_causal_on_and_off_differ() -> None:
    both_ways = Visibility("both", ((Part.PREFIX, Part.PREFIX, ALL),))
    one_way = Visibility("one", ((Part.PREFIX, Part.PREFIX, CAUSAL),))
    layout = TokenLayout.causal(np.ones((1, 12), np.int32))
    arrays = tensors(layout, Heads())
    outputs = [np.asarray(with_gradients(arrays, layout, p)["out"]) for p in (both_ways, one_way)]
    assert np.abs(outputs[0] - outputs[1])[:, :-1].max() > 0.1
    np.testing.assert_allclose(outputs[0][:, -1], outputs[1][:, -1], rtol=0, atol=1e-6)


def test_bfloat16_stays_close_to_float32() -> None:
    layout = lay_out(BATCH, BLOCKRANK, bucket=False)
    narrow = tuple(jnp.asarray(x, jnp.bfloat16) for x in tensors(layout, Heads()))
    wide = tuple(x.astype(jnp.float32) for x in narrow)
    fast = with_gradients(narrow, layout, BLOCKRANK)["out"]
    slow = with_gradients(wide, layout, BLOCKRANK, "reference")["out"]
    assert fast.dtype == jnp.bfloat16
    assert np.abs(np.asarray(fast, np.float32) - np.asarray(slow)).max() < 0.03


def test_masked_softmax_by_hand() -> None:
    logits = jnp.log(jnp.asarray([[1.0, 3.0, 4.0], [1.0, 3.0, 4.0], [5.0, 6.0, 7.0]]))
    mask = jnp.asarray([[True, True, False], [True, True, True], [False, False, False]])
    weights = masked_softmax(logits, mask)
    np.testing.assert_allclose(weights, [[0.25, 0.75, 0], [0.125, 0.375, 0.5], [0, 0, 0]], rtol=1e-6)
    gradient = jax.grad(lambda x: masked_softmax(x, mask)[:, 0].sum())(logits)
    expected = [[0.25 * 0.75, -0.25 * 0.75, 0], [0.125 * 0.875, -0.125 * 0.375, -0.125 * 0.5], [0, 0, 0]]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_masked_softmax_ignores_what_it_does_not_see() -> None:
    mask = jnp.asarray([[True, False]])
    for hidden in (jnp.inf, -jnp.inf, 1e30):
        logits = jnp.asarray([[2.0, hidden]])
        assert masked_softmax(logits, mask).tolist() == [[1.0, 0.0]]
        assert jax.grad(lambda x: masked_softmax(x, mask)[0, 0])(logits).tolist() == [[0.0, 0.0]]
    assert masked_softmax(jnp.zeros((2, 0)), jnp.zeros((2, 0), bool)).shape == (2, 0)


def test_positions_of_the_other_scheme_are_refused() -> None:
    """On any backend, before anything is computed; plain text has no documents to place and is either's."""

    def shape_of(layout: TokenLayout, pattern: Visibility, backend: str) -> tuple[int, ...]:
        attention = partial(attend, visibility=pattern, backend=backend)
        q, k, v, _ = tensors(layout, Heads())
        return jax.eval_shape(lambda layout: attention(*map(jnp.asarray, (q, k, v)), layout=layout), layout).shape

    plain = TokenLayout.causal(np.ones((2, 20), np.int32))
    for backend in ("reference", "xla"):
        for pattern, other, told in (
            (DENSE, BLOCKRANK, r"'dense' needs sequential positions.* permutation-invariant ones.* suffix_offset=None"),
            (BLOCKRANK, DENSE, r"'blockrank' needs permutation-invariant positions.* sequential ones.* suffix_offset="),
        ):
            with pytest.raises(UserError, match=told):
                shape_of(lay_out(BATCH, other, bucket=False), pattern, backend)
            assert shape_of(plain, pattern, backend)[:2] == (2, 20)
            assert shape_of(lay_out(BATCH, pattern, bucket=False), pattern, backend)[0] == len(BATCH)


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(UserError, match="'flash' is unknown: choose one of auto, reference, xla, pallas_tpu"):
        resolve_backend("flash")


def test_auto_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    _log_choice.cache_clear()
    with caplog.at_level(logging.INFO, "blockrank.attention.dispatch"):
        assert [resolve_backend("auto") for _ in range(3)] == ["xla"] * 3
    assert [record.getMessage() for record in caplog.records] == [f"attention backend on {jax.default_backend()}: xla"]
