"""Opening GGUF files: one place for what the tokenizer and the weights both need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader

from blockrank.errors import UserError


def open_gguf(path: str | Path) -> GGUFReader:
    """Memory-map a GGUF file. Raises UserError when it is missing, cut short or not GGUF."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such GGUF file")
    try:
        return GGUFReader(str(path))
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(f"{path}: not a readable GGUF file ({error}); download it again") from error


def field_value(reader: GGUFReader, key: str, default: Any = None) -> Any:
    """The value of a metadata key as plain Python (str, number, bool or list), or `default` when absent."""
    field = reader.fields.get(key)
    return default if field is None else field.contents()
