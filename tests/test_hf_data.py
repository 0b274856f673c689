"""Hugging Face data sets in ICR form, from local files and folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_collections import ROWS, write_jsonl

from blockrank.data.collection import open_collection
from blockrank.errors import UserError
from blockrank.retrieval.first_stage import first_stage
from blockrank.types import Document, Query

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("form", ["parquet", "jsonl", "disk"])
def test_hugging_face_data_of_the_same_columns(tmp_path: Path, form: str) -> None:
    import datasets

    rows = [{**ROWS[0], "documents": [dict(d, doc_id=str(d["doc_id"])) for d in ROWS[0]["documents"]]}]
    data = datasets.Dataset.from_list(rows)
    path = tmp_path / f"dev.{form}"
    if form == "parquet":
        data.to_parquet(path)
    elif form == "jsonl":
        write_jsonl(path, rows)
    else:
        datasets.DatasetDict({"dev": data}).save_to_disk(path)
    collection = open_collection("hf", path=str(path))
    assert collection.splits == ("dev",)
    assert collection.queries("dev") == {"q1": Query("q1", "capital of france")}
    assert collection.qrels("dev") == {"q1": {"paris": 1}}
    assert collection.documents["5"] == Document("5", "Berlin is a city.", "")


def test_a_hugging_face_folder_of_shards(tmp_path: Path) -> None:
    """As a hub repository is laid out: the split's name and the shard's number in each file's name."""
    import datasets

    rows = [
        {"query": f"query {i}", "query_id": f"q{i}", "documents": [{"doc_id": f"d{i}", "text": "t"}]} for i in (0, 1)
    ]
    (tmp_path / "set" / "data").mkdir(parents=True)
    for i, row in enumerate(rows):
        data = datasets.Dataset.from_list([{**row, "answer_ids": [f"d{i}"]}])
        data.to_parquet(tmp_path / "set" / "data" / f"train-{i:05d}-of-00002.parquet")
    collection = open_collection("hf", path=str(tmp_path / "set"))
    assert collection.splits == ("train",)
    assert list(collection.queries("train")) == ["q0", "q1"]
    assert collection.qrels("train") == {"q0": {"d0": 1}, "q1": {"d1": 1}}
    assert first_stage(collection, "train") == {"q0": {"d0": 0.0}, "q1": {"d1": 0.0}}


def test_hugging_face_data_of_other_columns_are_refused(tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "dev.parquet"
    datasets.Dataset.from_list([{"text": "x"}]).to_parquet(path)
    with pytest.raises(UserError, match="no column query and no documents"):
        open_collection("hf", path=str(path))
