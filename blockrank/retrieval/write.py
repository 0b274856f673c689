"""A split's candidates as a TREC run on disk, with what made it beside it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from blockrank.data.collection import Collection
from blockrank.data.files import atomic_write
from blockrank.data.trec import write_rankings
from blockrank.errors import UserError
from blockrank.retrieval.bm25 import BM25Index
from blockrank.retrieval.settings import DENSE, EncoderSettings, dense_settings
from blockrank.types import Query


def write_candidates(
    collection: Collection,
    split: str,
    source: str,
    depth: int,
    path: Path,
    encoder: EncoderSettings,
    made_with: Mapping[str, Any],
) -> str:
    """Writes BM25's or an encoder's candidates to `path`, and counts, throughput and `made_with` to `<path>.json`.

    Returns one line that says what was written. A run that is there with the same `made_with` is kept; another raises
    `UserError`, as do sources that are no search. Dense candidates are written query by query, ties in the order of the
    collection.
    """
    dense = encoder if source == DENSE else dense_settings(source)
    if dense is None and source != "bm25":
        raise UserError(f"run: candidates={source} is no search whose run could be written; use dense or bm25")
    record = path.with_name(f"{path.name}.json")
    if path.exists():
        if not record.exists() or json.loads(record.read_text("utf-8"))["made_with"] != made_with:
            raise UserError(f"{path} is there already, made with other settings; delete it or choose another run=")
        return f"{path} is there already, made with these settings"
    found: dict[str, Any] = {"queries": 0, "candidates": 0}
    queries, depth = collection.queries(split), depth + collection.ignore_self
    if dense is None:
        rankings = BM25Index.build(collection.documents).search(queries, depth).items()
        tag, ids = source, {i for _, ranking in rankings for i in ranking}
    else:
        rankings, tag, ids = _dense(collection, queries, depth, dense, found)
    blanks = any(" " in name for name in itertools.chain(ids, queries))
    unnamed = path.with_name(f".{path.name}.unnamed")
    found["tied"] = write_rankings(unnamed, _counted(rankings, found), tag, "input", blanks=blanks)
    with atomic_write(record) as file:
        file.write(json.dumps({**found, "made_with": made_with}, indent=2, ensure_ascii=False).encode() + b"\n")
    unnamed.replace(path)
    rate = f" ({found['passages_per_second']:,} passages/s)" if found.get("passages_per_second") else ""
    return f"{path}: {found['candidates']:,} candidates of {found['queries']:,} queries{rate}"


def _dense(
    collection: Collection, queries: Mapping[str, Query], depth: int, encoder: EncoderSettings, found: dict[str, Any]
) -> tuple[Iterable[tuple[str, dict[str, float]]], str, Iterable[str]]:
    """The encoder's rankings, its name, and the collection's ids; what it took goes into `found`."""
    from blockrank.retrieval.dense import DenseIndex

    index = DenseIndex.build(collection, encoder)
    embeddings = index.embeddings
    rate = embeddings.passages_per_second
    found |= {
        "passages": len(embeddings),
        "passages_encoded": embeddings.encoded,
        "passages_per_second": None if rate is None else round(rate, 1),
        "embeddings": str(embeddings.folder),
    }
    ids = (document.decode() for document in embeddings.ids())
    return index.rankings(queries, depth), "-".join(Path(encoder.path).name.split()), ids


def _counted(
    rankings: Iterable[tuple[str, dict[str, float]]], found: dict[str, Any]
) -> Iterator[tuple[str, dict[str, float]]]:
    """The rankings, counted as they pass."""
    for query, ranking in rankings:
        found["queries"] += 1
        found["candidates"] += len(ranking)
        yield query, ranking
