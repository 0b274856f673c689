"""Hugging Face data sets with the columns of ICR lists: query, query_id, documents, answer_ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockrank.data.files import cache_dir
from blockrank.data.icr import ListCollection
from blockrank.errors import UserError

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}


class HfRows:
    """The rows of one split; Arrow keeps them on disk."""

    def __init__(self, name: str, rows: Any) -> None:
        missing = [column for column in ("query", "documents") if column not in rows.column_names]
        if missing:
            raise UserError(f"{name}: no column {' and no '.join(missing)} (has: {', '.join(rows.column_names)})")
        self._name = name
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self._name} row {index}"


def open_hf(
    path: str, name: str | None = None, revision: str | None = None, qrels: Path | None = None
) -> ListCollection:
    """A hub id, a folder written by `save_to_disk`, or a local parquet, arrow or json(l) file (split: the file's stem).

    Raises `UserError` that names the data set when it cannot be had, e.g. without a network.
    """
    try:
        splits = _load(path, name, revision)
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"cannot load the data set {path!r}: {type(error).__name__}: {reason}. Without a network, give a local "
            "file or a folder written by save_to_disk, or fill the Hugging Face cache (HF_HOME) where there is one"
        ) from error
    return ListCollection(Path(path).name, {s: HfRows(f"{path} ({s})", rows) for s, rows in splits.items()}, qrels)


def _load(path: str, name: str | None, revision: str | None) -> dict[str, Any]:
    import datasets

    local = Path(path).expanduser()
    if local.is_file():
        builder = _BUILDERS.get(local.suffix)
        if builder is None:
            raise UserError(f"{local}: expected a file ending in {', '.join(_BUILDERS)}")
        cache = str(cache_dir() / "datasets")
        return {local.stem: datasets.load_dataset(builder, data_files=str(local), split="train", cache_dir=cache)}
    if (local / "dataset_info.json").exists() or (local / "dataset_dict.json").exists():
        loaded = datasets.load_from_disk(str(local))
    else:
        loaded = datasets.load_dataset(path, name, revision=revision)
    if isinstance(loaded, Mapping):
        return {str(split): rows for split, rows in loaded.items()}
    return {str(loaded.split or "all"): loaded}
