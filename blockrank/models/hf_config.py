"""Hugging Face `config.json` to `DecoderConfig` and back: every key is read, known not to matter, or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from blockrank.errors import UserError
from blockrank.models.config import DecoderConfig, Family, RopeConfig
from blockrank.models.hf_fields import ARCHITECTURES, DEFAULTS, IRRELEVANT, ONLY, Fields, read_json


def read_config(path: str | Path) -> DecoderConfig:
    """Sizes and switches from a `config.json` or the folder that holds it (Llama, Mistral, Qwen2, Qwen3).

    Absent keys take the defaults of `transformers`. Both `rope_theta` + `rope_scaling` and `rope_parameters` are read.
    Raises `UserError` that names the key and its value for whatever this decoder does not do.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    return parse_config(read_json(path), str(path))


def parse_config(values: Mapping[str, Any], source: str = "config.json") -> DecoderConfig:
    """`read_config` of a JSON object already read; `source` names it in errors."""
    fields = Fields(source, {key: value for key, value in values.items() if key not in IRRELEVANT})
    family = fields.text("model_type")
    if family not in get_args(Family):
        raise fields.error("model_type", family, f"is not supported; use one of {', '.join(get_args(Family))}")
    defaults = DEFAULTS[family]
    architectures = fields.items("architectures")
    if architectures not in (None, [], [ARCHITECTURES[family]]):
        raise fields.error("architectures", architectures, f"must be {ARCHITECTURES[family]} for model_type {family}")
    for key, allowed in ONLY.items():
        value = fields.values.pop(key, allowed[0])
        if value not in allowed:
            shown = " or ".join(json.dumps(option) for option in allowed)
            raise fields.error(key, value, f"is not supported; only {shown} is")

    hidden_size = fields.integer("hidden_size", minimum=1)
    num_heads = fields.integer("num_attention_heads", minimum=1)
    num_kv_heads = fields.integer("num_key_value_heads", defaults["kv_heads"], minimum=1, null=True) or num_heads
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads = {num_heads}")
    head_dim = fields.integer("head_dim", defaults["head_dim"], minimum=2, null=True)
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error("hidden_size", hidden_size, f"without head_dim must be a multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "must be even for rotary embeddings")
    max_positions = fields.integer("max_position_embeddings", defaults["max_positions"], minimum=1)
    vocab_size = fields.integer("vocab_size", minimum=1)
    config = DecoderConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", minimum=1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        windows=_read_windows(fields, family, defaults["window"]),
        rope=_read_rope(fields, max_positions),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        initializer_range=fields.number("initializer_range", 0.02),
        bos_id=fields.integer("bos_token_id", defaults["bos"], null=True),
        eos_ids=_read_eos(fields, defaults["eos"]),
        padding_id=_read_padding(fields, vocab_size),
        qk_norm=family == "qwen3",
        **_read_biases(fields, family),
    )
    fields.finish("is an unknown key, so the model cannot be read safely; remove it if it does not change the model")
    return config


def _read_biases(fields: Fields, family: Family) -> dict[Literal["qkv_bias", "out_bias", "mlp_bias"], bool]:
    attention = mlp = False
    if family in ("llama", "qwen3"):
        attention = fields.flag("attention_bias")
    elif family == "mistral" and fields.flag("attention_bias"):
        raise fields.error("attention_bias", True, "is not supported for model_type mistral")
    if fields.flag("mlp_bias"):
        if family != "llama":
            raise fields.error("mlp_bias", True, f"is not supported for model_type {family}")
        mlp = True
    return {"qkv_bias": attention or family == "qwen2", "out_bias": attention, "mlp_bias": mlp}


def _read_eos(fields: Fields, default: int | None) -> tuple[int, ...]:
    value = fields.values.pop("eos_token_id", default)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise fields.error("eos_token_id", value, "must be a token id or a list of token ids")
    return tuple(ids)


def _read_padding(fields: Fields, vocab_size: int) -> int | None:
    """The padding id; a negative one counts from the end of the vocabulary, as in torch's `Embedding`."""
    value = fields.integer("pad_token_id", None, minimum=-vocab_size)
    if value is not None and value >= vocab_size:
        raise fields.error("pad_token_id", value, f"must be below vocab_size = {vocab_size}")
    return value if value is None else value % vocab_size


def _read_windows(fields: Fields, family: Family, default: int | None) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens, the current one included."""
    num_layers = fields.integer("num_hidden_layers", minimum=1)
    window = fields.integer("sliding_window", default, minimum=1, null=True)
    kinds = fields.items("layer_types")
    switched = family in ("qwen2", "qwen3")
    first = num_layers
    if switched:
        first = fields.integer("max_window_layers", 28)
        window = window if fields.flag("use_sliding_window") else None
    elif family == "llama" and window is not None:
        raise fields.error("sliding_window", window, "is not supported for model_type llama; must be null")
    elif family == "mistral":
        first = 0
    windows = tuple(window if i >= first else None for i in range(num_layers))
    if kinds is None:
        return windows
    if len(kinds) != num_layers:
        raise fields.error("layer_types", kinds, f"must name {num_layers} layers, as num_hidden_layers says")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error("layer_types", kind, "is not supported; use full_attention or sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise fields.error("layer_types", "sliding_attention", "needs a sliding_window (and use_sliding_window) in use")
    named = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if not switched and named != windows:
        raise fields.error("layer_types", kinds, f"contradicts sliding_window = {window} (model_type {family})")
    return named


def _read_rope(fields: Fields, max_positions: int) -> RopeConfig:
    theta = fields.number("rope_theta", None)
    original = fields.integer("original_max_position_embeddings", None, minimum=1)
    found = {
        key: _parse_rope(Fields(fields.source, table, f"{key}."), theta, original, max_positions)
        for key in ("rope_scaling", "rope_parameters")
        if (table := fields.table(key))
    }
    if len(set(found.values())) > 1:
        raise UserError(f"{fields.source}: rope_scaling and rope_parameters contradict each other; remove one")
    if found:
        return next(iter(found.values()))
    return _parse_rope(Fields(fields.source, {}), theta, original, max_positions)


def _parse_rope(table: Fields, theta: float | None, original: int | None, max_positions: int) -> RopeConfig:
    kind = table.text("rope_type", None)
    old_kind = table.text("type", None)
    if kind and old_kind and kind != old_kind:
        raise table.error("type", old_kind, f"contradicts rope_type = {kind!r}; remove one")
    kind = kind or old_kind or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise table.error("rope_type", kind, "is not supported; use default, linear, llama3 or yarn")
    own_theta = table.number("rope_theta", None)
    if own_theta and theta and own_theta != theta:
        raise table.error("rope_theta", own_theta, f"contradicts rope_theta = {theta} beside it; remove one")
    if table.number("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{table.source}: {table.prefix}partial_rotary_factor is not supported; only 1.0 is")
    parameters: dict[str, Any] = {"theta": own_theta or theta or 10_000.0, "kind": kind}
    if kind == "linear":
        parameters["factor"] = table.number("factor")
    elif kind in ("llama3", "yarn"):
        own_original = table.integer("original_max_position_embeddings", None, minimum=1)
        if own_original and original and own_original != original:
            raise table.error("original_max_position_embeddings", own_original, f"contradicts {original} beside it")
        parameters["original_max_positions"] = own_original or original or max_positions
        if kind == "llama3":
            parameters |= {key: table.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
            if (high := parameters["high_freq_factor"]) <= (low := parameters["low_freq_factor"]):
                raise table.error("high_freq_factor", high, f"must be above low_freq_factor = {low}")
        else:
            ratio = max_positions / parameters["original_max_positions"]
            parameters |= {
                "factor": table.number("factor", None) or ratio,
                "beta_fast": table.number("beta_fast", None) or 32.0,
                "beta_slow": table.number("beta_slow", None) or 1.0,
                "truncate": table.flag("truncate", True),
            }
            parameters |= {key: table.number(key, None) for key in ("attention_factor", "mscale", "mscale_all_dim")}
    elif original not in (None, max_positions):
        raise UserError(f"{table.source}: original_max_position_embeddings = {original} has no use with rope {kind!r}")
    table.finish(f"is unknown to rope type {kind!r}; remove it if it does not change the model")
    return RopeConfig(**parameters)


def config_to_json(config: DecoderConfig, dtype: str | None = None) -> dict[str, Any]:
    """The `config.json` of `config`, readable by `transformers` 4 and 5; `dtype` is that of the weights beside it.

    Raises `UserError` where the family has no way to say it (e.g. windows in Llama): nothing is lost in silence.
    """
    eos = list(config.eos_ids)
    rope = _rope_to_json(config.rope)
    windows = {window for window in config.windows if window is not None}
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.initializer_range,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
        "pad_token_id": config.padding_id,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.kind == "default" else rope,
        "rope_parameters": rope,
        "use_cache": True,
    }
    if dtype is not None:
        values |= {"dtype": dtype, "torch_dtype": dtype}
    if config.family in ("llama", "qwen3"):
        values["attention_bias"] = config.out_bias
    if config.family == "llama":
        values["mlp_bias"] = config.mlp_bias
    else:
        values["sliding_window"] = max(windows, default=None)
    if config.family in ("qwen2", "qwen3"):
        kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
        first = kinds.index("sliding_attention") if windows else config.num_layers
        values |= {"use_sliding_window": bool(windows), "max_window_layers": first, "layer_types": kinds}
    written = asdict(parse_config(values, "the exported config.json"))
    lost = [key for key, value in asdict(config).items() if written[key] != value]
    if lost:
        shown = ", ".join(f"{key} = {getattr(config, key)}" for key in lost)
        raise UserError(f"a {config.family} config.json cannot express {shown}; choose another family or change it")
    return values


def _rope_to_json(rope: RopeConfig) -> dict[str, Any]:
    table: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        table["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        table["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        table |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        table |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = {key: getattr(rope, key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
        table |= {key: value for key, value in optional.items() if value is not None}
    return table
