"""Embeddings on disk, in shards that appear whole or not at all, so that a killed run continues where it was.

index.json          what the embeddings were made with
00000.npy           float32 [n, D], memory-mapped when read
00000.json          ids, and a hash of ids and texts; written last: a shard without it is not there
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from blockrank.data.files import atomic_write, cache_lock
from blockrank.data.progress import track
from blockrank.errors import UserError

log = logging.getLogger(__name__)

INDEX = "index.json"
Text = tuple[str, str]
"""(document id, the text that is embedded)."""


@dataclass(frozen=True)
class Embeddings:
    """All embeddings of a collection, in its order. `encoded` of them were made just now, in `seconds`."""

    folder: Path
    counts: tuple[int, ...]
    encoded: int
    seconds: float

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def passages_per_second(self) -> float | None:
        """None where nothing had to be encoded."""
        return self.encoded / self.seconds if self.encoded else None

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        """float32 [n <= rows, D], one after another; only what is asked for is read."""
        for number in range(len(self.counts)):
            shard = np.load(_array(self.folder, number), mmap_mode="r")
            for start in range(0, len(shard), rows):
                yield shard[start : start + rows]

    def ids(self) -> np.ndarray:
        """Ids as UTF-8, of one width: 8 bytes each for MS MARCO."""
        shards = [
            json.loads(_record(self.folder, number).read_text("utf-8"))["ids"] for number in range(len(self.counts))
        ]
        return np.concatenate([np.array([i.encode() for i in ids], np.bytes_) for ids in shards])


def embed_to_disk(
    folder: Path,
    texts: Iterable[Text],
    embed: Callable[[Sequence[str]], np.ndarray],
    *,
    identity: Mapping[str, Any],
    shard_size: int,
    total: int,
) -> Embeddings:
    """Embeds `texts` into `folder`; shards that are there already are checked against the texts and kept.

    One process works on a folder, others wait. Memory is that of one shard and its texts. `total` is for the progress
    bar. Raises `UserError` when the folder was made with something other than `identity`, or from other texts.
    """
    with cache_lock(str(folder.absolute())):
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.np*"):
            leftover.unlink()
        _check_identity(folder, {**identity, "shard_size": shard_size})
        counts: list[int] = []
        encoded, seconds, rows = 0, 0.0, iter(texts)
        with track("encoding", total) as advance:
            while shard := list(islice(rows, shard_size)):
                if not _is_there(folder, len(counts), shard):
                    start = time.perf_counter()
                    _write(folder, len(counts), shard, embed)
                    encoded, seconds = encoded + len(shard), seconds + time.perf_counter() - start
                    rate = encoded / seconds
                    log.info("shard %d: %d passages, %.0f passages/s", len(counts), len(shard), rate)
                counts.append(len(shard))
                advance(len(shard))
        if not counts:
            raise UserError("dense retrieval needs at least one document with text")
        if _record(folder, len(counts)).exists():
            raise _other_texts(folder)
    return Embeddings(folder, tuple(counts), encoded, seconds)


def _array(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.npy"


def _record(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.json"


def digest_of(texts: Iterable[Text]) -> str:
    """A hash of ids and texts, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for pair in texts:
        for part in pair:
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    path = folder / INDEX
    if not path.exists():
        if any(folder.glob("*.npy")):
            raise UserError(f"{folder}: holds arrays but no {INDEX}; choose another encoder.index_dir")
        with atomic_write(path) as file:
            file.write(json.dumps(identity, indent=2).encode() + b"\n")
        return
    known = json.loads(path.read_text("utf-8"))
    wanted = json.loads(json.dumps(identity))
    differing = sorted(key for key in known.keys() | wanted.keys() if known.get(key) != wanted.get(key))
    if differing:
        key = differing[0]
        raise UserError(
            f"{folder}: these embeddings were made with {key} = {known.get(key)}, not {wanted.get(key)}; choose "
            "another encoder.index_dir, or delete this one"
        )


def _is_there(folder: Path, number: int, shard: Sequence[Text]) -> bool:
    """Whether the shard is finished and of these texts; a damaged array is made again."""
    record = _record(folder, number)
    if not record.exists():
        return False
    if json.loads(record.read_text("utf-8"))["digest"] != digest_of(shard):
        raise _other_texts(folder)
    try:
        found = len(np.load(_array(folder, number), mmap_mode="r"))
    except (OSError, ValueError, EOFError) as error:
        log.warning("%s is damaged (%s); encoding it again", _array(folder, number), error)
        return False
    return found == len(shard)


def _other_texts(folder: Path) -> UserError:
    return UserError(
        f"{folder}: these embeddings are of another collection, or it has changed since; choose another "
        "encoder.index_dir, or delete this one"
    )


def _write(folder: Path, number: int, shard: Sequence[Text], embed: Callable[[Sequence[str]], np.ndarray]) -> None:
    _record(folder, number).unlink(missing_ok=True)
    array = embed([text for _, text in shard])
    with atomic_write(_array(folder, number)) as file:
        np.save(file, array)
    record = {"count": len(shard), "digest": digest_of(shard), "ids": [i for i, _ in shard]}
    with atomic_write(_record(folder, number)) as file:
        file.write(json.dumps(record).encode() + b"\n")
