"""Collections of ir_datasets, by id."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from blockrank.data.collection import check_split, ignores_self
from blockrank.data.documents import Documents
from blockrank.data.files import as_id, as_text, cache_lock
from blockrank.data.trec import check_grade, ranked
from blockrank.errors import UserError
from blockrank.types import Document, Qrels, Query, Run

DEFAULT_SPLIT = "default"
_TEXT_FIELDS = ("text", "body", "abstract", "contents")


class IrDatasetsCollection:
    """`id` and the data sets under it: `msmarco-passage` has the splits `train`, `dev/small` and so on.

    An id with queries of its own also has the split `default`.
    """

    def __init__(self, id: str, ignore_self: bool | None = None) -> None:
        self.name = id
        self.ignore_self = ignores_self(id) if ignore_self is None else ignore_self
        self._base = _dataset(id)
        if not self._base.has_docs():
            raise UserError(f"the ir_datasets id {id!r} has no documents")

    @property
    def documents(self) -> Documents:
        return self._documents

    @cached_property
    def _documents(self) -> Documents:
        return IrDocuments(self.name, self._base)

    @property
    def splits(self) -> tuple[str, ...]:
        return self._splits

    @cached_property
    def _splits(self) -> tuple[str, ...]:
        import ir_datasets

        below = sorted(i for i in ir_datasets.registry if i.startswith(f"{self.name}/"))
        found = [i.removeprefix(f"{self.name}/") for i in below if ir_datasets.load(i).has_queries()]
        return (DEFAULT_SPLIT, *found) if self._base.has_queries() else tuple(found)

    def queries(self, split: str) -> dict[str, Query]:
        with _readable(self.name, split):
            return {
                q.query_id: Query(
                    as_id(q.query_id, self.name), as_text(_query_text(q), f"{self.name} query {q.query_id}")
                )
                for q in self._split(split).queries_iter()
            }

    def qrels(self, split: str) -> Qrels:
        qrels: Qrels = {}
        dataset = self._split(split)
        if dataset.has_qrels():
            with _readable(self.name, split):
                for judgement in dataset.qrels_iter():
                    where = f"{self.name} ({split}), judgement of {judgement.query_id!r}, {judgement.doc_id!r}"
                    query, document = as_id(judgement.query_id, where), as_id(judgement.doc_id, where)
                    qrels.setdefault(query, {})[document] = check_grade(int(judgement.relevance), where)
        return qrels

    def scored_documents(self, split: str, depth: int | None = None) -> Run:
        """The first-stage results that ir_datasets ships (`scoreddocs`), best `depth` of each query.

        Raises `UserError` where there are none.
        """
        dataset = self._split(split)
        if not dataset.has_scoreddocs():
            raise UserError(f"{self.name} ({split}) has no scoreddocs; give a run file or use bm25")
        run: Run = {}
        ids: dict[str, str] = {}
        with _readable(self.name, split):
            for item in dataset.scoreddocs_iter():
                run.setdefault(item.query_id, {})[ids.setdefault(item.doc_id, item.doc_id)] = float(item.score)
        return run if depth is None else {query: dict(ranked(ranking)[:depth]) for query, ranking in run.items()}

    def _split(self, split: str) -> Any:
        check_split(split, self.splits, self.name)
        return self._base if split == DEFAULT_SPLIT else _dataset(f"{self.name}/{split}")


class IrDocuments(Documents):
    """ir_datasets' own on-disk document store. One thread reads at a time: the store is one file handle."""

    def __init__(self, name: str, dataset: Any) -> None:
        self._name = name
        self._dataset = dataset
        self._lock = threading.Lock()

    @cached_property
    def _store(self) -> Any:
        with cache_lock(f"ir_datasets {self._name}"), _readable(self._name, "documents"):
            return _built_store(self._dataset)

    @cached_property
    def _count(self) -> int:
        with _readable(self._name, "documents"):
            count = self._dataset.docs_count()
            return sum(1 for _ in self._dataset.docs_iter()) if count is None else count

    def __getitem__(self, key: str) -> Document:
        with self._lock:
            return _document(self._store.get(key), self._name)

    def __len__(self) -> int:
        return self._count

    def scan(self) -> Iterator[Document]:
        with cache_lock(f"ir_datasets {self._name}"), _readable(self._name, "documents"):
            rows = iter(self._dataset.docs_iter())
            row = next(rows, None)  # some are downloaded only now
        while row is not None:
            yield _document(row, self._name)
            with _readable(self._name, "documents"):
                row = next(rows, None)

    def pick(self, position: int) -> Document:
        with self._lock, _readable(self._name, "documents"):
            return _document(self._dataset.docs_iter()[position], self._name)

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self._name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        IrDocuments.__init__(self, state["name"], _dataset(state["name"]))


def prefetch(id: str) -> None:
    """Downloads everything of an ir_datasets id and builds its document index, one process at a time.

    Raises `UserError` that names what is missing and where ir_datasets looks for it.
    """
    dataset = _dataset(id)
    with cache_lock(f"ir_datasets {id}"), _readable(id, "download"):
        if dataset.has_docs():
            _built_store(dataset)
        for has, rows in (
            (dataset.has_queries(), "queries_iter"),
            (dataset.has_qrels(), "qrels_iter"),
            (dataset.has_scoreddocs(), "scoreddocs_iter"),
        ):
            if has:
                next(iter(getattr(dataset, rows)()), None)


def _built_store(dataset: Any) -> Any:
    store = dataset.docs_store()
    if hasattr(store, "build"):
        store.build()
    return store


def _dataset(id: str) -> Any:
    import ir_datasets

    try:
        return ir_datasets.load(id)
    except KeyError as error:
        near = sorted(known for known in ir_datasets.registry if known.split("/")[0] == id.split("/")[0])
        hint = f"known there: {', '.join(near[:8])}" if near else "see https://ir-datasets.com for the ids"
        raise UserError(f"{id!r} is no ir_datasets id; {hint}") from error


@contextlib.contextmanager
def _readable(id: str, part: str) -> Iterator[None]:
    """Turns whatever ir_datasets raises for absent, damaged or unreachable files into one `UserError`."""
    import ir_datasets

    try:
        yield
    except UserError:
        raise
    except Exception as error:
        home = ir_datasets.util.home_path()
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"cannot read {id} ({part}): {type(error).__name__}: {reason}. ir_datasets keeps its files in "
            f"{home / id.split('/')[0]} (IR_DATASETS_HOME); put the file there, or run `python -m blockrank.prepare "
            f"data=ir_datasets data.id={id} prefetch=true` where there is a network, and copy that folder. Delete a "
            "damaged file to have it made again"
        ) from error


def _document(row: Any, name: str) -> Document:
    field = next((f for f in _TEXT_FIELDS if hasattr(row, f)), None)
    text = row.default_text() if field is None else getattr(row, field)
    where = f"{name} document {row.doc_id}"
    title = as_text(getattr(row, "title", None), where) if field is not None else ""
    return Document(as_id(row.doc_id, where), as_text(text, where), title)


def _query_text(row: Any) -> str:
    return row.text if hasattr(row, "text") else row.default_text()
