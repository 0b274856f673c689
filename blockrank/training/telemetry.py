"""What the log says of a training step besides its losses: its pace, what of its work was useful."""

from __future__ import annotations

import time
from typing import Any

import jax

from blockrank.chips import chip_of
from blockrank.training.batches import HostBatch


class Meter:
    """Times steps. The clock runs from one finished step to the next; `restart` leaves out what lies between."""

    def __init__(self, total_steps: int, num_parameters: int):
        self._total_steps, self._num_parameters = total_steps, num_parameters
        self._last = self._pace = 0.0

    def restart(self) -> None:
        """The time since the last step was no step's: validation, a checkpoint."""
        self._last = time.perf_counter()

    def step(self, step: int, batch: HostBatch) -> dict[str, Any]:
        """What to log of `step`, which has just finished, by name."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._pace = seconds if self._pace == 0.0 else 0.9 * self._pace + 0.1 * seconds
        values = {
            "train/seconds_per_step": seconds,
            "train/tokens_per_second": batch.tokens / seconds,
            "train/eta_s": self._pace * (self._total_steps - step),
            "train/padding_share": batch.padding_share,
            "train/truncated_share": batch.truncated_share,
        }
        if (peak := peak_flops()) is not None:
            values["train/mfu"] = 6 * self._num_parameters * batch.tokens / seconds / peak
        return values


def peak_flops() -> float | None:
    """FLOP per second of all chips, None where their kind is unknown (a CPU)."""
    chip = chip_of(jax.devices()[0].device_kind)
    return None if chip is None else chip.flops * jax.device_count()
