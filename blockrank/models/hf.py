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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import Progress
from safetensors.numpy import save_file

from blockrank.errors import UserError
from blockrank.models.config import DecoderConfig
from blockrank.models.hf_config import config_to_json, read_config
from blockrank.models.hf_files import INDEX, SINGLE, locate, readers_of, some

__all__ = ["Weight", "check_finite", "load", "read_config", "save", "weights"]

_DTYPES: Final[Mapping[str, np.dtype]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
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


@dataclass(frozen=True)
class Weight:
    """One parameter of the decoder and where Hugging Face keeps it.

    `tensor` holds `{layer}` when the parameter is stacked over layers; `shape` is ours without that axis; `transposed`
    says that the tensor's axes are the other way round (torch's Linear is [out, in]).
    """

    path: str
    tensor: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.tensor

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape

    def tensors(self, num_layers: int) -> Iterator[tuple[str, int | None]]:
        """Each tensor's name with its layer (None when not stacked)."""
        if not self.stacked:
            yield self.tensor, None
            return
        for layer in range(num_layers):
            yield self.tensor.format(layer=layer), layer

    def full_shape(self, num_layers: int) -> tuple[int, ...]:
        return (num_layers, *self.shape) if self.stacked else self.shape


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


def check_finite(params: Mapping[str, Any], source: str = "model") -> None:
    """Raises `UserError` naming the first parameter (and layer, when stacked) that holds NaN or infinity."""
    for path, value in params.items():
        array = np.asarray(value)
        for layer, part in enumerate(array) if path.startswith("blocks.") else ((None, array),):
            _check_finite(part, f"{path}" if layer is None else f"{path} of layer {layer}", source)


def _check_finite(array: np.ndarray, name: str, source: str) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        bad = int(finite.size - finite.sum())
        raise UserError(f"{source}: {name} holds {bad} NaN or infinite values of {finite.size}; get sound weights")


def load(
    folder: str | Path, dtype: str | np.dtype | type | None = "float32", *, finite: bool = True
) -> tuple[DecoderConfig, dict[str, np.ndarray]]:
    """The config and all parameters of a Hugging Face folder, as arrays of `dtype` (None: as stored).

    Reads `model.safetensors` or the shards of `model.safetensors.index.json`, one tensor at a time, each exactly once
    and straight into its stacked array; files are mapped one at a time, so the peak is the parameters plus the pages of
    one file, which the system may drop. `finite=False` skips the search for NaN and infinity. Raises `UserError` for
    missing, extra, repeated, misshapen, quantised or non-finite tensors, broken files and pickles.
    """
    folder = Path(folder)
    config = read_config(folder)
    table = weights(config)
    slots = {name: (weight, layer) for weight in table for name, layer in weight.tensors(config.num_layers)}
    files = locate(folder)
    tied_head = "lm_head.weight" if config.tie_embeddings and "lm_head.weight" in files else None
    missing = [name for name in slots if name not in files]
    extra = [name for name in files if name not in slots and name != tied_head and not _BUFFERS.fullmatch(name)]
    if missing or extra:
        told = [
            f"{len(names)} {kind}: {some(names)}" for kind, names in (("missing", missing), ("extra", extra)) if names
        ]
        raise UserError(f"{folder}: the tensors are not those of its config.json: {'; '.join(told)}")

    stored = _stored_dtypes(table, files, config)
    target = {path: kept if dtype is None else _float_dtype(dtype) for path, kept in stored.items()}
    params = {w.path: np.empty(w.full_shape(config.num_layers), target[w.path]) for w in table}
    with _progress(sum(array.nbytes for array in params.values())) as progress:
        task = progress.add_task(f"reading {folder.name}", total=len(slots))
        for file in sorted(set(files.values())):
            with readers_of({file}) as readers:
                for name in (name for name in slots if files[name] == file):
                    weight, layer = slots[name]
                    out = params[weight.path] if layer is None else params[weight.path][layer]
                    _read_tensor(readers[file].get_tensor(name), out, weight.transposed, name, file, finite)
                    progress.advance(task)
    if tied_head and not _same_tensor(files, tied_head, "model.embed_tokens.weight"):
        raise UserError(f"{folder}: tie_word_embeddings is true but lm_head.weight differs; set it to false")
    return config, params


def _read_tensor(tensor: np.ndarray, out: np.ndarray, transposed: bool, name: str, file: Path, finite: bool) -> None:
    if finite:
        _check_finite(tensor, name, str(file))
    with np.errstate(over="ignore"):
        out[...] = tensor.T if transposed else tensor
    if finite and out.dtype.itemsize < tensor.dtype.itemsize and not np.isfinite(out).all():
        raise UserError(f"{file}: {name} does not fit into {out.dtype.name}; choose a wider dtype")


def _same_tensor(files: Mapping[str, Path], name: str, other: str) -> bool:
    with readers_of({files[name], files[other]}) as readers:
        return np.array_equal(readers[files[name]].get_tensor(name), readers[files[other]].get_tensor(other))


def _float_dtype(dtype: str | np.dtype | type) -> np.dtype:
    found = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if found not in _DTYPES.values():
        raise UserError(f"dtype {found.name} cannot hold weights; use float32, bfloat16, float16 or float64")
    return found


def _stored_dtypes(table: tuple[Weight, ...], files: Mapping[str, Path], config: DecoderConfig) -> dict[str, np.dtype]:
    """Each parameter's dtype in the files (the widest of its layers); shapes and kinds are checked on the way."""
    stored: dict[str, np.dtype] = {}
    with readers_of(set(files.values())) as readers:
        for weight in table:
            for name, _ in weight.tensors(config.num_layers):
                view = readers[files[name]].get_slice(name)
                shape, kind = list(view.get_shape()), view.get_dtype()
                if shape != (expected := list(weight.tensor_shape)):
                    raise UserError(f"{files[name]}: {name} has shape {shape}, but config.json asks for {expected}")
                if kind not in _DTYPES:
                    raise UserError(f"{files[name]}: {name} is {kind}; only float weights are read, not quantised ones")
                known = stored.get(weight.path, _DTYPES[kind])
                stored[weight.path] = np.promote_types(known, _DTYPES[kind])
            stored.setdefault(weight.path, np.dtype(np.float32))
    return stored


def _progress(num_bytes: int) -> Progress:
    """A progress bar on stderr, shown only for models large enough to wait for."""
    return Progress(console=Console(stderr=True), transient=True, disable=num_bytes < 1 << 30)


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

    kinds = {path: _float_dtype(params[path].dtype if dtype is None else dtype) for path in shapes}
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
    with _progress(sum(sizes)) as progress:
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
