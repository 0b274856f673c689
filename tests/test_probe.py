"""The probes tell a fitting model from one that has the wrong tokenizer, weights or scores."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from blockrank.models.gguf import EMBEDDED_PACKAGE, embedded_model_path
from blockrank.models.loading import load_decoder
from blockrank.prompts.tokenizer import load_tokenizer
from blockrank.rankers.probe import check_language, check_ranking
from blockrank.types import CandidateList, ListScores


class FixedRanker:
    name = "fixed"

    def __init__(self, best: Callable[[CandidateList, int], float]) -> None:
        self.best = best

    def score(self, lists: list[CandidateList]) -> list[ListScores]:
        return [
            ListScores(np.array([self.best(c, i) for i in range(len(c))], np.float32), np.zeros(len(c), bool))
            for c in lists
        ]


def shared_words(candidates: CandidateList, index: int) -> float:
    query = set(candidates.query.text.lower().split())
    return len(query & set(candidates.documents[index].text.lower().replace(",", "").split()))


def test_a_ranker_that_matches_words_passes(caplog: pytest.LogCaptureFixture) -> None:
    assert check_ranking(FixedRanker(shared_words))
    assert caplog.text == ""


@pytest.mark.parametrize("score", [lambda _, i: -i, lambda c, i: -shared_words(c, i)])
def test_a_ranker_that_does_not_is_told(
    score: Callable[[CandidateList, int], float], caplog: pytest.LogCaptureFixture
) -> None:
    assert not check_ranking(FixedRanker(score))
    assert "fixed puts the relevant document first in" in caplog.text


@pytest.mark.slow
def test_real_weights_read_english_and_shuffled_ones_do_not(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip(EMBEDDED_PACKAGE)
    tokenizer = load_tokenizer(embedded_model_path())
    model = load_decoder(embedded_model_path(), dtype=jnp.float32, param_dtype=jnp.float32)
    assert check_language(model, tokenizer)
    assert caplog.text == ""
    for path, parameter in nnx.to_flat_state(nnx.state(model)):
        if "embed" in str(path):
            parameter.set_value(jax.random.permutation(jax.random.key(0), parameter.get_value(), axis=0))
    assert not check_language(model, tokenizer)
    assert "do weights, config and tokenizer belong together?" in caplog.text
