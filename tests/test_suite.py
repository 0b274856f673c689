"""Several rows, collections and depths in one evaluation, runs of other systems, and what is refused."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from eval_helpers import beir_folder, evaluate, on
from hypothesis import given
from hypothesis import strategies as st

from blockrank.config import build, compose
from blockrank.data.trec import read_run
from blockrank.errors import UserError
from blockrank.evaluation import suite
from blockrank.evaluation.figures import Point
from blockrank.evaluation.metrics import evaluate as measure
from blockrank.evaluation.recorded import recorded_numbers, recorded_values
from blockrank.evaluation.records import QueryRecord
from blockrank.evaluation.scaling import published_points, scaling_points
from blockrank.evaluation.settings import EvalConfig
from blockrank.evaluation.significance import bootstrap_interval, bootstrap_means
from blockrank.evaluation.strata import by_terciles, cut
from blockrank.prompts.encode import PromptLimits
from blockrank.prompts.template import PromptTemplate
from blockrank.rankers.attention import AttentionSettings
from blockrank.rankers.generative import GenerativeSettings
from blockrank.types import CandidateList, ListScores

LN = 1 / np.log2(3)


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    return beir_folder(tmp_path / "animals")


class ByLetter:
    """The alphabet backwards, in place of a model: d2 ("dogs"), d3 ("cows"), d1 ("cats")."""

    def __init__(self, name: str | None) -> None:
        self.name = name or "attention"

    def score(self, lists: list[CandidateList]) -> list[ListScores]:
        return [
            ListScores(
                np.array([256 * ord(d.text[0]) + ord(d.text[1]) for d in one.documents], np.float32),
                np.zeros(len(one), bool),
                tokens=len(one),
                extra={"length": float(len(one.query.text))},
            )
            for one in lists
        ]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "open_ranker", lambda config: ByLetter(config.name))
    monkeypatch.setattr(suite, "ranker_identity", lambda ranker: {"name": ranker.name})


def external(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line} other\n" for line in lines))
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_a_run_of_another_system_is_a_row_under_the_same_rules(animals: Path, tmp_path: Path):
    """q1: d1 is second by the rule for ties (d2 goes first). q2: d2 is third, below the cut. q3: d4 is first."""
    run = external(
        tmp_path / "other.trec",
        *("q1 Q0 d1 1 2", "q1 Q0 d2 2 2", "q1 Q0 d3 3 1"),
        *("q2 Q0 d2 9 1", "q2 Q0 d3 1 3", "q2 Q0 d1 1 2"),
        *("q3 Q0 d4 1 0.5", "q9 Q0 d1 1 1"),
    )
    (held_out,), text = evaluate(tmp_path / "out", *on(animals), f"runs=[{run}]", "depth=2")
    assert list(held_out.reports) == ["first stage", "other"]
    folder = tmp_path / "out/eval"
    results = json.loads((folder / "other/results.json").read_text())
    assert results["metrics"]["means"] == pytest.approx({"P@1": 1 / 3, "nDCG@10": (LN + 0 + 1) / 3})
    assert results["identity"]["run"] == str(run)
    assert (results["counts"]["tied_documents"], results["counts"]["documents_below_depth_dropped"]) == (2, 2)
    written = read_run(folder / "other/run.trec")
    assert {query: list(ranking) for query, ranking in written.items()} == {
        "q1": ["d2", "d1"],
        "q2": ["d3", "d1"],
        "q3": ["d4"],
    }
    assert measure(written, held_out.qrels, ["nDCG@10"]).means == pytest.approx({"nDCG@10": (LN + 1) / 3})
    assert f"run (other): {folder / 'other/run.trec'}" in text
    rows = rows_of(folder / "table.csv")
    assert [(row["ranker"], row["queries"], row["missing"]) for row in rows] == [
        ("first stage", "3", "1"),
        ("other", "3", "0"),
    ]
    assert all((folder / f"table.{suffix}").is_file() for suffix in ("md", "tex", "csv", "html"))


def test_a_run_is_measured_anew_each_time(animals: Path, tmp_path: Path):
    run = external(tmp_path / "other.trec", "q1 Q0 d2 1 2", "q2 Q0 d2 1 2")
    for lines, mean in ((None, 1 / 3), (["q1 Q0 d1 1 2", "q2 Q0 d2 1 2"], 2 / 3)):
        if lines:
            external(run, *lines)
        (held_out,), _ = evaluate(tmp_path / "out", *on(animals), f"runs={{theirs: {run}}}")
        assert held_out.reports["theirs"].means["P@1"] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["x1 Q0 d1 1 2"], r"no query id of animals \(test\) is in .*other\.trec: animals \(test\) has 'q1'"),
        (["q1 Q0 D1 1 2"], r"other\.trec: 1 documents are not in animals: 'D1'.*missing_documents=drop"),
        (["q1 Q0 d1 1 2", "q1 Q0 d2 2 nan"], r"other\.trec:2: a score must be a finite number"),
        (["q1 Q0 d1 1 2", "q1 Q0 d1 2 1"], r"other\.trec:2: document 'd1' is listed twice"),
        (["q1 Q0 d3 1 2"], r"other\.trec: run and qrels have no document id in common"),
        ([], r"other\.trec: the run is empty"),
    ],
)
def test_foreign_and_broken_runs_are_refused(animals: Path, tmp_path: Path, lines: list[str], message: str):
    run = external(tmp_path / "other.trec", *lines)
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path / "out", *on(animals), f"runs=[{run}]")


def test_documents_outside_the_collection_are_dropped_when_asked(animals: Path, tmp_path: Path):
    run = external(tmp_path / "other.trec", "q1 Q0 D9 1 3", "q1 Q0 d1 1 2")
    (held_out,), _ = evaluate(tmp_path / "out", *on(animals), f"runs=[{run}]", "missing_documents=drop")
    assert held_out.reports["other"].means["P@1"] == pytest.approx(1 / 3)
    assert held_out.records["other"]["q1"].dropped_documents == 1


def test_skipped_queries_must_be_the_same_for_a_run(animals: Path, tmp_path: Path):
    run = external(tmp_path / "other.trec", "q1 Q0 d1 1 2")
    with pytest.raises(
        UserError, match=r"1 judged queries have a candidate list or are in the run.*'q2'.*missing=zero"
    ):
        evaluate(tmp_path / "out", *on(animals), f"runs=[{run}]", "missing=skip")


def test_a_run_does_not_take_a_rankers_folder(animals: Path, tmp_path: Path):
    run = external(tmp_path / "other.trec", "q1 Q0 d1 1 2")
    (tmp_path / "out/eval/other").mkdir(parents=True)
    (tmp_path / "out/eval/other/scores.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"scores\.jsonl exists: the folder is that of a ranker"):
        evaluate(tmp_path / "out", *on(animals), f"runs=[{run}]")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["runs=[a/x.trec,b/x.trec]"], "config key runs: two runs are called 'x'"),
        (["runs={first stage: x.trec}"], "config key runs: .* is the name of the first stage's own row"),
        (["runs={A: x.trec,a: y.trec}"], "config key runs: 'A' and 'a' would have one folder"),
        (["runs=[nowhere.trec]"], r"nowhere\.trec: no such run file"),
        (["runs=[]"], "config key runs: .* is empty"),
        (
            ["rows={a: {checkpoint: nowhere}, b: {checkpoint: lost}}"],
            "row 'a': nowhere: no such.*row 'b': lost: no such",
        ),
        (["rows={a: {dtype: float32}}"], "row 'a': give checkpoint="),
        (["rows={a: {checkpoint: x, model: tiny}}"], r"rows\.a\.model: .*not both"),
        (
            ["rows={a: {model: tyni}}"],
            r"config key rows\.a\.model: 'tyni' is no choice; model is one of hf, mistral_7b",
        ),
        (["rows={a: {model: tiny, prompt: papre}}"], "papre.* no such prompt template"),
        (["rows={a: {model: tiny, ranker: gen}}"], r"rows\.a\.ranker: 'gen' is no choice; ranker is one of attention"),
        (["rows={a: {model: tiny, colour: red}}"], r"unknown config key rows\.a\.colour"),
        (["rows={a: {model: tiny}}", "name=b"], "config key name: 'b', but the keys of `rows`"),
        (["rows={a: {model: tiny}}", "against=c"], "config key against: 'c' is no row; rows are a, first stage"),
        (["rows={table.csv: {model: tiny}}"], "config key rows: 'table.csv' cannot name a row"),
        (["model=tiny", "collections={a/b: {depth: 3}}"], "config key collections: 'a/b' cannot name"),
        (["model=tiny", "depths=[0]"], "config key depths: 0 must be at least 1"),
        (["model=tiny", "depths=[1]", "depth=2"], "config key depth: 2, but `depths`"),
        (["model=tiny", "paper={a: {P@1: 29.1}}"], "config key paper: a: P@1: 29.1 is above 1; .*percent=true"),
        (
            ["model=tiny", "depths=[1]", "paper={a: {P@1: 0.3}}"],
            r"config key paper: is of the average here: set average=true",
        ),
        (["model=tiny", "paper={a: {P@one: 0.3}}"], r"config key paper: a: unknown measure 'P@one'"),
        (["rows={a: {model: tiny}}", "runs={a: x.trec}"], "runs: 'a' is the name of a ranker's row too"),
        ([], "give checkpoint=.*runs="),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_scored(
    animals: Path, tmp_path: Path, overrides: list[str], message: str
):
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path / "out", *on(animals), *overrides)
    assert not list(tmp_path.rglob("results.json"))


def test_a_collection_without_data_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="collection 'fiqa': data: which collection"):
        evaluate(tmp_path / "out", "model=tiny", "collections={fiqa: {depth: 3}}")


def test_rows_have_their_own_values_in_place_of_the_evaluations():
    overrides = [
        "checkpoint=base",
        "dtype=bfloat16",
        "ranker=attention",
        "ranker.score_layer=3",
        "rows={a: {}, b: {checkpoint: other, dtype: float32}, c: {model: tiny, ranker: generative}, d: null,"
        " e: {prompt: paper_query_free, ranker: {kind: attention, visibility: dense}, limits: {document_tokens: 7}}}",
    ]
    rows = build(EvalConfig, compose("eval", overrides)).ranker_configs()
    assert list(rows) == ["a", "b", "c", "e"]
    assert (rows["a"].checkpoint, rows["a"].dtype, rows["a"].name) == ("base", "bfloat16", "a")
    assert rows["a"].ranker is not None
    assert rows["a"].ranker.score_layer == 3
    assert (rows["b"].checkpoint, rows["b"].dtype) == ("other", "float32")
    assert rows["c"].checkpoint is None
    assert rows["c"].model is not None
    assert rows["c"].model.kind == "random"
    assert rows["c"].ranker == GenerativeSettings(beams=10)
    assert (
        PromptTemplate.from_config(rows["e"].prompt).fingerprint
        == PromptTemplate.from_yaml("paper_query_free").fingerprint
    )
    assert (rows["e"].ranker, rows["e"].limits) == (
        AttentionSettings(visibility="dense"),
        PromptLimits(document_tokens=7),
    )


def test_a_collection_may_change_rows():
    overrides = [
        "dtype=float32",
        "rows={a: {checkpoint: base, preset: paper}, b: {checkpoint: base}, c: null}",
        "collections={x: {}, y: {rows: {a: {checkpoint: other}, b: null, c: {}}}, z: {rows: {a: {model: tiny}}}}",
    ]
    cases = build(EvalConfig, compose("eval", overrides)).cases()
    found = {name: case.ranker_configs() for name, case in cases.items()}
    assert {name: list(rows) for name, rows in found.items()} == {"x": ["a", "b"], "y": ["a"], "z": ["a", "b"]}
    assert [found[name]["a"].checkpoint for name in "xyz"] == ["base", "other", None]
    assert [found[name]["a"].preset for name in "xyz"] == ["paper"] * 3
    assert found["z"]["a"].model is not None
    assert found["x"]["b"].source() == found["z"]["b"].source() != found["x"]["a"].source()
    with pytest.raises(UserError, match=r"collections\.x\.rows='d' is none of `rows`: a, b"):
        build(EvalConfig, compose("eval", [overrides[1], "collections={x: {rows: {d: {}}}}"])).cases()


def test_collections_and_depths_make_cases():
    overrides = ["checkpoint=x", "depths=[10,20]", "collections={a: {split: dev}, b: null, c: {max_queries: 5}}"]
    cases = build(EvalConfig, compose("eval", overrides)).cases()
    found = [(name, case.split, case.depth, case.max_queries) for name, case in cases.items()]
    assert found == [
        ("a N=10", "dev", 10, None),
        ("a N=20", "dev", 20, None),
        ("c N=10", None, 10, 5),
        ("c N=20", None, 20, 5),
    ]


@pytest.mark.usefixtures("no_model")
def test_two_collections_two_rows_one_table(animals: Path, tmp_path: Path):
    """The table of all has each collection's numbers, the average by hand, and the paper's beside them."""
    other = beir_folder(tmp_path / "beasts")
    (other / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td1\t1\n")
    good = external(tmp_path / "good.trec", "q1 Q0 d1 1 2", "q2 Q0 d2 1 2", "q3 Q0 d4 1 1")
    overrides = [
        *on(animals),
        "rows={ours: {model: tiny}}",
        f"runs=[{good}]",
        "collections={animals: {paper: {ours: {P@1: 50}, theirs: {P@1: 60}}},"
        f" beasts: {{data: {{kind: beir, path: {other}}}, candidates: {other / 'run.trec'}}}}}",
        "measures=[P@1]",
        "percent=true",
        "average=true",
        "paper={theirs: {P@1: 61}}",
    ]
    held_out, text = evaluate(tmp_path / "out", *overrides)
    folder = tmp_path / "out/eval"
    assert [found.folder for found in held_out] == [folder / "animals", folder / "beasts"]
    assert [list(found.runs) for found in held_out] == [["first stage", "good", "ours"]] * 2
    rows = {row["collection"]: row for row in rows_of(folder / "table.csv")}
    assert list(rows) == ["animals", "beasts", "average"]
    assert float(rows["animals"]["first stage"]) == pytest.approx(100 / 3)
    assert float(rows["beasts"]["first stage"]) == pytest.approx(100)
    assert float(rows["average"]["first stage"]) == pytest.approx(200 / 3)
    assert [float(rows[name]["good"]) for name in rows] == pytest.approx([100, 50, 75])
    assert (rows["animals"]["ours paper"], rows["animals"]["theirs paper"], rows["average"]["theirs paper"]) == (
        "50.0",
        "60.0",
        "61.0",
    )
    assert [rows[name]["queries"] for name in rows] == ["3", "2", ""]
    config = json.loads((folder / "beasts/ours/results.json").read_text())["config"]
    assert (config["name"], config["model"]["kind"], config["data"]["path"]) == ("ours", "random", str(other))
    assert "| collection | first stage | good | ours | ours (paper) | theirs (paper) | queries |" in text
    assert {row["good p"] for row in rows.values()} == {"1.0", ""}  # 0.5 and 1, times four tests


@pytest.mark.usefixtures("no_model")
def test_a_killed_evaluation_of_several_rows_continues(animals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed at the second list of the second row; then nothing is scored twice, and all is as if unbroken."""
    options = [*on(animals), "rows={a: {model: tiny}, b: {model: tiny}}", "batch_size=1", "deltas=false"]
    evaluate(tmp_path / "whole", *options)
    score, seen = ByLetter.score, []

    def killed(self: ByLetter, lists: list[CandidateList]) -> list[ListScores]:
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(self.name)
        return score(self, lists)

    monkeypatch.setattr(ByLetter, "score", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "killed", *options)
    assert seen == ["a", "a", "b"]
    monkeypatch.setattr(ByLetter, "score", lambda self, lists: seen.append(self.name) or score(self, lists))
    evaluate(tmp_path / "killed", *options)
    assert seen == ["a", "a", "b", "b"]
    for name in ("table.csv", "a/run.trec", "b/run.trec"):
        assert (tmp_path / "killed/eval" / name).read_bytes() == (tmp_path / "whole/eval" / name).read_bytes()


def test_the_average_interval_resamples_each_collection():
    values = [np.array([0.0, 1, 1, 0, 1]), np.array([1.0, 1, 0])]
    means = [bootstrap_means(v, samples=400, seed=3) for v in values]
    rng = np.random.default_rng(3)
    np.testing.assert_allclose(means[0], values[0][rng.integers(0, 5, size=(400, 5))].mean(axis=1))
    low, high = np.quantile(means[0], [0.025, 0.975])
    assert bootstrap_interval(values[0], samples=400, seed=3) == (low, high)


@pytest.mark.usefixtures("no_model")
def test_depths_give_points_of_quality_and_time(animals: Path, tmp_path: Path):
    """At depth 1 lists hold d1 alone, which q1 wants; at depth 2 d2 comes first, which q2 wants."""
    options = ["model=tiny", "depths=[1,2]", "recorded=[seconds,length]", "against=attention", "deltas=false"]
    held_out, text = evaluate(tmp_path / "out", *on(animals), *options)
    assert [found.folder.name for found in held_out] == ["N=1", "N=2"]
    rows = {row["collection"]: row for row in rows_of(tmp_path / "out/eval/table.csv")}
    assert float(rows["N=1 P@1"]["attention"]) == pytest.approx(1 / 3)
    assert float(rows["N=2 P@1"]["attention"]) == pytest.approx(1 / 3)
    assert float(rows["N=1 median seconds"]["attention"]) > 0
    assert rows["N=1 median seconds"]["first stage"] == ""
    assert (float(rows["N=1 length"]["attention"]), float(rows["N=1 length sd"]["attention"])) == (9.0, 0.0)
    assert (tmp_path / "out/eval/scaling.png").read_bytes().startswith(b"\x89PNG")
    assert "scaling.png" in text
    points = [scaling_points(found, "attention", "P@1", 100, 0) for found in held_out]
    assert [(point.depth, point.quality) for point in points] == [
        (1, pytest.approx(100 / 3)),
        (2, pytest.approx(100 / 3)),
    ]
    assert all(point.seconds is not None and point.seconds > 0 for point in points)
    assert scaling_points(held_out[0], "first stage", "P@1", 1, 0).seconds is None


def test_published_points_are_by_depth_and_row():
    papers = {10: {"a": {"MRR@10": 1.0, "seconds": 0.5}, "b": {"P@1": 3.0}}, 50: {"a": {"RR@10": 2.0}}, 99: {}}
    assert published_points(papers, "RR@10") == {"a": [Point(10, 1.0, None, 0.5), Point(50, 2.0)]}


@pytest.mark.usefixtures("no_model")
def test_deltas_are_sorted_and_carry_the_query(animals: Path, tmp_path: Path):
    """With d2 first instead of d1, q2 wins and q1 loses; q3 has no list."""
    evaluate(tmp_path / "out", *on(animals), "model=tiny", "measures=[P@1]")
    rows = rows_of(tmp_path / "out/eval/deltas.csv")
    assert [(row["query_id"], row["query"], float(row["difference"])) for row in rows] == [
        ("q2", "who barks", 1.0),
        ("q3", "who sings", 0.0),
        ("q1", "who purrs", -1.0),
    ]
    assert {(row["ranker"], row["measure"]) for row in rows} == {("attention", "P@1")}
    assert (tmp_path / "out/eval/deltas.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("no_model")
def test_strata_are_written_for_each_row(animals: Path, tmp_path: Path):
    evaluate(tmp_path / "out", *on(animals), "model=tiny", "strata=true", "deltas=false")
    rows = {row["stratum"]: row for row in rows_of(tmp_path / "out/eval/attention/strata.csv")}
    what = "first-stage rank of the first relevant"
    assert {name: (float(row["P@1"]), row["queries"]) for name, row in rows.items() if name.startswith(what)} == {
        f"{what}: <= 1": (0.0, "1"),
        f"{what}: > 1, <= 3": (1.0, "1"),
        f"{what}: not in the list": (0.0, "1"),
    }
    assert (float(rows["all queries"]["P@1"]), rows["all queries"]["queries"]) == (pytest.approx(1 / 3), "3")
    assert (tmp_path / "out/eval/first_stage/strata.html").is_file()


@given(
    st.dictionaries(st.text("abc", min_size=1), st.integers(-5, 5), min_size=1),
    st.lists(st.integers(-5, 5), min_size=1, max_size=4),
)
def test_strata_hold_each_query_once_and_by_its_value(values: dict[str, float], edges: list[float]):
    def holds(name: str, value: float) -> bool:
        return all(eval(f"{value} {part}", {}) for part in name.split(", "))

    for strata in (cut(values, edges), by_terciles(values)):
        assert sorted(query for queries in strata.values() for query in queries) == sorted(values)
        assert all(queries for queries in strata.values())
        assert all(holds(name, values[query]) for name, queries in strata.items() for query in queries)


def test_terciles_are_of_about_one_size():
    sizes = [len(queries) for queries in by_terciles({str(i): float(i) for i in range(90)}).values()]
    assert len(sizes) == 3
    assert all(28 <= size <= 32 for size in sizes)
    assert list(by_terciles({"a": 2.0, "b": 2.0})) == ["<= 2"]


def test_recorded_values_leave_out_what_was_not_read():
    records = {
        "a": QueryRecord(2, tokens=7, seconds=3.0, extra={"beams": 4.0}),
        "b": QueryRecord(1, tokens=9, seconds=1.0, extra={"beams": 1.0}),
        "c": QueryRecord(3, tokens=9, seconds=2.0),
        "run": QueryRecord(2),
        "empty": QueryRecord(0, tokens=1, seconds=9.0),
    }
    assert recorded_values(records, "seconds") == [3.0, 1.0, 2.0]
    assert recorded_numbers("seconds", [3.0, 1.0, 2.0]) == (2.0,)
    assert recorded_values(records, "beams") == [4.0, 1.0]
    assert recorded_numbers("beams", [4.0, 1.0]) == (2.5, pytest.approx(np.std([4, 1], ddof=1)))
    assert recorded_values(records, "nothing") == []
    assert recorded_numbers("nothing", []) == (None, None)
