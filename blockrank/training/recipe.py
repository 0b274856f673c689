"""The configuration of a training run: `configs/train.yaml` as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh

from blockrank.attention.visibility import PATTERNS
from blockrank.config import to_plain
from blockrank.data.collection import CollectionConfig
from blockrank.data.sampling import SamplingConfig
from blockrank.errors import FieldError, UserError, above, at_least, between, not_empty
from blockrank.hosts import DistributedConfig
from blockrank.losses import Objective
from blockrank.models.loading import abstract_decoder, check_heads, flat_abstract
from blockrank.models.stack import Remat
from blockrank.parallel import MeshConfig, parameter_spec
from blockrank.paths import AnyPath
from blockrank.prompts.encode import PromptLimits
from blockrank.rankers.attention import AttentionSettings
from blockrank.retrieval.lists import ListsConfig
from blockrank.training.checkpoint import CheckpointSettings
from blockrank.training.initial import ModelConfig
from blockrank.training.optimizer import OptimizerSettings
from blockrank.training.profile import ProfiledSteps
from blockrank.training.settings import TrainerSettings
from blockrank.training.tracking import TrackerSettings


@dataclass(frozen=True)
class TrainingListsConfig:
    """Training lists: `num_candidates` documents, negatives from the first `depth` of the first stage."""

    split: str
    candidates: str | None = None
    depth: int = 100
    num_candidates: int = 30
    max_queries: int | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        at_least(self, 1, "depth", "max_queries")
        at_least(self, 2, "num_candidates")


@dataclass(frozen=True)
class HeldOutConfig(ListsConfig):
    """Lists to measure on, `batch_size` at a time.

    `tail`: candidates below `depth` are dropped, or kept below the re-ranked ones. `missing`: a judged query without a
    list counts 0, or is skipped.
    """

    measures: tuple[str, ...] = ("P@1", "RR@10", "nDCG@10")
    batch_size: int = 8
    tail: Literal["drop", "keep"] = "drop"
    missing: Literal["zero", "skip"] = "zero"

    def __post_init__(self) -> None:
        ListsConfig.__post_init__(self)
        at_least(self, 1, "batch_size")
        not_empty(self, "measures")

    def identity(self) -> dict[str, Any]:
        """What decides which lists are scored; how they are measured may change."""
        return {name: getattr(self, name) for name in ("split", "candidates", "with_positives", "max_queries")}


@dataclass(frozen=True)
class LossConfig:
    """`ntp_weight * L_NTP + aux_weight * L_aux` (see `losses.Objective`).

    `ntp_every`: L_NTP is on each so-many-th step only; the steps between train the attention alone and end at the score
    layer, at less than half the cost. 1, the paper's, is every step.
    """

    ntp_weight: float = 1.0
    ntp_every: int = 1
    aux_weight: float = 0.1
    temperature: float = 0.05
    remat: Remat = "none"

    def __post_init__(self) -> None:
        at_least(self, 1, "ntp_every")
        at_least(self, 0, "ntp_weight", "aux_weight")
        above(self, 0, "temperature")
        if self.ntp_weight == self.aux_weight == 0:
            raise ValueError("ntp_weight and aux_weight are both 0: nothing to train")
        if self.ntp_every > 1 and self.aux_weight == 0:
            raise FieldError("ntp_every", f"{self.ntp_every} leaves the steps between without a loss: aux_weight is 0")


@dataclass(frozen=True)
class TrainConfig:
    """`configs/train.yaml`."""

    output_dir: AnyPath
    seed: int
    dry_run: bool
    model: ModelConfig
    data: CollectionConfig
    prompt: dict[str, Any]
    ranker: AttentionSettings
    mesh: MeshConfig
    distributed: DistributedConfig
    tracker: TrackerSettings
    lists: TrainingListsConfig
    limits: PromptLimits
    loss: LossConfig
    optimizer: OptimizerSettings
    trainer: TrainerSettings
    checkpoints: CheckpointSettings
    validation: HeldOutConfig | None = None
    test: HeldOutConfig | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        between(self, 0, 2**32 - 1, "seed")
        self.profiled_steps()

    def profiled_steps(self) -> ProfiledSteps | None:
        """The steps of `profile`, `steps:10-13`. Raises `FieldError` for anything else."""
        return None if self.profile is None else ProfiledSteps.parse(self.profile)

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raises `UserError` for a mesh that model, batch or visibility do not divide over."""
        decoder = self.model.decoder_config()
        check_heads(decoder, mesh)
        for path, leaf in flat_abstract(abstract_decoder(decoder)).items():
            parameter_spec(path, leaf.shape, mesh)
        self.trainer.check_mesh(mesh)
        if mesh.shape["doc"] > 1 and not PATTERNS[self.ranker.visibility].documents_apart:
            raise UserError(f"ranker.visibility={self.ranker.visibility} lets documents see each other: set mesh.doc=1")

    def objective(self, score_layer: int) -> Objective:
        """The loss, read as the ranker reads scores."""
        loss = self.loss
        return Objective(
            score_layer=score_layer,
            visibility=self.ranker.visibility,
            ntp_weight=loss.ntp_weight,
            aux_weight=loss.aux_weight,
            temperature=loss.temperature,
            signal_aggregation=self.ranker.signal_aggregation,
            length_normalization=self.ranker.length_normalization,
            attention_backend=self.ranker.attention_backend,
            remat=loss.remat,
        )

    def identity(self) -> dict[str, Any]:
        """What decides the numbers of a run, beyond the prompt and the data order the iterator's state names."""
        sections = ("seed", "model", "data", "lists", "ranker", "loss", "optimizer")
        return {
            **{name: to_plain(getattr(self, name)) for name in sections},
            "batch_size": self.trainer.batch_size,
            "accumulation": self.trainer.accumulation,
        }
