"""Text files as they come (BOM, CRLF, gzip), ids as exact strings, and a cache outside the data's own folder."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from blockrank.errors import UserError
from blockrank.types import has_text


def cache_dir() -> Path:
    """Where derived files live: `$BLOCKRANK_CACHE`, else `~/.cache/blockrank`."""
    return Path(os.environ.get("BLOCKRANK_CACHE") or Path.home() / ".cache" / "blockrank")


@contextlib.contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """Holds the lock `name` in the cache, so that of several processes one does the work and the others wait for it."""
    path = cache_dir() / "locks" / f"{digest(name)}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the cache folder {cache_dir()}: {error}; set BLOCKRANK_CACHE") from error
    with FileLock(path):
        yield


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that appears under `path` only when complete; on an error nothing is left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def digest(text: str, size: int = 8) -> str:
    """A short stable hash of `text` in hex."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()


def hash64(text: str) -> int:
    """A stable 64-bit hash of `text`."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def existing_file(path: str | Path) -> Path:
    """`path` when it is a file, else a `UserError` that says what is there instead."""
    path = Path(path)
    if path.is_file():
        return path
    what = "is a folder, not a file" if path.is_dir() else "does not exist"
    raise UserError(f"{path} {what}")


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) of every line that is not blank; UTF-8, BOM and line ends removed, `.gz` unpacked.

    Raises `UserError` with file:line where the bytes are not UTF-8.
    """
    path = existing_file(path)
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = decode_line(line, path, number)
            if text.strip(" \t"):
                yield number, text


def decode_line(line: bytes, path: Path, number: int) -> str:
    """One line as text without BOM and line end; a `UserError` with file:line where it is not UTF-8."""
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start})") from error


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object in `text`; `where` (file:line) begins every error."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:line", object) of every line of a JSONL file."""
    for number, text in read_lines(path):
        where = f"{path}:{number}"
        yield where, parse_object(text, where)


def as_id(value: Any, where: str) -> str:
    """An id as the exact string it is; JSON numbers become their decimal text. Anything else is a `UserError`."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UserError(f"{where}: an id must be a non-empty string or a number, got {value!r}")


def as_text(value: Any, where: str) -> str:
    """Text of a JSON field: null is empty, and so is text with nothing visible; other types are a `UserError`."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: expected a string, got {value!r}")
    return value if has_text(value) else ""


def columns(text: str, allowed: tuple[int, ...]) -> list[str] | None:
    """The columns of a line: split at tabs when that gives an allowed count (ids may hold spaces), else at blanks."""
    for fields in (text.split("\t"), re.split(r"[ \t]+", text.strip(" \t"))):
        if len(fields) in allowed and all(fields):
            return fields
    return None
