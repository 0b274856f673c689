"""What `python -m blockrank.analyze` does: opens the model and the lists, analyses, and says what was written where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console

from blockrank.analysis import figures, report
from blockrank.analysis.attention import check_layers
from blockrank.analysis.readings import SignalReader
from blockrank.analysis.record import apply_readout, check_folder, save_readout
from blockrank.analysis.search import Estimate
from blockrank.analysis.settings import AnalyzeConfig
from blockrank.analysis.study import (
    SignalReport,
    ValidationLists,
    attention_maps,
    estimate,
    found_template,
    mean_shares,
    study_layers,
    study_signals,
    suffix_masses,
)
from blockrank.config import to_plain
from blockrank.errors import UserError
from blockrank.evaluation.files import git_commit, versions, write_json, write_text
from blockrank.evaluation.tables import Table
from blockrank.models.loading import weights_fingerprint
from blockrank.paths import AnyPath
from blockrank.prompts.encode import PromptEncoder
from blockrank.prompts.template import PromptTemplate
from blockrank.rankers.attention import AttentionSettings
from blockrank.rankers.readout_file import FoundReadout
from blockrank.sources import Source, make_ranker, open_source
from blockrank.training.initial import is_model_file, model_path
from blockrank.training.saved_model import locate
from blockrank.types import CandidateList, Qrels

RESULTS_FILE = "analysis.json"


@dataclass(frozen=True)
class Opened:
    """A model with its encoder and settings; `score_layer` is the present one."""

    source: Source
    encoder: PromptEncoder
    settings: AttentionSettings
    score_layer: int


def analyze(config: AnalyzeConfig, console: Console) -> dict[str, Any]:
    """Runs the `parts`, prints tables and paths, and writes the report; returns what `analysis.json` holds."""
    folder, results = config.output_dir, config.output_dir / RESULTS_FILE
    if results.exists() and not config.overwrite:
        raise UserError(f"{results}: exists already; choose another output_dir, or set overwrite=true")
    if config.data is None:
        raise UserError("data: which collection? Give data=beir_folder data.path=..., ir_datasets, icr, hf or pydocs")
    target = check_folder(config.checkpoint) if config.apply else None
    steps = _steps(config) if "steps" in config.parts else {}
    validation = ValidationLists.open(config.data.open(), config.held_out())
    mapped = _mapped_list(config, validation)
    opened = open_model(config)
    layers = _mapped_layers(config, opened)
    report_of = _Report(folder, console)
    found: dict[str, Any] = {}
    if "signals" in config.parts or steps:
        reader = SignalReader(opened.source.model, opened.encoder, opened.settings)
        if "signals" in config.parts:
            signals = _signals(config, opened, reader, validation, report_of)
            found["signals"] = signals.as_json()
            readout = _readout(config, opened, signals)
            path = save_readout(readout, folder)
            report_of.file(path, f": evaluate with readout={path}, or Reranker.from_pretrained(..., readout=...)")
            if target is not None:
                _apply(readout, config, opened, target, signals.finding.is_better, report_of)
        if steps:
            found["steps"] = _study_steps(config, opened, reader, validation, steps, report_of)
    if "sparsity" in config.parts:
        maps = [m for _, m in _maps(opened, validation.lists[: config.sparsity_lists])]
        shares = mean_shares(maps)
        report_of.table(report.shares_table(shares, len(maps)))
        report_of.file(figures.plot_shares(shares, folder / "sparsity.png"))
        found["sparsity"] = {"lists": len(maps), "prefix_own_others": shares.tolist()}
    if "maps" in config.parts:
        found["maps"] = _draw_maps(config, opened, mapped, layers, validation.qrels, report_of)
    report_of.finish({**found, **_provenance(config, opened, validation)}, results)
    return found


def open_model(config: AnalyzeConfig) -> Opened:
    """The model, prompt and readout that an evaluation of the same keys would use."""
    if config.checkpoint is not None:
        source = open_source(config.checkpoint, dtype=jnp.dtype(config.dtype), base=config.base)
    elif config.model is not None:
        source = Source(config.model.load(config.seed), config.model.load_tokenizer())
    else:
        raise UserError("give checkpoint=<training run or model folder> or model=<name in configs/model>")
    ranker = make_ranker(
        source,
        template=None if config.prompt is None else PromptTemplate.from_config(config.prompt, "prompt"),
        preset=config.preset,
        settings=None if config.ranker is None else to_plain(config.ranker),
        limits=None if config.limits is None else to_plain(config.limits),
    )
    return Opened(source, ranker.encoder, ranker.settings, ranker.model.config.num_layers)


class _Report:
    """Prints as it goes and keeps the Markdown and the files."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        self._parts: list[str] = []
        self._files: list[str] = []

    def text(self, text: str) -> None:
        self._parts.append(text)
        self._console.print(text, markup=False)

    def table(self, table: Table) -> None:
        self.text(table.to_markdown())

    def file(self, path: Path, note: str = "") -> None:
        self._files.append(f"wrote {path}{note}")

    def finish(self, found: Mapping[str, Any], results: Path) -> None:
        write_text(self._folder / "analysis.md", "\n".join(self._parts))
        write_json(results, found)
        for line in (*self._files, f"wrote {self._folder / 'analysis.md'}", f"wrote {results}"):
            self._console.print(line, markup=False)


def _signals(
    config: AnalyzeConfig, opened: Opened, reader: SignalReader, validation: ValidationLists, out: _Report
) -> SignalReport:
    found = study_signals(
        reader,
        validation,
        opened.score_layer,
        measure=config.measure,
        max_signals=config.max_signals,
        samples=config.samples,
        seed=config.seed,
    )
    out.table(report.best_tokens_table(found, "Single tokens"))
    out.table(report.layers_table(found))
    out.table(report.readouts_table(found))
    out.text(report.verdict(found) + "\n")
    for path in report.draw_signals(found, config.output_dir):
        out.file(path)
    return found


def _readout(config: AnalyzeConfig, opened: Opened, found: SignalReport) -> FoundReadout:
    finding, held_out = found.finding, config.held_out()
    honest = finding.cross_validated
    return FoundReadout(
        score_layer=finding.best.layer,
        prompt=found_template(opened.encoder, found).to_config(),
        found={
            "model": config.checkpoint or to_plain(config.model),
            "weights": weights_fingerprint(opened.source.model),
            "data": to_plain(config.data),
            "split": held_out.split,
            "queries": found.queries,
            "signals": found.names(finding.best),
            "measure": found.measure,
            "chosen": finding.value.mean,
            "cross_validated": None if honest is None else honest.mean,
            "better_than_before": finding.is_better,
        },
    )


def _apply(
    readout: FoundReadout, config: AnalyzeConfig, opened: Opened, target: Path, better: bool, out: _Report
) -> None:
    if config.apply == "better" and not better:
        out.text(
            f"Nothing was written into {target}: apply=better, and the readout found is not better beyond chance.\n"
        )
        return
    settings = replace(opened.settings, score_layer=opened.score_layer)
    for written, kept in apply_readout(readout, target, settings, opened.encoder.limits):
        out.file(written, " (new)" if kept is None else f"; what was there before is {kept}")


def _steps(config: AnalyzeConfig) -> dict[int, AnyPath]:
    """The checkpoints of a run. Raises `UserError` for a model that is none."""
    path = None if config.checkpoint is None else model_path(config.checkpoint)
    if path is None or is_model_file(path):
        raise UserError(f"parts=[steps]: {config.checkpoint or 'model'} is no training run: leave `steps` out")
    folder, _ = locate(path)
    return {int(child.name): child for child in sorted(folder.iterdir(), key=lambda c: c.name) if child.name.isdigit()}


def _study_steps(
    config: AnalyzeConfig,
    opened: Opened,
    reader: SignalReader,
    validation: ValidationLists,
    steps: Mapping[int, AnyPath],
    out: _Report,
) -> dict[str, Any]:
    values: dict[int, tuple[Estimate, ...]] = {}
    for step in sorted(steps):
        reader.set_model(open_source(steps[step], dtype=jnp.dtype(config.dtype), base=config.base).model)
        values[step] = study_layers(reader, validation, config.measure, config.seed)
    out.table(report.steps_table(values, config.measure, opened.score_layer))
    out.file(report.draw_steps(values, config.measure, opened.score_layer, config.output_dir / "steps.png"))
    return {str(step): [estimate(value) for value in found] for step, found in values.items()}


def _maps(opened: Opened, lists: tuple[CandidateList, ...]) -> Any:
    return attention_maps(opened.source.model, opened.encoder, opened.settings, lists)


def _mapped_list(config: AnalyzeConfig, validation: ValidationLists) -> CandidateList:
    """The list of `map_query` that the maps are of."""
    lists = [c for c in validation.lists if not all(document.is_empty for document in c.documents)]
    for candidates in lists:
        if config.map_query in (None, candidates.query.id):
            return candidates
    raise UserError(f"map_query={config.map_query!r} is none of the {len(lists)} queries that have a list with text")


def _mapped_layers(config: AnalyzeConfig, opened: Opened) -> tuple[int, int]:
    """The layers of the map: `map_layers`, else five around the score layer."""
    layer, layers = opened.score_layer, opened.source.model.config.num_layers
    first, last = config.map_layers or (max(0, layer - 2), min(layers - 1, layer + 2))
    check_layers(first, last, layers)
    return first, last


def _draw_maps(
    config: AnalyzeConfig,
    opened: Opened,
    candidates: CandidateList,
    layers: tuple[int, int],
    qrels: Qrels,
    out: _Report,
) -> dict[str, Any]:
    (first, last), layer = layers, opened.score_layer
    (found,) = _maps(opened, (candidates,))
    name = candidates.query.id if len(candidates.query.id) <= 48 else f"{candidates.query.id[:47]}…"
    title = f"query {name}\ndense attention, mean of layers {first} to {last}"
    weights = found[1].mean(first, last)
    out.file(figures.plot_parts(weights, config.output_dir / "map.png", title=title))
    rows, texts, index = suffix_masses(opened.source.model, opened.encoder, opened.settings, candidates, layer)
    grades = qrels[candidates.query.id]
    relevant = [place for place, i in enumerate(index) if grades.get(candidates.documents[i].id, 0) > 0]
    title = f"query {name}\n{opened.settings.visibility} attention, layer {layer}"
    labels = [repr(text)[1:-1] for text in texts]
    out.file(figures.plot_suffix(rows, labels, config.output_dir / "suffix.png", relevant=relevant, title=title))
    return {
        "query": candidates.query.id,
        "documents": [candidates.documents[i].id for i in index],
        "layers": [first, last],
        "parts": np.round(weights, 6).tolist(),
        "suffix_layer": layer,
        "suffix_tokens": texts,
        "suffix": np.round(rows, 6).tolist(),
    }


def _provenance(config: AnalyzeConfig, opened: Opened, validation: ValidationLists) -> dict[str, Any]:
    return {
        "lists": len(validation.lists),
        "weights": weights_fingerprint(opened.source.model),
        "prompt": opened.encoder.fingerprint,
        "ranker": to_plain(opened.settings),
        "score_layer": opened.score_layer,
        "config": to_plain(config),
        "git_commit": git_commit(),
        "versions": versions(),
    }
