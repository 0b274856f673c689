"""BM25 against its formula, and where there is nothing to find."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from blockrank.data.collection import open_collection
from blockrank.data.documents import InMemoryDocuments
from blockrank.data.trec import read_qrels
from blockrank.errors import UserError
from blockrank.retrieval.bm25 import BM25Index
from blockrank.types import Document, Query

DOCUMENTS = [
    Document("a", "red apple pie recipe"),
    Document("b", "apple apple orchard"),
    Document("c", "blue sky", title="weather"),
    Document("d", ""),
]


def search(text: str, k: int = 10, documents: list[Document] = DOCUMENTS) -> dict[str, float]:
    return BM25Index.build(InMemoryDocuments(documents)).search({"q": Query("q", text)}, k)["q"]


def test_scores_are_those_of_the_formula() -> None:
    k1, b = 0.9, 0.4
    mean_length = (4 + 3 + 3 + 0) / 4
    idf = math.log(1 + (4 - 2 + 0.5) / (2 + 0.5))

    def score(frequency: int, length: int) -> float:
        return idf * frequency / (frequency + k1 * (1 - b + b * length / mean_length))

    found = search("Apple")
    assert list(found) == ["b", "a"]
    assert found == pytest.approx({"b": score(2, 3), "a": score(1, 4)}, rel=1e-5)


def test_titles_count_and_stop_words_do_not() -> None:
    assert list(search("the weather of it")) == ["c"]
    assert search("the of it") == {}


def test_no_shared_word_gives_an_empty_list() -> None:
    assert search("zebra") == {}
    assert search("") == {}


def test_k_cuts_and_may_exceed_the_corpus() -> None:
    assert list(search("apple", k=1)) == ["b"]
    assert list(search("apple", k=1000)) == ["b", "a"]
    with pytest.raises(UserError, match="k must be at least 1"):
        search("apple", k=0)


def test_ties_go_by_document_id_last_first() -> None:
    twins = [Document(i, "same words here") for i in ("1", "3", "2")]
    assert list(search("words", documents=twins)) == ["3", "2", "1"]


def test_corpora_without_words_or_documents() -> None:
    assert search("apple", documents=[Document("a", ""), Document("b", " ")]) == {}
    with pytest.raises(UserError, match="at least one document"):
        BM25Index.build([])


def test_every_query_has_an_entry_whatever_the_batch() -> None:
    index = BM25Index.build(DOCUMENTS)
    queries = [Query(f"q{i}", "apple" if i % 2 else "zebra") for i in range(600)]
    run = index.search(queries, 2)
    assert list(run) == [q.id for q in queries]
    assert all(list(run[q.id]) == (["b", "a"] if q.text == "apple" else []) for q in queries)


def test_cranfield_is_searched_well(shared_data: Path) -> None:
    import ir_measures
    from ir_measures import nDCG

    collection = open_collection("beir", path=shared_data / "cranfield")
    run = BM25Index.build(collection.documents).search(collection.queries("test"), 100)
    qrels = read_qrels(shared_data / "cranfield" / "qrels" / "test.tsv")
    assert ir_measures.calc_aggregate([nDCG @ 10], qrels, run)[nDCG @ 10] > 0.3
