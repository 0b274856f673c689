"""Where a run is kept: a local folder, or one in an object store (`gs://bucket/run`), through etils.epath."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from etils import epath

from blockrank.errors import UserError

AnyPath: TypeAlias = Path | epath.Path
"""A local path, or one in an object store; both have the methods of `pathlib`."""

SCHEMES = ("gs", "s3", "az", "hf")

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


def is_remote(path: str | AnyPath) -> bool:
    """Whether `path` names a place in an object store."""
    return _URI.match(str(path)) is not None


def as_path(path: str | AnyPath) -> AnyPath:
    """`path` as it is if it is remote, else the absolute local path. Raises `UserError` for a scheme nobody reads."""
    found = _URI.match(str(path))
    if found is None:
        return Path(path).expanduser().absolute()
    scheme, rest = found[1].lower(), str(path)[found.end() :].lstrip("/")
    if scheme not in SCHEMES:
        raise UserError(f"{path}: no such scheme; a remote path begins with {', '.join(f'{s}://' for s in SCHEMES)}")
    if not rest:
        raise UserError(f"{path}: name a bucket and a folder in it")
    return epath.Path(f"{scheme}://{rest}")


def local_path(path: str | AnyPath) -> Path:
    """`path`, absolute. Raises `UserError` for a remote one, which `Path` would take for a folder named `gs:`."""
    if is_remote(path):
        raise UserError(f"{path}: a local path is needed here: copy it to this machine")
    return Path(path).expanduser().absolute()


@contextmanager
def fetched(path: AnyPath) -> Iterator[Path]:
    """A local file or folder with the content of `path`: itself, or a copy for as long as the context lasts."""
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="blockrank-") as work:
        copy_tree(path, local := Path(work) / path.name)
        yield local


@contextmanager
def staged(folder: AnyPath) -> Iterator[Path]:
    """A local folder to write into: `folder` itself, or one that is copied there when the context ends well."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="blockrank-") as work:
        yield Path(work)
        copy_tree(Path(work), folder)


def copy_tree(source: AnyPath, target: AnyPath, *, skip: tuple[str, ...] = ()) -> AnyPath:
    """Copies a file, or a folder with all in it but the names `skip` at its top, to `target`; returns `target`."""
    if not source.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as reader, target.open("wb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 22)
        return target
    target.mkdir(parents=True, exist_ok=True)
    for child in source.iterdir():
        if child.name not in skip:
            copy_tree(child, target / child.name)
    return target
