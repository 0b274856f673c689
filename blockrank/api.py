"""`Reranker`: a ranker for programs, with plain strings in and ranked results out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from blockrank.config import to_plain
from blockrank.errors import UserError
from blockrank.evaluation.ranking import check_scores, rerank_order
from blockrank.models.quantize import check_weights
from blockrank.packing import Packing
from blockrank.parallel import MeshConfig, open_mesh
from blockrank.prompts.encode import LongDocuments
from blockrank.prompts.template import PromptTemplate
from blockrank.rankers.confidence import confidence_of, with_text
from blockrank.rankers.generative import GenerativeSettings
from blockrank.rankers.probe import check_language, check_ranking
from blockrank.sources import RANKERS, RankerSettings, build_ranker, make_ranker, open_source
from blockrank.types import CandidateList, Document, ListScores, Query, Ranker, has_text

log = logging.getLogger(__name__)

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

    `confidence` is the best document's share of the list, in [0, 1]: of the attention mass, or of the probability where
    scores are logarithms (`rankers.confidence`); of a `fallback`, that of its attention. None for a list without text
    and for rankers whose scores are neither. Scores are relative to their list and do not compare across lists.
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
        ranker: Literal["attention", "generative", "listwise"] | RankerSettings = "attention",
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
        weights: str | None = None,
        base: str | None = None,
        readout: str | Path | None = None,
        attention_backend: str | None = None,
        mesh: Mesh | MeshConfig | str | None = None,
        beams: int | None = 10,
        document_store: str | Path | None = None,
    ) -> Reranker:
        """A re-ranker from a training run, a Hugging Face folder, a GGUF file, or the embedded model `smollm2`.

        What is not given comes from the training run where there is one, else from the `paper` preset. `preset`, where
        given, goes before the run in how a score is read (`suffix_offset`, `signal_aggregation`), and after single
        arguments; the prompt stays the run's unless `prompt` is given, and is the preset's where there is no run.
        `dtype` is the type of weights and activations, `float32` or `bfloat16`; scores are float32 either way.
        `weights="int8"` holds the kernels of linear layers in eight bits; docs/benchmarks.md says what it costs.
        `base`: where the base model of a LoRA run lies, if it has moved; its weights must be the same.
        `readout`: a `readout.yaml` of `blockrank.analyze`, the score layer and signal tokens found best for the model.
        `mesh` spreads the work over several devices: a name in `configs/mesh` (`doc8`), axis sizes, or a JAX mesh with
        the axes of `blockrank.parallel`. Scores are the same.
        `ranker`: a kind, or the settings of one. `"generative"` decodes the documents' numbers with `beams` beams
        (None: all of them); scores are log-probabilities. `"listwise"` puts windows of documents in order, by its own
        prompt unless `prompt` is given; a score is minus the rank. Both have no score layer and run on one device.
        `document_store`: a folder that `python -m blockrank.store` made with this model and prompt; documents that are
        in it are not read again. Attention scores on one device only.
        Warns of weights that do not read plain English by their tokenizer, and of a training run that does not rank.
        Raises `UserError` for anything that does not exist or does not fit.
        """
        kind = getattr(ranker, "kind", ranker)
        if kind not in RANKERS:
            raise UserError(f"ranker={ranker!r} is unknown: choose one of {', '.join(RANKERS)}")
        if kind != "attention" and not (mesh is None and score_layer is None):
            raise UserError(f"ranker={kind!r} has no score_layer and takes no mesh: leave them out")
        if kind != "attention" and document_store is not None:
            raise UserError(f"ranker={kind!r} reads documents itself: leave document_store out")
        if dtype not in ("float32", "bfloat16"):
            raise UserError(f"dtype={dtype!r} is unknown: choose float32 or bfloat16")
        check_weights(weights)
        if readout is not None and score_layer is not None:
            raise UserError(
                f"score_layer={score_layer} and readout={readout}: a readout has its own layer; leave one out"
            )
        reading = {"packing": layout, "row_length": row_length, "attention_backend": attention_backend}
        limits = {
            "document_tokens": document_tokens,
            "query_tokens": query_tokens,
            "long_documents": long_documents,
        }
        source = open_source(path_or_name, dtype=jnp.dtype(dtype), base=base)
        if readout is not None:
            source = source.with_readout(readout)
        shared: dict[str, Any] = {
            "template": None if prompt is None else PromptTemplate.from_yaml(prompt),
            "preset": preset,
            "limits": _given(limits),
            "weights": weights,
        }
        if kind == "attention":
            own = {} if isinstance(ranker, str) else to_plain(ranker)
            settings = {**own, **_given({"score_layer": score_layer, **reading})}
            options = {"mesh": open_mesh(mesh), "document_store": document_store}
            loaded = make_ranker(source, settings=settings, **options, **shared)
        else:
            asked = GenerativeSettings(beams) if ranker == "generative" else ranker
            chosen = RANKERS[asked]() if isinstance(asked, str) else asked
            loaded = build_ranker(source, chosen, reading=_given(reading), **shared)
        if source.settings is None:
            check_language(source.model, source.tokenizer)
        else:
            check_ranking(loaded)
        return cls(loaded)

    def rank(
        self,
        query: str,
        docs: Iterable[DocumentLike],
        doc_ids: Iterable[str | int] | None = None,
        metadata: Iterable[Any] | None = None,
        top_k: int | None = None,
    ) -> RankedResults:
        """The documents of one list, best first; ties keep input order and documents without text come last.

        `doc_ids` default to the ids of `Document`s and, for others, to places in the input.
        `top_k` of None, or beyond the list, returns all. Raises `UserError` for a query without text and for values
        of a wrong type or number; documents without text are told in a warning.
        """
        ids, extra = None if doc_ids is None else [doc_ids], None if metadata is None else [metadata]
        return self.rank_batch([query], [docs], ids, extra, top_k)[0]

    def rank_batch(
        self,
        queries: Iterable[str],
        docs: Iterable[Iterable[DocumentLike]],
        doc_ids: Iterable[Iterable[str | int]] | None = None,
        metadata: Iterable[Iterable[Any]] | None = None,
        top_k: int | None = None,
    ) -> list[RankedResults]:
        """`rank` for several lists, which may differ in length, run together."""
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 0):
            raise UserError(f"top_k={top_k!r} must be None or a number from 0 on")
        questions = _as_list(queries, "queries", "queries")
        given = [_as_list(documents, "docs", "documents") for documents in _as_list(docs, "docs", "lists")]
        if len(questions) != len(given):
            raise UserError(f"{len(questions)} queries for {len(given)} lists of documents")
        ids, extra = _per_document(doc_ids, "doc_ids", given), _per_document(metadata, "metadata", given)
        lists = [_candidate_list(*row) for row in zip(questions, given, ids, strict=True)]
        return [
            self._results(candidates, scores, documents, known, top_k)
            for candidates, scores, documents, known in zip(lists, self._score(lists), given, extra, strict=True)
        ]

    def score(self, query: str, docs: Iterable[DocumentLike]) -> np.ndarray:
        """Scores in input order, float32 [N]; higher is better."""
        candidates = _candidate_list(query, _as_list(docs, "docs", "documents"), None)
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
            confidence=self._confidence(candidates, result),
            query_truncated=result.query_truncated,
            truncated=int(result.truncated.sum()),
        )

    def _confidence(self, candidates: CandidateList, result: ListScores) -> float | None:
        if "confidence_max" in result.extra:
            return result.extra["confidence_max"]
        kind = getattr(self.ranker, "score_kind", None)
        found = None if kind is None else confidence_of(result.scores[with_text(candidates.documents)], kind)
        return None if found is None else found.max


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


def _as_list(values: Iterable[Any], name: str, what: str) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise UserError(f"{name} must be a list of {what}, not {values!r:.80}")
    return list(values)


def _per_document(
    values: Iterable[Iterable[Any]] | None, name: str, docs: list[list[DocumentLike]]
) -> list[list[Any] | None]:
    """For each list of documents its row of `values`, or None where there are none."""
    if values is None:
        return [None] * len(docs)
    lists = _as_list(values, name, "lists")
    rows: list[list[Any] | None] = [_as_list(row, name, "one value per document") for row in lists]
    if [len(row or ()) for row in rows] != [len(documents) for documents in docs]:
        raise UserError(f"{name} must name every document of every list, once each")
    return rows


def _candidate_list(query: str, docs: Sequence[DocumentLike], doc_ids: Sequence[str | int] | None) -> CandidateList:
    if not isinstance(query, str) or not has_text(query):
        raise UserError(f"query {query!r:.80} is empty or no text")
    own = [doc.id if isinstance(doc, Document) else str(i) for i, doc in enumerate(docs)]
    ids = own if doc_ids is None else [_doc_id(value, i) for i, value in enumerate(doc_ids)]
    documents = tuple(_document(doc, doc_id, i) for i, (doc, doc_id) in enumerate(zip(docs, ids, strict=True)))
    empty = [i for i, document in enumerate(documents) if document.is_empty]
    if empty:
        sample = ", ".join(f"docs[{i}]" for i in empty[:5]) + (", …" if len(empty) > 5 else "")
        log.warning("%d of %d documents have no text and come last: %s", len(empty), len(documents), sample)
    return CandidateList(Query("", query), documents)


def _doc_id(value: Any, index: int) -> str:
    if isinstance(value, str | int | np.integer) and not isinstance(value, bool):
        return str(value)
    raise UserError(f"doc_ids[{index}] must be a string or a whole number, not {value!r:.80}")


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
