"""Adapters and the base they belong to: which model a LoRA run starts from, and how its checkpoint finds it again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from blockrank.errors import UserError
from blockrank.models.decoder import Decoder
from blockrank.models.loading import weights_fingerprint
from blockrank.models.lora import LoraSettings, add_adapters
from blockrank.models.quantize import quantize_model
from blockrank.parallel import host_memory
from blockrank.training.initial import EMBEDDED, ModelConfig, PretrainedModel, model_path


@dataclass(frozen=True)
class AdapterRecord:
    """What a checkpoint of adapters needs to be a model again: their settings, and their base by origin and weights."""

    settings: LoraSettings
    model: ModelConfig
    seed: int
    fingerprint: str

    def open(self, base: str | None, dtype: jax.typing.DTypeLike) -> Decoder:
        """The base with new adapters, activations in `dtype`; from the path `base` where it is given, and of it as many
        blocks as the run had.

        Raises `UserError` when the base is not there, or has other weights than the adapters were trained beside.
        """
        model = self.model
        if base is not None:
            model = PretrainedModel(base, num_layers=model.num_layers if isinstance(model, PretrainedModel) else None)
        model = replace(model, dtype=jnp.dtype(dtype).name)
        try:
            loaded, fingerprint = _load_base(model, self.settings, self.seed)
        except UserError as error:
            raise UserError(f"the base model of these adapters: {error} (`base` says where it is)") from error
        if fingerprint != self.fingerprint:
            where = model.path if isinstance(model, PretrainedModel) else "this random model"
            raise UserError(
                f"{where} is not the base model of these adapters: its weights are not those they were trained beside; "
                "give the model of that run as `base`"
            )
        return add_adapters(loaded, self.settings, self.seed)


def starting_model(model: ModelConfig, lora: LoraSettings | None, seed: int) -> tuple[Decoder, AdapterRecord | None]:
    """The model to train: with float32 parameters; or with `lora` a base of its type, beside it float32 adapters."""
    if lora is None:
        return model.load(seed), None
    base, fingerprint = _load_base(model, lora, seed)
    if isinstance(model, PretrainedModel) and model.path is not None and model.path != EMBEDDED:
        model = replace(model, path=str(model_path(model.path)))
    return add_adapters(base, lora, seed), AdapterRecord(lora, model, seed, fingerprint)


def _load_base(model: ModelConfig, settings: LoraSettings, seed: int) -> tuple[Decoder, str]:
    """The base as it is kept, and the fingerprint of its weights as they were read.

    What becomes int8 is read into the host's memory: a device never holds more than the codes.
    """
    if settings.base != "int8":
        base = model.load(seed, settings.loaded_as)
        return base, weights_fingerprint(base)
    with host_memory():
        base = model.load(seed, settings.loaded_as)
        fingerprint = weights_fingerprint(base)
        graph, state = nnx.split(quantize_model(base))
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state)), fingerprint
