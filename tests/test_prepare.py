"""The preflight report counts what it should, and the command tells bad input in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_candidates import Small
from test_collections import ROWS, beir_folder, write_jsonl
from test_irds import ir_dataset

from blockrank.config import build, compose
from blockrank.data.collection import BeirConfig, HfConfig, IcrConfig, IrDatasetsConfig, PydocsConfig
from blockrank.data.preflight import preflight
from blockrank.errors import UserError
from blockrank.prepare import PrepareConfig, prepare


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKRANK_CACHE", str(tmp_path / "cache"))


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "blockrank.prepare", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_report_of_known_numbers() -> None:
    collection = Small(
        {f"d{i}": "word " * i for i in range(9)},
        {"q1": "one two", "q2": "one", "q3": ""},
        {"q1": {"d1": 1, "d9": 2}, "q2": {"d2": 0}, "q3": {"d3": 1}, "q4": {"d4": 1}},
    )
    report = preflight(collection, runs={"test": {"q1": {"d1": 2.0, "d10": 1.0}, "q2": {}}}, chunk_length=6)
    lengths = report.document_lengths
    assert (report.documents, report.empty_documents, report.titled_documents) == (9, 1, 0)
    assert (lengths.unit, lengths.count, lengths.mean, lengths.longest) == ("words", 9, 4.0, 8)
    assert lengths.percentiles == {50: 4, 90: 8, 99: 8}
    assert lengths.over == pytest.approx(2 / 9)
    split = report.splits["test"]
    assert (split.queries, split.judgements, split.positives, split.queries_without_positive) == (3, 5, 4, 1)
    assert split.queries_without_text == (2, ("q3", "q4"))
    assert split.judged_without_text == (1, ("d9",))
    assert split.query_lengths.mean == 1.0
    assert (split.candidates, split.queries_without_candidates, split.positives_among_candidates) == (2, 2, 1)
    assert split.dangling_candidates == (1, ("d10",))
    assert report.problems == [
        "1 of 9 documents read are empty",
        "test: 1 judged documents are not in the corpus: 'd9'",
        "test: 2 judged queries have no text: 'q3', 'q4'",
        "test: 1 documents of the run are not in the corpus: 'd10'",
        "test: 1 of 3 queries have no positive",
        "test: 2 of 3 queries have no candidates",
    ]


def test_lengths_in_tokens_and_from_a_sample() -> None:
    collection = Small({f"d{i:03}": "ab" * (1 + i % 2) for i in range(100)}, {"q": "abc"}, {"q": {"d000": 1}})
    report = preflight(collection, count_tokens=len, chunk_length=2, sample=10)
    assert (report.documents, report.document_lengths.count, report.document_lengths.unit) == (100, 10, "tokens")
    assert report.splits["test"].query_lengths.mean == 3.0
    assert preflight(collection, count_tokens=len, chunk_length=2).document_lengths.over == 0.5


def test_a_sound_collection_has_no_problem() -> None:
    collection = Small({"d": "text"}, {"q": "query"}, {"q": {"d": 1}})
    assert preflight(collection, runs={"test": {"q": {"d": 1.0}}}).problems == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], PydocsConfig()),
        (["data=pydocs", "data.max_words=20"], PydocsConfig(20)),
        (["data=beir", "data.path=/set"], BeirConfig(Path("/set"))),
        (["data=beir_folder", "data.path=/set", "data.ignore_self=true"], BeirConfig(Path("/set"), True)),
        (["data=icr", "data.path=/x.jsonl", "data.split=dev"], IcrConfig(Path("/x.jsonl"), "dev")),
        (["data=hf", "data.path=owner/set", "data.name=small"], HfConfig("owner/set", "small")),
        (["data=ir_datasets", "data.id=beir/scifact/test"], IrDatasetsConfig("beir/scifact/test")),
    ],
)
def test_every_data_config_composes_into_its_class(overrides: list[str], expected: object) -> None:
    assert build(PrepareConfig, compose("prepare", overrides)).data == expected


def test_relative_paths_are_those_of_the_start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beir_folder(tmp_path / "set=1")
    monkeypatch.chdir(tmp_path)
    config = build(PrepareConfig, compose("prepare", ["data=beir", "data.path='set=1'", "split=test"]))
    assert isinstance(config.data, BeirConfig)
    assert config.data.path == tmp_path / "set=1"
    assert prepare(config).documents == 4


def test_the_command_reports_and_writes_json(tmp_path: Path) -> None:
    beir_folder(tmp_path / "set")
    result = command("data=beir", "data.path=set", "candidates=bm25", "report=out/report.json", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "set: 4 documents" in result.stdout
    assert "1 of 4 documents read are empty" in result.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["documents"] == 4
    assert report["splits"]["test"]["queries"] == 1
    assert report["problems"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == ["out", "set"]
    strict = command("data=beir", "data.path=set", "strict=true", folder=tmp_path)
    assert strict.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["data=beir"], "data.path"),
        (["data=beir", "data.path=nowhere"], "nowhere is no folder"),
        (["data=beir", "data.path=a=b"], "data.path='a=b'"),
        (["data=beir", "data.path=set", "candidates=no.trec"], "candidates: no.trec is no file"),
        (["data=beir", "data.path=set", "split=dev"], "no split 'dev'; it has test, train"),
        (["data=beir", "data.path=set", "prefetch=true"], "prefetch=true is for data=ir_datasets"),
        (["depth=0"], "config key depth: 0 must be at least 1"),
        (["+unknown=1"], "unknown config key unknown"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path: Path, arguments: list[str], hint: str) -> None:
    beir_folder(tmp_path / "set")
    result = command(*arguments, folder=tmp_path)
    assert result.returncode == 2
    assert hint in result.stderr
    assert "Traceback" not in result.stderr


def test_prefetch_builds_what_reading_needs(tmp_path: Path) -> None:
    name = ir_dataset(tmp_path / "data", "prefetched-corpus")
    report = prepare(PrepareConfig(IrDatasetsConfig(f"{name}/dev"), candidates="scoreddocs", prefetch=True))
    assert report.documents == 3
    assert report.splits["default"].candidates == 2
    assert (tmp_path / "data" / "docs.tsv.pklz4").is_dir()


def test_candidates_of_an_icr_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "dev.jsonl", ROWS)
    report = prepare(PrepareConfig(IcrConfig(path), candidates="own"))
    assert report.splits["dev"].positives_among_candidates == 1
    with pytest.raises(UserError, match="only ir_datasets"):
        prepare(PrepareConfig(IcrConfig(path), candidates="scoreddocs"))


def test_a_real_collection_and_its_run(shared_data: Path) -> None:
    config = PrepareConfig(
        BeirConfig(shared_data / "trec-dl19"), candidates=str(shared_data / "trec-dl19" / "runs" / "bm25.dl19.trec")
    )
    report = prepare(config)
    split = report.splits["test"]
    assert (report.documents, split.queries, split.judgements, split.candidates) == (11_843, 43, 9_260, 4_300)
    assert split.judged_without_text[0] == 5_156
    assert split.dangling_candidates == (0, ())
