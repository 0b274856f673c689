"""BEIR folders."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from blockrank.data.collection import check_split, ignores_self
from blockrank.data.documents import Documents, JsonlDocuments
from blockrank.data.files import as_id, as_text, read_jsonl
from blockrank.data.trec import read_qrels
from blockrank.errors import UserError
from blockrank.types import Qrels, Query


class BeirCollection:
    """`corpus.jsonl`, `queries.jsonl` and `qrels/<split>.tsv` (or `.tsv.gz`) of a folder, which is only read.

    A folder without `qrels` has the one split `all`: every query, none judged.
    """

    def __init__(self, path: str | Path, ignore_self: bool | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"{self.path} is no folder; BEIR collections are folders with corpus.jsonl, queries.jsonl")
        absent = [name for name in ("corpus.jsonl", "queries.jsonl") if not (self.path / name).is_file()]
        if absent:
            raise UserError(f"{self.path} has no {' and no '.join(absent)}; is it a BEIR folder?")
        self.name = self.path.resolve().name
        self.ignore_self = ignores_self(self.name) if ignore_self is None else ignore_self

    @property
    def documents(self) -> Documents:
        return self._documents

    @cached_property
    def _documents(self) -> Documents:
        return JsonlDocuments(self.path / "corpus.jsonl")

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(sorted(self._judgements)) or ("all",)

    @cached_property
    def _judgements(self) -> dict[str, Path]:
        """The file of each split; the one that is not packed where there are both."""
        folder = self.path / "qrels"
        return {
            p.name.removesuffix(".gz").removesuffix(".tsv"): p
            for p in (*folder.glob("*.tsv.gz"), *folder.glob("*.tsv"))
        }

    def qrels(self, split: str) -> Qrels:
        check_split(split, self.splits, self.name)
        path = self._judgements.get(split)
        return read_qrels(path) if path else {query: {} for query in self._all_queries}

    def queries(self, split: str) -> dict[str, Query]:
        """The queries that `qrels(split)` names, in the order of `queries.jsonl`."""
        judged = self.qrels(split)
        return {i: query for i, query in self._all_queries.items() if i in judged}

    @cached_property
    def _all_queries(self) -> dict[str, Query]:
        queries: dict[str, Query] = {}
        for where, fields in read_jsonl(self.path / "queries.jsonl"):
            if "_id" not in fields:
                raise UserError(f'{where}: no "_id" (has: {", ".join(fields) or "nothing"})')
            query = Query(as_id(fields["_id"], where), as_text(fields.get("text"), f"{where}: text"))
            if query.id in queries:
                raise UserError(f"{where}: query id {query.id!r} occurs twice")
            queries[query.id] = query
        return queries
