"""The ranker from texts to scores, with the real tokenizer and a tiny random decoder."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import model_jit, tiny_config, tiny_decoder

from blockrank.attention.visibility import BLOCKRANK
from blockrank.errors import UserError
from blockrank.models.decoder import Decoder
from blockrank.models.gguf import embedded_model_path
from blockrank.packing import round_up_geometric
from blockrank.prompts.encode import PromptEncoder, PromptLimits
from blockrank.prompts.template import PromptTemplate
from blockrank.prompts.tokenizer import Tokenizer, load_tokenizer
from blockrank.rankers import reading
from blockrank.rankers.attention import (
    EMPTY_SCORE,
    AttentionRanker,
    AttentionSettings,
    preset_settings,
)
from blockrank.rankers.readout import attention_scores
from blockrank.types import CandidateList, Document, ListScores, Query

TOLERANCE = 1e-5
SETTINGS = AttentionSettings(score_layer=1, suffix_offset=2048, row_length=128)
WORDS = [
    "river",
    "stone",
    "cloud",
    "engine",
    "paper",
    "market",
    "winter",
    "signal",
    "garden",
    "copper",
    "violin",
    "lemon",
]


@cache
def tokenizer() -> Tokenizer:
    try:
        return load_tokenizer(embedded_model_path())
    except UserError as error:
        pytest.skip(str(error))


@cache
def decoder() -> Decoder:
    return tiny_decoder(tiny_config(2, vocabulary=tokenizer().vocab_size))


def encoder(template: str = "paper", **limits: object) -> PromptEncoder:
    return PromptEncoder(PromptTemplate.from_yaml(template), tokenizer(), PromptLimits(**limits))


@cache
def ranker(settings: AttentionSettings = SETTINGS, **limits: object) -> AttentionRanker:
    return AttentionRanker(decoder(), encoder(**limits), settings)


def listed(*texts: str, query: str = "where does the river end") -> CandidateList:
    return CandidateList(Query("q1", query), tuple(Document(f"d{i}", text) for i, text in enumerate(texts)))


@cache
def passages(count: int, seed: int = 0) -> tuple[str, ...]:
    rng = np.random.default_rng(seed)
    return tuple(" ".join(rng.choice(WORDS, rng.integers(3, 30))) + f" {seed} {i}" for i in range(count))


def scored(ranker: AttentionRanker, *lists: CandidateList) -> list[ListScores]:
    results = ranker.score(list(lists))
    assert len(results) == len(lists)
    for candidates, result in zip(lists, results, strict=True):
        assert result.scores.shape == result.truncated.shape == (len(candidates),)
        assert result.scores.dtype == np.float32
        assert np.isfinite(result.scores).all()
    return results


def assert_same_scores(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
    assert np.argsort(actual, kind="stable").tolist() == np.argsort(expected, kind="stable").tolist()


def test_ragged_lists_score_as_they_do_alone() -> None:
    lists = [listed(*passages(n, seed=n)) for n in (0, 1, 3, 30)]
    together = scored(ranker(replace(SETTINGS, batch_tokens=1 << 20)), *lists)
    for candidates, result in zip(lists, together, strict=True):
        (alone,) = scored(ranker(), candidates)
        assert_same_scores(result.scores, alone.scores)
        assert result.tokens == alone.tokens
    assert together[0].tokens == 0
    assert [float(result.scores.sum()) for result in together[1:]] == pytest.approx([2, 2, 2], abs=TOLERANCE)


def test_empty_lists_call_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = AttentionRanker(decoder(), encoder(), SETTINGS)

    def refuse(*_: object) -> None:
        raise AssertionError("the model was called")

    monkeypatch.setattr(idle, "_score", refuse)
    assert idle.score([]) == []
    results = idle.score([listed(), listed("", " \n")])
    assert [result.scores.tolist() for result in results] == [[], [EMPTY_SCORE, EMPTY_SCORE]]


def test_documents_without_text_score_lowest_and_change_nothing() -> None:
    texts = passages(3)
    (whole,) = scored(ranker(), listed("", texts[0], "   ", texts[1], texts[2], "\n\t"))
    (kept,) = scored(ranker(), listed(*texts))
    assert whole.scores[[0, 2, 5]].tolist() == [EMPTY_SCORE] * 3
    assert_same_scores(whole.scores[[1, 3, 4]], kept.scores)
    assert whole.scores[[1, 3, 4]].min() > EMPTY_SCORE
    assert not whole.truncated.any()
    (single,) = scored(ranker(), listed("", "   ", "good text"))
    assert single.scores.tolist() == [EMPTY_SCORE, EMPTY_SCORE, pytest.approx(2, abs=TOLERANCE)]


@settings(max_examples=6, deadline=None)
@given(st.permutations(range(6)))
def test_permuting_candidates_permutes_scores(order: list[int]) -> None:
    """Numbers follow content, so that prompts hold the same documents whatever the order."""
    texts = passages(6)
    (straight,), (mixed,) = scored(ranker(), listed(*texts)), scored(ranker(), listed(*(texts[i] for i in order)))
    assert_same_scores(mixed.scores, straight.scores[order])


def test_numbers_by_position_do_depend_on_the_order() -> None:
    positional = AttentionRanker(decoder(), encoder("release"), SETTINGS)
    texts = passages(6)
    (straight,), (mixed,) = scored(positional, listed(*texts)), scored(positional, listed(*texts[::-1]))
    assert np.abs(mixed.scores - straight.scores[::-1]).max() > 10 * TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": "chunked"},
        {"row_length": 384},
        {"row_length": 160, "packing": "chunked"},
        {"attention_backend": "reference"},
        {"batch_tokens": 1},
    ],
    ids=str,
)
def test_row_length_packing_backend_and_batches_do_not_matter(changes: dict) -> None:
    lists = [listed(*passages(n, seed=n)) for n in (5, 2)]
    for other, expected in zip(
        scored(ranker(replace(SETTINGS, **changes)), *lists), scored(ranker(), *lists), strict=True
    ):
        assert_same_scores(other.scores, expected.scores)


def test_batch_size_and_batch_mates_do_not_matter() -> None:
    target = listed(*passages(4))
    (alone,) = scored(ranker(), target)
    wide = ranker(replace(SETTINGS, batch_tokens=1 << 20))
    for size, place in ((2, 1), (5, 0)):
        mates = [listed(*passages(n + 1, seed=n), query="another " * (n + 1)) for n in range(size)]
        mates[place] = target
        assert_same_scores(scored(wide, *mates)[place].scores, alone.scores)


def test_batches_hold_no_more_tokens_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    plain = reading._pad_batch
    monkeypatch.setattr(reading, "_pad_batch", lambda *x: sizes.append(plain(*x).tokens.size) or plain(*x))
    lists = [listed(*passages(n, seed=n)) for n in (3, 3, 3, 3, 3, 9, 1)]
    limit = (
        6 * AttentionRanker(decoder(), encoder(), SETTINGS).settings.lay_out([encoder().encode(lists[0])]).shape.tokens
        - 1
    )
    scored(ranker(replace(SETTINGS, batch_tokens=limit)), *lists)
    assert len(sizes) >= 2
    assert max(sizes) <= limit
    sizes.clear()
    scored(ranker(replace(SETTINGS, batch_tokens=1)), *lists[:2])
    assert len(sizes) == 2


def test_the_host_prepares_a_batch_while_the_last_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    class Encoder:
        def encode(self, candidates: CandidateList, **options: Any) -> object:
            events.append(f"encode {len(candidates)}")
            return encoder().encode(candidates, **options)

    lists = [listed(*passages(n, seed=n)) for n in (3, 4, 5)]
    expected = scored(ranker(replace(SETTINGS, batch_tokens=1)), *lists)
    one_by_one = AttentionRanker(decoder(), encoder(), replace(SETTINGS, batch_tokens=1))
    result, score = one_by_one._result, one_by_one._score
    monkeypatch.setattr(one_by_one.reader, "encoder", Encoder())
    monkeypatch.setattr(one_by_one, "_score", lambda *a: events.append("launch") or score(*a))
    monkeypatch.setattr(one_by_one, "_result", lambda c, *a: events.append(f"read {len(c)}") or result(c, *a))
    for found, known in zip(one_by_one.score(lists), expected, strict=True):
        np.testing.assert_array_equal(found.scores, known.scores)
    assert events.index("read 3") > events.index("encode 5")
    assert [e for e in events if e[:4] != "enco"] == ["launch", "launch", "read 3", "launch", "read 4", "read 5"]


def test_a_bucket_compiles_once_and_warming_up_compiles_it_ahead() -> None:
    warm = AttentionRanker(decoder(), encoder(), SETTINGS)
    lists = [listed(*passages(n, seed=n), query="river") for n in (7, 8, 8)]
    shapes = {warm.settings.lay_out([warm.encoder.encode(candidates)]).shape for candidates in lists}
    warm.warm_up(shapes)
    assert warm.compilations == len(shapes)
    for candidates in lists:
        (result,) = scored(warm, candidates)
        assert_same_scores(result.scores, scored(ranker(), candidates)[0].scores)
    assert warm.compilations == len(shapes)


def test_presets() -> None:
    paper, release = preset_settings("paper"), preset_settings("release", score_layer=1)
    assert (paper.suffix_offset, paper.signal_aggregation) == (8192, "sum")
    assert (release.suffix_offset, release.signal_aggregation, release.score_layer) == (16384, "mean", 1)
    candidates = listed(*passages(4))
    summed = scored(ranker(preset_settings("paper", score_layer=1, suffix_offset=2048, row_length=128)), candidates)[0]
    mean = scored(ranker(replace(SETTINGS, signal_aggregation="mean")), candidates)[0]
    assert float(summed.scores.sum()) == pytest.approx(2, abs=TOLERANCE)
    assert float(mean.scores.sum()) == pytest.approx(1, abs=TOLERANCE)
    np.testing.assert_allclose(summed.scores, 2 * mean.scores, rtol=0, atol=TOLERANCE)
    with pytest.raises(UserError, match="preset='papers' is unknown: choose one of paper, release"):
        preset_settings("papers")


def test_the_default_score_layer_is_at_five_eighths() -> None:
    for layers, expected in ((32, 20), (30, 18), (8, 5), (1, 0)):
        assert AttentionSettings().layer_of(tiny_config(layers)) == expected
    assert ranker().model.config.num_layers == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"visibility": "all"}, "visibility='all' is unknown: choose one of blockrank, dense"),
        ({"packing": "loose"}, "packing='loose' is unknown: choose packed or chunked"),
        ({"signal_aggregation": "max"}, "signal_aggregation='max' is unknown: choose sum or mean"),
        ({"length_normalization": 1.5}, "length_normalization=1.5 must be a number from 0 .* to 1"),
        ({"length_normalization": True}, "length_normalization=True must be a number"),
        ({"length_normalization": float("nan")}, "length_normalization=nan must be a number"),
        ({"row_length": 0}, "row_length=0 must be a whole number from 1 on"),
        ({"row_length": "64"}, "row_length='64' must be a whole number from 1 on"),
        ({"score_layer": 2.0}, "score_layer=2.0 must be a whole number from 0 on"),
        ({"score_layer": True}, "score_layer=True must be a whole number from 0 on"),
        ({"batch_tokens": -1}, "batch_tokens=-1 must be a whole number from 1 on"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        AttentionSettings(**fields)


def test_masses_over_tokens_order_documents_of_one_mass_by_length() -> None:
    candidates = listed(*passages(4))
    (whole,), (per_token,) = (scored(ranker(replace(SETTINGS, length_normalization=x)), candidates) for x in (0.0, 1.0))
    lengths = np.array([len(ids) for ids in encoder().encode(candidates).documents])
    expected = whole.scores / lengths
    np.testing.assert_allclose(per_token.scores, 2 * expected / expected.sum(), rtol=0, atol=TOLERANCE)
    with pytest.raises(UserError, match=r"length_normalization=0\.5 knows the tokens of a part.*truncate"):
        AttentionRanker(decoder(), encoder(long_documents="split"), replace(SETTINGS, length_normalization=0.5))


def test_a_score_layer_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(UserError, match="score_layer=2 is not one of the model's 2 layers"):
        AttentionRanker(decoder(), encoder(), replace(SETTINGS, score_layer=2))
    with pytest.raises(UserError, match="score_layer=0, but this model was truncated at layer 1"):
        AttentionRanker(decoder().truncate(1), encoder(), replace(SETTINGS, score_layer=0))


def test_a_truncated_model_may_be_given() -> None:
    candidates = listed(*passages(3))
    given_cut = AttentionRanker(decoder().truncate(1), encoder(), replace(SETTINGS, score_layer=None))
    assert_same_scores(scored(given_cut, candidates)[0].scores, scored(ranker(), candidates)[0].scores)


def test_another_model_scores_without_compiling_anew() -> None:
    candidates = listed(*passages(3))
    other = tiny_decoder(tiny_config(2, vocabulary=tokenizer().vocab_size), seed=1)
    switched = AttentionRanker(decoder(), encoder(), SETTINGS)
    (before,) = scored(switched, candidates)
    switched.set_model(other)
    (after,) = scored(switched, candidates)
    assert switched.compilations == 1
    assert np.abs(after.scores - before.scores).max() > 0.01
    (fresh,) = scored(AttentionRanker(other, encoder(), SETTINGS), candidates)
    assert_same_scores(after.scores, fresh.scores)


@pytest.mark.parametrize(
    ("changes", "level", "told"),
    [
        (
            {"suffix_offset": 2048},
            "INFO",
            r"positions run to 2[01]\d\d, past .*=1024: .*; ranker\.suffix_offset=2048 says",
        ),
        (
            {"visibility": "dense"},
            "WARNING",
            r"positions run to 1\d\d\d, past .*=1024: RoPE extrapolates; rank fewer or",
        ),
        ({"suffix_offset": 900}, None, ""),
    ],
    ids=["blockrank", "dense", "within"],
)
def test_positions_past_the_models_are_told_once(
    changes: dict, level: str | None, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    short = Decoder(replace(decoder().config, max_positions=1024), rngs=nnx.Rngs(0))
    pair = AttentionRanker(short, encoder(), replace(SETTINGS, **changes))
    with caplog.at_level("INFO", reading.__name__):
        scored(pair, listed(*passages(30)))
        scored(pair, listed(*passages(30)), listed(*passages(2)))
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [name for name, _ in found] == ([] if level is None else [level])
    assert all(re.search(told, text) for _, text in found)


def test_the_most_positions_of_a_shape() -> None:
    segments = [encoder().encode(listed(*passages(4)))]
    for read in (SETTINGS, replace(SETTINGS, visibility="dense")):
        layout = read.lay_out(segments, bucket=False)
        assert layout.positions.max() < read.positions(layout.shape)


def test_a_truncated_document_still_scores_and_is_flagged() -> None:
    texts = passages(3)
    long = " ".join(WORDS * 40)
    short = ranker(SETTINGS, document_tokens=100)
    (result,) = scored(short, listed(texts[0], long, *texts[1:]))
    assert result.truncated.tolist() == [False, True, False, False]
    assert result.scores[1] > 0
    (longer,) = scored(short, listed(texts[0], long + " and more", *texts[1:]))
    assert result.scores.sum() == pytest.approx(longer.scores.sum(), abs=TOLERANCE)
    assert not result.query_truncated


def test_a_long_query_is_cut_and_flagged() -> None:
    (result,) = scored(ranker(SETTINGS, query_tokens=20), listed(*passages(2), query=" ".join(WORDS * 200)))
    assert result.query_truncated
    assert float(result.scores.sum()) == pytest.approx(2, abs=TOLERANCE)


def test_parts_of_a_split_document_add_up() -> None:
    splitting = ranker(SETTINGS, document_tokens=60, long_documents="split")
    candidates = listed(passages(2)[0], " ".join(WORDS * 10), "", passages(2)[1])
    segments = splitting.encoder.encode(candidates)
    assert segments.document_index.count(1) >= 3
    layout = SETTINGS.lay_out([segments])
    options = {"visibility": BLOCKRANK, "aggregation": "sum"}
    score = model_jit(lambda model, where: attention_scores(model, where, 1, **options))
    masses = np.asarray(score(decoder(), layout))[0]
    expected = np.zeros(4)
    for index, mass in zip(segments.document_index, masses, strict=False):
        expected[index] += mass
    (result,) = scored(splitting, candidates)
    np.testing.assert_allclose(result.scores, expected, rtol=0, atol=TOLERANCE)
    assert result.scores[2] == EMPTY_SCORE
    assert float(result.scores.sum()) == pytest.approx(2, abs=TOLERANCE)
    assert not result.truncated.any()


def test_weights_that_are_not_finite_are_named() -> None:
    graph, params = nnx.split(decoder())
    broken = nnx.merge(graph, jax.tree.map(jnp.array, params))
    kernel = broken.blocks.attention.key.kernel
    kernel.set_value(kernel.get_value().at[0, 3, 2].set(jnp.nan))
    with pytest.raises(
        UserError, match=r"query 'q1': scores are not finite; parameters .*: blocks\.attention\.key\.kernel$"
    ):
        AttentionRanker(broken, encoder(), SETTINGS).score([listed(*passages(3))])


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"query '.*': document '.*' has \d+ tokens, more than a row holds: raise row_length=128"
    ):
        ranker(SETTINGS, document_tokens=None).score([listed("short", " ".join(WORDS * 40))])


def test_one_program_per_bucket() -> None:
    """50 requests of 50 lengths and many document counts."""
    fresh = AttentionRanker(decoder(), encoder(), replace(SETTINGS, batch_tokens=1))
    rng = np.random.default_rng(0)
    lists = []
    for length in range(50):
        count = int(rng.integers(1, 4))
        lists.append(listed(*passages(count, seed=length), query=" ".join(rng.choice(WORDS, 1 + length % 25))))
    buckets = {fresh.settings.lay_out([fresh.encoder.encode(candidates)]).shape for candidates in lists}
    exact = {fresh.settings.lay_out([fresh.encoder.encode(candidates)], bucket=False).shape for candidates in lists}
    scored(fresh, *lists)
    assert fresh.compilations == len(buckets)
    assert len(buckets) < len(exact) / 2
    scored(fresh, *lists[::-1])
    assert fresh.compilations == len(buckets)


def test_batch_sizes_are_bucketed_too() -> None:
    fresh = AttentionRanker(decoder(), encoder(), replace(SETTINGS, batch_tokens=1 << 20))
    candidates = listed(*passages(2))
    for size in range(1, 7):
        results = scored(fresh, *[candidates] * size)
        np.testing.assert_allclose([r.scores for r in results], [results[0].scores] * size, rtol=0, atol=1e-6)
    assert fresh.compilations == len({round_up_geometric(size) for size in range(1, 7)}) == 5


def test_inputs_are_not_changed_and_scores_repeat() -> None:
    candidates = listed(*passages(3))
    copy = replace(candidates)
    first, second = scored(ranker(), candidates)[0], scored(ranker(), candidates)[0]
    assert candidates == copy
    np.testing.assert_array_equal(first.scores, second.scores)
