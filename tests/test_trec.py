"""Qrels and runs: every shape they come in, and one order that survives any reader."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockrank.data.trec import as_run, check_overlap, ranked, read_qrels, read_run, write_rankings, write_run
from blockrank.errors import UserError

TWO = {"q1": {"d1": 1}, "q2": {"d2": 0}}
SHAPES = {
    "4 columns, blanks": "q1 0 d1 1\nq2 0 d2 0\n",
    "4 columns, tabs": "q1\t0\td1\t1\nq2\t0\td2\t0\n",
    "3 columns, BEIR header": "query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t0\n",
    "3 columns, no header": "q1\td1\t1\nq2\td2\t0\n",
    "3 columns, blanks": "q1 d1 1\nq2 d2 0",
    "4 columns, header": "qid iter docno rel\nq1 0 d1 1\nq2 0 d2 0\n",
    "another header": "query-id\tdoc-id\trelevance\nq1\td1\t1\nq2\td2\t0\n",
    "BOM and CRLF": "\ufeffquery-id\tcorpus-id\tscore\r\nq1\td1\t1\r\nq2\td2\t0\r\n",
    "BOM without header": "\ufeffq1\td1\t1\r\nq2\td2\t0\r\n",
    "blank lines": "\nq1 0 d1 1\n\nq2 0 d2 0\n\n  \n",
    "grades as decimals": "q1 0 d1 1.0\nq2 0 d2 0.0\n",
    "tabs and a last blank": "q1\t0\td1\t1 \nq2\t0\td2\t0\n",
    "blanks and tabs after 4 columns": "q1 0 d1 1\nq2 0\td2\t0\n",
    "a judgement twice": "q1 0 d1 1\nq1 0 d1 1\nq2 0 d2 0\n",
}


def write(folder: Path, text: str, name: str = "file") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES.keys())
def test_qrels_of_every_shape_are_the_same(tmp_path: Path, text: str) -> None:
    assert read_qrels(write(tmp_path, text)) == TWO


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("q1 0 d1 1\nq2 0 d2 0\nq3 d3\n", 3, "expected 4 columns"),
        ("q1\td1\t1\nq2\t0\td2\t0\n", 2, "expected 3 columns"),
        ("q1 0 d1 1 extra\n", 1, "expected 3 or 4 columns"),
        ("q1 0 d1 high\n", 1, "a grade must be an integer, got 'high'"),
        ("q1 0 d1 1\nquery-id corpus-id x score\n", 2, "got 'score'"),
        ("q1 0 d1 0.5\n", 1, "got '0.5'"),
        ("q1 0 d1 nan\n", 1, "got 'nan'"),
        ("q1 0 d1 1\nq1 0 d2 1_0\n", 2, "got '1_0'"),
        ("q1 0 d1 １\n", 1, "got '１'"),
        ("q1 0 d1 ²\n", 1, "got '²'"),
        ("q1 0 d1 ٣\n", 1, "got '٣'"),
        ("q1 0 d1 -inf\n", 1, "got '-inf'"),
        ("q1 0 d1 Infinity\n", 1, "got 'Infinity'"),
        ("q1 0 d1 1e400\n", 1, "got '1e400'"),
        ("q1 0 d1 0x1\n", 1, "got '0x1'"),
        ("q1\t0\td1\t\u00a01\n", 1, "a grade must be an integer"),
        ("q1 0 d1 " + 5000 * "9" + "\n", 1, "a grade must be an integer"),
        ("q1 0 d1 1\nq1 0 d1 2\n", 2, "is judged 2, but 1 above"),
        ("q1 0 d1 1\nq1 0 d2 2147483648\n", 2, "grades go from -1000000 to 1000000"),
        ("q1 0 d1 -1000001\n", 1, "grades go from"),
        ("q1 0 d\0 1\n", 1, "holds NUL"),
        ("q1 0\td1\t1\n", 1, "3 columns by tabs but 4 by blanks"),
        ("q0\td1\tx\nq1\td1\t1\n", 1, "a grade must be an integer, got 'x'"),
        ("query\td1\tx\n", 1, "got 'x'"),
    ],
)
def test_a_bad_judgement_is_an_error_with_its_line(tmp_path: Path, text: str, line: int, hint: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=r"file:\d+: ") as caught:
        read_qrels(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert hint in str(caught.value)


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"q1 0 d1 1\nq2 0 caf\xe9 1\n")
    with pytest.raises(UserError, match=":2: not UTF-8"):
        read_qrels(path)


def test_an_absent_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_qrels(tmp_path / "none")
    with pytest.raises(UserError, match="is a folder"):
        read_run(tmp_path)


def test_ids_stay_exact_strings(tmp_path: Path) -> None:
    text = "007\td 1\t1\n7\t\u00a0é#%\t2\n1.0\t日本\u2028x\t0\n"
    assert read_qrels(write(tmp_path, text)) == {"007": {"d 1": 1}, "7": {"\u00a0é#%": 2}, "1.0": {"日本\u2028x": 0}}


def test_a_header_settles_the_columns_of_ids_with_blanks(tmp_path: Path) -> None:
    assert read_qrels(write(tmp_path, "query-id\tcorpus-id\tscore\nq 1\td1\t1\n")) == {"q 1": {"d1": 1}}


@pytest.mark.parametrize("damage", ["text", "cut", "head", "checksum"])
def test_a_damaged_gz_file_is_named(tmp_path: Path, damage: str) -> None:
    packed = gzip.compress(b"".join(b"q%d 0 d%d 1\n" % (i, i * i) for i in range(500)), mtime=0)
    damaged = {
        "text": b"q1 0 d1 1\n",
        "cut": packed[:-20],
        "head": packed[:10] + b"\xff" + packed[11:],
        "checksum": packed[:-8] + b"\0\0\0\0" + packed[-4:],
    }
    path = tmp_path / "q.gz"
    path.write_bytes(damaged[damage])
    with pytest.raises(UserError, match=r"q\.gz: not a whole gzip file"):
        read_qrels(path)


@pytest.mark.parametrize("name", ["\ud800", "a\0b"])
def test_ids_that_no_file_can_hold_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run"
    for run, tag in (({name: {"d": 1.0}}, "t"), ({"q": {name: 1.0}}, "t"), ({"q": {"d": 1.0}}, name)):
        with pytest.raises(UserError, match="NUL or a lone surrogate"):
            write_run(path, run, tag)
    assert not path.exists()
    with pytest.raises(UserError, match="NUL or a lone surrogate"):
        write_rankings(path, [("q", {name: 1.0})], "t")
    with pytest.raises(UserError, match=r"query 'q': expected a dict by id, got list"):
        write_run(path, {"q": ["a"]}, "t")  # pyright: ignore[reportArgumentType]


def test_runs_of_six_and_three_columns(tmp_path: Path) -> None:
    six = write(tmp_path, "q1 Q0 b 1 2.5 t\nq1 Q0 a 2 -1e-3 t\nq2\tQ0\ta\t1\t7\tt\n", "six")
    assert read_run(six) == {"q1": {"b": 2.5, "a": -0.001}, "q2": {"a": 7.0}}
    three = write(tmp_path, "q1\tb\t1\nq1\ta\t2\nq2\ta\t1\n", "three")
    assert read_run(three) == {"q1": {"b": -1.0, "a": -2.0}, "q2": {"a": -1.0}}
    assert list(read_run(three)["q1"]) == ["b", "a"]


def test_numbers_in_every_ascii_notation(tmp_path: Path) -> None:
    run = write(tmp_path, "q Q0 a 1 +1.5 t\nq Q0 b 2 .5 t\nq Q0 c 3 5. t\nq Q0 d 4 -2E-05 t\nq Q0 e 007 0 t\n", "run")
    assert read_run(run)["q"] == {"a": 1.5, "b": 0.5, "c": 5.0, "d": -2e-5, "e": 0.0}
    qrels = write(tmp_path, "q 0 a -1\nq 0 b +2\nq 0 c 1e0\nq 0 d 03\n", "qrels")
    assert read_qrels(qrels)["q"] == {"a": -1, "b": 2, "c": 1, "d": 3}


def test_depth_keeps_the_best_whatever_the_order_of_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "q Q0 low 3 1 t\nq Q0 high 1 3 t\nq Q0 mid 2 2 t\n")
    assert list(read_run(path, depth=2)["q"].items()) == [("high", 3.0), ("mid", 2.0)]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("q Q0 a 1 1.0 t\nq Q0 a 2 0.5 t\n", ":2: document 'a' is listed twice for query 'q'"),
        ("q Q0 a 1 nan t\n", ":1: a score must be a finite number"),
        ("q Q0 a 1 inf t\n", ":1: a score must be a finite number"),
        ("q Q0 a 1 1.0 t\nq Q0 b 2\n", ":2: expected 6 columns"),
        ("q\ta\t0.5\n", ":1: a rank must be a whole number"),
        ("q\ta\t+1\n", ":1: a rank must be a whole number"),
        ("q\ta\t²\n", ":1: a rank must be a whole number"),
        ("q\ta\t" + 5000 * "1" + "\n", ":1: a rank must be a whole number"),
        *(
            (f"q Q0 a 1 1.0 t\nq Q0 b 2 {score} t\n", ":2: a score must be a finite number")
            for score in ("1_0", "１.5", "٣", "-inf", "NaN", "1e999", "0x1p3", "1,5", "1e", ".", "--1")
        ),
    ],
)
def test_a_bad_run_line_is_an_error_with_its_line(tmp_path: Path, text: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        read_run(write(tmp_path, text))
    assert hint in str(caught.value)


def test_ties_are_broken_as_trec_eval_does_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert write_run(path, {"q1": {"a": 1.0, "b": 1.0, "c": 2.0}}, "tag") == 1
    lines = [line.split() for line in path.read_text().splitlines()]
    assert [line[2] for line in lines] == ["c", "b", "a"]
    assert [line[3] for line in lines] == ["1", "2", "3"]
    scores = [float(line[4]) for line in lines]
    assert scores[0] == 2.0
    assert scores[1] == 1.0
    assert 0.999999 < scores[2] < 1.0
    assert write_run(path, {"q1": {"a": 1.0, "b": 1.0}}, "tag", ties="input") == 1
    assert list(read_run(path)["q1"]) == ["a", "b"]


def test_a_written_run_keeps_its_order_in_ir_measures(tmp_path: Path) -> None:
    import ir_measures
    from ir_measures import RR

    path = tmp_path / "run"
    run = {"q": {f"d{i:03}": 0.0 for i in range(100)}}
    assert write_run(path, run, "t", ties="input") == 99
    for measure in (RR, RR @ 10):
        value = ir_measures.calc_aggregate(
            [measure], {"q": {"d000": 1, "d099": 0}}, ir_measures.read_trec_run(str(path))
        )
        assert value[measure] == 1.0


@pytest.mark.parametrize("score", [math.nan, math.inf, 1e300])
def test_an_unwritable_score_names_query_and_document_and_leaves_no_file(tmp_path: Path, score: float) -> None:
    with pytest.raises(UserError, match="query 'q', document 'd'"):
        write_run(tmp_path / "run", {"q": {"d": score}}, "t")
    assert list(tmp_path.iterdir()) == []


def test_an_id_with_a_line_end_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds a tab or a line end"):
        write_run(tmp_path / "run", {"q": {"d\n1": 1.0}}, "t")
    assert list(tmp_path.iterdir()) == []


ids = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=6).filter(
    lambda i: i.strip(" ") == i
)


@settings(deadline=None)
@given(
    st.dictionaries(
        ids, st.dictionaries(ids, st.floats(-1e30, 1e30) | st.sampled_from([0.0, 1.0]), min_size=1), min_size=1
    )
)
def test_a_run_reads_back_in_the_order_it_was_written(tmp_path_factory: pytest.TempPathFactory, run: dict) -> None:
    path = tmp_path_factory.mktemp("runs") / "run"
    ties = write_run(path, run, "t", ties="input")
    back = read_run(path)
    assert {q: list(r) for q, r in back.items()} == {q: [d for d, _ in ranked(r)] for q, r in run.items()}
    assert ties == sum(len(r) - len(set(r.values())) for r in run.values())
    for query, ranking in back.items():
        scores = np.array(list(ranking.values()), np.float32)
        assert (np.diff(scores) < 0).all()
        np.testing.assert_allclose(scores, [s for _, s in ranked(run[query])], rtol=1e-5, atol=1e-28)


def test_ids_and_scores_of_any_number_type_meet_at_one_boundary() -> None:
    assert as_run({1: {10: np.float32(0.5)}}) == {"1": {"10": 0.5}}
    for wrong in ("1_0", b"1", None, [1.0, 2.0]):
        with pytest.raises(UserError, match=r"run, query 'q', document 'd': the score .* is not a number"):
            as_run({"q": {"d": wrong}})


def test_disjoint_ids_show_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match=r"run has '10\.X'.*qrels has '10', '11'"):
        check_overlap(["10.X"], ["10", "11"], "run", "qrels", "document")
    check_overlap([], ["10"], "run", "qrels", "document")
    check_overlap(["1", "2", "3"], ["1", "9"], "run", "qrels", "query")
    assert "2 of 3 query ids of run are not in qrels: '2', '3'" in caplog.text
    assert "1 of 2 query ids of qrels are not in run: '9'" in caplog.text


def test_a_real_run_and_its_judgements(shared_data: Path) -> None:
    qrels = read_qrels(shared_data / "trec-dl19" / "qrels" / "test.tsv")
    run = read_run(shared_data / "trec-dl19" / "runs" / "bm25.dl19.trec")
    assert len(qrels) == 43
    assert sum(map(len, qrels.values())) == 9260
    assert sum(map(len, run.values())) == 4300
    assert next(iter(run["264014"].items())) == ("5611210", 15.780599594116211)
