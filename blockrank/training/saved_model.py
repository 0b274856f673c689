"""The model a training run saved, with the prompt it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from blockrank.config import build
from blockrank.errors import UserError
from blockrank.models.config import DecoderConfig
from blockrank.models.decoder import Decoder
from blockrank.models.loading import abstract_decoder, cast_parameters
from blockrank.paths import AnyPath, as_path
from blockrank.prompts.template import TEMPLATE_FILE, PromptTemplate
from blockrank.prompts.tokenizer import Tokenizer, load_tokenizer
from blockrank.training.checkpoint import FOLDER, Checkpoints
from blockrank.training.optimizer import saved_params, with_saved
from blockrank.training.state import split_model


def locate(path: str | AnyPath) -> tuple[AnyPath, int | None]:
    """The folder of steps and the step that `path` means: a run folder, its `checkpoints`, or one step in it."""
    path = as_path(path)
    if path.name.isdigit() and (path / "params").exists():
        return path.parent, int(path.name)
    for folder in (path / FOLDER, path):
        if folder.is_dir() and any(child.name.isdigit() for child in folder.iterdir()):
            return folder, None
    if path.name.isdigit() and path.parent.is_dir():
        known = sorted(int(child.name) for child in path.parent.iterdir() if child.name.isdigit())
        raise UserError(f"no checkpoint at {path}; steps there: {', '.join(map(str, known)) or 'none'}")
    raise UserError(f"no checkpoint at {path}: give a run folder, its {FOLDER} folder, or one step folder")


@dataclass(frozen=True)
class CheckpointModel:
    """A model as a checkpoint holds it, with the prompt it was trained on."""

    model: Decoder
    template: PromptTemplate
    tokenizer: Tokenizer
    meta: dict[str, Any]
    path: AnyPath


def load_checkpoint_model(
    path: str | AnyPath,
    *,
    dtype: jax.typing.DTypeLike = "float32",
    param_dtype: jax.typing.DTypeLike | None = None,
    base: str | None = None,
) -> CheckpointModel:
    """The model of a run folder (its newest step), or of one step folder. Optimiser state is not read.

    `dtype` is the type of activations, `param_dtype` that of parameters (as saved if None). `meta["config"]` holds the
    training configuration. Raises `UserError` as `Checkpoints.restore` does.

    A LoRA run's model is its base with the adapters beside it (`adapters.AdapterRecord`), which `base` locates.
    """
    folder, step = locate(path)
    checkpoints = Checkpoints(folder, read_only=True)
    try:
        step = checkpoints.chosen(step)
        meta = checkpoints.restore_json("meta", step)
        config = build(DecoderConfig, meta["model"], "model")
        model = abstract_decoder(config, jnp.dtype(dtype))
        if "lora" in meta:
            from blockrank.training.adapters import AdapterRecord  # whose base may be a training run

            model = build(AdapterRecord, meta["lora"], "lora").open(base, dtype)
        graphdef, params = split_model(model)
        params = with_saved(params, checkpoints.restore_params(saved_params(params), step, as_saved=True))
        model = nnx.merge(graphdef, params)
        if param_dtype is not None:
            model = cast_parameters(model, jnp.dtype(param_dtype))
        with checkpoints.files(step) as files:
            template, tokenizer = PromptTemplate.from_yaml(files / TEMPLATE_FILE), load_tokenizer(files)
        return CheckpointModel(model, template, tokenizer, meta, checkpoints.path(step))
    finally:
        checkpoints.close()
