"""The configuration of an evaluation, `configs/eval.yaml` as dataclasses: rankers, collections and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from blockrank.config import choice
from blockrank.data.collection import Collection, CollectionConfig
from blockrank.errors import FieldError, UserError, at_least, between, not_empty
from blockrank.evaluation.held_out import FIRST_STAGE, check_row, row_folder
from blockrank.evaluation.metrics import official_measures, parse_measure
from blockrank.models.quantize import Weights
from blockrank.parallel import MeshConfig
from blockrank.prompts.encode import PromptLimits
from blockrank.prompts.template import PromptTemplate
from blockrank.rankers.ensemble import EnsembleSettings
from blockrank.sources import RankerSettings
from blockrank.training.initial import ModelConfig
from blockrank.training.recipe import HeldOutConfig

Published = dict[str, dict[str, float]]
"""row -> measure, or what is recorded of a list -> the number a paper gives."""


@dataclass(frozen=True)
class TrainingSections:
    """What an experiment says of training: `+exp=...` composes it here too, and what measures has no use for it."""

    tracker: dict[str, Any] | None = None
    dry_run: bool = False
    lists: dict[str, Any] | None = None
    loss: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    trainer: dict[str, Any] | None = None
    checkpoints: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """One ranker among several: its own values of the evaluation's keys; null leaves them as they are.

    A row that names `checkpoint` or `model` has this one only. `model`, `prompt` and `ranker` may be the name of a file
    in their folder of `configs`.
    """

    checkpoint: str | None = None
    base: str | None = None
    model: ModelConfig | str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    weights: Weights | None = None
    preset: str | None = None
    prompt: dict[str, Any] | str | None = None
    ranker: RankerSettings | str | None = None
    limits: PromptLimits | None = None
    readout: Path | None = None
    document_store: Path | None = None

    def __post_init__(self) -> None:
        if self.checkpoint is not None and self.model is not None:
            raise FieldError("model", "a row has a checkpoint or a model, not both")


@dataclass(frozen=True, kw_only=True)
class CaseConfig:
    """One collection among several: its own values of the evaluation's keys; null leaves them as they are.

    `rows`: what rows have on this collection alone, key by key (null: no such row).
    """

    data: CollectionConfig | None = None
    split: str | None = None
    candidates: str | None = None
    depth: int | None = None
    with_positives: bool | None = None
    max_queries: int | None = None
    measures: tuple[str, ...] | None = None
    batch_size: int | None = None
    tail: Literal["drop", "keep"] | None = None
    missing: Literal["zero", "skip"] | None = None
    missing_documents: Literal["error", "drop"] | None = None
    rows: dict[str, RowConfig | None] | None = None
    runs: dict[str, Path] | tuple[Path, ...] | None = None
    paper: Published | None = None
    validation: HeldOutConfig | None = None

    def __post_init__(self) -> None:
        at_least(self, 1, "depth", "max_queries", "batch_size")
        not_empty(self, "measures")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(TrainingSections):
    """`configs/eval.yaml`.

    `checkpoint` goes before `model`; `base` is where the base model of its adapters lies, if it has moved. Readout
    settings come from `ranker`, else `preset`, else the checkpoint, else the `paper` preset; a `readout` that was found
    goes before all in score layer and signals. `document_store`: a folder of documents that `blockrank.store` has read.
    `name`: of the row and its folder, not the first stage's; null: the ranker's kind. A key about lists that is null
    takes the value of the experiment's `test`, else a default.

    `rows`, `collections`: several rankers and collections, each by its name with what differs from the keys here (null:
    left out). `depths`: each collection at several depths. `runs`: TREC runs of other systems, measured as rows.
    `recorded`: columns of what the evaluation records of each list: `seconds`, `tokens`, `documents`, or a key of the
    ranker's `extra`. `deltas`: differences from the row `against` by query, and their figure. `strata`: a table for
    each row by kinds of queries. `confidence`: for each row how sure its scores are, and how often rightly.
    `validation`: the lists that temperatures and an ensemble's `alpha` are chosen on.
    """

    output_dir: Path
    name: str | None
    seed: int
    data: CollectionConfig | None = None
    checkpoint: str | None
    base: str | None = None
    model: ModelConfig | None = None
    dtype: Literal["float32", "bfloat16"]
    weights: Weights | None
    preset: str | None
    prompt: dict[str, Any] | None = None
    ranker: RankerSettings | None = None
    limits: PromptLimits | None
    readout: Path | None
    document_store: Path | None
    mesh: MeshConfig = field(default_factory=MeshConfig)
    split: str | None
    candidates: str | None
    depth: int | None
    with_positives: bool | None
    max_queries: int | None
    measures: tuple[str, ...] | None
    batch_size: int | None
    tail: Literal["drop", "keep"] | None
    missing: Literal["zero", "skip"] | None
    missing_documents: Literal["error", "drop"] | None
    baseline: bool
    overwrite: bool
    rows: dict[str, RowConfig | None] | None = None
    collections: dict[str, CaseConfig | None] | None = None
    depths: tuple[int, ...] | None = None
    runs: dict[str, Path] | tuple[Path, ...] | None = None
    against: str | None = None
    paper: Published | None = None
    percent: bool = False
    average: bool = False
    recorded: tuple[str, ...] = ()
    deltas: bool = True
    strata: bool = False
    confidence: bool = False
    validation: HeldOutConfig | None = None
    test: HeldOutConfig | None = None

    def __post_init__(self) -> None:
        between(self, 0, 2**32 - 1, "seed")
        at_least(self, 1, "depth", "max_queries", "batch_size")
        not_empty(self, "measures", "depths", "rows", "collections", "runs")
        _refuse("name", [self.name] if self.name is not None else [], check_row)
        _refuse("rows", self.rows or (), check_row)
        _refuse("collections", self.collections or (), row_folder)
        if self.name is not None and self.rows is not None:
            raise FieldError("name", f"{self.name!r}, but the keys of `rows` are the names of the rows")
        for depth in self.depths or ():
            if depth < 1:
                raise FieldError("depths", f"{depth} must be at least 1")
        if self.depth is not None and self.depths is not None:
            raise FieldError("depth", f"{self.depth}, but `depths` has the depths")
        several = self.collections is not None or self.depths is not None
        if several and self.paper and not self.average:
            raise FieldError("paper", "is of the average here: set average=true, or give each of `collections` its own")
        for row, numbers in (self.paper or {}).items():
            self._check_published(row, numbers)
        _refuse("runs", self.run_files, check_row)

    def _check_published(self, row: str, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            if name in self.recorded:
                continue
            try:
                parse_measure(name)
            except UserError as error:
                raise FieldError("paper", f"{row}: {error}") from error
            if value > 1 and not self.percent:
                raise FieldError("paper", f"{row}: {name}: {value} is above 1; numbers in percent need percent=true")

    @property
    def scale(self) -> float:
        """What measures are multiplied by in tables."""
        return 100.0 if self.percent else 1.0

    @property
    def run_files(self) -> dict[str, Path]:
        """Row -> file of the runs of other systems; a run without a name goes by its file's."""
        runs = self.runs or {}
        names = list(runs) if isinstance(runs, dict) else [path.stem for path in runs]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise FieldError("runs", f"two runs are called {twice[0]!r}: name them, runs={{a: path, b: path}}")
        return dict(zip(names, runs.values() if isinstance(runs, dict) else runs, strict=True))

    def held_out(self, collection: Collection) -> HeldOutConfig:
        """The lists to measure on."""
        base = self.test or HeldOutConfig(split="test", measures=official_measures(collection.name))
        given = {f.name: value for f in fields(HeldOutConfig) if (value := getattr(self, f.name)) is not None}
        return replace(base, **given)

    def ranker_configs(self) -> dict[str | None, EvalConfig]:
        """Name of each row -> the evaluation with this one ranker; None where the ranker's kind is to be the name."""
        if self.rows is None:
            return {self.name: self} if self.checkpoint is not None or self.model is not None else {}
        return {name: self._with_row(name, row) for name, row in self.rows.items() if row is not None}

    def source(self) -> tuple[Any, ...]:
        """What decides which ranker is opened; equal for equal rankers."""
        own = (f.name for f in fields(RowConfig))
        return (self.name, self.seed, self.mesh, *(repr(getattr(self, name)) for name in own))

    def _with_row(self, name: str, row: RowConfig) -> EvalConfig:
        given = _given(row)
        key = f"rows.{name}"
        if isinstance(row.prompt, str):
            given["prompt"] = PromptTemplate.from_yaml(row.prompt).to_config()
        if isinstance(row.ranker, str):
            given["ranker"] = choice("ranker", row.ranker, RankerSettings, f"{key}.ranker")
        if isinstance(row.model, str):
            given["model"] = choice("model", row.model, ModelConfig, f"{key}.model")
        source = {"checkpoint": None, "model": None} if row.checkpoint is not None or row.model is not None else {}
        return replace(self, **{**source, **given, "rows": None, "name": name})

    def cases(self) -> dict[str | None, EvalConfig]:
        """Name of each collection -> the evaluation of this one; None where there is only one, without a name."""
        found: dict[str | None, EvalConfig] = {None: self}
        if self.collections is not None:
            plain = replace(self, collections=None, paper=None)
            found = {
                name: replace(plain, **{**_given(case), "rows": self._rows_on(name, case)})
                for name, case in self.collections.items()
                if case is not None
            }
        if self.depths is None:
            return found
        return {
            f"{name} N={depth}" if name else f"N={depth}": replace(config, depths=None, depth=depth, paper=None)
            for name, config in found.items()
            for depth in self.depths
        }

    def _rows_on(self, name: str, case: CaseConfig) -> dict[str, RowConfig | None] | None:
        """The rows as one collection has them."""
        rows = dict(self.rows or {})
        for row, own in (case.rows or {}).items():
            if row not in rows:
                raise FieldError(f"collections.{name}.rows", f"{row!r} is none of `rows`: {', '.join(rows) or 'none'}")
            whole = rows[row]
            rows[row] = None if own is None or whole is None else _merged(whole, own)
        return rows if self.rows is not None else None

    def check_validation(self) -> None:
        """Raises `FieldError` where a row has to be tuned without validation lists, or on those that are measured."""
        for case in self.cases().values():
            for row in case.ranker_configs().values():
                tuned = isinstance(row.ranker, EnsembleSettings) and row.ranker.alpha is None
                if tuned and row.validation is None:
                    raise FieldError(
                        "ranker.alpha",
                        "null is tuned on validation lists, and there are none: give ranker.alpha, or "
                        "'validation={split: dev, candidates: dev.trec}' (an experiment has its own)",
                    )
                split = row.split or (row.test.split if row.test else "test")
                if (tuned or row.confidence) and row.validation is not None and row.validation.split == split:
                    raise FieldError("validation.split", f"{split!r} is the split that is measured: choose another one")

    def check_against(self) -> None:
        """Raises `UserError` where no row has the name `against`."""
        known = {FIRST_STAGE, *self.run_files, *(name for name in self.ranker_configs() if name)}
        known |= {name for case in self.cases().values() for name in case.run_files}
        if self.against is not None and self.rows is not None and self.against not in known:
            raise UserError(f"config key against: {self.against!r} is no row; rows are {', '.join(sorted(known))}")


def _merged(row: RowConfig, own: RowConfig) -> RowConfig:
    """`row` with the values that `own` gives; a checkpoint takes the place of a model and the other way round."""
    source = {"checkpoint": None, "model": None} if own.checkpoint is not None or own.model is not None else {}
    return replace(row, **{**source, **_given(own)})


def _given(settings: RowConfig | CaseConfig) -> dict[str, Any]:
    return {f.name: value for f in fields(settings) if (value := getattr(settings, f.name)) is not None}


def _refuse(key: str, names: Iterable[str], check: Callable[[str], object]) -> None:
    """Raises `FieldError` for a name that `check` refuses, or for two whose folders are one."""
    folders: dict[str, str] = {}
    for name in names:
        try:
            check(name)
        except UserError as error:
            raise FieldError(key, str(error)) from error
        other = folders.setdefault(row_folder(name).casefold(), name)
        if other != name:
            raise FieldError(key, f"{other!r} and {name!r} would have one folder: choose other names")
