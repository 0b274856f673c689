"""Collections of `ir_datasets`, from small ones registered as a user's own would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blockrank.data.collection import open_collection
from blockrank.errors import UserError
from blockrank.types import Document, Query

pytestmark = pytest.mark.usefixtures("cache")


def ir_dataset(folder: Path, name: str, docs_url: str | None = None) -> str:
    """Registers a small collection with ir_datasets itself, as a user's own corpus would be."""
    import ir_datasets
    from ir_datasets.formats import TrecQrels, TrecScoredDocs, TsvDocs, TsvQueries
    from ir_datasets.util import Cache, LocalDownload, RequestsDownload

    folder.mkdir(exist_ok=True)
    (folder / "docs.tsv").write_text("d1\tone\nd2\ttwo\n003\tthree\n")
    (folder / "queries.tsv").write_text("q1\tfirst\nq2\tsecond\n")
    (folder / "qrels").write_text("q1 0 d1 2\nq2 0 d2 0\n")
    (folder / "scored").write_text("q1 Q0 003 1 0 t\nq1 Q0 d1 2 0 t\n")
    if docs_url is None:
        source: Any = LocalDownload(folder / "docs.tsv")
    else:
        source = Cache(RequestsDownload(docs_url, tries=1), folder / "absent.tsv")
    docs = TsvDocs(source)
    ir_datasets.registry.register(name, ir_datasets.Dataset(docs))
    split = ir_datasets.Dataset(
        docs,
        TsvQueries(LocalDownload(folder / "queries.tsv")),
        TrecQrels(LocalDownload(folder / "qrels"), {}),
        TrecScoredDocs(LocalDownload(folder / "scored")),
    )
    ir_datasets.registry.register(f"{name}/dev", split)
    return name


def test_ir_datasets_collection(tmp_path: Path) -> None:
    collection = open_collection("ir_datasets", id=ir_dataset(tmp_path / "data", "own-corpus"))
    assert collection.splits == ("dev",)
    assert collection.queries("dev") == {"q1": Query("q1", "first"), "q2": Query("q2", "second")}
    assert collection.qrels("dev") == {"q1": {"d1": 2}, "q2": {"d2": 0}}
    assert collection.documents["003"] == Document("003", "three", "")
    assert len(collection.documents) == 3
    assert list(collection.documents) == ["d1", "d2", "003"]
    assert collection.documents.pick(1).id == "d2"
    assert collection.documents.missing(["d1", "d9"]) == ["d9"]
    nested = open_collection("ir_datasets", id="own-corpus/dev")
    assert nested.splits == ("default",)
    assert nested.qrels("default") == collection.qrels("dev")


@pytest.mark.parametrize(("line", "hint"), [("q1 0 d\0 1", "holds NUL"), ("q1 0 d1 2147483648", "grades go from")])
def test_ir_datasets_judgements_that_trec_eval_cannot_read(tmp_path: Path, line: str, hint: str) -> None:
    name = ir_dataset(tmp_path / "data", f"odd-{hint[:3]}")
    (tmp_path / "data" / "qrels").write_text(line + "\n")
    with pytest.raises(UserError, match=rf"^{name} \(dev\), judgement of 'q1', .*{hint}"):
        open_collection("ir_datasets", id=name).qrels("dev")


def test_an_unknown_ir_datasets_id_shows_known_ones() -> None:
    with pytest.raises(UserError, match=r"'msmarco-passage/nope' is no ir_datasets id; known there: msmarco-passage"):
        open_collection("ir_datasets", id="msmarco-passage/nope")


def test_without_a_network_the_error_says_what_is_missing_and_where_it_belongs(tmp_path: Path) -> None:
    from blockrank.data.irds import prefetch

    name = ir_dataset(tmp_path / "data", "offline-corpus", docs_url="http://127.0.0.1:9/docs.tsv")
    documents = open_collection("ir_datasets", id=name).documents
    for attempt in (
        lambda: prefetch(name),
        lambda: documents["d1"],
        lambda: documents.pick(0),
        lambda: list(documents),
    ):
        with pytest.raises(UserError) as caught:
            attempt()
        message = str(caught.value)
        assert "cannot read offline-corpus" in message
        assert "IR_DATASETS_HOME" in message
        assert "prefetch=true" in message
