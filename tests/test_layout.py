"""Packing: every token placed once, undone exactly, few shapes, little padding, clear refusals."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SHAPE, batches, numbered_prompt, prompt_of

from blockrank.errors import UserError
from blockrank.layout import PAD, PREFIX, SUFFIX, LayoutShape, TokenLayout
from blockrank.packing import round_up_geometric
from blockrank.prompts.encode import PromptSegments

quietly = settings(max_examples=50, deadline=None)
PACKINGS = ("packed", "chunked")
layouts = st.tuples(batches(), st.integers(10, 24), st.sampled_from(PACKINGS), st.booleans())


def arrays(layout: TokenLayout) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(layout)]


def assert_same(left: TokenLayout, right: TokenLayout) -> None:
    assert left.shape == right.shape
    for one, other in zip(arrays(left), arrays(right), strict=True):
        np.testing.assert_array_equal(one, other)


def passage_lengths(seed: int, count: int = 100) -> list[int]:
    """Token lengths like MS MARCO's: mean 75, none above 160."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.gamma(7.0, 75 / 7.0, count), 15, 160).round().astype(int)
    assert 65 < lengths.mean() < 85
    return lengths.tolist()


@quietly
@given(layouts)
def test_every_token_is_placed_once(case: tuple[list[PromptSegments], int, str, bool]) -> None:
    batch, row_length, packing, bucket = case
    layout = TokenLayout.from_segments(batch, row_length=row_length, packing=packing, bucket=bucket)
    for prompt, tokens, segments, positions in zip(
        batch, layout.tokens, layout.segment_ids, layout.positions, strict=True
    ):
        real = segments != PAD
        assert sorted(tokens[real]) == list(range(1, prompt.num_tokens + 1))
        assert not tokens[~real].any()
        assert not positions[~real].any()
        assert set(segments) <= {PREFIX, SUFFIX, PAD, *range(len(prompt.documents))}
    assert layout.token_count().tolist() == [prompt.num_tokens for prompt in batch]
    assert all(array.dtype == np.int32 for array in arrays(layout)[:5])
    assert layout.tokens.shape == (len(batch), layout.shape.tokens)


@quietly
@given(layouts)
def test_unpack_undoes_packing(case: tuple[list[PromptSegments], int, str, bool]) -> None:
    batch, row_length, packing, bucket = case
    layout = TokenLayout.from_segments(batch, row_length=row_length, packing=packing, bucket=bucket)
    unpacked = layout.unpack()
    assert len(unpacked) == len(batch)
    for prompt, blocks in zip(batch, unpacked, strict=True):
        expected = [prompt.prefix, *prompt.documents, prompt.suffix]
        assert [block.tolist() for block in blocks] == [block.tolist() for block in expected]
    assert layout.document_mask.sum(axis=1).tolist() == [len(prompt.documents) for prompt in batch]


@quietly
@given(layouts)
def test_a_document_lies_in_one_row_in_one_piece(case: tuple[list[PromptSegments], int, str, bool]) -> None:
    batch, row_length, packing, bucket = case
    layout = TokenLayout.from_segments(batch, row_length=row_length, packing=packing, bucket=bucket)
    for prompt, segments in zip(batch, np.asarray(layout.segment_ids)[:, layout.rows], strict=True):
        for index, document in enumerate(prompt.documents):
            where = np.flatnonzero(segments == index)
            assert np.array_equal(where, np.arange(where[0], where[0] + len(document)))
            assert where[0] // row_length == where[-1] // row_length


@quietly
@given(batches(), st.sampled_from(PACKINGS))
def test_positions_are_permutation_invariant(batch: list[PromptSegments], packing: str) -> None:
    layout = TokenLayout.from_segments(batch, row_length=16, packing=packing, suffix_offset=500)
    for prompt, positions, segments in zip(batch, layout.positions, layout.segment_ids, strict=True):
        p = len(prompt.prefix)
        assert positions[segments == PREFIX].tolist() == list(range(p))
        for index, document in enumerate(prompt.documents):
            assert positions[segments == index].tolist() == list(range(p, p + len(document)))
        assert positions[segments == SUFFIX].tolist() == list(range(500, 500 + len(prompt.suffix)))


@quietly
@given(batches(), st.sampled_from(PACKINGS))
def test_sequential_positions_are_the_reading_order(batch: list[PromptSegments], packing: str) -> None:
    layout = TokenLayout.from_segments(batch, row_length=16, packing=packing, suffix_offset=None)
    assert layout.sequential
    real = np.asarray(layout.segment_ids) != PAD
    np.testing.assert_array_equal(np.asarray(layout.positions)[real], np.asarray(layout.tokens)[real] - 1)


@quietly
@given(batches())
def test_signals_and_labels_point_into_the_suffix(batch: list[PromptSegments]) -> None:
    layout = TokenLayout.from_segments(batch, row_length=16, shape=SHAPE)
    for prompt, tokens, signals, labels in zip(batch, layout.tokens, layout.signals, layout.labels, strict=True):
        suffix = tokens[layout.suffix]
        start = prompt.answer_start
        assert suffix[signals].tolist() == prompt.suffix[[start - 2, start - 1]].tolist()
        used = labels[labels >= 0]
        assert suffix[used].tolist() == prompt.suffix[start:].tolist()
        assert labels[len(used) :].tolist() == [-1] * (SHAPE.labels - len(used))


def test_a_layout_by_hand() -> None:
    """Lengths 3, 5, 2, 4 in rows of 8: first-fit decreasing puts 5 + 3 in row 0 and 4 + 2 in row 1."""
    prompt = prompt_of([1, 2], [[11, 12, 13], [21, 22, 23, 24, 25], [31, 32], [41, 42, 43, 44]], [7, 8, 9], (-2,), 1)
    layout = TokenLayout.from_segments([prompt], row_length=8, suffix_offset=20, bucket=False)
    assert layout.shape == LayoutShape(documents=4, prefix=2, rows=2, row_length=8, suffix=3, signals=1, labels=1)
    row0, row1 = [21, 22, 23, 24, 25, 11, 12, 13], [41, 42, 43, 44, 31, 32, 0, 0]
    assert layout.tokens.tolist() == [[1, 2, *row0, *row1, 7, 8, 9]]
    assert layout.segment_ids.tolist() == [[-1, -1, 1, 1, 1, 1, 1, 0, 0, 0, 3, 3, 3, 3, 2, 2, -3, -3, -2, -2, -2]]
    assert layout.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 2, 3, 4, 5, 2, 3, 0, 0, 20, 21, 22]]
    assert layout.signals.tolist() == [[0]]
    assert layout.labels.tolist() == [[2]]
    assert layout.fill == 14 / 16


def test_chunked_is_one_document_per_row_in_list_order() -> None:
    layout = TokenLayout.from_segments(
        [numbered_prompt(2, [3, 5, 2], 2)], row_length=5, packing="chunked", bucket=False
    )
    rows = layout.segment_ids[0, layout.rows].reshape(3, 5)
    assert rows.tolist() == [[0, 0, 0, PAD, PAD], [1] * 5, [2, 2, PAD, PAD, PAD]]


def test_chunked_is_the_special_case_of_documents_longer_than_half_a_row() -> None:
    prompt = numbered_prompt(2, [8, 7, 6], 2)
    packed, chunked = (TokenLayout.from_segments([prompt], row_length=10, packing=p) for p in PACKINGS)
    assert_same(packed, chunked)


@quietly
@given(batches(), st.sampled_from(PACKINGS))
def test_layouts_are_deterministic_and_do_not_depend_on_batch_mates(batch: list[PromptSegments], packing: str) -> None:
    shape = replace(SHAPE, rows=6)
    options = {"row_length": 16, "packing": packing, "shape": shape}
    layout = TokenLayout.from_segments(batch, **options)
    assert_same(layout, TokenLayout.from_segments(batch, **options))
    for index, prompt in enumerate(batch):
        alone = TokenLayout.from_segments([prompt], **options)
        for together, single in zip(arrays(layout), arrays(alone), strict=True):
            np.testing.assert_array_equal(together[index], single[0])


def test_inputs_are_not_changed() -> None:
    prompt = numbered_prompt(3, [4, 2], 3)
    blocks = [block.copy() for block in (prompt.prefix, *prompt.documents, prompt.suffix)]
    layout = TokenLayout.from_segments([prompt], row_length=8)
    layout.tokens[:] = 0
    for before, after in zip(blocks, (prompt.prefix, *prompt.documents, prompt.suffix), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("seed", range(20))
def test_fill_on_passages_like_ms_marco(seed: int) -> None:
    prompt = numbered_prompt(60, passage_lengths(seed), 40)
    packed = TokenLayout.from_segments([prompt], row_length=512, bucket=False)
    assert packed.fill >= 0.9
    chunked = TokenLayout.from_segments([prompt], row_length=160, packing="chunked", bucket=False)
    assert chunked.fill < 0.6
    bucketed = TokenLayout.from_segments([prompt], row_length=512)
    assert bucketed.shape == packed.shape.bucketed()
    assert bucketed.fill >= 0.9


@quietly
@given(st.integers(0, 5000), st.sampled_from([1, 2, 4, 8]))
def test_geometric_sizes_waste_little(value: int, steps: int) -> None:
    size = round_up_geometric(value, steps)
    assert value <= size
    assert value == size or size - value < size / (steps + 1)
    assert round_up_geometric(size, steps) == size


def test_geometric_sizes_are_few() -> None:
    sizes = sorted({round_up_geometric(value) for value in range(129)})
    assert sizes == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    finer = sorted({round_up_geometric(value, 4) for value in range(33)})
    assert finer == [*range(9), 10, 12, 14, 16, 20, 24, 28, 32]


@pytest.mark.parametrize("documents", [50, 100, 200, 500, 1000, 2000])
def test_rows_over_devices_are_full_at_any_depth(documents: int) -> None:
    """Passages of 75 tokens on eight devices: doubled, the rows cost twice as much."""
    rng = np.random.default_rng(documents)
    lengths = np.clip(np.rint(rng.gamma(6.25, 12, documents)), 1, 160).astype(int)
    layout = TokenLayout.from_segments([numbered_prompt(60, lengths.tolist(), 40)], row_length=512, shards=8)
    assert layout.fill >= 0.93
    assert 350 <= layout.shape.row_length <= 700


@pytest.mark.parametrize("rows", [1, 33, 64, 65, 67, 128, 148, 257, 1000])
def test_the_more_rows_the_smaller_the_share_that_is_spare(rows: int) -> None:
    shape = LayoutShape(documents=1, prefix=32, rows=rows, row_length=256, suffix=32, signals=2, labels=0)
    bucketed = shape.bucketed()
    assert 0 <= bucketed.rows - rows < bucketed.rows / (9 if rows <= 64 else 33)
    assert bucketed.bucketed() == bucketed


def test_bucketed_shapes_are_few() -> None:
    """Lists of 1 to 100 passages with prompts of 40 to 160 tokens: a few dozen shapes."""
    rng = np.random.default_rng(0)
    shapes = set()
    for _ in range(300):
        lengths = passage_lengths(0)[: rng.integers(1, 101)]
        prompt = numbered_prompt(int(rng.integers(90, 160)), lengths, int(rng.integers(60, 90)))
        shapes.add(TokenLayout.from_segments([prompt], row_length=512).shape)
    assert len(shapes) <= 100
    assert len({(shape.documents, shape.rows) for shape in shapes}) <= 30


@quietly
@given(batches())
def test_a_bucket_holds_what_it_is_for(batch: list[PromptSegments]) -> None:
    exact = TokenLayout.from_segments(batch, row_length=16, bucket=False).shape
    bucket = exact.bucketed()
    assert exact.union(bucket) == bucket
    assert bucket.bucketed() == bucket
    assert TokenLayout.from_segments(batch, row_length=16).shape == bucket


def test_layout_is_a_pytree_whose_shape_is_static() -> None:
    layout = TokenLayout.from_segments([numbered_prompt(3, [4, 2], 3)], row_length=8)
    doubled = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * 2, x))(layout)
    assert doubled.shape == layout.shape
    assert not doubled.sequential
    np.testing.assert_array_equal(doubled.tokens, layout.tokens * 2)
    assert hash(layout.shape) == hash(replace(layout.shape))


def test_plain_text_is_all_prefix() -> None:
    layout = TokenLayout.causal(np.asarray([[5, 6, 7], [8, 9, 10]]))
    assert layout.segment_ids.tolist() == [[PREFIX] * 3] * 2
    assert layout.positions.tolist() == [[0, 1, 2]] * 2
    assert layout.shape.tokens == layout.shape.prefix == 3


def test_blocks_keep_their_first_tokens() -> None:
    blocks = [list(range(1, 8)), [11, 12, 13, 14, 15, 16], [21, 22], [30, 31, 32, 33, 34]]
    layout = TokenLayout.from_blocks([blocks], max_block_length=4, answer_length=1, signals=(-3, -2))
    assert [block.tolist() for block in layout.unpack()[0]] == [
        [1, 2, 3, 4],
        [11, 12, 13, 14],
        [21, 22],
        [30, 31, 32, 33, 34],
    ]
    assert layout.signals.tolist() == [[2, 3]]
    assert layout.labels.tolist() == [[4]]
    assert layout.shape.row_length == 4
    suffix = layout.segment_ids[0] == SUFFIX
    assert layout.positions[0][suffix].tolist() == [16384, 16385, 16386, 16387, 16388]


def test_blocks_without_documents_and_with_an_empty_one() -> None:
    layout = TokenLayout.from_blocks([[[1, 2], [3, 4]], [[1, 2], [], [5], [3, 4]]])
    assert [[block.tolist() for block in blocks] for blocks in layout.unpack()] == [
        [[1, 2], [3, 4]],
        [[1, 2], [], [5], [3, 4]],
    ]


def test_blocks_of_lists_with_their_own_answers_and_signals() -> None:
    blocks = [[[1], [11, 12], [31, 32, 33, 34]], [[2], [21], [41, 42, 43]]]
    layout = TokenLayout.from_blocks(blocks, signals=[(-3,), np.array([0, 1])], answer_length=[2, 1], vocab_size=44)
    assert layout.signals.tolist() == [[1, -1], [0, 1]]
    assert layout.labels.tolist() == [[2, 3], [2, -1]]
    for i, options in enumerate(({"signals": (-3,), "answer_length": 2}, {"signals": (0, 1), "answer_length": 1})):
        alone = TokenLayout.from_blocks(blocks[i : i + 1], **options)
        assert [s for s in layout.signals[i] if s >= 0] == alone.signals[0].tolist()
        assert [s for s in layout.labels[i] if s >= 0] == alone.labels[0].tolist()


def test_a_signal_may_be_the_first_label() -> None:
    layout = TokenLayout.from_blocks([[[1], [2], [3, 4, 5]]], signals=(-3, -2), answer_length=2)
    assert (layout.signals.tolist(), layout.labels.tolist()) == ([[0, 1]], [[1, 2]])


def test_blocks_whose_documents_are_all_empty() -> None:
    layout = TokenLayout.from_blocks([[[1, 2], [], [], [3, 4]]])
    assert [len(block) for block in layout.unpack()[0]] == [2, 0, 0, 2]
    assert layout.document_mask.tolist() == [[True, True]]


PROMPT = numbered_prompt(4, [9, 3], 4, answer=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_length": 8}, r"document 0 has 9 tokens, more than a row of 8: raise row_length"),
        ({"row_length": 16, "suffix_offset": 12}, r"documents end at position 13, past suffix_offset=12"),
        ({"row_length": 16, "packing": "loose"}, r"packing='loose' is unknown: choose one of packed, chunked"),
        ({"row_length": 16, "shape": replace(SHAPE, documents=1)}, r"documents=2.* but the given shape is"),
        ({"row_length": 16, "shape": replace(SHAPE, prefix=3)}, r"prefix=4.* but the given shape is"),
        ({"row_length": 10, "shape": replace(SHAPE, rows=1)}, r"rows=2.* but the given shape is"),
        ({"row_length": 16, "shape": replace(SHAPE, suffix=3)}, r"suffix=4.* but the given shape is"),
        ({"row_length": 16, "shape": replace(SHAPE, signals=1)}, r"signals=2.* but the given shape is"),
        ({"row_length": 16, "shape": replace(SHAPE, labels=0)}, r"labels=1.* but the given shape is"),
        ({"row_length": 17, "shape": SHAPE}, r"row_length=17.* but the given shape is"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TokenLayout.from_segments([PROMPT], **options)


def test_suffix_may_begin_where_documents_end() -> None:
    layout = TokenLayout.from_segments([PROMPT], row_length=16, suffix_offset=13)
    assert layout.positions[0][layout.segment_ids[0] == SUFFIX].tolist() == [13, 14, 15, 16]


def test_no_prompts_are_refused() -> None:
    with pytest.raises(UserError, match="no prompts"):
        TokenLayout.from_segments([], row_length=16)


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        ([[1, 2]], {}, r"list 0 has 1 blocks; at least a prefix and a suffix"),
        ([[1], [2], [3, 4]], {"answer_length": 2}, r"list 0: answer_length=2 .* leaves something of a suffix of 2 tok"),
        ([[1], [2], [3, 4]], {"answer_length": -1}, r"answer_length=-1 must be an integer from 0 to 1"),
        ([[1], [2], [3, 4]], {"answer_length": True}, r"answer_length=True must be"),
        ([[1], [2], [3, 4]], {"answer_length": [0, 1]}, r"2 values of answer_length for 1 lists"),
        ([[1], [2], [3]], {}, r"signals \(-2, -1\) lie outside a suffix of 1 tokens"),
        (
            [[1], [2], [3, 4, 5]],
            {"answer_length": 2},
            r"list 0: signals \(-2, -1\) lie past token 1 of the suffix, the",
        ),
        (
            [[1], [2], [3, 4, 5]],
            {"signals": (0, 2), "answer_length": 2},
            r"signals \(0, 2\) lie past token 1 .* 2 labels",
        ),
        ([[1], [2], [3, 4, 5]], {"signals": (2, -1)}, r"signals \(2, -1\) name one token twice"),
        ([[1], [2], [3, 4, 5]], {"signals": [(0,), (1,)]}, r"2 values of signals for 1 lists"),
        ([[1], [2], [3, 4, 5]], {"signals": [(0, 1.0)]}, r"list 0: signals \(0, 1\.0\) must be integers"),
        ([[1], [2], [3, 4]], {"max_block_length": -1}, r"max_block_length=-1 must be a positive integer"),
        ([[1], [2], [3, 4]], {"max_block_length": 0}, r"max_block_length=0 must be a positive integer"),
        ([[1], [2], [3, 4]], {"max_block_length": 2.0}, r"max_block_length=2\.0 must be a positive integer"),
        ([[1], [2], [3, 4]], {"row_length": 0}, r"row_length=0 must be a positive integer"),
        ([[1], [2, -5], [3, 4]], {}, r"list 0, block 1: token 1 is -5, not an id from 0"),
        ([[1], [2], [3, 7]], {"vocab_size": 7}, r"list 0, block 2: token 1 is 7, not an id from 0 to 6"),
        ([[1], [2], [3, 1 << 31]], {}, r"token 1 is 2147483648, not an id from 0 to 2147483647"),
        ([[1], [2.0], [3, 4]], {}, r"list 0, block 1 holds float64 values: token ids must be integers"),
        ([[1], [True, 2], [3, 4]], {}, r"block 1 holds bool values"),
        ([[1], np.ones(2, bool), [3, 4]], {}, r"block 1 holds bool values"),
        ([[1], ["2"], [3, 4]], {}, r"block 1 holds str32 values"),
        ([[1], [[2]], [3, 4]], {}, r"block 1 must be a flat list of token ids, not of shape \[1, 1\]"),
        ([[1], [[2], [3, 4]], [3, 4]], {}, r"block 1 must be a flat list of token ids"),
    ],
)
def test_blocks_that_make_no_prompt_are_refused(blocks: list, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TokenLayout.from_blocks([blocks], **options)


@quietly
@given(layouts)
def test_a_layout_padded_is_the_one_made_larger(case: tuple[list[PromptSegments], int, str, bool]) -> None:
    batch, row_length, packing, bucket = case
    settings = {"row_length": row_length, "packing": packing}
    layout = TokenLayout.from_segments(batch, **settings, bucket=bucket)
    own = layout.shape
    sizes = ("documents", "prefix", "rows", "suffix", "signals", "labels")
    larger = replace(own, **{name: getattr(own, name) + extra for extra, name in enumerate(sizes)})
    assert_same(layout.padded(larger), TokenLayout.from_segments(batch, **settings, shape=larger))
    assert_same(layout.padded(own), layout)
    with pytest.raises(ValueError, match="cannot be padded"):
        layout.padded(replace(own, prefix=own.prefix - 1))
