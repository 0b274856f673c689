"""Files that are either whole or absent, and where the code that wrote them came from."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from blockrank.data.files import atomic_write
from blockrank.errors import UserError

_PACKAGES = ("blockrank", "jax", "jaxlib", "flax", "numpy", "ir-measures", "pytrec-eval-terrier", "tokenizers")


@dataclass(frozen=True)
class EvaluationFiles:
    """Paths of an evaluation's files in its folder."""

    folder: Path

    @property
    def journal(self) -> Path:
        return self.folder / "scores.jsonl"

    @property
    def run(self) -> Path:
        return self.folder / "run.trec"

    @property
    def results(self) -> Path:
        return self.folder / "results.json"

    @property
    def per_query(self) -> Path:
        return self.folder / "per_query.jsonl"

    @property
    def table(self) -> Path:
        return self.folder / "table.md"

    def paths(self) -> dict[str, Path]:
        """All of them by name."""
        return {name: getattr(self, name) for name in ("journal", "run", "results", "per_query", "table")}

    def prepare(self, overwrite: bool) -> None:
        """Refuses a folder with results but no journal to continue from; removes old results when overwriting."""
        outputs = [path for path in (self.run, self.results, self.per_query, self.table) if path.exists()]
        if overwrite:
            for path in outputs:
                path.unlink()
        elif outputs and not self.journal.exists():
            raise UserError(
                f"{outputs[0]} exists without {self.journal.name}: it is of another evaluation; "
                "choose another output folder, or set overwrite=true"
            )

    def prepare_without_journal(self, overwrite: bool) -> None:
        """The same for a row that keeps no journal, whose results are anew each time: refuses a ranker's folder."""
        if self.journal.exists() and not overwrite:
            raise UserError(
                f"{self.journal} exists: the folder is that of a ranker; "
                "give the run another name, or set overwrite=true"
            )
        for path in self.paths().values():
            path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text so that `path` holds the old content or the new, never a part; makes the folder."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Strict, indented JSON (NaN and infinity are errors), written atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n")


def write_json_lines(path: Path, values: Sequence[Any]) -> None:
    """One strict JSON value per line, written atomically."""
    write_text(path, "".join(json.dumps(v, ensure_ascii=False, allow_nan=False) + "\n" for v in values))


def versions() -> dict[str, str]:
    """Python, platform and the installed packages that decide a result."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of the checkout this package runs from ("-dirty" when it was changed since), None outside of one."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=30
        )
        return result.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = git("rev-parse", "HEAD")
        return commit + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
