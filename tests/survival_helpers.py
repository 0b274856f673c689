"""A trainer whose model is two arrays: what a run survives has nothing to do with what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from training_helpers import CountedBatches

from blockrank.training.batches import HostBatch
from blockrank.training.checkpoint import CheckpointSettings
from blockrank.training.optimizer import OptimizerSettings, ScheduleSettings
from blockrank.training.settings import RunRecord, TrainerSettings
from blockrank.training.tracking import read_metrics
from blockrank.training.trainer import Trainer

ADAMW = OptimizerSettings(name="adamw", schedule=ScheduleSettings(peak=1e-2, warmup_steps=1, decay="constant"))


class Line(nnx.Module):
    """y = x w + b."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.linspace(-1, 1, 512).reshape(64, 8))
        self.b = nnx.Param(jnp.zeros(8))


def small_batch(step: int) -> HostBatch:
    rng = np.random.default_rng([11, step])
    data = rng.normal(size=(4, 64)).astype(np.float32), rng.normal(size=(4, 8)).astype(np.float32)
    return HostBatch(tuple(f"q{step}-{row}" for row in range(4)), data, 256, 0.0, 0.0, 0)


def loss_fn(model: Line, data: Any) -> tuple[Any, dict[str, Any]]:
    x, y = data
    loss = jnp.mean((x @ model.w[...] + model.b[...] - y) ** 2)
    return loss, {"aux_loss": loss}


def small_trainer(folder: Any, total_steps: int = 6, **options: Any) -> Trainer:
    chosen = {
        "batches": CountedBatches(small_batch),
        "optimizer": ADAMW,
        "settings": TrainerSettings(batch_size=4),
        "record": RunRecord({"seed": 0}),
        "checkpoints": CheckpointSettings(every_steps=2),
    }
    options = {**chosen, **options}
    return Trainer(folder, Line(), options.pop("batches"), loss_fn, total_steps=total_steps, **options)


def curve(folder: Path) -> list[tuple[int, float, float, list[str]]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(r["step"], r["train/loss"], r["train/grad_norm"], r["query_ids"]) for r in rows if "train/loss" in r]
