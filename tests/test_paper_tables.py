"""The tables and figures of the paper: each experiment runs in miniature, with the numbers of the paper beside ours."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eval_helpers import beir_folder
from omegaconf import OmegaConf
from rich.console import Console

from blockrank.config import build, compose, config_dir
from blockrank.errors import UserError
from blockrank.evaluation import suite
from blockrank.evaluation.opening import open_ranker
from blockrank.evaluation.settings import EvalConfig
from blockrank.evaluation.suite import evaluate_rows

TABLES = {
    "beir": 1,
    "in_domain": 2,
    "loss_ablation": 3,
    "readout": 4,
    "beam_entropy": 5,
    "query_in_prefix": 6,
    "cross_dataset": 7,
    "scaling": None,
}


def plain(name: str) -> dict[str, Any]:
    config = OmegaConf.to_container(compose("eval", [f"+exp={name}"]), resolve=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items() if key != "hydra"}


@pytest.fixture(scope="module")
def animals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beir_folder(tmp_path_factory.mktemp("tables") / "animals")


@pytest.fixture(scope="module")
def opened() -> Callable[[EvalConfig], Any]:
    """`open_ranker` that opens rankers of one kind and prompt once; another row borrows it under its own name."""
    rankers: dict[str, Any] = {}

    def shared(config: EvalConfig) -> Any:
        key = repr((config.ranker, config.prompt))
        if key not in rankers:
            rankers[key] = open_ranker(config)
        rankers[key].name = config.name
        return rankers[key]

    return shared


def in_miniature(name: str, animals: Path, output: Path) -> EvalConfig:
    """The experiment with the tiny model in place of every checkpoint, and the tiny folder in place of collections."""
    config = plain(name)
    here = {
        "data": {"kind": "beir", "path": str(animals), "ignore_self": None},
        "split": "test",
        "candidates": str(animals / "run.trec"),
    }
    for row in config["rows"].values():
        row.update(checkpoint=None, model="tiny")
        if "beams" in row.get("ranker", {}):
            row["ranker"]["beams"] = 10  # also where it is 1: compiled once
    for case in (config["collections"] or {}).values():
        for row in case.get("rows", {}).values():
            row.pop("checkpoint", None)
            row.pop("limits", None)
        if "data" in case:
            case.update(here)
    if config.get("data") is not None:
        config.update(here)
    config.update(output_dir=str(output), dtype="float32", deltas=name == "readout", limits=None, batch_size=8)
    return build(EvalConfig, config)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_paper_in_miniature(
    name: str, animals: Path, opened: Callable[[EvalConfig], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(suite, "open_ranker", opened)
    config = in_miniature(name, animals, tmp_path)
    text = io.StringIO()
    held_out = evaluate_rows(config, Console(file=text, width=300, soft_wrap=True))
    assert config.rows is not None
    for found in held_out:
        assert list(found.reports) == ["first stage", *config.rows]
        assert all(found.runs[row].is_file() for row in config.rows)
    rows = list(csv.reader(io.StringIO((tmp_path / "eval/table.csv").read_text())))
    cells = [cell for row in rows[1:] for cell in row]
    for numbers in published(config):
        assert str(numbers) in cells
    assert all((tmp_path / f"eval/table.{suffix}").is_file() for suffix in ("md", "tex", "html"))
    assert (tmp_path / "eval/scaling.png").is_file() == (name == "scaling")
    assert (tmp_path / "eval/deltas.png").is_file() == (name == "readout")


def published(config: EvalConfig) -> list[float]:
    """Every number of the paper that an experiment has."""
    papers = [config.paper, *(case.paper for case in (config.collections or {}).values() if case is not None)]
    return [value for paper in papers for numbers in (paper or {}).values() for value in numbers.values()]


@pytest.mark.parametrize(("name", "table"), TABLES.items())
def test_an_experiment_says_which_table_it_is(name: str, table: int | None):
    lines = (config_dir() / "exp" / f"{name}.yaml").read_text().splitlines()
    header = "\n".join(line for line in lines if line.startswith("#"))
    assert f"Table {table} of arXiv 2510.05396" in header or (table is None and "Figure 4 of arXiv" in header)
    assert f"python -m blockrank.eval +exp={name}" in header
    assert "Hardware:" in header
    assert "Expected:" in header
    config = build(EvalConfig, compose("eval", [f"+exp={name}"]))
    assert published(config)


def test_beirs_averages_are_those_of_the_paper():
    """Of the eleven numbers of each row of its table 1."""
    config = build(EvalConfig, compose("eval", ["+exp=beir"]))
    assert config.collections is not None
    assert config.paper is not None
    assert len(config.collections) == 11
    for row, average in config.paper.items():
        values = [case.paper[row]["nDCG@10"] for case in config.collections.values() if case and case.paper]
        assert sum(values) / 11 == pytest.approx(average["nDCG@10"], abs=0.051)


def test_all_missing_checkpoints_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = build(EvalConfig, compose("eval", ["+exp=readout", f"output_dir={tmp_path}"]))
    with pytest.raises(UserError) as caught:
        evaluate_rows(config, Console(file=io.StringIO()))
    for row in config.rows or ():
        assert f"row {row!r}: runs/msmarco" in str(caught.value)
    assert "rows.<name>=null" in str(caught.value)
    assert not (tmp_path / "eval").exists()
