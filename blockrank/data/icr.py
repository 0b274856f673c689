"""Lists as the released BlockRank code stores them: each row a query, its candidates with text, and the answers."""

from __future__ import annotations

import functools
import glob
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from blockrank.data.collection import check_split
from blockrank.data.documents import Documents
from blockrank.data.files import as_id, as_text, decode_line, existing_file, hash64, parse_object
from blockrank.data.progress import track
from blockrank.data.trec import read_qrels
from blockrank.errors import UserError
from blockrank.types import Document, Qrels, Query, Run


class Row(NamedTuple):
    """One list: ids are as in the file, `answers` among them or not."""

    query: Query
    documents: tuple[Document, ...]
    answers: tuple[str, ...]


class Rows(Protocol):
    """The rows of one split, read when asked for; `where(i)` begins every error about row i."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    def where(self, index: int) -> str: ...


class JsonlRows:
    """The lines of JSONL files as mappings; memory holds one offset per line."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(existing_file(path) for path in paths)
        self._lines, self._offsets, self._files = array("Q"), array("Q"), array("L")
        for index, path in enumerate(self._paths):
            if path.suffix == ".gz":
                raise UserError(f"{path}: rows are read by offset, unpack the file first (gunzip)")
            offset = 0
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip(b" \t\r\n"):
                        self._lines.append(number)
                        self._offsets.append(offset)
                        self._files.append(index)
                    offset += len(line)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        path = self._paths[self._files[index]]
        with path.open("rb") as file:
            file.seek(self._offsets[index])
            return parse_object(decode_line(file.readline(), path, self._lines[index]), self.where(index))

    def where(self, index: int) -> str:
        return f"{self._paths[self._files[index]]}:{self._lines[index]}"


class ListCollection:
    """Queries that come with their own candidate lists. `splits` maps a split's name to its rows.

    A document id that stands for the same text everywhere is kept as it is. Where ids are local to a row (`"0"`, `"1"`
    …, always so for documents given as strings) every id of the collection is written `<query id>/<document id>`.
    Judgements are the rows' answers with grade 1, or those of the file `qrels`. The unjudged candidates count 0.
    """

    def __init__(self, name: str, splits: Mapping[str, Rows], qrels: Path | None = None) -> None:
        self.name = name
        self.ignore_self = False
        self._rows = {split: _SplitRows(rows) for split, rows in splits.items()}
        self._external = None if qrels is None else read_qrels(qrels)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._rows)

    @property
    def documents(self) -> ListDocuments:
        return self._documents

    @cached_property
    def _documents(self) -> ListDocuments:
        return ListDocuments(self.name, self._rows)

    def queries(self, split: str) -> dict[str, Query]:
        return {row.query.id: row.query for row in self._split(split)}

    def qrels(self, split: str) -> Qrels:
        qualify = self.documents.qualify
        answers = {row.query.id: dict.fromkeys(row.answers, 1) for row in self._split(split)}
        if self._external is not None:
            answers = {query: self._external[query] for query in answers if query in self._external}
        return {query: {qualify(query, d): grade for d, grade in judged.items()} for query, judged in answers.items()}

    def candidates(self, split: str, depth: int | None = None) -> Run:
        """Each row's documents in the row's order, every score 0: the file does not tell how they were found."""
        qualify = self.documents.qualify
        return {
            row.query.id: {qualify(row.query.id, d.id): 0.0 for d in row.documents[:depth]}
            for row in self._split(split)
        }

    def _split(self, split: str) -> _SplitRows:
        check_split(split, self.splits, self.name)
        return self._rows[split]


class ListDocuments(Documents):
    """The candidates of all rows as one corpus, read from their rows.

    The index holds 32 bytes per candidate: hash of the id, hash of the text, split and row.
    """

    def __init__(self, name: str, splits: Mapping[str, _SplitRows]) -> None:
        self._splits = tuple(splits.values())
        ids, texts, places = array("Q"), array("Q"), array("Q")
        with track(f"indexing {name}", sum(map(len, self._splits))) as advance:
            for number, rows in enumerate(self._splits):
                for index, row in enumerate(rows):
                    for document in row.documents:
                        ids.append(hash64(document.id))
                        texts.append(hash64(f"{document.title}\0{document.text}"))
                        places.append(index * len(self._splits) + number)
                    advance(1)
        order = np.argsort(np.frombuffer(ids, np.uint64), kind="stable")
        hashes, contents, found = (np.frombuffer(a, np.uint64)[order] for a in (ids, texts, places))
        same_id = hashes[1:] == hashes[:-1]
        self.local_ids = bool(np.any(same_id & (contents[1:] != contents[:-1])))
        """Whether document ids are local to a row, and so qualified by the query's id."""
        if self.local_ids:
            self._hashes, self._places = self._qualified_index()
        else:
            first = np.concatenate([[True], ~same_id]) if len(hashes) else np.zeros(0, bool)
            self._hashes, self._places = hashes[first], found[first]

    def qualify(self, query_id: str, document_id: str) -> str:
        """The id in this collection of a document that the row of `query_id` calls `document_id`."""
        return f"{query_id}/{document_id}" if self.local_ids else document_id

    def __getitem__(self, key: str) -> Document:
        if not isinstance(key, str):
            raise KeyError(key)
        wanted = np.uint64(hash64(key))
        position = int(np.searchsorted(self._hashes, wanted))
        while position < len(self) and self._hashes[position] == wanted:
            for document in self._row_documents(position):
                if document.id == key:
                    return document
            position += 1
        raise KeyError(key)

    def __len__(self) -> int:
        return len(self._hashes)

    def pick(self, position: int) -> Document:
        wanted = int(self._hashes[position])
        return next(d for d in self._row_documents(position) if hash64(d.id) == wanted)

    def scan(self) -> Iterator[Document]:
        order = np.argsort(self._places, kind="stable")
        for _, group in groupby(order, key=lambda position: self._places[position]):
            positions = list(group)
            wanted = {int(self._hashes[position]) for position in positions}
            yield from (d for d in self._row_documents(positions[0]) if hash64(d.id) in wanted)

    def _row_documents(self, position: int) -> Iterator[Document]:
        index, number = divmod(int(self._places[position]), len(self._splits))
        row = self._splits[number].row(index)
        return (Document(self.qualify(row.query.id, d.id), d.text, d.title) for d in row.documents)

    def _qualified_index(self) -> tuple[np.ndarray, np.ndarray]:
        hashes, places = array("Q"), array("Q")
        for number, rows in enumerate(self._splits):
            for index, row in enumerate(rows):
                for document in row.documents:
                    hashes.append(hash64(self.qualify(row.query.id, document.id)))
                    places.append(index * len(self._splits) + number)
        order = np.argsort(np.frombuffer(hashes, np.uint64), kind="stable")
        found, repeated = np.frombuffer(hashes, np.uint64)[order], np.frombuffer(places, np.uint64)[order]
        first = np.concatenate([[True], found[1:] != found[:-1]])
        return found[first], repeated[first]


class _SplitRows:
    """Parsed rows of one split, the last few kept, since a list's documents are asked for one after another."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.row = functools.lru_cache(maxsize=32)(self._parse)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        seen: dict[str, int] = {}
        for index in range(len(self)):
            row = self._parse(index)
            first = seen.setdefault(row.query.id, index)
            if first != index:
                raise UserError(
                    f"{self._rows.where(index)}: query id {row.query.id!r} already occurs at {self._rows.where(first)}"
                )
            yield row

    def _parse(self, index: int) -> Row:
        return parse_row(self._rows[index], index, self._rows.where(index))


def parse_row(fields: Mapping[str, Any], index: int, where: str) -> Row:
    """A row with `query`, `documents` and optionally `query_id` (default: the row's index) and `answer_ids`.

    `documents` are dicts with `doc_id` (default: the position), `title`, `text`; or strings, or a dict id -> text. A
    document given twice with one text is kept once. Raises `UserError` that begins with `where`.
    """
    for name in ("query", "documents"):
        if name not in fields:
            raise UserError(f'{where}: no "{name}" (has: {", ".join(map(str, fields)) or "nothing"})')
    number = fields.get("query_id")
    query = Query(as_id(index if number is None else number, f"{where}: query_id"), as_text(fields["query"], where))
    documents: dict[str, Document] = {}
    for document in _documents(fields["documents"], where):
        known = documents.setdefault(document.id, document)
        if known != document:
            raise UserError(f"{where}: doc_id {document.id!r} stands for two different texts in one list")
    answers = fields.get("answer_ids")
    if answers is None:
        answers = ()
    elif isinstance(answers, str | int | float):
        answers = (answers,)
    return Row(query, tuple(documents.values()), tuple(as_id(a, f"{where}: answer_ids") for a in answers))


def _documents(value: Any, where: str) -> Iterator[Document]:
    if isinstance(value, Mapping):
        value = [{"doc_id": key, "text": text} for key, text in value.items()]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{where}: documents must be a list, got {type(value).__name__}")
    for position, item in enumerate(value):
        at = f"{where}: documents[{position}]"
        if isinstance(item, Mapping):
            number = item.get("doc_id")
            yield Document(
                id=as_id(position if number is None else number, at),
                text=as_text(item.get("text"), at),
                title=as_text(item.get("title"), at),
            )
        else:
            yield Document(str(position), as_text(item, at))


def open_icr(path: Path, split: str | None = None, qrels: Path | None = None) -> ListCollection:
    """A file or glob of ICR JSONL as one split, or a folder of `<split>.jsonl`. Packed ones (`.gz`) are refused."""
    if path.is_dir():
        files = {file.stem: [file] for end in ("", ".gz") for file in sorted(path.glob(f"*.jsonl{end}"))}
        if not files:
            raise UserError(f"{path} has no .jsonl file")
        return ListCollection(path.name, {name: JsonlRows(paths) for name, paths in files.items()}, qrels)
    paths = [Path(found) for found in sorted(glob.glob(str(path)))] if "*" in str(path) else [path]  # noqa: PTH207
    if not paths:
        raise UserError(f"no file matches {path}")
    name = split or path.stem.replace("*", "") or "all"
    return ListCollection(path.stem, {name: JsonlRows(paths)}, qrels)
