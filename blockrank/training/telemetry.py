"""What the log says of a run besides its losses: pace, useful work, memory, and what was predicted of them.

`docs/training.md`, "What the log holds", defines every name.
"""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from blockrank.chips import chip_of
from blockrank.training.batches import HostBatch
from blockrank.training.goodput import Finishes, Goodput, Phase, goodput_text, overlap
from blockrank.training.watchdog import Watchdog

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prediction:
    """Of one device and one step, before it runs: bytes that the compiler planned, and seconds on a known chip."""

    argument_bytes: int
    temporary_bytes: int
    total_bytes: int
    seconds: float | None = None

    def values(self) -> dict[str, float]:
        """For the log."""
        values: dict[str, float] = {
            f"predicted/{name}": getattr(self, name) for name in ("argument_bytes", "temporary_bytes", "total_bytes")
        }
        return values if self.seconds is None else values | {"predicted/seconds_per_step": self.seconds}

    def text(self) -> str:
        """For people, beside the memory that the device has."""
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        room = f" of {limit / 1e9:,.2f} GB" if limit else ""
        seconds = "" if self.seconds is None else f"; at least {self.seconds:.3g} s by the roofline"
        return (
            f"predicted for a step, per device: {self.total_bytes / 1e9:,.2f} GB{room} (arguments "
            f"{self.argument_bytes / 1e9:,.2f}, temporaries {self.temporary_bytes / 1e9:,.2f}){seconds}"
        )


class StepCosts(Protocol):
    """What a training step needs and will take."""

    def flops(self, batch: Any, full: bool) -> float:
        """Model FLOPs of the step on `batch`, the lists of this process; `full`: with the whole loss."""
        ...

    def predict(self, compiled: Any, flops: float) -> Prediction:
        """Of a compiled step; `flops` is one device's share."""
        ...


@dataclass(frozen=True)
class StepInFlight:
    """A step given to the device: when, when it will be finished, and what happened since the one before was given."""

    at: float
    finished: Future[float]
    input_wait: float
    blocked: tuple[tuple[float, float], ...]
    flops: float | None
    predicted: float | None


class Telemetry:
    """Follows a run from its creation on: phases and steps in, values for the log out.

    `devices`: how many of this process the steps run on.
    """

    def __init__(self, total_steps: int, devices: int, watchdog: Watchdog, costs: StepCosts | None = None):
        self._total_steps, self._devices, self._watchdog, self._costs = total_steps, devices, watchdog, costs
        self._goodput, self._finishes = Goodput(), Finishes(watchdog.beat)
        self._input_wait = self._pace = self._predicted_s = self._measured_s = 0.0
        self._last: float | None = None
        self._blocked: list[tuple[float, float]] = []
        self._compared = self._planned_bytes = self.steps = 0

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Something besides steps; a step's seconds leave it out, but for waiting for data."""
        start = time.perf_counter()
        with self._goodput.phase(name):
            yield
        end = time.perf_counter()
        if name == "data":
            self._input_wait = end - start
        else:
            self._blocked.append((start, end))
            self._watchdog.beat()

    def predict(self, compiled: Any, batch: HostBatch, full: bool) -> Prediction | None:
        """Logs what a compiled step will take."""
        if self._costs is None:
            return None
        predicted = self._costs.predict(compiled, self._costs.flops(batch.data, full) / self._devices)
        self._planned_bytes = max(self._planned_bytes, predicted.total_bytes)
        log.info("%s", predicted.text())
        return predicted

    def dispatched(
        self, at: float, result: Any, batch: HostBatch, full: bool, predicted: Prediction | None
    ) -> StepInFlight:
        """A step was given to the device at `at` (`time.perf_counter`); `result` is an array it will give."""
        step = StepInFlight(
            at=at,
            finished=self._finishes.watch(result),
            input_wait=self._input_wait,
            blocked=tuple(self._blocked),
            flops=None if self._costs is None else self._costs.flops(batch.data, full),
            predicted=predicted and predicted.seconds,
        )
        self._blocked.clear()
        return step

    def finished(self, number: int, batch: HostBatch, step: StepInFlight) -> dict[str, float]:
        """What to log of step `number`, which is finished."""
        end = step.finished.result()
        busy = self._goodput.stepped(step.at, end)
        since = step.at - step.input_wait if self._last is None else self._last
        seconds = end - since - sum(overlap(phase, (since, end)) for phase in step.blocked)
        self._last = end
        self.steps += 1
        self._pace = seconds if self._pace == 0.0 else 0.9 * self._pace + 0.1 * seconds
        if step.predicted is not None:
            self._compared += 1
            self._predicted_s += step.predicted
            self._measured_s += busy
        values = {
            "train/seconds_per_step": seconds,
            "train/input_wait_s": step.input_wait,
            "train/tokens_per_second": batch.tokens / seconds,
            "train/eta_s": self._pace * (self._total_steps - number),
            "train/padding_share": batch.padding_share,
            "train/truncated_share": batch.truncated_share,
            **memory(),
        }
        chip = chip_of(jax.devices()[0].device_kind)
        if step.flops is not None:
            values["train/model_flops"] = step.flops
            if chip is not None:
                values["train/mfu"] = step.flops / seconds / (chip.flops * self._devices)
        return values

    def report(self) -> tuple[dict[str, float], str]:
        """At the end of a run: values for the log, and lines for people."""
        seconds = self._goodput.seconds()
        values = {"train/goodput": seconds["step"] / seconds["wall"]}
        values |= {f"goodput/{name}_s": value for name, value in seconds.items()}
        lines = [goodput_text(seconds)]
        if self._planned_bytes:
            held = memory()
            peak = held.get("train/hbm_peak_bytes", held["train/host_peak_bytes"])
            values |= {"predicted/total_bytes": self._planned_bytes, "measured/peak_bytes": peak}
            what = "peak" if "train/hbm_peak_bytes" in held else "peak of the whole process"
            lines.append(f"memory: predicted {self._planned_bytes / 1e9:,.2f} GB, {what} {peak / 1e9:,.2f} GB")
        if self._compared:
            predicted, measured = self._predicted_s / self._compared, self._measured_s / self._compared
            values |= {"predicted/seconds_per_step": predicted, "measured/seconds_per_step": measured}
            lines.append(
                f"a step: predicted {predicted:.3g} s, took {measured:.3g} s ({measured / predicted:.2f} times)"
            )
        return values, "\n".join(lines)

    def close(self) -> None:
        self._finishes.close()
        self._watchdog.close()


def memory() -> dict[str, float]:
    """Bytes: of the fullest device of this process, where it tells (CPUs do not), and the peak of the process."""
    devices = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    unit = 1 if sys.platform == "darwin" else 1024
    values: dict[str, float] = {"train/host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    for name, key in (("train/hbm_bytes", "bytes_in_use"), ("train/hbm_peak_bytes", "peak_bytes_in_use")):
        if found := [stats[key] for stats in devices if key in stats]:
            values[name] = max(found)
    return values
