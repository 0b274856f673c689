"""Candidate lists of a split in shards (`data/shards.py`): ArrayRecord files, read by Grain one list at a time.

A record is a list as JSON in UTF-8, `{"query_id": "q1", "documents": ["d7", ...], "scores": [0.93, ...]}`, best first,
scores strictly decreasing: what a TREC run holds of the query, to the digit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from blockrank.data.shards import INDEX, ShardFolder, read_index
from blockrank.errors import UserError

log = logging.getLogger(__name__)


def list_shards(folder: Path) -> ShardFolder:
    return ShardFolder(folder, "arrayrecord", what="lists", key="lists")


def write_records(path: Path, lists: Iterable[tuple[str, Mapping[str, float]]]) -> list[str]:
    """Writes (query id, document id -> score) pairs, empty lists left out, and returns the query ids."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer, ids = ArrayRecordWriter(str(path), "group_size:1"), []
    for query, ranking in lists:
        if ranking:
            record = {"query_id": query, "documents": list(ranking), "scores": list(ranking.values())}
            writer.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode())
            ids.append(query)
    writer.close()
    return ids


def is_whole(path: Path, record: Mapping[str, Any]) -> bool:
    """Whether a file holds as many lists as its record says; it is told where not."""
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(path))
        found = reader.num_records()
        reader.close()
    except (ValueError, RuntimeError, OSError, IndexError) as error:
        log.warning("%s is damaged (%s); writing it again", path, error)
        return False
    return found == len(record["queries"])


class StoredLists(Mapping[str, Mapping[str, float]]):
    """A folder of lists as a run that stays on disk: query id -> document id -> score, best first.

    Memory holds the query ids. Safe to read from several threads. Raises `UserError` for a folder that is none, or is
    not finished.
    """

    def __init__(self, folder: Path) -> None:
        index = read_index(folder)
        if index is None:
            raise UserError(
                f"{folder} is no folder of lists (it has no {INDEX}); make one with prepare ... lists={folder}"
            )
        shards = list_shards(folder)
        count = index.get("shards")
        records = [shards.record(number) for number in range(count or 0)]
        missing = sum(record is None for record in records)
        if not count or missing:
            what = f"{missing} of {count} shards are missing" if count else f"its {INDEX} is not that of lists"
            raise UserError(f"{folder}: {what}; run blockrank.prepare with the same settings to finish it")
        self._paths = [str(shards.content(number)) for number in range(count)]
        ids = (query for record in records if record for query in record["queries"])
        self._places = {query: place for place, query in enumerate(ids)}
        if len(self._source) != len(self._places):
            raise UserError(f"{folder}: the shards hold {len(self._source)} lists, their records {len(self._places)}")

    @cached_property
    def _source(self) -> Any:
        import grain

        return grain.sources.ArrayRecordDataSource(self._paths)

    def __getitem__(self, query: str) -> dict[str, float]:
        record = json.loads(self._source[self._places[query]])
        return dict(zip(record["documents"], record["scores"], strict=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, query: object) -> bool:
        return query in self._places
