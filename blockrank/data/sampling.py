"""Training lists: positives, seeded negatives of the first stage, no false negatives by text, new order each epoch."""

from __future__ import annotations

import hashlib
import logging
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from blockrank.data.candidates import CandidateLists
from blockrank.data.files import hash64
from blockrank.data.progress import track
from blockrank.data.trec import sample_ids
from blockrank.errors import UserError, at_least, between
from blockrank.types import CandidateList, Document, is_visible

log = logging.getLogger(__name__)

_TOP_UP_TRIES = 20

WHOLE_COLLECTION = 20_000
"""Up to so many documents, a fingerprint reads them all."""

FINGERPRINT_LISTS = 256
FINGERPRINT_CANDIDATES = 16
"""Of larger collections it reads the first candidates of so many lists, and as many documents of the collection."""


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
        at_least(self, 1, "min_grade", "max_positives")
        between(self, 0, 1, "max_skipped_rate")


class TrainingLists:
    """The queries of `candidates` that have a positive, and the lists drawn for them.

    A positive is a document of the collection that has text: one without could be neither read nor found.
    `empty_positives` counts those left out for that, `skipped` the queries left without a positive. `counts` counts
    while lists are drawn: `false_negatives` (dropped, their text is a positive's), `empty_negatives` (dropped),
    `topped_up` (random documents added), `short` (lists that stayed short).

    Reads every positive once.

    Raises `UserError` when more than `max_skipped_rate` of the queries, or all, have no positive.
    """

    def __init__(self, candidates: CandidateLists, config: SamplingConfig | None = None) -> None:
        self.candidates = candidates
        self.config = config or SamplingConfig()
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        wanted = [
            [d for d, grade in candidates.qrels.get(query.id, {}).items() if grade >= self.config.min_grade]
            for query in candidates.queries
        ]
        usable = self._read_positives([d for ids in wanted for d in ids])
        positives = [tuple(d for d in ids if d in usable) for ids in wanted]
        self._lists = [(index, ids) for index, ids in enumerate(positives) if ids]
        self.skipped = len(positives) - len(self._lists)
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

    def _read_positives(self, ids: list[str]) -> set[str]:
        """Those of `ids` that are documents with text. The others are told."""
        absent, empty, usable = [], [], set()
        texts = hashlib.blake2b(digest_size=16)
        unique = dict.fromkeys(ids)
        with track("reading positives", len(unique)) as advance:
            for i in unique:
                document = self.candidates.documents.get(i)
                if document is None:
                    absent.append(i)
                elif document.is_empty:
                    empty.append(i)
                else:
                    usable.add(i)
                    _hash(texts, document)
                advance(1)
        for kind, missing in (("are not in the collection", absent), ("have no text", empty)):
            if missing:
                log.warning("%d positives %s and are left out: %s", len(missing), kind, sample_ids(missing))
        self.empty_positives = len(empty)
        self._positive_texts = texts.hexdigest()
        return usable

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what lists are drawn from; where it is equal, equal lists are drawn.

        It covers settings, texts and ids of the queries, candidates, grades and the text of every positive. Other
        documents' texts are covered whole in collections of up to `WHOLE_COLLECTION` documents. Of larger ones, which
        stream, a fixed sample is read: the first `FINGERPRINT_CANDIDATES` candidates of `FINGERPRINT_LISTS` lists, and
        as many documents evenly spread over the collection. A text changed outside the sample goes unnoticed.
        """
        content = hashlib.blake2b(repr(self.config).encode(), digest_size=16)
        content.update(self._positive_texts.encode())
        content.update(str(len(self.candidates.documents)).encode())
        for index, positives in self._lists:
            query = self.candidates.queries[index]
            grades = sorted(self.candidates.qrels[query.id].items())
            drawn_from = (query.id, query.text, self.candidates.ranking(index), positives, grades)
            content.update(repr(drawn_from).encode("utf-8", "surrogatepass"))
        for document in self._fingerprinted():
            _hash(content, document)
        return content.hexdigest()

    def _fingerprinted(self) -> Iterator[Document]:
        """The documents whose text the fingerprint covers, positives aside."""
        documents = self.candidates.documents
        if len(documents) <= WHOLE_COLLECTION:
            yield from documents.scan()
            return
        for place in _spread(len(self._lists), FINGERPRINT_LISTS):
            for i in self.candidates.ranking(self._lists[place][0])[:FINGERPRINT_CANDIDATES]:
                yield documents[i]
        for position in _spread(len(documents), FINGERPRINT_LISTS * FINGERPRINT_CANDIDATES):
            yield documents.pick(position)

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
    """Title and text as a reader tells them apart: documents equal in this are the same to a judge.

    Unicode's compatibility form (NFKC), so that composed and decomposed accents or full-width letters are one; lower
    case; no invisible characters; single spaces.
    """
    text = unicodedata.normalize("NFKC", f"{document.title} {document.text}").casefold()
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    if text.isascii() and text.isprintable():
        return text
    return " ".join("".join(c for c in text if c == " " or is_visible(c)).split())


def _spread(size: int, count: int) -> range | list[int]:
    """At most `count` of 0 ... size - 1, evenly spread."""
    return range(size) if size <= count else [i * size // count for i in range(count)]


def _hash(content: hashlib.blake2b, document: Document) -> None:
    content.update(repr((document.id, document.title, document.text)).encode("utf-8", "surrogatepass"))
