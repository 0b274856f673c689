"""Prompts of token ids that need no template: each list is `[prefix, document, ..., suffix]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blockrank.errors import UserError
from blockrank.prompts.encode import PromptSegments


def segments_of_blocks(
    batch: Sequence[Sequence[Sequence[int]]],
    signals: Sequence[int] | Sequence[Sequence[int]],
    answer_length: int | Sequence[int],
    max_block_length: int | None,
    vocab_size: int | None,
) -> list[PromptSegments]:
    """The prompts `TokenLayout.from_blocks` lays out; raises `UserError` as it says."""
    if max_block_length is not None:
        check_positive("max_block_length", max_block_length)
    shared = all(_is_integer(signal) for signal in signals)
    places = _per_list("signals", [signals] * len(batch) if shared else signals, len(batch))
    one = np.ndim(answer_length) == 0
    answers = _per_list("answer_length", [answer_length] * len(batch) if one else answer_length, len(batch))
    return [
        _segments(f"list {i}", blocks, places[i], answers[i], max_block_length, vocab_size)
        for i, blocks in enumerate(batch)
    ]


def check_positive(name: str, value: Any) -> None:
    """Raises `UserError` unless `value` is an integer above zero."""
    if not _is_integer(value) or value < 1:
        raise UserError(f"{name}={value!r} must be a positive integer")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _per_list(name: str, values: Any, lists: int) -> Sequence[Any]:
    if len(values) != lists:
        raise UserError(f"{len(values)} values of {name} for {lists} lists: give one for all, or one per list")
    return values


def _segments(
    where: str, blocks: Sequence[Any], signals: Any, answer_length: Any, limit: int | None, vocab_size: int | None
) -> PromptSegments:
    if len(blocks) < 2:
        raise UserError(f"{where} has {len(blocks)} blocks; at least a prefix and a suffix are needed")
    prefix, *documents, suffix = (_ids(f"{where}, block {j}", block, vocab_size) for j, block in enumerate(blocks))
    if not _is_integer(answer_length) or not 0 <= answer_length < len(suffix):
        raise UserError(
            f"{where}: answer_length={answer_length!r} must be an integer from 0 to {len(suffix) - 1}, "
            f"so that it leaves something of a suffix of {len(suffix)} tokens"
        )
    answer_start = len(suffix) - int(answer_length)
    return PromptSegments(
        prefix=prefix[:limit],
        documents=tuple(document[:limit] for document in documents),
        document_index=tuple(range(len(documents))),
        suffix=suffix,
        signals=_places(where, signals, len(suffix), answer_start),
        answer_start=answer_start,
        truncated=tuple(limit is not None and len(document) > limit for document in documents),
        query_truncated=False,
    )


def _places(where: str, signals: Any, suffix: int, answer_start: int) -> tuple[int, ...]:
    """Where the signals are in the suffix, from its start."""
    if np.ndim(signals) != 1 or not all(_is_integer(signal) for signal in signals):
        raise UserError(f"{where}: signals {signals!r} must be integers that index the suffix")
    places = tuple(int(s) + suffix if s < 0 else int(s) for s in signals)
    if any(not 0 <= place < suffix for place in places):
        raise UserError(f"{where}: signals {tuple(signals)} lie outside a suffix of {suffix} tokens")
    if any(place > answer_start for place in places):
        raise UserError(
            f"{where}: signals {tuple(signals)} lie past token {answer_start} of the suffix, the first of the answer's "
            f"{suffix - answer_start} labels: they would have read the answer"
        )
    if len(set(places)) < len(places):
        raise UserError(f"{where}: signals {tuple(signals)} name one token twice")
    return places


def _ids(where: str, block: Any, vocab_size: int | None) -> np.ndarray:
    """A block as int32 [n]."""
    try:
        ids = np.asarray(block)
    except ValueError as error:
        raise UserError(f"{where} must be a flat list of token ids ({error})") from error
    if ids.ndim != 1:
        raise UserError(f"{where} must be a flat list of token ids, not of shape {list(ids.shape)}")
    if not ids.size:
        return np.zeros(0, np.int32)
    if ids.dtype.kind not in "iu" or (not isinstance(block, np.ndarray) and any(isinstance(i, bool) for i in block)):
        kind = "bool" if ids.dtype.kind in "iu" else ids.dtype.name
        raise UserError(f"{where} holds {kind} values: token ids must be integers")
    limit = np.iinfo(np.int32).max + 1 if vocab_size is None else vocab_size
    bad = np.flatnonzero((ids < 0) | (ids >= limit))
    if bad.size:
        raise UserError(f"{where}: token {bad[0]} is {ids[bad[0]]}, not an id from 0 to {limit - 1}")
    return ids.astype(np.int32)
