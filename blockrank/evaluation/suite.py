"""Several rankers on several collections: one folder and one table for each collection, one table of all."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from blockrank.config import to_plain
from blockrank.errors import UserError
from blockrank.evaluation.deltas import all_deltas, write_deltas
from blockrank.evaluation.figures import plot_deltas
from blockrank.evaluation.held_out import DELTAS, FIRST_STAGE, SCALING, TABLE, HeldOut, row_folder
from blockrank.evaluation.opening import check_models, open_ranker, ranker_identity
from blockrank.evaluation.scaling import by_collection, draw_scaling
from blockrank.evaluation.settings import EvalConfig
from blockrank.evaluation.strata import query_strata, strata_table
from blockrank.evaluation.summary import summary_table
from blockrank.evaluation.tuned_row import measure_row

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """One collection of an evaluation; `name` is None where there is only one."""

    name: str | None
    config: EvalConfig
    held_out: HeldOut

    @property
    def lists(self) -> dict[str, Any]:
        """What decides which lists are scored."""
        return {"data": to_plain(self.config.data), **self.held_out.config.identity()}

    def recorded(self, row: EvalConfig | None = None) -> dict[str, Any]:
        """What is written with a row: the configuration, a ranker's own where it is one."""
        return {"overwrite": self.config.overwrite, "config": to_plain(row or self.config)}


def evaluate_rows(config: EvalConfig, console: Console) -> list[HeldOut]:
    """Measures all rows on all collections, prints the tables and where the files are.

    Whatever of the configuration can be wrong is found before anything is scored: collections, runs and the first
    ranker are opened, and the others' files looked for. A ranker that is the same on all collections is loaded once.
    """
    named = config.cases()
    rankers = {name: case.ranker_configs() for name, case in named.items()}
    _check(config, named, rankers)
    rows = list(dict.fromkeys(row for found in rankers.values() for row in found))
    plan = [(name, rankers[name][row]) for row in rows for name in named if row in rankers[name]]
    check_models([row for _, row in plan])
    opened = plan[0][1] if plan else None
    ranker = None if opened is None else open_ranker(opened)
    cases = {name: _open(name, case, config.output_dir / "eval") for name, case in named.items()}
    for case in cases.values():
        if case.config.baseline:
            case.held_out.measure_first_stage(case.lists, **case.recorded())
        for row, path in case.config.run_files.items():
            case.held_out.measure_run(row, path, **case.recorded())
    identity = None
    for name, row in plan:
        if opened is None or row.source() != opened.source():
            ranker = None  # lets go of the weights before the next ones are read
            ranker, opened, identity = open_ranker(row), row, None
        assert ranker is not None
        identity = identity or ranker_identity(ranker)
        case = cases[name]
        options = {"identity": {**case.lists, **identity}, "recorded": case.recorded(row)}
        measure_row(case.held_out, row.name or ranker.name, ranker, row, **options)
    if config.against is not None and not any(config.against in case.held_out.reports for case in cases.values()):
        log.warning("against: no row is called %r: nothing is tested or compared", config.against)
    for case in cases.values():
        _write_case(case, console)
    if config.collections is not None or config.depths is not None:
        _write_summary(config, list(cases.values()), console)
    return [case.held_out for case in cases.values()]


def _write_summary(config: EvalConfig, cases: list[Case], console: Console) -> None:
    """The table of all collections, and a figure for each that there is at several depths."""
    folder = config.output_dir / "eval"
    table = summary_table(
        {str(case.name): case.held_out for case in cases},
        config.against or FIRST_STAGE,
        published={str(case.name): case.config.paper or {} for case in cases},
        recorded=config.recorded,
        average=(config.paper or {}) if config.average else None,
        scale=config.scale,
        seed=config.seed,
    )
    table.write_all(folder / TABLE)
    console.print(table.to_markdown(), markup=False)
    for name, found in by_collection([(case.held_out, case.config) for case in cases]).items():
        target = folder / (SCALING if name is None else f"{row_folder(name)}_{SCALING}")
        draw_scaling(found, target, config.scale, config.seed)
        console.print(f"figure: {target}", markup=False)


def _check(
    config: EvalConfig, cases: dict[str | None, EvalConfig], rankers: dict[str | None, dict[str | None, EvalConfig]]
) -> None:
    """Raises `UserError` for what is amiss without a look at any file's content."""
    if not any(rankers.values()) and not any(case.run_files for case in cases.values()):
        raise UserError(
            "give checkpoint=<training run or model folder>, model=<name in configs/model> or runs=[<TREC run>, ...]"
        )
    for name, case in cases.items():
        if case.data is None:
            where = "" if name is None else f"collection {name!r}: "
            raise UserError(
                f"{where}data: which collection? Give data=beir_folder data.path=..., ir_datasets, icr, hf or pydocs"
            )
        for row, run in case.run_files.items():
            if row in rankers[name]:
                raise UserError(f"runs: {row!r} is the name of a ranker's row too: choose another")
            if not run.is_file():
                raise UserError(f"runs: {run}: no such run file")
    config.check_against()
    config.check_validation()


def _open(name: str | None, config: EvalConfig, folder: Path) -> Case:
    assert config.data is not None
    collection = config.data.open()
    folder = folder if name is None else folder / row_folder(name)
    return Case(name, config, HeldOut(collection, config.held_out(collection), folder, config.seed))


def _write_case(case: Case, console: Console) -> None:
    held_out, config = case.held_out, case.config
    against, digits = config.against or FIRST_STAGE, 1 if config.percent else 4
    if held_out.reports:
        options = {"paper": config.paper, "scale": config.scale, "digits": digits}
        table = held_out.table(against, config.recorded, **options)
        table.write_all(held_out.folder / TABLE)
        console.print(table.to_markdown(), markup=False)
    if config.deltas and against in held_out.reports and len(held_out.reports) > 1:
        found = all_deltas(held_out.reports, against, held_out.config.measures)
        csv, figure = (held_out.folder / name for name in DELTAS)
        write_deltas(csv, found, held_out.query_texts())
        plot_deltas(figure, found, against, held_out.title)
    if config.strata:
        strata = query_strata(held_out.lists, held_out.qrels, held_out.query_texts())
        for row, report in held_out.reports.items():
            options = {
                "title": f"{row}: {held_out.title}",
                "scale": config.scale,
                "digits": digits,
                "seed": config.seed,
            }
            table = strata_table(report, strata, held_out.config.measures, **options)
            table.write_all(held_out.folder / row_folder(row) / "strata")
            console.print(table.to_markdown(), markup=False)
    for row, path in held_out.runs.items():
        console.print(f"run ({row}): {path}", markup=False)
