"""Training lists: the positive is in, false negatives are out, and chance is decided by seed, epoch and query alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_candidates import Small

from blockrank.data.candidates import candidate_lists
from blockrank.data.sampling import SamplingConfig, TrainingLists, normalized_text
from blockrank.errors import UserError
from blockrank.types import CandidateList, Document, Qrels, Run


def training_lists(
    texts: dict[str, str], run: Run, qrels: Qrels, config: SamplingConfig | None = None
) -> TrainingLists:
    collection = Small(texts, {q: f"query {q}" for q in {**run, **qrels}}, qrels)
    return TrainingLists(candidate_lists(collection, run, "test"), config)


def numbered(count: int) -> dict[str, str]:
    return {f"d{i}": f"text {i}" for i in range(count)}


def full_run(texts: dict[str, str]) -> dict[str, float]:
    return {d: float(-i) for i, d in enumerate(texts)}


def ids(candidates: CandidateList) -> list[str]:
    return [d.id for d in candidates.documents]


@given(seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 50), num_candidates=st.integers(2, 12))
def test_every_list_has_one_positive_and_distinct_negatives(seed: int, epoch: int, num_candidates: int) -> None:
    texts = numbered(20)
    lists = training_lists(texts, {"q": full_run(texts)}, {"q": {"d3": 1, "d5": 1, "d9": 0}})
    drawn = lists.sample(0, epoch, num_candidates=num_candidates, seed=seed)
    assert len(set(ids(drawn))) == len(drawn) == num_candidates
    assert len({"d3", "d5"} & set(ids(drawn))) == 1
    assert drawn.relevance is not None
    assert [d for d, grade in zip(ids(drawn), drawn.relevance, strict=True) if grade] == [
        d for d in ids(drawn) if d in ("d3", "d5")
    ]
    assert drawn.scores is None
    assert ids(lists.sample(0, epoch, num_candidates=num_candidates, seed=seed)) == ids(drawn)


def test_epoch_seed_and_query_each_change_the_list() -> None:
    texts = numbered(50)
    lists = training_lists(texts, {q: full_run(texts) for q in "ab"}, {q: {"d0": 1} for q in "ab"})
    base = ids(lists.sample(0, 0, num_candidates=10, seed=1))
    assert ids(lists.sample(0, 1, num_candidates=10, seed=1)) != base
    assert ids(lists.sample(0, 0, num_candidates=10, seed=2)) != base
    assert ids(lists.sample(1, 0, num_candidates=10, seed=1)) != base


def test_a_list_does_not_depend_on_other_queries() -> None:
    texts = numbered(30)
    alone = training_lists(texts, {"b": full_run(texts)}, {"b": {"d0": 1}})
    among = training_lists(texts, {q: full_run(texts) for q in "abc"}, {q: {"d0": 1} for q in "abc"})
    index = [among.query_id(i) for i in range(3)].index("b")
    assert ids(alone.sample(0, 4, num_candidates=8, seed=3)) == ids(among.sample(index, 4, num_candidates=8, seed=3))


def test_positions_negatives_and_positives_are_uniform() -> None:
    texts = numbered(10)
    lists = training_lists(texts, {"q": full_run(texts)}, {"q": {"d0": 1, "d1": 1}})
    positions, positives, negatives = Counter(), Counter(), Counter()
    for epoch in range(2000):
        drawn = ids(lists.sample(0, epoch, num_candidates=5, seed=0))
        (positive,) = {"d0", "d1"} & set(drawn)
        positions[drawn.index(positive)] += 1
        positives[positive] += 1
        negatives.update(set(drawn) - {positive})
    assert all(abs(n - 400) < 80 for n in positions.values())
    assert all(abs(n - 1000) < 130 for n in positives.values())
    assert len(negatives) == 8
    assert all(abs(n - 1000) < 100 for n in negatives.values())


def test_the_positive_is_in_even_when_the_run_missed_it() -> None:
    texts = numbered(8)
    run = {d: score for d, score in full_run(texts).items() if d != "d7"}
    lists = training_lists(texts, {"q": run}, {"q": {"d7": 1}})
    assert all("d7" in ids(lists.sample(0, epoch, num_candidates=3, seed=0)) for epoch in range(20))


def test_a_text_equal_to_the_positive_is_no_negative_and_is_counted() -> None:
    texts = {"p": "The  answer\nis 4", "copy": "the answer is 4", "n1": "other", "n2": "another", "n3": "more"}
    lists = training_lists(texts, {"q": full_run(texts)}, {"q": {"p": 1}}, SamplingConfig(top_up=False))
    drawn = lists.sample(0, 0, num_candidates=5, seed=0)
    assert sorted(ids(drawn)) == ["n1", "n2", "n3", "p"]
    assert lists.counts["false_negatives"] == 1
    assert lists.counts["short"] == 1


def test_the_guard_knows_positives_that_were_not_drawn() -> None:
    texts = {"p1": "one", "p2": "two", "copy": "TWO", "n": "other", "m": "more"}
    lists = training_lists(texts, {"q": full_run(texts)}, {"q": {"p1": 1, "p2": 1}})
    for epoch in range(20):
        assert "copy" not in ids(lists.sample(0, epoch, num_candidates=3, seed=0))


def test_several_positives_when_asked() -> None:
    texts = numbered(9)
    qrels = {"q": {"d0": 1, "d1": 2, "d2": 1}}
    lists = training_lists(texts, {"q": full_run(texts)}, qrels, SamplingConfig(max_positives=2))
    drawn = lists.sample(0, 0, num_candidates=6, seed=0)
    assert drawn.relevance is not None
    assert sum(grade > 0 for grade in drawn.relevance) == 2
    tight = lists.sample(0, 0, num_candidates=2, seed=0)
    assert tight.relevance is not None
    assert sum(grade > 0 for grade in tight.relevance) == 1


def test_grades_below_the_bar_are_neither_positive_nor_negative() -> None:
    texts = numbered(6)
    qrels = {"q": {"d0": 3, "d1": 1}}
    lists = training_lists(texts, {"q": full_run(texts)}, qrels, SamplingConfig(min_grade=2))
    for epoch in range(10):
        drawn = ids(lists.sample(0, epoch, num_candidates=5, seed=0))
        assert "d0" in drawn
        assert "d1" not in drawn


def test_short_runs_are_topped_up_with_random_documents_or_stay_short() -> None:
    texts = numbered(30)
    run = {"q": {"d1": 1.0, "d2": 0.5}}
    filled = training_lists(texts, run, {"q": {"d0": 1}})
    drawn = filled.sample(0, 0, num_candidates=6, seed=0)
    assert len(set(ids(drawn))) == 6
    assert {"d0", "d1", "d2"} < set(ids(drawn))
    assert filled.counts["topped_up"] == 3
    short = training_lists(texts, run, {"q": {"d0": 1}}, SamplingConfig(top_up=False))
    assert sorted(ids(short.sample(0, 0, num_candidates=6, seed=0))) == ["d0", "d1", "d2"]


@pytest.mark.parametrize("num_candidates", [4, 40])
def test_topping_up_never_adds_a_positive_a_judged_document_or_the_query_itself(num_candidates: int) -> None:
    texts = {**numbered(8), "q": "the query's own text"}
    qrels = {"q": {"d0": 1, "d1": 2, "d2": 1, "d3": 0}}
    collection = Small(texts, {"q": "query"}, qrels, ignore_self=True)
    lists = TrainingLists(
        candidate_lists(collection, {"q": {"q": 2.0, "d4": 1.0}}, "test"), SamplingConfig(min_grade=2)
    )
    for epoch in range(30):
        drawn = lists.sample(0, epoch, num_candidates=num_candidates, seed=0)
        assert set(ids(drawn)) <= {"d1", "d3", "d4", "d5", "d6", "d7"}
        assert len(set(ids(drawn))) == len(drawn) == min(num_candidates, 6)
        assert drawn.relevance is not None
        assert [d for d, grade in zip(ids(drawn), drawn.relevance, strict=True) if grade] == ["d1"]
    assert lists.counts["topped_up"] > 0
    chance = Small(texts, {"q": "query"}, qrels)
    lists = TrainingLists(candidate_lists(chance, {"q": {"d4": 1.0}}, "test"))
    assert "q" in ids(lists.sample(0, 0, num_candidates=40, seed=0))


def test_a_collection_smaller_than_a_list_gives_a_short_list() -> None:
    texts = numbered(3)
    lists = training_lists(texts, {"q": {}}, {"q": {"d0": 1}})
    assert sorted(ids(lists.sample(0, 0, num_candidates=10, seed=0))) == ["d0", "d1", "d2"]
    assert lists.counts["short"] == 1


def test_empty_documents_are_no_negatives() -> None:
    texts = {"p": "text", "e": "  ", "n": "other"}
    lists = training_lists(texts, {"q": full_run(texts)}, {"q": {"p": 1}}, SamplingConfig(top_up=False))
    assert sorted(ids(lists.sample(0, 0, num_candidates=3, seed=0))) == ["n", "p"]
    assert lists.counts["empty_negatives"] == 1


@pytest.mark.parametrize("nothing", ["", " ", "\u200b", "\ufeff\0"])
def test_positives_without_text_are_left_out_counted_and_told(nothing: str, caplog: pytest.LogCaptureFixture) -> None:
    texts = {**numbered(5), "e": nothing}
    run = {q: full_run(texts) for q in "abc"}
    lists = training_lists(texts, run, {"a": {"d0": 1, "e": 1}, "b": {"e": 1}, "c": {"d1": 1}})
    assert ([lists.query_id(i) for i in range(len(lists))], lists.skipped, lists.empty_positives) == (["a", "c"], 1, 1)
    assert "1 positives have no text and are left out: 'e'" in caplog.text
    assert all("e" not in ids(lists.sample(0, epoch, num_candidates=3, seed=0)) for epoch in range(10))
    with pytest.raises(UserError, match="1 of 1 queries have no positive"):
        training_lists(texts, {"b": full_run(texts)}, {"b": {"e": 1}})


def test_queries_without_a_positive_are_skipped_counted_and_refused_above_a_rate() -> None:
    texts = numbered(4)
    run = {q: full_run(texts) for q in "abc"}
    qrels: Qrels = {"a": {"d0": 1}, "b": {"d0": 0}, "c": {"nowhere": 1}}
    lists = training_lists(texts, run, qrels, SamplingConfig(max_skipped_rate=0.7))
    assert (len(lists), lists.skipped, lists.query_id(0)) == (1, 2, "a")
    with pytest.raises(UserError, match="2 of 3 queries have no positive"):
        training_lists(texts, run, qrels)
    with pytest.raises(UserError, match="3 of 3 queries have no positive"):
        training_lists(texts, run, {}, SamplingConfig(max_skipped_rate=1.0))


def test_the_fingerprint_follows_data_and_settings() -> None:
    texts = numbered(5)
    base = training_lists(texts, {"q": full_run(texts)}, {"q": {"d0": 1}})
    assert base.fingerprint == training_lists(texts, {"q": full_run(texts)}, {"q": {"d0": 1}}).fingerprint
    for other in (
        training_lists(texts, {"q": {"d1": 1.0}}, {"q": {"d0": 1}}),
        training_lists(texts, {"q": full_run(texts)}, {"q": {"d1": 1}}),
        training_lists(texts, {"q": full_run(texts)}, {"q": {"d0": 1}}, SamplingConfig(top_up=False)),
    ):
        assert other.fingerprint != base.fingerprint


CHANGES: dict[str, tuple[dict[str, str], dict[str, str], Qrels]] = {
    "query text": ({}, {"q0": "other"}, {}),
    "positive's text": ({"d0": "other"}, {}, {}),
    "candidate's text": ({"d1": "other"}, {}, {}),
    "text only top-up can draw": ({"d399": "other"}, {}, {}),
    "grade of a candidate": ({}, {}, {"q0": {"d0": 1, "d1": 1}}),
    "grade without effect on the positives": ({}, {}, {"q0": {"d0": 2}}),
    "one more document": ({"new": "text"}, {}, {}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("whole", [True, False])
def test_the_fingerprint_follows_texts_and_grades(
    change: tuple[dict[str, str], dict[str, str], Qrels], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        monkeypatch.setattr("blockrank.data.sampling.WHOLE_COLLECTION", 10)

    def fingerprint(texts: dict[str, str], queries: dict[str, str], qrels: Qrels) -> str:
        run = {q: {f"d{i}": -float(i) for i in range(5)} for q in ("q0", "q1")}
        collection = Small(
            {**numbered(400), **texts}, {"q0": "x", "q1": "y", **queries}, {"q0": {"d0": 1}, "q1": {"d0": 1}, **qrels}
        )
        return TrainingLists(candidate_lists(collection, run, "test")).fingerprint

    assert fingerprint({}, {}, {}) == fingerprint({}, {}, {})
    assert fingerprint(*change) != fingerprint({}, {}, {})


def test_the_fingerprint_of_a_large_collection_reads_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WHOLE_COLLECTION", 100), ("FINGERPRINT_LISTS", 2), ("FINGERPRINT_CANDIDATES", 3)):
        monkeypatch.setattr(f"blockrank.data.sampling.{name}", value)
    texts = numbered(1000)
    lists = training_lists(texts, {f"q{i}": full_run(texts) for i in range(9)}, {f"q{i}": {"d0": 1} for i in range(9)})
    read = [document.id for document in lists._fingerprinted()]
    assert len(read) == 2 * 3 + 2 * 3
    assert read[:3] == ["d0", "d1", "d2"]


def test_settings_out_of_range_are_refused() -> None:
    settings: tuple[dict[str, Any], ...] = ({"min_grade": 0}, {"max_positives": 0}, {"max_skipped_rate": 1.5})
    for wrong in settings:
        with pytest.raises(ValueError, match="must be"):
            SamplingConfig(**wrong)
    texts = numbered(3)
    lists = training_lists(texts, {"q": full_run(texts)}, {"q": {"d0": 1}})
    with pytest.raises(UserError, match="num_candidates must be at least 2"):
        lists.sample(0, 0, num_candidates=1, seed=0)


def test_normalized_text_ignores_case_space_and_where_the_title_ends() -> None:
    assert normalized_text(Document("a", "of  THE\n sea", "Old man")) == normalized_text(
        Document("b", "old Man of the Sea")
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("caf\u00e9", "cafe\u0301"),
        ("\u212b", "\u00c5"),
        ("\uff21\uff22\uff23", "abc"),
        ("o\ufb03ce", "OFFICE"),
        ("stra\u00dfe", "STRASSE"),
        ("co\u00adop\u200b", "coop"),
        ("\ufeffa \u2060 b", "a b"),
        ("\uac00", "\u1100\u1161"),
        ("a\u00a0b", "a b"),
        ("heart\u2764\ufe0f", "heart\u2764"),
    ],
)
def test_texts_that_look_the_same_are_the_same(one: str, other: str) -> None:
    assert normalized_text(Document("a", one)) == normalized_text(Document("b", other))
    texts = {"p": one, "copy": other, "n": "something else"}
    lists = training_lists(texts, {"q": full_run(texts)}, {"q": {"p": 1}}, SamplingConfig(top_up=False))
    assert sorted(ids(lists.sample(0, 0, num_candidates=3, seed=0))) == ["n", "p"]
    assert lists.counts["false_negatives"] == 1


def test_texts_that_differ_stay_apart() -> None:
    texts = ("resume", "r\u00e9sum\u00e9", "re sume", "resume.", "\u65e5\u672c", "")
    assert len({normalized_text(Document("d", text)) for text in texts}) == len(texts)
