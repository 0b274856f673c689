"""`python -m blockrank.store`: read documents once and keep what they leave behind, so that ranking runs queries only.

    python -m blockrank.store data=beir_folder data.path=scifact checkpoint=runs/cacheable store=stores/scifact
    python -m blockrank.store data=pydocs checkpoint=runs/cacheable documents=lists split=test store=stores/pydocs

The whole collection is read, or with `documents=lists` what candidate lists hold. Prints the size of what is kept, and
it is large. Killed, the same command continues. Exits with status 2 on bad input.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from blockrank.config import entry, to_plain
from blockrank.data.collection import Collection, CollectionConfig
from blockrank.data.shards import ALL, Part
from blockrank.errors import UserError, at_least, between
from blockrank.models.decoder import TruncatedDecoder
from blockrank.models.quantize import Weights
from blockrank.prompts.encode import PromptLimits
from blockrank.prompts.template import PromptTemplate
from blockrank.rankers.attention import AttentionRanker, AttentionSettings
from blockrank.rankers.document_store import DocumentReader, StoreReport, StoreSettings, write_store
from blockrank.retrieval.lists import ListsConfig, open_lists, select_judged
from blockrank.sources import Source, make_ranker, open_source
from blockrank.training.initial import ModelConfig
from blockrank.types import Document


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """`configs/store.yaml`.

    `kept`: how documents are kept in the folder `store`. `documents`: those of the collection, or of the candidate
    lists that the keys below name; these, the model and the prompt are `blockrank.eval`'s.
    """

    store: Path | None
    kept: StoreSettings
    documents: Literal["all", "lists"]
    part: str | None
    seed: int
    data: CollectionConfig | None = None
    checkpoint: str | None
    base: str | None
    model: ModelConfig | None = None
    dtype: Literal["float32", "bfloat16"]
    weights: Weights | None
    preset: str | None
    prompt: dict[str, Any] | None = None
    ranker: AttentionSettings | None = None
    limits: PromptLimits | None
    split: str | None
    candidates: str | None
    depth: int | None
    with_positives: bool | None
    max_queries: int | None
    missing_documents: Literal["error", "drop"] | None

    def __post_init__(self) -> None:
        between(self, 0, 2**32 - 1, "seed")
        at_least(self, 1, "depth", "max_queries")

    def lists_config(self) -> ListsConfig:
        """The lists whose documents are kept."""
        given = {f.name: value for f in fields(ListsConfig) if (value := getattr(self, f.name)) is not None}
        return replace(ListsConfig(split="test"), **given)


@entry("store", StoreConfig)
def main(config: StoreConfig) -> int:
    logging.getLogger("absl").setLevel(logging.ERROR)
    print(store_documents(config))
    return 0


def store_documents(config: StoreConfig) -> StoreReport:
    """Fills the store; raises `UserError` for what is missing or does not fit before a document is read."""
    if config.store is None:
        raise UserError("store: where to? Give store=<folder>")
    if config.data is None:
        raise UserError("data: which collection? Give data=beir_folder data.path=..., ir_datasets, icr, hf or pydocs")
    if config.checkpoint is None and config.model is None:
        raise UserError("give checkpoint=<training run or model folder> or model=<name in configs/model>")
    part = ALL if config.part is None else Part.parse(config.part)
    collection = config.data.open()
    ranker = _ranker(config)
    assert isinstance(ranker.model, TruncatedDecoder)
    reader = DocumentReader(ranker.model, ranker.encoder, ranker.settings, config.kept)
    ids = None if config.documents == "all" else _listed(collection, config.lists_config())
    total = len(collection.documents) if ids is None else len(ids)
    return write_store(config.store, reader, _documents(collection, ids), total=total, part=part)


def _listed(collection: Collection, config: ListsConfig) -> list[str]:
    """Ids of the documents of all lists, each once."""
    lists, _ = select_judged(open_lists(collection, config), collection.qrels(config.split), config.max_queries)
    return list(dict.fromkeys(name for index in range(len(lists)) for name in lists.ranking(index)))


def _documents(collection: Collection, ids: list[str] | None) -> Iterator[Document]:
    return collection.documents.scan() if ids is None else (collection.documents[i] for i in ids)


def _ranker(config: StoreConfig) -> AttentionRanker:
    if config.checkpoint is not None:
        source = open_source(config.checkpoint, dtype=jnp.dtype(config.dtype), base=config.base)
    else:
        assert config.model is not None
        source = Source(config.model.load(config.seed), config.model.load_tokenizer())
    return make_ranker(
        source,
        template=None if config.prompt is None else PromptTemplate.from_config(config.prompt, "prompt"),
        preset=config.preset,
        settings=None if config.ranker is None else to_plain(config.ranker),
        limits=None if config.limits is None else to_plain(config.limits),
        weights=config.weights,
    )


if __name__ == "__main__":
    main()
