"""What training steps need and will take: the numerator of `train/mfu`, and a step's memory and time before it runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import jax

from blockrank.chips import Chip, chip_of
from blockrank.costs.report import ProgramCosts, memory_costs, work_costs
from blockrank.costs.step_flops import Counts, StepFlops
from blockrank.losses import Objective, TrainingBatch
from blockrank.models.config import DecoderConfig
from blockrank.training.optimizer import Params, Trainable
from blockrank.training.telemetry import Prediction

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingCosts:
    """The `StepCosts` of a run: of steps with the whole loss, and of those between them (`loss.ntp_every`)."""

    full: StepFlops
    between: StepFlops
    visibility: str
    chip: Chip | None

    @staticmethod
    def of(
        config: DecoderConfig, params: Params, trainable: Trainable, objective: Objective, between: Objective
    ) -> TrainingCosts:
        """On the chip that is present, if it is known."""
        full, other = (StepFlops.of(config, params, trainable, each) for each in (objective, between))
        return TrainingCosts(full, other, objective.visibility, chip_of(jax.devices()[0].device_kind))

    def flops(self, batch: TrainingBatch, full: bool) -> float:
        return (self.full if full else self.between).total(Counts.of(batch.layout, self.visibility))

    def predict(self, compiled: Any, flops: float) -> Prediction:
        return predict(compiled, self.chip, flops)


def predict(compiled: Any, chip: Chip | None, flops: float) -> Prediction:
    """Memory as the compiler planned it, and on a known chip the seconds of the roofline (`ProgramCosts.seconds`).

    `flops`: model FLOPs of one device's share; they stand in for a program's products where its text does not show them
    (calls of a GPU's libraries).
    """
    held: dict[str, Any] = memory_costs(compiled)
    work = {} if chip is None else _work(compiled, flops)
    costs = ProgramCosts("step", "", 0, 0, flops, flops, 0.0, **held, **work)
    seconds = costs.seconds(chip) if chip is not None and work else None
    return Prediction(costs.argument_bytes, costs.temporary_bytes, costs.total_bytes, seconds)


def _work(compiled: Any, flops: float) -> dict[str, Any]:
    try:
        work = work_costs(compiled)
    except ValueError as error:
        log.info("no time is predicted, the compiled program cannot be read: %s", error)
        return {}
    return work | {"flops": max(work["flops"], flops)}
