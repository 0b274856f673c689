"""What a run does about data it cannot learn from: losses that are not finite, lists without a positive document."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from blockrank.errors import UserError
from blockrank.training.batches import HostBatch

log = logging.getLogger(__name__)


@dataclass
class Health:
    """Counts lists, and says when a run ends; the settings are `TrainerSettings`'s.

    `seen` and `without_positive` (lists so far, of these with no positive) are saved and restored with a run.
    """

    on_nonfinite: Literal["stop", "skip"]
    max_skipped: int
    max_share_without_positive: float
    seen: int = 0
    without_positive: int = 0

    def count(self, batch: HostBatch) -> None:
        """Raises `UserError` if too many of the lists so far have no positive document."""
        self.seen += len(batch.query_ids)
        self.without_positive += batch.without_positive
        if self.seen >= 100 and self.without_positive / self.seen > self.max_share_without_positive:
            raise UserError(
                f"{self.without_positive} of {self.seen} training lists have no positive document, more than "
                f"trainer.max_share_without_positive={self.max_share_without_positive}: check the qrels"
            )

    def not_finite(
        self, folder: Path, step: int, batch: HostBatch, position: Any, metrics: Mapping[str, float]
    ) -> None:
        """Writes the batch of a step whose loss or gradient is not finite into `not_finite_step_<n>.json`, with the
        `position` of the data iterator before it. Raises `UserError` unless such updates are skipped."""
        what = "loss" if not math.isfinite(metrics["loss"]) else "gradient norm"
        file = folder / f"not_finite_step_{step}.json"
        values = {name: str(value) for name, value in metrics.items()}
        record = {"step": step, "query_ids": batch.query_ids, "iterator": position, **values}
        try:
            if jax.process_index() == 0:
                file.write_text(json.dumps(record, indent=1))
        except OSError as error:
            log.warning("%s: %s; it would hold %s", file, error.strerror, json.dumps(record))
        skipped = int(metrics["skipped"])
        if self.on_nonfinite == "skip" and skipped <= self.max_skipped:
            log.warning("step %d: %s is not finite, update skipped (%d so far); see %s", step, what, skipped, file)
            return
        advice = "lower optimizer.schedule.peak, check these lists, or set trainer.on_nonfinite=skip"
        if self.on_nonfinite == "skip":
            advice = f"more than trainer.max_skipped={self.max_skipped} updates were skipped"
        raise UserError(f"step {step}: the {what} is not finite (query ids in {file}): {advice}")
