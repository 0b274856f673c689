"""The configuration of an analysis: `configs/analyze.yaml` as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from blockrank.analysis.measures import ListMeasure
from blockrank.data.collection import CollectionConfig
from blockrank.errors import FieldError, UserError, at_least, between, not_empty
from blockrank.evaluation.settings import TrainingSections
from blockrank.prompts.encode import PromptLimits
from blockrank.rankers.attention import AttentionSettings
from blockrank.training.initial import ModelConfig
from blockrank.training.recipe import HeldOutConfig

Part = Literal["signals", "sparsity", "maps", "steps"]


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig(TrainingSections):
    """`configs/analyze.yaml`.

    The model, prompt and readout are found as an evaluation finds them. A key about lists that is null takes the value
    of the experiment's `validation`, else a default.
    """

    output_dir: Path
    seed: int
    overwrite: bool
    apply: Literal["better", "always"] | None
    data: CollectionConfig | None = None
    checkpoint: str | None
    base: str | None
    model: ModelConfig | None = None
    dtype: Literal["float32", "bfloat16"]
    preset: str | None
    prompt: dict[str, Any] | None = None
    ranker: AttentionSettings | None = None
    limits: PromptLimits | None
    split: str | None
    candidates: str | None
    depth: int | None
    with_positives: bool | None
    max_queries: int | None
    missing: Literal["zero", "skip"] | None
    test: dict[str, Any] | None = None
    missing_documents: Literal["error", "drop"] | None
    parts: tuple[Part, ...]
    measure: str
    max_signals: int
    samples: int
    sparsity_lists: int
    map_layers: tuple[int, int] | None
    map_query: str | None
    validation: HeldOutConfig | None = None

    def __post_init__(self) -> None:
        between(self, 0, 2**32 - 1, "seed")
        at_least(self, 1, "depth", "max_queries", "max_signals", "samples", "sparsity_lists")
        not_empty(self, "parts")
        if self.map_layers is not None and not 0 <= self.map_layers[0] <= self.map_layers[1]:
            raise FieldError("map_layers", f"{list(self.map_layers)} must be [first, last], 0-based")
        if self.apply and "signals" not in self.parts:
            raise FieldError("apply", f"{self.apply}, but parts has no `signals`: there would be nothing to apply")
        try:
            ListMeasure.parse(self.measure)
        except UserError as error:
            raise FieldError("measure", str(error)) from error

    def held_out(self) -> HeldOutConfig:
        """The lists to read."""
        base = self.validation or HeldOutConfig(split="validation", max_queries=200)
        given = {f.name: value for f in fields(HeldOutConfig) if (value := getattr(self, f.name, None)) is not None}
        return replace(base, **given)
