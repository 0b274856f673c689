"""The run whose documents are re-ranked: read from disk, from the collection, or made by BM25 or an encoder."""

from __future__ import annotations

from pathlib import Path

from blockrank.data.collection import Collection, HasCandidates
from blockrank.data.irds import IrDatasetsCollection
from blockrank.data.stored_lists import StoredLists
from blockrank.data.trec import read_run
from blockrank.errors import UserError
from blockrank.retrieval.bm25 import BM25Index
from blockrank.retrieval.settings import DENSE, EncoderSettings, dense_settings
from blockrank.types import Rankings

SOURCES = ("bm25", DENSE, "scoreddocs", "own")


def first_stage(
    collection: Collection,
    split: str,
    source: str | Path | None = None,
    depth: int = 100,
    encoder: EncoderSettings | None = None,
) -> Rankings:
    """The candidates of a split's queries, `depth` for each (one more where a query may find itself).

    `source` is `bm25`, `dense` (by `encoder`, or all-MiniLM-L6-v2) or `dense:<path or name of an encoder>`,
    `scoreddocs` (ir_datasets), `own` (lists that come with the collection: icr, hf), or the path of a run file or of a
    folder of lists, which are given whole: `candidate_lists` cuts them, by one rule for ties. None takes the
    collection's own lists where it has any, else BM25.

    Raises `UserError` when the collection does not have what is asked for.
    """
    if depth < 1:
        raise UserError(f"depth must be at least 1, got {depth}")
    depth += collection.ignore_self
    if source is None:
        source = "own" if isinstance(collection, HasCandidates) else "bm25"
    if source == "own":
        if not isinstance(collection, HasCandidates):
            raise UserError(f"{collection.name} has no candidates of its own; use bm25 or the path of a run file")
        return collection.candidates(split, depth)
    if source == "scoreddocs":
        if not isinstance(collection, IrDatasetsCollection):
            raise UserError(f"only ir_datasets collections have scoreddocs; {collection.name} is none")
        return collection.scored_documents(split, depth)
    if source == "bm25":
        return BM25Index.build(collection.documents).search(collection.queries(split), depth)
    dense = dense_settings(str(source))
    if dense is not None:
        from blockrank.retrieval.dense import DenseIndex

        settings = encoder if source == DENSE and encoder is not None else dense
        return DenseIndex.build(collection, settings).search(collection.queries(split), depth)
    path = Path(source)
    if not path.exists():
        raise UserError(f"candidates: {source} is no file, and none of {', '.join(SOURCES)}")
    if path.is_dir():
        return StoredLists(path)
    return read_run(path)
