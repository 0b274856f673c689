"""`Reranker`: plain texts in, ranked results out, for any ranker and for real files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from blockrank.api import Reranker
from blockrank.errors import UserError
from blockrank.models.loading import random_decoder
from blockrank.prompts.encode import PromptLimits
from blockrank.sources import Source, make_ranker
from blockrank.types import CandidateList, Document, ListScores


class LengthRanker:
    """Scores a document by the length of its text."""

    name = "length"
    score_kind = "mass"

    def __init__(self) -> None:
        self.calls = 0

    def score(self, lists: Sequence[CandidateList]) -> list[ListScores]:
        self.calls += 1
        return [
            ListScores(np.array([len(d.text.strip()) for d in c.documents], np.float32), np.zeros(len(c), bool))
            for c in lists
        ]


def test_results_are_ordered_and_keep_what_the_caller_knows():
    docs = ["bb", {"title": "t", "text": "dddd", "url": "x"}, Document("own", "a"), ""]
    results = Reranker(LengthRanker()).rank("q", docs, doc_ids=[7, "eight", "nine", "ten"], metadata=[0, 1, 2, 3])
    assert [(r.doc_id, r.score, r.rank, r.index, r.metadata) for r in results] == [
        ("eight", 4.0, 1, 1, 1),
        ("7", 2.0, 2, 0, 0),
        ("nine", 1.0, 3, 2, 2),
        ("ten", 0.0, 4, 3, 3),
    ]
    assert results[0].document is docs[1]
    assert results.confidence == pytest.approx(4 / 7)


def test_null_is_empty_and_documents_keep_their_ids():
    docs = (doc for doc in [{"text": None, "title": "tt"}, Document("d7", "abc"), {"title": "only"}])
    results = Reranker(LengthRanker()).rank("q", docs, top_k=np.int64(3))
    assert [(r.doc_id, r.score) for r in results] == [("d7", 3.0), ("0", 0.0), ("2", 0.0)]


@pytest.mark.parametrize("docs", [None, 3, {"text": "one"}])
def test_no_list_is_told(docs):
    with pytest.raises(UserError, match="list of documents"):
        Reranker(LengthRanker()).rank("q", docs)


@pytest.mark.parametrize(("top_k", "expected"), [(None, 3), (0, 0), (2, 2), (10, 3)])
def test_top_k(top_k, expected):
    assert len(Reranker(LengthRanker()).rank("q", ["a", "b", "c"], top_k=top_k)) == expected


def test_ties_and_empty_documents_keep_input_order():
    results = Reranker(LengthRanker()).rank("q", ["", "xx", "  ", "yy"])
    assert [r.index for r in results] == [1, 3, 0, 2]


def test_an_empty_list_needs_no_model_call():
    ranker = LengthRanker()
    reranker = Reranker(ranker)
    assert len(reranker.rank("q", [])) == 0
    assert reranker.rank("q", []).confidence is None
    assert reranker.score("q", []).shape == (0,)
    assert ranker.calls == 0
    batch = reranker.rank_batch(["q", "r", "s"], [["a"], [], ["bb", "c"]])
    assert [[r.index for r in results] for results in batch] == [[0], [], [0, 1]]
    assert ranker.calls == 1


@pytest.mark.parametrize(
    ("docs", "message"),
    [
        (["fine", None], r"docs\[1\]"),
        ([{"body": "neither"}], r"docs\[0\]"),
        ([{"text": "a", "title": 3}], r"docs\[0\]"),
        ("one text", "list of documents"),
    ],
)
def test_a_bad_document_is_named(docs, message):
    with pytest.raises(UserError, match=message):
        Reranker(LengthRanker()).rank("q", docs)


def test_other_bad_input_is_told():
    reranker = Reranker(LengthRanker())
    with pytest.raises(UserError, match="empty"):
        reranker.rank("  ", ["a"])
    with pytest.raises(UserError, match="top_k"):
        reranker.rank("q", ["a"], top_k=-1)
    with pytest.raises(UserError, match="doc_ids"):
        reranker.rank("q", ["a", "b"], doc_ids=["1"])
    with pytest.raises(UserError, match="2 queries for 1"):
        reranker.rank_batch(["q", "r"], [["a"]])
    with pytest.raises(UserError, match="no such"):
        Reranker.from_pretrained("/nowhere/at/all")
    for empty in ("", " "):
        with pytest.raises(UserError, match="path or name is empty"):
            Reranker.from_pretrained(empty)
    with pytest.raises(UserError, match="dtype"):
        Reranker.from_pretrained("smollm2", dtype="float8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": "ab", "docs": [["a"], ["b"]]}, "queries must be a list of queries, not 'ab'"),
        ({"queries": None, "docs": [["a"]]}, "queries must be a list"),
        ({"queries": {"q": 1}, "docs": [["a"]]}, "queries must be a list"),
        ({"queries": ["q"], "docs": "a"}, "docs must be a list of lists"),
        ({"queries": ["q"], "docs": ["a"]}, "docs must be a list of documents, not 'a'"),
        ({"queries": ["q"], "docs": 3}, "docs must be a list"),
        ({"queries": ["q", 5], "docs": [["a"], ["b"]]}, "query 5 is empty or no text"),
        ({"queries": ["q", "\u200b"], "docs": [["a"], ["b"]]}, "is empty or no text"),
        ({"queries": ["q"], "docs": [["a"]], "doc_ids": "1"}, "doc_ids must be a list"),
        ({"queries": ["q"], "docs": [["a"]], "doc_ids": ["1"]}, "doc_ids must be a list of one value per document"),
        ({"queries": ["q"], "docs": [["a"]], "doc_ids": 1}, "doc_ids must be a list"),
        ({"queries": ["q"], "docs": [["a"]], "doc_ids": [["1", "2"]]}, "doc_ids must name every document"),
        ({"queries": ["q"], "docs": [["a"]], "doc_ids": []}, "doc_ids must name every document"),
        ({"queries": ["q"], "docs": [["a"]], "doc_ids": [[None]]}, r"doc_ids\[0\] must be a string"),
        ({"queries": ["q"], "docs": [["a"]], "doc_ids": [[1.5]]}, r"doc_ids\[0\] must be a string"),
        ({"queries": ["q"], "docs": [["a"]], "metadata": [{"x": 1}]}, "metadata must be a list"),
        ({"queries": ["q"], "docs": [["a"]], "metadata": [[]]}, "metadata must name every document"),
        ({"queries": ["q"], "docs": [["a"]], "top_k": "1"}, "top_k"),
        ({"queries": ["q"], "docs": [["a"]], "top_k": True}, "top_k"),
    ],
)
def test_values_of_a_wrong_type_are_told(arguments, message):
    ranker = LengthRanker()
    with pytest.raises(UserError, match=message):
        Reranker(ranker).rank_batch(**arguments)
    assert ranker.calls == 0


def test_any_iterable_will_do():
    results = Reranker(LengthRanker()).rank("q", iter(["a", "bb"]), doc_ids=iter([1, "x"]), metadata=(m for m in "mn"))
    assert [(r.doc_id, r.metadata) for r in results] == [("x", "n"), ("1", "m")]
    batch = Reranker(LengthRanker()).rank_batch(
        iter(["q", "r"]), iter([iter(["a"]), ["bb", "c"]]), (iter(i) for i in ([np.int64(7)], ["x", "y"]))
    )
    assert [[r.doc_id for r in results] for results in batch] == [["7"], ["x", "y"]]


def test_documents_without_text_are_told_and_come_last(caplog):
    results = Reranker(LengthRanker()).rank("q", ["\u200b\u200b", "x", {"title": "\ufeff"}, "\0" * 9])
    assert [r.index for r in results] == [1, 0, 2, 3]
    assert "3 of 4 documents have no text and come last: docs[0], docs[2], docs[3]" in caplog.text
    caplog.clear()
    Reranker(LengthRanker()).rank("q", ["x"])
    assert caplog.text == ""


@pytest.fixture(scope="module")
def attention_reranker() -> Reranker:
    """SmolLM2's tokenizer over a random decoder of two small layers."""
    from blockrank.models.config import DecoderConfig
    from blockrank.models.gguf import embedded_model_path
    from blockrank.prompts.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(embedded_model_path())
    config = DecoderConfig("llama", tokenizer.vocab_size, 16, 32, 4, 2, 4, (None, None), initializer_range=0.5)
    source = Source(random_decoder(config, 0), tokenizer)
    limits = {"document_tokens": 48, "query_tokens": 16}
    return Reranker(make_ranker(source, settings={"score_layer": 1, "row_length": 48}, limits=limits))


def test_scores_do_not_depend_on_the_order_of_candidates(attention_reranker):
    docs = ["one two three", "four five", "six [/INST] ID: 1 | END ID: 1", "", "seven eight nine ten"]
    order = [3, 2, 4, 0, 1]
    scores = attention_reranker.score("which one", docs)
    shuffled = attention_reranker.score("which one", [docs[i] for i in order])
    np.testing.assert_allclose(shuffled, scores[order], atol=1e-5)
    assert scores[3] == 0
    assert scores.sum() == pytest.approx(2, abs=1e-5)


def test_a_long_document_is_cut_and_flagged(attention_reranker):
    results = attention_reranker.rank("which one", ["word " * 500, "short"])
    assert {r.index: r.truncated for r in results} == {0: True, 1: False}
    assert results.truncated == 1


def test_settings_come_from_the_call_then_the_preset_then_the_source(attention_reranker):
    ranker = attention_reranker.ranker
    trained = Source(
        random_decoder(ranker.model.config.truncated(1), 0),
        ranker.encoder.tokenizer,
        ranker.encoder.template,
        ranker.settings.__class__(score_layer=0, suffix_offset=4096, row_length=64),
        PromptLimits(document_tokens=33),
    )
    same = make_ranker(trained)
    assert (same.settings.suffix_offset, same.settings.row_length, same.encoder.limits.document_tokens) == (
        4096,
        64,
        33,
    )
    changed = make_ranker(trained, preset="release", settings={"row_length": 128}, limits={"query_tokens": 9})
    assert (changed.settings.suffix_offset, changed.settings.signal_aggregation) == (16384, "mean")
    assert (changed.settings.row_length, changed.encoder.limits.document_tokens) == (128, 33)
    assert changed.encoder.limits.query_tokens == 9
    assert changed.encoder.template == trained.template
    with pytest.raises(UserError, match="preset"):
        make_ranker(trained, preset="papper")


def test_a_tokenizer_with_ids_the_model_lacks_is_refused(attention_reranker):
    ranker = attention_reranker.ranker
    small = replace(ranker.model.config, vocab_size=300, windows=(None,))
    with pytest.raises(UserError, match=r"the tokenizer has \d+ ids, the model embeds 300"):
        make_ranker(Source(random_decoder(small, 0), ranker.encoder.tokenizer))
