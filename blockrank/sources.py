"""A ranker from any model: a training run, a Hugging Face folder, a GGUF file, or the embedded SmolLM2."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.sharding import Mesh

from blockrank.config import to_plain
from blockrank.errors import UserError
from blockrank.models.decoder import Decoder, check_score_layer
from blockrank.models.loading import cast_parameters, load_decoder
from blockrank.models.quantize import check_weights, quantize_model
from blockrank.paths import AnyPath, fetched
from blockrank.prompts.encode import PromptEncoder, PromptLimits
from blockrank.prompts.template import TEMPLATE_FILE, PromptTemplate
from blockrank.prompts.tokenizer import Tokenizer, load_tokenizer
from blockrank.rankers.attention import PRESETS, AttentionRanker, AttentionSettings
from blockrank.rankers.ensemble import EnsembleRanker, EnsembleSettings
from blockrank.rankers.fallback import FallbackRanker, FallbackSettings
from blockrank.rankers.generative import GenerativeRanker, GenerativeSettings
from blockrank.rankers.listwise import ListwiseRanker, ListwiseSettings
from blockrank.rankers.reading import ReadingSettings
from blockrank.rankers.readout_file import FoundReadout
from blockrank.rankers.stored_attention import StoredAttentionRanker
from blockrank.training.export import RankingRecord
from blockrank.training.initial import check_vocabulary, is_model_file, model_path
from blockrank.training.saved_model import load_checkpoint_model

log = logging.getLogger(__name__)

RankerSettings: TypeAlias = (
    AttentionSettings | GenerativeSettings | ListwiseSettings | FallbackSettings | EnsembleSettings
)
"""What a ranker over a model is made from; its `kind` says which ranker."""
ModelRanker: TypeAlias = AttentionRanker | GenerativeRanker | ListwiseRanker | FallbackRanker | EnsembleRanker
RANKERS: dict[str, type[RankerSettings]] = {
    "attention": AttentionSettings,
    "generative": GenerativeSettings,
    "listwise": ListwiseSettings,
    "fallback": FallbackSettings,
    "ensemble": EnsembleSettings,
}
"""The kinds of rankers, and the settings of each."""
LISTWISE_PROMPTS = {"permutation": "rank_zephyr", "logits": "first"}
"""The prompt template of each mode of the listwise ranker where none is named."""


@dataclass(frozen=True)
class Source:
    """A model with what is known of how it is to be prompted and read.

    A `readout` that was found for it goes before all else in score layer and signals.
    """

    model: Decoder
    tokenizer: Tokenizer
    template: PromptTemplate | None = None
    settings: AttentionSettings | None = None
    limits: PromptLimits | None = None
    readout: FoundReadout | None = None

    def with_readout(self, path: str | Path) -> Source:
        """The same with the readout in a `readout.yaml`, which is logged. Raises `UserError` for another file."""
        found = FoundReadout.read(path)
        log.info("readout %s: score_layer=%d, signals %s", path, found.score_layer, found.signals)
        check_score_layer(found.score_layer, self.model.config)
        return replace(self, readout=found)


def open_source(path_or_name: str | AnyPath, *, dtype: jnp.dtype = jnp.float32, base: str | None = None) -> Source:
    """The model at `path_or_name`, with weights and activations in `dtype`.

    A training run's (or one of its steps') prompt, readout settings and limits come along, also those of a run exported
    as a Hugging Face folder; other sources know none. `base`: where a LoRA run's base lies, if it has moved.
    Raises `UserError` when there is nothing to load.
    """
    path = model_path(str(path_or_name))
    if is_model_file(path):
        with fetched(path) as local:
            return _open_files(local, dtype)
    found = load_checkpoint_model(path, dtype=dtype, param_dtype=dtype, base=base)
    record = RankingRecord.of_run(found.meta)
    return Source(found.model, found.tokenizer, found.template, record.ranker, record.limits)


def _open_files(path: Path, dtype: jnp.dtype) -> Source:
    model = load_decoder(path, dtype=dtype, param_dtype=dtype)
    saved = path / TEMPLATE_FILE
    template = PromptTemplate.from_yaml(saved) if saved.is_file() else None
    record = RankingRecord.read(path)
    settings, limits = (None, None) if record is None else (record.ranker, record.limits)
    return Source(model, load_tokenizer(path), template, settings, limits)


def build_ranker(
    source: Source,
    settings: RankerSettings | None = None,
    *,
    mesh: Mesh | None = None,
    document_store: str | Path | None = None,
    **options: Any,
) -> ModelRanker:
    """The ranker that `settings` asks for; None: an attention ranker as `make_ranker` makes it of the source alone.

    `options`: `template`, `preset`, `limits`, `name` and `weights` of `make_ranker`; for other kinds also `reading`,
    fields of their `ReadingSettings` that go before those in `settings`. Raises `UserError` for a mesh where the kind
    runs on one device, and for a document store where it is no attention ranker.
    """
    if isinstance(settings, AttentionSettings | None):
        given = None if settings is None else to_plain(settings)
        return make_ranker(source, settings=given, mesh=mesh, document_store=document_store, **options)
    if document_store is not None:
        raise UserError(f"document_store: ranker={settings.kind} reads documents itself; leave it out")
    if mesh is not None:
        raise UserError(
            f"ranker={settings.kind} runs on one device and takes no mesh: set mesh=single, or leave it out"
        )
    return _BUILDERS[settings.kind](source, settings, **options)


def make_ranker(
    source: Source,
    *,
    template: PromptTemplate | None = None,
    preset: str | None = None,
    settings: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    name: str | None = None,
    weights: str | None = None,
    mesh: Mesh | None = None,
    document_store: str | Path | None = None,
) -> AttentionRanker:
    """An attention ranker over a source, on the devices of `mesh` or on one.

    A readout setting comes from `settings`, else from `preset` if one is named, else from the source, else from the
    `paper` preset. A preset names no limits: these come from `limits`, else the source. The template is `template`,
    else the source's, else the preset's. The source's `readout` goes before all. `weights` of `int8` holds the kernels
    in eight bits. With a `document_store` (`blockrank.store`) documents are read from there. Raises `UserError` for a
    tokenizer with ids the model does not embed, for a prompt that is not the readout's, and for a store made otherwise.
    """
    read = replace(_readout(source, preset), **(settings or {}))
    if source.readout is not None:
        read = replace(read, score_layer=source.readout.score_layer)
    encoder = _encoder(source, template, preset, limits)
    model, name = _model(source, weights), name or "attention"
    if document_store is None:
        return AttentionRanker(model, encoder, read, name, mesh)
    if mesh is not None:
        raise UserError("document_store: ranking with a store runs on one device; leave mesh out (mesh=single)")
    return StoredAttentionRanker(model, encoder, read, document_store, name)


def make_generative_ranker(
    source: Source,
    settings: GenerativeSettings | None = None,
    *,
    reading: Mapping[str, Any] | None = None,
    template: PromptTemplate | None = None,
    preset: str | None = None,
    limits: Mapping[str, Any] | None = None,
    name: str | None = None,
    weights: str | None = None,
) -> GenerativeRanker:
    """A ranker that decodes, over a source. How prompts are read comes from the mapping `reading`, else from
    `settings.reading`, else from where `make_ranker` takes it."""
    settings, readout = settings or GenerativeSettings(), _readout(source, preset)
    read = settings.reading or ReadingSettings(**{f.name: getattr(readout, f.name) for f in fields(ReadingSettings)})
    settings = replace(settings, reading=replace(read, **(reading or {})))
    encoder = _encoder(source, template, preset, limits)
    return GenerativeRanker(_model(source, weights), encoder, settings, name or "generative")


def make_listwise_ranker(
    source: Source,
    settings: ListwiseSettings | None = None,
    *,
    reading: Mapping[str, Any] | None = None,
    template: PromptTemplate | None = None,
    preset: str | None = None,
    limits: Mapping[str, Any] | None = None,
    name: str | None = None,
    weights: str | None = None,
) -> ListwiseRanker:
    """A ranker that orders windows, over a source; the mapping `reading` goes before `settings.reading`.

    The template is `template`, else the one in `LISTWISE_PROMPTS`, without a chat where the tokenizer has no chat
    template: a training run's own template asks another question. Raises `UserError` for a preset or a found readout,
    which say how attention is read.
    """
    if preset is not None or source.readout is not None:
        key = "readout" if preset is None else f"preset={preset!r}"
        raise UserError(f"{key} says how attention is read, and ranker=listwise reads none: leave it out")
    settings = settings or ListwiseSettings()
    settings = replace(settings, reading=replace(settings.reading, **(reading or {})))
    if template is None:
        template = PromptTemplate.from_yaml(LISTWISE_PROMPTS[settings.mode])
        if not source.tokenizer.chat_template:
            log.warning("the tokenizer has no chat template: the prompt %s is given without a chat", template.name)
            template = replace(template, chat=False)
    encoder = _encoder(source, template, None, limits)
    return ListwiseRanker(_model(source, weights), encoder, settings, name or "listwise")


def make_combined_ranker(
    source: Source,
    settings: FallbackSettings | EnsembleSettings,
    *,
    reading: Mapping[str, Any] | None = None,
    template: PromptTemplate | None = None,
    preset: str | None = None,
    limits: Mapping[str, Any] | None = None,
    name: str | None = None,
    weights: str | None = None,
) -> FallbackRanker | EnsembleRanker:
    """Both readouts of one set of weights. Prompts and attention are read as the mapping `reading` says, else
    `settings.attention`, else as `make_ranker` takes it; decoding reads the same prompts."""
    read = replace(settings.attention or _readout(source, preset), **(reading or {}))
    if source.readout is not None:
        read = replace(read, score_layer=source.readout.score_layer)
    encoder = _encoder(source, template, preset, limits)
    model = _model(source, weights)
    model = cast_parameters(model, model.dtype)
    decoding = ReadingSettings(**{f.name: getattr(read, f.name) for f in fields(ReadingSettings)})
    attention = AttentionRanker(model, encoder, read, truncate=False)
    generative = GenerativeRanker(model, encoder, GenerativeSettings(settings.beams, decoding))
    if isinstance(settings, FallbackSettings):
        return FallbackRanker(attention, generative, settings, name or settings.kind)
    return EnsembleRanker(attention, generative, settings, name or settings.kind)


_BUILDERS: dict[str, Callable[..., ModelRanker]] = {
    "generative": make_generative_ranker,
    "listwise": make_listwise_ranker,
    "fallback": make_combined_ranker,
    "ensemble": make_combined_ranker,
}
"""What makes the rankers that run on one device of a source and their settings."""


def _model(source: Source, weights: str | None) -> Decoder:
    check_weights(weights)
    return source.model if weights is None else quantize_model(source.model)


def _readout(source: Source, preset: str | None) -> AttentionSettings:
    """How scores are read where nothing more particular is said."""
    if preset is not None and preset not in PRESETS:
        raise UserError(f"preset={preset!r} is unknown: choose one of {', '.join(PRESETS)}")
    read = source.settings or AttentionSettings(**PRESETS["paper"])
    if source.readout is not None:
        read = replace(read, score_layer=source.readout.score_layer)
    return replace(read, **(PRESETS[preset] if preset else {}))


def _encoder(
    source: Source, template: PromptTemplate | None, preset: str | None, limits: Mapping[str, Any] | None
) -> PromptEncoder:
    check_vocabulary(source.model.config, source.tokenizer)
    limit = replace(source.limits or PromptLimits(), **(limits or {}))
    template = template or source.template or PromptTemplate.from_yaml("release" if preset == "release" else "paper")
    if source.readout is not None:
        template = source.readout.of(template)
    return PromptEncoder(template, source.tokenizer, limit)
