"""Hugging Face config.json: every key is read, known not to matter, or refused; and written back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrank.config import build, to_plain
from blockrank.errors import UserError
from blockrank.models import hf
from blockrank.models.config import DecoderConfig, Family, RopeConfig
from blockrank.models.hf_config import config_to_json, parse_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
QWEN = {**BASE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = {**BASE, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
TINY = DecoderConfig(
    "llama", 11, 8, 12, 2, 1, 4, (None,) * 3, rms_norm_eps=1e-5, max_positions=64, bos_id=1, eos_ids=(2,)
)


def test_plain_llama() -> None:
    assert parse_config(BASE) == TINY


def test_released_mistral_config() -> None:
    values = json.loads(
        """{"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0",
        "use_cache": true, "vocab_size": 32768}"""
    )
    config = parse_config(values)
    assert config == DecoderConfig(
        "mistral",
        32768,
        4096,
        14336,
        32,
        8,
        128,
        (None,) * 32,
        RopeConfig(theta=1e6),
        1e-5,
        32768,
        bos_id=1,
        eos_ids=(2,),
    )
    assert sum(np.prod(w.full_shape(32)) for w in hf.weights(config)) == 7_248_023_552


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"head_dim": 16}, {"head_dim": 16}),
        ({"head_dim": None}, {"head_dim": 4}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 2}),
        ({"eos_token_id": [5, 6]}, {"eos_ids": (5, 6)}),
        ({"eos_token_id": None, "bos_token_id": None}, {"eos_ids": (), "bos_id": None}),
        ({"pad_token_id": 3}, {"padding_id": 3}),
        ({"pad_token_id": -1}, {"padding_id": 10}),
        ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
        ({"attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        ({"mlp_bias": True}, {"mlp_bias": True}),
        ({"rope_theta": 1e6}, {"rope": RopeConfig(theta=1e6)}),
        ({"rope_scaling": None, "rope_theta": 5e5}, {"rope": RopeConfig(theta=5e5)}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope": RopeConfig(kind="linear", factor=2.0)}),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 7.0}},
            {"rope": RopeConfig(theta=7.0, kind="linear", factor=2.0)},
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
            {"rope": RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 32)},
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope": RopeConfig(kind="yarn", factor=4.0, original_max_positions=64)},
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": None,
                    "original_max_position_embeddings": 16,
                    "truncate": False,
                }
            },
            {"rope": RopeConfig(kind="yarn", factor=4.0, original_max_positions=16, truncate=False)},
        ),
        ({"layer_types": ["full_attention"] * 3, "pretraining_tp": 2, "sliding_window": None}, {}),
    ],
)
def test_values_are_read(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert parse_config({**BASE, **changes}) == replace(TINY, **expected)


@pytest.mark.parametrize(
    ("base", "changes", "windows"),
    [
        (MISTRAL, {}, (None, None, None)),
        (MISTRAL, {"sliding_window": 8}, (8, 8, 8)),
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, {}, (4096, 4096, 4096)),
        (QWEN, {"sliding_window": 8}, (None, None, None)),
        (QWEN, {"sliding_window": 8, "use_sliding_window": True}, (None, None, None)),
        (QWEN, {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8, 8)),
        (
            QWEN,
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows(base: dict[str, Any], changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse_config({**base, **changes}).windows == windows


def test_qwen_biases() -> None:
    config = parse_config(QWEN)
    assert (config.qkv_bias, config.out_bias, config.qk_norm, config.bos_id) == (True, False, False, None)
    qwen3 = parse_config({**QWEN, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"model_type": "gemma"}, 'model_type = "gemma"'),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        *(
            ({key: value}, f"{key} = {value}")
            for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
            for value in (0, -1)
        ),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings = 0"),
        ({"head_dim": 0}, "head_dim = 0"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            "rope_scaling.high_freq_factor = 4.0",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "hidden_size = 8"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"hidden_size": "8"}, 'hidden_size = "8"'),
        ({"vocab_size": True}, "vocab_size = true"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"pad_token_id": 11}, "pad_token_id = 11"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"sliding_window": 8}, "sliding_window = 8"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_scaling.rope_type = "dynamic"'),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "rope_scaling.mrope_section = [1]"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor = -1"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.rope_theta"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}},
            "contradict",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
    ],
)
def test_unknown_values_are_errors(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_config({**BASE, **changes}, "some/config.json")
    assert told in str(caught.value)
    assert "some/config.json" in str(caught.value)


@pytest.mark.parametrize(
    "field",
    ["vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_positions"],
)
@pytest.mark.parametrize("value", [0, -2])
def test_impossible_sizes_are_named(field: str, value: int) -> None:
    """Also where no file was read: a checkpoint's record of its model goes through `build`."""
    with pytest.raises(ValueError, match=f"{field}={value} must be positive"):
        replace(TINY, **{field: value})
    with pytest.raises(UserError, match=f"model: {field}={value} must be positive"):
        build(DecoderConfig, {**to_plain(TINY), field: value}, "model")


def test_impossible_windows_paddings_and_ropes_are_named() -> None:
    with pytest.raises(ValueError, match=r"windows\[1\]=0 must be positive"):
        replace(TINY, windows=(None, 0, 8))
    with pytest.raises(ValueError, match="padding_id=11 is not below vocab_size=11"):
        replace(TINY, padding_id=11)
    with pytest.raises(ValueError, match="factor=0"):
        RopeConfig(kind="linear", factor=0)
    with pytest.raises(ValueError, match=r"high_freq_factor=1\.0 must be above low_freq_factor=1\.0"):
        RopeConfig(kind="llama3", high_freq_factor=1.0)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "model_type", "intermediate_size"])
def test_missing_sizes_are_named(key: str) -> None:
    with pytest.raises(UserError, match=f"{key} is missing"):
        parse_config({k: v for k, v in BASE.items() if k != key})


def test_qwen2_and_mistral_refuse_what_they_lack() -> None:
    for base, changes in (
        (QWEN, {"attention_bias": False}),
        (QWEN, {"mlp_bias": True}),
        (MISTRAL, {"attention_bias": True}),
        (MISTRAL, {"sliding_window": 8, "layer_types": ["full_attention"] * 3}),
    ):
        with pytest.raises(UserError):
            parse_config({**base, **changes})


def test_json_faults(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, told in (
        ('{"model_type": "llama", "model_type": "mistral"}', "twice"),
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=told):
            hf.read_config(tmp_path)
    with pytest.raises(UserError, match="nowhere"):
        hf.read_config(tmp_path / "nowhere")


ropes = st.one_of(
    st.builds(RopeConfig, theta=st.sampled_from([1e4, 1e6])),
    st.builds(RopeConfig, kind=st.just("linear"), factor=st.sampled_from([1.0, 8.0])),
    st.builds(
        RopeConfig,
        kind=st.just("llama3"),
        factor=st.just(8.0),
        high_freq_factor=st.just(3.0),
        original_max_positions=st.integers(1, 99),
    ),
    st.builds(
        RopeConfig,
        kind=st.just("yarn"),
        factor=st.just(4.0),
        original_max_positions=st.integers(1, 99),
        beta_fast=st.sampled_from([16.0, 32.0]),
        attention_factor=st.sampled_from([None, 1.5]),
        mscale=st.sampled_from([None, 0.7]),
        mscale_all_dim=st.sampled_from([None, 0.7]),
        truncate=st.booleans(),
    ),
)


@st.composite
def configs(draw: st.DrawFn) -> DecoderConfig:
    family = draw(st.sampled_from(get_args(Family)))
    bias = draw(st.booleans()) and family in ("llama", "qwen3")
    layers = draw(st.integers(1, 4))
    windows: tuple[int | None, ...] = (None,) * layers
    if family == "mistral":
        windows = (draw(st.sampled_from([None, 8])),) * layers
    elif family != "llama":
        windows = tuple(draw(st.lists(st.sampled_from([None, 8]), min_size=layers, max_size=layers)))
    return DecoderConfig(
        family=family,
        vocab_size=draw(st.integers(1, 500)),
        hidden_size=16,
        intermediate_size=24,
        num_heads=8,
        num_kv_heads=draw(st.sampled_from([1, 2, 8])),
        head_dim=draw(st.sampled_from([2, 16])),
        windows=windows,
        rope=draw(ropes),
        tie_embeddings=draw(st.booleans()),
        qkv_bias=bias or family == "qwen2",
        out_bias=bias,
        mlp_bias=draw(st.booleans()) and family == "llama",
        qk_norm=family == "qwen3",
        bos_id=draw(st.none() | st.integers(0, 9)),
        eos_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
        padding_id=draw(st.sampled_from([None, 0])),
    )


@given(configs())
def test_config_survives_export(config: DecoderConfig) -> None:
    assert parse_config(json.loads(json.dumps(config_to_json(config, "float32")))) == config


def test_export_refuses_what_a_family_cannot_say() -> None:
    for change in ({"qk_norm": True}, {"qkv_bias": True}, {"windows": (8, 8, 8)}):
        with pytest.raises(UserError):
            config_to_json(replace(TINY, **change))
    with pytest.raises(UserError, match="windows"):
        config_to_json(replace(TINY, family="mistral", windows=(None, 8, 8)))
