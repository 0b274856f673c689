"""A collection's embeddings on disk, in shards (`data/shards.py`): float32 [n, D] arrays, memory-mapped when read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from blockrank.data.progress import track
from blockrank.data.shards import ALL, Part, ShardFolder, digest_of
from blockrank.errors import UserError

log = logging.getLogger(__name__)

Text = tuple[str, str]
"""(document id, the text that is embedded)."""


@dataclass(frozen=True)
class Embeddings:
    """All embeddings of a collection, in its order. `encoded` of them were made just now, in `seconds`.

    `missing`: shards of other processes that are not there yet; with any, only counts can be read.
    """

    folder: Path
    counts: tuple[int, ...]
    encoded: int
    seconds: float
    missing: tuple[int, ...] = ()

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def passages_per_second(self) -> float | None:
        """None where nothing had to be encoded."""
        return self.encoded / self.seconds if self.encoded else None

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        """float32 [n <= rows, D], one after another; only what is asked for is read."""
        shards = _shards(self.folder)
        for number in range(len(self.counts)):
            shard = np.load(shards.content(number), mmap_mode="r")
            for start in range(0, len(shard), rows):
                yield shard[start : start + rows]

    def ids(self) -> np.ndarray:
        """Ids as UTF-8, of one width: 8 bytes each for MS MARCO."""
        shards = _shards(self.folder)
        records = (shards.record(number) or {} for number in range(len(self.counts)))
        return np.concatenate([np.array([i.encode() for i in record["ids"]], np.bytes_) for record in records])

    def digests(self) -> list[str]:
        """A hash of each shard's ids and texts."""
        shards = _shards(self.folder)
        return [(shards.record(number) or {})["digest"] for number in range(len(self.counts))]


def embed_to_disk(
    folder: Path,
    texts: Iterable[Text],
    embed: Callable[[Sequence[str]], np.ndarray],
    *,
    identity: Mapping[str, Any],
    shard_size: int,
    total: int,
    part: Part = ALL,
) -> Embeddings:
    """Embeds `texts` into `folder`; shards that are there already are checked against the texts and kept.

    Of several processes each gives its `part`, and all read all texts. Memory is that of one shard and its texts.
    `total` is for the progress bar. Raises `UserError` when the folder was made with something other than `identity`,
    or from other texts.
    """
    shards = _shards(folder)
    shards.open({**identity, "shard_size": shard_size})
    counts: list[int] = []
    encoded, seconds, rows = 0, 0.0, iter(texts)
    with track("encoding", total) as advance:
        while shard := list(islice(rows, shard_size)):
            number, start = len(counts), time.perf_counter()
            if number in part and shards.make(number, digest_of(shard), _is_whole, _writer(shard, embed)):
                encoded, seconds = encoded + len(shard), seconds + time.perf_counter() - start
                log.info("shard %d: %d passages, %.0f passages/s", number, len(shard), encoded / seconds)
            counts.append(len(shard))
            advance(len(shard))
    if not counts:
        raise UserError("dense retrieval needs at least one document with text")
    if shards.record(len(counts)) is not None:
        raise shards.changed()
    missing = tuple(number for number in range(len(counts)) if shards.record(number) is None)
    return Embeddings(folder, tuple(counts), encoded, seconds, missing)


def _shards(folder: Path) -> ShardFolder:
    return ShardFolder(folder, "npy", what="embeddings", key="encoder.index_dir")


def _is_whole(path: Path, record: Mapping[str, Any]) -> bool:
    try:
        return len(np.load(path, mmap_mode="r")) == len(record["ids"])
    except (OSError, ValueError, EOFError) as error:
        log.warning("%s is damaged (%s); encoding it again", path, error)
        return False


def _writer(shard: Sequence[Text], embed: Callable[[Sequence[str]], np.ndarray]) -> Callable[[Path], dict]:
    def write(path: Path) -> dict[str, Any]:
        embeddings = embed([text for _, text in shard])
        with path.open("wb") as file:
            np.save(file, embeddings)
        return {"count": len(shard), "ids": [i for i, _ in shard]}

    return write
