"""Documents by id: in memory for small collections, from an on-disk index for large ones."""

from __future__ import annotations

import abc
import logging
import os
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from blockrank.data.files import (
    as_id,
    as_text,
    atomic_write,
    cache_dir,
    cache_lock,
    decode_line,
    digest,
    existing_file,
    hash64,
    parse_object,
)
from blockrank.data.progress import track
from blockrank.errors import UserError
from blockrank.types import Document

log = logging.getLogger(__name__)

_BLOCK = 4096
_IDS_AT_ONCE = 2**20
_FORMAT = "documents-1"


class Documents(Mapping[str, Document], abc.ABC):
    """A mapping from document id to document that may be far larger than memory. Safe to read from several threads."""

    @abc.abstractmethod
    def scan(self) -> Iterator[Document]:
        """Every document once, in one sequential pass."""

    @abc.abstractmethod
    def pick(self, position: int) -> Document:
        """The document at `position` (0 <= position < len) of a fixed order; cheap, for uniform sampling."""

    def __iter__(self) -> Iterator[str]:
        return (document.id for document in self.scan())

    def missing(self, ids: Iterable[str]) -> list[str]:
        """Those of `ids` that are not here, in order, each once. Memory: 8 bytes for each id, and the result."""
        absent: dict[str, None] = {}
        known, rest = np.zeros(0, np.uint64), iter(ids)
        while some := list(dict.fromkeys(islice(rest, _IDS_AT_ONCE))):
            hashes = np.fromiter(map(hash64, some), np.uint64, len(some))
            new = np.flatnonzero(np.isin(hashes, known, invert=True))
            absent |= dict.fromkeys(self._missing([some[i] for i in new], hashes[new]))
            known = np.union1d(known, hashes)
        return list(absent)

    def _missing(self, ids: Sequence[str], hashes: np.ndarray) -> Iterable[str]:
        """Those of `ids`, each once, with their `hash64`, that are not here."""
        del hashes
        return (i for i in ids if i not in self)


class InMemoryDocuments(Documents):
    """Documents held as a dict, in the order given. Two documents of one id are a `UserError`."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents: dict[str, Document] = {}
        for document in documents:
            if document.id in self._documents:
                raise UserError(f"document id {document.id!r} occurs twice")
            self._documents[document.id] = document
        self._order = tuple(self._documents.values())

    def __getitem__(self, key: str) -> Document:
        return self._documents[key]

    def __len__(self) -> int:
        return len(self._order)

    def scan(self) -> Iterator[Document]:
        return iter(self._order)

    def pick(self, position: int) -> Document:
        return self._order[position]


class JsonlDocuments(Documents):
    """The documents of a `corpus.jsonl` (`_id`, optional `title`, `text`), read from disk when asked for.

    The index is one uint64 array [2, number of documents]: sorted 64-bit hashes of the ids, and byte offsets of their
    lines. It is built in one pass, kept in `cache_dir()` under the file's path, size and time, and memory-mapped: 16
    bytes per document, 141 MB for MS MARCO. Every read compares the id in the line with the id asked for.

    Raises `UserError` with file:line for a broken line and for an id that occurs twice.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = existing_file(path).resolve()
        if self.path.suffix == ".gz":
            raise UserError(f"{self.path}: documents are read by offset, unpack the file first (gunzip)")
        self._hashes, self._offsets = _open_index(self.path)
        self._file = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file).atexit = False

    def __reduce__(self) -> tuple[type[JsonlDocuments], tuple[Path]]:
        return JsonlDocuments, (self.path,)

    def __getitem__(self, key: str) -> Document:
        if not isinstance(key, str):
            raise KeyError(key)
        wanted = np.uint64(hash64(key))
        position = int(np.searchsorted(self._hashes, wanted))
        while position < len(self) and self._hashes[position] == wanted:
            document = self.pick(position)
            if document.id == key:
                return document
            position += 1
        raise KeyError(key)

    def __len__(self) -> int:
        return len(self._hashes)

    def scan(self) -> Iterator[Document]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip(b" \t\r\n"):
                    yield parse_document(decode_line(line, self.path, number), f"{self.path}:{number}")

    def pick(self, position: int) -> Document:
        offset = int(self._offsets[position])
        line = _line_at(self._file, offset)
        return parse_document(decode_line(line, self.path, 1 if offset == 0 else 2), f"{self.path} at byte {offset}")

    def _missing(self, ids: Sequence[str], hashes: np.ndarray) -> Iterable[str]:
        if not len(self):
            return ids
        positions = np.searchsorted(self._hashes, hashes).clip(max=len(self) - 1)
        absent = self._hashes[positions] != hashes
        return (i for i, is_absent in zip(ids, absent, strict=True) if is_absent)


def parse_document(text: str, where: str) -> Document:
    """A document of one BEIR line; `where` (file:line) begins every error."""
    fields = parse_object(text, where)
    if "_id" not in fields:
        raise UserError(f'{where}: no "_id" (has: {", ".join(fields) or "nothing"})')
    return Document(
        id=as_id(fields["_id"], where),
        text=as_text(fields.get("text"), f"{where}: text"),
        title=as_text(fields.get("title"), f"{where}: title"),
    )


def _line_at(file: int, offset: int) -> bytes:
    pieces: list[bytes] = []
    while True:
        block = os.pread(file, _BLOCK, offset)
        end = block.find(b"\n")
        if end >= 0 or not block:
            return b"".join([*pieces, block[: end + 1] if end >= 0 else b""])
        pieces.append(block)
        offset += len(block)


def _open_index(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(hashes, offsets), uint64 each: from the cache, or built and put there."""
    stat = path.stat()
    folder = cache_dir() / "documents"
    name = digest(str(path))
    cached = folder / f"{name}-{stat.st_size}-{stat.st_mtime_ns}-{_FORMAT}.npy"
    index = _load_index(cached)
    if index is None:
        with cache_lock(str(cached)):
            index = _load_index(cached)
            if index is None:
                built = _build_index(path)
                with atomic_write(cached) as file:
                    np.save(file, built)
                for stale in folder.glob(f"{name}-*.npy"):
                    if stale != cached:
                        stale.unlink(missing_ok=True)
                index = _load_index(cached)
                assert index is not None
    return index[0], index[1]


def _load_index(cached: Path) -> np.ndarray | None:
    """The mapped index, or None when there is none or what is there is no whole index."""
    try:
        index = np.load(cached, mmap_mode="r")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        log.warning("the index %s is damaged (%s); building it again", cached, error)
        return None
    return index if index.dtype == np.uint64 and index.ndim == 2 and len(index) == 2 else None


def _build_index(path: Path) -> np.ndarray:
    hashes, offsets = array("Q"), array("Q")
    offset = 0
    with path.open("rb") as file, track(f"indexing {path.name}", path.stat().st_size) as advance:
        for number, line in enumerate(file, start=1):
            if line.strip(b" \t\r\n"):
                hashes.append(hash64(parse_document(decode_line(line, path, number), f"{path}:{number}").id))
                offsets.append(offset)
            offset += len(line)
            advance(len(line))
    index = np.stack([np.frombuffer(hashes, np.uint64), np.frombuffer(offsets, np.uint64)])
    index = index[:, np.argsort(index[0], kind="stable")]
    _refuse_duplicates(path, index)
    return index


def _refuse_duplicates(path: Path, index: np.ndarray) -> None:
    repeated = np.flatnonzero(index[0, 1:] == index[0, :-1])
    if not len(repeated):
        return
    with path.open("rb") as file:
        for position in repeated:
            first, second = (int(o) for o in index[1, position : position + 2])
            ids = []
            for offset in (first, second):
                file.seek(offset)
                ids.append(parse_document(decode_line(file.readline(), path, 1 if offset == 0 else 2), str(path)).id)
            if ids[0] == ids[1]:
                lines = [_line_number(path, offset) for offset in (first, second)]
                raise UserError(f"{path}:{lines[1]}: document id {ids[0]!r} already occurs on line {lines[0]}")


def _line_number(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return file.read(offset).count(b"\n") + 1
