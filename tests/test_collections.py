"""Every kind of collection gives the same objects, from files as people have them."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from blockrank.data.collection import HasCandidates, open_collection
from blockrank.data.documents import InMemoryDocuments, JsonlDocuments
from blockrank.data.files import cache_lock
from blockrank.errors import UserError
from blockrank.types import Document, Query

pytestmark = pytest.mark.usefixtures("cache")


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def beir_folder(folder: Path) -> Path:
    write_jsonl(
        folder / "corpus.jsonl",
        [
            {"_id": "d1", "title": "Title", "text": "one"},
            {"_id": 2, "title": None, "text": "two"},
            {"_id": "002", "text": "three"},
            {"_id": "日 本", "title": "  ", "text": None},
        ],
    )
    write_jsonl(folder / "queries.jsonl", [{"_id": "q1", "text": "first"}, {"_id": 7, "text": "second"}])
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\n")
    (folder / "qrels" / "train.tsv").write_text("7\t2\t1\n")
    return folder


ROWS = [
    {
        "query": "capital of france",
        "query_id": "q1",
        "documents": [
            {"doc_id": "paris", "title": "Paris", "text": "Paris is a city."},
            {"doc_id": 5, "title": None, "text": "Berlin is a city."},
        ],
        "answer_ids": ["paris"],
    },
    {"query": "q", "query_id": 2, "documents": [{"doc_id": "paris", "title": "Paris", "text": "Paris is a city."}]},
]


def test_beir_folder(tmp_path: Path) -> None:
    collection = open_collection("beir", path=str(beir_folder(tmp_path / "set")))
    assert collection.name == "set"
    assert collection.splits == ("test", "train")
    assert collection.queries("test") == {"q1": Query("q1", "first")}
    assert collection.queries("train") == {"7": Query("7", "second")}
    assert collection.qrels("test") == {"q1": {"d1": 2}}
    assert list(collection.documents) == ["d1", "2", "002", "日 本"]
    assert collection.documents["d1"] == Document("d1", "one", "Title")
    assert collection.documents["2"] == Document("2", "two", "")
    assert collection.documents["002"].text == "three"
    assert collection.documents["日 本"].is_empty
    assert "02" not in collection.documents
    assert not collection.ignore_self
    with pytest.raises(UserError, match="no split 'dev'; it has test, train"):
        collection.queries("dev")


def test_judgements_of_a_beir_folder_may_be_packed(tmp_path: Path) -> None:
    folder = beir_folder(tmp_path / "set")
    (folder / "qrels" / "dev.tsv.gz").write_bytes(gzip.compress(b"7\td1\t1\n"))
    (folder / "qrels" / "test.tsv.gz").write_bytes(gzip.compress(b"7\td1\t1\n"))
    collection = open_collection("beir", path=folder)
    assert collection.splits == ("dev", "test", "train")
    assert collection.qrels("dev") == {"7": {"d1": 1}}
    assert collection.qrels("test") == {"q1": {"d1": 2}}


def test_a_collection_open_at_exit_says_nothing(tmp_path: Path) -> None:
    code = "import os, sys; from blockrank.data.beir import BeirCollection as B; os.kept = B(sys.argv[1]).documents"
    arguments = [sys.executable, "-W", "error", "-c", code, str(beir_folder(tmp_path / "set"))]
    assert subprocess.run(arguments, capture_output=True, text=True, check=True).stderr == ""


def test_a_text_may_hold_a_lone_surrogate(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"_id": "a", "text": "x\\ud800"}\n')
    assert JsonlDocuments(path)["a"].text == "x\ud800"


def test_a_beir_folder_without_judgements_is_one_unjudged_split(tmp_path: Path) -> None:
    folder = beir_folder(tmp_path / "set")
    for path in (folder / "qrels").iterdir():
        path.unlink()
    collection = open_collection("beir", path=folder)
    assert collection.splits == ("all",)
    assert list(collection.queries("all")) == ["q1", "7"]
    assert collection.qrels("all") == {"q1": {}, "7": {}}


@pytest.mark.parametrize(("name", "expected"), [("arguana", True), ("Quora", True), ("scifact", False)])
def test_only_arguana_and_quora_ignore_self(tmp_path: Path, name: str, expected: bool) -> None:
    folder = beir_folder(tmp_path / name)
    assert open_collection("beir", path=folder).ignore_self is expected
    assert open_collection("beir", path=folder, ignore_self=False).ignore_self is False


@pytest.mark.parametrize("title", [None, "", "  ", "absent"], ids=["null", "empty", "blank", "missing"])
def test_all_kinds_of_no_title_are_equal(tmp_path: Path, title: str | None) -> None:
    row = {"_id": "d", "title": title, "text": "text"}
    if title == "absent":
        del row["title"]
    assert JsonlDocuments(write_jsonl(tmp_path / "c.jsonl", [row]))["d"] == Document("d", "text", "")


def test_bom_crlf_blank_lines_and_a_last_line_without_end(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"_id": "a", "text": "one"}\r\n\r\n{"_id": "b", "text": "two"}\r\n{"_id": "c"}')
    documents = JsonlDocuments(path)
    assert len(documents) == 3
    assert [documents[i].text for i in "abc"] == ["one", "two", ""]
    assert [d.id for d in documents.scan()] == ["a", "b", "c"]
    assert sorted(documents.pick(i).id for i in range(3)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ('{"_id": "b"', "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"id": "b"}', 'no "_id" (has: id)'),
        ('{"_id": null}', "an id must be a non-empty string or a number"),
        ('{"_id": true}', "an id must be a non-empty string or a number"),
        ('{"_id": "b", "text": ["x"]}', "text: expected a string"),
        ('{"_id": "a\\u0000b"}', "holds NUL or a lone surrogate"),
        ('{"_id": "\\ud800"}', "holds NUL or a lone surrogate"),
        (f'{{"_id": {5000 * "1"}}}', "JSON that cannot be read"),
        (100_000 * "[", "JSON that cannot be read"),
        ('{"_id": "a", "text": "again"}', "document id 'a' already occurs on line 1"),
    ],
)
def test_a_broken_corpus_line_is_an_error_with_its_place(tmp_path: Path, line: str, hint: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"_id": "a", "text": "one"}\n\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        JsonlDocuments(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert hint in str(caught.value)


def test_long_lines_and_ids_with_equal_prefixes(tmp_path: Path) -> None:
    rows = [{"_id": f"doc{i}", "text": "é" * (i * 997)} for i in range(20)]
    documents = JsonlDocuments(write_jsonl(tmp_path / "c.jsonl", rows))
    assert all(documents[row["_id"]].text == row["text"] for row in rows)


def test_the_index_follows_the_file_and_survives_damage(tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"_id": "a", "text": "one"}])
    assert JsonlDocuments(path)["a"].text == "one"
    write_jsonl(path, [{"_id": "b", "text": "two"}, {"_id": "a", "text": "new"}])
    assert JsonlDocuments(path)["a"].text == "new"
    (index,) = (cache / "documents").glob("*.npy")
    index.write_bytes(index.read_bytes()[:-8])
    assert JsonlDocuments(path)["b"].text == "two"


def test_a_read_only_collection_is_not_written_to(tmp_path: Path) -> None:
    folder = beir_folder(tmp_path / "set")
    before = sorted(p.name for p in folder.rglob("*"))
    _ = open_collection("beir", path=folder).documents["d1"]
    assert sorted(p.name for p in folder.rglob("*")) == before


def test_an_unwritable_cache_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BLOCKRANK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="set BLOCKRANK_CACHE"):
        JsonlDocuments(write_jsonl(tmp_path / "c.jsonl", [{"_id": "a"}]))


def test_documents_can_be_read_from_threads_and_other_processes(tmp_path: Path) -> None:
    rows = [{"_id": f"d{i}", "text": str(i) * 50} for i in range(300)]
    documents = JsonlDocuments(write_jsonl(tmp_path / "c.jsonl", rows))
    wrong: list[str] = []

    def read() -> None:
        wrong.extend(row["_id"] for row in rows if documents[row["_id"]].text != row["text"])

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pickle.loads(pickle.dumps(documents))["d7"].text == "7" * 50


def test_missing_ids(tmp_path: Path) -> None:
    documents = JsonlDocuments(write_jsonl(tmp_path / "c.jsonl", [{"_id": "a"}, {"_id": "b"}]))
    for store in (documents, InMemoryDocuments([Document("a", ""), Document("b", "")])):
        assert store.missing(["x", "a", "y", "x", "b"]) == ["x", "y"]
    assert JsonlDocuments(write_jsonl(tmp_path / "e.jsonl", [])).missing(["x"]) == ["x"]


def _many(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for i in range(count):
            file.write(f'{{"_id": "{i}", "title": "", "text": "passage number {i} {"word " * 60}"}}\n')
    return path


_MEASURE = """
import resource, sys
from pathlib import Path
from blockrank.data.documents import JsonlDocuments
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path, count = sys.argv[1], int(sys.argv[2])
before = peak()
documents = JsonlDocuments(path)
assert len(documents) == count
for i in range(0, count, max(count // 5000, 1)):
    assert documents[str(i)].text.startswith(f"passage number {i} ")
assert str(count) not in documents
assert documents.missing(map(str, range(count - 10, count + 2))) == [str(count), str(count + 1)]
print((peak() - before) * 1024 / count)
"""


def _bytes_per_document(path: Path, count: int) -> float:
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path), str(count)], capture_output=True, text=True, check=True
    )
    return float(result.stdout)


def test_memory_per_document_stays_far_below_its_text(tmp_path: Path) -> None:
    path = _many(tmp_path / "c.jsonl", 50_000)
    assert path.stat().st_size / 50_000 > 300
    assert _bytes_per_document(path, 50_000) < 200


@pytest.mark.slow
def test_a_million_passages_take_a_known_amount_of_memory(tmp_path: Path) -> None:
    """8.8 million passages (MS MARCO) may take 2 GB: 227 bytes each."""
    path = _many(tmp_path / "c.jsonl", 1_000_000)
    assert _bytes_per_document(path, 1_000_000) < 100


def test_icr_jsonl_with_global_ids(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "lists.jsonl", ROWS)
    collection = open_collection("icr", path=path, split="dev")
    assert collection.splits == ("dev",)
    assert isinstance(collection, HasCandidates)
    assert collection.queries("dev") == {"q1": Query("q1", "capital of france"), "2": Query("2", "q")}
    assert collection.qrels("dev") == {"q1": {"paris": 1}, "2": {}}
    assert {q: list(r) for q, r in collection.candidates("dev").items()} == {"q1": ["paris", "5"], "2": ["paris"]}
    assert {q: list(r) for q, r in collection.candidates("dev", 1).items()} == {"q1": ["paris"], "2": ["paris"]}
    assert dict(collection.documents) == {
        "paris": Document("paris", "Paris is a city.", "Paris"),
        "5": Document("5", "Berlin is a city.", ""),
    }
    assert sorted(collection.documents.pick(i).id for i in range(2)) == ["5", "paris"]


def test_icr_ids_that_are_local_to_a_row_are_qualified(tmp_path: Path) -> None:
    rows = [
        {"query": "a", "query_id": "q1", "documents": ["x", "y"], "answer_ids": [1]},
        {"query": "b", "documents": [{"doc_id": "0", "text": "z"}, {"text": "w"}], "answer_ids": "0"},
        {"query": "c", "query_id": "q3", "documents": {"7": "v"}, "answer_ids": []},
    ]
    collection = open_collection("icr", path=write_jsonl(tmp_path / "test.jsonl", rows))
    assert collection.splits == ("test",)
    assert list(collection.queries("test")) == ["q1", "1", "q3"]
    assert collection.qrels("test") == {"q1": {"q1/1": 1}, "1": {"1/0": 1}, "q3": {}}
    assert {i: d.text for i, d in collection.documents.items()} == {
        "q1/0": "x",
        "q1/1": "y",
        "1/0": "z",
        "1/1": "w",
        "q3/7": "v",
    }


def test_icr_folder_and_graded_judgements(tmp_path: Path) -> None:
    folder = tmp_path / "lists"
    write_jsonl(folder / "train.jsonl", ROWS[:1])
    write_jsonl(folder / "test.jsonl", ROWS)
    qrels = tmp_path / "qrels.tsv"
    qrels.write_text("q1\tparis\t3\nq1\t5\t1\nother\t5\t1\n")
    collection = open_collection("icr", path=folder, qrels=qrels)
    assert collection.splits == ("test", "train")
    assert collection.qrels("test") == {"q1": {"paris": 3, "5": 1}}
    assert len(collection.documents) == 2


def test_packed_icr_rows_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "lists" / "train.jsonl", ROWS)
    packed = tmp_path / "lists" / "test.jsonl.gz"
    packed.write_bytes(gzip.compress(b"{}"))
    for path in (packed, packed.parent):
        with pytest.raises(UserError, match=r"test\.jsonl\.gz: .*unpack the file first"):
            open_collection("icr", path=path)


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"query": "q", "query_id": "a\0", "documents": []}, "query_id: 'a\\x00' holds NUL"),
        ({"query": "q", "documents": ["a"], "answer_ids": ["\0"]}, "answer_ids: '\\x00' holds NUL"),
        ({"documents": []}, 'no "query"'),
        ({"query": "q"}, 'no "documents"'),
        ({"query": "q", "documents": "text"}, "documents must be a list, got str"),
        ({"query": "q", "documents": [3]}, "documents[0]: expected a string, got 3"),
        ({"query": "q", "documents": ["a"], "answer_ids": [None]}, "answer_ids: an id must be"),
        (
            {"query": "q", "documents": [{"doc_id": "a", "text": "x"}, {"doc_id": "a", "text": "y"}]},
            "doc_id 'a' stands for two different texts",
        ),
        (ROWS[0], "query id 'q1' already occurs at"),
    ],
)
def test_a_broken_icr_row_is_an_error_with_its_line(tmp_path: Path, row: dict, hint: str) -> None:
    path = write_jsonl(tmp_path / "lists.jsonl", [ROWS[0], row])
    with pytest.raises(UserError) as caught:
        open_collection("icr", path=path).queries("lists")
    assert str(caught.value).startswith(f"{path}:2: ")
    assert hint in str(caught.value)


@pytest.mark.parametrize("form", ["memory", "jsonl"])
def test_missing_documents_are_told_once_however_many_ids_are_asked(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockrank.data.documents._IDS_AT_ONCE", 3)
    rows = [Document(f"d{i}", "text") for i in range(4)]
    path = write_jsonl(tmp_path / "corpus.jsonl", [{"_id": d.id, "text": d.text} for d in rows])
    documents = JsonlDocuments(path) if form == "jsonl" else InMemoryDocuments(rows)
    asked = ["d9", "d0", "d8", "d0", "d9", "d1", "d3", "d7", "d8", "d2", "d10"]
    assert documents.missing(iter(asked)) == ["d9", "d8", "d7", "d10"]
    assert documents.missing(asked[:0]) == []


def _count_while_locked(folder: str, rounds: int) -> None:
    counter = Path(folder) / "counter"
    for _ in range(rounds):
        with cache_lock("counter"):
            counter.write_text(str(int(counter.read_text()) + 1))


def test_the_lock_lets_one_process_in_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "counter").write_text("0")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_count_while_locked, args=(str(tmp_path), 50)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert (tmp_path / "counter").read_text() == "100"


def test_open_collection_names_the_wrong_key() -> None:
    with pytest.raises(UserError, match=r"data\.kind: 'trec' is none of beir, hf, icr, ir_datasets, pydocs"):
        open_collection("trec")
    with pytest.raises(UserError, match=r"unknown config key data\.folder"):
        open_collection("beir", folder="x")
    with pytest.raises(UserError, match=r"missing config key data\.path"):
        open_collection("beir")
    with pytest.raises(UserError, match="BEIR collections are folders"):
        open_collection("beir", path="/no/such/folder")


@pytest.mark.parametrize(
    ("name", "split", "documents", "queries", "judged_without_text"),
    [
        ("trec-dl19", "test", 11_843, 43, 5_156),
        ("cranfield", "test", 1_400, 225, 0),
        ("squad11", "test", 20_958, 10_570, 0),
    ],
)
def test_real_collections(
    shared_data: Path, name: str, split: str, documents: int, queries: int, judged_without_text: int
) -> None:
    collection = open_collection("beir", path=shared_data / name)
    assert len(collection.documents) == documents
    assert len(collection.queries(split)) == queries
    judged = [d for grades in collection.qrels(split).values() for d in grades]
    assert len(collection.documents.missing(judged)) == judged_without_text
