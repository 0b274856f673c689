"""Hugging Face folders (config.json, safetensors, tokenizer files) to decoder parameters and back.

Parameters travel as a flat dict from path to array, layers stacked on axis 0, `Linear` kernels [in, out].
Pickled weights are never opened.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from safetensors.numpy import save_file

from blockrank.errors import UserError
from blockrank.models.config import DecoderConfig
from blockrank.models.hf_config import config_to_json, read_config
from blockrank.models.hf_files import INDEX, SINGLE, locate, readers_of
from blockrank.models.hf_weights import Weight, check_finite, float_dtype, progress_bar, read_weights

__all__ = ["Weight", "check_finite", "load", "read_config", "save", "weights"]

_BUFFERS: Final = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")
"""Tables that old exports store and that follow from config.json."""

_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tokenizer.model.v3", "tekken.json", "vocab.json")
_COMPANIONS: Final = (
    *_TOKENIZERS,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)


class SavesTokenizer(Protocol):
    """A tokenizer that can write its own files into a folder."""

    def save(self, directory: Path, /) -> Any: ...


def weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Every parameter of a decoder of `config`: the one table by which names are mapped, both ways."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    model, ffn, layer = config.hidden_size, config.intermediate_size, "model.layers.{layer}."
    found = [
        Weight("embed.embedding", "model.embed_tokens.weight", (config.vocab_size, model)),
        Weight("blocks.attention_norm.scale", layer + "input_layernorm.weight", (model,)),
        Weight("blocks.mlp_norm.scale", layer + "post_attention_layernorm.weight", (model,)),
        Weight("final_norm.scale", "model.norm.weight", (model,)),
    ]
    for path, tensor, inputs, outputs, bias in (
        ("attention.query", "self_attn.q_proj", model, heads, config.qkv_bias),
        ("attention.key", "self_attn.k_proj", model, kv_heads, config.qkv_bias),
        ("attention.value", "self_attn.v_proj", model, kv_heads, config.qkv_bias),
        ("attention.out", "self_attn.o_proj", heads, model, config.out_bias),
        ("mlp.gate", "mlp.gate_proj", model, ffn, config.mlp_bias),
        ("mlp.up", "mlp.up_proj", model, ffn, config.mlp_bias),
        ("mlp.down", "mlp.down_proj", ffn, model, config.mlp_bias),
    ):
        found.append(Weight(f"blocks.{path}.kernel", f"{layer}{tensor}.weight", (inputs, outputs), transposed=True))
        if bias:
            found.append(Weight(f"blocks.{path}.bias", f"{layer}{tensor}.bias", (outputs,)))
    if config.qk_norm:
        found.append(Weight("blocks.attention.query_norm.scale", layer + "self_attn.q_norm.weight", (config.head_dim,)))
        found.append(Weight("blocks.attention.key_norm.scale", layer + "self_attn.k_norm.weight", (config.head_dim,)))
    if not config.tie_embeddings:
        found.append(Weight("head.kernel", "lm_head.weight", (model, config.vocab_size), transposed=True))
    return tuple(found)


def load(
    folder: str | Path, dtype: str | np.dtype | type | None = "float32", *, finite: bool = True
) -> tuple[DecoderConfig, dict[str, np.ndarray]]:
    """The config and all parameters of a Hugging Face folder, as arrays of `dtype` (None: as stored).

    Weights are read by `read_weights`, whose errors these are; a tied head that is stored all the same must be equal.
    """
    folder = Path(folder)
    config = read_config(folder)
    files = locate(folder)
    tied_head = "lm_head.weight" if config.tie_embeddings and "lm_head.weight" in files else None
    params = read_weights(
        folder,
        {name: file for name, file in files.items() if name != tied_head and not _BUFFERS.fullmatch(name)},
        weights(config),
        config.num_layers,
        dtype,
        finite=finite,
    )
    if tied_head and not _same_tensor(files, tied_head, "model.embed_tokens.weight"):
        raise UserError(f"{folder}: tie_word_embeddings is true but lm_head.weight differs; set it to false")
    return config, params


def _same_tensor(files: Mapping[str, Path], name: str, other: str) -> bool:
    with readers_of({files[name], files[other]}) as readers:
        return np.array_equal(readers[files[name]].get_tensor(name), readers[files[other]].get_tensor(other))


def save(
    folder: str | Path,
    config: DecoderConfig,
    params: Mapping[str, Any],
    tokenizer_source: str | Path | SavesTokenizer | None = None,
    dtype: str | np.dtype | type | None = None,
    max_shard_bytes: int = 5_000_000_000,
    *,
    overwrite: bool = False,
) -> Path:
    """Writes a folder `transformers` loads: config.json, safetensors (sharded beyond `max_shard_bytes`), tokenizer.

    `params` are NumPy or JAX arrays by path, in the shapes of `weights(config)`; `dtype` None keeps theirs.
    `tokenizer_source` is a folder whose tokenizer files are copied or a tokenizer with `save(folder)`. The folder
    appears complete or not at all; one that exists and is not empty is an error unless `overwrite`.
    Returns the folder.
    """
    folder = Path(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not overwrite):
        raise UserError(f"{folder}: exists already; choose another folder or allow it to be overwritten")
    shapes = {weight.path: weight.full_shape(config.num_layers) for weight in weights(config)}
    missing, extra = [p for p in shapes if p not in params], [p for p in params if p not in shapes]
    if missing or extra:
        raise UserError(f"parameters are not those of the config: missing {missing}, extra {extra}")
    for path, shape in shapes.items():
        if (found := tuple(params[path].shape)) != shape:
            raise UserError(f"parameter {path} has shape {list(found)}, but the config asks for {list(shape)}")

    kinds = {path: float_dtype(params[path].dtype if dtype is None else dtype) for path in shapes}
    name = max(kinds.values(), key=lambda kind: kind.itemsize).name
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        work.chmod(0o755)
        (work / "config.json").write_text(_json(config_to_json(config, name)), encoding="utf-8")
        _write_weights(work, config, params, kinds, max_shard_bytes)
        _write_tokenizer(work, tokenizer_source)
        _replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def _replace(new: Path, folder: Path) -> None:
    """Puts `new` in the place of `folder` by renaming; the old one goes only after the new one stands."""
    if not folder.exists() or not any(folder.iterdir()):
        new.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old)


def _write_weights(
    folder: Path, config: DecoderConfig, params: Mapping[str, Any], kinds: Mapping[str, np.dtype], max_bytes: int
) -> None:
    shards: list[list[tuple[str, Weight, int | None]]] = [[]]
    sizes = [0]
    for weight in weights(config):
        for name, layer in weight.tensors(config.num_layers):
            size = int(np.prod(weight.shape)) * kinds[weight.path].itemsize
            if shards[-1] and sizes[-1] + size > max_bytes:
                shards.append([])
                sizes.append(0)
            shards[-1].append((name, weight, layer))
            sizes[-1] += size
    weight_map: dict[str, str] = {}
    with progress_bar(sum(sizes)) as progress:
        for number, shard in enumerate(progress.track(shards, description="writing safetensors"), start=1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors: dict[str, np.ndarray] = {}
            for name, weight, layer in shard:
                array = np.asarray(params[weight.path] if layer is None else params[weight.path][layer])
                array = array.astype(kinds[weight.path], copy=False)
                tensors[name] = np.ascontiguousarray(array.T if weight.transposed else array)
            save_file(tensors, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(_json(index), encoding="utf-8")


def _write_tokenizer(folder: Path, source: str | Path | SavesTokenizer | None) -> None:
    if source is None:
        return
    if not isinstance(source, (str, os.PathLike)):
        source.save(folder)
        return
    source = Path(source)
    if not any((source / name).is_file() for name in _TOKENIZERS):
        raise UserError(f"{source}: no tokenizer here; expected one of {', '.join(_TOKENIZERS)}")
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
