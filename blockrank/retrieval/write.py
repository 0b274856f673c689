"""A split's candidates on disk: as a TREC run with what made it beside it, or as lists in shards."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from blockrank.data.collection import Collection
from blockrank.data.files import atomic_write, digest
from blockrank.data.shards import ALL, Part, digest_of
from blockrank.data.stored_lists import is_whole, list_shards, write_records
from blockrank.data.trec import as_written, write_rankings
from blockrank.errors import UserError
from blockrank.retrieval.bm25 import BM25Index
from blockrank.retrieval.settings import DENSE, EncoderSettings, dense_settings
from blockrank.types import Query, has_text

LISTS_PER_SHARD = 65_536

Rankings = Iterable[tuple[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Search:
    """A collection made ready to be searched, and `tag`, the name of what searches it.

    `rank` gives the rankings of some queries, so many documents each, best first, ties in the order given; `ids` all
    that may occur in one. `facts` are for the record, `identity` is what rankings depend on beside the configuration.
    `missing` counts shards of embeddings that other processes have not made yet: until then nothing can be ranked.
    """

    tag: str
    rank: Callable[[Sequence[Query], int], Rankings]
    ids: Callable[[], Iterable[str]]
    facts: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    missing: int = 0


@dataclass(frozen=True)
class Candidates:
    """Whose candidates are written: `depth` for each query of `split`, found by `source` (`bm25`, `dense`, `dense:…`).

    `made_with` is the configuration, kept beside what is written and compared before it is taken for finished. `part`
    is what this process does of the work.
    """

    collection: Collection
    split: str
    source: str
    depth: int
    encoder: EncoderSettings
    made_with: Mapping[str, Any]
    part: Part = ALL

    def encoder_settings(self) -> EncoderSettings | None:
        """None for BM25. Raises `UserError` for a source that searches nothing."""
        dense = self.encoder if self.source == DENSE else dense_settings(self.source)
        if dense is None and self.source != "bm25":
            raise UserError(f"candidates={self.source} is no search whose results could be written; use dense or bm25")
        return dense

    def search(self) -> Search:
        """BM25's index, or the collection's embeddings (`part` of them), made now where they are not there yet."""
        encoder = self.encoder_settings()
        if encoder is None:
            documents = self.collection.documents
            index = BM25Index.build(documents)
            texts = digest_of((d.id, f"{d.title} {d.text}") for d in documents.scan())
            return Search(
                tag="bm25",
                rank=lambda queries, k: index.search(queries, k).items(),
                ids=lambda: index.ids,
                identity={"documents": texts},
            )
        return _dense(self.collection, encoder, self.part)

    def queries(self) -> list[Query]:
        return [query for query in self.collection.queries(self.split).values() if has_text(query.text)]

    def rankings(self, search: Search, queries: Sequence[Query]) -> Rankings:
        return search.rank(queries, self.depth + self.collection.ignore_self)


def write_candidates(candidates: Candidates, path: Path) -> str:
    """Writes a run to `path`, and counts, throughput and `made_with` to `<path>.json`.

    Returns one line that says what was written. A run that is there with the same `made_with` is kept; another raises
    `UserError`. Candidates are written query by query, ties in the order of the collection.
    """
    encoder = candidates.encoder_settings()
    record = path.with_name(f"{path.name}.json")
    if path.exists():
        if _made_with(record) != candidates.made_with:
            raise UserError(f"{path} is there already, made with other settings; delete it or choose another run=")
        return f"{path} is there already, made with these settings"
    if candidates.part != ALL and encoder is None:
        raise UserError(f"part={candidates.part}: a run of BM25 is written by one process; lists= can be shared")
    search = candidates.search()
    if candidates.part != ALL:
        return _encoded(search, candidates.part)
    queries, counts = candidates.queries(), _Counts()
    blanks = any(" " in name for name in itertools.chain(search.ids(), (query.id for query in queries)))
    unnamed = path.with_name(f".{path.name}.unnamed")
    rankings = counts.counted(candidates.rankings(search, queries))
    tied = write_rankings(unnamed, rankings, search.tag, "input", blanks=blanks)
    facts = {"queries": counts.queries, "candidates": counts.candidates, "tied": tied, **search.facts}
    with atomic_write(record) as file:
        content = {**facts, "made_with": candidates.made_with}
        file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    unnamed.replace(path)
    return f"{path}: {counts}{_rate(search)}"


def _made_with(record: Path) -> Any:
    """What a run was made with by the file beside it; None where that is not there, or damaged."""
    try:
        return json.loads(record.read_text("utf-8"))["made_with"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def write_lists(candidates: Candidates, folder: Path) -> str:
    """Writes the candidates as lists in shards (`data/stored_lists.py`): what `write_candidates` writes, to the digit.

    Shards that are there are kept, so a killed run continues; of several processes each writes its `part`, once all
    embeddings are there. Returns one line that says what was written. Raises `UserError` for a folder of lists made
    with other settings, weights, documents or queries.
    """
    candidates.encoder_settings()
    search, queries = candidates.search(), candidates.queries()
    if search.missing:
        return _encoded(search, candidates.part)
    if not queries:
        raise UserError(f"{candidates.collection.name} ({candidates.split}): no query has text, so there are no lists")
    groups = [queries[start : start + LISTS_PER_SHARD] for start in range(0, len(queries), LISTS_PER_SHARD)]
    shards, counts, made = list_shards(folder), _Counts(), 0
    shards.open({"shards": len(groups), **candidates.made_with, **search.identity})
    for number, group in enumerate(groups):
        if number in candidates.part:
            rank = partial(candidates.rankings, search, group)
            asked = digest_of((query.id, query.text) for query in group)
            made += shards.make(number, asked, is_whole, partial(_write_shard, rank=rank, counts=counts))
    missing = sum(shards.record(number) is None for number in range(len(groups)))
    rest = f"; {missing} of {len(groups)} shards are left to other processes" if missing else ""
    return f"{folder}: {counts} written in {made} shards{_rate(search)}{rest}"


def _write_shard(path: Path, rank: Callable[[], Rankings], counts: _Counts) -> dict[str, Any]:
    lists = ((query, as_written(query, ranking, "input")[0]) for query, ranking in counts.counted(rank()))
    return {"queries": write_records(path, lists)}


def _dense(collection: Collection, encoder: EncoderSettings, part: Part) -> Search:
    from blockrank.retrieval.dense import DenseIndex

    index = DenseIndex.build(collection, encoder, part=part)
    embeddings = index.embeddings
    rate = embeddings.passages_per_second
    facts = {
        "passages": len(embeddings),
        "passages_encoded": embeddings.encoded,
        "passages_per_second": None if rate is None else round(rate, 1),
        "embeddings": str(embeddings.folder),
    }
    missing = len(embeddings.missing)
    documents = None if missing else digest("".join(embeddings.digests()))
    return Search(
        tag="-".join(Path(encoder.path).name.split()),
        rank=index.rankings,
        ids=lambda: (document.decode() for document in index.ids),
        facts=facts,
        identity={"weights": index.encoder.identity(), "documents": documents},
        missing=missing,
    )


def _encoded(search: Search, part: Part) -> str:
    done = f"part {part}: {search.facts['passages_encoded']:,} passages encoded{_rate(search)}"
    if search.missing:
        return f"{done}; {search.missing} shards are left to other processes: run this again when they are done"
    return f"{done}; all shards are there: run it without part= to write the candidates"


def _rate(search: Search) -> str:
    rate = search.facts.get("passages_per_second")
    return f" ({rate:,} passages/s)" if rate else ""


@dataclass
class _Counts:
    """Queries and candidates that passed."""

    queries: int = 0
    candidates: int = 0

    def counted(self, rankings: Rankings) -> Iterator[tuple[str, Mapping[str, float]]]:
        for query, ranking in rankings:
            self.queries += 1
            self.candidates += len(ranking)
            yield query, ranking

    def __str__(self) -> str:
        return f"{self.candidates:,} candidates of {self.queries:,} queries"
