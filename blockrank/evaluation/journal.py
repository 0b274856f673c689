"""The scores journal: every scored list is on disk before the next batch starts, so a killed evaluation continues.

JSON lines. The first is a header with what the scores depend on; each other line holds the scores of one candidate
list. A last line that a crash cut short is dropped; any other damage is an error with the line number.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from blockrank.config import differences
from blockrank.errors import UserError
from blockrank.types import CandidateList

try:
    import fcntl
except ImportError:  # no advisory locks on this platform
    fcntl = None

FORMAT = "blockrank-scores-1"


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Hex digest of a JSON-able mapping, independent of key order."""
    return hashlib.blake2b(_canonical(identity).encode(), digest_size=16).hexdigest()


def list_digest(candidates: CandidateList) -> str:
    """Hex digest of the query and of the documents' ids, titles and texts, in order."""
    parts = [candidates.query.id, candidates.query.text]
    parts += [part for document in candidates.documents for part in (document.id, document.title, document.text)]
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class ScoreJournal:
    """An append-only file of entries (JSON objects with a "query" key), one writer at a time.

    Opening it reads what an earlier run left: `entries` maps query id -> entry. A journal of another identity is an
    error unless `overwrite`, which starts it anew.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.path = path
        self.entries: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("a+b")
        try:
            self._lock()
            if overwrite:
                self._file.truncate(0)
            self._read(identity)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ScoreJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Adds the entries and returns once they are on disk."""
        self._write([json.dumps(entry, ensure_ascii=True, allow_nan=False) for entry in entries])
        self.entries.update({entry["query"]: dict(entry) for entry in entries})

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{self.path}: another evaluation is writing here; choose another output folder") from error

    def _write(self, lines: list[str]) -> None:
        self._file.write("".join(line + "\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, identity: Mapping[str, Any]) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole:
            self._file.truncate(0)
            self._write(
                [json.dumps({"format": FORMAT, "fingerprint": fingerprint(identity), "identity": _plain(identity)})]
            )
            return
        header, *lines = whole.splitlines()
        self._check(header, identity)
        for number, line in enumerate(lines, start=2):
            try:
                entry = json.loads(line)
                query = entry["query"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{self.path}:{number}: damaged line; delete it, or set overwrite=true") from error
            if query in self.entries:
                raise UserError(f"{self.path}:{number}: query {query!r} occurs twice; set overwrite=true to start anew")
            self.entries[query] = entry
        if len(whole) < len(content):
            self._file.truncate(len(whole))

    def _check(self, line: bytes, identity: Mapping[str, Any]) -> None:
        try:
            header = json.loads(line)
            known = header["format"] == FORMAT
        except (ValueError, KeyError, TypeError):
            header, known = {}, False
        if not known:
            raise UserError(f"{self.path}:1: not a scores journal of this version; choose another folder")
        if header["fingerprint"] != fingerprint(identity):
            changed = differences(header.get("identity", {}), _plain(identity))
            raise UserError(
                f"{self.path}: the scores here were made with another configuration (changed: {changed}); "
                "choose another output folder, or set overwrite=true to start anew"
            )


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))


def _plain(identity: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(_canonical(identity))
