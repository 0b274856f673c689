"""`python -m blockrank.eval`: re-rank a collection's candidates and measure the result.

    python -m blockrank.eval data=beir_folder data.path=scifact candidates=bm25.trec checkpoint=runs/train depth=100
    python -m blockrank.eval data=beir_folder data.path=scifact model=smollm2
    python -m blockrank.eval +exp=quickstart checkpoint=runs/quickstart
    python -m blockrank.eval +exp=quickstart checkpoint=runs/quickstart ranker=generative
    python -m blockrank.eval data=beir_folder data.path=scifact checkpoint=runs/train mesh=doc8

Below `output_dir`/eval each row has a folder with the TREC run, `results.json`, `per_query.jsonl` and `table.md`;
`table.md` beside them holds all rows. The same command continues a killed evaluation. Exits with status 2 on bad input.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from rich.console import Console

from blockrank.config import entry, to_plain
from blockrank.data.collection import Collection, CollectionConfig
from blockrank.errors import FieldError, UserError, at_least, between, not_empty
from blockrank.evaluation.held_out import FIRST_STAGE, HeldOut, check_row
from blockrank.evaluation.metrics import official_measures
from blockrank.models.loading import weights_fingerprint
from blockrank.models.quantize import Weights
from blockrank.parallel import MeshConfig, open_mesh
from blockrank.prompts.encode import PromptLimits
from blockrank.prompts.template import PromptTemplate
from blockrank.rankers.probe import check_ranking
from blockrank.sources import ModelRanker, RankerSettings, Source, build_ranker, open_source
from blockrank.training.initial import ModelConfig
from blockrank.training.recipe import HeldOutConfig


@dataclass(frozen=True)
class TrainingSections:
    """What an experiment says of training: `+exp=...` composes it here too, and evaluation has no use for it."""

    tracker: dict[str, Any] | None = None
    dry_run: bool = False
    lists: dict[str, Any] | None = None
    loss: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    trainer: dict[str, Any] | None = None
    checkpoints: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class EvalConfig(TrainingSections):
    """`configs/eval.yaml`.

    `checkpoint` goes before `model`; `base` is where the base model of its adapters lies, if it has moved. Readout
    settings come from `ranker`, else `preset`, else the checkpoint, else the `paper` preset; a `readout` that was found
    goes before all in score layer and signals. `name`: of the row and its
    folder, not the first stage's; null: the ranker's kind. A key about lists that is null takes the value of the
    experiment's `test`, else a default.
    """

    output_dir: Path
    name: str | None
    seed: int
    data: CollectionConfig | None = None
    checkpoint: str | None
    base: str | None = None
    model: ModelConfig | None = None
    dtype: Literal["float32", "bfloat16"]
    weights: Weights | None
    preset: str | None
    prompt: dict[str, Any] | None = None
    ranker: RankerSettings | None = None
    limits: PromptLimits | None
    readout: Path | None
    mesh: MeshConfig = field(default_factory=MeshConfig)
    split: str | None
    candidates: str | None
    depth: int | None
    with_positives: bool | None
    max_queries: int | None
    measures: tuple[str, ...] | None
    batch_size: int | None
    tail: Literal["drop", "keep"] | None
    missing: Literal["zero", "skip"] | None
    missing_documents: Literal["error", "drop"] | None
    baseline: bool
    overwrite: bool
    test: HeldOutConfig | None = None

    def __post_init__(self) -> None:
        between(self, 0, 2**32 - 1, "seed")
        at_least(self, 1, "depth", "max_queries", "batch_size")
        not_empty(self, "measures")
        if self.name is not None:
            try:
                check_row(self.name)
            except UserError as error:
                raise FieldError("name", str(error)) from error

    def held_out(self, collection: Collection) -> HeldOutConfig:
        """The lists to measure on."""
        base = self.test or HeldOutConfig(split="test", measures=official_measures(collection.name))
        given = {f.name: value for f in fields(HeldOutConfig) if (value := getattr(self, f.name)) is not None}
        return replace(base, **given)


@entry("eval", EvalConfig)
def main(config: EvalConfig) -> int:
    logging.getLogger("absl").setLevel(logging.ERROR)
    console = Console(soft_wrap=True, highlight=False)
    evaluate_ranker(config, console)
    return 0


def evaluate_ranker(config: EvalConfig, console: Console) -> HeldOut:
    """Measures the ranker, and with `baseline` the first stage, on the same lists; prints the table and the paths."""
    if config.data is None:
        raise UserError("data: which collection? Give data=beir_folder data.path=..., ir_datasets, icr, hf or pydocs")
    if config.checkpoint is None and config.model is None:
        raise UserError("give checkpoint=<training run or model folder> or model=<name in configs/model>")
    collection = config.data.open()
    settings = config.held_out(collection)
    ranker = _ranker(config)
    held_out = HeldOut(collection, settings, config.output_dir / "eval", config.seed)
    lists = {"data": to_plain(config.data), **settings.identity()}
    shared = {"overwrite": config.overwrite, "config": to_plain(config)}
    if config.baseline:
        held_out.measure_first_stage(lists, **shared)
    identity = {
        **lists,
        "weights": weights_fingerprint(ranker.model),
        "dtype": str(jnp.dtype(ranker.model.dtype)),
        "prompt": ranker.encoder.fingerprint,
        "ranker": to_plain(ranker.settings),
    }
    row = config.name or ranker.name
    held_out.measure(row, ranker, identity, **shared)
    text = held_out.write_table(held_out.folder / "table.md", FIRST_STAGE)
    console.print(text, markup=False)
    for name, path in held_out.runs.items():
        console.print(f"run ({name}): {path}", markup=False)
    return held_out


def _ranker(config: EvalConfig) -> ModelRanker:
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
    )
    if source.settings is not None:
        check_ranking(ranker)
    return ranker


if __name__ == "__main__":
    main()
