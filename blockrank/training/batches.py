"""Candidate lists -> one training batch of fixed shape, on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from blockrank.errors import UserError
from blockrank.layout import PAD, LayoutShape, TokenLayout
from blockrank.losses import TrainingBatch
from blockrank.prompts.encode import PromptEncoder, PromptSegments
from blockrank.rankers.attention import AttentionSettings
from blockrank.types import CandidateList


@dataclass(frozen=True, eq=False)
class HostBatch:
    """A training batch with what the log wants to know of it.

    `tokens` counts real tokens; `padding_share` and `truncated_share` are shares of all tokens and of all documents.
    """

    query_ids: tuple[str, ...]
    data: TrainingBatch
    tokens: int
    padding_share: float
    truncated_share: float
    without_positive: int


@dataclass(frozen=True)
class BatchEncoder:
    """Encodes and lays out the lists of a batch; a document graded `min_grade` or more is a positive.

    `shape` is the least layout to pad to (`fitted` finds one), so that few programs are compiled. A batch's layout
    depends on its lists alone, hence is the same after a restart.
    """

    encoder: PromptEncoder
    settings: AttentionSettings
    min_grade: int = 1
    shape: LayoutShape | None = None

    def __post_init__(self) -> None:
        if self.encoder.limits.long_documents != "truncate":
            raise UserError("training reads one segment per document: set limits.long_documents=truncate")

    def __call__(self, lists: Sequence[CandidateList]) -> HostBatch:
        segments = [self._encode(candidates) for candidates in lists]
        layout = self._lay_out(segments)
        real = int((np.asarray(layout.segment_ids) != PAD).sum())
        documents = sum(len(s.truncated) for s in segments)
        positive = self._positive(lists, segments, layout.shape.documents)
        return HostBatch(
            query_ids=tuple(candidates.query.id for candidates in lists),
            data=TrainingBatch(layout, positive),
            tokens=real,
            padding_share=1.0 - real / layout.tokens.size,
            truncated_share=sum(sum(s.truncated) for s in segments) / max(documents, 1),
            without_positive=int((~positive.any(axis=1)).sum()),
        )

    def fitted(self, sample: Iterable[CandidateList]) -> BatchEncoder:
        """The same encoder with a shape that holds every list of `sample`; larger lists still get larger layouts."""
        shape = self.shape
        for candidates in sample:
            found = self.settings.lay_out([self._encode(candidates)], bucket=False).shape
            shape = found if shape is None else shape.union(found)
        return replace(self, shape=shape)

    def _encode(self, candidates: CandidateList) -> PromptSegments:
        if candidates.relevance is None:
            raise UserError(f"query {candidates.query.id!r} has no judgements: training lists need relevance")
        answer = [i for i, grade in enumerate(candidates.relevance) if grade >= self.min_grade]
        return self.encoder.encode(candidates, answer)

    def _lay_out(self, segments: Sequence[PromptSegments]) -> TokenLayout:
        if self.shape is None:
            return self.settings.lay_out(segments)
        exact = self.settings.lay_out(segments, bucket=False)
        if exact.shape.union(self.shape) == self.shape:
            return self.settings.lay_out(segments, shape=self.shape)
        return self.settings.lay_out(segments, shape=exact.shape.bucketed().union(self.shape))

    def _positive(
        self, lists: Sequence[CandidateList], segments: Sequence[PromptSegments], documents: int
    ) -> np.ndarray:
        positive = np.zeros((len(lists), documents), bool)
        for row, candidates, encoded in zip(positive, lists, segments, strict=True):
            grades = candidates.relevance or ()
            row[: len(encoded.document_index)] = [grades[i] >= self.min_grade for i in encoded.document_index]
        return positive
