"""Attention sums, measures and the search against brute force."""

from __future__ import annotations

from functools import cache, partial
from itertools import combinations
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from strategies import HASTE, model_jit, numbered_prompt, on_device, random_prompt, tiny_config, tiny_decoder

from blockrank.analysis import attention
from blockrank.analysis.attention import AttentionMap, AttentionReader
from blockrank.analysis.measures import ListMeasure
from blockrank.analysis.readings import ListReading, SignalReader
from blockrank.analysis.search import FOLDS, Readout, Search, resampled_wins
from blockrank.analysis.study import suffix_masses
from blockrank.attention.visibility import BLOCKRANK, DENSE, Tokens, Visibility
from blockrank.errors import UserError
from blockrank.evaluation.metrics import evaluate
from blockrank.evaluation.ranking import rerank
from blockrank.layout import PAD, PREFIX, SUFFIX, TokenLayout
from blockrank.models.decoder import Decoder
from blockrank.models.gguf import embedded_model_path
from blockrank.prompts.encode import PromptEncoder, PromptLimits
from blockrank.prompts.template import PromptTemplate
from blockrank.prompts.tokenizer import Tokenizer, load_tokenizer
from blockrank.rankers.attention import AttentionRanker, AttentionSettings
from blockrank.types import CandidateList, Document, Query

LAYERS = 3
PROMPT = random_prompt(3, 5, [4, 6, 1, 3], 4)


@pytest.fixture(autouse=True)
def in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run once: they are compiled without optimisation."""
    monkeypatch.setattr(jax, "jit", partial(jax.jit, compiler_options=HASTE))


@cache
def tiny() -> Decoder:
    """The second layer has a window, which dense attention keeps."""
    return tiny_decoder(tiny_config(LAYERS, windows=(None, 6, None)))


def lay_out(visibility: Visibility) -> TokenLayout:
    offset = None if visibility.sequential else 64
    return TokenLayout.from_segments([PROMPT], row_length=16, suffix_offset=offset)


@cache
def brute_force(visibility: Visibility) -> tuple[TokenLayout, np.ndarray]:
    """All attention [L, heads, T, T] in float64, from the states that enter each layer and the dense mask."""
    layout, model = lay_out(visibility), tiny()

    def queries_and_keys(model: Decoder, where: TokenLayout) -> Any:
        def look(block: Any, states: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
            normed = block.attention_norm(states)
            return block.attention.queries(normed, where.positions), block.attention.keys(normed, where.positions)

        return model.observe(where, look, visibility=visibility, backend="reference")

    found = []
    for layer, (q, k) in enumerate(zip(*model_jit(queries_and_keys)(model, on_device(layout)), strict=True)):
        q, k = np.asarray(q, np.float64)[0], np.asarray(k, np.float64)[0]
        window = model.config.windows[layer] if visibility.sequential else None
        mask = np.asarray(visibility.materialize(Tokens.of(layout), window))[0]
        logits = np.where(mask, np.einsum("tkgh,skh->kgts", q, k) / np.sqrt(q.shape[-1]), -np.inf)
        weights = np.exp(logits - np.where(mask.any(1), logits.max(-1), 0.0)[..., None])
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
        found.append(weights.reshape(-1, *mask.shape))
    return layout, np.stack(found)


def parts(layout: TokenLayout) -> list[np.ndarray]:
    segments = np.asarray(layout.segment_ids)[0]
    return [segments == part for part in (PREFIX, *range(len(PROMPT.documents)), SUFFIX)]


@pytest.mark.parametrize("visibility", [DENSE, BLOCKRANK], ids=lambda v: v.name)
def test_attention_per_part_equals_the_sums_of_all_attention(
    visibility: Visibility, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, weights = brute_force(visibility)
    where, mean = parts(layout), weights.mean(axis=1)
    monkeypatch.setattr(attention, "MAX_TILE_LOGITS", 5 * 4 * layout.shape.tokens)  # five queries a tile
    reader = AttentionReader(tiny(), visibility)
    found = reader.map(layout)
    assert found.tokens.tolist() == [5, 4, 6, 1, 3, 4]
    for i, rows in enumerate(where):
        for j, keys in enumerate(where):
            expected = mean[:, rows][:, :, keys].sum(axis=2).mean(axis=1)
            np.testing.assert_allclose(found.weights[:, i, j], expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.weights.sum(axis=2), 1, atol=1e-5)
    np.testing.assert_allclose(reader.weights(layout, 1), weights[1], rtol=0, atol=1e-6)
    documents = np.any(where[1:-1], axis=0)
    own = sum(mean[:, rows][:, :, rows].sum(axis=(1, 2)) for rows in where[1:-1])
    prefix = mean[:, documents][:, :, where[0]].sum(axis=(1, 2))
    others = mean[:, documents][:, :, documents].sum(axis=(1, 2)) - own
    expected = np.stack([prefix, own, others], axis=1) / documents.sum()
    np.testing.assert_allclose(found.document_shares(), expected, rtol=0, atol=1e-6)
    assert (others.max() > 1) == (visibility is DENSE)
    np.testing.assert_allclose(found.mean(1, 2), found.weights[1:].mean(axis=0))


def test_what_attention_maps_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, reader = lay_out(DENSE), AttentionReader(tiny(), DENSE)
    with pytest.raises(UserError, match="layers 3 to 3 are not among the model's 3 layers"):
        reader.weights(layout, 3)
    with pytest.raises(UserError, match="layers 2 to 1 are not"):
        AttentionMap(np.zeros((3, 3, 3)), np.ones(3, int)).mean(2, 1)
    with pytest.raises(UserError, match="attention maps are of one list, not 2"):
        reader.map(TokenLayout.from_segments([PROMPT] * 2, row_length=16, suffix_offset=None))
    monkeypatch.setattr(attention, "MAX_WEIGHTS", 100)
    with pytest.raises(UserError, match="take a shorter list, or the sums per part"):
        reader.weights(layout, 0)


def test_each_token_has_the_part_it_belongs_to() -> None:
    layout = TokenLayout.from_segments([numbered_prompt(2, [1, 2], 2)], row_length=4, suffix_offset=9, bucket=False)
    columns = np.asarray(attention.parts_of(layout))[0]
    segments = layout.segment_ids[0]
    assert {s: set(columns[segments == s].tolist()) for s in (PREFIX, 0, 1, SUFFIX, PAD)} == {
        PREFIX: {0},
        0: {1},
        1: {2},
        SUFFIX: {3},
        PAD: {4},
    }
    assert np.asarray(attention.part_tokens(layout)).tolist() == [[2, 1, 2, 2]]


@hypothesis_settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_measures_equal_those_of_runs(seed: int, n: int) -> None:
    """Ties, documents without text, grades above 1, relevant documents that the list lacks."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 3, (2, 3, n)).astype(np.float32)
    empty = rng.random(n) < 0.2
    scores[..., empty] = 0
    grades, absent = rng.integers(0, 3, n), int(rng.integers(0, 3))
    documents = tuple(Document(f"d{i:02}", "" if empty[i] else "text") for i in range(n))
    qrels = {"q": {**{f"d{i:02}": int(g) for i, g in enumerate(grades)}, "elsewhere": absent}}
    ideal = tuple(sorted((int(g) for g in (*grades, absent) if g), reverse=True))
    names = ["P@1", "P@5", "RR", "RR@10", "nDCG", "nDCG@3"]
    for place in np.ndindex(2, 3):
        run = {"q": rerank(CandidateList(Query("q", "x"), documents), scores[place]).scores}
        expected = evaluate(run, qrels, names)
        for name in names:
            found = ListMeasure.parse(name).of(scores, grades, ~empty, ideal)
            assert found.shape == (2, 3)
            assert found[place] == pytest.approx(expected[name], abs=1e-12), name


@pytest.mark.parametrize("name", ["AP", "R@10", "RR(rel=2)", "nDCG(dcg='exp-log2')@10", "Success@1"])
def test_measures_that_the_search_does_not_know_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"the analysis knows P@k, RR@k and nDCG@k"):
        ListMeasure.parse(name)


def readings(queries: int, layers: int = 3, tokens: int = 4, documents: int = 5, seed: int = 0) -> list[ListReading]:
    rng = np.random.default_rng(seed)
    found = []
    for query in range(queries):
        grades = np.zeros(documents, int)
        grades[rng.integers(documents)] = 1
        masses = rng.random((layers, tokens, documents)).astype(np.float32)
        masses[1, 2] += 0.5 * grades
        masses[1, 0] += 0.4 * grades
        lengths = rng.integers(1, 9, documents).astype(np.float32)
        found.append(ListReading(f"q{query}", masses, lengths, np.ones(documents, bool), grades, (1,)))
    return found


def reciprocal_rank(scores: np.ndarray, grades: np.ndarray) -> float:
    return 1 / (1 + int((scores > scores[grades.argmax()]).sum()))


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_the_search_is_brute_force_over_all_readouts(exponent: float) -> None:
    lists = readings(12)
    search = Search(lists, "RR@10", exponent=exponent, missing=2)
    assert search.queries == 14

    def mean(layer: int, tokens: tuple[int, ...]) -> float:
        found = [reciprocal_rank(r.masses[layer, list(tokens)].sum(0) / r.lengths**exponent, r.grades) for r in lists]
        return sum(found) / 14

    singles = {(layer, token): mean(layer, (token,)) for layer in range(3) for token in range(4)}
    for (layer, token), value in singles.items():
        assert search.singles[:, layer, token].mean() == pytest.approx(value, abs=1e-6)
    layer, token = max(singles, key=lambda cell: (round(singles[cell], 9), -cell[0], -cell[1]))
    assert search.choose(1) == Readout(layer, (token,))
    pairs = {pair: mean(layer, pair) for pair in combinations(range(4), 2) if token in pair}
    best = max(pairs, key=lambda pair: round(pairs[pair], 9))
    expected = best if pairs[best] > singles[layer, token] + 1e-9 else (token,)
    assert search.choose(2) == Readout(layer, expected)
    assert search.values(Readout(2, (1, 3))).mean() == pytest.approx(mean(2, (1, 3)), abs=1e-6)
    np.testing.assert_allclose(search.layer_values((0, 2)).mean(0), [mean(i, (0, 2)) for i in range(3)], atol=1e-6)


def test_a_finding_is_cross_validated_and_tested_against_the_present_readout() -> None:
    search = Search(readings(40), "P@1")
    present = Readout(0, (0, 1))
    finding = search.find(present, samples=300, seed=4)
    order = np.random.default_rng(4).permutation(40)
    expected = np.zeros(40)
    for fold in np.array_split(order, FOLDS):
        chosen = search.choose(2, np.setdiff1d(np.arange(40), fold))
        expected[fold] = search.values(chosen)[fold]
    assert finding.best.layer == 1
    assert finding.cross_validated is not None
    assert finding.difference is not None
    assert finding.p_value is not None
    assert finding.cross_validated.mean == pytest.approx(expected.mean())
    assert finding.difference.mean == pytest.approx((expected - search.values(present)).mean())
    assert finding.is_better
    assert finding.p_value <= 0.05
    worse = search.find(finding.best, samples=300, seed=4)
    assert not worse.is_better
    assert sum(finding.resampled_wins.values()) == pytest.approx(1)
    alone = Search(readings(1), "P@1").find(present, samples=10)
    assert (alone.cross_validated, alone.difference, alone.is_better) == (None, None, False)
    with pytest.raises(UserError, match="nothing to search on"):
        Search([], "P@1")


def test_how_often_a_token_wins_by_hand() -> None:
    """Two queries: the first cell is best for one, the second for the other; a sample with both is a tie."""
    values = np.zeros((2, 1, 3))
    values[0, 0, 0] = values[1, 0, 1] = 1
    wins = resampled_wins(values, 4000, 0)
    assert wins == {(0, 0): pytest.approx(0.5, abs=0.03), (0, 1): pytest.approx(0.5, abs=0.03)}


@cache
def tokenizer() -> Tokenizer:
    try:
        return load_tokenizer(embedded_model_path())
    except UserError as error:
        pytest.skip(str(error))


WORDS = ("river", "stone", "cloud", "engine", "paper", "market", "winter")


def listed(query: str, *texts: str) -> CandidateList:
    return CandidateList(Query(query, f"what of {query}"), tuple(Document(f"d{i}", t) for i, t in enumerate(texts)))


def test_readings_are_the_rankers_scores_at_every_layer_and_token() -> None:
    """Long documents in parts, documents without text, and a model that takes another's place."""
    config = tiny_config(2, vocabulary=tokenizer().vocab_size)
    limits = PromptLimits(document_tokens=24, long_documents="split")
    encoder = PromptEncoder(PromptTemplate.from_yaml("brief"), tokenizer(), limits)
    settings = AttentionSettings(score_layer=1, suffix_offset=512, row_length=32)
    lists = [listed("a", "river stone", "", " ".join(WORDS * 3)), listed("b", "cloud", "engine paper")]
    qrels = {"a": {"d0": 1, "x": 2}, "b": {"d1": 0}, "c": {"d": 1}}
    reader = SignalReader(tiny_decoder(config, seed=5), encoder, settings)
    reader.set_model(model := tiny_decoder(config))
    found = reader.read([*lists, listed("unjudged", "x")], qrels)
    assert [reading.query_id for reading in found] == ["a", "b"]
    assert (found[0].ideal, found[1].ideal) == ((2, 1), ())
    assert found[0].readable.tolist() == [True, False, True]
    assert found[0].grades.tolist() == [1, 0, 0]
    segments = encoder.encode(lists[0])
    assert len(segments.documents) == 3 + 1
    assert found[0].lengths.tolist() == [len(segments.documents[0]), 0, sum(map(len, segments.documents[1:]))]
    present = [reader.tokens.index(token) for token in reader.present]
    expected = AttentionRanker(model, encoder, settings).score(lists)
    for reading, result in zip(found, expected, strict=True):
        np.testing.assert_allclose(reading.masses[1, present].sum(axis=0), result.scores, rtol=0, atol=1e-5)
        np.testing.assert_allclose(reading.masses.sum(axis=2), 1, rtol=0, atol=1e-5)
    masses, texts, places = suffix_masses(model, encoder, settings, lists[1], 1)
    assert places == [0, 1]
    assert [texts[i] for i in encoder.encode(lists[1]).signals] == [":", " ['"]
    where = list(encoder.encode(lists[1]).signals)
    np.testing.assert_allclose(masses[where].sum(axis=0), expected[1].scores, rtol=0, atol=1e-5)
