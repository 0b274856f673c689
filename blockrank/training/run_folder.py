"""The folder of a run, also one in an object store, where no line can be appended to a file."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import jax

from blockrank.data.files import cache_dir, digest
from blockrank.paths import AnyPath, as_path, copy_tree
from blockrank.training.checkpoint import FOLDER
from blockrank.training.integrity import reason_of

log = logging.getLogger(__name__)


class RunFolder:
    """`path` is where a run is kept, `local` where its files are written, all but the checkpoints.

    Both are one for a local run. The files of a remote run are written below the cache folder, which starts as a copy
    of what is at `path`, and `push` copies process 0's there: what is remote counts, what is local is scratch.
    """

    def __init__(self, path: str | AnyPath):
        self.path = as_path(path)
        self._pushed: dict[Path, tuple[int, int]] = {}
        if isinstance(self.path, Path):
            self.local = self.path
            return
        self.local = cache_dir() / "runs" / digest(f"{self.path} {jax.process_index()}") / self.path.name
        shutil.rmtree(self.local, ignore_errors=True)
        self.local.mkdir(parents=True)
        if self.path.is_dir():
            copy_tree(self.path, self.local, skip=(FOLDER,))
            self._pushed = self._files()

    @property
    def checkpoints(self) -> AnyPath:
        return self.path / FOLDER

    def place(self, local: Path) -> AnyPath:
        """Where a file of the local folder is kept."""
        return self.path / local.relative_to(self.local).as_posix()

    def push(self) -> None:
        """Copies files that are new or changed to where the run is kept. A failure is a warning: the next push tries
        them again."""
        if isinstance(self.path, Path) or jax.process_index() != 0:
            return
        for file, state in self._files().items():
            if self._pushed.get(file) == state:
                continue
            try:
                copy_tree(file, self.place(file))
                self._pushed[file] = state
            except Exception as error:
                log.warning("%s is not copied to %s yet (%s)", file, self.place(file), reason_of(error))
                return

    def _files(self) -> dict[Path, tuple[int, int]]:
        files = [file for file in self.local.rglob("*") if file.is_file()]
        return {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in files}
