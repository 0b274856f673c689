"""Blobs by key on disk, in shards (`data/shards.py`), memory-mapped: what has been computed of documents, to be kept.

A shard's content is its blobs one after another, each from a multiple of 64 bytes on. Its record notes every blob's key
(hex), size in bytes and CRC-32. Keys name what a blob was made of, so one that is there twice is the same twice.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from blockrank.data.shards import ShardFolder
from blockrank.errors import UserError

log = logging.getLogger(__name__)

KEY_BYTES = 16
ALIGNMENT = 64
Blob = tuple[bytes, np.ndarray]
"""(key of `KEY_BYTES` bytes, uint8 array [n])."""


def blob_shards(folder: Path, *, what: str, key: str) -> ShardFolder:
    return ShardFolder(folder, "blobs", what=what, key=key)


def write_blobs(path: Path, blobs: Iterable[Blob]) -> dict[str, Any]:
    """Fills a shard's content and returns what is to be noted; a key that came before is written once.

    Memory is that of one blob.
    """
    keys: dict[str, None] = {}
    sizes, sums = [], []
    with path.open("wb") as file:
        for key, blob in blobs:
            if len(key) != KEY_BYTES:
                raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
            if key.hex() in keys:
                continue
            keys[key.hex()] = None
            file.write(blob.data)
            file.write(bytes(-len(blob) % ALIGNMENT))
            sizes.append(len(blob))
            sums.append(zlib.crc32(blob.data))
    return {"keys": list(keys), "sizes": sizes, "crc32": sums}


def is_whole(path: Path, record: Mapping[str, Any]) -> bool:
    """Whether a content is as long as its record says; it is told where not."""
    expected = int(_padded(np.asarray(record["sizes"], np.int64)).sum())
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        log.warning("%s is damaged (%s bytes, not %d); writing it again", path, found, expected)
    return found == expected


class Blobs(Mapping[bytes, np.ndarray]):
    """The blobs of all shards that are there: key -> uint8 [n], a view of the file.

    Memory: 36 bytes a blob. A blob is compared with its CRC-32 when it is first read. Raises `UserError` for a shard
    whose content is not as its record says. Safe to read from several threads.
    """

    def __init__(self, shards: ShardFolder) -> None:
        self._shards = shards
        records = list(_records(shards))
        self._contents = [_content(shards, number, record) for number, record in records]
        sizes = [np.asarray(record["sizes"], np.int64) for _, record in records]
        starts = [np.cumsum(_padded(size)) - _padded(size) for size in sizes]
        keys = bytearray.fromhex("".join(key for _, record in records for key in record["keys"]))
        halves = np.frombuffer(keys, ">u8").astype(np.uint64).reshape(-1, KEY_BYTES // 8)
        order = np.argsort(halves[:, 0], kind="stable")
        self._high, self._low = halves[order, 0], halves[order, 1]
        joined = (
            _joined(sizes, np.int64),
            _joined(starts, np.int64),
            _joined([r["crc32"] for _, r in records], np.uint32),
        )
        self._size, self._start, self._sum = (values[order] for values in joined)
        counts = np.asarray([len(size) for size in sizes], np.int64)
        shard = np.repeat(np.arange(len(records), dtype=np.uint32), counts)
        self._shard, self._unread = shard[order], np.ones(len(order), bool)

    def __getitem__(self, key: bytes) -> np.ndarray:
        high, low = (np.uint64(int.from_bytes(key[at : at + 8], "big")) for at in (0, 8))
        place = int(np.searchsorted(self._high, high))
        while place < len(self) and self._high[place] == high:
            if self._low[place] == low:
                return self._read(place)
            place += 1
        raise KeyError(key)

    def __iter__(self) -> Iterator[bytes]:
        for high, low in zip(self._high, self._low, strict=True):
            yield int(high).to_bytes(8, "big") + int(low).to_bytes(8, "big")

    def __len__(self) -> int:
        return len(self._high)

    @property
    def nbytes(self) -> int:
        """Bytes of all blobs on disk."""
        return int(_padded(self._size).sum())

    def _read(self, place: int) -> np.ndarray:
        shard, start = int(self._shard[place]), int(self._start[place])
        blob = self._contents[shard][start : start + int(self._size[place])]
        if self._unread[place]:
            if zlib.crc32(blob.data) != int(self._sum[place]):
                raise UserError(
                    f"{self._shards.folder}: byte {start} and on of shard {shard} are not as they were written; delete "
                    f"{self._shards.content(shard).name} and its .json, and write the shard again"
                )
            self._unread[place] = False
        return blob


def _records(shards: ShardFolder) -> Iterator[tuple[int, dict[str, Any]]]:
    numbers = sorted(int(path.stem) for path in shards.folder.glob("[0-9]*.json"))
    for number in numbers:
        record = shards.record(number)
        if record is not None:
            yield number, record


def _content(shards: ShardFolder, number: int, record: Mapping[str, Any]) -> np.ndarray:
    path = shards.content(number)
    if not is_whole(path, record):
        raise UserError(f"{path}: damaged; run the command that wrote it again")
    return np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)


def _padded(sizes: np.ndarray) -> np.ndarray:
    return -(-sizes // ALIGNMENT) * ALIGNMENT


def _joined(arrays: list[Any], dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(array, dtype) for array in arrays]) if arrays else np.zeros(0, dtype)
