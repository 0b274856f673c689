"""Text files as they come (BOM, CRLF, gzip), ids as exact strings, and a cache outside the data's own folder."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from blockrank.errors import UserError
from blockrank.types import has_text

_UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""NUL, which ends a string for trec_eval, and lone surrogates, which have no UTF-8."""

_ITERATION = re.compile(r"[0-9]+|[Qq]0")


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
def atomic_path(path: Path) -> Iterator[Path]:
    """An empty file to fill, which takes the place of `path` when all went well; on an error nothing is left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that appears under `path` only when complete; on an error nothing is left behind."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        yield file


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

    Raises `UserError` with file:line where the bytes are not UTF-8, and with the file where a `.gz` cannot be unpacked.
    """
    path = existing_file(path)
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                text = decode_line(line, path, number)
                if text.strip(" \t"):
                    yield number, text
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(
                f"{path}: not a whole gzip file ({error}); pack it again, or drop .gz if it is text"
            ) from error


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
    except (ValueError, RecursionError) as error:  # Python's limits on digits and on nesting
        raise UserError(f"{where}: JSON that cannot be read ({error})") from error
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
        return check_id(value, where)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UserError(f"{where}: an id must be a non-empty string or a number, got {value!r}")


def check_id(text: str, where: str) -> str:
    """`text`, unless it holds what no id may hold in any file or metric: NUL or a lone surrogate (`UserError`)."""
    if _UNUSABLE.search(text):
        raise UserError(f"{where}: {text!r:.80} holds NUL or a lone surrogate, which no id may; rename it")
    return text


def as_text(value: Any, where: str) -> str:
    """Text of a JSON field: null is empty, and so is text with nothing visible; other types are a `UserError`."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: expected a string, got {value!r}")
    return value if has_text(value) else ""


def columns(text: str, allowed: tuple[int, ...], where: str, names: str) -> list[str]:
    """The columns of a line: split at tabs when that gives an allowed count (ids may hold spaces), else at blanks.

    Raises `UserError`, begun by `where`, when neither gives an allowed count (`names` tells what is expected), for NUL,
    and when both do with different counts and the second column by blanks may be TREC's iteration.
    """
    check_id(text, where)
    splits = [text.split("\t")]
    if " " in text or len(splits[0]) not in allowed or not all(splits[0]):
        splits.append(re.split(r"[ \t]+", text.strip(" \t")))
    found = [fields for fields in splits if len(fields) in allowed and all(field.strip(" ") for field in fields)]
    if not found:
        raise UserError(f"{where}: expected {' or '.join(map(str, allowed))} columns ({names}), got {text!r}")
    if len(found[0]) != len(found[-1]) and _ITERATION.fullmatch(found[-1][1]):
        raise UserError(
            f"{where}: {len(found[0])} columns by tabs but {len(found[-1])} by blanks, got {text!r}; part all columns "
            "alike, or begin the file with a header line"
        )
    return found[0]
