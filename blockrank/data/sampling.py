"""Training lists: positives, seeded negatives of the first stage, no false negatives by text, new order each epoch."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from dataclasses import dataclass

import numpy as np

from blockrank.data.candidates import CandidateLists
from blockrank.data.files import hash64
from blockrank.errors import UserError
from blockrank.types import CandidateList, Document

log = logging.getLogger(__name__)

_TOP_UP_TRIES = 20


@dataclass(frozen=True)
class SamplingConfig:
    """How training lists are drawn.

    `min_grade`: lowest grade of a positive. Documents judged above 0 but below it are neither positive nor negative.
    `max_positives`: most positives in one list; when a query has more, each epoch draws its own.
    `top_up`: when the run has too few negatives, fill up with random documents of the collection; else lists are short.
    `max_skipped_rate`: highest tolerated share of queries without a positive; those are skipped and counted.
    """

    min_grade: int = 1
    max_positives: int = 1
    top_up: bool = True
    max_skipped_rate: float = 0.5

    def __post_init__(self) -> None:
        if self.min_grade < 1 or self.max_positives < 1:
            raise ValueError("min_grade and max_positives must be at least 1")
        if not 0 <= self.max_skipped_rate <= 1:
            raise ValueError(f"max_skipped_rate must be between 0 and 1, got {self.max_skipped_rate}")


class TrainingLists:
    """The queries of `candidates` that have a positive, and the lists drawn for them.

    `skipped` counts queries without a positive. `counts` counts while lists are drawn: `false_negatives` (dropped,
    their text is a positive's), `empty_negatives` (dropped), `topped_up` (random documents added), `short` (lists that
    stayed short).

    Raises `UserError` when more than `max_skipped_rate` of the queries, or all, have no positive.
    """

    def __init__(self, candidates: CandidateLists, config: SamplingConfig | None = None) -> None:
        self.candidates = candidates
        self.config = config or SamplingConfig()
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        documents, qrels = candidates.documents, candidates.qrels
        wanted = [
            [d for d, grade in qrels.get(query.id, {}).items() if grade >= self.config.min_grade]
            for query in candidates.queries
        ]
        absent = set(documents.missing(d for positives in wanted for d in positives))
        positives = [tuple(d for d in ids if d not in absent) for ids in wanted]
        self._lists = [(index, ids) for index, ids in enumerate(positives) if ids]
        self.skipped = len(positives) - len(self._lists)
        if absent:
            log.warning("%d positives have no text in the collection, e.g. %r", len(absent), min(absent))
        if self.skipped:
            log.warning("%d of %d queries have no positive and are skipped", self.skipped, len(positives))
        if not self._lists or self.skipped > self.config.max_skipped_rate * len(positives):
            raise UserError(
                f"{self.skipped} of {len(positives)} queries have no positive of grade {self.config.min_grade} or more "
                f"in the qrels and the collection (max_skipped_rate={self.config.max_skipped_rate}); is this the "
                "split's own qrels file?"
            )

    def __len__(self) -> int:
        return len(self._lists)

    def query_id(self, index: int) -> str:
        """The query of list `index`."""
        return self.candidates.queries[self._lists[index][0]].id

    @property
    def fingerprint(self) -> str:
        """A hash of queries, candidates, positives and settings: equal lists are drawn where it is equal."""
        content = hashlib.blake2b(repr(self.config).encode(), digest_size=16)
        for index, positives in self._lists:
            ids = (self.candidates.queries[index].id, *self.candidates.ranking(index), "", *positives)
            content.update("\0".join(ids).encode("utf-8", "surrogatepass"))
        return content.hexdigest()

    def sample(self, index: int, epoch: int, *, num_candidates: int, seed: int) -> CandidateList:
        """List `index` as `epoch` sees it: at most `num_candidates` documents in random order, judged, without scores.

        At least one positive and, where there is any, one negative. Depends on seed, epoch and the query's id alone.
        """
        if num_candidates < 2:
            raise UserError(f"num_candidates must be at least 2 (one positive, one negative), got {num_candidates}")
        position, positive_ids = self._lists[index]
        query = self.candidates.queries[position]
        rng = np.random.default_rng(hash64(f"{seed}\0{epoch}\0{query.id}"))
        grades = self.candidates.qrels[query.id]
        known = {d: self.candidates.documents[d] for d in positive_ids}
        texts = {normalized_text(document) for document in known.values()}
        room = min(len(known), self.config.max_positives, num_candidates - 1)
        positives = [known[positive_ids[i]] for i in rng.permutation(len(positive_ids))[:room]]
        negatives, counts = self._negatives(position, grades, texts, num_candidates - room, rng)
        with self._lock:
            self.counts.update(counts)
        documents = [*positives, *negatives]
        order = rng.permutation(len(documents))
        return CandidateList(
            query=query,
            documents=tuple(documents[i] for i in order),
            relevance=tuple(grades.get(documents[i].id, 0) for i in order),
        )

    def _negatives(
        self, position: int, grades: dict[str, int], positive_texts: set[str], count: int, rng: np.random.Generator
    ) -> tuple[list[Document], Counter[str]]:
        documents = self.candidates.documents
        itself = self.candidates.queries[position].id if self.candidates.ignore_self else None
        counts: Counter[str] = Counter()
        chosen: dict[str, Document] = {}

        def consider(document: Document) -> None:
            if normalized_text(document) in positive_texts:
                counts["false_negatives"] += 1
            elif document.is_empty:
                counts["empty_negatives"] += 1
            else:
                chosen[document.id] = document

        pool = [d for d in self.candidates.ranking(position) if grades.get(d, 0) <= 0]
        for i in rng.permutation(len(pool)):
            if len(chosen) == count:
                break
            consider(documents[pool[i]])
        from_run = len(chosen)
        if self.config.top_up:
            for _ in range(_TOP_UP_TRIES * (count - from_run)):
                if len(chosen) == count:
                    break
                document = documents.pick(int(rng.integers(len(documents))))
                if document.id not in chosen and document.id != itself and grades.get(document.id, 0) <= 0:
                    consider(document)
        counts["topped_up"] += len(chosen) - from_run
        counts["short"] += len(chosen) < count
        return list(chosen.values()), counts


def normalized_text(document: Document) -> str:
    """Title and text in lower case with single spaces: documents equal in this are the same to a judge."""
    return " ".join(f"{document.title} {document.text}".casefold().split())
