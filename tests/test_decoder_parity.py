"""Our decoder against `transformers` on torch: tiny random models of every family, float32 on CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from blockrank.models import hf
from blockrank.models.config import RopeConfig
from blockrank.models.decoder import Decoder
from blockrank.models.hf_config import parse_config
from blockrank.models.layers import rope_frequencies
from blockrank.models.loading import decoder_from

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
rope_utils = pytest.importorskip("transformers.modeling_rope_utils")

TOLERANCE = 1e-4
LENGTH = 24

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
MILLION = {"rope_type": "default", "rope_theta": 1e6}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, 8 kv heads, tied": ("llama", {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    "llama, 2 kv heads, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, 1 kv head, llama3 rope": ("llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "llama, linear rope, head_dim 16": ("llama", {"rope_parameters": LINEAR, "head_dim": 16}),
    "mistral, theta 1e6, vocab 101 padded to 128": ("mistral", {"rope_parameters": MILLION, "sliding_window": None}),
    "mistral, window 8": ("mistral", {"sliding_window": 8, "num_key_value_heads": 8}),
    "mistral, yarn rope, head_dim 16": (
        "mistral",
        {"rope_parameters": YARN, "head_dim": 16, "sliding_window": None, "num_key_value_heads": 1},
    ),
    "qwen2, 1 kv head, tied": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True, "pad_token_id": 5}),
    "qwen2, window 8 above layer 0": ("qwen2", {**QWEN_WINDOW, "max_window_layers": 1}),
    "qwen2, yarn rope with mscale": (
        "qwen2",
        {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8, "beta_fast": 8.0, "truncate": False}},
    ),
    "qwen3, tied, head_dim 16": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": MILLION}),
    "qwen3, biases, mixed windows, llama3 rope": (
        "qwen3",
        {**QWEN_WINDOW, "layer_types": MIXED, "attention_bias": True, "rope_parameters": LLAMA3},
    ),
}
CONFIGS = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def torch_model(case: str) -> Any:
    """A model whose every weight is far from its usual start, so that a wrong bias, norm or angle shows."""
    family, changes = CASES[case]
    values = COMMON | ({"head_dim": 16} if family == "qwen3" else {}) | changes
    torch.manual_seed(7)
    config = getattr(transformers, CONFIGS[family])(**values, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(mean=1.0 if "norm" in name else 0.0, std=0.15 if weight.ndim == 2 else 0.3)
    return model


def torch_run(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [B, T, V], and states entering each layer with those after the last [L+1, B, T, D]."""
    states: list[np.ndarray] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0].numpy()))
        for layer in model.model.layers
    ]
    hooks.append(model.model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0].numpy())))
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.numpy()
    for hook in hooks:
        hook.remove()
    return logits, np.stack(states)


@nnx.jit
def run(decoder: Decoder, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return decoder.logits(tokens), decoder.hidden_states(tokens)


@dataclass
class Example:
    folder: Path
    tokens: np.ndarray
    logits: np.ndarray
    states: np.ndarray


@pytest.fixture(scope="module", params=list(CASES))
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    model = torch_model(request.param)
    folder = tmp_path_factory.mktemp("torch")
    model.save_pretrained(folder)
    tokens = np.random.default_rng(3).integers(0, 101, (2, LENGTH))
    return Example(folder, tokens, *torch_run(model, tokens))


def test_logits_and_states(example: Example) -> None:
    config, params = hf.load(example.folder)
    logits, states = run(decoder_from(config, params), jnp.asarray(example.tokens))
    assert logits.dtype == jnp.float32
    assert np.std(example.logits) > 0.5
    differences = np.abs(np.asarray(states) - example.states).max(axis=(1, 2, 3))
    np.testing.assert_allclose(logits, example.logits, rtol=0, atol=TOLERANCE)
    assert len(differences) == config.num_layers + 1
    assert differences.max() <= TOLERANCE, differences


@pytest.mark.parametrize("shard", [10**9, 50_000])
def test_files_survive_the_round_trip(example: Example, tmp_path: Path, shard: int) -> None:
    config, params = hf.load(example.folder)
    folder = hf.save(tmp_path / "export", config, params, max_shard_bytes=shard)
    exported: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        exported |= load_file(file)
    original = load_file(example.folder / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, value in original.items():
        assert exported[name].dtype == value.dtype
        np.testing.assert_array_equal(exported[name], value)
    assert hf.read_config(folder) == config
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    np.testing.assert_array_equal(torch_run(model, example.tokens)[0], example.logits)
    theirs = transformers.AutoConfig.from_pretrained(example.folder).to_dict()
    written = transformers.AutoConfig.from_pretrained(folder).to_dict()
    for key in ("transformers_version", "_name_or_path", "max_window_layers"):
        theirs.pop(key, None)
        written.pop(key, None)
    assert {key: written[key] for key in theirs if key != "rope_parameters"} == {
        key: value for key, value in theirs.items() if key != "rope_parameters"
    }


def test_windows_and_ropes_matter(example: Example) -> None:
    """The comparison above would notice a window or a rope that is not applied."""
    config, params = hf.load(example.folder)
    plain = replace(config, windows=(None,) * config.num_layers, rope=RopeConfig())
    if plain == config:
        pytest.skip("neither window nor rope scaling in this case")
    logits, _ = run(decoder_from(plain, params), jnp.asarray(example.tokens))
    assert np.abs(logits - example.logits).max() > 100 * TOLERANCE


ROPES = {
    "default": MILLION,
    "linear": LINEAR,
    "llama3": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192},
    "yarn": {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 32768},
    "yarn, attention_factor": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, mscale": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8, "truncate": False},
}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", list(ROPES))
def test_rope_frequencies(name: str, head_dim: int) -> None:
    config = transformers.LlamaConfig(**COMMON, head_dim=head_dim, rope_parameters=dict(ROPES[name]))
    kind = ROPES[name]["rope_type"]
    default = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters
    expected, factor = (default if kind == "default" else rope_utils.ROPE_INIT_FUNCTIONS[kind])(config)
    frequencies, our_factor = rope_frequencies(parse_config(config.to_dict()).rope, head_dim)
    assert frequencies.dtype == np.float32
    assert our_factor == pytest.approx(factor, rel=1e-12)
    np.testing.assert_array_max_ulp(frequencies, expected.numpy(), maxulp=4)
