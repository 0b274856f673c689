"""What is measured: the systems, the candidate lists, how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from blockrank.attention.dispatch import resolve_backend
from blockrank.attention.visibility import PATTERNS
from blockrank.data.collection import CollectionConfig
from blockrank.errors import UserError, above, at_least, between, not_empty
from blockrank.models.config import DecoderConfig
from blockrank.packing import Packing
from blockrank.prompts.encode import PromptLimits
from blockrank.rankers.attention import AttentionSettings
from blockrank.training.initial import ModelConfig

Depth: TypeAlias = Literal["score_layer", "all"]
"""Blocks run: those before the score layer, or all of them."""

Reading: TypeAlias = Literal["attention", "decode"]
"""How the ranking is read: from attention at the score layer, or from greedily decoded tokens."""


@dataclass(frozen=True)
class System:
    """One way to rank a list. Decoding needs every block."""

    visibility: str
    reading: Reading
    packing: Packing
    backend: str
    depth: Depth

    @property
    def name(self) -> str:
        """`blockrank-packed-xla-score_layer`, `dense-decode-xla-all`."""
        how = self.packing if self.visibility == "blockrank" else self.reading
        return f"{self.visibility}-{how}-{self.backend}-{self.depth}"


@dataclass(frozen=True)
class SyntheticLists:
    """Random tokens in documents of log-normal length; MS MARCO's passages have a mean of 75.

    `mean` and `spread` (the standard deviation of the logarithm) are those before lengths are cut to `shortest` and
    `longest`.
    """

    mean: float = 75.0
    spread: float = 0.4
    shortest: int = 16
    longest: int = 160
    prefix: int = 100
    suffix: int = 64
    kind: Literal["synthetic"] = "synthetic"

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.mean <= self.longest:
            raise ValueError(f"1 <= shortest <= mean <= longest must hold, not {self.shortest}, {self.mean}, ...")
        at_least(self, 0, "spread")
        at_least(self, 1, "prefix")
        at_least(self, 2, "suffix")  # for two signal tokens


@dataclass(frozen=True)
class CollectionLists:
    """Candidates of a collection's first query that has enough of them; the model's tokenizer reads them."""

    split: str = "test"
    candidates: str | None = None
    prompt: str = "paper"
    limits: PromptLimits = field(default_factory=PromptLimits)
    kind: Literal["collection"] = "collection"


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """`configs/bench.yaml`.

    A cell is one system at one length of list. Cells of one length run interleaved, in processes of their own, as many
    together as fit `memory_gb` (0: one by one). A cell is repeated until it has both `repetitions` and
    `seconds_per_cell`, at most `max_repetitions` times; one whose first repetition takes longer than
    `longest_repetition_s` is reported with that one, and its system gets no longer list.
    """

    output_dir: Path
    seed: int
    model: ModelConfig
    data: CollectionConfig | None = None
    lists: SyntheticLists | CollectionLists
    candidates: tuple[int, ...]
    backends: tuple[str, ...]
    packings: tuple[Packing, ...]
    dense: tuple[Reading, ...]
    depths: tuple[Depth, ...]
    dense_backend: str
    score_layer: int | None
    row_length: int
    chunk_length: int
    suffix_offset: int
    decode_tokens: int
    repetitions: int
    max_repetitions: int
    seconds_per_cell: float
    longest_repetition_s: float
    max_dense_candidates: int | None
    memory_gb: float
    cell_timeout_s: float

    def __post_init__(self) -> None:
        between(self, 0, 2**32 - 1, "seed")
        not_empty(self, "candidates", "depths")
        if min(self.candidates) < 1 or len(set(self.candidates)) < len(self.candidates):
            raise UserError(f"candidates={list(self.candidates)}: give different numbers of documents, from 1 on")
        at_least(self, 1, "repetitions", "decode_tokens", "row_length", "chunk_length", "suffix_offset")
        at_least(self, 0, "score_layer", "max_dense_candidates", "seconds_per_cell", "memory_gb")
        above(self, 0, "longest_repetition_s", "cell_timeout_s")
        if self.max_repetitions < self.repetitions:
            raise UserError(f"max_repetitions={self.max_repetitions} is below repetitions={self.repetitions}")
        for name in {*self.backends, self.dense_backend} - {"auto"}:
            resolve_backend(name)
        if isinstance(self.lists, CollectionLists) and self.data is None:
            raise UserError("lists.kind=collection: which one? Give data=beir_folder data.path=..., or pydocs")
        if not self.systems():
            raise UserError("no system is left: give backends and packings, or dense")

    def systems(self) -> list[System]:
        """Every system asked for, the slowest kinds first."""
        dense = [
            System("dense", reading, "packed", self.dense_backend, depth)
            for reading in reversed(get_args(Reading))
            for depth in reversed(get_args(Depth))
            if reading in self.dense and depth in self.depths and not (reading == "decode" and depth == "score_layer")
        ]
        sparse = [
            System("blockrank", "attention", packing, backend, depth)
            for depth in reversed(get_args(Depth))
            for packing in reversed(get_args(Packing))
            for backend in self.backends
            if packing in self.packings and depth in self.depths
        ]
        return dense + sparse

    def measured(self, system: System, candidates: int) -> bool:
        """Whether a system is to be run on lists of this length."""
        limit = self.max_dense_candidates if system.visibility == "dense" else None
        return limit is None or candidates <= limit

    def settings(self, system: System) -> AttentionSettings:
        """The ranker's settings that a system stands for."""
        return AttentionSettings(
            score_layer=self.score_layer,
            suffix_offset=self.suffix_offset,
            visibility=PATTERNS[system.visibility].name,
            packing=system.packing,
            row_length=self.chunk_length if system.packing == "chunked" else self.row_length,
            attention_backend=system.backend,
        )

    def layer_of(self, decoder: DecoderConfig) -> int:
        return self.settings(self.systems()[0]).layer_of(decoder)
