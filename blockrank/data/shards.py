"""Folders of numbered shards, each there whole or not at all, so that killed work continues where it was.

index.json          what all shards were made with
00000.<suffix>      a shard's content
00000.json          what it holds, and a hash of what it was made of; written last: a shard without it is not there
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockrank.data.files import atomic_path, atomic_write, cache_lock
from blockrank.errors import UserError

log = logging.getLogger(__name__)

INDEX = "index.json"


@dataclass(frozen=True)
class Part:
    """The shards that one of `count` processes makes: those whose number leaves `index`, divided by `count`."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """`0/4` to `3/4`. Raises `UserError` for anything else."""
        found = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        part = cls(*map(int, found.groups())) if found else None
        if part is None or part.index >= part.count:
            raise UserError(f"part={text}: give <process>/<processes>, counted from 0, such as 0/4 ... 3/4")
        return part

    def __contains__(self, shard: int) -> bool:
        return shard % self.count == self.index

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


ALL = Part()


class ShardFolder:
    """Shards named by number. `what` they are and the config key that `names` the folder are for error messages.

    Several processes may work on one folder: a shard is made by one of them, and others on its machine wait for it.
    """

    def __init__(self, folder: Path, suffix: str, *, what: str, key: str) -> None:
        self.folder, self._suffix, self._what, self._key = folder, suffix, what, key

    def content(self, number: int) -> Path:
        return self.folder / f"{number:05d}.{self._suffix}"

    def record(self, number: int) -> dict[str, Any] | None:
        """What is noted about a shard; None for one that is not there, or whose note is damaged, which is told."""
        path = self._record(number)
        try:
            record = json.loads(path.read_text("utf-8"))
            if isinstance(record, dict) and "digest" in record:
                return record
            damage = "no record of a shard"
        except FileNotFoundError:
            return None
        except ValueError as error:
            damage = str(error)
        log.warning("%s is damaged (%s): as if its shard were not there", path, damage)
        return None

    def open(self, identity: Mapping[str, Any]) -> None:
        """Makes the folder, or checks that what is in it was made with `identity`. Raises `UserError` if not."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / INDEX
        with cache_lock(str(path.absolute())):
            known = read_index(self.folder)
            if known is not None:
                self._compare(known, json.loads(json.dumps(identity)))
                return
            if any(self.folder.glob(f"*.{self._suffix}")):
                raise UserError(
                    f"{self.folder}: holds .{self._suffix} files but no {INDEX}; choose another {self._key}"
                )
            with atomic_write(path) as file:
                file.write(json.dumps(identity, indent=2).encode() + b"\n")

    def make(
        self,
        number: int,
        digest: str,
        whole: Callable[[Path, Mapping[str, Any]], bool],
        write: Callable[[Path], dict[str, Any]],
    ) -> bool:
        """Makes a shard unless it is there, made of what `digest` hashes; returns whether it was made.

        `whole` says whether a content is what its record notes, and so not damaged. `write` fills a file that becomes
        the content, and returns what else is to be noted. Raises `UserError` for a shard of another `digest`.
        """
        with cache_lock(str(self.content(number).absolute())):
            record = self.record(number)
            if record is not None and record["digest"] != digest:
                raise self.changed()
            if record is not None and whole(self.content(number), record):
                return False
            for leftover in self.folder.glob(f".{number:05d}.*"):
                leftover.unlink()
            self._record(number).unlink(missing_ok=True)
            with atomic_path(self.content(number)) as path:
                noted = write(path)
            with atomic_write(self._record(number)) as file:
                file.write(json.dumps({"digest": digest, **noted}).encode() + b"\n")
        return True

    def changed(self) -> UserError:
        return UserError(
            f"{self.folder}: these {self._what} are of another collection, or it has changed since; choose another "
            f"{self._key}, or delete this one"
        )

    def _record(self, number: int) -> Path:
        return self.folder / f"{number:05d}.json"

    def _compare(self, known: dict[str, Any], wanted: dict[str, Any]) -> None:
        differing = sorted(key for key in known.keys() | wanted.keys() if known.get(key) != wanted.get(key))
        if differing:
            key = differing[0]
            raise UserError(
                f"{self.folder}: these {self._what} were made with {key} = {known.get(key)}, not {wanted.get(key)}; "
                f"choose another {self._key}, or delete this one"
            )


def read_index(folder: Path) -> dict[str, Any] | None:
    """What a folder of shards was made with; None for a folder that is none. Raises `UserError` for a damaged index."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); the folder is damaged, delete it and write it anew") from error
    return index if isinstance(index, dict) else None


def digest_of(pairs: Iterable[tuple[str, str]]) -> str:
    """A hash of ids and texts, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for pair in pairs:
        for part in pair:
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
