"""Beam search over a list's numbers against the probability of every number, and the ranker made of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from strategies import HASTE, model_jit, prompt_of, random_prompt, tiny_config, tiny_decoder
from test_attention_ranker import encoder, listed, passages, tokenizer

from blockrank.attention.visibility import BLOCKRANK, DENSE, Visibility
from blockrank.errors import UserError
from blockrank.layout import TokenLayout
from blockrank.models.beam import Trie, beam_search
from blockrank.models.decoder import Decoder
from blockrank.prompts.encode import PromptSegments
from blockrank.rankers.generative import EMPTY_SCORE, GenerativeRanker, GenerativeSettings, digit_entropy
from blockrank.rankers.reading import ReadingSettings

BATCH = [random_prompt(0, 5, [6, 3, 9], 4), random_prompt(1, 3, [4], 7)]
PATHS = [[(7, 1), (8, 3, 1), (8, 4, 1), (8, 3, 5, 1), (9, 1)], [(20, 1), (21, 2)]]


def lay_out(batch: list[PromptSegments], pattern: Visibility) -> TokenLayout:
    return TokenLayout.from_segments(batch, row_length=16, suffix_offset=None if pattern.sequential else 64)


def path_logits(model: Decoder, layout: TokenLayout, starts: np.ndarray, *, pattern: Visibility, count: int):
    states = model.states(layout, visibility=pattern, backend="reference")[0]
    at = jnp.asarray(starts)[:, None] + jnp.arange(count)
    return jax.nn.log_softmax(model.head_logits(jnp.take_along_axis(states, at[..., None], axis=1)))


compiled_logits = model_jit(path_logits, "pattern", "count")


def by_force(
    model: Decoder,
    segments: PromptSegments,
    paths: Sequence[tuple[int, ...]],
    pattern: Visibility,
    reading: ReadingSettings | None = None,
) -> np.ndarray:
    """The log-probability of each path by a pass over prompt and path, without a cache and under the dense mask."""
    longer = [
        prompt_of(segments.prefix, segments.documents, [*segments.suffix, *path], answer=len(path)) for path in paths
    ]
    layout = lay_out(longer, pattern) if reading is None else reading.lay_out(longer)
    count = max(map(len, paths))
    starts = np.full(len(paths), layout.suffix.start + len(segments.suffix) - 1)
    logp = np.asarray(compiled_logits(model, layout, starts=starts, pattern=pattern, count=count))
    return np.asarray([sum(logp[i, t, token] for t, token in enumerate(path)) for i, path in enumerate(paths)])


def search(model: Decoder, pattern: Visibility, beams: int) -> tuple[np.ndarray, np.ndarray]:
    graph, state = nnx.split(model)
    run = jax.jit(
        lambda state, layout, trie: beam_search(
            nnx.merge(graph, state), layout, trie, beams, visibility=pattern, backend="xla"
        ),
        compiler_options=HASTE,
    )
    found, logp = run(state, lay_out(BATCH, pattern), Trie.of(PATHS, 6, 5))
    return np.asarray(found), np.asarray(logp)


@pytest.mark.parametrize(
    ("pattern", "windows"), [(DENSE, None), (DENSE, (8, None)), (BLOCKRANK, None)], ids=["dense", "window", "blockrank"]
)
def test_an_exhaustive_search_gives_the_probability_of_every_path(pattern: Visibility, windows: tuple | None) -> None:
    model = tiny_decoder(tiny_config(2, windows=windows))
    found, logp = search(model, pattern, beams=6)
    for row, (segments, paths) in enumerate(zip(BATCH, PATHS, strict=True)):
        expected = by_force(model, segments, paths, pattern)
        order = np.argsort(-expected)
        assert found[row, : len(paths)].tolist() == order.tolist()
        np.testing.assert_allclose(logp[row, : len(paths)], expected[order], rtol=0, atol=2e-5)
        assert (found[row, len(paths) :] == -1).all()
        assert np.isneginf(logp[row, len(paths) :]).all()


def test_a_narrow_beam_keeps_the_best_beginnings() -> None:
    model = tiny_decoder(tiny_config(2))
    found, logp = search(model, BLOCKRANK, beams=2)
    for row, (segments, paths) in enumerate(zip(BATCH, PATHS, strict=True)):
        alive: list[tuple[int, ...]] = [()]
        for t in range(4):
            begun = sorted({path[: t + 1] for path in paths if path[:t] in {a[:t] for a in alive}})
            likely = by_force(model, segments, begun, BLOCKRANK)
            alive = [begun[i] for i in np.argsort(-likely)[:2]]
        assert [paths[i] for i in found[row] if i >= 0] == alive
        assert logp[row, 0] == pytest.approx(likely.max(), abs=2e-5)


def test_paths_that_cannot_be_told_apart_are_refused() -> None:
    for paths in ([(1,), (1, 2)], [(1, 2), (1,)], [(1,), (1,)], [()]):
        with pytest.raises(ValueError, match="path"):
            Trie.of([paths], 2, 2)


@cache
def decoder() -> Decoder:
    return tiny_decoder(tiny_config(2, vocabulary=tokenizer().vocab_size))


@cache
def ranker(beams: int | None, visibility: str = "blockrank", template: str = "paper") -> GenerativeRanker:
    reading = ReadingSettings(suffix_offset=2048, row_length=128, visibility=visibility)
    return GenerativeRanker(decoder(), encoder(template), GenerativeSettings(beams, reading))


def test_a_number_ends_where_the_template_says() -> None:
    read, candidates = encoder(), listed(*passages(12))
    paths, numbers = read.answer_paths(candidates), read.numbers(candidates)
    answers = {i: read.encode(candidates, [i]) for i in paths}
    for i, path in paths.items():
        prompt, whole = read.encode(candidates).suffix, answers[i].suffix
        assert whole[: len(prompt)].tolist() == prompt.tolist()
        assert tuple(whole[len(prompt) : len(prompt) + len(path)]) == path
        assert read.tokenizer.decode(path).startswith(str(numbers[i]))


@pytest.mark.parametrize(("visibility", "template"), [("blockrank", "paper"), ("dense", "paper"), ("dense", "release")])
def test_scores_are_the_log_probabilities_of_the_numbers(visibility: str, template: str) -> None:
    lists = [listed(*passages(12)), listed(*passages(3), query="another river"), listed()]
    generative = ranker(None, visibility, template)
    pattern = generative.reader.settings.pattern
    for candidates, result in zip(lists[:2], generative.score(lists), strict=False):
        paths = generative.encoder.answer_paths(candidates)
        segments = generative.encoder.encode(candidates)
        expected = by_force(decoder(), segments, list(paths.values()), pattern, generative.reader.settings)
        np.testing.assert_allclose(result.scores, expected, rtol=0, atol=2e-5)


def test_batch_mates_and_padding_do_not_matter() -> None:
    lists = [listed(*passages(n, seed=n), query="river " * (n + 1)) for n in (1, 4, 11)]
    together = ranker(3).score(lists)
    for candidates, result in zip(lists, together, strict=True):
        (alone,) = ranker(3).score([candidates])
        np.testing.assert_allclose(result.scores, alone.scores, rtol=0, atol=1e-5)
        assert result.extra == alone.extra


def test_what_no_beam_reached_ties_below() -> None:
    candidates = listed(*passages(5), "", passages(6)[5])
    (all_of_them,), (two,) = ranker(None).score([candidates]), ranker(2).score([candidates])
    assert two.extra["beams"] == 2
    reached, missed = np.argsort(-two.scores)[:2], np.argsort(-two.scores)[2:6]
    np.testing.assert_allclose(two.scores[reached], all_of_them.scores[reached], rtol=0, atol=1e-5)
    assert len(set(two.scores[missed].tolist())) == 1
    assert two.scores[missed[0]] < two.scores[reached[1]]
    assert two.scores[5] == all_of_them.scores[5] == EMPTY_SCORE


def test_candidate_order_does_not_matter_under_blockrank() -> None:
    texts = passages(6)
    (forward,), (backward,) = ranker(None).score([listed(*texts)]), ranker(None).score([listed(*texts[::-1])])
    np.testing.assert_allclose(forward.scores, backward.scores[::-1], rtol=0, atol=1e-5)


def test_entropy_of_digits_by_hand() -> None:
    assert digit_entropy(["12", "15", "17", "31"], 0) == pytest.approx(0.75 * np.log2(4 / 3) + 0.25 * 2)
    assert digit_entropy(["12", "15", "17", "31"], 1) == 2
    assert digit_entropy(["1", "12"], 1) == 1
    assert digit_entropy(["4", "4"], 0) == 0


def test_settings_are_checked() -> None:
    with pytest.raises(UserError, match="beams=0"):
        GenerativeSettings(beams=0)
