"""`python -m blockrank.store` on a small folder, and the errors a user can cause."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from test_eval import collection as collection
from test_eval import evaluate

from blockrank.config import build, compose
from blockrank.errors import UserError
from blockrank.rankers.document_store import StoreReport
from blockrank.store import StoreConfig, store_documents
from blockrank.training import initial


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The tokenizer is read once, which takes longer than the tests."""
    del cache
    monkeypatch.setattr(initial, "load_tokenizer", tokenizer_of)


tokenizer_of = functools.cache(initial.load_tokenizer)


def make(folder: Path, store: Path, *overrides: str, model: str = "model=tiny") -> StoreReport:
    data = ("data=beir_folder", f"data.path={folder}")
    given = [*data, f"store={store}", model, "kept.dtype=float32", *overrides]
    return store_documents(build(StoreConfig, compose("store", given)))


def test_the_whole_collection_or_what_lists_hold(collection: Path, tmp_path: Path) -> None:
    listed = ("documents=lists", f"candidates={collection / 'run.trec'}", "prompt=brief_cacheable")
    report = make(collection, tmp_path / "all", "prompt=brief_cacheable")
    assert (report.documents, report.token_bytes) == (4, (2 * 2 + 1) * 2 * 8 * 4)
    assert make(collection, tmp_path / "lists", *listed).documents == 3
    keys = [set(json.loads((tmp_path / name / "00000.json").read_text())["keys"]) for name in ("all", "lists")]
    assert keys[1] < keys[0]


def scores(row: Path) -> dict[tuple[str, str], float]:
    lines = [line.split() for line in (row / "run.trec").read_text().splitlines()]
    return {(fields[0], fields[2]): float(fields[4]) for fields in lines}


def test_an_evaluation_with_a_store_is_the_one_without(collection: Path, tmp_path: Path) -> None:
    """Two lists of the run's three documents, of which the store has two."""
    two = collection / "two.trec"
    two.write_text(
        "".join(line for line in (collection / "run.trec").read_text().splitlines(True) if " d3 " not in line)
    )
    make(collection, tmp_path / "store", "prompt=brief_cacheable", "documents=lists", f"candidates={two}")
    out = tmp_path / "out"
    evaluate(collection, out, "prompt=brief_cacheable", "baseline=false")
    options = ("prompt=brief_cacheable", "baseline=false", "name=stored", f"document_store={tmp_path / 'store'}")
    evaluate(collection, out, *options)
    found, expected = scores(out / "eval/stored"), scores(out / "eval/attention")
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx([expected[key] for key in found], abs=1e-5)
    records = [json.loads(line) for line in (out / "eval/stored/per_query.jsonl").read_text().splitlines()]
    counts = {"documents_stored": 2.0, "documents_computed": 1.0}
    assert [record["extra"] for record in records if record.get("extra")] == [counts] * 2
    with pytest.raises(UserError, match="document_store: ranker=generative"):
        evaluate(collection, out, "ranker=generative", f"document_store={tmp_path / 'store'}")


def test_what_a_user_can_get_wrong_is_told(collection: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="numbering=content"):
        make(collection, tmp_path / "store", "prompt=paper")
    with pytest.raises(UserError, match=r"kept\.dtype"):
        make(collection, tmp_path / "store", "prompt=brief_cacheable", "kept.dtype=int4")
    with pytest.raises(UserError, match=r"kept\.shard_documents: 0 must be at least 1"):
        make(collection, tmp_path / "store", "prompt=brief_cacheable", "kept.shard_documents=0")
    with pytest.raises(UserError, match="part=4/4"):
        make(collection, tmp_path / "store", "prompt=brief_cacheable", "part=4/4")
    with pytest.raises(UserError, match="give checkpoint"):
        make(collection, tmp_path / "store", model="seed=1")
    with pytest.raises(UserError, match="Give store="):
        make(collection, tmp_path / "store", "store=null")
    assert not (tmp_path / "store").exists()
