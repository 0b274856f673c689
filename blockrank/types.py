"""The words every other module speaks: queries, documents, candidate lists, judgements and runs. No JAX here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

Qrels: TypeAlias = dict[str, dict[str, int]]
"""query id -> document id -> grade. A query with no judgement keeps an empty inner dict."""

Run: TypeAlias = dict[str, dict[str, float]]
"""query id -> document id -> score, both in file order."""


@dataclass(frozen=True, slots=True)
class Query:
    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    text: str
    title: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether neither title nor text holds anything but white space."""
        return not self.text.strip() and not self.title.strip()


@dataclass(frozen=True, slots=True)
class CandidateList:
    """A query and the documents a first stage found for it, in first-stage order.

    `scores` are the first stage's (None when unknown); `relevance` are grades in the same order (None when the list is
    not judged; unjudged documents of a judged list count 0).
    """

    query: Query
    documents: tuple[Document, ...]
    scores: tuple[float, ...] | None = None
    relevance: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("scores", "relevance"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.documents):
                raise ValueError(f"query {self.query.id!r}: {len(values)} {name} for {len(self.documents)} documents")

    def __len__(self) -> int:
        return len(self.documents)


@dataclass(frozen=True, slots=True)
class ListScores:
    """What a ranker says of one candidate list, in the list's own order.

    `scores` float32 [N], higher is better; `truncated` bool [N] flags documents whose text was cut; `tokens` counts the
    real (unpadded) tokens read for the list.
    """

    scores: np.ndarray
    truncated: np.ndarray
    query_truncated: bool = False
    tokens: int = 0
    extra: Mapping[str, float] = field(default_factory=dict)


class Ranker(Protocol):
    """Anything that scores candidate lists; the evaluator needs nothing else."""

    name: str

    def score(self, lists: list[CandidateList]) -> list[ListScores]:
        """Scores for each list, in order. Lists may be ragged; an empty list gives empty scores and no model call."""
        ...
