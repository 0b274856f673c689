"""Confidence, calibration and temperature, against numbers worked out by hand and scipy's minimiser."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from blockrank.errors import UserError
from blockrank.evaluation.calibration import (
    TEMPERATURES,
    area_under_risk_coverage,
    calibration_error,
    fit_temperature,
    reliability,
    risk_coverage,
    softmax,
)
from blockrank.evaluation.confidence import confidence_report, least_grade, write_confidence
from blockrank.evaluation.evaluator import Evaluator
from blockrank.evaluation.tuning import temperature_of
from blockrank.rankers.confidence import confidence_of, shares
from blockrank.types import CandidateList, Document, ListScores, Query


def test_confidence_by_hand() -> None:
    found = confidence_of([1.0, 0.5, 0.25, 0.25])
    assert found is not None
    assert (found.margin, found.entropy, found.normalized_entropy, found.max) == pytest.approx((0.25, 1.75, 0.875, 0.5))
    assert [found.value(m) for m in ("margin", "entropy", "max")] == pytest.approx([0.25, 0.125, 0.5])


@pytest.mark.parametrize(
    ("scores", "kind", "expected"),
    [
        ([0.7], "mass", (1, 0, 0, 1)),
        ([0.0], "mass", (1, 0, 0, 1)),
        ([-30.0], "log", (1, 0, 0, 1)),
        ([0.0, 0.0, 0.0, 0.0], "mass", (0, 2, 1, 0.25)),
        ([2.0, 0.0], "mass", (1, 0, 0, 1)),
        ([1e-45, 1e-45], "mass", (0, 1, 1, 0.5)),
        ([math.log(3), 0.0], "log", (0.5, 0.8112781244591328, 0.8112781244591328, 0.75)),
        ([-1e9, -1e9], "log", (0, 1, 1, 0.5)),
    ],
)
def test_confidence_at_the_edges(scores, kind, expected) -> None:
    found = confidence_of(np.asarray(scores), kind)
    assert found is not None
    assert (found.margin, found.entropy, found.normalized_entropy, found.max) == pytest.approx(expected)


def test_no_document_has_no_confidence_and_bad_scores_are_told() -> None:
    assert confidence_of([]) is None
    with pytest.raises(UserError, match="2 of its scores are not finite"):
        confidence_of([float("nan"), 1.0, float("inf")])
    with pytest.raises(UserError, match=r"-0\.5 is negative"):
        confidence_of([-0.5, 1.0])


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8))
def test_sum_and_mean_over_signal_tokens_give_the_same_confidence(masses) -> None:
    once, twice = confidence_of(masses), confidence_of([2 * m for m in masses])
    assert once is not None
    assert twice is not None
    assert (once.margin, once.entropy, once.max) == pytest.approx((twice.margin, twice.entropy, twice.max), abs=1e-12)
    assert shares(masses).sum() == pytest.approx(1)
    assert 0 <= once.margin <= once.max <= 1 + 1e-12
    assert 1 / len(masses) - 1e-12 <= once.max
    assert 0 <= once.entropy <= math.log2(len(masses)) + 1e-12


CONFIDENCE = [0.95, 0.85, 0.85, 0.3, 0.1, 0.0]
CORRECT = [1, 1, 0, 1, 0, 0]


def test_equal_width_bins_by_hand() -> None:
    """(0, .2]: 0.05 against 0; (.2, .4]: 0.3 against 1; (.8, 1]: 0.8833 against 2/3."""
    bins = reliability(CONFIDENCE, CORRECT, 5, "width")
    assert [(b.low, b.high, b.count, b.confidence, b.accuracy) for b in bins] == [
        (0.0, 0.2, 2, pytest.approx(0.05), 0.0),
        (0.2, 0.4, 1, pytest.approx(0.3), 1.0),
        (pytest.approx(0.8), 1.0, 3, pytest.approx(2.65 / 3), pytest.approx(2 / 3)),
    ]
    assert calibration_error(bins) == pytest.approx((2 * 0.05 + 0.7 + 3 * (2.65 - 2) / 3) / 6)


def test_equal_mass_bins_by_hand() -> None:
    """A cut between the two of 0.85 is moved before both."""
    bins = reliability(CONFIDENCE, CORRECT, 3, "mass")
    assert [(b.count, b.accuracy) for b in bins] == [(2, 0.0), (1, 1.0), (3, pytest.approx(2 / 3))]
    assert [(b.low, b.high) for b in bins] == [(0.0, 0.1), (0.1, 0.3), (0.3, 0.95)]
    assert calibration_error(bins) == pytest.approx((2 * 0.05 + 0.7 + 3 * (2.65 - 2) / 3) / 6)
    (one,) = reliability([0.5] * 4, [1, 0, 0, 1], 10, "mass")
    assert (one.count, one.accuracy) == (4, 0.5)


def test_a_boundary_belongs_to_the_bin_below() -> None:
    bins = reliability(np.arange(11) / 10, np.ones(11), 10, "width")
    assert [b.count for b in bins] == [2] + [1] * 9


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40), st.integers(1, 12))
def test_bins_hold_every_query_once(queries, count) -> None:
    confidence, correct = [c for c, _ in queries], [r for _, r in queries]
    for binning in ("width", "mass"):
        bins = reliability(confidence, correct, count, binning)
        assert sum(b.count for b in bins) == len(queries)
        assert len(bins) <= count
        assert sum(b.count * b.confidence for b in bins) == pytest.approx(sum(confidence), abs=1e-9)
        assert sum(b.count * b.accuracy for b in bins) == pytest.approx(sum(correct))
        assert 0 <= calibration_error(bins) <= 1


def test_risk_and_coverage_by_hand() -> None:
    """The tie at 0.85 has half an error at its first place, whichever comes first."""
    coverage, risk = risk_coverage(CONFIDENCE, CORRECT)
    assert coverage == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert risk == pytest.approx([0, 0.5 / 2, 1 / 3, 1 / 4, 2 / 5, 3 / 6])
    assert area_under_risk_coverage(risk) == pytest.approx((0 + 0.25 + 1 / 3 + 0.25 + 0.4 + 0.5) / 6)
    order = [2, 0, 5, 1, 3, 4]
    assert risk_coverage([CONFIDENCE[i] for i in order], [CORRECT[i] for i in order])[1] == pytest.approx(risk)
    assert risk_coverage([0.5] * 4, [1, 0, 0, 0])[1] == pytest.approx([0.75] * 4)


@pytest.mark.parametrize("bad", [[1.5], [-0.1], [float("nan")]])
def test_confidence_outside_its_range_is_told(bad) -> None:
    with pytest.raises(UserError, match=r"must lie in \[0, 1\]"):
        risk_coverage(bad, [1])
    with pytest.raises(UserError, match=r"must lie in \[0, 1\]"):
        reliability(bad, [1])


def test_nothing_to_calibrate_is_told() -> None:
    for function in (risk_coverage, reliability):
        with pytest.raises(UserError, match="no query has a confidence"):
            function([], [])
    with pytest.raises(UserError, match="nothing to calibrate"):
        calibration_error([])


def lists_of_scores(seed: int, count: int = 60, scale: float = 1.0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Lists whose positives are drawn from softmax(S / 0.2)."""
    rng = np.random.default_rng(seed)
    lists = []
    for _ in range(count):
        scores = rng.uniform(0, 1, rng.integers(1, 12))
        positive = np.zeros(len(scores), bool)
        positive[rng.choice(len(scores), p=softmax(scores, 0.2))] = True
        lists.append((scale * scores, positive))
    return lists


def loss_at(lists: list[tuple[np.ndarray, np.ndarray]], temperature: float) -> float:
    return float(np.mean([-log_softmax(s / temperature)[p].mean() for s, p in lists]))


@pytest.mark.parametrize(("seed", "scale"), [(0, 1.0), (1, 1.0), (2, 1e-3), (3, 500.0)])
def test_the_temperature_is_scipys(seed: int, scale: float) -> None:
    lists = lists_of_scores(seed, scale=scale)
    lists[0][1][:] = True  # several positives
    fit = fit_temperature([*lists, (np.ones(3), np.zeros(3, bool))])
    found = minimize_scalar(
        lambda log_beta: loss_at(lists, np.exp(-log_beta)), bounds=(-12, 12), options={"xatol": 1e-10}
    )
    assert fit.temperature == pytest.approx(float(np.exp(-found.x)), rel=1e-4)
    assert fit.nll == pytest.approx(found.fun, abs=1e-9)
    assert fit.nll <= fit.nll_at_one
    assert fit.nll_at_one == pytest.approx(loss_at(lists, 1.0))
    assert (fit.lists, fit.left_out, fit.at_bound) == (60, 1, False)


def test_the_temperature_is_the_one_that_made_the_lists() -> None:
    assert fit_temperature(lists_of_scores(5, 4000)).temperature == pytest.approx(0.2, rel=0.05)


def test_temperatures_that_no_list_decides_are_bounds() -> None:
    right = [(np.asarray([1.0, 0.0]), np.asarray([True, False]))]
    wrong = [(np.asarray([0.0, 1.0]), np.asarray([True, False]))]
    lowest, highest = fit_temperature(right), fit_temperature(wrong)
    assert (lowest.at_bound, highest.at_bound) == (True, True)
    assert (lowest.temperature, highest.temperature) == pytest.approx(TEMPERATURES)
    assert highest.nll == pytest.approx(math.log(2), abs=1e-5)
    alone = fit_temperature([(np.asarray([0.3]), np.asarray([True]))])
    assert (alone.at_bound, alone.nll) == (True, 0.0)


def test_temperatures_that_cannot_be_fitted_are_told() -> None:
    for lists in ([], [(np.ones(2), np.zeros(2, bool))]):
        with pytest.raises(UserError, match=f"none of {len(lists)} validation lists has a positive"):
            fit_temperature(lists)
    with pytest.raises(UserError, match="not finite"):
        fit_temperature([(np.asarray([np.nan, 1.0]), np.asarray([True, False]))])


class GivenMasses:
    """Scores each list with the masses it is asked to."""

    name = "given"
    score_kind = "mass"

    def __init__(self, masses: dict[str, list[float]]) -> None:
        self.masses = masses

    def score(self, lists):
        return [ListScores(np.asarray(self.masses[c.query.id], np.float32), np.zeros(len(c), bool)) for c in lists]


def candidates(query: str, relevance: list[int], empty: int = 0) -> CandidateList:
    documents = [Document(f"{query}-d{i}", "" if i < empty else f"text {i}") for i in range(len(relevance))]
    return CandidateList(Query(query, "words"), tuple(documents), relevance=tuple(relevance))


LISTS = [
    candidates("right", [1, 0]),
    candidates("wrong", [0, 1]),
    candidates("nothing", [0, 0]),
    candidates("empty", [0, 2], empty=1),
    CandidateList(Query("unjudged", "words"), (Document("u", "text"),)),
    candidates("no text", [1], empty=1),
]
MASSES = {"right": [0.9, 0.1], "wrong": [0.6, 0.4], "nothing": [0.5, 0.5], "empty": [0, 1], "unjudged": [1]}


def evaluated(tmp_path=None):
    return Evaluator(GivenMasses({**MASSES, "no text": [0.0]}), LISTS, tmp_path, measures=["P@1"]).run()


def test_a_report_counts_what_it_leaves_out(tmp_path) -> None:
    result = evaluated(tmp_path)
    report = confidence_report(result, ["P@1"], temperature_of(result.documents, result.qrels))
    assert report["queries"] == 4
    assert report["left_out"] == {"judged_without_list": 1, "without_judgement": 1}
    assert report["lists_without_positive"] == 1
    assert report["error_rate"] == 0.5
    assert report["shares"]["mean_confidence"] == pytest.approx((0.9 + 0.6 + 0.5 + 1) / 4)
    assert report["shares"]["equal_width"]["ece"] == pytest.approx((0.1 + 0.6 + 0.5 + 0) / 4)
    assert report["risk_coverage"]["max"]["risk"] == pytest.approx([0, 0, 1 / 3, 1 / 2])
    assert report["perfect_aurc"] == pytest.approx((0 + 0 + 1 / 3 + 1 / 2) / 4)
    assert report["temperature"]["lists"] == 3
    assert report["calibrated"]["mean_confidence"] != report["shares"]["mean_confidence"]
    write_confidence(tmp_path, report)
    assert (tmp_path / "confidence.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "confidence.json").read_text())["queries"] == 4
    rows = [json.loads(line) for line in (tmp_path / "per_query.jsonl").read_text().splitlines()]
    found = {row["query_id"]: row["confidence"] for row in rows}
    assert found["right"]["margin"] == pytest.approx(0.8)
    assert found["empty"]["max"] == 1.0
    assert found["no text"] is None


def test_relevance_is_what_the_measures_ask_for() -> None:
    assert least_grade(["nDCG@10", "P@1"]) == 1
    assert least_grade(["nDCG@10", "RR(rel=2)"]) == 2
    result = evaluated()
    assert confidence_report(result, ["RR(rel=2)"])["error_rate"] == 0.75
    assert confidence_report(result, ["RR(rel=2)"])["calibrated"] is None


def test_scores_without_a_confidence_are_told() -> None:
    ranker = GivenMasses({**MASSES, "no text": [0.0]})
    ranker.score_kind = None
    result = Evaluator(ranker, LISTS, measures=["P@1"]).run()
    with pytest.raises(UserError, match="neither masses nor logarithms"):
        confidence_report(result, ["P@1"])
    alone = Evaluator(GivenMasses(MASSES), LISTS[4:5], measures=["P@1"]).run()
    with pytest.raises(UserError, match="no judged query has a list"):
        confidence_report(alone, ["P@1"])
