"""What a training run is told, what it records of itself, and what it gives back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh

from blockrank.errors import UserError, at_least, between
from blockrank.parallel import LISTS
from blockrank.paths import AnyPath


@dataclass(frozen=True)
class TrainerSettings:
    """`batch_size` lists per step over all devices, in `accumulation` micro-batches, for `num_epochs` or `total_steps`.

    `on_nonfinite`: `stop` at a loss or gradient that is not finite, or `skip` that update, at most `max_skipped` times.
    `max_share_without_positive`: stop when more lists than that (of at least 100 seen) have no positive document.
    `resume`: continue from the newest checkpoint in the output folder; otherwise an earlier run there is an error.
    `exit_code_when_stopped`: the command's status after a signal stopped it and running it again continues.
    `watchdog_s`: write all threads' stacks when nothing was finished for so long (0: never), and with `watchdog_exit`
    end the process. Steps, compiling, validation and saving each count as one thing.
    """

    batch_size: int = 32
    accumulation: int = 1
    num_epochs: int = 1
    total_steps: int | None = None
    validate_every: int = 0
    log_every: int = 10
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped: int = 10
    max_share_without_positive: float = 0.1
    resume: bool = True
    exit_code_when_stopped: int = 0
    watchdog_s: float = 1800.0
    watchdog_exit: bool = False

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "accumulation", "num_epochs", "total_steps", "log_every")
        at_least(self, 0, "validate_every", "max_skipped", "watchdog_s")
        between(self, 0, 1, "max_share_without_positive")
        between(self, 0, 255, "exit_code_when_stopped")

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raises `UserError` unless every micro-batch gives all groups of devices as many lists."""
        groups = math.prod(mesh.shape[axis] for axis in LISTS)
        if self.batch_size % (self.accumulation * groups):
            raise UserError(
                f"trainer.batch_size={self.batch_size} in trainer.accumulation={self.accumulation} micro-batches does "
                f"not divide over the {groups} groups of devices of mesh.data x mesh.fsdp: make it a multiple of "
                f"{self.accumulation * groups}"
            )


@dataclass(frozen=True)
class TrainResult:
    """`status` is `finished`, or `interrupted` when a signal ended the run early; `model` has the trained weights.

    `checkpoint` is the newest (None: stopped before the first), `metrics` a local file.
    """

    status: Literal["finished", "interrupted"]
    step: int
    model: Any
    checkpoint: AnyPath | None
    metrics: Path


@dataclass(frozen=True)
class RunRecord:
    """What is saved with a run besides its state.

    `identity` decides data order and numerics: a checkpoint with another one is refused. `meta` is any JSON;
    `write_files` writes template and tokenizer.
    """

    identity: Mapping[str, Any]
    meta: Mapping[str, Any] = field(default_factory=dict)
    write_files: Callable[[Path], None] | None = None
