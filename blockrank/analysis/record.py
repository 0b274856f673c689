"""Where a finding is kept: `readout.yaml` for any model, and the own files of an exported folder."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from blockrank.errors import UserError
from blockrank.evaluation.files import write_text
from blockrank.prompts.encode import PromptLimits
from blockrank.prompts.template import TEMPLATE_FILE
from blockrank.rankers.attention import AttentionSettings
from blockrank.rankers.readout_file import FoundReadout
from blockrank.training.export import RECORD_FILE, RankingRecord

READOUT_FILE = "readout.yaml"


def save_readout(readout: FoundReadout, folder: Path) -> Path:
    """Writes `readout.yaml`; returns the file."""
    path = folder / READOUT_FILE
    write_text(path, readout.to_yaml())
    return path


def check_folder(checkpoint: str | None) -> Path:
    """The Hugging Face folder whose own files can hold a readout. Raises `UserError` for any other model."""
    path = None if checkpoint is None else Path(checkpoint).expanduser().absolute()
    if path is None or not (path / "config.json").is_file():
        raise UserError(
            f"apply: {checkpoint} is no exported Hugging Face folder; a training run stays as it was trained, and "
            f"a GGUF file holds no readout: pass {READOUT_FILE} as readout=, or export the run first"
        )
    return path


def apply_readout(
    readout: FoundReadout, folder: Path, settings: AttentionSettings, limits: PromptLimits
) -> list[tuple[Path, Path | None]]:
    """Writes the readout into a folder's `blockrank.json` and `prompt.yaml`, so that whatever loads it reads that way.

    `settings` and `limits` are recorded where the folder had no record. Returns (file, copy of what was there before);
    no file is replaced without its copy.
    """
    record = RankingRecord.read(folder) or RankingRecord(settings, limits)
    record = replace(record, ranker=replace(record.ranker, score_layer=readout.score_layer))
    written = []
    for name, write in ((TEMPLATE_FILE, readout.template.save), (RECORD_FILE, record.save)):
        path = folder / name
        kept = _kept(path)
        write(folder)
        written.append((path, kept))
    return written


def _kept(path: Path) -> Path | None:
    """A copy of a file under the first free name `<name>.before-<n>`; None where there is no file."""
    if not path.exists():
        return None
    number = next(n for n in range(1, 10_000) if not path.with_name(f"{path.name}.before-{n}").exists())
    return Path(shutil.copy2(path, path.with_name(f"{path.name}.before-{number}")))
