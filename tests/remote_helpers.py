"""A stand-in for an object store: `gs://bucket/x` is a folder below a local root, for epath and for TensorStore alike.

As in a real one, nothing can be appended to a file and no folder be renamed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from etils.epath import backend, gpath
from orbax.checkpoint._src.path import gcs_utils

SCHEME = "gs://"


class Store:
    """The methods of an epath backend, on local files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def local(self, path: Any) -> Any:
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        return str(self.root / text.removeprefix(SCHEME)) if text.startswith(SCHEME) else path

    def _uri(self, path: str | os.PathLike[str]) -> str:
        return SCHEME + Path(path).relative_to(self.root).as_posix()

    def open(self, path: Any, mode: str) -> Any:
        if "a" in mode:
            raise NotImplementedError("objects cannot be appended to")
        if "w" in mode:
            Path(self.local(path)).parent.mkdir(parents=True, exist_ok=True)
        return backend.os_backend.open(self.local(path), mode)

    def rename(self, path: Any, target: Any) -> None:
        raise NotImplementedError(f"objects cannot be renamed: {path} to {target}")

    replace = rename

    def glob(self, pattern: Any) -> list[str]:
        return [self._uri(path) for path in backend.os_backend.glob(self.local(pattern))]

    def walk(self, top: Any, **options: Any) -> Any:
        for root, folders, files in backend.os_backend.walk(self.local(top), **options):
            yield self._uri(root), folders, files

    def __getattr__(self, name: str) -> Any:
        method = getattr(backend.os_backend, name)
        return lambda *paths, **options: method(*map(self.local, paths), **options)


def install(monkeypatch: Any, root: Path) -> Store:
    """Puts the stand-in in the place of Google Cloud Storage."""
    store = Store(root)
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", store)
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda _: False)
    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", lambda path: {"driver": "file", "path": store.local(path)})
    return store
