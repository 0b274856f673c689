"""Losses against values worked out by hand, and the whole objective against the whole logits."""

from __future__ import annotations

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import HASTE, model_jit, on_device, random_prompt, tiny_config, tiny_decoder

from blockrank.attention.visibility import BLOCKRANK, PATTERNS
from blockrank.errors import UserError
from blockrank.layout import TokenLayout
from blockrank.losses import Objective, TrainingBatch, first_is_positive, info_nce, next_token_loss, ranking_loss
from blockrank.models.decoder import Decoder
from blockrank.models.loading import flat_parameters
from blockrank.rankers.readout import attention_scores

LOG2, LOG3 = math.log(2), math.log(3)
LAYER = 1


def nce(scores: list, positive: list, present: list | None = None, temperature: float = 1.0) -> tuple[float, int]:
    known = np.ones_like(positive, bool) if present is None else np.asarray(present, bool)
    loss, count = info_nce(jnp.asarray(scores), jnp.asarray(positive, bool), jnp.asarray(known), temperature)
    return float(loss), int(count)


def test_info_nce_with_one_positive() -> None:
    """Odds 1 : 2 : 3, so -log of 1/6, 2/6 and 3/6."""
    scores = [[0.0, LOG2, LOG3]]
    for positive, expected in (([1, 0, 0], math.log(6)), ([0, 1, 0], LOG3), ([0, 0, 1], LOG2)):
        assert nce(scores, [positive]) == (pytest.approx(expected, rel=1e-6), 1)


def test_info_nce_divides_by_the_temperature() -> None:
    """Scores 0 and 0.05 log 3 at temperature 0.05: odds 1 : 3."""
    assert nce([[0.0, 0.05 * LOG3]], [[0, 1]], temperature=0.05)[0] == pytest.approx(math.log(4 / 3), rel=1e-5)


def test_info_nce_sums_several_positives_inside_the_logarithm() -> None:
    """Odds 1 : 2 : 3: (1 + 3) / 6 are positive."""
    assert nce([[0.0, LOG2, LOG3]], [[1, 0, 1]])[0] == pytest.approx(math.log(6 / 4), rel=1e-6)
    assert nce([[0.0, LOG2, LOG3]], [[1, 1, 1]])[0] == pytest.approx(0, abs=1e-6)


def test_a_list_without_a_positive_is_masked_and_counted() -> None:
    loss, count = nce([[0.0, LOG3], [5.0, 1.0]], [[0, 1], [0, 0]])
    assert (loss, count) == (pytest.approx(math.log(4 / 3), rel=1e-6), 1)
    assert nce([[1.0, 2.0]], [[0, 0]]) == (0.0, 0)


def test_padding_is_no_candidate_and_no_positive() -> None:
    scores, present = [[0.0, LOG3, 50.0]], [[1, 1, 0]]
    assert nce(scores, [[0, 1, 0]], present)[0] == pytest.approx(math.log(4 / 3), rel=1e-6)
    assert nce(scores, [[0, 0, 1]], present) == (0.0, 0)
    assert nce([[0.0, 0.0]], [[1, 1]], [[0, 0]]) == (0.0, 0)


def test_the_mean_is_over_lists_with_a_positive() -> None:
    scores = [[0.0, LOG3], [0.0, LOG3], [9.0, 9.0]]
    loss, count = nce(scores, [[0, 1], [1, 0], [0, 0]])
    assert (loss, count) == (pytest.approx((math.log(4 / 3) + math.log(4)) / 2, rel=1e-6), 2)


def test_extreme_scores_stay_finite() -> None:
    assert nce([[0.0, 2.0]], [[1, 0]], temperature=1e-3)[0] == pytest.approx(2000, rel=1e-6)
    assert nce([[0.0, 2.0]], [[0, 1]], temperature=1e-3)[0] == 0


def test_the_gradient_of_info_nce_is_the_softmax_less_the_share_of_positives() -> None:
    """Odds 1 : 2 : 3 with the first and third positive: p = (1, 2, 3)/6, shares (1, 0, 3)/4."""
    present = jnp.asarray([[True, True, True, False], [True, True, False, False]])
    positive = jnp.asarray([[True, False, True, False], [False, False, False, False]])
    scores = jnp.asarray([[0.0, LOG2, LOG3, 7.0], [1.0, 2.0, 3.0, 4.0]])
    gradient = jax.grad(lambda s: info_nce(s, positive, present, 1.0)[0])(scores)
    np.testing.assert_allclose(gradient[0], [1 / 6 - 1 / 4, 2 / 6, 3 / 6 - 3 / 4, 0], rtol=0, atol=1e-6)
    assert not np.any(gradient[1])
    assert not np.any(jax.grad(lambda s: info_nce(s, positive & False, present, 1.0)[0])(scores))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=6), st.integers(0, 5), st.floats(-2, 2, width=32))
def test_info_nce_ignores_a_common_shift(scores: list[float], place: int, shift: float) -> None:
    positive = np.eye(len(scores), dtype=bool)[[place % len(scores)]]
    moved, _ = nce([[s + shift for s in scores]], positive)
    assert moved == pytest.approx(nce([scores], positive)[0], abs=1e-4)
    assert moved >= 0


def test_next_token_loss_by_hand() -> None:
    """Probabilities 1/4 and 3/4 of two tokens: targets 0, 1 and a masked one."""
    logits = jnp.broadcast_to(jnp.asarray([0.0, LOG3]), (2, 2, 2))
    targets = jnp.asarray([[0, 1], [1, 0]])
    mask = jnp.asarray([[True, True], [True, False]])
    expected = (math.log(4) + 2 * math.log(4 / 3)) / 3
    assert float(next_token_loss(logits, targets, mask)) == pytest.approx(expected, rel=1e-6)
    assert float(next_token_loss(logits, targets, mask & False)) == 0


def test_next_token_loss_of_uniform_logits_is_log_of_the_vocabulary() -> None:
    loss = next_token_loss(jnp.zeros((1, 3, 50)), jnp.asarray([[1, 2, 49]]), jnp.ones((1, 3), bool))
    assert float(loss) == pytest.approx(math.log(50), rel=1e-6)


def test_masked_answer_tokens_get_no_gradient() -> None:
    logits, targets = jnp.zeros((1, 2, 3)), jnp.asarray([[0, 2]])
    gradient = jax.grad(lambda x: next_token_loss(x, targets, jnp.asarray([[True, False]])))(logits)
    np.testing.assert_allclose(gradient[0], [[1 / 3 - 1, 1 / 3, 1 / 3], [0, 0, 0]], rtol=1e-6)


def test_first_is_positive() -> None:
    scores = jnp.asarray([[1.0, 2.0, 9.0], [3.0, 1.0, 0.0], [5.0, 1.0, 0.0]])
    present = jnp.asarray([[True, True, False], [True] * 3, [True] * 3])
    positive = jnp.asarray([[False, True, False], [False, True, False], [False] * 3])
    assert float(first_is_positive(scores, positive, present)) == 0.5
    assert float(first_is_positive(scores, positive & False, present)) == 0


PROMPTS = [random_prompt(0, 6, [5, 3, 7], 8, answer=3), random_prompt(1, 4, [6, 2], 6, answer=2)]
POSITIVE = np.asarray([[False, True, False], [True, False, False]])


@cache
def decoder() -> Decoder:
    return tiny_decoder(tiny_config(3, tie_embeddings=False))


@cache
def batch(sequential: bool = False) -> TrainingBatch:
    layout = TokenLayout.from_segments(PROMPTS, row_length=16, suffix_offset=None if sequential else 64, bucket=False)
    return TrainingBatch(on_device(layout), jnp.asarray(POSITIVE))


@cache
def loss_and_gradients(objective: Objective) -> tuple[float, dict[str, float], dict[str, np.ndarray]]:
    graph, params = nnx.split(decoder())
    where = batch(PATTERNS[objective.visibility].sequential)

    def run(params: nnx.State) -> tuple[jax.Array, dict[str, jax.Array]]:
        return ranking_loss(nnx.merge(graph, params), where, objective)

    (loss, metrics), gradients = jax.jit(jax.value_and_grad(run, has_aux=True), compiler_options=HASTE)(params)
    found = {path: np.asarray(leaf) for path, leaf in flat_parameters(nnx.merge(graph, gradients)).items()}
    return float(loss), {name: float(value) for name, value in metrics.items()}, found


def answer_loss() -> float:
    """Mean cross-entropy over answer tokens, from the logits of the whole suffix."""

    def suffix_logits(model: Decoder, where: TokenLayout) -> jax.Array:
        return model.head_logits(model.states(where, visibility=BLOCKRANK)[0][:, where.suffix])

    logits = np.asarray(model_jit(suffix_logits)(decoder(), batch().layout), np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    losses = [
        -log_probabilities[row, place - 1, prompt.suffix[place]]
        for row, prompt in enumerate(PROMPTS)
        for place in range(prompt.answer_start, len(prompt.suffix))
    ]
    assert len(losses) == 5
    return float(np.mean(losses))


def test_the_objective_is_the_sum_of_its_parts() -> None:
    """Paper: L_NTP over answer tokens only, plus 0.1 times InfoNCE over scores at temperature 0.05."""
    loss, metrics, _ = loss_and_gradients(Objective(LAYER))
    layout = batch().layout
    options = {"visibility": BLOCKRANK, "aggregation": "sum"}
    scores = model_jit(lambda model, where: attention_scores(model, where, LAYER, **options))(decoder(), layout)
    assert metrics["ntp_loss"] == pytest.approx(answer_loss(), rel=1e-5)
    scaled = np.where(layout.document_mask, np.asarray(scores, np.float64) / 0.05, -np.inf)
    expected = np.log(np.exp(scaled).sum(axis=1)) - scaled[POSITIVE]
    assert metrics["aux_loss"] == pytest.approx(expected.mean(), rel=1e-4)
    assert loss == pytest.approx(metrics["ntp_loss"] + 0.1 * metrics["aux_loss"], rel=1e-6)
    assert metrics["lists_with_positive"] == 2
    assert metrics["attention_p_at_1"] == np.mean([scaled[i].argmax() == POSITIVE[i].argmax() for i in range(2)])


def test_the_loss_reads_masses_over_tokens_as_the_ranker_does() -> None:
    layout, options = batch().layout, {"visibility": BLOCKRANK, "aggregation": "sum", "length_normalization": 1.0}
    objective = Objective(LAYER, ntp_weight=0, aux_weight=1, length_normalization=1.0)

    def both(model: Decoder, where: TokenLayout) -> tuple[jax.Array, jax.Array]:
        loss, _ = ranking_loss(model, TrainingBatch(where, POSITIVE), objective)
        return loss, attention_scores(model, where, LAYER, **options)

    loss, scores = model_jit(both)(decoder(), layout)
    assert float(loss) == pytest.approx(float(info_nce(scores, POSITIVE, layout.document_mask, 0.05)[0]), rel=1e-6)


def test_full_fine_tuning_is_a_language_models_loss() -> None:
    """Dense attention, NTP only: the answer's cross-entropy in the prompt read as one text."""
    loss, metrics, _ = loss_and_gradients(Objective(LAYER, visibility="dense", aux_weight=0))
    assert "aux_loss" not in metrics
    losses = []
    for prompt in PROMPTS:
        text = np.concatenate([prompt.prefix, *prompt.documents, prompt.suffix])
        logits = np.asarray(model_jit(Decoder.logits)(decoder(), jnp.asarray(text)[None])[0], np.float64)
        log_probabilities = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        answer = range(len(text) - (len(prompt.suffix) - prompt.answer_start), len(text))
        losses += [-log_probabilities[place - 1, text[place]] for place in answer]
    assert loss == pytest.approx(float(np.mean(losses)), rel=1e-5)


def test_the_auxiliary_loss_trains_nothing_behind_its_queries_and_keys() -> None:
    loss, metrics, gradients = loss_and_gradients(Objective(LAYER, ntp_weight=0, aux_weight=1))
    assert "ntp_loss" not in metrics
    assert loss == metrics["aux_loss"]
    for path, gradient in gradients.items():
        if path in ("final_norm.scale", "head.kernel"):
            assert not gradient.any()
        elif path.startswith("blocks."):
            probe = path.split(".", 1)[1] in ("attention_norm.scale", "attention.query.kernel", "attention.key.kernel")
            assert gradient[0].any(), path
            assert bool(gradient[LAYER].any()) == probe, path
            assert not gradient[2].any(), path


def test_gradients_of_the_parts_add_up() -> None:
    whole, ntp, aux = (
        loss_and_gradients(Objective(LAYER, ntp_weight=n, aux_weight=a))[2] for n, a in ((1, 0.1), (1, 0), (0, 1))
    )
    for path, gradient in whole.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(gradient, ntp[path] + 0.1 * aux[path], rtol=0, atol=1e-5 * scale, err_msg=path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"visibility": "sparse"}, "visibility='sparse' is unknown: choose one of blockrank, dense"),
        ({"ntp_weight": 0, "aux_weight": 0}, "both 0: nothing to train"),
        ({"temperature": 0}, "temperature=0 must be positive"),
        ({"length_normalization": 2}, "length_normalization=2 must be a number from 0"),
        ({"signal_aggregation": "max"}, "signal_aggregation='max' is unknown: choose sum or mean"),
    ],
)
def test_objectives_that_make_no_sense_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Objective(LAYER, **fields)


def test_a_score_layer_the_model_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="score_layer=3 is not one of the model's 3 layers"):
        ranking_loss(decoder(), batch(), Objective(3))
