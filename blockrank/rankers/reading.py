"""Candidate lists as token streams for a decoder: how a prompt is laid out, batched, and spread over devices."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from blockrank.attention.visibility import PATTERNS, Visibility
from blockrank.errors import UserError
from blockrank.layout import LayoutShape, TokenLayout
from blockrank.packing import Packing, round_up, round_up_geometric
from blockrank.parallel import LISTS, spread_lists
from blockrank.prompts.compiled import Cue
from blockrank.prompts.encode import PromptEncoder, PromptSegments
from blockrank.types import CandidateList, ListScores

log = logging.getLogger(__name__)

T = TypeVar("T")
Batch: TypeAlias = list[tuple[int, PromptSegments]]
"""Lists that are read together: the place of each in the input, and its prompt."""


@dataclass(frozen=True)
class ReadingSettings:
    """How a decoder reads prompts.

    `visibility`: who sees whom (`blockrank`, or `dense` for plain causal attention, where `suffix_offset` has no
    meaning). `batch_tokens`: the most stream tokens, padding included, given to the device at once (a single list may
    have more).
    """

    suffix_offset: int = 8192
    visibility: str = "blockrank"
    packing: Packing = "packed"
    row_length: int = 512
    attention_backend: str = "auto"
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        if self.visibility not in PATTERNS:
            raise UserError(f"visibility={self.visibility!r} is unknown: choose one of {', '.join(PATTERNS)}")
        one_of(self, "packing", get_args(Packing))
        for name in ("row_length", "suffix_offset", "batch_tokens"):
            whole(self, name, 1)

    @property
    def pattern(self) -> Visibility:
        """The visibility that `visibility` names."""
        return PATTERNS[self.visibility]

    def positions(self, shape: LayoutShape) -> int:
        """How many positions a layout of this shape has at most."""
        return shape.tokens if self.pattern.sequential else self.suffix_offset + shape.suffix

    def lay_out(
        self, batch: Sequence[PromptSegments], *, shape: LayoutShape | None = None, bucket: bool = True, shards: int = 1
    ) -> TokenLayout:
        """A batch of prompts, with the positions the visibility is meant for."""
        return TokenLayout.from_segments(
            batch,
            row_length=self.row_length,
            packing=self.packing,
            suffix_offset=None if self.pattern.sequential else self.suffix_offset,
            shape=shape,
            bucket=bucket,
            shards=shards,
        )


def one_of(settings: Any, name: str, known: Sequence[str]) -> None:
    """Raises `UserError` unless the field is one of `known`."""
    if getattr(settings, name) not in known:
        raise UserError(f"{name}={getattr(settings, name)!r} is unknown: choose {' or '.join(known)}")


def whole(settings: Any, name: str, least: int) -> None:
    """Raises `UserError` unless the field is a whole number from `least` on."""
    value = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UserError(f"{name}={value!r} must be a whole number from {least} on")


class ListReader:
    """Turns candidate lists into batches of few shapes, and hands them to a program one ahead of its results.

    `max_positions`: those the model was trained for. With a `mesh`, the rows of each list are spread over its axis
    `doc`, lists over `data` and `fsdp`. `cue`: where prompts end.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        settings: ReadingSettings,
        max_positions: int,
        mesh: Mesh | None = None,
        cue: Cue = "signals",
    ) -> None:
        self.encoder, self.settings, self.mesh = encoder, settings, mesh
        self._cue: Cue = cue
        self.shards = 1 if mesh is None else mesh.shape["doc"]
        self._list_groups = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in LISTS)
        self._max_positions = max_positions
        self._positions_told = False

    def note_positions(self, count: int) -> None:
        """Tell, once, of positions beyond those the model was trained for, where RoPE extrapolates.

        A warning where they hold running text; under BlockRank only the suffix lies there, by choice.
        """
        if count <= self._max_positions or self._positions_told:
            return
        self._positions_told = True
        known = f"the model's max_position_embeddings={self._max_positions}"
        text = f"positions run to {count}, past {known}: RoPE extrapolates"
        if self.settings.pattern.sequential:
            log.warning("%s; rank fewer or shorter documents, or take a model with a longer context", text)
        else:
            log.info("%s; ranker.suffix_offset=%d says where the suffix lies", text, self.settings.suffix_offset)

    def lay_out(self, batch: Sequence[PromptSegments]) -> TokenLayout:
        """A batch of prompts in bucketed shape, in as many shards as the mesh has devices for a list."""
        return self.settings.lay_out(batch, shards=self.shards)

    def bucket(self, lists: int) -> int:
        """How many lists a batch is padded to, so that few sizes are compiled and each device group has as many."""
        return round_up(round_up_geometric(lists), self._list_groups)

    def call(self, program: Callable[[TokenLayout], T], layout: TokenLayout) -> T:
        """`program` on a host layout, spread over the mesh if there is one; the device may still be computing."""
        if self.mesh is None:
            return program(layout)
        with jax.set_mesh(self.mesh):
            return program(spread_lists(layout, self.mesh))

    def read(
        self, lists: Sequence[CandidateList], program: Callable[[Batch, TokenLayout], T]
    ) -> Iterator[tuple[Batch, TokenLayout, T]]:
        """Each batch of lists that have something to read, with what the program makes of it.

        `program(batch, layout)` gets the layout padded to `bucket` lists by repeating the last, and dispatches device
        work; its result is given out when the next batch has been dispatched, so that the host encodes and lays out
        while the device computes.
        """
        return _one_late(self._launch(lists, program))

    def _launch(
        self, lists: Sequence[CandidateList], program: Callable[[Batch, TokenLayout], T]
    ) -> Iterator[tuple[Batch, TokenLayout, T]]:
        for batch in self._batches(lists):
            layout = self.lay_out([segments for _, segments in batch])
            self.note_positions(int(layout.positions.max()) + 1)
            yield batch, layout, program(batch, _pad_batch(layout, self.bucket(len(batch))))

    def _batches(self, lists: Sequence[CandidateList]) -> Iterator[Batch]:
        """Lists that have something to read, in order, as many together as `batch_tokens` allows."""
        batch: Batch = []
        shape: LayoutShape | None = None
        for i, candidates in enumerate(lists):
            segments = self.encoder.encode(candidates, cue=self._cue) if candidates.documents else None
            if segments is None or not segments.documents:
                continue
            self._check_rows(candidates, segments)
            own = self.lay_out([segments]).shape
            joint = own if shape is None else shape.union(own)
            if batch and round_up_geometric(len(batch) + 1) * joint.tokens > self.settings.batch_tokens:
                yield batch
                batch, joint = [], own
            batch.append((i, segments))
            shape = joint
        if batch:
            yield batch

    def _check_rows(self, candidates: CandidateList, segments: PromptSegments) -> None:
        lengths = [len(tokens) for tokens in segments.documents]
        longest = int(np.argmax(lengths))
        if lengths[longest] > self.settings.row_length:
            document = candidates.documents[segments.document_index[longest]]
            raise UserError(
                f"query {candidates.query.id!r}: document {document.id!r} has {lengths[longest]} tokens, more than a "
                f"row holds: raise row_length={self.settings.row_length}, or lower "
                f"document_tokens={self.encoder.limits.document_tokens}"
            )


def list_scores(segments: PromptSegments, scores: np.ndarray, tokens: int, **extra: float) -> ListScores:
    """`scores` float32 [N] of a list with what its prompt says of truncation."""
    return ListScores(scores, np.asarray(segments.truncated, bool), segments.query_truncated, tokens, extra)


def unread(candidates: CandidateList, score: float) -> ListScores:
    """The scores of a list whose documents have no text."""
    n = len(candidates)
    return ListScores(np.full(n, score, np.float32), np.zeros(n, bool))


def _one_late(items: Iterable[T]) -> Iterator[T]:
    """The same items, each given out when the next has been made."""
    waiting: list[T] = []
    for item in items:
        yield from waiting
        waiting = [item]
    yield from waiting


def _pad_batch(layout: TokenLayout, size: int) -> TokenLayout:
    """Repeat the last list up to `size` lists."""
    shards = layout.shape.shards
    lists = layout.tokens.shape[0] // shards
    spare = size - lists

    def pad(x: np.ndarray) -> np.ndarray:
        streams = x.reshape(shards, lists, *x.shape[1:])
        padded = np.concatenate([streams, np.repeat(streams[:, -1:], spare, axis=1)], axis=1)
        return padded.reshape(shards * size, *x.shape[1:])

    return jax.tree.map(pad, layout) if spare else layout
