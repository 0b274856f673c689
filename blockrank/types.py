"""The words every other module speaks: queries, documents, candidate lists, judgements and runs. No JAX here."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np

Qrels: TypeAlias = dict[str, dict[str, int]]
"""query id -> document id -> grade. A query with no judgement keeps an empty inner dict."""

Run: TypeAlias = dict[str, dict[str, float]]
"""query id -> document id -> score, both in file order."""

Rankings: TypeAlias = Mapping[str, Mapping[str, float]]
"""A run that may stay on disk, and is read a ranking at a time."""


_BLANK = frozenset(
    chr(code)
    for first, last in (
        *((0x034F, 0x034F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x2065, 0x2065), (0x2800, 0x2800)),
        *((0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0xE0000, 0xE0FFF)),
    )
    for code in range(first, last + 1)
)
"""Characters outside the invisible categories that are drawn as nothing: Unicode's other default ignorables (fillers,
joiners, variation selectors, tags) and the blank Braille pattern."""


@lru_cache(maxsize=2**16)
def is_visible(character: str) -> bool:
    """Whether a character is more than space, control or format: something that a reader could see."""
    return unicodedata.category(character) not in ("Zs", "Zl", "Zp", "Cc", "Cf") and character not in _BLANK


def has_text(text: str | None) -> bool:
    """Whether a text holds anything visible. Every "is this empty?" of the library is this question.

    White space, U+200B, U+FEFF, U+00AD, U+2060, NUL and their like are nothing, alone or together. Text that has
    something visible is never changed on their account.
    """
    return any(map(is_visible, text or ""))


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
        """Whether neither title nor text holds anything visible (`has_text`)."""
        return not has_text(self.text) and not has_text(self.title)


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
    real (unpadded) tokens read for the list. `parts`: the float32 [N] scores of each readout, by its name, of a ranker
    that has several.
    """

    scores: np.ndarray
    truncated: np.ndarray
    query_truncated: bool = False
    tokens: int = 0
    extra: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)


class Ranker(Protocol):
    """Anything that scores candidate lists; the evaluator needs nothing else."""

    name: str

    def score(self, lists: list[CandidateList]) -> list[ListScores]:
        """Scores for each list, in order. Lists may be ragged; an empty list gives empty scores and no model call."""
        ...
