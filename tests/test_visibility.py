"""The dense mask against plain loops over (query, key) pairs that know only each token's part and place."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SHAPE, batches, numbered_prompt

from blockrank.attention.visibility import (
    ALL,
    BLOCKRANK,
    CAUSAL,
    DENSE,
    SAME_SEGMENT,
    Part,
    Relation,
    Tokens,
    Visibility,
    window,
)
from blockrank.layout import TokenLayout
from blockrank.prompts.encode import PromptSegments


class Place(NamedTuple):
    part: str
    document: int
    index: int
    order: int


def places(prompt: PromptSegments) -> dict[int, Place]:
    """Token -> where it stands; tokens of a numbered prompt are distinct."""
    blocks = [("prefix", -1, prompt.prefix)]
    blocks += [("document", i, ids) for i, ids in enumerate(prompt.documents)]
    blocks += [("suffix", -1, prompt.suffix)]
    found: dict[int, Place] = {}
    for part, document, ids in blocks:
        for index, token in enumerate(ids.tolist()):
            found[token] = Place(part, document, index, len(found))
    return found


def blockrank_sees(q: Place, k: Place) -> bool:
    if k.part == "prefix":
        return q.part != "prefix" or k.index <= q.index
    if k.part == "document":
        return q.part == "suffix" or (q.part == "document" and q.document == k.document and k.index <= q.index)
    return q.part == "suffix" and k.index <= q.index


def dense_sees(q: Place, k: Place) -> bool:
    return k.order <= q.order


def brute_force(layout: TokenLayout, batch: list[PromptSegments], sees: Callable[[Place, Place], bool]) -> np.ndarray:
    size = layout.shape.tokens
    mask = np.zeros((len(batch), size, size), bool)
    for b, prompt in enumerate(batch):
        known = places(prompt)
        for t, query in enumerate(layout.tokens[b].tolist()):
            for s, key in enumerate(layout.tokens[b].tolist()):
                if query and key:
                    mask[b, t, s] = sees(known[query], known[key])
    return mask


def lay_out(batch: list[PromptSegments], pattern: Visibility, packing: str = "packed") -> TokenLayout:
    shape = SHAPE if packing == "packed" else None
    offset = None if pattern.sequential else 64
    return TokenLayout.from_segments(batch, row_length=16, packing=packing, suffix_offset=offset, shape=shape)


@settings(max_examples=20, deadline=None)
@given(batches(), st.sampled_from(["packed", "chunked"]))
def test_blockrank_equals_brute_force(batch: list[PromptSegments], packing: str) -> None:
    layout = lay_out(batch, BLOCKRANK, packing)
    mask = np.asarray(BLOCKRANK.materialize(Tokens.of(layout)))
    np.testing.assert_array_equal(mask, brute_force(layout, batch, blockrank_sees))


@settings(max_examples=20, deadline=None)
@given(batches(), st.sampled_from([None, 1, 3, 7]))
def test_dense_equals_brute_force(batch: list[PromptSegments], size: int | None) -> None:
    layout = lay_out(batch, DENSE)
    mask = np.asarray(DENSE.materialize(Tokens.of(layout), size))

    def sees(q: Place, k: Place) -> bool:
        return dense_sees(q, k) and (size is None or q.order - k.order < size)

    np.testing.assert_array_equal(mask, brute_force(layout, batch, sees))


@pytest.mark.parametrize("pattern", [BLOCKRANK, DENSE], ids=lambda p: p.name)
def test_padding_sees_nothing_and_is_not_seen(pattern: Visibility) -> None:
    layout = lay_out([numbered_prompt(3, [5, 4, 6], 4), numbered_prompt(8, [], 2)], pattern)
    mask = np.asarray(pattern.materialize(Tokens.of(layout)))
    real = np.asarray(layout.tokens) > 0
    assert not mask[~real].any()
    assert not np.swapaxes(mask, 1, 2)[~real].any()
    itself = np.diagonal(mask, axis1=1, axis2=2)
    np.testing.assert_array_equal(itself, real)


def test_visible_pairs_by_hand() -> None:
    """Prefix 2, documents 3 and 2, suffix 2: 3 + 3*2 + 6 + 2*2 + 3 + 2*(2+5) + 3 pairs."""
    layout = lay_out([numbered_prompt(2, [3, 2], 2)], BLOCKRANK)
    assert int(BLOCKRANK.materialize(Tokens.of(layout)).sum()) == 3 + 6 + 6 + 4 + 3 + 14 + 3
    layout = lay_out([numbered_prompt(2, [3, 2], 2)], DENSE)
    assert int(DENSE.materialize(Tokens.of(layout)).sum()) == 9 * 10 // 2


def test_relations_compose() -> None:
    assert ALL & CAUSAL == CAUSAL
    assert Relation(causal=True, same_segment=True) == SAME_SEGMENT & CAUSAL
    assert window(5) & window(3) & CAUSAL == Relation(causal=True, window=3)
    assert window(5) & ALL == window(5)


@settings(max_examples=10, deadline=None)
@given(batches())
def test_other_patterns_compose_from_the_same_relations(batch: list[PromptSegments]) -> None:
    """An encoder's: documents see themselves both ways within 3 tokens, the prefix sees itself, nothing else."""
    pattern = Visibility(
        "windowed", ((Part.DOCUMENT, Part.DOCUMENT, SAME_SEGMENT & window(3)), (Part.PREFIX, Part.PREFIX, ALL))
    )

    def sees(q: Place, k: Place) -> bool:
        if q.part == k.part == "document":
            return q.document == k.document and abs(q.index - k.index) < 3
        return q.part == k.part == "prefix"

    layout = lay_out(batch, pattern)
    mask = np.asarray(pattern.materialize(Tokens.of(layout)))
    np.testing.assert_array_equal(mask, brute_force(layout, batch, sees))


def test_a_pair_without_a_rule_has_no_relation() -> None:
    assert BLOCKRANK.relation(Part.PREFIX, Part.DOCUMENT) is None
    assert BLOCKRANK.relation(Part.DOCUMENT, Part.DOCUMENT) == SAME_SEGMENT & CAUSAL


def test_two_rules_for_one_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="two rules for one pair"):
        Visibility("twice", ((Part.PREFIX, Part.PREFIX, ALL), (Part.PREFIX, Part.PREFIX, CAUSAL)))
