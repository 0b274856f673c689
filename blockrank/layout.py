"""TokenLayout: where every token of a prompt lies in the one flat stream `[prefix | rows | suffix]`.

Documents are packed whole into rows of R tokens (first-fit decreasing), because a 75-token passage in a 160-token chunk
of its own spends half of all work on padding; one document per row (`chunked`, as the paper does it) is the special
case. Scores do not depend on the packing: segment ids keep documents apart and positions restart at every document.

A layout may be in shards, for devices that each read some of the documents: a list is then one stream per shard, with
the whole prefix and suffix and its own share of the rows.

B batch, N documents, M rows, R row length, P prefix, Q suffix, T = P + M*R + Q, S signals, A label tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeAlias, get_args

import jax
import numpy as np
from jaxtyping import Bool, Int

from blockrank.errors import UserError
from blockrank.packing import Packing, bucket_rows, even_row_length, pack, round_up, round_up_geometric
from blockrank.prompts.blocks import check_positive, segments_of_blocks
from blockrank.prompts.encode import PromptSegments

PREFIX, SUFFIX, PAD = -1, -2, -3
"""Segment ids of tokens that are no document's; a document's segment id is its index in the list, from 0."""

HostArray: TypeAlias = Any
"""A numpy array on the host, a JAX array under jit."""


@dataclass(frozen=True)
class LayoutShape:
    """The static sizes of a layout: what a compiled program depends on. `rows` are those of one shard."""

    documents: int
    prefix: int
    rows: int
    row_length: int
    suffix: int
    signals: int
    labels: int
    shards: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of one stream, T."""
        return self.prefix + self.rows * self.row_length + self.suffix

    def union(self, other: LayoutShape) -> LayoutShape:
        """The smallest shape that holds both."""
        return LayoutShape(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    def bucketed(self, quantum: int = 32) -> LayoutShape:
        """Rounded up to one of few shapes, so that compiled programs are reused.

        Rows, where the work is, have finer steps (`bucket_rows`). In shards, so have prefix and suffix: every device
        reads all of them.
        """
        quantum = quantum if self.shards == 1 else quantum // 2
        return LayoutShape(
            round_up_geometric(self.documents),
            round_up(self.prefix, quantum),
            bucket_rows(self.rows),
            self.row_length,
            round_up(self.suffix, quantum),
            self.signals,
            round_up(self.labels, 8),
            self.shards,
        )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "positions", "segment_ids", "signals", "labels", "document_mask"],
    meta_fields=["shape", "sequential"],
)
@dataclass(frozen=True)
class TokenLayout:
    """A batch of prompts laid out (int32; numpy on the host, traced under jit).

    `tokens`, `positions`, `segment_ids` [B, T]; padding has segment id `PAD`, token 0 and position 0.
    `signals` [B, S] and `labels` [B, A]: indices into the suffix of the signal tokens and of the answer tokens to be
    predicted, -1 where absent. `document_mask` bool [B, N]: which document slots hold a document. `sequential`: whether
    positions run on over the whole prompt, or are permutation-invariant (where all is prefix, the two are the same).

    In shards, B counts streams: the first shard of every list, then the second of every list, and so on. What is no
    row is the same in all shards of a list.
    """

    tokens: Int[HostArray, "B T"]
    positions: Int[HostArray, "B T"]
    segment_ids: Int[HostArray, "B T"]
    signals: Int[HostArray, "B S"]
    labels: Int[HostArray, "B A"]
    document_mask: Bool[HostArray, "B N"]
    shape: LayoutShape
    sequential: bool = False

    @property
    def prefix(self) -> slice:
        return slice(0, self.shape.prefix)

    @property
    def rows(self) -> slice:
        return slice(self.shape.prefix, self.shape.tokens - self.shape.suffix)

    @property
    def suffix(self) -> slice:
        return slice(self.shape.tokens - self.shape.suffix, self.shape.tokens)

    def token_count(self) -> np.ndarray:
        """Real tokens of each list, int64 [B / shards] (host only)."""
        real = np.asarray(self.segment_ids) != PAD
        lists = len(real) // self.shape.shards
        shared = real[:lists, self.prefix].sum(axis=1) + real[:lists, self.suffix].sum(axis=1)
        return shared + real[:, self.rows].reshape(self.shape.shards, lists, -1).sum(axis=(0, 2))

    @property
    def fill(self) -> float:
        """Share of row tokens that are real (host only)."""
        rows = np.asarray(self.segment_ids)[:, self.rows]
        return float((rows != PAD).mean()) if rows.size else 1.0

    @staticmethod
    def from_segments(
        batch: Sequence[PromptSegments],
        *,
        row_length: int,
        packing: Packing = "packed",
        suffix_offset: int | None = 8192,
        shape: LayoutShape | None = None,
        bucket: bool = True,
        shards: int = 1,
    ) -> TokenLayout:
        """Lay out a batch of prompts.

        `suffix_offset` is the position of the first suffix token under permutation-invariant positions; None gives
        sequential positions (documents in list order, then the suffix), as a dense causal model expects.
        `shape` fixes the static sizes; otherwise they are the smallest that fit, rounded to a bucket if `bucket`.
        With `shards`, rows are padded to a multiple of it, and packed rows are as long as divides best.
        Raises `UserError` for a document longer than a row, a suffix offset inside the documents, a shape too small, or
        no prompts.
        """
        if not batch:
            raise UserError("no prompts to lay out")
        if packing not in get_args(Packing):
            raise UserError(f"packing={packing!r} is unknown: choose one of {', '.join(get_args(Packing))}")
        if shape is not None:
            row_length, shards = (shape.row_length if shape.shards > 1 else row_length), shape.shards
        lengths = [[len(d) for d in s.documents] for s in batch]
        if shards > 1 and shape is None and packing == "packed":
            row_length = even_row_length(lengths, row_length, shards)
        plans = [pack(documents, row_length, packing) for documents in lengths]
        needed = LayoutShape(
            documents=max((len(s.documents) for s in batch), default=0),
            prefix=max((len(s.prefix) for s in batch), default=0),
            rows=-(-max((rows for _, rows in plans), default=0) // shards),
            row_length=row_length,
            suffix=max((len(s.suffix) for s in batch), default=0),
            signals=max((len(s.signals) for s in batch), default=0),
            labels=max((len(s.suffix) - s.answer_start for s in batch), default=0),
            shards=shards,
        )
        if shape is None:
            shape = needed.bucketed() if bucket else needed
        elif needed.union(shape) != shape:
            raise UserError(f"prompts need a layout of at least {needed}, but the given shape is {shape}")
        whole = replace(shape, rows=shape.rows * shards, shards=1)
        parts = [
            _lay_out(segments, places, whole, suffix_offset) for segments, (places, _) in zip(batch, plans, strict=True)
        ]
        arrays = (np.stack(arrays) for arrays in zip(*parts, strict=True))
        layout = TokenLayout(*arrays, shape=whole, sequential=suffix_offset is None)
        return layout if shards == 1 else layout.split(shards)

    def without_suffix(self) -> TokenLayout:
        """Prefix and rows alone, with no signals and labels."""
        end, nothing = self.suffix.start, self.signals[:, :0]
        return replace(
            self,
            **{name: getattr(self, name)[:, :end] for name in ("tokens", "positions", "segment_ids")},
            signals=nothing,
            labels=nothing,
            shape=replace(self.shape, suffix=0, signals=0, labels=0),
        )

    def padded(self, shape: LayoutShape) -> TokenLayout:
        """The same lists in a larger shape, of as long rows and as many shards (host only)."""
        own = self.shape
        if own.union(shape) != shape or (own.row_length, own.shards) != (shape.row_length, shape.shards):
            raise ValueError(f"{own} cannot be padded to {shape}")

        def pad(values: np.ndarray, size: int, padding: int) -> np.ndarray:
            return np.pad(values, ((0, 0), (0, size - values.shape[1])), constant_values=padding)

        def stream(values: np.ndarray, padding: int = 0) -> np.ndarray:
            sizes = (shape.prefix, shape.rows * shape.row_length, shape.suffix)
            parts = zip((self.prefix, self.rows, self.suffix), sizes, strict=True)
            return np.concatenate([pad(values[:, part], size, padding) for part, size in parts], axis=1)

        return TokenLayout(
            *(stream(self.tokens), stream(self.positions), stream(self.segment_ids, PAD)),
            *(pad(self.signals, shape.signals, -1), pad(self.labels, shape.labels, -1)),
            pad(self.document_mask, shape.documents, 0),
            shape=shape,
            sequential=self.sequential,
        )

    def split(self, shards: int) -> TokenLayout:
        """The same lists with their rows, padded to a multiple, dealt to `shards` streams each (host only)."""
        shape = self.shape
        if shape.shards != 1:
            raise ValueError(f"a layout in {shape.shards} shards is split already")
        lists, (first, last) = len(self.tokens), (self.prefix, self.suffix)
        rows = -(-shape.rows // shards)
        spare = (rows * shards - shape.rows) * shape.row_length

        def stream(values: np.ndarray, padding: int = 0) -> np.ndarray:
            dealt = np.pad(values[:, self.rows], ((0, 0), (0, spare)), constant_values=padding)
            dealt = dealt.reshape(lists, shards, -1).swapaxes(0, 1).reshape(shards * lists, -1)
            return np.concatenate([repeat(values[:, first]), dealt, repeat(values[:, last])], axis=1)

        def repeat(values: np.ndarray) -> np.ndarray:
            return np.tile(values, (shards, 1))

        return TokenLayout(
            *(stream(self.tokens), stream(self.positions), stream(self.segment_ids, PAD)),
            *(repeat(values) for values in (self.signals, self.labels, self.document_mask)),
            shape=replace(shape, rows=rows, shards=shards),
            sequential=self.sequential,
        )

    @staticmethod
    def from_blocks(
        batch: Sequence[Sequence[Sequence[int]]],
        *,
        signals: Sequence[int] | Sequence[Sequence[int]] = (-2, -1),
        answer_length: int | Sequence[int] = 0,
        max_block_length: int | None = None,
        row_length: int | None = None,
        packing: Packing = "packed",
        suffix_offset: int | None = 16384,
        vocab_size: int | None = None,
    ) -> TokenLayout:
        """Lay out token blocks that need no template: each list is `[prefix, document, ..., suffix]`.

        `signals` index the suffix like a Python list (negative from its end), and the suffix's last `answer_length`
        tokens are the labels: each one for all lists, or one per list. A signal may be the first label, as in the
        released code, but none of the later ones, which have read the answer. Blocks longer than `max_block_length`
        keep their first tokens, except the suffix: its last tokens carry the signals, so it stays whole. Rows are as
        long as the longest document unless `row_length` says. Ids are checked against `vocab_size` where it is given.
        Raises `UserError` that names the list, and the block, at fault.
        """
        if row_length is not None:
            check_positive("row_length", row_length)
        segments = segments_of_blocks(batch, signals, answer_length, max_block_length, vocab_size)
        longest = max((len(d) for s in segments for d in s.documents), default=1)
        return TokenLayout.from_segments(
            segments,
            row_length=row_length or max(longest, 1),
            packing=packing,
            suffix_offset=suffix_offset,
            bucket=False,
        )

    @staticmethod
    def causal(tokens: Int[HostArray, "B T"]) -> TokenLayout:
        """Plain text for a language model: everything is prefix."""
        b, t = tokens.shape
        positions = np.broadcast_to(np.arange(t, dtype=np.int32), (b, t))
        empty = np.zeros((b, 0), np.int32)
        shape = LayoutShape(documents=0, prefix=t, rows=0, row_length=1, suffix=0, signals=0, labels=0)
        segment_ids = np.full((b, t), PREFIX, np.int32)
        mask = empty.astype(bool)
        return TokenLayout(tokens, positions, segment_ids, empty, empty, mask, shape=shape, sequential=True)

    @staticmethod
    def blank(batch_size: int, shape: LayoutShape, *, sequential: bool = False) -> TokenLayout:
        """A batch of prompts without a token, to compile for a shape."""
        streams = batch_size * shape.shards

        def ints(size: int, value: int) -> np.ndarray:
            return np.full((streams, size), value, np.int32)

        tokens, segment_ids = ints(shape.tokens, 0), ints(shape.tokens, PAD)
        none = np.zeros((streams, shape.documents), bool)
        return TokenLayout(
            tokens,
            tokens,
            segment_ids,
            ints(shape.signals, -1),
            ints(shape.labels, -1),
            none,
            shape=shape,
            sequential=sequential,
        )

    def unpack(self) -> list[list[np.ndarray]]:
        """The token blocks `[prefix, documents in list order, suffix]` of every list: packing undone (host only)."""
        shards = self.shape.shards
        lists = len(self.tokens) // shards

        def joined(values: HostArray) -> np.ndarray:
            streams = np.asarray(values).reshape(shards, lists, -1)
            rows = streams[:, :, self.rows].swapaxes(0, 1).reshape(lists, -1)
            return np.concatenate([streams[0, :, self.prefix], rows, streams[0, :, self.suffix]], axis=1)

        ids = [[PREFIX, *np.flatnonzero(mask), SUFFIX] for mask in np.asarray(self.document_mask)[:lists]]
        whole = zip(joined(self.tokens), joined(self.segment_ids), ids, strict=True)
        return [[row[seg == i] for i in wanted] for row, seg, wanted in whole]


def _lay_out(
    segments: PromptSegments, places: list[tuple[int, int]], shape: LayoutShape, suffix_offset: int | None
) -> tuple[np.ndarray, ...]:
    """One prompt's arrays, in the order of TokenLayout's fields."""
    tokens, positions = np.zeros(shape.tokens, np.int32), np.zeros(shape.tokens, np.int32)
    segment_ids = np.full(shape.tokens, PAD, np.int32)

    def place(start: int, ids: np.ndarray, segment: int, position: int) -> None:
        where = slice(start, start + len(ids))
        tokens[where], segment_ids[where] = ids, segment
        positions[where] = np.arange(position, position + len(ids))

    place(0, segments.prefix, PREFIX, 0)
    after = len(segments.prefix)
    for index, (ids, (row, start)) in enumerate(zip(segments.documents, places, strict=True)):
        position = len(segments.prefix) if suffix_offset is not None else after
        place(shape.prefix + row * shape.row_length + start, ids, index, position)
        after = max(after, position + len(ids))
    if suffix_offset is not None and after > suffix_offset:
        raise UserError(f"documents end at position {after}, past suffix_offset={suffix_offset}: raise it")
    suffix_start = shape.tokens - shape.suffix
    place(suffix_start, segments.suffix, SUFFIX, after if suffix_offset is None else suffix_offset)

    def padded(values: Sequence[int], size: int) -> np.ndarray:
        return np.pad(np.asarray(values, np.int32), (0, size - len(values)), constant_values=-1)

    document_mask = np.arange(shape.documents) < len(segments.documents)
    labels = range(segments.answer_start, len(segments.suffix))
    return (
        tokens,
        positions,
        segment_ids,
        padded(segments.signals, shape.signals),
        padded(labels, shape.labels),
        document_mask,
    )
