"""A training run's model as a Hugging Face folder, with what is needed to rank with it as the run did."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockrank.config import build, to_plain
from blockrank.errors import UserError
from blockrank.models import hf
from blockrank.models.hf_fields import read_json
from blockrank.models.loading import flat_parameters
from blockrank.models.lora import merge_adapters
from blockrank.paths import AnyPath, as_path, copy_tree
from blockrank.prompts.encode import PromptLimits
from blockrank.rankers.attention import AttentionSettings
from blockrank.training.saved_model import CheckpointModel, load_checkpoint_model

RECORD_FILE = "blockrank.json"
"""Beside the safetensors: how scores are read and prompts are cut. The template has a file of its own."""


@dataclass(frozen=True)
class RankingRecord:
    """How a model was trained to be read (`ranker`) and how its prompts were cut (`limits`)."""

    ranker: AttentionSettings
    limits: PromptLimits

    @staticmethod
    def of_run(meta: Mapping[str, Any]) -> RankingRecord:
        """From the `meta` of a training run's checkpoint."""
        return build(RankingRecord, {key: meta["config"][key] for key in ("ranker", "limits")}, "config")

    @staticmethod
    def read(folder: Path) -> RankingRecord | None:
        """From an exported folder; None where there is no record. Raises `UserError` for a damaged one."""
        path = folder / RECORD_FILE
        return build(RankingRecord, read_json(path), str(path)) if path.is_file() else None

    def save(self, folder: Path) -> None:
        (folder / RECORD_FILE).write_text(json.dumps(to_plain(self), indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Companions:
    """The files of an exported folder beside config and weights."""

    source: CheckpointModel

    def save(self, directory: Path, /) -> None:
        self.source.tokenizer.save(directory)
        self.source.template.save(directory)
        if "config" in self.source.meta:
            RankingRecord.of_run(self.source.meta).save(directory)


def export_hf(
    checkpoint: str | AnyPath,
    folder: str | AnyPath,
    *,
    dtype: str | None = None,
    base: str | None = None,
    overwrite: bool = False,
) -> AnyPath:
    """Writes a checkpoint's model, tokenizer, template and `RankingRecord` as a folder that `transformers` loads.

    Adapters are merged into their base, which `base` locates if it has moved.
    `Reranker.from_pretrained(folder)` scores as the run does (to the bit unless `dtype` narrows the weights). Returns
    the folder, which appears complete or not at all; one in an object store has its `config.json` last.
    """
    target = as_path(folder)
    if not isinstance(target, Path) and target.is_dir() and not overwrite:
        raise UserError(f"{target}: exists already; choose another folder or allow it to be overwritten")
    loaded = load_checkpoint_model(checkpoint, base=base)
    params = flat_parameters(merge_adapters(loaded.model, dtype))
    with tempfile.TemporaryDirectory(prefix="blockrank-") as work:
        local = target if isinstance(target, Path) else Path(work) / target.name
        hf.save(local, loaded.model.config, params, _Companions(loaded), dtype, overwrite=overwrite)
        if local != target:
            copy_tree(local, target, skip=("config.json",))
            copy_tree(local / "config.json", target / "config.json")
    return target
