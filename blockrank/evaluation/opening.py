"""From an evaluation's configuration to the ranker of a row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from blockrank.config import to_plain
from blockrank.errors import UserError
from blockrank.evaluation.settings import EvalConfig
from blockrank.models.loading import weights_fingerprint
from blockrank.parallel import open_mesh
from blockrank.prompts.template import PromptTemplate
from blockrank.rankers.ensemble import is_untuned
from blockrank.rankers.probe import check_ranking
from blockrank.rankers.stored_attention import kept_as
from blockrank.sources import ModelRanker, Source, build_ranker, open_source
from blockrank.training.initial import PretrainedModel, model_path


def check_models(configs: Iterable[EvalConfig]) -> None:
    """Raises one `UserError` for all rows whose checkpoint or model is not there, before any is loaded."""
    problems: list[tuple[str | None, str]] = []
    for config in configs:
        path = config.checkpoint
        if path is None and isinstance(config.model, PretrainedModel):
            path = config.model.path
        if path is None and config.model is None:
            problems.append((config.name, "give checkpoint=<training run or model folder> or model=<in configs/model>"))
        try:
            if path is not None:
                model_path(path)
        except UserError as error:
            problems.append((config.name, str(error)))
    if problems and problems[0][0] is None:
        raise UserError(problems[0][1])
    if problems:
        told = "; ".join(f"row {name!r}: {problem}" for name, problem in dict.fromkeys(problems))
        raise UserError(f"{told} (leave a row out with rows.<name>=null)")


def open_ranker(config: EvalConfig) -> ModelRanker:
    """The ranker that `checkpoint` or `model`, `ranker` and `prompt` name, on the mesh."""
    if config.checkpoint is not None:
        source = open_source(config.checkpoint, dtype=jnp.dtype(config.dtype), base=config.base)
    else:
        assert config.model is not None
        source = Source(config.model.load(config.seed), config.model.load_tokenizer())
    if config.readout is not None:
        source = source.with_readout(config.readout)
    ranker = build_ranker(
        source,
        config.ranker,
        template=None if config.prompt is None else PromptTemplate.from_config(config.prompt, "prompt"),
        preset=config.preset,
        limits=None if config.limits is None else to_plain(config.limits),
        name=config.name,
        weights=config.weights,
        mesh=open_mesh(config.mesh),
        document_store=config.document_store,
    )
    if source.settings is not None:
        check_ranking(ranker.with_alpha(0.5) if is_untuned(ranker) else ranker)
    return ranker


def ranker_identity(ranker: ModelRanker) -> dict[str, Any]:
    """What a ranker's scores of a list depend on."""
    return {
        "weights": weights_fingerprint(ranker.model),
        "dtype": str(jnp.dtype(ranker.model.dtype)),
        "prompt": ranker.encoder.fingerprint,
        "ranker": to_plain(ranker.settings),
        **kept_as(ranker),
    }
