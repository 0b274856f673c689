"""`Reranker`: a ranker for programs, with plain strings in and ranked results out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np

from blockrank.errors import UserError
from blockrank.evaluation.ranking import check_scores, rerank_order
from blockrank.layout import Packing
from blockrank.prompts.encode import LongDocuments
from blockrank.prompts.template import PromptTemplate
from blockrank.sources import make_ranker, open_source
from blockrank.types import CandidateList, Document, ListScores, Query, Ranker

DocumentLike: TypeAlias = str | Document | Mapping[str, Any]
"""A text, a `Document`, or a mapping with `text`, `title` or both (null is empty; other keys are left alone)."""


@dataclass(frozen=True, slots=True)
class RankedResult:
    """One document in its new place: `rank` counts from 1, `index` is its place in the input."""

    doc_id: str
    score: float
    rank: int
    index: int
    document: DocumentLike
    truncated: bool = False
    metadata: Any = None


@dataclass(frozen=True, slots=True)
class RankedResults:
    """A ranked list, best first.

    `confidence` is the best document's share of the list's total score, in [0, 1]; None for an empty list or when
    scores are not masses. Attention scores are relative to their list and do not compare across lists.
    """

    query: str
    results: tuple[RankedResult, ...]
    confidence: float | None = None
    query_truncated: bool = False
    truncated: int = field(default=0)

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[RankedResult]:
        return iter(self.results)

    def __getitem__(self, index: int) -> RankedResult:
        return self.results[index]


class Reranker:
    """Re-ranks lists of texts with any `Ranker`."""

    def __init__(self, ranker: Ranker) -> None:
        self.ranker = ranker

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        ranker: Literal["attention"] = "attention",
        *,
        prompt: str | Path | None = None,
        preset: str | None = None,
        score_layer: int | None = None,
        layout: Packing | None = None,
        row_length: int | None = None,
        document_tokens: int | None = None,
        query_tokens: int | None = None,
        long_documents: LongDocuments | None = None,
        dtype: str = "float32",
        attention_backend: str | None = None,
    ) -> Reranker:
        """A re-ranker from a training run, a Hugging Face folder, a GGUF file, or the embedded model `smollm2`.

        What is not given comes from the training run where there is one, else from the preset (`paper` unless given).
        `dtype` is the type of weights and activations, `float32` or `bfloat16`; scores are float32 either way.
        Raises `UserError` for anything that does not exist or does not fit.
        """
        if ranker != "attention":
            raise UserError(f"ranker={ranker!r} is unknown: choose attention")
        if dtype not in ("float32", "bfloat16"):
            raise UserError(f"dtype={dtype!r} is unknown: choose float32 or bfloat16")
        settings = {
            "score_layer": score_layer,
            "packing": layout,
            "row_length": row_length,
            "attention_backend": attention_backend,
        }
        limits = {
            "document_tokens": document_tokens,
            "query_tokens": query_tokens,
            "long_documents": long_documents,
        }
        loaded = make_ranker(
            open_source(path_or_name, dtype=jnp.dtype(dtype)),
            template=None if prompt is None else PromptTemplate.from_yaml(prompt),
            preset=preset,
            settings={key: value for key, value in settings.items() if value is not None},
            limits={key: value for key, value in limits.items() if value is not None},
        )
        return cls(loaded)

    def rank(
        self,
        query: str,
        docs: Sequence[DocumentLike],
        doc_ids: Sequence[str | int] | None = None,
        metadata: Sequence[Any] | None = None,
        top_k: int | None = None,
    ) -> RankedResults:
        """The documents of one list, best first; ties keep input order and documents without text come last.

        `doc_ids` default to the ids of `Document`s and, for others, to places in the input.
        `top_k` of None, or beyond the list, returns all.
        """
        ids, extra = None if doc_ids is None else [doc_ids], None if metadata is None else [metadata]
        return self.rank_batch([query], [docs], ids, extra, top_k)[0]

    def rank_batch(
        self,
        queries: Sequence[str],
        docs: Sequence[Sequence[DocumentLike]],
        doc_ids: Sequence[Sequence[str | int]] | None = None,
        metadata: Sequence[Sequence[Any]] | None = None,
        top_k: int | None = None,
    ) -> list[RankedResults]:
        """`rank` for several lists, which may differ in length, run together."""
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 0):
            raise UserError(f"top_k={top_k!r} must be None or a number from 0 on")
        docs = [_as_list(documents) for documents in docs]
        if len(queries) != len(docs):
            raise UserError(f"{len(queries)} queries for {len(docs)} lists of documents")
        for name, values in (("doc_ids", doc_ids), ("metadata", metadata)):
            if values is not None and [len(v) for v in values] != [len(d) for d in docs]:
                raise UserError(f"{name} must name every document of every list, once each")
        lists = [
            _candidate_list(query, documents, None if doc_ids is None else doc_ids[i])
            for i, (query, documents) in enumerate(zip(queries, docs, strict=True))
        ]
        return [
            self._results(candidates, scores, docs[i], None if metadata is None else metadata[i], top_k)
            for i, (candidates, scores) in enumerate(zip(lists, self._score(lists), strict=True))
        ]

    def score(self, query: str, docs: Sequence[DocumentLike]) -> np.ndarray:
        """Scores in input order, float32 [N]; higher is better."""
        candidates = _candidate_list(query, _as_list(docs), None)
        return check_scores(self.ranker.name, candidates, self._score([candidates])[0])

    def _score(self, lists: list[CandidateList]) -> list[ListScores]:
        given = [candidates for candidates in lists if candidates.documents]
        scored = iter(self.ranker.score(given) if given else ())
        nothing = ListScores(np.zeros(0, np.float32), np.zeros(0, bool))
        return [next(scored) if candidates.documents else nothing for candidates in lists]

    def _results(
        self,
        candidates: CandidateList,
        result: ListScores,
        docs: Sequence[DocumentLike],
        metadata: Sequence[Any] | None,
        top_k: int | None,
    ) -> RankedResults:
        scores = check_scores(self.ranker.name, candidates, result)
        order = rerank_order(candidates, scores)[:top_k]
        total = float(scores.sum())
        return RankedResults(
            query=candidates.query.text,
            results=tuple(
                RankedResult(
                    doc_id=candidates.documents[i].id,
                    score=float(scores[i]),
                    rank=rank,
                    index=int(i),
                    document=docs[i],
                    truncated=bool(result.truncated[i]),
                    metadata=None if metadata is None else metadata[i],
                )
                for rank, i in enumerate(order, 1)
            ),
            confidence=float(scores.max()) / total if len(scores) and scores.min() >= 0 and total > 0 else None,
            query_truncated=result.query_truncated,
            truncated=int(result.truncated.sum()),
        )


def _as_list(docs: Iterable[DocumentLike]) -> list[DocumentLike]:
    if isinstance(docs, str | bytes | Mapping) or not isinstance(docs, Iterable):
        raise UserError(f"docs must be a list of documents, not {docs!r:.80}")
    return list(docs)


def _candidate_list(query: str, docs: Sequence[DocumentLike], doc_ids: Sequence[str | int] | None) -> CandidateList:
    if not isinstance(query, str) or not query.strip():
        raise UserError(f"query {query!r} is empty or no text")
    own = [doc.id if isinstance(doc, Document) else str(i) for i, doc in enumerate(docs)]
    ids = own if doc_ids is None else doc_ids
    documents = tuple(_document(doc, str(doc_id), i) for i, (doc, doc_id) in enumerate(zip(docs, ids, strict=True)))
    return CandidateList(Query("", query), documents)


def _document(doc: DocumentLike, doc_id: str, index: int) -> Document:
    if isinstance(doc, str):
        return Document(doc_id, doc)
    if isinstance(doc, Document):
        title, text = doc.title, doc.text
    elif isinstance(doc, Mapping) and ("text" in doc or "title" in doc):
        title, text = doc.get("title"), doc.get("text")
    else:
        title = text = 0
    if (text is None or isinstance(text, str)) and (title is None or isinstance(title, str)):
        return Document(doc_id, text or "", title or "")
    raise UserError(f"docs[{index}] is neither a text nor a mapping with `text` (and `title`): {doc!r:.80}")
