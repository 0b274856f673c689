"""The keys of a Hugging Face `config.json`: defaults, what does not matter, and an object that accounts for each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blockrank.errors import UserError
from blockrank.models.config import Family

ARCHITECTURES: Final[Mapping[Family, str]] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

DEFAULTS: Final[Mapping[Family, Mapping[str, Any]]] = {
    "llama": {"bos": 1, "eos": 2, "max_positions": 2048, "kv_heads": None, "window": None, "head_dim": None},
    "mistral": {"bos": 1, "eos": 2, "max_positions": 131_072, "kv_heads": 8, "window": 4096, "head_dim": None},
    "qwen2": {"bos": None, "eos": None, "max_positions": 32_768, "kv_heads": 32, "window": 4096, "head_dim": None},
    "qwen3": {"bos": None, "eos": None, "max_positions": 32_768, "kv_heads": 32, "window": 4096, "head_dim": 128},
}
"""What `transformers` takes when a key is absent (null is not absent)."""

_IRRELEVANT_KEYS: Final = """
_name_or_path name_or_path transformers_version torch_dtype dtype is_llama_config unsloth_fixed unsloth_version
transformers.js_config task_specific_params tokenizer_class model_max_length finetuning_task

use_cache return_dict output_attentions output_hidden_states torchscript use_bfloat16 tf_legacy_loss
chunk_size_feed_forward pretraining_tp _attn_implementation attn_implementation _attn_implementation_autoset
_flash_attn_2_enabled tie_encoder_decoder cross_attention_hidden_size decoder_start_token_id tie_last_hidden_states

id2label label2id num_labels problem_type sep_token_id unk_token_id prefix

max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
IRRELEVANT: Final = frozenset(_IRRELEVANT_KEYS.split())
"""Provenance; how torch runs the model; other tasks; defaults of text generation."""

ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "per_layer_config": (None, {}),
}
"""Keys that change the model, with the values under which they do not."""

_MISSING: Final = object()


@dataclass
class Fields:
    """The keys of one JSON object. Each is taken once; `finish` refuses those nobody took."""

    source: str
    values: dict[str, Any]
    prefix: str = ""

    def error(self, key: str, value: Any, advice: str) -> UserError:
        return UserError(f"{self.source}: {self.prefix}{key} = {json.dumps(value)}: {advice}")

    def _take(self, key: str, default: Any, kinds: tuple[type, ...], wanted: str) -> Any:
        value = self.values.pop(key, _MISSING)
        if value is _MISSING:
            if default is _MISSING:
                raise UserError(f"{self.source}: {self.prefix}{key} is missing; it must be {wanted}")
            return default
        if value is None and (default is None or type(None) in kinds):
            return None
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.error(key, value, f"must be {wanted}")
        return value

    def integer(self, key: str, default: Any = _MISSING, *, minimum: int = 0, null: bool = False) -> Any:
        """An int >= `minimum`; `null` permits null where the default is not null."""
        wanted = f"an integer of at least {minimum}"
        value = self._take(key, default, (int, type(None)) if null else (int,), wanted)
        if value is not None and value < minimum:
            raise self.error(key, value, f"must be {wanted}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """A finite number above zero."""
        value = self._take(key, default, (int, float), "a number above zero")
        if value is not None and not 0 < value < float("inf"):
            raise self.error(key, value, "must be a number above zero")
        return None if value is None else float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return self._take(key, default, (bool,), "true or false")

    def text(self, key: str, default: Any = _MISSING) -> Any:
        return self._take(key, default, (str,), "a string")

    def items(self, key: str) -> list[Any] | None:
        return self._take(key, None, (list,), "a list")

    def table(self, key: str) -> dict[str, Any]:
        return dict(self._take(key, None, (dict,), "an object") or {})

    def finish(self, advice: str) -> None:
        for key, value in self.values.items():
            raise self.error(key, value, advice)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. A missing file, bad JSON, a repeated key and anything but an object are `UserError`s."""

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in pairs:
            if key in table:
                raise UserError(f"{path}: key {key!r} appears twice; keep one")
            table[key] = value
        return table

    try:
        table = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=unique)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a folder that Hugging Face wrote") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); download or export it again") from error
    if not isinstance(table, dict):
        raise UserError(f"{path}: must be a JSON object, not {type(table).__name__}")
    return table
