"""Dense retrieval: a collection's documents embedded once, then searched exactly."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

import jax
import numpy as np

from blockrank.data.collection import Collection
from blockrank.data.documents import Documents
from blockrank.data.files import cache_dir, digest
from blockrank.data.shards import ALL, Part, digest_of
from blockrank.data.trec import strictly_decreasing
from blockrank.errors import UserError
from blockrank.retrieval.bi_encoder import BiEncoder
from blockrank.retrieval.embeddings import Embeddings, Text, embed_to_disk
from blockrank.retrieval.settings import EncoderSettings
from blockrank.retrieval.top_k import DOCUMENTS, exact_top_k
from blockrank.types import Query, Run, has_text

log = logging.getLogger(__name__)

QUERIES_AT_ONCE = 65_536
"""Queries that one pass over the embeddings answers; more are answered in several."""

_RECOGNISED_BY = 1000
"""Documents at a collection's start that name its folder in the cache."""


class DenseIndex:
    """Exact inner-product search over the embeddings of a collection, in the collection's order."""

    def __init__(self, encoder: BiEncoder, embeddings: Embeddings) -> None:
        self.encoder = encoder
        self.embeddings = embeddings

    @classmethod
    def build(
        cls, collection: Collection, config: EncoderSettings, encoder: BiEncoder | None = None, part: Part = ALL
    ) -> DenseIndex:
        """Embeds the collection's documents that have text (title and text, joined by a space), or finds them embedded.

        With a `part` only its shards; an index that lacks some cannot search. Raises `UserError` for an encoder that
        cannot be read, and for `encoder.index_dir` of another one or another collection.
        """
        if jax.process_count() > 1:
            raise UserError(
                "candidates=dense runs in processes that do not know each other: make the candidates beforehand with "
                "blockrank.prepare, on several hosts with part=0/2, part=1/2 and so on"
            )
        encoder = BiEncoder.load(config) if encoder is None else encoder
        identity = encoder.identity()
        documents = collection.documents
        folder = config.index_dir or _cache_folder(collection.name, documents, [identity, config.shard_size])
        log.info("embeddings of %s are kept in %s", collection.name, folder)
        embeddings = embed_to_disk(
            folder,
            _texts(documents),
            encoder.embed_documents,
            identity=identity,
            shard_size=config.shard_size,
            total=len(documents),
            part=part,
        )
        return cls(encoder, embeddings)

    def rankings(
        self, queries: Mapping[str, Query] | Iterable[Query], k: int
    ) -> Iterator[tuple[str, dict[str, float]]]:
        """(query id, its `k` best documents with scores, best first) of each query that has text.

        Ties go by the order of the collection. Memory does not grow with the number of queries.
        """
        if k < 1:
            raise UserError(f"k must be at least 1, got {k}")
        if self.embeddings.missing:
            raise ValueError(f"shards {self.embeddings.missing} of {self.embeddings.folder} are not encoded yet")
        rows = [q for q in (queries.values() if isinstance(queries, Mapping) else queries) if has_text(q.text)]
        for start in range(0, len(rows), QUERIES_AT_ONCE):
            yield from self._rankings(rows[start : start + QUERIES_AT_ONCE], k)

    def _rankings(self, rows: Sequence[Query], k: int) -> Iterator[tuple[str, dict[str, float]]]:
        mesh, count = self.encoder.mesh, len(self.embeddings)
        block_rows = min(DOCUMENTS * mesh.size, max(self.embeddings.counts))
        scores, positions = exact_top_k(
            self.encoder.embed_queries([query.text for query in rows]),
            self.embeddings.blocks(block_rows),
            min(k, count),
            block_rows=block_rows,
            mesh=mesh,
        )
        for query, row, at in zip(rows, scores, positions, strict=True):
            found = (document.decode() for document in self.ids[at])
            yield query.id, dict(zip(found, row.tolist(), strict=True))

    @cached_property
    def ids(self) -> np.ndarray:
        """Ids of the documents as UTF-8, in order."""
        return self.embeddings.ids()

    def search(self, queries: Mapping[str, Query] | Iterable[Query], k: int) -> Run:
        """`rankings` as a run in memory; scores are strictly decreasing, as a run file's, so ties keep their order."""
        return {
            query: dict(zip(ranking, strictly_decreasing(np.array(list(ranking.values()))).tolist(), strict=True))
            for query, ranking in self.rankings(queries, k)
        }


def _texts(documents: Documents) -> Iterator[Text]:
    return ((d.id, f"{d.title} {d.text}".strip()) for d in documents.scan() if not d.is_empty)


def _cache_folder(name: str, documents: Documents, identity: object) -> Path:
    start = digest_of(islice(_texts(documents), _RECOGNISED_BY))
    readable = re.sub(r"[^\w.-]+", "-", name)
    return cache_dir() / "embeddings" / f"{readable}-{digest(repr(identity) + start)}"
