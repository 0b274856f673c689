"""What a sentence-transformers folder says of how token states become one embedding, and the pooling itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from blockrank.errors import UserError
from blockrank.models.hf_fields import read_json

Pooling = Literal["mean", "cls"]

_MODES: dict[str, Pooling] = {"mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls"}


@dataclass(frozen=True)
class SentenceSettings:
    """How a bi-encoder reads a text.

    `pooling`: the mean over tokens, or the first token's state. `normalize`: to unit length. `max_length`: tokens with
    [CLS] and [SEP] (None: as many as the model has positions). The prefixes are put before each text.
    """

    pooling: Pooling = "mean"
    normalize: bool = False
    max_length: int | None = None
    lower_case: bool = False
    query_prefix: str = ""
    document_prefix: str = ""


def read_sentence_settings(folder: str | Path) -> tuple[Path, SentenceSettings]:
    """The folder with the transformer's own files, and the settings.

    A folder without `modules.json` is a plain encoder: mean pooling, not normalised, the tokenizer's length. Raises
    `UserError` for a kind of module or pooling that is not done here.
    """
    folder = Path(folder)
    if not (folder / "modules.json").is_file():
        return folder, SentenceSettings(max_length=_tokenizer_length(folder))
    transformer, pooling, normalize = folder, None, False
    for module in _modules(folder / "modules.json"):
        kind, path = module["type"].rsplit(".", 1)[-1], folder / module["path"]
        if kind == "Transformer":
            transformer = path
        elif kind == "Pooling":
            pooling = _pooling(path / "config.json")
        elif kind == "Normalize":
            normalize = True
        else:
            raise UserError(
                f"{folder / 'modules.json'}: module {module['type']} is not supported, only Transformer, "
                "Pooling (mean, cls) and Normalize are"
            )
    if pooling is None:
        raise UserError(f"{folder / 'modules.json'}: no Pooling module, so there is no embedding; use another model")
    model = _json_if_there(transformer / "sentence_bert_config.json")
    length = model.get("max_seq_length") or _tokenizer_length(transformer)
    prompts = _json_if_there(folder / "config_sentence_transformers.json").get("prompts") or {}
    return transformer, SentenceSettings(
        pooling=pooling,
        normalize=normalize,
        max_length=length,
        lower_case=bool(model.get("do_lower_case", False)),
        query_prefix=prompts.get("query") or "",
        document_prefix=prompts.get("document") or "",
    )


def pool(
    states: Float[Array, "B T D"], mask: Bool[Array, "B T"], pooling: Pooling, normalize: bool
) -> Float[Array, "B D"]:
    """One float32 embedding for each text; a text of padding alone gets zeros under mean pooling."""
    states = states.astype(jnp.float32)
    if pooling == "cls":
        embedding = states[:, 0]
    else:
        total = jnp.sum(jnp.where(mask[..., None], states, 0.0), axis=1)
        embedding = total / jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    if not normalize:
        return embedding
    return embedding / jnp.maximum(jnp.linalg.norm(embedding, axis=-1, keepdims=True), 1e-12)


def _modules(path: Path) -> list[dict[str, str]]:
    try:
        modules = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); download it again") from error
    fields = ("type", "path")
    if not isinstance(modules, list) or not all(isinstance(m, dict) and all(f in m for f in fields) for m in modules):
        raise UserError(f"{path}: must be a list of modules with a type and a path")
    return sorted(modules, key=lambda module: module.get("idx", 0))


def _pooling(path: Path) -> Pooling:
    values = read_json(path)
    chosen = values.get("pooling_mode")
    if chosen is None:
        chosen = [
            key.removeprefix("pooling_mode_") for key, on in values.items() if key.startswith("pooling_mode_") and on
        ]
    modes = [chosen] if isinstance(chosen, str) else list(chosen)
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UserError(f"{path}: pooling {' + '.join(modes) or 'none'} is not supported, only mean or cls is")
    if not values.get("include_prompt", True):
        raise UserError(f"{path}: include_prompt = false is not supported")
    return _MODES[modes[0]]


def _tokenizer_length(folder: Path) -> int | None:
    length = _json_if_there(folder / "tokenizer_config.json").get("model_max_length")
    return int(length) if isinstance(length, int | float) and 0 < length < 1e6 else None


def _json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
