"""Which safetensors file holds which tensor: single files, and shards with their index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from blockrank.errors import UserError
from blockrank.models.hf_fields import read_json

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def some(names: list[str], limit: int = 3) -> str:
    """The first names of a list that may be long."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def locate(folder: Path) -> dict[str, Path]:
    """The file of each tensor, with the index, where there is one, compared with what the shards hold."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() and index.is_file():
        raise UserError(f"{folder}: holds both {SINGLE} and {INDEX}; remove the one that is out of date")
    if single.is_file():
        with readers_of({single}) as readers:
            return dict.fromkeys(readers[single].keys(), single)
    if not index.is_file():
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
        if pickles:
            raise UserError(
                f"{folder}: only pickled weights ({some(pickles)}), which can run code when opened; "
                "convert them to safetensors (`save_pretrained` of transformers does)"
            )
        raise UserError(f"{folder}: no weights here; expected {SINGLE} or {INDEX}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map is missing or empty; download or export it again")
    files: dict[str, Path] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise UserError(f"{index}: tensor {name} is in {shard!r}, which is not a .safetensors file of this folder")
        files[name] = folder / shard
    absent = sorted({file.name for file in files.values() if not file.is_file()})
    if absent:
        raise UserError(f"{folder}: {len(absent)} shards named by {INDEX} are missing: {some(absent)}")
    seen: dict[str, Path] = {}
    with readers_of(set(files.values())) as readers:
        for file, reader in readers.items():
            for name in reader.keys():  # noqa: SIM118 (not a dict)
                if name in seen:
                    raise UserError(f"{folder}: tensor {name} is in both {seen[name].name} and {file.name}")
                if files.get(name) != file:
                    told = f"says {files[name].name}" if name in files else "does not name it"
                    raise UserError(f"{file}: holds tensor {name}, but {INDEX} {told}; download or export again")
                seen[name] = file
    lost = [name for name in files if name not in seen]
    if lost:
        raise UserError(f"{files[lost[0]]}: lacks {len(lost)} tensors that {INDEX} puts there: {some(lost)}")
    return files


@contextmanager
def readers_of(files: set[Path]) -> Iterator[dict[Path, Any]]:
    """Open safetensors files; their data stay on disk until asked for."""
    opened: dict[Path, Any] = {}
    try:
        for file in sorted(files):
            try:
                opened[file] = safe_open(file, framework="np").__enter__()
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file}: not a whole safetensors file ({error}); fetch it again") from error
        yield opened
    finally:
        for reader in opened.values():
            reader.__exit__(None, None, None)
