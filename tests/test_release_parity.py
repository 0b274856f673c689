"""The released PyTorch code's own numbers on SmolLM2-135M: scores, losses, gradients and an AdamW trajectory."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from blockrank.attention.visibility import BLOCKRANK
from blockrank.errors import UserError
from blockrank.layout import TokenLayout
from blockrank.losses import Objective, TrainingBatch, ranking_loss
from blockrank.models.config import RopeConfig
from blockrank.models.decoder import Decoder
from blockrank.models.gguf import embedded_model_path
from blockrank.models.layers import rope_frequencies, rotate
from blockrank.models.loading import flat_parameters, load_decoder
from blockrank.rankers.readout import attention_scores, layer_scores

MODULES = {
    "input_layernorm": "attention_norm",
    "self_attn": "attention",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "out",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
WEIGHTS = {name: np.eye(3, dtype=np.float32)[place] for place, name in enumerate(("lm", "aux", "total"))}
"""Which of the file's three losses to differentiate."""


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    try:
        return load_decoder(embedded_model_path())
    except UserError as error:
        pytest.skip(str(error))


@cache
def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def blocks(case: dict[str, Any]) -> list[list[list[int]]]:
    """Prefix, documents, suffix: the file keeps the suffix's last tokens as a block of their own."""
    return [[*lists[:-2], lists[-2] + lists[-1]] for lists in case["block_token_ids"]]


@partial(nnx.jit, static_argnames=("backend",))
def every_layer(model: Decoder, layout: TokenLayout, *, backend: str = "auto") -> jax.Array:
    return layer_scores(model, layout, visibility=BLOCKRANK, aggregation="mean", backend=backend)


@pytest.mark.parametrize("name", ["few5_france", "few5_orwell"])
@pytest.mark.parametrize(
    ("backend", "options"),
    [("xla", {"row_length": 128}), ("xla", {"packing": "chunked"}), ("reference", {})],
    ids=["packed", "chunked", "oracle"],
)
def test_scores_of_every_layer(
    name: str, backend: str, options: dict[str, Any], decoder: Decoder, shared_parity: Path
) -> None:
    case = load(shared_parity / f"{name}.json")
    layout = TokenLayout.from_blocks(blocks(case), max_block_length=case["max_block_length"], **options)
    scores = np.asarray(every_layer(decoder, layout, backend=backend))[:, 0]
    expected = np.asarray(case["scores_by_layer"])
    assert scores.shape == expected.shape == (30, 5)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    assert np.argsort(scores).tolist() == np.argsort(expected).tolist()


def test_scores_of_a_truncated_model(decoder: Decoder, shared_parity: Path) -> None:
    case = load(shared_parity / "few5_france.json")
    layout = TokenLayout.from_blocks(blocks(case), max_block_length=case["max_block_length"])
    score = nnx.jit(lambda model, where: attention_scores(model, where, 17, visibility=BLOCKRANK, aggregation="mean"))
    scores = score(decoder.truncate(17), layout)
    np.testing.assert_allclose(scores[0], case["scores_by_layer"][17], rtol=0, atol=1e-5)


class Training:
    """The training case, with one compiled program for all three losses."""

    def __init__(self, case: dict[str, Any], decoder: Decoder) -> None:
        self.case = case
        self.graph, self.params = nnx.split(decoder)
        answer = len(case["label_tokens"][0])
        signals = (-answer - 1, -answer)
        layout = TokenLayout.from_blocks(blocks(case), max_block_length=160, answer_length=answer, signals=signals)
        positive = np.zeros(layout.document_mask.shape, bool)
        for row, places in zip(positive, case["answer_positions"], strict=True):
            row[places] = True
        self.batch = TrainingBatch(jax.tree.map(jnp.asarray, layout), jnp.asarray(positive))
        objective = Objective(
            case["layer"],
            aux_weight=case["aux_weight"],
            temperature=case["temperature"],
            signal_aggregation="mean",
        )

        def losses(params: nnx.State, weights: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            total, metrics = ranking_loss(nnx.merge(self.graph, params), self.batch, objective)
            parts = jnp.stack([metrics["ntp_loss"], metrics["aux_loss"], total])
            found = dict(zip(WEIGHTS, parts, strict=True)) | {"acc": metrics["attention_p_at_1"]}
            return weights @ parts, found

        self.losses_and_gradients = jax.jit(jax.grad(losses, has_aux=True))


@pytest.fixture(scope="module")
def training(decoder: Decoder, shared_parity: Path) -> Training:
    return Training(load(shared_parity / "train_bees.json"), decoder)


def of_hugging_face_name(gradients: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The gradient of one Hugging Face tensor."""
    if name == "model.norm.weight":
        return gradients["final_norm.scale"]
    if name == "model.embed_tokens.weight":
        return gradients["embed.embedding"]
    _, _, layer, *modules, _ = name.split(".")
    leaf = "scale" if modules[-1].endswith("layernorm") else "kernel"
    return gradients[".".join(["blocks", *(MODULES.get(module, module) for module in modules), leaf])][int(layer)]


def norm(arrays: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in arrays)))


@pytest.mark.parametrize("name", WEIGHTS)
def test_losses_and_gradient_norms(name: str, training: Training) -> None:
    state, losses = training.losses_and_gradients(training.params, WEIGHTS[name])
    flat = flat_parameters(nnx.merge(training.graph, state))
    gradients = {path: np.asarray(gradient) for path, gradient in flat.items()}
    assert float(losses[name]) == pytest.approx(training.case[f"{name}_loss"], rel=1e-4)
    assert norm(list(gradients.values())) == pytest.approx(training.case["grad_norm_global"][name], rel=1e-3)
    for tensor, expected in training.case["grad_norm_named"][name].items():
        found = norm([of_hugging_face_name(gradients, tensor)])
        assert found == (0 if expected is None else pytest.approx(expected, rel=1e-3)), tensor


def test_adamw_trajectory(training: Training) -> None:
    optimizer = optax.adamw(1e-5, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: nnx.State, state: optax.OptState, gradients: nnx.State) -> tuple[Any, optax.OptState]:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, training.params)
    state = optimizer.init(params)
    steps = training.case["adamw_lr1e5_losses"]
    assert [expected["step"] for expected in steps] == list(range(6))
    for expected in steps:
        gradients, found = training.losses_and_gradients(params, WEIGHTS["total"])
        params, state = update(params, state, gradients)
        for name, value in found.items():
            assert float(value) == pytest.approx(expected[name], rel=1e-3), (expected["step"], name)


def test_scores_of_the_training_list(training: Training, decoder: Decoder) -> None:
    scores = every_layer(decoder, training.batch.layout)[training.case["layer"]]
    np.testing.assert_allclose(scores, training.case["scores"], rtol=0, atol=1e-5)


def test_rope_frequencies_are_bit_equal(shared_parity: Path) -> None:
    file = load(shared_parity / "rope_inv_freq.json")
    frequencies, factor = rope_frequencies(RopeConfig(theta=file["theta"]), file["head_dim"])
    assert frequencies.dtype == np.float32
    assert frequencies.tolist() == np.asarray(file["inv_freq_float32"], np.float32).tolist()
    assert factor == 1.0


@pytest.mark.parametrize("position", [0, 1, 107, 8192, 16384, 16454])
def test_rotation_by_float32_angles(position: int, shared_parity: Path) -> None:
    """Angles are float32 products, as in PyTorch; their cosines and sines are right to float32."""
    file = load(shared_parity / "rope_inv_freq.json")
    frequencies = np.asarray(file["inv_freq_float32"], np.float32)
    angles = (np.float32(position) * frequencies).astype(np.float64)
    x = np.random.default_rng(0).standard_normal((1, 1, 3, 64)).astype(np.float32)
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    expected = np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
    )
    rotated = rotate(jnp.asarray(x), jnp.asarray([[position]]), RopeConfig(theta=file["theta"]))
    np.testing.assert_allclose(rotated, expected, rtol=0, atol=2e-6)
