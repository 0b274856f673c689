"""Scores from attention: hand-known masses, and what scores must not depend on."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SHAPE, model_jit, numbered_prompt, on_device, random_prompt, tiny_config, tiny_decoder

from blockrank.attention.visibility import BLOCKRANK
from blockrank.layout import TokenLayout
from blockrank.models.decoder import Decoder
from blockrank.prompts.encode import PromptSegments
from blockrank.rankers.readout import (
    attention_scores,
    document_mass,
    gather_suffix,
    layer_scores,
    read_scores,
    signal_masses,
)

LAYER = 2
TOLERANCE = 1e-5
PROMPT = random_prompt(0, 6, [5, 3, 7, 10, 1], 5)


@cache
def decoder() -> Decoder:
    return tiny_decoder(tiny_config(3))


def _score(model, layout, *, layer=LAYER, aggregation="sum", exponent=0.0):
    options = {"aggregation": aggregation, "length_normalization": exponent}
    return attention_scores(model, layout, layer, visibility=BLOCKRANK, **options)


score = model_jit(_score, "layer", "aggregation", "exponent")


def scores_of(
    batch: list[PromptSegments], aggregation: str = "sum", exponent: float = 0.0, **options: object
) -> np.ndarray:
    layout = TokenLayout.from_segments(batch, **{"row_length": 16, "suffix_offset": 64, "shape": SHAPE, **options})
    return np.asarray(score(decoder(), layout, aggregation=aggregation, exponent=exponent))


def permuted(prompt: PromptSegments, order: list[int]) -> PromptSegments:
    return replace(prompt, documents=tuple(prompt.documents[i] for i in order))


@cache
def expected() -> np.ndarray:
    return scores_of([PROMPT])[0, : len(PROMPT.documents)]


def test_the_model_is_not_indifferent() -> None:
    """Scores differ far more than the tolerances of the tests below."""
    ordered = np.sort(expected())
    assert np.diff(ordered).min() > 1e-3
    assert ordered[-1] > 0.5


@settings(max_examples=8, deadline=None)
@given(st.permutations(range(5)))
def test_permuting_documents_permutes_scores(order: list[int]) -> None:
    scores = scores_of([permuted(PROMPT, order)])[0, :5]
    np.testing.assert_allclose(scores, expected()[order], rtol=0, atol=TOLERANCE)
    assert np.argsort(scores).tolist() == np.argsort(expected()[order]).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"packing": "chunked", "row_length": 10},
        {"packing": "chunked", "row_length": 128},
        {"row_length": 10, "bucket": False},
        {"row_length": 26, "bucket": False},
        {"row_length": 128},
    ],
    ids=str,
)
def test_row_length_packing_and_padding_do_not_matter(options: dict) -> None:
    scores = scores_of([PROMPT], **options, shape=None)[0, :5]
    np.testing.assert_allclose(scores, expected(), rtol=0, atol=TOLERANCE)
    assert np.argsort(scores).tolist() == np.argsort(expected()).tolist()


def test_batch_mates_and_batch_size_do_not_matter() -> None:
    mates = [random_prompt(seed, 8, [10, 9, 8, 7], 8) for seed in range(1, 7)]
    for batch, place in (([mates[0], PROMPT], 1), ([PROMPT, *mates], 0), ([PROMPT] * 2, 1)):
        scores = scores_of(batch)[place, :5]
        np.testing.assert_allclose(scores, expected(), rtol=0, atol=TOLERANCE)


def test_scores_sum_to_the_number_of_signals() -> None:
    """`sum` (the paper) to the signals of each list, `mean` (the released code) to 1; absent slots are 0."""
    batch = [PROMPT, random_prompt(1, 4, [3, 2], 6, signals=(-1,)), random_prompt(2, 4, [], 6)]
    layout = TokenLayout.from_segments(batch, row_length=16, suffix_offset=64, shape=SHAPE)
    summed, mean = (np.asarray(score(decoder(), layout, aggregation=name)) for name in ("sum", "mean"))
    np.testing.assert_allclose(summed.sum(axis=1), [2, 1, 0], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(mean.sum(axis=1), [1, 1, 0], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(summed, mean * [[2], [1], [1]], rtol=0, atol=TOLERANCE)
    assert not summed[~np.asarray(layout.document_mask)].any()
    assert (summed >= 0).all()


def test_an_answer_behind_the_signals_changes_nothing() -> None:
    """Training reads the same scores as inference: signals do not see the label tokens."""
    answered = replace(PROMPT, suffix=np.append(PROMPT.suffix, [7, 8]).astype(np.int32), answer_start=5)
    np.testing.assert_allclose(scores_of([answered])[0, :5], expected(), rtol=0, atol=TOLERANCE)


def test_every_layer_in_one_pass_equals_each_layer_alone() -> None:
    layout = on_device(TokenLayout.from_segments([PROMPT], row_length=16, suffix_offset=64, shape=SHAPE))
    options = {"visibility": BLOCKRANK, "aggregation": "mean"}
    together = model_jit(lambda model, where: layer_scores(model, where, **options))(decoder(), layout)
    assert together.shape == (3, 1, SHAPE.documents)
    for layer in range(3):
        alone = score(decoder(), layout, layer=layer, aggregation="mean")
        np.testing.assert_allclose(together[layer], alone, rtol=0, atol=1e-6)
    cut = score(decoder().truncate(LAYER), layout, layer=LAYER, aggregation="mean")
    np.testing.assert_allclose(together[LAYER], cut, rtol=0, atol=1e-6)


def test_no_documents_at_all() -> None:
    layout = TokenLayout.from_blocks([[[1, 2, 3], [4, 5, 6]]])
    assert score(decoder(), layout).shape == (1, 0)


def test_equal_logits_give_each_document_its_share_of_tokens() -> None:
    """q = 0: 3, 1 and 4 of 8 tokens, two signals; padding gets nothing."""
    segments = jnp.asarray([[0, 0, 0, -3, 2, 2, 2, 2, 1, -3]])
    q, k = jnp.zeros((1, 2, 2, 3, 4)), jnp.ones((1, 10, 2, 4))
    both = jnp.ones((1, 2), bool)
    mass = partial(document_mass, q, k, segments, num_documents=4)
    np.testing.assert_allclose(mass(both, aggregation="sum"), [[0.75, 0.25, 1.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(mass(both, aggregation="mean"), [[0.375, 0.125, 0.5, 0.0]], rtol=1e-6)
    one = jnp.asarray([[True, False]])
    np.testing.assert_allclose(mass(one, aggregation="sum"), [[0.375, 0.125, 0.5, 0.0]], rtol=1e-6)
    none = jnp.zeros((1, 2), bool)
    np.testing.assert_array_equal(mass(none, aggregation="mean"), [[0, 0, 0, 0]])


def test_masses_by_hand() -> None:
    """Two heads of one kv head, H = 4, so logits are halved. Head 0: weights 1 : 3 : 4; head 1 the same squared."""
    odds = np.log([1.0, 3.0, 4.0])
    k = jnp.zeros((1, 3, 1, 4)).at[0, :, 0, 0].set(odds)
    q = jnp.zeros((1, 1, 1, 2, 4)).at[0, 0, 0, :, 0].set(jnp.asarray([2.0, 4.0]))
    mass = document_mass(q, k, jnp.asarray([[0, 0, 1]]), jnp.ones((1, 1), bool), 2, "sum")
    first = (4 / 8 + 10 / 26) / 2
    np.testing.assert_allclose(mass, [[first, 1 - first]], rtol=1e-6)


@pytest.mark.parametrize(("exponent", "odds"), [(1.0, [1, 1, 1, 0]), (0.5, [3**0.5, 1, 2, 0])])
def test_masses_over_tokens_by_hand(exponent: float, odds: list[float]) -> None:
    """q = 0: masses are 3 : 1 : 4, as the tokens are; their sum stays that of two signals."""
    segments = jnp.asarray([[0, 0, 0, -3, 2, 2, 2, 2, 1, -3]])
    q, k, both = jnp.zeros((1, 2, 2, 3, 4)), jnp.ones((1, 10, 2, 4)), jnp.ones((1, 2), bool)
    mass = document_mass(q, k, segments, both, 4, "sum", length_normalization=exponent)
    np.testing.assert_allclose(mass, [2 * np.array(odds) / sum(odds)], rtol=1e-6)
    nothing = document_mass(q, k, jnp.full((1, 10), -3), both, 4, "sum", length_normalization=exponent)
    np.testing.assert_array_equal(nothing, [[0, 0, 0, 0]])


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_scores_over_tokens_are_the_masses_over_the_documents_lengths(aggregation: str) -> None:
    batch = [PROMPT, random_prompt(1, 4, [3, 2], 6, signals=(-1,)), random_prompt(2, 4, [], 6)]
    whole = scores_of(batch, aggregation=aggregation)
    lengths = np.array([[len(d) for d in p.documents] + [1] * (6 - len(p.documents)) for p in batch])
    for exponent in (0.5, 1.0):
        scores = scores_of(batch, aggregation=aggregation, exponent=exponent)
        weighted = whole / lengths**exponent
        expected = weighted * whole.sum(1, keepdims=True) / np.maximum(weighted.sum(1, keepdims=True), 1e-9)
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)
        assert np.abs(scores - whole).max() > 0.05


def test_scores_of_whole_documents_need_no_lengths() -> None:
    """With the exponent 0 the program is the one without it, so scores are the same to the bit."""
    layout = on_device(TokenLayout.from_segments([PROMPT], row_length=16, suffix_offset=64, shape=SHAPE))
    states = jnp.zeros((1, SHAPE.tokens, 32))

    def traced(*options: float) -> str:
        return str(jax.make_jaxpr(lambda s: read_scores(decoder().probe(LAYER), s, layout, "sum", *options))(states))

    assert traced() == traced(0.0) != traced(1.0)


def test_the_masses_of_single_signals_add_up() -> None:
    batch = [PROMPT, random_prompt(1, 4, [3, 2], 6, signals=(-1,))]
    layout = on_device(TokenLayout.from_segments(batch, row_length=16, suffix_offset=64, shape=SHAPE))
    states = model_jit(lambda m, where: m.states_at(where, LAYER, visibility=BLOCKRANK))(decoder(), layout)
    masses = np.asarray(signal_masses(decoder().probe(LAYER), states, layout))
    assert masses.shape == (2, 2, SHAPE.documents)
    np.testing.assert_allclose(masses.sum(axis=1), score(decoder(), layout), rtol=0, atol=1e-6)
    np.testing.assert_allclose(masses.sum(axis=2), [[1, 1], [1, 0]], rtol=0, atol=1e-6)
    assert np.abs(masses[0, 0] - masses[0, 1]).max() > 1e-3
    for signal, place in enumerate((-2, -1)):
        one = replace(PROMPT, signals=(len(PROMPT.suffix) + place,))
        np.testing.assert_allclose(masses[0, signal], scores_of([one])[0], rtol=0, atol=1e-6)


def test_gather_suffix_reads_from_the_suffix() -> None:
    layout = TokenLayout.from_segments([numbered_prompt(3, [4], 4)] * 2, row_length=8, bucket=False)
    picked = gather_suffix(jnp.asarray(layout.tokens), layout, jnp.asarray([[0, 3], [-1, 1]]))
    assert picked.tolist() == [[8, 11], [8, 9]]
    states = jnp.asarray(layout.tokens)[..., None] * jnp.asarray([1, 10])
    assert gather_suffix(states, layout, jnp.asarray([[3], [2]])).tolist() == [[[11, 110]], [[10, 100]]]


def test_scores_are_float32_for_bfloat16_states() -> None:
    q, k = jnp.ones((1, 2, 1, 2, 4), jnp.bfloat16), jnp.ones((1, 4, 1, 4), jnp.bfloat16)
    mass = document_mass(q, k, jnp.asarray([[0, 0, 1, -3]]), jnp.ones((1, 2), bool), 2, "sum")
    assert mass.dtype == jnp.float32
    np.testing.assert_allclose(mass, [[4 / 3, 2 / 3]], rtol=1e-6)


def test_gradients_of_a_batch_do_not_mix_lists() -> None:
    batch = [PROMPT, random_prompt(9, 5, [4, 6], 4)]
    layout = on_device(TokenLayout.from_segments(batch, row_length=16, suffix_offset=64, shape=SHAPE))
    states = decoder().embed(layout.tokens, jnp.float32)

    @jax.jit
    def first(states):
        return read_scores(decoder().probe(LAYER), states, layout, "sum")[0, 0]

    gradient = np.asarray(jax.grad(first)(states))
    signals = np.zeros(SHAPE.tokens, bool)
    signals[layout.suffix] = np.isin(np.arange(SHAPE.suffix), layout.signals[0])
    read = signals | (np.asarray(layout.segment_ids[0]) >= 0)
    assert gradient[0, read].any(axis=-1).all()
    assert not gradient[0, ~read].any(), "only signals and documents are read"
    assert not gradient[1].any()
