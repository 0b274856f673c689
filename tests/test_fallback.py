"""Fallback and ensemble: the parts alone at the ends, what is counted, and the curves against brute force."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from eval_helpers import beir_folder, on
from eval_helpers import evaluate as evaluated
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from test_attention_ranker import SETTINGS, decoder, encoder, listed, passages

from blockrank.errors import FieldError, UserError
from blockrank.evaluation import suite
from blockrank.evaluation.evaluator import Evaluator
from blockrank.evaluation.fallback_curve import curve_table, fallback_curves, write_fallback_curve
from blockrank.evaluation.metrics import evaluate
from blockrank.evaluation.records import extra_totals
from blockrank.evaluation.tuning import ALPHAS, tune_alpha
from blockrank.models.decoder import Decoder, TruncatedDecoder
from blockrank.parallel import MeshConfig
from blockrank.rankers.attention import EMPTY_SCORE as NO_MASS
from blockrank.rankers.ensemble import EnsembleRanker, EnsembleSettings, combine
from blockrank.rankers.fallback import FallbackRanker, FallbackSettings
from blockrank.rankers.generative import EMPTY_SCORE
from blockrank.rankers.reading import ReadingSettings
from blockrank.sources import Source, build_ranker
from blockrank.types import CandidateList, Document, ListScores, Query

SCORES = st.lists(st.tuples(st.floats(0, 1, width=32), st.floats(-30, 0, width=32)), min_size=1, max_size=8)


class Given:
    """Scores each list with the values it has for its query."""

    def __init__(self, name: str, scores: dict[str, list[float]], kind: str) -> None:
        self.name, self.scores, self.score_kind, self.asked = name, scores, kind, []
        self.settings, self.model, self.encoder = None, None, None

    def score(self, lists):
        self.asked += [c.query.id for c in lists]
        return [
            ListScores(np.asarray(self.scores[c.query.id], np.float32), np.zeros(len(c), bool), tokens=10)
            for c in lists
        ]


def candidates(query: str, relevance: list[int], empty: int = 0) -> CandidateList:
    documents = [Document(f"{query}-d{i}", "" if i < empty else f"text {i}") for i in range(len(relevance))]
    return CandidateList(Query(query, "words"), tuple(documents), relevance=tuple(relevance))


LISTS = [
    candidates("a", [1, 0]),
    candidates("b", [1, 0]),
    candidates("c", [0, 0, 1], empty=1),
    candidates("d", [1]),
    candidates("e", [0, 1]),
]
MASSES = {"a": [0.6, 0.4], "b": [0.1, 0.9], "c": [0, 1, 1], "d": [2], "e": [0.4, 0.6]}
LOGS = {"a": [-3, -1], "b": [-1, -4], "c": [-1e9, -2, -1], "d": [-1], "e": [-5, -1]}


def parts() -> tuple[Given, Given]:
    return Given("attention", MASSES, "mass"), Given("generative", LOGS, "log")


def fallback(threshold, measure: str = "margin") -> FallbackRanker:
    return FallbackRanker(*parts(), FallbackSettings(threshold, measure))


def test_unsure_lists_are_decoded_and_counted() -> None:
    """Margins: a 0.2, b 0.8, c 0, d 1, e 0.2."""
    ranker = fallback(0.5)
    results = ranker.score(LISTS)
    assert ranker.generative.asked == ["a", "c", "e"]
    expected = [LOGS["a"], MASSES["b"], LOGS["c"], MASSES["d"], LOGS["e"]]
    for result, scores in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result.scores, np.asarray(scores, np.float32))
    assert [result.extra["fallback"] for result in results] == [1, 0, 1, 0, 1]
    assert [result.extra["confidence_margin"] for result in results] == pytest.approx([0.2, 0.8, 0, 1, 0.2])
    assert [result.tokens for result in results] == [20, 10, 20, 10, 20]
    assert [sorted(result.parts) for result in results][:2] == [["attention", "generative"], ["attention"]]


@pytest.mark.parametrize(
    ("measure", "threshold", "asked"),
    [
        ("margin", 0.2, "c"),
        ("margin", 0.0, ""),
        ("margin", 1.0, "abce"),
        ("margin", "never", ""),
        ("margin", "always", "abcde"),
        ("entropy", 0.02, "c"),  # 1 - H: a and e 0.029, b 0.531, c 0, d 1
        ("entropy", 0.5, "ace"),
        ("max", 0.55, "c"),
        ("max", 0.61, "ace"),
    ],
)
def test_a_list_falls_back_below_the_threshold_only(measure, threshold, asked) -> None:
    ranker = fallback(threshold, measure)
    ranker.score(LISTS)
    assert "".join(ranker.generative.asked) == asked


@pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan"), float("inf"), float("-inf"), "sometimes"])
def test_thresholds_out_of_range_are_told(threshold) -> None:
    with pytest.raises(FieldError, match="must be between 0 and 1, or be never or always"):
        FallbackSettings(threshold)


def test_other_settings_out_of_range_are_told() -> None:
    for settings in (FallbackSettings, EnsembleSettings):
        with pytest.raises(UserError, match="beams=0 must be a whole number from 1 on"):
            settings(beams=0)
    with pytest.raises(UserError, match="measure='sure' is unknown"):
        FallbackSettings(measure="sure")
    with pytest.raises(UserError, match="alpha"):
        EnsembleSettings(alpha=1.01)
    with pytest.raises(UserError, match="normalization='z' is unknown"):
        EnsembleSettings(normalization="z")


def test_scores_that_are_not_numbers_name_the_query() -> None:
    broken = Given("attention", {**MASSES, "b": [float("nan"), 1]}, "mass")
    for ranker in (
        FallbackRanker(broken, parts()[1]),
        EnsembleRanker(broken, parts()[1], EnsembleSettings(0.5)),
    ):
        with pytest.raises(UserError, match=r"query 'b', ranker .*not finite"):
            ranker.score(LISTS)


def test_lists_without_text_are_not_decoded() -> None:
    empty = candidates("c", [0, 0, 1], empty=3)
    attention, generative = Given("attention", {"c": [0, 0, 0]}, "mass"), parts()[1]
    (result,) = FallbackRanker(attention, generative, FallbackSettings("always")).score([empty])
    assert (result.scores.tolist(), generative.asked, result.extra) == ([0, 0, 0], [], {"fallback": 0.0})
    (result,) = EnsembleRanker(attention, generative, EnsembleSettings(0.5)).score([empty])
    assert result.scores.tolist() == [EMPTY_SCORE] * 3
    assert FallbackRanker(*parts()).score([]) == []


@given(SCORES, st.sampled_from(["log_softmax", "min_max"]))
def test_an_ensemble_at_its_ends_has_the_order_of_a_part(scores, normalization) -> None:
    masses, logs = (np.asarray(part, np.float32) for part in zip(*scores, strict=True))
    for alpha, part in ((0, masses), (1, logs)):
        found = combine(masses, logs, alpha, normalization)
        assert found.dtype == np.float32
        for i in range(len(part)):
            for j in range(len(part)):
                assert (found[i] > found[j]) == (part[i] > part[j])


def test_ensemble_scores_by_hand() -> None:
    """Shares 3/4 and 1/4, probabilities 1/5 and 4/5; min-max: 1, 0 and 0, 1."""
    masses, logs = [1.5, 0.5], np.log([0.1, 0.4])
    expected = [0.25 * np.log(0.2) + 0.75 * np.log(0.75), 0.25 * np.log(0.8) + 0.75 * np.log(0.25)]
    np.testing.assert_allclose(combine(masses, logs, 0.25, "log_softmax"), expected, rtol=1e-6)
    np.testing.assert_allclose(combine(masses, logs, 0.25, "min_max"), [0.75, 0.25], rtol=1e-6)
    np.testing.assert_allclose(combine([1, 1], [-2, -2], 0.3, "min_max"), [0, 0])
    assert np.isfinite(combine([0, 1], [-50, 0], 0.5, "log_softmax")).all()


def test_documents_that_no_beam_reached_go_by_attention() -> None:
    """The last three tie just below the worst beam."""
    masses, logs = [0.1, 0.2, 0.05, 0.4, 0.25], [-1, -2, -3, -3, -3]
    assert np.argsort(-combine(masses, logs, 0.9, "log_softmax"), kind="stable").tolist() == [0, 1, 3, 4, 2]


def test_an_ensemble_without_alpha_asks_for_one() -> None:
    with pytest.raises(UserError, match=r"has no alpha: give one in \[0, 1\]"):
        EnsembleRanker(*parts()).score(LISTS)


def both_ways(tmp_path=None, lists=LISTS):
    ranker = EnsembleRanker(*parts(), EnsembleSettings(0.5))
    return Evaluator(ranker, lists, tmp_path, measures=["P@1", "RR@10"]).run()


def test_the_best_weight_is_found_on_the_grid() -> None:
    result = both_ways()
    choice = tune_alpha(result, "P@1", "log_softmax")
    runs = {}
    for alpha in ALPHAS:
        ranker = EnsembleRanker(*parts(), EnsembleSettings(alpha))
        runs[alpha] = Evaluator(ranker, LISTS, measures=["P@1"]).run().means["P@1"]
    assert dict(choice.grid) == pytest.approx(runs)
    assert choice.grid[0][1] == pytest.approx(3 / 5)  # c's tie by order
    assert max(runs.values()) == runs[choice.alpha]
    assert all(runs[alpha] < runs[choice.alpha] for alpha in ALPHAS if alpha < choice.alpha)
    assert (choice.queries, choice.measure) == (5, "P@1")


def test_nothing_to_tune_on_is_told() -> None:
    result = both_ways(lists=[candidates("a", [0, 0])])
    with pytest.raises(UserError, match="no validation query has a relevant document"):
        tune_alpha(result, "P@1", "log_softmax")


def test_the_curve_is_what_each_threshold_gives(tmp_path) -> None:
    curves = fallback_curves(both_ways(), ["P@1", "RR@10"])
    qrels = {c.query.id: {d.id: g for d, g in zip(c.documents, c.relevance, strict=True)} for c in LISTS}
    for measure, points in curves["curves"].items():
        for point in points:
            ranker = fallback(point["threshold"], measure)
            result = Evaluator(ranker, LISTS, measures=["P@1", "RR@10"]).run()
            assert result.means == pytest.approx(point["means"])
            assert len(ranker.generative.asked) == point["decoded"]
            assert point["share"] == point["decoded"] / 5
            assert extra_totals(result.records)["fallback"]["total"] == point["decoded"]
        assert (points[0]["threshold"], points[-1]["threshold"]) == ("never", "always")
    assert curves["attention"] == pytest.approx(Evaluator(parts()[0], LISTS, measures=["P@1", "RR@10"]).run().means)
    decoded = evaluate({q: dict(zip(qrels[q], LOGS[q], strict=True)) for q in qrels}, qrels, ["P@1", "RR@10"])
    assert curves["generative"] == pytest.approx(decoded.means)
    write_fallback_curve(tmp_path, curves)
    assert (tmp_path / "fallback_curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "fallback_curve.json").read_text()) == json.loads(json.dumps(curves))
    assert curve_table(curves).to_csv().splitlines()[1].startswith("margin,never,0.0,0.6,")
    assert len((tmp_path / "fallback_curve.csv").read_text().splitlines()) == 1 + sum(
        map(len, curves["curves"].values())
    )


def test_a_curve_needs_both_readouts() -> None:
    result = Evaluator(fallback(0.5), LISTS, measures=["P@1"]).run()
    with pytest.raises(UserError, match="not every list was read both ways"):
        fallback_curves(result, ["P@1"])


def test_judged_queries_without_a_list_lower_the_curve() -> None:
    qrels = {c.query.id: {d.id: g for d, g in zip(c.documents, c.relevance, strict=True)} for c in LISTS}
    qrels["absent"] = {"x": 1}
    ranker = EnsembleRanker(*parts(), EnsembleSettings(0.5))
    result = Evaluator(ranker, LISTS, qrels=qrels, measures=["P@1"]).run()
    assert fallback_curves(result, ["P@1"])["attention"]["P@1"] == pytest.approx(3 / 6)
    assert fallback_curves(result, ["P@1"], "skip")["attention"]["P@1"] == pytest.approx(3 / 5)


def test_scores_of_the_parts_survive_a_kill(tmp_path) -> None:
    whole = both_ways(tmp_path)
    resumed = both_ways(tmp_path)
    assert resumed.counts["resumed_queries"] == 5
    assert fallback_curves(resumed, ["P@1"]) == fallback_curves(whole, ["P@1"])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["extra"] == {}


@cache
def source() -> Source:
    read = encoder()
    settings = replace(SETTINGS, score_layer=1)
    return Source(decoder(), read.tokenizer, read.template, settings, read.limits)


MODEL_LISTS = [listed(*passages(4)), listed("", *passages(3, 1), query="another river"), listed()]


@cache
def ensemble() -> EnsembleRanker:
    ranker = build_ranker(source(), EnsembleSettings(0.3, beams=None))
    assert isinstance(ranker, EnsembleRanker)
    return ranker


@cache
def ensemble_results() -> list[ListScores]:
    return ensemble().score(MODEL_LISTS)


def test_an_ensemble_of_one_model() -> None:
    """Its attention is that of a truncated model; what it decodes is in test_generative.py."""
    truncated = build_ranker(source())
    assert isinstance(truncated.model, TruncatedDecoder)
    assert isinstance(ensemble().attention.model, Decoder)
    for result, alone in zip(ensemble_results()[:2], truncated.score(MODEL_LISTS), strict=False):
        attention, generative = result.parts["attention"], result.parts["generative"]
        np.testing.assert_allclose(attention, alone.scores, rtol=0, atol=1e-5)
        text = attention > NO_MASS
        expected = combine(attention[text], generative[text], 0.3, "log_softmax")
        np.testing.assert_array_equal(result.scores[text], expected)
        assert result.scores[~text].tolist() == [EMPTY_SCORE] * (~text).sum()
        assert result.tokens == 2 * alone.tokens
    assert ensemble().with_alpha(1.0).generative is ensemble().generative


@pytest.mark.parametrize(("threshold", "part"), [("never", "attention"), ("always", "generative")])
def test_a_fallback_at_its_ends_is_a_part(threshold, part) -> None:
    ranker = FallbackRanker(ensemble().attention, ensemble().generative, FallbackSettings(threshold))
    for result, both in zip(ranker.score(MODEL_LISTS)[:2], ensemble_results(), strict=False):
        np.testing.assert_allclose(result.scores, both.parts[part], rtol=0, atol=1e-5)


def test_both_readouts_share_the_weights() -> None:
    for ranker in (ensemble(), build_ranker(source(), FallbackSettings())):
        models = ranker.attention.model, ranker.generative.model
        one, other = (jax.tree.leaves(nnx.state(model)) for model in models)
        assert [leaf.unsafe_buffer_pointer() for leaf in one] == [leaf.unsafe_buffer_pointer() for leaf in other]
        reading = ranker.generative.settings.reading
        assert reading == ReadingSettings(**{name: getattr(SETTINGS, name) for name in vars(ReadingSettings())})
        assert ranker.settings.attention == ranker.attention.settings
        assert ranker.name == ranker.settings.kind


def test_a_mesh_is_refused() -> None:
    with pytest.raises(UserError, match="ranker=fallback runs on one device"):
        build_ranker(source(), FallbackSettings(), mesh=MeshConfig(doc=1))


class ByText:
    """Scores documents by their text."""

    def __init__(self, name: str, kind: str | None, **scores: float) -> None:
        self.name, self.score_kind, self.scores, self.asked = name, kind, scores, 0
        self.settings, self.model, self.encoder = None, None, None

    def score(self, lists):
        self.asked += len(lists)
        return [
            ListScores(
                np.asarray([self.scores[d.text.split()[0]] for d in c.documents], np.float32), np.zeros(len(c), bool)
            )
            for c in lists
        ]


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """`eval_helpers.beir_folder` whose split dev wants q1's d1 and q2's d3."""
    folder = beir_folder(tmp_path / "animals")
    (folder / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td3\t1\n")
    return folder


def with_ranker(monkeypatch: pytest.MonkeyPatch, make) -> None:
    monkeypatch.setattr(suite, "open_ranker", lambda _: make())
    monkeypatch.setattr(suite, "ranker_identity", lambda ranker: {"ranker": ranker.name})


def dev(animals: Path) -> str:
    return f"validation={{split: dev, candidates: {animals / 'run.trec'}}}"


def read(path: Path):
    return json.loads(path.read_text())


def test_an_evaluation_reports_confidence(animals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cats come first: right for q1 alone. In dev the loss of q1 and q2 is least where softmax gives what it can."""
    with_ranker(monkeypatch, lambda: ByText("attention", "mass", cats=1.0, dogs=0.6, cows=0.4))
    evaluated(tmp_path / "out", *on(animals), "model=tiny", "confidence=true", dev(animals))
    folder = tmp_path / "out/eval/attention"
    report = read(folder / "confidence.json")
    assert (report["queries"], report["error_rate"]) == (2, 0.5)
    assert report["left_out"] == {"judged_without_list": 1, "without_judgement": 0}
    assert report["shares"]["mean_confidence"] == pytest.approx(0.5)
    assert (report["temperature"]["lists"], report["temperature"]["at_bound"]) == (2, False)
    assert (folder / "confidence.png").is_file()
    assert (folder / "validation/scores.jsonl").is_file()
    assert '"confidence": {"margin": ' in (folder / "per_query.jsonl").read_text()
    evaluated(tmp_path / "alone", *on(animals), "model=tiny", "confidence=true")
    report = read(tmp_path / "alone/eval/attention/confidence.json")
    assert (report["temperature"], report["calibrated"]) == (None, None)


def test_scores_without_confidence_are_a_warning(animals, tmp_path, monkeypatch, caplog) -> None:
    with_ranker(monkeypatch, lambda: ByText("ranks", None, cats=-1.0, dogs=-2.0, cows=-3.0))
    evaluated(tmp_path / "out", *on(animals), "model=tiny", "confidence=true")
    assert "ranks: no confidence.json: its scores are neither masses nor logarithms" in caplog.text
    assert not (tmp_path / "out/eval/ranks/confidence.json").exists()


def test_an_evaluation_tunes_an_ensemble(animals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention puts cats first, decoding cows: q1 (dev) wants cats, q2 (dev) cows. Both weights find one."""
    attention = ByText("attention", "mass", cats=1.0, dogs=0.5, cows=0.01)
    generative = ByText("generative", "log", cats=-4.0, dogs=-5.0, cows=-1.0)
    with_ranker(monkeypatch, lambda: EnsembleRanker(attention, generative))
    arguments = [*on(animals), "model=tiny", "ranker=ensemble", "confidence=true", dev(animals)]
    evaluated(tmp_path / "out", *arguments)
    folder = tmp_path / "out/eval/ensemble"
    tuning = read(folder / "tuning.json")
    assert tuning["grid"] == [[alpha, 0.5] for alpha in ALPHAS]
    assert (tuning["alpha"], tuning["queries"], tuning["measure"]) == (0.0, 2, "P@1")
    results = read(folder / "results.json")
    assert results["identity"]["ranker"]["alpha"] == 0.0
    assert results["metrics"]["means"]["P@1"] == pytest.approx(1 / 3)
    assert read(folder / "confidence.json")["temperature"]["lists"] == 2
    curves = read(folder / "fallback_curve.json")
    assert (curves["attention"]["P@1"], curves["generative"]["P@1"]) == (pytest.approx(1 / 3), 0.0)
    assert {f"fallback_curve.{suffix}" for suffix in ("json", "png", "md", "tex", "csv", "html")} <= {
        path.name for path in folder.iterdir()
    }
    asked = attention.asked
    evaluated(tmp_path / "out", *arguments)
    assert (asked, attention.asked) == (4, 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ranker=ensemble"], r"ranker.alpha=null is tuned on validation lists, and there are none: .*validation="),
        (["ranker=ensemble", "validation={split: test}"], "validation.split='test' is the split that is measured"),
        (["confidence=true", "validation={split: test}"], "validation.split='test' is the split that is measured"),
        (["ranker=ensemble", "ranker.alpha=2"], "config key ranker.alpha: 2.0 must be between 0 and 1"),
        (["ranker=fallback", "ranker.threshold=7"], "config key ranker.threshold: 7.0 must be between 0 and 1, or be"),
        (["ranker=fallback", "ranker.measure=sure"], "config key ranker.measure: 'sure' is none of margin"),
    ],
)
def test_bad_settings_are_told_before_anything_is_scored(animals, tmp_path, overrides, message) -> None:
    with pytest.raises(UserError, match=message):
        evaluated(tmp_path / "out", *on(animals), "model=tiny", *overrides)
    assert not (tmp_path / "out").exists()
