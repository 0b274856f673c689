"""BM25 over a collection held in memory, by bm25s.

bm25s is imported where it is used: that starts JAX's backend, which must not be before several processes have met.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from blockrank.data.documents import Documents
from blockrank.data.progress import track
from blockrank.errors import UserError
from blockrank.types import Document, Query, Run

if TYPE_CHECKING:
    import bm25s

logging.getLogger("bm25s").setLevel(logging.WARNING)

_QUERIES_AT_ONCE = 256


class BM25Index:
    """Lucene's BM25 with k1 = 0.9, b = 0.4 (Anserini's values for MS MARCO) over title and text.

    Lower-cased words of two or more characters, English stop words removed, no stemming. Memory grows with the corpus:
    about 1 KB per passage.
    """

    def __init__(self, ids: list[str], retriever: bm25s.BM25 | None) -> None:
        self.ids = ids
        self._retriever = retriever

    @classmethod
    def build(cls, documents: Documents | Iterable[Document], *, k1: float = 0.9, b: float = 0.4) -> BM25Index:
        """An index of all documents. Raises `UserError` when there are none."""
        rows = documents.scan() if isinstance(documents, Documents) else documents
        ids: list[str] = []
        texts: list[str] = []
        for document in rows:
            ids.append(document.id)
            texts.append(f"{document.title} {document.text}")
        if not ids:
            raise UserError("BM25 needs at least one document")
        tokens = _tokenize(texts)
        if not any(tokens.ids):
            return cls(ids, None)
        import bm25s

        retriever = bm25s.BM25(k1=k1, b=b, method="lucene")
        retriever.index(tokens, show_progress=False)
        return cls(ids, retriever)

    def search(self, queries: Mapping[str, Query] | Iterable[Query], k: int) -> Run:
        """For each query its `k` best documents, best first; ties go by document id, last first, as in trec_eval.

        Documents that share no word with the query are left out, so a list may be shorter than `k`, or empty.
        """
        if k < 1:
            raise UserError(f"k must be at least 1, got {k}")
        rows = list(queries.values() if isinstance(queries, Mapping) else queries)
        run: Run = {}
        with track("BM25", len(rows)) as advance:
            for start in range(0, len(rows), _QUERIES_AT_ONCE):
                batch = rows[start : start + _QUERIES_AT_ONCE]
                run.update(self._search(batch, min(k, len(self.ids))))
                advance(len(batch))
        return run

    def _search(self, queries: list[Query], k: int) -> Run:
        if self._retriever is None:
            return {query.id: {} for query in queries}
        tokens = _words([query.text for query in queries])
        positions, scores = self._retriever.retrieve(tokens, k=k, show_progress=False)
        return {query.id: self._ranking(p, s) for query, p, s in zip(queries, positions, scores, strict=True)}

    def _ranking(self, positions: np.ndarray, scores: np.ndarray) -> dict[str, float]:
        found = [(float(score), self.ids[p]) for p, score in zip(positions, scores, strict=True) if score > 0]
        return {document: score for score, document in sorted(found, reverse=True)}


def _tokenize(texts: list[str]) -> bm25s.tokenization.Tokenized:
    import bm25s

    tokens = bm25s.tokenize(texts, stopwords="english", show_progress=False)
    assert isinstance(tokens, bm25s.tokenization.Tokenized)
    return tokens


def _words(texts: list[str]) -> list[list[str]]:
    import bm25s

    tokens = bm25s.tokenize(texts, stopwords="english", return_ids=False, show_progress=False)
    assert isinstance(tokens, list)
    return tokens
